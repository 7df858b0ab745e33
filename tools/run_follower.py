"""Follows the log of a run that goes on: reads what was added since, and all anew where the run was set back.

What lines mean is run_log.py's.
"""

import os
from io import BufferedReader
from pathlib import Path

from tools.run_log import LogReader, RunLog, find_log

# Bytes before the place read to: if others stand there now, the file was written anew under the same name.
TAIL_BYTES = 256


class RunFollower:
    """One run, by its folder or log, which need not be there yet.

    Lines count once they are complete. A run that is resumed or set back replaces its log by one without the later
    lines: then the file has another inode, is shorter, or has other bytes before the place that was read to.
    Attributes: problem, why there is nothing to show, "" where there is; num_starts, how often it was read from its
    start.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.problem = f"{place} was not read yet"
        self.num_starts = 0
        self._reader = LogReader()
        self._file: BufferedReader | None = None
        self._path = place
        self._offset, self._tail = 0, b""

    def update(self) -> bool:
        """Reads what is new; whether there was anything."""
        before = self.problem
        try:
            path = find_log(self.place)
            starts_over = self._open(path)
            num_lines = self._read_lines()
        except (ValueError, OSError) as error:
            self.close()
            self.problem = str(error)
            return self.problem != before
        self.problem = "" if self._reader.columns else f"{path} has no line of a training step or an evaluation yet"
        return starts_over or num_lines > 0 or self.problem != before

    def run(self) -> RunLog:
        """What was read so far. Raises ValueError where no step was."""
        return self._reader.run(self._path)

    def close(self) -> None:
        """Lets go of the file; the next update begins anew."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _open(self, path: Path) -> bool:
        """Opens the log where it is not open yet, or is another than the one that is; whether it did."""
        if self._file is not None and path == self._path and self._is_same(self._file):
            return False
        self.close()
        # While it is open its inode is not reused: a file that takes its name has another.
        self._file, self._path = path.open("rb"), path
        self._reader, self._offset, self._tail = LogReader(), 0, b""
        self.num_starts += 1
        return True

    def _is_same(self, file: BufferedReader) -> bool:
        opened, named = os.fstat(file.fileno()), os.stat(self._path)
        if (opened.st_dev, opened.st_ino) != (named.st_dev, named.st_ino) or named.st_size < self._offset:
            return False
        file.seek(self._offset - len(self._tail))
        return file.read(len(self._tail)) == self._tail

    def _read_lines(self) -> int:
        """Takes the complete lines behind the place read to; how many."""
        assert self._file is not None, "opened before"
        self._file.seek(self._offset)
        read = self._reader.read_line if self._path.suffix == ".jsonl" else self._reader.read_console_line
        num_lines = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break  # being written now: it is read again when it is whole
            read(line)
            num_lines += 1
            self._offset += len(line)
            self._tail = (self._tail + line)[-TAIL_BYTES:]
        return num_lines
