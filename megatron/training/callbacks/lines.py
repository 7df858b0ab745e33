"""Writes lines to the console from rank 0, and to files that stay valid when the disk fills up or the run is killed."""

from pathlib import Path

import torch.distributed as dist


def print_rank_0(message: str) -> None:
    """Prints the message on the first rank only, and flushes the output."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


class LineFile:
    """Appends lines to a file without buffering, so that only the last line can be incomplete after a kill.

    While the disk is full, lines are buffered in memory and the run continues.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Unbuffered, so that the number of written bytes is known, and a partly written line can be completed.
        self._file = path.open("ab", buffering=0)
        self._pending = b""
        self._is_failing = False

    def write(self, lines: bytes) -> None:
        """Appends pending lines, then `lines`. Prints a warning when writes begin to fail."""
        self._pending += lines
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                print_rank_0(
                    f"WARNING: cannot write {self._path}: {error}; its lines are buffered in memory and training "
                    "continues"
                )
            self._is_failing = True

    def close(self) -> None:
        """Tries a last time to write pending lines, and closes the file."""
        if self._pending:
            self.write(b"")
        self._file.close()
