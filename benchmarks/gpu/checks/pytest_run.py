"""Runs tests of tests/gpu, and reports each failure. Arguments are those of pytest."""

import sys
from collections import Counter

import pytest
from pytest import TestReport

from benchmarks.gpu.checks.reporting import end_without_gpu, report


class Outcomes:
    """Counts outcomes, and records failures and the slowest tests."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Prints a test's name before it runs, so that the last printed test is the one that hangs."""
        print(nodeid, flush=True)

    def pytest_runtest_logreport(self, report: TestReport) -> None:
        """Counts a test once: its call, or the phase around it that failed or skipped it."""
        if report.when != "call" and report.passed:
            return
        self.counts[report.outcome] += 1
        self.seconds[report.nodeid] = report.duration
        if report.failed:
            self.failed[report.nodeid] = str(report.longrepr)[-600:]
        self.tell()

    def tell(self) -> None:
        """Reports all outcomes so far, so that a killed run has reported them too."""
        slowest = sorted(self.seconds.items(), key=lambda pair: -pair[1])[:3]
        report(**self.counts, failures=self.failed, slowest=dict(slowest))


def main() -> None:
    """Returns pytest's exit status, or that of a check that needs a GPU if every test was skipped."""
    outcomes = Outcomes()
    options = ["-q", "-s", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
    status = pytest.main([*options, *sys.argv[1:]], plugins=[outcomes])
    if status == 0 and outcomes.counts.total() == outcomes.counts["skipped"] > 0:
        end_without_gpu(f"{outcomes.counts['skipped']} tests were skipped")
    sys.exit(int(status))


if __name__ == "__main__":
    main()
