"""Reads and follows the log of a run, complete or truncated, without drawing it.

A log is steps.jsonl and run.json, or a console log in Megatron's format.
"""

import json
import os
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

LOG_NAME = "steps.jsonl"
RECORD_NAME = "run.json"
# Fields that depend on the machine and the time and differ between any two runs. A name that ends with a slash is a
# group.
TIMINGS = (
    "seconds",
    "tokens_per_second",
    "tflops",
    "mfu",
    "timers/",
    "rank_times/",
    "overlap/",
    "memory/",
    "held/",
    "stash/",
)
MAX_BINS = 128
# Bytes before the read position that a follower compares. A difference means that the file was replaced.
TAIL_BYTES = 256
# Counters of the recompute levels that steps reached, from mild to severe.
LEVEL_COUNTERS = ("spilled_pages", "dropped_gate_up", "void_steps")
# Megatron-LM's console log: the line of a step, the line of an evaluation, and fields with a different name or unit.
STEP_LINE = re.compile(r"iteration +(\d+)/ *\d+ *\|(.*)")
EVALUATION_LINE = re.compile(r"(validation|test) loss at iteration (\d+).*?lm loss value: +(\S+)")
CONSOLE_NAMES = {
    "elapsed time per iteration (ms)": ("seconds", 1e-3),
    "throughput per GPU (TFLOP/s/GPU)": ("tflops", 1.0),
    "MFU (%)": ("mfu", 1e-2),
}


@dataclass(frozen=True)
class Series:
    """The values of one field over the steps. steps: [n] int64, increasing. values: [n] float64."""

    steps: np.ndarray
    values: np.ndarray


@dataclass
class LayerTable:
    """Values by layer, averaged over bins with equal numbers of steps, so that a long run remains small.

    sums: one array per bin, [layers] or [layers, experts], float64. counts: number of steps in each bin. first_steps,
    last_steps: ends of each bin.
    """

    layers: list[int] = field(default_factory=list)
    first_steps: list[int] = field(default_factory=list)
    last_steps: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sums: list[np.ndarray] = field(default_factory=list)
    steps_per_bin: int = 1

    def add(self, step: int, rows: Mapping[str, Any]) -> None:
        """Adds a step. Ignores a step whose layers or experts differ from earlier steps.

        Raises ValueError or TypeError for rows that are not numbers or differ in length.
        """
        layers = sorted(map(int, rows))
        values = np.array([rows[str(layer)] for layer in layers], dtype=np.float64)
        if not self.sums:
            self.layers = layers
        elif layers != self.layers or values.shape != self.sums[0].shape:
            return
        if self.counts and self.counts[-1] < self.steps_per_bin:
            self.sums[-1] += values
            self.counts[-1] += 1
            self.last_steps[-1] = step
            return
        self.sums.append(values)
        self.counts.append(1)
        self.first_steps.append(step)
        self.last_steps.append(step)
        if len(self.sums) > MAX_BINS:
            self._halve()

    def means(self) -> np.ndarray:
        """Returns the mean of each bin, [bins, layers] or [bins, layers, experts], float64."""
        return np.stack([total / count for total, count in zip(self.sums, self.counts)])

    def _halve(self) -> None:
        """Merges pairs of bins. A last bin without a partner continues to grow."""
        starts = range(0, len(self.sums), 2)
        self.sums = [np.sum(self.sums[start : start + 2], axis=0) for start in starts]
        self.counts = [sum(self.counts[start : start + 2]) for start in starts]
        self.first_steps = self.first_steps[::2]
        self.last_steps = [self.last_steps[start : start + 2][-1] for start in starts]
        self.steps_per_bin *= 2


@dataclass
class StashLog:
    """Logged usage of expert buffers and pages.

    rows: rows relative to balanced routing, by layer. pool: the last logged pool with a timeline. pool_step: its
    iteration.
    """

    rows: LayerTable = field(default_factory=LayerTable)
    pool: dict[str, Any] = field(default_factory=dict)
    pool_step: int = 0


@dataclass
class RunLog:
    """A run as recorded in its files.

    series: values by field; a field of a nested object has a name such as "memory/allocated". expert_load: tokens per
    expert. per_layer: values by layer for each loss. overlap: communication of the last logged step, with its
    iteration. held: last logged bytes on the ranks by category (training/meters/memory.py). stash: fields of the stash
    that are not series of numbers. record: contents of run.json, empty if there is none. num_unreadable: number of
    lines that are not JSON objects with an iteration.
    """

    path: Path
    series: dict[str, Series]
    expert_load: LayerTable
    per_layer: dict[str, LayerTable]
    overlap: dict[str, Any]
    held: dict[str, Any]
    stash: StashLog
    record: dict[str, Any]
    num_unreadable: int

    @property
    def num_steps(self) -> int:
        """Number of training steps in the log."""
        return len(self.steps)

    @property
    def steps(self) -> np.ndarray:
        """Iterations with a logged training step, [n] int64."""
        empty = Series(np.zeros(0, np.int64), np.zeros(0))
        return self.series.get("lm_loss", self.series.get("consumed_samples", empty)).steps


