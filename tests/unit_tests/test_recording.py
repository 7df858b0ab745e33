"""A recorded test run lists, for each test, the lines that its process, its ranks and its programs executed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.recording import table
from tests.structure.measure import ROOT

TIMERS = "megatron/core/timers.py"


def record(test: str, kind: str = "test", *, cpu: float = 1.0, children: float = 0.0, **lines: list[int]) -> dict:
    return {
        "test": test,
        "kind": kind,
        "cpu": cpu,
        "children": children,
        "seconds": {"imports": 0.25},
        "lines": {name.replace("__", "/") + ".py": numbers for name, numbers in lines.items()},
    }


def test_costs_are_summed_over_ranks_and_count_programs_once() -> None:
    records = [record("a.py::x"), record("a.py::x", "rank"), record("b.py::y", children=5.0)]
    records.append(record("b.py::y", "program", cpu=4.0))
    head, total, *rows = table.costs(records, by_test=False)
    assert head == ["", "tests", "ranks", "seconds", "programs", "browsers and killed programs", "imports"]
    assert total == ["all", "2", "1", "5.8", "4.0", "1.0", "0.8"]
    assert rows == [["b.py", "1", "0", "5.2", "4.0", "1.0", "0.2"], ["a.py", "1", "1", "0.5", "0.0", "0.0", "0.5"]]


def test_the_sum_of_costs_is_that_of_the_rows() -> None:
    # A program recorded by two processes, for example when one runs under the other.
    records = [record("a.py::x"), record("a.py::x", "program", cpu=3.0), record("b.py::y", children=5.0)]
    _, total, *rows = table.costs(records, by_test=False)
    assert float(total[3]) == pytest.approx(sum(float(row[3]) for row in rows), abs=0.1)


def test_a_folder_without_a_record_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no record"):
        table.main(["costs", str(tmp_path)])


def test_tests_of_a_line_are_all_that_ran_it() -> None:
    records = [record("a", megatron__b=[1, 2]), record("c", "rank", megatron__b=[2])]
    assert table.tests_of_lines(records, "megatron/b.py") == {1: {"a"}, 2: {"a", "c"}}


def test_the_tests_of_a_line_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [record("c", "rank", megatron__b=[2]), record("a", megatron__b=[1, 2]), record("d", megatron__c=[2])]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    assert table.main(["tests", str(tmp_path), "megatron/b.py:2"]) == 0
    assert capsys.readouterr().out == "a\nc\n"


def test_lost_lines_are_those_that_stand_and_ran_before() -> None:
    lines = (ROOT / TIMERS).read_text().splitlines()
    runs = next(number for number, text in enumerate(lines, 1) if text.startswith("class ")) + 0
    before = {TIMERS: {runs}}
    lost = table.lost_lines(before, {}, base="HEAD", prefixes=["megatron"])
    assert [(name, text) for name, _, text in lost] == [(TIMERS, lines[runs - 1].strip())] or _changed(TIMERS)
    assert table.lost_lines(before, before, base="HEAD", prefixes=["megatron"]) == []
    assert table.lost_lines(before, {}, base="HEAD", prefixes=["tools"]) == []


@pytest.mark.slow
def test_a_recorded_run_has_the_lines_of_ranks_and_of_programs(tmp_path: Path) -> None:
    tests = ["test_harness.py", "core/test_timers.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.recording.plugin", "-p", "no:cacheprovider"]
    environment = {**os.environ, "RECORD_TESTS": str(tmp_path), "PYTHONPATH": ""}  # else pytest is a recorded program
    paths = [str(ROOT / "tests/unit_tests" / name) for name in tests]
    subprocess.run([*command, "-k", "rank_order or adds_intervals", *paths], cwd=ROOT, env=environment, check=True)
    records: list[dict[str, Any]] = [
        json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()
    ]
    assert {one["kind"] for one in records} == {"test", "rank"}
    (timers,) = [name for name in {one["test"] for one in records} if "adds_intervals" in name]
    assert {timers} <= set().union(*table.tests_of_lines(records, TIMERS).values())


def _changed(name: str) -> bool:
    """Returns whether the file differs from the last commit, so that its line numbers may have changed."""
    return subprocess.run(["git", "diff", "--quiet", "HEAD", "--", name], cwd=ROOT, check=False).returncode != 0
