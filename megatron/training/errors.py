"""How a run ends on a mistake of its user: one line on each rank and a non-zero exit, no traceback."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.agreement import RemoteRankError
from megatron.training.arguments import CommandLineError
from megatron.training.step_statistics import NonFiniteLossError

USAGE_EXIT_CODE = 2
FAILURE_EXIT_CODE = 1


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turns errors that the user can mend into a line on stderr and SystemExit; others keep their traceback."""
    try:
        yield
    except (ValueError, OSError, RemoteRankError, NonFiniteLossError) as error:
        rank = os.environ.get("RANK")
        where = f"[rank {rank}] " if rank is not None else ""
        print(f"{where}error: {error}", file=sys.stderr, flush=True)
        usage = isinstance(error, CommandLineError)
        raise SystemExit(USAGE_EXIT_CODE if usage else FAILURE_EXIT_CODE) from error
