"""Seeded faults in a small project: selection of tests, criteria for detection, and continuation of a run."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import __main__ as mutants
from tests.mutants.results import Mutant, Result, Results, Version, written_tables
from tests.mutants.selection import changed_lines, choose_all, levels_of
from tests.mutants.trials import phases_of

PRODUCT = """import functools
import time

RATE = 3


def double(value):
    return 2 * value


def wait_for(value):
    while value > 5:
        value -= 1
        time.sleep(0.01)
    return value


def triple(value):
    return (
        3
        * value
    )


def unused(value):
    return value


@functools.cache
def rate():
    return RATE
"""
TESTS = """import pytest
from megatron.core import numbers


def test_broken():
    assert numbers.double(2) == 5


def test_double():
    assert numbers.double(2) == 4


def test_wait():
    assert numbers.wait_for(7) == 5


def test_unused_runs():
    numbers.unused(1)


@pytest.mark.slow
def test_triple():
    assert numbers.triple(2) == 6
"""
LINES = {
    "test_broken": [8],
    "test_double": [8],
    "test_wait": [12, 13, 14, 15],
    "test_unused_runs": [26],
    "test_triple": [19],
}
NUMBERS = "megatron/core/numbers.py"
TEST_FILE = "tests/test_numbers.py"
MORE = "tests/test_more.py"  # exists only in the first of two commits
MORE_TESTS = """from megatron.core.numbers import unused


def test_unused():
    assert unused(1) == 1
