"""Mistakes in flags and configuration files, and how a program ends because of one.

What counts as a mistake is decided in parser.py, yaml_config.py and validation.py.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class CommandLineError(ValueError):
    """A flag or configuration file that cannot be honoured; the text is one line for the user."""


def is_first_rank() -> bool:
    """Whether this process speaks for the run; read from the launcher's RANK, before process groups exist."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def exit_on_command_line_error() -> Iterator[None]:
    """Turns a CommandLineError of the body into one `error: ...` line on rank 0 and exit status 2 on every rank."""
    try:
        yield
    except CommandLineError as error:
        if is_first_rank():
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
