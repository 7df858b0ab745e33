"""Appends the routing of each step to the file of --record-routing; its format is routing_trace.py's."""

from functools import partial
from pathlib import Path

from megatron.training.callbacks.base import Callback, RunStart, StepReport
from megatron.training.callbacks.jsonl_log import keep_lines_until
from megatron.training.callbacks.line_file import LineFile
from megatron.training.routing_trace import RoutingHeader, encoded, last_header, read_lines, step_line


class RoutingLog(Callback):
    """One line a step, written at once; lines past the iteration that a run resumes from are dropped first."""

    def __init__(self, path: Path, header: RoutingHeader) -> None:
        """Raises ValueError for a path that cannot be written, and for a file that is there and is no trace."""
        self.path, self.header = path, header
        self._file: LineFile | None = None
        try:
            path.open("ab").close()
        except OSError as error:
            raise ValueError(
                f"--record-routing is {path}: must be a file in a folder that can be written ({error.strerror})"
            ) from error
        if path.stat().st_size and last_header(path) is None:
            raise ValueError(
                f"--record-routing is {path}: the file is there and is no routing trace, give another name"
            )

    def on_train_start(self, start: RunStart) -> None:
        """Opens the file at the iteration that the run starts from."""
        keep_lines_until(self.path, start.iteration, read=read_lines, encode=partial(encoded, path=self.path))
        is_described = self.path.exists() and last_header(self.path) == self.header
        self._file = LineFile(self.path)
        if not is_described:
            self._write(self.header.line(start.iteration))

    def on_rewind(self, iteration: int) -> None:
        """Drops the lines of steps that come again."""
        self.on_run_end()
        self.on_train_start(RunStart(iteration=iteration, train_iters=iteration))

    def on_step_end(self, report: StepReport) -> None:
        """Writes the step's line."""
        assert report.routing is not None, "a meter sets it on this rank"
        self._write(step_line(report.iteration, report.routing))

    def on_run_end(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: bytes) -> None:
        assert self._file is not None, "the file is opened by on_train_start"
        self._file.write(encoded(line, self.path))
