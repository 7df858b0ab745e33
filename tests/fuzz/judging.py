"""Judges one fuzzed input: the program used it right, or refused it in one line, within limits of time and memory."""

import enum
import io
import os
import resource
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from unittest.mock import patch

import torch

# An example takes milliseconds; the machine may be busy.
LIMIT_SECONDS = 30
# On top of the process's own memory: an example that needs more has not checked a size that it read.
LIMIT_BYTES = 4 << 30


class Verdict(enum.Enum):
    """How an example ended that did not fail."""

    RIGHT = "right"
    REFUSED = "refused"


class _Expired(BaseException):
    """Raised in the code under test when its time is over. No Exception, so that the code cannot catch it."""


@contextmanager
def time_limit() -> Iterator[None]:
    """Raises TimeoutError if the body takes longer than LIMIT_SECONDS; interrupts Python code only."""

    def stop(*_: object) -> None:
        raise _Expired

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
    try:
        yield
    except _Expired as expired:
        raise TimeoutError(f"hangs: not done after {LIMIT_SECONDS} s") from expired
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def limit_memory() -> None:
    """Lets this process allocate LIMIT_BYTES more; allocations beyond that raise MemoryError."""
    with open("/proc/self/statm", encoding="ascii") as stream:
        used = int(stream.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, hard))


def judged(run: Callable[[], object], folder: Path) -> Verdict:
    """Calls `run` in `folder` as a program: RIGHT for exit status 0, REFUSED for lines that name its mistakes."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with chdir(folder), redirect_stdout(out), redirect_stderr(err), _process_state_restored():
        try:
            run()
        except SystemExit as ended:
            code = ended.code
    if code in (0, None):
        return Verdict.RIGHT
    errors = [line for line in err.getvalue().splitlines() if "error: " in line]
    # Of a command line all mistakes are told; what ends a run later is one.
    assert len(errors) == 1 if code == 1 else errors and code == 2, f"exit code {code}: {err.getvalue()}"
    assert len(set(errors)) == len(errors) and "Traceback" not in err.getvalue(), err.getvalue()
    assert all(10 < len(line.partition("error: ")[2]) < 6000 for line in errors), err.getvalue()
    return Verdict.REFUSED


@contextmanager
def _process_state_restored() -> Iterator[None]:
    """Restores what a run sets for its whole process."""
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
    """Applies a damage and returns its description; after earlier damage there may be nothing left to work on."""
    try:
        return damage()
    except (AttributeError, EOFError, LookupError, MemoryError, TypeError, UnpicklingError, ValueError, OSError):
        if not earlier:
            raise
        return "nothing, as other damage came first"
