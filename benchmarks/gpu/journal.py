"""Manages the file of results, checks.jsonl, which contains one JSON object per line for each check that ended.

A line is written and synchronized with the disk when its check ends, so that a killed runner or machine loses
only the current check. running.json names that check. Nothing here runs a check.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class Verdict(StrEnum):
    """Outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"
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
    """Where a result was measured. files: digest of this project's files."""

    date: str
    device: str
    torch: str
    commit: str
    files: str
    dry_run: bool


@dataclass(frozen=True)
class Record:
    """One line of the file.

    seconds: wall time. exit_status: negative for a signal. orphans: number of processes that the check left running,
    which were killed. results: results that the check reported. output: last lines. mark: identifies its processes.
    """

    check: str
    verdict: Verdict
    where: Where
    seconds: float = 0.0
    exit_status: int | None = None
    orphans: int = 0
    results: Mapping[str, Any] = field(default_factory=dict)
    output: list[str] = field(default_factory=list)
    mark: str = ""

    @property
    def is_final(self) -> bool:
        """Whether --resume skips the check. A missing tool or driver may be available the next time."""
        if self.verdict in (Verdict.NEEDS_GPU, Verdict.NOT_CHECKED):
            return self.where.dry_run
        return self.verdict in (Verdict.PASSED, Verdict.FAILED, Verdict.TIMED_OUT)


class Journal:
    """The results in one folder."""

    def __init__(self, folder: Path) -> None:
        self.path, self._running = folder / "checks.jsonl", folder / "running.json"

    def read(self) -> list[Record]:
        """Returns all complete lines in the order in which they were written."""
        if not self.path.exists():
            return []
        records = []
        for line in self.path.read_text(errors="replace").split("\n")[:-1]:
            try:
                values = json.loads(line)
                found = {**values, "verdict": Verdict(values["verdict"]), "where": Where(**values["where"])}
                records.append(Record(**found))
            except (ValueError, KeyError, TypeError):
                continue  # a line damaged by a power failure, or written by a different version
        return records

    def mend(self) -> None:
        """Removes an incomplete last line, so that the next line is valid."""
        if self.path.exists():
            data = self.path.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                os.truncate(self.path, whole)

    def begin(self, check: str, mark: str) -> None:
        """Records that a check runs. mark: identifies its processes."""
        temporary = self._running.with_suffix(".new")
        temporary.write_text(json.dumps({"check": check, "mark": mark}) + "\n")
        temporary.replace(self._running)

    def interrupted(self) -> tuple[str, str] | None:
        """Returns the name and mark of the check that ran when the last runner was killed, or None."""
        try:
            values = json.loads(self._running.read_text())
            check, mark = values["check"], values["mark"]
        except (OSError, ValueError, KeyError):
            return None
        # If a line has this mark, the runner was killed between writing the line and removing running.json.
        return None if any(record.mark == mark for record in self.read()) else (check, mark)

    def end(self, record: Record) -> None:
        """Appends a line and records that no check runs."""
        line = (json.dumps(asdict(record), allow_nan=True) + "\n").encode()
        with open(self.path, "ab", buffering=0) as stream:
            stream.write(line)
            os.fsync(stream.fileno())
        self._running.unlink(missing_ok=True)
