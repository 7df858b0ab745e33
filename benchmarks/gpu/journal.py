"""Manages the file of results, checks.jsonl, to which lines are only appended. Runs no check.

A line is a JSON object. Its `kind` is `result`, for one result line of a check, or `verdict`, for a check that ended.
Lines of one execution have the same `run`. Each is synchronized with the disk before the runner continues.

[Note: what a kill can lose] A check writes its output to output.log, from where the runner copies result lines to
checks.jsonl when they appear. running.json names the check that runs and the position in output.log at which its output
begins. If the runner is killed between both, the next runner copies the lines that are missing. A kill therefore loses
only the line that was being written.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.gpu.protocol import result_of

ERROR = "error"  # name of the result that describes why a check or a side failed


class Verdict(StrEnum):
    """Outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    INCOMPLETE = "incomplete: some sides were not started"
    NEEDS_GPU = "needs a GPU"
    NOT_CHECKED = "not checked here"  # a tool is missing, for example
    NO_TIME = "not run: no time left"
    INTERRUPTED = "interrupted"  # the runner was interrupted

    @property
    def is_failure(self) -> bool:
        """Whether a run with this verdict must not report success."""
        return self not in (Verdict.PASSED, Verdict.NEEDS_GPU, Verdict.NOT_CHECKED)


@dataclass(frozen=True)
class Where:
    """Where a result was measured. code: digest of the check's code (benchmarks/source.py)."""

    date: str
    device: str
    torch: str
    commit: str
    code: str
    dry_run: bool


@dataclass(frozen=True)
class Record:
    """An execution of a check.

    seconds: wall time. exit_status: negative for a signal. orphans: number of processes that the check left running,
    which were killed. results: results of the check as a whole. sides: results by side. output: last lines. run:
    identifies the execution.
    """

    check: str
    verdict: Verdict
    where: Where
    seconds: float = 0.0
    exit_status: int | None = None
    orphans: int = 0
    results: Mapping[str, Any] = field(default_factory=dict)
    sides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    output: list[str] = field(default_factory=list)
    run: str = ""

    @property
    def is_final(self) -> bool:
        """Whether --resume skips the check. A missing tool, driver or time may be available the next time."""
        if self.verdict in (Verdict.NEEDS_GPU, Verdict.NOT_CHECKED):
            return self.where.dry_run
        return self.verdict in (Verdict.PASSED, Verdict.FAILED, Verdict.TIMED_OUT)


@dataclass(frozen=True)
class Running:
    """The check that runs. mark: identifies its processes. start: position in output.log of its output."""

    check: str
    run: str
    mark: str
    start: int
    where: Where


def _with_results(record: Record, results: Mapping[str | None, Mapping[str, Any]]) -> Record:
    sides = {side: values for side, values in results.items() if side is not None}
    return replace(record, results=results.get(None, {}), sides=sides)


class Journal:
    """The results in one folder."""

    def __init__(self, folder: Path) -> None:
        self.path, self.log, self._running = folder / "checks.jsonl", folder / "output.log", folder / "running.json"

    def read(self) -> list[Record]:
        """Returns all executions in the order in which they ended.

        An execution without a verdict, whose runner was killed, is interrupted. Results of the same name and side
        replace earlier ones.
        """
        records: dict[str, Record] = {}
        results: dict[str, dict[str | None, dict[str, Any]]] = {}
        for values in self._lines():
            run, kind = values["run"], values.pop("kind")
            if kind == "verdict":
                records.pop(run, None)  # an execution without a verdict so far
                found = {**values, "verdict": Verdict(values["verdict"]), "where": Where(**values["where"])}
                del found["time"]
                records[run] = Record(**found)
            else:
                results.setdefault(run, {}).setdefault(values["side"], {}).update(values["results"])
                unfinished = Record(values["check"], Verdict.INTERRUPTED, Where(**values["where"]), run=run)
                records.setdefault(run, unfinished)
        return [_with_results(record, results.get(run, {})) for run, record in records.items()]

    def mend(self) -> None:
        """Removes an incomplete last line, so that the next line is valid."""
        if self.path.exists():
            data = self.path.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                os.truncate(self.path, whole)

    def begin(self, running: Running) -> None:
        """Records that a check runs."""
        temporary = self._running.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(running)) + "\n")
        temporary.replace(self._running)

    def interrupted(self) -> Running | None:
        """Returns the check that ran when the last runner was killed, or None. First saves its missing results."""
        try:
            values = json.loads(self._running.read_text())
            running = Running(**{**values, "where": Where(**values["where"])})
        except (OSError, ValueError, KeyError, TypeError):
            return None
        own = [values for values in self._lines() if values["run"] == running.run]
        # If there is a verdict, the runner was killed between writing it and removing running.json.
        if any(values["kind"] == "verdict" for values in own):
            return None
        output = OutputReader(self.log, running.start)
        output.read()
        for side, results in output.results[len(own) :]:
            self.add(running, results, side=side)
        return running

    def add(self, running: Running, results: Mapping[str, Any], *, side: str | None = None) -> None:
        """Appends a result line."""
        self._append(
            {"kind": "result", "check": running.check, "side": side, "results": results, "run": running.run},
            running.where,
        )

    def end(self, record: Record) -> None:
        """Appends a verdict line and records that no check runs. The record's results are not written."""
        values = asdict(record)
        del values["results"], values["sides"], values["where"]
        self._append({"kind": "verdict", **values}, record.where)
        self._running.unlink(missing_ok=True)

    def _append(self, values: Mapping[str, Any], where: Where) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%S")
        line = (json.dumps({**values, "time": now, "where": asdict(where)}, allow_nan=True) + "\n").encode()
        with open(self.path, "ab", buffering=0) as stream:
            stream.write(line)
            os.fsync(stream.fileno())

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for line in self.path.read_text(errors="replace").split("\n")[:-1]:
            try:
                values = json.loads(line)
                if {"kind", "run", "check", "where", "time"} <= values.keys():
                    yield values
            except (ValueError, AttributeError):
                continue  # a line damaged by a power failure, or written by a different version


class OutputReader:
    """Reads the output of a check from output.log while it is written.

    lines: all whole lines so far. results: sides and results of all result lines so far.
    """

    def __init__(self, log: Path, start: int) -> None:
        self._log, self._position, self._rest = log, start, b""
        self.lines: list[str] = []
        self.results: list[tuple[str | None, dict[str, Any]]] = []

    def read(self) -> str:
        """Returns the output since the last call."""
        with open(self._log, "rb") as stream:
            stream.seek(self._position)
            new = stream.read()
        self._position += len(new)
        *whole, self._rest = (self._rest + new).split(b"\n")
        lines = [line.decode(errors="replace") for line in whole]
        self.lines += lines
        self.results += [found for line in lines if (found := result_of(line)) is not None]
        return new.decode(errors="replace")
