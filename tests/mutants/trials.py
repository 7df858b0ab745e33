"""Tries faults: for each, runs chosen tests in a copy of a sound tree, and checks which failures the fault caused.

[Note: Noticed]
A fault is noticed by the first test that fails, hangs or crashes with it, and that passes alone in the sound tree. A
test that also fails in the sound tree is broken. It is dropped, and the other tests continue. A test that passes with
the fault when it is repeated alone is dropped, too, because its first failure had a different cause. Tests that hung,
and files that could not be collected, are not repeated with the fault.
"""

import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from tests.mutants.pytest_runs import NO_TEST, Chosen, Failure, Limits, Stopped, TestRun, run_tests
from tests.mutants.results import Mutant, Result, Version

FAST, SLOW = "not slow and not soak", "slow and not soak"
NUM_FIRST_FILES = 20  # a fault that the nearest tests notice does not wait for the collection of hundreds of files
FAST_SHARE = 0.6  # share of a fault's seconds; the rest is for slow tests


@dataclass(frozen=True)
class Phase:
    """One pytest run: tests of one tier in some files, until `failures` tests have failed."""

    tier: str
    marks: str
    files: Chosen
    failures: int


@dataclass
class Trials:
    """Tries faults in copies of `sound`, a tree with the files of `version`. seconds: the time limit for one fault."""

    sound: Path
    version: Version
    chosen: Mapping[str, Chosen]  # by fault name
    seconds: float
    limits: Limits
    stop: threading.Event = field(default_factory=threading.Event)
    _is_sound: dict[str, bool] = field(default_factory=dict)  # by test id
    _numbers: "count[int]" = field(default_factory=count)

    def run(self, faults: list[Mutant], jobs: int, store: Callable[[Mutant, Result], None]) -> None:
        """Tries faults, `jobs` of them concurrently, and calls `store` with each result as soon as it is known."""
        with ThreadPoolExecutor(jobs) as pool:
            try:
                futures = {pool.submit(self.try_fault, fault): fault for fault in faults}
                for future in as_completed(futures):
                    store(futures[future], future.result())
            finally:
                self.stop.set()
                pool.shutdown(cancel_futures=True)

    def try_fault(self, fault: Mutant) -> Result:
        """Runs the fault's tests and returns the result. Raises Stopped when another thread sets `stop`."""
        if self.stop.is_set():
            raise Stopped
        result = Result(fault.text_hash, self.version.commit, self.version.product, self.version.tests, self.seconds)
        try:
            fault.changed((self.sound / fault.file).read_text(encoding="utf-8"))
        except (ValueError, FileNotFoundError):
            return replace(result, fits=False)
        work = self._new_folder()
        try:
            tree = work / "tree"
            shutil.copytree(self.sound, tree, symlinks=True)
            fault.put_into(tree)
            for phase in phases_of(self.chosen[fault.name]):
                noticing = self._run_phase(phase, tree, result)
                if noticing:
                    first = noticing[0]
                    result.noticed_by, result.how, result.why = first.test, first.how, first.why
                    result.tier = phase.tier
                    result.also = noticing[1].test if phase.tier == "slow" and len(noticing) > 1 else None
                    break
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return result

    def _run_phase(self, phase: Phase, tree: Path, result: Result) -> list[Failure]:
        """Runs one phase and returns the failures that noticed the fault. Updates counts and times of `result`."""
        skip = [test for test, sound in self._is_sound.items() if not sound]
        noticing: list[Failure] = []
        share = FAST_SHARE if phase.tier == "fast" else 1.0
        while (seconds := share * self.seconds - result.seconds) > 0:
            run = self._run(tree, phase.files, seconds, phase, skip=skip, failures=phase.failures - len(noticing))
            result.num_tests += len(run.ended)
            result.seconds = round(result.seconds + run.seconds, 1)
            for failure in run.failures:
                if self._passes_when_sound(failure, phase) and self._fails_alone(failure, tree):
                    noticing.append(failure)
                else:
                    result.broken.append(failure.test)
            skip += [*run.ended, *(failure.test for failure in run.failures)]
            if run.complete or run.out_of_time or not run.failures or len(noticing) >= phase.failures:
                result.out_of_time |= run.out_of_time
                return noticing
        result.out_of_time = True
        return noticing

    def _passes_when_sound(self, failure: Failure, phase: Phase) -> bool:
        """Returns whether the test passes, or the file is collected, in the sound tree. phase: the run that failed."""
        test = failure.test
        if test not in self._is_sound:
            file, collect_only = test.partition("::")[0], "::" not in test
            # A run that ended before its tests is repeated unchanged, including its marks.
            files = phase.files if test == NO_TEST else {file: None if collect_only else [test]}
            # Several times the limit in the faulty tree, since the process has to start.
            seconds = 3 * self.limits.seconds(test) + 60
            run = self._run(self.sound, files, seconds, phase if test == NO_TEST else None, collect_only=collect_only)
            self._is_sound[test] = not run.failures and not run.out_of_time and (collect_only or run.ended == [test])
        return self._is_sound[test]

    def _fails_alone(self, failure: Failure, tree: Path) -> bool:
        """Returns whether the test, repeated alone, fails again with the fault."""
        if failure.how not in ("failed", "crashed") or "::" not in failure.test:
            return True
        files = {failure.test.partition("::")[0]: [failure.test]}
        run = self._run(tree, files, 3 * self.limits.seconds(failure.test) + 60)
        return bool(run.failures) or run.out_of_time

    def _run(
        self,
        tree: Path,
        files: Chosen,
        seconds: float,
        phase: Phase | None = None,
        *,
        skip: list[str] | None = None,
        failures: int = 1,
        collect_only: bool = False,
    ) -> TestRun:
        work = self._new_folder()
        try:
            return run_tests(
                tree,
                files,
                work=work,
                seconds=seconds,
                marks=phase.marks if phase else "",
                skip=skip or [],
                failures=failures,
                limits=self.limits,
                collect_only=collect_only,
                stop=self.stop,
            )
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _new_folder(self) -> Path:
        return self.sound.parent / str(next(self._numbers))


def phases_of(chosen: Chosen) -> list[Phase]:
    """Returns the runs for one fault: fast tests of the first files, fast tests of the other files, slow tests of all.

    Slow tests run until a second failure, which shows whether the first test is the only one to notice the fault.
    """
    files = list(chosen.items())
    first, rest = dict(files[:NUM_FIRST_FILES]), dict(files[NUM_FIRST_FILES:])
    phases = [Phase("fast", FAST, first, 1), Phase("fast", FAST, rest, 1), Phase("slow", SLOW, chosen, 2)]
    return [phase for phase in phases if phase.files]