def read_run(place: Path) -> RunLog:
    """Reads the run of a folder, of its parent folder, or of a log file. Raises ValueError if there is none."""
    path = find_log(place)
    reader = LogReader()
    with path.open("rb") as file:
        for line in file:
            (reader.read_line if path.suffix == ".jsonl" else reader.read_console_line)(line)
    return reader.run(path)


def find_log(place: Path) -> Path:
    """Returns the path of a run's log. place: the log itself, --tensorboard-dir, --save, or the parent folder of these.

    Raises ValueError if there is no log or more than one.
    """
    if place.is_file():
        return place
    if not place.is_dir():
        raise ValueError(f"{place} does not exist: give the folder of --tensorboard-dir or --save")
    if (place / LOG_NAME).is_file():
        return place / LOG_NAME
    named = [log for log in _logs_of_checkpoints(place) if log.is_file()]
    below = named[-1:] or sorted(place.glob(f"*/{LOG_NAME}"))
    if len(below) == 1:
        return below[0]
    if below:
        names = ", ".join(str(log.parent) for log in below)
        raise ValueError(f"{place} contains {len(below)} runs: give one of {names}")
    raise ValueError(f"{place} contains no {LOG_NAME}: give the --tensorboard-dir or --save folder of a run")


def _logs_of_checkpoints(folder: Path) -> Iterator[Path]:
    """Yields the log paths recorded in the checkpoints of `folder`, oldest first."""
    for common in sorted(folder.glob("iter_*/common.json")):
        named = json.loads(common.read_text(encoding="utf-8")).get("args", {}).get("tensorboard_dir")
        if named:
            yield Path(named) / LOG_NAME


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


@dataclass
class LogReader:
    """Parses a log into columns, line by line. run() may be called at any time."""

    columns: dict[str, tuple["array[int]", "array[float]"]] = field(default_factory=dict)
    expert_load: LayerTable = field(default_factory=LayerTable)
    per_layer: dict[str, LayerTable] = field(default_factory=dict)
    overlap: dict[str, Any] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)
    stash: StashLog = field(default_factory=StashLog)
    num_unreadable: int = 0

    def run(self, path: Path) -> RunLog:
        """Returns the run from the lines read so far, with its run.json. path: path of the log.

        Raises ValueError if no step or evaluation was read.
        """
        series = {name: _rising(steps, values) for name, (steps, values) in self.columns.items()}
        if not series:
            raise ValueError(f"{path} has no line of a training step or an evaluation yet")
        return RunLog(
            path,
            series,
            expert_load=self.expert_load,
            per_layer=self.per_layer,
            overlap=self.overlap,
            held=self.held,
            stash=self.stash,
            record=_read_record(path.with_name(RECORD_NAME)),
            num_unreadable=self.num_unreadable,
        )

    def read_line(self, line: bytes) -> None:
        """Parses a line of steps.jsonl. line: includes the line end, unless the line is still being written."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            # A last line without a line end is still being written.
            self.num_unreadable += line.endswith(b"\n")
            return
        step = record.get("iteration") if isinstance(record, dict) else None
        if not isinstance(step, int) or not 0 <= step < 2**62:
            self.num_unreadable += 1
            return
        try:
            self._add_step(record, step=step)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            self.num_unreadable += 1  # a field of unexpected shape; the fields before it are used

    def _add_step(self, record: dict[str, Any], *, step: int) -> None:
        for name, value in record.items():
            if name == "expert_load":
                self.expert_load.add(step, value or {})
            elif name == "per_layer":
                for loss, rows in (value or {}).items():
                    table = self.per_layer.get(loss) or LayerTable()
                    table.add(step, rows)
                    self.per_layer[loss] = table
            elif name == "held":
                self.held = {"iteration": step, **value}
            elif name == "stash":
                self._add_stash(value, step=step)
            elif name != "iteration":
                self._add(name, value, step=step)
                if name == "overlap":
                    self.overlap = {"iteration": step, **value}

    def _add_stash(self, record: dict[str, Any], *, step: int) -> None:
        """Adds the stash's fields, including the factors that each step since the previous line required."""
        pool = record["pool"] or {}
        by_step = {"capacity_factor_needed": record["factors_needed"], "pool_factor_needed": pool.get("factors_needed")}
        by_step |= self._level_counts(record)
        for name, values in by_step.items():
            for place, value in enumerate(values or [], 1):
                self._add(f"stash/{name}", value, step=step - len(values) + place)
        balanced = record["balanced_rows"] or 1
        self.stash.rows.add(step, {layer: rows / balanced for layer, rows in record["rows"].items()})
        for name, value in {**record, **pool}.items():
            # Skips the fields of a tier that the pool does not have.
            if isinstance(value, (int, float)) and not (name.startswith("host_") and not pool["host_pages"]):
                self._add(f"stash/{'pool_factor' if name == 'factor' else name}", value, step=step)
        if pool:
            live = pool["live_bytes"] + pool["tail_bytes"]
            self._add("stash/tail_share", pool["tail_bytes"] / live if live else 0.0, step=step)
            # A line has no timeline if no step since the previous timeline was fuller.
            if pool["timeline"] is not None:
                self.stash.pool, self.stash.pool_step = pool, step

    @staticmethod
    def _level_counts(record: dict[str, Any]) -> dict[str, list[int]]:
        """Returns the counts of each recompute level by step. A level that the log omits did not occur."""
        counts = record.get("rungs")
        if counts is None:
            return {}
        return {f"rungs/{name}": counts.get(name) or [0] * record["steps"] for name in LEVEL_COUNTERS}

    def read_console_line(self, line: bytes) -> None:
        """Parses the line of a step or an evaluation. Ignores all other lines."""
        text = line.decode("utf-8", errors="replace")
        if step := STEP_LINE.search(text):
            for field_text in step[2].split("|"):
                name, _, value = field_text.rpartition(":")
                name, scale = CONSOLE_NAMES.get(name.strip(), (name.strip().replace(" ", "_"), 1.0))
                if name and (number := _number(value)) is not None:
                    self._add(name, scale * number, step=int(step[1]))
        elif evaluation := EVALUATION_LINE.search(text):
            split = "test" if "on test set" in text else evaluation[1]
            self._add(f"{split}_loss", evaluation[3], step=int(evaluation[2]))

    def _add(self, name: str, value: Any, *, step: int) -> None:
        if isinstance(value, dict):
            for inner, item in value.items():
                self._add(f"{name}/{inner}", item, step=step)
            return
        if value is None or isinstance(value, list):
            return
        number = _number(value)
        if number is None:
            return
        steps, values = self.columns.setdefault(name, (array("q"), array("d")))
        steps.append(step)
        values.append(number)


