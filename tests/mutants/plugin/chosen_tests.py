"""Pytest plugin that runs chosen tests in a chosen order, and reports each start and end to the waiting process.

It is loaded into versions of the project that may lack it, so it imports nothing of the project. The environment
variable CHOSEN_TESTS names a JSON file with four keys. files: the test ids to run of each file, in order; null stands
for all tests of a file, and {} for all files. skip: ids not to run. failures: the number of failed tests after which
the run stops. events: the file that receives one JSON line per event.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PLAN = pytest.StashKey[dict[str, Any]]()
FAILED = pytest.StashKey[set[str]]()
MARKS = ("slow", "soak")  # a version that does not define a mark would reject selecting by it


def pytest_configure(config: pytest.Config) -> None:
    config.stash[PLAN] = json.loads(Path(os.environ["CHOSEN_TESTS"]).read_text(encoding="utf-8"))
    config.stash[FAILED] = set()
    for mark in MARKS:
        config.addinivalue_line("markers", f"{mark}: selected by the process that waits")
    config.pluginmanager.register(_Reports(config))


@pytest.hookimpl(trylast=True)  # after conftest.py, which orders files by their slow tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    plan = config.stash[PLAN]
    files: dict[str, list[str] | None] = plan["files"] or {_file(item.nodeid): None for item in items}
    places = {name: place for place, name in enumerate(files)}
    ids = {name: None if chosen is None else set(chosen) for name, chosen in files.items()}
    skipped = set(plan["skip"])

    def is_chosen(item: pytest.Item) -> bool:
        chosen = ids.get(_file(item.nodeid), set())
        return item.nodeid not in skipped and (chosen is None or item.nodeid in chosen)

    config.hook.pytest_deselected(items=[item for item in items if not is_chosen(item)])
    items[:] = sorted(filter(is_chosen, items), key=lambda item: places[_file(item.nodeid)])
    for item in items:
        _tell(config, "chosen", item.nodeid, slow=item.get_closest_marker("slow") is not None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[Any]:
    _tell(item.config, "started", item.nodeid)
    result = yield
    _tell(item.config, "ended", item.nodeid)
    if len(item.config.stash[FAILED]) >= item.config.stash[PLAN]["failures"]:
        item.session.shouldstop = "enough tests have failed"
    return result


class _Reports:
    """Reports failures. This is a class because these hooks do not receive the config."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self._config.stash[FAILED]:
            self._config.stash[FAILED].add(report.nodeid)
            _tell(self._config, "failed", report.nodeid, why=_reason(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            _tell(self._config, "not collected", report.nodeid, why=_reason(report))


def _file(test: str) -> str:
    return test.partition("::")[0]


def _reason(report: Any) -> str:
    """Returns the error message as one short line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash is not None else str(report.longrepr)).strip().splitlines() or [""]
    return lines[0 if crash is not None else -1][:160]


def _tell(config: pytest.Config, event: str, test: str, **facts: Any) -> None:
    with open(config.stash[PLAN]["events"], "a", encoding="utf-8") as file:
        file.write(json.dumps({"event": event, "test": test, **facts}) + "\n")
        file.flush()
