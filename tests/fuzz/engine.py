"""Runs hypothesis over one kind of fuzzed input, in processes whose memory and time are limited.

Nothing here knows what an input is: the modules of the kinds do, each with a `Fuzzer`.
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

# torch leaves some threads of each run in the process, so a process runs only so many examples.
_EXAMPLES_PER_PROCESS = 200
# Hypothesis shrinks a failure for at most 300 s.
_PATIENCE_SECONDS = 900.0
_FRAMES_SHOWN = 12
# The harness sets these as a launcher does, but an example is a process without a launcher.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Fuzzer(Protocol):
    """A kind of input. `draw` builds one, in the folder of the example where it is files; `check` is its property.

    check gives the input to the program and raises whatever is wrong: AssertionError for a wrong result, the
    program's own error where it crashes.
    """

    def draw(self, choices: Choices, folder: Path) -> Any: ...
    def check(self, case: Any, folder: Path) -> Verdict: ...


# Builds a fuzzer inside the process that runs it; the folder is shared by the processes of one call.
FuzzerFactory = Callable[[Path], Fuzzer]


@dataclass
class Tally:
    """Results of many examples. failures: reports with the shrunk input, its error and its blob."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{self.verdicts[verdict]} {verdict.value}" for verdict in Verdict)
        return "\n\n".join([f"{counts}, {len(self.failures)} failed", *self.failures])


class _Example:
    """An input and its folder."""

    def __init__(self, case: Any, folder: Path) -> None:
        self.case, self.folder = case, folder

    def __repr__(self) -> str:
        return "(the input above)"


def fuzz(factory: FuzzerFactory, *, count: int, seed: int = 0) -> Tally:
    """Checks `count` examples, drawn by `seed` alone, and stops at a process with failures."""
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
    """Checks the one example of a reported blob; raises hypothesis' DidNotReproduce if it does not fail."""
    with tempfile.TemporaryDirectory(prefix="fuzz-shared-") as shared:
        return _in_process(_repeat, factory, Path(shared), blob)


def _in_process(run: Callable[..., Tally], *args: Any) -> Tally:
    """The tally of `run`; a process that dies or hangs is a failure of the example that it was at."""
    outcome = launch_on_ranks(run, 1, *args, backend=None, timeout=_PATIENCE_SECONDS)[0]
    if outcome.value is not None:
        return outcome.value
    begun = outcome.stderr.rpartition("example: ")[2]
    return Tally(
        failures=[f"the process ended at this example, which is not shrunk: {outcome.error!r}\n{begun[:6000]}"]
    )


# In the process of the examples.


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
            # Read by the parent if this process dies.
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
    """Settings that do not depend on the environment: under CI=true the default profile of hypothesis is another."""
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
    """Keeps the error of the body, whichever it is."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        self.error = error
        return not isinstance(error, KeyboardInterrupt)


def _reports(error: BaseException) -> list[str]:
    """One report for each distinct failure that hypothesis found."""
    if isinstance(error, BaseExceptionGroup):
        return [report for one in error.exceptions for report in _reports(one)]
    # The last frames only: an endless recursion has a thousand.
    text = "".join(traceback.format_exception(error, limit=-_FRAMES_SHOWN))
    blob = re.search(r"@reproduce_failure\('[^']*', b'([^']*)'\)", text)
    return [f"{text}--reproduce {blob[1]}" if blob else text]
