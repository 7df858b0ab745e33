"""GPU benchmarks: programs run with small sizes on a CPU and report measurements; the results page is up to date."""

import importlib
import json
import multiprocessing
import sys
from pathlib import Path
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.gpu import graph_step
from benchmarks.gpu.gemm_beside_stash import Beside
from benchmarks.gpu.graph_step import Case, batches, tables_of
from benchmarks.gpu.record import Target
from benchmarks.gpu.results_page import PAGE, RESULTS, page
from benchmarks.gpu.shapes import BASE, CAPACITY, RANKS, ROUTINGS, SHAPES, SMALL, sides_of
from tests.harness import launch_on_ranks

PROGRAMS = {
    "stash_copy": "benchmarks.gpu.stash_copy --small --rounds 2",
    "gemm_beside_stash": "benchmarks.gpu.gemm_beside_stash --small --rounds 2",
    "graph_step": "benchmarks.gpu.graph_step --small --rounds 1 --steps 1 --routings skewed",
    "stash_step": "benchmarks.stash_step --device cpu --rounds 1 --layers 3 --tokens 64 --hidden 32 --ffn 16",
}


def test_the_page_of_results_is_what_the_results_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(RESULTS), "run benchmarks/gpu/results_page.py"


def run_program(words: list[str]) -> None:
    """Runs a module in this process. Its subprocesses are forks, which have torch imported."""
    with (
        patch.object(sys, "argv", words),
        patch.object(graph_step, "get_context", lambda method: multiprocessing.get_context("fork")),
    ):
        importlib.import_module(words[0]).main()


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with the results of a dry run of every program."""
    folder = tmp_path_factory.mktemp("results")
    for name, words in PROGRAMS.items():
        plot = f"--plot {folder}/{name}_gpu.svg" if name != "stash_step" else ""
        words = f"{words} --json {folder}/{name}_gpu.json {plot}".split()
        (outcome,) = launch_on_ranks(run_program, 1, words, backend=None)
        assert outcome.exit_code == 0, outcome.stdout + outcome.stderr
    return folder


def record_of(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}_gpu.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_records_where_it_ran(dry_run: Path, name: str) -> None:
    assert {"date", "device", "torch", "commit"} <= record_of(dry_run, name).keys()


@pytest.mark.slow
def test_all_sides_of_a_step_run_and_small_pools_spill_or_recompute(dry_run: Path) -> None:
    for case in record_of(dry_run, "graph_step")["cases"]:
        assert len(case["sides"]) == 8 and not any("error" in side for side in case["sides"].values())
        assert case["sides"]["graph + stash, spill"]["on_host"] and case["sides"]["graph + stash, rungs"]["again"]


@pytest.mark.slow
def test_a_dry_run_draws_plots_and_fills_the_page_of_results(dry_run: Path) -> None:
    plots = [ElementTree.parse(path).getroot() for path in dry_run.glob("*.svg")]
    assert len(plots) == 3 and all(len(plot) > 3 for plot in plots)
    text = page(dry_run)
    assert "Not yet run" not in text and all(f"\n## {name}\n" in text for name in list(PROGRAMS)[:3])


def test_sides_that_do_not_fit_together_run_in_groups_with_the_base() -> None:
    sides = sides_of(ROUTINGS["balanced"])
    for at_once, sizes in ((8, [8]), (5, [5, 4]), (3, [3, 3, 3, 2])):
        groups = batches(sides, at_once=at_once)
        assert [len(group) for group in groups] == sizes and all([*group][0] == BASE for group in groups)
        assert {name for group in groups for name in group} == set(sides)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_forced_choices_bring_the_rows_that_were_asked_for(routing: str) -> None:
    shape, forced = SMALL["small"], ROUTINGS[routing]
    tables = tables_of(Case("small", shape, routing))
    assert (tables.sort(dim=-1).values.diff(dim=-1) > 0).all()  # no token has the same expert twice
    own = (tables < shape.num_own).sum(dim=(2, 3)) * RANKS / (shape.seq * shape.topk)  # per turn and layer
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
