"""Pytest plugin that records covered lines and CPU seconds per test (format: recorder.py)."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recording.recorder import FOLDER, TEST, Recorder, record_this_process
from tests.structure.measure import ROOT

RECORDER = pytest.StashKey[Recorder | None]()


def pytest_configure(config: pytest.Config) -> None:
    if not os.environ.get(FOLDER):
        raise pytest.UsageError(f"the plugin tests.recording.plugin needs a folder in {FOLDER}")
    os.environ[FOLDER] = str(Path(os.environ[FOLDER]).absolute())
    if not hasattr(config, "workerinput"):
        _write_commit(Path(os.environ[FOLDER]))
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests:
        # Programs that tests start import sitecustomize.py from there, which records them.
        places = [str(Path(__file__).parent / "programs"), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    config.stash[RECORDER] = record_this_process("test") if runs_tests else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    recorder = item.config.stash[RECORDER]
    if recorder is None:
        return (yield)
    os.environ[TEST] = item.nodeid
    recorder.switch(item.nodeid)
    try:
        return (yield)
    finally:
        recorder.switch("between tests")
        os.environ[TEST] = "between tests"


def _write_commit(folder: Path) -> None:
    """Writes the recorded commit, to which the line numbers refer. Does nothing in a tree without git."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    if head.returncode == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "commit").write_text(head.stdout, encoding="utf-8")
