"""Runs chosen tests of a tree in a separate process, with time limits for each test and for the whole run.

plugin/chosen_tests.py is the part that runs inside pytest. This module is independent of faults.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLUGIN = Path(__file__).parent / "plugin"
MARKER = "MUTANT_RUN"  # environment variable that marks the processes of a run, to find those that outlive it
PROCESSES = Path("/proc")
POLL_SECONDS = 0.1
NO_TEST = "tests/conftest.py"  # stands for a run that ended before it collected its tests

# For each test file, the ids to run, in order; None stands for every test of the file.
Chosen = Mapping[str, Sequence[str] | None]
EVERYTHING: Chosen = {}  # all files that pytest collects by default


@dataclass(frozen=True)
class Failure:
    """A test that failed, or a test file that could not be collected. how: failed, hung, crashed, not collected."""

    test: str
    how: str
    why: str = ""


@dataclass
class TestRun:
    """The outcome of a run. complete: every chosen test was run. out_of_time: the time limit ended the run."""

    __test__ = False

    chosen: dict[str, bool] = field(default_factory=dict)  # test id -> whether the test is slow
    ended: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False
    out_of_time: bool = False


@dataclass(frozen=True)
class Limits:
    """Time limits. A test hangs if it takes longer than both `test` seconds and `factor` times its recorded seconds."""

    test: float = 60.0
    factor: float = 10.0
    recorded: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, test: str) -> float:
        """Returns the number of seconds after which `test` counts as hanging."""
        return max(self.test, self.factor * self.recorded.get(test, 0.0))


class Stopped(Exception):
    """Raised when another thread has requested the end of all runs."""


def run_tests(
    tree: Path,
    chosen: Chosen,
    *,
    work: Path,
    seconds: float,
    marks: str = "",
    skip: Sequence[str] = (),
    failures: int = 1,
    limits: Limits | None = None,
    collect_only: bool = False,
    stop: threading.Event | None = None,
) -> TestRun:
    """Runs tests with the code of `tree` until `failures` tests have failed or `seconds` have passed.

    work: an empty folder for temporary files and caches. marks: pytest's -m expression. skip: ids not to run.
    Raises Stopped when `stop` is set.
    """
    plan, events, started = work / "plan.json", work / "events.jsonl", time.monotonic()
    work.mkdir(parents=True)
    events.touch()
    content = {"files": chosen, "skip": list(skip), "failures": failures, "events": str(events)}
    plan.write_text(json.dumps(content), encoding="utf-8")
    options = ["-p", "chosen_tests", "-p", "no:cacheprovider", "-q", "--tb=short", f"--rootdir={tree}", f"-m={marks}"]
    options += [f"--basetemp={work / 'base'}", *(["--collect-only"] if collect_only else [])]
    marker = uuid.uuid4().hex
    with (work / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *chosen],
            cwd=tree,
            env=_environment(tree, work, plan) | {MARKER: marker},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    watch = _Watch(process, events, limits or Limits())
    try:
        watch.until(started + seconds, stop)
    finally:
        _end(process, marker)
    watch.run.seconds = time.monotonic() - started
    return watch.run


class _Watch:
    """Follows the events of a run and determines how it ended."""

    def __init__(self, process: "subprocess.Popen[bytes]", events: Path, limits: Limits) -> None:
        self.run = TestRun()
        self._process, self._limits = process, limits
        self._events = events.open(encoding="utf-8")
        self._unread = ""
        self._current: tuple[str, float] | None = None  # the running test and its start time

    def until(self, deadline: float, stop: threading.Event | None) -> None:
        """Returns when the run has ended, a test hangs, or the deadline has passed."""
        with self._events:
            while self._process.poll() is None:
                self._read_events()
                now = time.monotonic()
                if self._current is not None and now - self._current[1] > self._limits.seconds(self._current[0]):
                    limit = self._limits.seconds(self._current[0])
                    self._fail(self._current[0], "hung", f"did not end within {limit:.0f} seconds")
                    return
                if now > deadline:
                    self.run.out_of_time = True
                    return
                if stop is not None and stop.is_set():
                    raise Stopped
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(POLL_SECONDS)
            self._read_events()
        self._judge_end(self._process.returncode)

    def _judge_end(self, status: int) -> None:
        self.run.complete = status in (0, 1, 5) and len(self.run.ended) == len(self.run.chosen)
        if self._current is not None:
            self._fail(self._current[0], "crashed", f"pytest ended with status {status}")
        elif status not in (0, 1, 5) and not self.run.failures:
            # For example, an error while conftest.py is imported.
            self._fail(NO_TEST, "not collected", f"pytest ended with status {status}")

    def _read_events(self) -> None:
        self._unread += self._events.read()
        *lines, self._unread = self._unread.split("\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        test = event["test"]
        match event["event"]:
            case "chosen":
                self.run.chosen[test] = event["slow"]
            case "started":
                self._current = (test, time.monotonic())
            case "ended":
                self.run.ended.append(test)
                self._current = None
            case how:
                self._fail(test, how, event["why"], ended=False)

    def _fail(self, test: str, how: str, why: str, *, ended: bool = True) -> None:
        self.run.failures.append(Failure(test, how, why))
        if ended and "::" in test:
            self.run.ended.append(test)


def _environment(tree: Path, work: Path, plan: Path) -> dict[str, str]:
    """Returns the environment of a run: separate temporary folder and caches, and no variables of an outer run."""
    places = {name: work / name.lower() for name in ("TMPDIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR")}
    for place in places.values():
        place.mkdir()
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_XDIST", "RECORD_TEST"))}
    outer.pop("SOAK", None)
    return {
        **outer,
        **{name: str(place) for name, place in places.items()},
        "TORCHINDUCTOR_CACHE_DIR": str(places["XDG_CACHE_HOME"] / "inductor"),
        "PYTHONPATH": os.pathsep.join([str(tree), str(PLUGIN)]),
        "OMP_NUM_THREADS": "1",
        "CHOSEN_TESTS": str(plan),
    }


def _end(process: "subprocess.Popen[bytes]", marker: str) -> None:
    """Kills a run: its process group, and marked processes that lead other groups, such as ranks and programs."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    text = f"{MARKER}={marker}".encode()
    # Two passes, since a process may fork during the first.
    for _ in range(2):
        for path in PROCESSES.glob("[0-9]*/environ"):
            with suppress(OSError):  # the process has ended, or belongs to another user
                if text in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
