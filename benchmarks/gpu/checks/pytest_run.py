"""Runs tests of tests/gpu and reports each test as a side. Takes pytest's arguments."""

import sys
from collections import Counter

import pytest
from pytest import TestReport

from benchmarks.gpu.checks import reporting


class Outcomes:
    """Counts the outcomes of tests, and records failures and the slowest tests."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Prints a test's name before it runs, so that the last printed name shows which test hangs."""
        print(nodeid, flush=True)

    def pytest_runtest_logreport(self, report: TestReport) -> None:
        """Reports each test once: its call, or a failed or skipped setup or teardown."""
        if report.when != "call" and report.passed:
            return
        self.counts[report.outcome] += 1
        self.seconds[report.nodeid] = report.duration
        if report.failed:
            self.failed[report.nodeid] = str(report.longrepr)[-600:]
        reporting.report(side=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 3))

    def pytest_sessionfinish(self) -> None:
        """Reports the number of tests by outcome, all failures and the slowest tests."""
        slowest = sorted(self.seconds.items(), key=lambda pair: -pair[1])[:3]
        reporting.report(**self.counts, failures=self.failed, slowest=dict(slowest))


def main() -> None:
    """Runs pytest and exits with its status, or with NEEDS_GPU if every test was skipped."""
    outcomes = Outcomes()
    options = ["-q", "-s", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
    status = pytest.main([*options, *sys.argv[1:]], plugins=[outcomes])
    if status == 0 and outcomes.counts.total() == outcomes.counts["skipped"] > 0:
        reporting.end_without_gpu(f"{outcomes.counts['skipped']} tests were skipped")
    sys.exit(int(status))


if __name__ == "__main__":
    main()
