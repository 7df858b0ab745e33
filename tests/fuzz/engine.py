"""Runs hypothesis on one kind of fuzzed input, in processes with limited memory and time.

This module is independent of the inputs. The module of each kind defines a `Fuzzer`.
"""

import os
import re
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import hypothesis
from hypothesis import HealthCheck, Phase, given, reproduce_failure, settings, strategies
from hypothesis import seed as with_seed
from hypothesis.strategies import DrawFn

from tests.fuzz.judging import Verdict, limit_memory, time_limit
from tests.fuzz.values import Choices
from tests.harness import launch_on_ranks

# Each run leaves some threads of torch in the process, so the number of examples per process is limited.
_EXAMPLES_PER_PROCESS = 200
# Longer than the 300 s for which hypothesis shrinks a failure.
_PATIENCE_SECONDS = 900.0
_FRAMES_SHOWN = 12
# The harness sets these variables as a launcher does, but examples run as if without a launcher.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Fuzzer(Protocol):
    """A kind of input. `draw` builds an input, whose files it writes to the example's folder; `check` tests it.

    `check` passes the input to the program. It raises AssertionError for a wrong result, and the program's error if the
    program crashes.
    """

    def draw(self, choices: Choices, folder: Path) -> Any: ...
    def check(self, case: Any, folder: Path) -> Verdict: ...


# Builds a fuzzer in the process that runs it. The processes of one call share the folder.
FuzzerFactory = Callable[[Path], Fuzzer]


@dataclass
class Tally:
    """Results of many examples. failures: reports with the shrunk input, the error and the blob."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{self.verdicts[verdict]} {verdict.value}" for verdict in Verdict)
        return "\n\n".join([f"{counts}, {len(self.failures)} failed", *self.failures])


class _Example:
    """An input and its folder, with a short repr for hypothesis."""

    def __init__(self, case: Any, folder: Path) -> None:
        self.case, self.folder = case, folder

    def __repr__(self) -> str:
        return "(the input above)"


def fuzz(factory: FuzzerFactory, *, count: int, seed: int = 0) -> Tally:
    """Checks `count` examples, which depend only on `seed`, and stops after the first process with failures."""
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="fuzz-shared-") as shared:
        for first in range(0, count, _EXAMPLES_PER_PROCESS):
            some = min(_EXAMPLES_PER_PROCESS, count - first)
            part = _in_process(_explore, factory, Path(shared), some, f"{seed} {first}")
            tally.verdicts += part.verdicts
            tally.failures += part.failures
            if tally.failures:
                break
    return tally


def reproduce(factory: FuzzerFactory, *, blob: str) -> Tally:
    """Checks the example of a reported blob. Raises hypothesis' DidNotReproduce if the example does not fail."""
    with tempfile.TemporaryDirectory(prefix="fuzz-shared-") as shared:
        return _in_process(_repeat, factory, Path(shared), blob)


def _in_process(run: Callable[..., Tally], *args: Any) -> Tally:
    """Returns the tally of `run`. If the process dies or hangs, its current example counts as a failure."""
    outcome = launch_on_ranks(run, 1, *args, backend=None, timeout=_PATIENCE_SECONDS)[0]
    if outcome.value is not None:
        return outcome.value
    begun = outcome.stderr.rpartition("example: ")[2]
    return Tally(
        failures=[f"the process ended at this example, which is not shrunk: {outcome.error!r}\n{begun[:6000]}"]
    )


# Functions that run in the process of the examples.


def _explore(factory: FuzzerFactory, shared: Path, count: int, seed: str) -> Tally:
    return _run(factory, shared, with_seed(seed), count=count)


def _repeat(factory: FuzzerFactory, shared: Path, blob: str) -> Tally:
    return _run(factory, shared, reproduce_failure(hypothesis.__version__, blob.encode()), count=1)


def _run(factory: FuzzerFactory, shared: Path, decorate: Callable[[Any], Any], *, count: int) -> Tally:
    for name in _LAUNCHER:
        os.environ.pop(name, None)
    tally = Tally()
    fuzzer = factory(shared)
    limit_memory()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:

        @decorate
        @_settings(count)
        @given(_examples(fuzzer, Path(folder)))
        def every_input_is_used_right_or_refused(example: _Example) -> None:
            # The parent reads this line if the process dies.
            os.write(2, f"example: {example.case}\n".encode(errors="replace"))
            try:
                with time_limit():
                    tally.verdicts[fuzzer.check(example.case, example.folder)] += 1
            except BaseException as error:
                error.add_note(f"input: {example.case}")
                raise
            finally:
                shutil.rmtree(example.folder, ignore_errors=True)

        attempt = _Attempt()
        with attempt:
            every_input_is_used_right_or_refused()
    if attempt.error is not None:
        tally.failures = _reports(attempt.error)
    return tally


def _settings(count: int) -> settings:
    """Returns settings that do not depend on the environment, since hypothesis has a different profile with CI=true."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=True,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        report_multiple_bugs=True,
        verbosity=hypothesis.Verbosity.normal,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@strategies.composite
def _examples(draw: DrawFn, fuzzer: Fuzzer, parent: Path) -> _Example:
    folder = Path(tempfile.mkdtemp(dir=parent))
    return _Example(fuzzer.draw(Choices(draw), folder), folder)


class _Attempt:
    """Context manager that stores any error of its body, and suppresses all errors except KeyboardInterrupt."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        self.error = error
        return not isinstance(error, KeyboardInterrupt)


def _reports(error: BaseException) -> list[str]:
    """Returns one report for each distinct failure that hypothesis found."""
    if isinstance(error, BaseExceptionGroup):
        return [report for one in error.exceptions for report in _reports(one)]
    # Only the last frames, since an endless recursion has a thousand.
    text = "".join(traceback.format_exception(error, limit=-_FRAMES_SHOWN))
    blob = re.search(r"@reproduce_failure\('[^']*', b'([^']*)'\)", text)
    return [f"{text}--reproduce {blob[1]}" if blob else text]
