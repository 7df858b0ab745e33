"""Trials of fuzzed inputs, one after the other: each ends right, refused by name, or as a failure that can be repeated.

What is tried is in the modules beside this one, each with a `Fuzzer`; nothing here knows what an input is.
"""

import enum
import io
import os
import random
import resource
import shutil
import signal
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from types import TracebackType
from typing import Any, Protocol
from unittest.mock import patch

import torch

# A trial takes milliseconds; a machine may be busy.
LIMIT_SECONDS = 30
# On top of what the process has: a trial that wants more than this has not looked at a size.
LIMIT_BYTES = 4 << 30
FRAMES_SHOWN = 12


class Verdict(enum.Enum):
    """How a trial ended that did not fail."""

    RIGHT = "right"
    REFUSED = "refused"


class Fuzzer(Protocol):
    """A kind of input. `draw` makes one, in the trial's folder where it is files; `judge` gives it to the program.

    judge raises whatever is wrong: AssertionError where the result is, the program's own error where it crashes.
    """

    def draw(self, rng: random.Random, folder: Path) -> Any: ...
    def judge(self, case: Any, folder: Path) -> Verdict: ...


class Hang(BaseException):
    """A trial did not end in time. No Exception: what is tried must not catch it."""


@dataclass
class Tally:
    """What became of many trials. failures: by number of the trial, its input and its error."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = ", ".join(f"{self.verdicts[verdict]} {verdict.value}" for verdict in Verdict)
        named = "".join(f"\n\ntrial {number}: {text}" for number, text in self.failures.items())
        return f"{counts}, {len(self.failures)} failed{named}"


class _Attempt:
    """Keeps the error of the body, whichever: that it comes out is what is looked for."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        self.error = error
        return not isinstance(error, KeyboardInterrupt)


def try_all(fuzzer: Fuzzer, *, seed: int, numbers: range) -> Tally:
    """The trials of these numbers; a trial depends on seed and number alone."""
    tally = Tally()
    for number in numbers:
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        # What a process that dies or hangs leaves behind.
        os.write(2, f"trial {number}\n".encode())
        case: Any = "not drawn yet"
        attempt = _Attempt()
        with attempt:
            case = fuzzer.draw(random.Random(f"{seed} {number}"), folder)
            with limited():
                tally.verdicts[fuzzer.judge(case, folder)] += 1
        if attempt.error is not None:
            # The last frames: what recursed too deep has a thousand.
            trace = traceback.format_exception(attempt.error, limit=-FRAMES_SHOWN)
            tally.failures[number] = f"{case}\n{''.join(trace)}"
        shutil.rmtree(folder, ignore_errors=True)
    return tally


@contextmanager
def limited() -> Iterator[None]:
    """Raises Hang inside the body, in Python code at least, when it takes too long."""

    def stop(*_: object) -> None:
        raise Hang(f"not done after {LIMIT_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def limit_memory() -> None:
    """From here on, this process can have LIMIT_BYTES more: more is refused instead of filling the machine."""
    with open("/proc/self/statm", encoding="ascii") as stream:
        used = int(stream.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, hard))


def judged(run: Callable[[], object], folder: Path) -> Verdict:
    """Calls `run`, which may end as a process does: RIGHT for 0, REFUSED for a mistake that one line names."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with chdir(folder), redirect_stdout(out), redirect_stderr(err), _as_it_was():
        try:
            run()
        except SystemExit as ended:
            code = ended.code
    if code in (0, None):
        return Verdict.RIGHT
    said = [line for line in err.getvalue().splitlines() if "error: " in line]
    assert code in (1, 2) and len(said) == 1, f"exit code {code}: {err.getvalue()}"
    message = said[0].partition("error: ")[2]
    assert 10 < len(message) < 6000 and "Traceback" not in err.getvalue(), err.getvalue()
    return Verdict.REFUSED


@contextmanager
def _as_it_was() -> Iterator[None]:
    """What a run sets for its whole process is set back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    with warnings.catch_warnings(), patch.dict(os.environ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
            for number, handler in handlers.items():
                signal.signal(number, handler)


def note_of(damage: Callable[[], str], *, earlier: Sequence[str]) -> str:
    """What a damage did. After earlier damage of the same input it may find nothing that it could work on."""
    try:
        return damage()
    except (AttributeError, EOFError, LookupError, MemoryError, TypeError, UnpicklingError, ValueError, OSError):
        if not earlier:
            raise
        return "nothing, as other damage came first"
