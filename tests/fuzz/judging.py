"""Judges a fuzzed input: the program must use it correctly or reject it in one line, within time and memory limits."""

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

# An example takes milliseconds, but the machine may be busy.
LIMIT_SECONDS = 30
# In addition to the memory of the process. An example that exceeds this has not checked a size that it read.
LIMIT_BYTES = 4 << 30


class Verdict(enum.Enum):
    """How an example ended without a failure: the input was used correctly, or rejected."""

    RIGHT = "right"
    REFUSED = "refused"


class _Expired(BaseException):
    """Raised in the code under test when its time is over. Not an Exception, so that the code does not catch it."""


@contextmanager
def time_limit() -> Iterator[None]:
    """Raises TimeoutError if the body takes longer than LIMIT_SECONDS. Only Python code is interrupted."""

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
    """Limits the further allocations of this process to LIMIT_BYTES. Allocations beyond that raise MemoryError."""
    with open("/proc/self/statm", encoding="ascii") as stream:
        used = int(stream.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, hard))


def judged(run: Callable[[], object], folder: Path) -> Verdict:
    """Runs a program in `folder`. Returns RIGHT for exit status 0, and REFUSED if it ends with proper error lines."""
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
    # All mistakes of a command line are reported (status 2), but only one error of a run (status 1).
    assert len(errors) == 1 if code == 1 else errors and code == 2, f"exit code {code}: {err.getvalue()}"
    assert len(set(errors)) == len(errors) and "Traceback" not in err.getvalue(), err.getvalue()
    assert all(10 < len(line.partition("error: ")[2]) < 6000 for line in errors), err.getvalue()
    return Verdict.REFUSED


@contextmanager
def _process_state_restored() -> Iterator[None]:
    """Restores the process-wide state that a run changes."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    fills = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings(), patch.dict(os.environ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = fills
            for number, handler in handlers.items():
                signal.signal(number, handler)


def note_of(damage: Callable[[], str], *, earlier: Sequence[str]) -> str:
    """Applies some damage and returns its description. After earlier damage, there may be nothing left to damage."""
    try:
        return damage()
    except (AttributeError, EOFError, LookupError, MemoryError, TypeError, UnpicklingError, ValueError, OSError):
        if not earlier:
            raise
        return "nothing, as other damage came first"