"""
FAULTS = [
    {"name": "by a fast test", "old": "2 * value", "new": "3 * value"},
    {"name": "by a slow test", "old": "        3\n", "new": "        4\n"},
    {"name": "by none", "old": "def unused(value):\n    return value", "new": "def unused(value):\n    return -value"},
    {"name": "by a hang", "old": "value -= 1", "new": "value -= 0"},
    {"name": "by its import", "old": "RATE = 3", "new": "RATE = THREE"},
]


def mutant(name: str = "a", *, old: str = "a", new: str = "b", file: str = NUMBERS) -> Mutant:
    return Mutant(name, "kind", file=file, old=old, new=new, breaks="Something holds.")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Creates a repository with one module, its tests, a recording and faults."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    root = tmp_path / "project"
    files = {
        NUMBERS: PRODUCT,
        TEST_FILE: TESTS,
        MORE: MORE_TESTS,
        "pytest.ini": "[pytest]\nmarkers = slow\naddopts = --strict-markers\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "-q")
    git(root, "add", "--all")
    git(root, "commit", "-q", "-m", "first")
    git(root, "rm", "-q", MORE)
    git(root, "commit", "-q", "-m", "second")
    entries: list[dict[str, Any]] = [
        {"test": f"{TEST_FILE}::{name}", "kind": "test", "cpu": 0.1, "children": 0.0, "lines": {NUMBERS: lines}}
        for name, lines in LINES.items()
    ]
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "1.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (tmp_path / "record" / "commit").write_text(git(root, "rev-parse", "HEAD"))
    write_faults(tmp_path, FAULTS)
    return root


def write_faults(folder: Path, faults: list[dict[str, str]]) -> None:
    entries = [{"kind": "kind", "file": NUMBERS, "breaks": "Something holds.", **fault} for fault in faults]
    (folder / "faults.yaml").write_text(json.dumps(entries))


def git(root: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *identity, *words], cwd=root, capture_output=True, text=True, check=True).stdout


def run(root: Path, *options: str) -> int:
    folder = root.parent
    files = ["--faults", str(folder / "faults.yaml"), "--results", str(folder / "results.json")]
    return mutants.main([*files, "--test-limit", "2", "--jobs", "1", *options], root=root)


@pytest.mark.slow
def test_faults_are_noticed_by_failures_hangs_and_imports_but_not_by_broken_tests(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = str(project.parent / "record")
    assert run(project, record) == 1
    results = Results.read(project.parent / "results.json").faults
    found = {name: (one.noticed_by, one.how, one.tier) for name, one in results.items()}
    assert found == {
        "by a fast test": (f"{TEST_FILE}::test_double", "failed", "fast"),
        "by a slow test": (f"{TEST_FILE}::test_triple", "failed", "slow"),
        "by none": (None, "", None),
        "by a hang": (f"{TEST_FILE}::test_wait", "hung", "fast"),
        "by its import": (TEST_FILE, "not collected", "fast"),
    }
    assert results["by a fast test"].broken == [f"{TEST_FILE}::test_broken"]
    table = (project.parent / "results.txt").read_text()
    assert "make test-fast notices 3 of 5 faults, make test 4" in table
    assert "not noticed: by none" in table and "0 of 1 slow tests" in table
    # Nothing has changed, so no test runs.
    capsys.readouterr()
    assert run(project, record) == 1
    assert " tests, " not in capsys.readouterr().out.partition("make test-fast")[0]
    # An older suite had a test that detects the fault.
    assert run(project, "--base", "HEAD~1") == 1
    out = capsys.readouterr().out
    assert f"by none: fast: {MORE}::test_unused (" in out and "the 5 faults that this suite or that of" in out
    assert "make test-fast notices 60.0%, make test 80.0%" in out
    # With the restored test, only the undetected fault runs.
    git(project, "revert", "--no-edit", "HEAD")
    assert run(project, record) == 0
    out = capsys.readouterr().out
    assert f"by none: fast: {MORE}::test_unused (1 tests" in out and out.count(" s)\n") == 1


def test_a_run_that_is_interrupted_says_how_to_go_on(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mutants.Trials, "try_fault", interrupt)
    assert run(project, str(project.parent / "record")) == 130
    assert "run again to go on" in capsys.readouterr().err


def test_a_fault_that_does_not_fit_is_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_faults(project.parent, [{"name": "moved", "old": "return value", "new": "return None"}])
    assert run(project, str(project.parent / "record")) == 2
    assert f"its text occurs 2 times in {NUMBERS}, must be 1" in capsys.readouterr().err
    write_faults(project.parent, [FAULTS[0], FAULTS[0]])
    assert run(project, str(project.parent / "record")) == 2
    assert "these are used twice: by a fast test" in capsys.readouterr().err


def test_a_fault_concerns_its_statement_its_function_then_its_file(tmp_path: Path) -> None:
    path = tmp_path / NUMBERS
    path.parent.mkdir(parents=True)
    path.write_text(PRODUCT)
    importing = tmp_path / "megatron/core/importing.py"
    importing.write_text("from megatron.core.numbers import RATE\n\n\ndef f():\n    return RATE\n")
    bodies = {NUMBERS: {8, 12, 13, 14, 15, 19, 20, 21, 22, 26, 31}, "megatron/core/importing.py": {5}}
    assert levels_of(mutant(old="        * value", new="        + value"), tmp_path) == [
        {NUMBERS: {19, 20, 21, 22}},
        {NUMBERS: {19, 20, 21, 22}},
        bodies,
    ]
    assert levels_of(mutant(old="value > 5", new="value > 6"), tmp_path)[:2] == [
        {NUMBERS: {12}},
        {NUMBERS: {12, 13, 14, 15}},
    ]
    # Lines of a constant or of a cached function are recorded for at most one test.
    for old in ("RATE = 3", "return RATE"):
        assert levels_of(mutant(old=old, new="pass"), tmp_path) == [bodies]


def test_changed_test_files_run_whole_if_they_import_the_package_or_a_recorded_test_ran_the_lines(
    project: Path,
) -> None:
    record = project.parent / "record"
    entry = {"kind": "test", "cpu": 0.1, "children": 0.0, "lines": {NUMBERS: [8]}}
    lines = [json.dumps({**entry, "test": f"tests/test_{name}.py::test_a"}) for name in ("old", "new")]
    (record / "2.jsonl").write_text("\n".join(lines))
    for name in ("old", "new"):
        (project / f"tests/test_{name}.py").write_text("def test_a():\n    pass\n")
    git(project, "add", "tests/test_old.py")
    git(project, "commit", "-q", "-m", "as recorded")
    recorded = git(project, "rev-parse", "HEAD").strip()
    (project / "tests/test_package.py").write_text("from megatron.core import other\n\n\ndef test_a():\n    pass\n")
    git(project, "add", "tests/test_new.py", "tests/test_package.py")
    git(project, "commit", "-q", "-m", "after the record")
    places = {"folder": record, "root": project, "record_commit": recorded, "commit": "HEAD"}
    chosen, _ = choose_all([mutant(old="2 * value")], project, **places)
    assert chosen["a"]["tests/test_old.py"] == ["tests/test_old.py::test_a"]
    assert chosen["a"]["tests/test_new.py"] is None and list(chosen["a"])[-1] == "tests/test_package.py"


def test_changed_lines_are_those_that_differ_or_surround_an_addition() -> None:
    assert changed_lines("a\nb\nc\n", "a\nx\nc\n") == {2}
    assert changed_lines("a\nb\nc\n", "a\nc\n") == {2}
    assert changed_lines("a\nb\nc\n", "a\nb\nx\nc\n") == {2, 3}


def test_slow_tests_run_after_all_fast_ones_and_until_a_second_notices() -> None:
    phases = phases_of({f"tests/test_{number}.py": None for number in range(30)})
    assert [(phase.tier, len(phase.files), phase.failures) for phase in phases] == [
        ("fast", 20, 1),
        ("fast", 10, 1),
        ("slow", 30, 2),
    ]


def test_results_outlive_changes_of_tests_if_the_fault_was_noticed(tmp_path: Path) -> None:
    fault, version = mutant(), Version("commit", "product", "tests")
    results = Results(tmp_path / "results.json")
    results.faults["a"] = Result(fault.text_hash, "commit", "product", "tests", 300.0, noticed_by="test", tier="fast")
    results.write()
    results = Results.read(results.path)
    assert results.is_known(fault, version, limit=300.0)
    assert results.is_known(fault, Version("later", "product", "other tests"), limit=300.0)
    assert not results.is_known(fault, Version("later", "other product", "tests"), limit=300.0)
    assert not results.is_known(mutant(new="c"), version, limit=300.0)
    results.faults["a"].noticed_by = "tests/test_a.py::test_a[1]"
    assert not results.is_known(fault, version, limit=300.0, tree=tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_a.py").write_text("def test_a(number):\n    pass\n")
    assert results.is_known(fault, version, limit=300.0, tree=tmp_path)
    results.faults["a"].noticed_by = None
    assert results.is_known(fault, version, limit=300.0)
    assert not results.is_known(fault, Version("later", "product", "other tests"), limit=300.0)
    results.faults["a"].out_of_time = True
    assert results.is_known(fault, version, limit=300.0) and not results.is_known(fault, version, limit=600.0)


def test_slow_tests_that_were_never_alone_are_listed(tmp_path: Path) -> None:
    faults = [mutant("a"), mutant("b")]
    result = Result("", "commit", "product", "tests", 300.0, noticed_by="t::1", tier="slow")
    both = Result("", "commit", "product", "tests", 300.0, noticed_by="t::2", tier="slow", also="t::3")
    slow = {"t::1": 9.0, "t::2": 2.0, "t::3": 3.0}
    text = written_tables(faults, Results(tmp_path, faults={"a": result, "b": both}, slow=slow), tmp_path)
    assert "2 of 3 slow tests, 5 of 14 CPU seconds" in text
    assert text.rstrip().endswith("     3.0   1 t::3\n     2.0   1 t::2")