class RunFollower:
    """Follows the log of a run in progress, given its folder or log, which may not exist yet.

    Lines count once they are complete. A run that is resumed or rewound replaces its log by one without the later
    lines. The file then has a different inode, is shorter, or differs before the read position, and is read from the
    start. problem: the reason why there is nothing to show, or "". num_starts: how often a log was read from its start.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.problem = f"{place} has not been read yet"
        self.num_starts = 0
        self._reader = LogReader()
        self._file: BufferedReader | None = None
        self._path = place
        self._offset, self._tail = 0, b""

    def update(self) -> bool:
        """Reads new lines. Returns whether there were any or `problem` changed."""
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
        """Returns the run read so far. Raises ValueError before the first logged step."""
        return self._reader.run(self._path)

    def close(self) -> None:
        """Closes the log. The next update reads it from the start."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _open(self, path: Path) -> bool:
        """Opens the log unless the same file is already open. Returns whether it opened the log."""
        if self._file is not None and path == self._path and self._is_same(self._file):
            return False
        self.close()
        # The inode of an open file is not reused, so a new file of this name has a different inode.
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
        """Reads the complete lines after the read position and returns their number."""
        assert self._file is not None, "_open was called before"
        self._file.seek(self._offset)
        read = self._reader.read_line if self._path.suffix == ".jsonl" else self._reader.read_console_line
        num_lines = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break  # still being written: read again once it is complete
            read(line)
            num_lines += 1
            self._offset += len(line)
            self._tail = (self._tail + line)[-TAIL_BYTES:]
        return num_lines


def _number(value: Any) -> float | None:
    """Converts a value to float, including texts such as "NaN" and "-Infinity". Returns None for other texts."""
    try:
        return float(value)
    except ValueError:
        return None


def _rising(steps: "array[int]", values: "array[float]") -> Series:
    """Returns the series sorted by step. If a step has several lines, the last one counts."""
    all_steps, all_values = np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)
    if np.all(np.diff(all_steps) > 0):
        return Series(all_steps, all_values)
    unique, from_end = np.unique(all_steps[::-1], return_index=True)
    return Series(unique, all_values[::-1][from_end])
