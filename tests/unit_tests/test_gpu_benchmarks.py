"""GPU benchmarks: their programs run small on a CPU, and say what they measured; the page of results is up to date."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.gpu.gemm_beside_stash import Beside
from benchmarks.gpu.graph_step import Case, tables_of
from benchmarks.gpu.record import Target
from benchmarks.gpu.results_page import PAGE, RESULTS, page
from benchmarks.gpu.shapes import CAPACITY, RANKS, ROUTINGS, SHAPES, SMALL, sides_of
from tests.structure.measure import ROOT

PARTS = ["stash_copy", "gemm_beside_stash", "graph_step", "stash_step", "sanitizer"]


def test_the_page_of_results_is_what_the_results_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(RESULTS), "run benchmarks/gpu/results_page.py"


@pytest.mark.slow
def test_a_dry_run_writes_results_plots_and_a_page(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu/run_all.py", "--dry-run", "--out", str(tmp_path), "--only", *PARTS]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    records = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*_gpu.json")}
    assert sorted(records) == [f"{name}_gpu" for name in sorted([*PARTS[:4], "run"])]
    assert all({"date", "device", "torch", "commit"} <= record.keys() for record in records.values())
    assert {part["verdict"] for part in records["run_gpu"]["parts"]} <= {"passed", "not checked here"}
    for case in records["graph_step_gpu"]["cases"]:
        assert len(case["sides"]) == 8 and not any("error" in side for side in case["sides"].values())
        assert case["sides"]["graph + stash, spill"]["on_host"] and case["sides"]["graph + stash, rungs"]["again"]
    plots = [ElementTree.parse(path).getroot() for path in tmp_path.glob("*.svg")]
    assert len(plots) == 3 and all(len(plot) > 3 for plot in plots)
    text = page(tmp_path)
    assert "Not yet run" not in text and all(f"\n## {name}\n" in text for name in PARTS[:3])


@pytest.mark.parametrize("routing", ROUTINGS)
def test_forced_choices_bring_the_rows_that_were_asked_for(routing: str) -> None:
    shape, forced = SMALL["small"], ROUTINGS[routing]
    tables = tables_of(Case("small", shape, routing))
    assert (tables.sort(dim=-1).values.diff(dim=-1) > 0).all()  # no expert twice
    own = (tables < shape.num_own).sum(dim=(2, 3)) * RANKS / (shape.seq * shape.topk)  # of each turn and layer
    assert (own <= CAPACITY).all() and abs(own.mean() - forced.mean) < 0.1
    assert (own == 1).all() if routing == "balanced" else own.std() > 0.1
    assert len({tuple(turn.flatten().tolist()) for turn in tables}) == len(tables)


def test_memory_may_be_what_pages_and_working_sets_are() -> None:
    side = sides_of(ROUTINGS["balanced"])["graph + stash"]
    assert side.most_memory(SHAPES["Qwen3-30B-A3B"], ROUTINGS["balanced"]) == pytest.approx(1.1 + 2 * 2.0 / 12)


@pytest.mark.parametrize(
    ("measured", "is_least", "holds"),
    [(0.9, True, True), (0.89, True, False), (0.91, False, False), (None, True, False)],
)
def test_a_target_holds_if_it_was_measured_and_reached(measured: float | None, is_least: bool, holds: bool) -> None:
    assert Target("rate", measured, 0.9, is_least=is_least).holds is holds


def test_copies_beside_products_count_as_far_as_they_came() -> None:
    torch.testing.assert_close(Beside(10.0, [2.0, 4.0, 6.0, 9.0, 13.0]).pairs, 4.25)
    assert Beside(10.0, [2.0, 4.0]).pairs == 2.0 and not Beside(10.0, [2.0, 4.0]).is_covered
