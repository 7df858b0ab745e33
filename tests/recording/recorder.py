"""Records the executed lines of the product and the CPU seconds of a process, by test. Independent of pytest.

A process of a test appends one JSON line per test to its own file in the folder RECORD_TESTS:
{"test": id, "kind": "test" | "rank" | "program", "cpu": s, "children": s, "seconds": {mechanism: s},
"lines": {file: [line, ...]}}. All seconds are CPU seconds. children: seconds of child programs that have ended,
including browsers. Ranks and programs read the test's id from RECORD_TEST. A process that is killed writes no line.
"""

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import coverage

from tests.structure.measure import PRODUCT, ROOT

FOLDER = "RECORD_TESTS"
TEST = "RECORD_TEST"

# (module, attribute, mechanism to charge its time to). A function is patched once its module has been imported.
CHARGED = (
    ("torch.autograd", "backward", "backward"),
    ("torch.autograd", "grad", "backward"),
    ("megatron.core.models.gpt.gpt_model", "GPTModel.__init__", "building models"),
    ("triton.runtime.interpreter", "GridExecutor.__call__", "Triton interpretation"),
    ("tests.harness", "_start", "start of ranks"),
    ("tests.harness", "_warm_server", "start of ranks"),
    ("tests.harness", "_prepare_process", "start of ranks"),
    ("tests.harness", "_init_process_group", "start of ranks"),
)


class Stopwatch:
    """Measures CPU seconds by mechanism. Time is charged to the innermost running mechanism."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[str] = ["forward, updates, checks"]
        self._since = time.process_time()

    def enter(self, mechanism: str) -> None:
        self._charge()
        self._running.append(mechanism)

    def leave(self) -> None:
        self._charge()
        self._running.pop()

    def take(self) -> dict[str, float]:
        """Returns the seconds by mechanism since the last call."""
        self._charge()
        taken, self.seconds = self.seconds, {}
        return {name: round(value, 4) for name, value in taken.items() if value > 1e-4}

    def _charge(self) -> None:
        now = time.process_time()
        self.seconds[self._running[-1]] = self.seconds.get(self._running[-1], 0.0) + now - self._since
        self._since = now

    def wrap(self, function: Callable, mechanism: str) -> Callable:
        """Returns `function` wrapped so that its time is charged to `mechanism`."""

        @wraps(function)
        def charged(*args: Any, **kwargs: Any) -> Any:
            self.enter(mechanism)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return charged


class Recorder:
    """Records one process. `switch` ends the record of one test and begins the next, and `finish` ends the last one."""

    def __init__(self, folder: Path, kind: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{os.getpid()}-{time.time_ns()}.jsonl"
        self._kind = kind
        self._watch = Stopwatch()
        self._test = ""
        self._pid = os.getpid()
        self._patched: set[tuple[str, str]] = set()
        self._coverage = coverage.Coverage(
            data_file=None,
            branch=False,
            config_file=False,
            include=[str(ROOT / place) + ("/*" if "." not in place else "") for place in PRODUCT],
            messages=False,
        )
        self._coverage.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured"])
        self._time_imports()
        self.patch()
        self._coverage.start()
        self._cpu, self._children = time.process_time(), _children_cpu()

    def switch(self, test: str) -> None:
        """Writes the record of the current test, and begins the record of `test`."""
        if os.getpid() != self._pid:
            return  # a fork of this process does not own the recorder
        self.finish()
        self._test = test
        self._coverage.erase()
        self.patch()
        self._coverage.start()
        self._watch.take()
        self._cpu, self._children = time.process_time(), _children_cpu()

    def finish(self) -> None:
        """Writes the record of the current test, and stops recording."""
        if os.getpid() != self._pid:
            return
        self._coverage.stop()
        data = self._coverage.get_data()
        found: dict[str, set[int]] = {}
        for name in data.measured_files():
            # tools/ is imported through the link megatron/tools.
            found.setdefault(str(Path(name).resolve().relative_to(ROOT)), set()).update(data.lines(name) or ())
        lines = {name: sorted(numbers) for name, numbers in found.items()}
        cpu, children = time.process_time(), _children_cpu()
        if self._test or lines:
            line = {
                "test": self._test,
                "kind": self._kind,
                "cpu": round(cpu - self._cpu, 4),
                "children": round(children - self._children, 4),
                "seconds": self._watch.take(),
                "lines": lines,
            }
            # A test of full disks may have limited the file size of its process.
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def patch(self) -> None:
        """Wraps the functions of CHARGED whose modules have been imported since the last call."""
        for module, attribute, mechanism in CHARGED:
            if module not in sys.modules or (module, attribute) in self._patched:
                continue
            *path, name = attribute.split(".")
            owner: Any = sys.modules[module]
            for part in path:
                owner = vars(owner).get(part)
            if owner is not None and name in vars(owner):
                setattr(owner, name, self._watch.wrap(vars(owner)[name], mechanism))
            self._patched.add((module, attribute))

    def _time_imports(self) -> None:
        bootstrap: Any = importlib._bootstrap
        bootstrap._find_and_load = self._watch.wrap(bootstrap._find_and_load, "imports")


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def record_this_process(kind: str) -> Recorder | None:
    """Returns a recorder for the test that is named in the environment, or None if the run is not recorded."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    recorder = Recorder(Path(folder), kind)
    recorder.switch(os.environ.get(TEST, "collection"))
    return recorder
