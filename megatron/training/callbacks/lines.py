"""Lines that a run writes: to the console, from the first rank, and to files that may fill up a disk."""

from pathlib import Path

import torch.distributed as dist


def print_rank_0(message: str) -> None:
    """Prints on the first rank only, at once."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


class LineFile:
    """Appends lines at once: a killed run leaves complete ones, and perhaps a part of the last.

    Where the disk is full, lines wait until there is room again, and the run goes on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Without a buffer it is known what the file has: the rest of a line follows where the disk took a part.
        self._file = path.open("ab", buffering=0)
        self._waiting = b""
        self._is_failing = False

    def write(self, lines: bytes) -> None:
        """Appends `lines`, behind those that wait; a line says when that begins to fail."""
        self._waiting += lines
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                print_rank_0(f"WARNING: cannot write {self._path}: {error}: its lines wait, training goes on")
            self._is_failing = True

    def close(self) -> None:
        """Tries once more what waits; lines that still cannot be written are lost."""
        if self._waiting:
            self.write(b"")
        self._file.close()
