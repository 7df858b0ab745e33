"""The file of results, checks.jsonl: one JSON object a line for each check that ended, whole whenever it is read.

A line is written and synchronized with the disk when its check ends, so that a runner or a machine that is killed loses
no more than the check that runs. running.json says which one that is. Nothing here runs a check.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class Verdict(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    NEEDS_GPU = "needs a GPU"
    NOT_CHECKED = "not checked here"  # a tool is missing, for example
    NO_TIME = "not run: no time left"
    INTERRUPTED = "interrupted"  # the runner was

    @property
    def is_failure(self) -> bool:
        """Whether a run with this verdict must not report success."""
        return self not in (Verdict.PASSED, Verdict.NEEDS_GPU, Verdict.NOT_CHECKED)


@dataclass(frozen=True)
class Where:
    """Conditions of a result. files: digest of this project's files."""

    date: str
    device: str
    torch: str
    commit: str
    files: str
    dry_run: bool


@dataclass(frozen=True)
class Record:
    """One line.

    seconds: wall time. exit_status: negative for a signal. orphans: processes that the check left behind, which were
    ended. results: numbers that the check reported; output: last lines. mark: of its processes.
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
        """Whether --resume leaves the check alone. A tool or a driver may be there the next time."""
        if self.verdict in (Verdict.NEEDS_GPU, Verdict.NOT_CHECKED):
            return self.where.dry_run
        return self.verdict in (Verdict.PASSED, Verdict.FAILED, Verdict.TIMED_OUT)


class Journal:
    """The results in one folder."""

    def __init__(self, folder: Path) -> None:
        self.path, self._running = folder / "checks.jsonl", folder / "running.json"

    def read(self) -> list[Record]:
        """Returns all whole lines in the order of their writing."""
        if not self.path.exists():
            return []
        records = []
        for line in self.path.read_text(errors="replace").split("\n")[:-1]:
            try:
                values = json.loads(line)
                found = {**values, "verdict": Verdict(values["verdict"]), "where": Where(**values["where"])}
                records.append(Record(**found))
            except (ValueError, KeyError, TypeError):
                continue  # a line of a disk that lost power, or of another version
        return records

    def mend(self) -> None:
        """Cuts a last line off that was not written to its end, so that the next one is whole."""
        if self.path.exists():
            data = self.path.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                os.truncate(self.path, whole)

    def begin(self, check: str, mark: str) -> None:
        """Notes that a check runs. mark: of its processes."""
        temporary = self._running.with_suffix(".new")
        temporary.write_text(json.dumps({"check": check, "mark": mark}) + "\n")
        temporary.replace(self._running)

    def interrupted(self) -> tuple[str, str] | None:
        """Name and mark of the check that ran when the last runner was killed; None if it was not."""
        try:
            values = json.loads(self._running.read_text())
            check, mark = values["check"], values["mark"]
        except (OSError, ValueError, KeyError):
            return None
        # A line with this mark: the runner was killed between writing it and removing running.json.
        return None if any(record.mark == mark for record in self.read()) else (check, mark)

    def end(self, record: Record) -> None:
        """Appends a line and notes that nothing runs."""
        line = (json.dumps(asdict(record), allow_nan=True) + "\n").encode()
        with open(self.path, "ab", buffering=0) as stream:
            stream.write(line)
            os.fsync(stream.fileno())
        self._running.unlink(missing_ok=True)
