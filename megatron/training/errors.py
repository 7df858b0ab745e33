"""Ends a run after a user error with `error: ...` lines on each rank and a non-zero exit code, without a traceback.

Bugs and errors raised by libraries are shown with their traceback.
"""

import dis
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.core.device import LaunchError
from megatron.core.distributed import NonFiniteGradientError
from megatron.core.distributed.consistency import WeightMismatchError
from megatron.core.group_collectives import RemoteRankError
from megatron.training.command_line.errors import CommandLineError
from megatron.training.error_broadcast import lost_another_rank, place_of
from megatron.training.meters.memory import is_out_of_memory
from megatron.training.recovery import LossSpikeError
from megatron.training.step.statistics import NonFiniteLossError
from megatron.training.step.step_runner import ExpertOverflowError

USAGE_EXIT_CODE = 2
FAILURE_EXIT_CODE = 1
INTERRUPT_EXIT_CODE = 130  # the shell's code: 128 + SIGINT

# Raised on every rank, with a message that names the cause.
_RAISED_EVERYWHERE = (
    RemoteRankError,
    NonFiniteLossError,
    NonFiniteGradientError,
    ExpertOverflowError,
    WeightMismatchError,
    LossSpikeError,
)
_INSTALLED = ("site-packages", "dist-packages")
_LONGEST_NOTE = 400  # characters


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Converts errors that users can fix to a line on stderr and SystemExit. Other errors keep their traceback."""
    try:
        yield
    except KeyboardInterrupt as error:
        _say("interrupted: continue a run that had --save from its last checkpoint with --load")
        raise SystemExit(INTERRUPT_EXIT_CODE) from error
    except BrokenPipeError as error:
        _say("error: the reader of the output pipe has closed it: write the output to a file to keep the run going")
        # Otherwise the interpreter fails again when it flushes the remaining output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(FAILURE_EXIT_CODE) from error
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        message = _message_for_user(error)
        if message is None:
            raise
        usage = isinstance(error, (CommandLineError, LaunchError))
        for problem in message.splitlines() if usage else [message]:
            _say(f"error: {problem}")
        raise SystemExit(USAGE_EXIT_CODE if usage else FAILURE_EXIT_CODE) from error


def message_for_other_ranks(error: BaseException) -> str:
    """Formats the error that ended a rank as one line for the other ranks."""
    text = _message_for_user(error) or f"{type(error).__name__}: {error}"
    return text.partition("\n")[0][:_LONGEST_NOTE]


def _message_for_user(error: BaseException) -> str | None:
    """Returns the message to show for an error that the user can fix, or None for a bug."""
    if isinstance(error, (OSError, *_RAISED_EVERYWHERE)) or (
        isinstance(error, ValueError) and raised_on_purpose(error)
    ):
        return str(error)
    if is_out_of_memory(error):
        reason = str(error).partition("\n")[0] or "no message from the allocator"
        advice = "reduce the model or --micro-batch-size, or use more ranks"
        return f"out of memory {place_of(error)}: {reason}; {advice}"
    if lost_another_rank(error):
        return "the connection to another rank was lost: that rank has ended; its own messages name the cause"
    return None


def raised_on_purpose(error: BaseException) -> bool:
    """Returns whether the error was raised by a `raise` statement in this framework or in the user's script.

    A ValueError from within numpy or torch, or from int("x"), is a bug of the caller.
    """
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    code = last.tb_frame.f_code
    # The framework's modules do not count as a library, even if the package is installed.
    own = last.tb_frame.f_globals["__name__"].startswith("megatron.")
    installed = not own and any(part in _INSTALLED for part in Path(code.co_filename).parts)
    # Determined from the bytecode instruction, because calls into C have no frame.
    return not installed and code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _say(text: str) -> None:
    rank = os.environ.get("RANK")
    where = f"[rank {rank}] " if rank is not None else ""
    print(f"{where}{text}", file=sys.stderr, flush=True)
