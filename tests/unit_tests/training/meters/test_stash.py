"""Compares logged values of expert buffers and pages with event-by-event simulated pools, over ranks and steps."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.core.device import memory_bytes
from megatron.core.pipeline_parallel.expansion import expand
from megatron.core.pipeline_parallel.schedule import Pipeline, stage_orders
from megatron.core.transformer.moe.paged_stash import Counter, EventKind, PoolLayout, Priority, TensorSpec
from megatron.core.transformer.moe.paged_stash.arithmetic import PoolModel, page_moves
from megatron.core.transformer.moe.paged_stash.sizing import rounded_up
from megatron.tools.run_log import read_run
from megatron.training.arguments import parse_args
from megatron.training.callbacks import PoolReport, RankTimes, RunStart, StashReport, StepReport
from megatron.training.callbacks.console import format_training_line, shortage_words
from megatron.training.callbacks.run_files import JsonlLog
from megatron.training.callbacks.tensorboard import TensorBoardLog
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.config import LoggingConfig
from megatron.training.meters.stash import StashMeter, advice_line, pages_to_keep_all, stash_timeline
from megatron.training.step.expert_memory import StepFigures, rows_by_group, stash_events
from tests.harness import run_on_ranks
from tests.structure.measure import ROOT
from tests.unit_tests.training.small_reports import STEP

FLAGS = "--num-layers 5 --hidden-size 8 --num-attention-heads 2 --log-interval 3"
RUN_CONFIG = run_config_of(parse_args(argv=FLAGS.split()))
SPECS = tuple(
    TensorSpec(width, width, 150, priority) for width, priority in ((64, Priority.INPUT), (128, Priority.GATE_UP))
)
HIGH_WATERS = (Counter.HIGH_WATER_DEVICE, Counter.HIGH_WATER_HOST)
COUNTED = (Counter.SPILLED_PAGES, Counter.PLANNED_PAGES, Counter.DROPPED_GATE_UP)
LAYERS = ([[1, 2]], [[4, 5]])


def figures_of_step(rank: int, step: int, *, device_pages: int = 60, host_pages: int = 10) -> tuple[StepFigures, int]:
    """Runs random rows through a pool event by event. Also returns the peak number of held pages."""
    chosen = random.Random(f"{rank} {step}")
    events = stash_events(expand(stage_orders(Pipeline(2, 1), 3)[rank], LAYERS[rank]))
    pool = PoolModel(PoolLayout(512, device_pages, host_pages))
    passes, rows, most = [], [], 0
    for event, following in zip(events, (*events[1:], None)):
        if event.kind is EventKind.BACKWARD:
            pool.release(event.group)
            continue
        rows.append(chosen.randrange(20, 150))
        passes.append(int(event.name.split()[1]))
        if following is not None and following.group != event.group:
            pool.plan(event.group, SPECS, num_rows=rows[-1])
            most = max(most, device_pages + host_pages - sum(pool.free))
    sizes = StepFigures(
        layout=pool.layout,
        counters=pool.counters,
        tail_bytes=step,
        rows=tuple(rows),
        passes=tuple(passes),
        balanced_rows=100,
        buffer_rows=150,
        pages_wanted=100 * rank + step,
        balanced_pages=50,
        capacity_factor=1.5,
        factor_needed=1 + chosen.random(),
        num_discards=int(step == 2),
        events=events,
        specs={event.name: SPECS for event in events},
        reserve=((0, 0, 0),) * len(rows),
        prefetch_groups=0,
    )
    return sizes, most


HELD = {"rank_0": {"parameters": 3}, "max": {"parameters": 4}, "stages": {0: {"parameters": 4}}}


class Memory:
    last_step: StepFigures | None = None


def reports_of_rank(rank_steps: list[list[StepFigures]], rank: int) -> list[StashReport | None]:
    memory = Memory()
    meter = StashMeter(memory, RUN_CONFIG, device=torch.device("cpu"))
    reports = []
    for iteration, step in enumerate(rank_steps[rank], 1):
        memory.last_step = step
        reports.append(meter.measure(replace(STEP, iteration=iteration, is_last=iteration == 5)).stash)
    return reports


def on_rank(rank_steps: list[list[StepFigures]]) -> list[StashReport | None]:
    return reports_of_rank(rank_steps, torch.distributed.get_rank())


def most_rows(steps: list[StepFigures]) -> dict[int, int]:
    rows: dict[int, int] = {}
    for layer, count in (pair for step in steps for pair in zip(step.passes, step.rows)):
        rows[layer] = max(count, rows.get(layer, 0))
    return rows


def held_at_most(step: StepFigures) -> int:
    return sum(step.counters[tier] for tier in HIGH_WATERS)


def counted(steps: list[StepFigures]) -> list[int]:
    return [sum(step.counters[counter] for step in steps) for counter in COUNTED]


def rungs_of(ranks: list[list[StepFigures]], steps: range) -> dict[str, list[int]]:
    counters = {"spilled_pages": Counter.SPILLED_PAGES, "dropped_gate_up": Counter.DROPPED_GATE_UP}
    found = {
        name: [sum(of_rank[step].counters[counter] for of_rank in ranks) for step in steps]
        for name, counter in counters.items()
    }
    found["void_steps"] = [int(step == 1) for step in steps]
    return {name: counts for name, counts in found.items() if any(counts)}


def test_a_report_covers_all_ranks_and_steps_since_the_last() -> None:
    ranks = [[figures_of_step(rank, step)[0] for step in range(1, 6)] for rank in (0, 1)]
    seen = run_on_ranks(on_rank, 2, ranks)
    most_held = max((step for steps in ranks for step in steps), key=held_at_most)
    assert seen[0] == seen[1] and [report is not None for report in seen[0]] == [False, False, True, False, True]
    for report, steps in ((seen[0][2], range(3)), (seen[0][4], range(3, 5))):
        own, pool = [ranks[rank][step] for rank in (0, 1) for step in steps], report.pool
        factors = [max(ranks[0][step].factor_needed, ranks[1][step].factor_needed) for step in steps]
        assert (report.steps, report.void_steps, report.rows) == (len(steps), int(1 in steps), most_rows(own))
        assert (report.balanced_rows, report.buffer_rows, pool.factor) == (100, 150, 60 / 50)
        torch.testing.assert_close(report.factors_needed, tuple(factors), rtol=1e-5, atol=0)
        assert pool.factors_needed == tuple((100 + step + 1) / 50 for step in steps)
        to_keep_all = [pages_to_keep_all(step) - 10 for step in own if step.counters[Counter.DROPPED_GATE_UP]]
        assert pool.factor_to_keep_all == max(to_keep_all) / 50 > pool.factor
        assert [pool.spilled_pages, pool.planned_pages, pool.dropped_gate_up] == counted(own)
        assert report.rungs == rungs_of(ranks, steps) != {}
        assert pool.tail_bytes == 2 * sum(step + 1 for step in steps)
        fullest = max(own, key=held_at_most)
        high_waters = [fullest.counters[tier] for tier in HIGH_WATERS]
        assert [pool.device_high_water, pool.host_high_water] == high_waters
        assert fullest in ranks[pool.rank]
        assert pool.timeline == (stash_timeline(fullest) if fullest is most_held else None)


def test_the_timeline_is_what_a_pool_holds_pass_by_pass() -> None:
    for rank, host_pages in ((0, 10), (1, 0)):
        figures, most = figures_of_step(rank, 1, host_pages=host_pages)
        timeline = stash_timeline(figures)
        held = [list(accumulate(change[tier] for change in timeline["changes"])) for tier in (2, 3)]
        assert [max(tier) for tier in held] == [figures.counters[tier] for tier in HIGH_WATERS]
        assert max(map(sum, zip(*held))) == most and held[0][-1] == held[1][-1] == 0
        layers = [abs(layer) for layer in timeline["passes"]]
        assert layers == [int(event.name.split()[1]) for event in figures.events]
        assert all(layers[place] == layer for place, layer, *_ in timeline["changes"])


def tensors_dropped(step: StepFigures, *, num_pages: int) -> int:
    pool, rows = PoolModel(PoolLayout(512, num_pages - 5, 5)), rows_by_group(step.passes, step.rows)
    for move in page_moves(step.events, prefetch_groups=step.prefetch_groups):
        if move.is_taken:
            reserve = step.reserve[move.forward_index]
            pool.plan(move.group, step.specs[move.group[0]], num_rows=rows[move.group], reserve=reserve)
        else:
            pool.release(move.group)
    return pool.counters[Counter.VOID] + pool.counters[Counter.DROPPED_GATE_UP]


def test_the_smallest_pool_that_keeps_all_drops_a_tensor_with_one_page_less() -> None:
    for seed in range(20):
        chosen = random.Random(seed)
        step, _ = figures_of_step(seed % 2, seed)
        reserve = tuple((0, least := chosen.randrange(30), least + chosen.randrange(30)) for _ in step.passes)
        step = replace(step, reserve=reserve, prefetch_groups=chosen.randrange(3))
        enough = pages_to_keep_all(step)
        assert tensors_dropped(step, num_pages=enough) == 0 < tensors_dropped(step, num_pages=enough - 1)


def pool_report(**fields: Any) -> PoolReport:
    pool = reports_of_rank([[figures_of_step(0, step)[0] for step in range(1, 6)]], 0)[2].pool
    counts = {"spilled_pages": 0, "dropped_gate_up": 0, "factor": 1.1}
    return replace(pool, **{**counts, "factor_to_keep_all": 0.0, "factors_needed": (1.271, 1.0), **fields})


@pytest.mark.parametrize(
    "fields, words",
    [
        ({}, ""),
        (
            {"dropped_gate_up": 89, "factor_to_keep_all": 1.2701},
            "gate_up recomputed 89 times, too few pages (factor needed 1.28, given 1.10)",
        ),
        (
            {"dropped_gate_up": 1, "factor_to_keep_all": 1.5},
            "gate_up recomputed 1 time, too few pages (factor needed 1.50, given 1.10)",
        ),
        ({"spilled_pages": 4}, "4 pages spilled to the host, too few pages (factor needed 1.28, given 1.10)"),
        (
            {"dropped_gate_up": 2, "factor_to_keep_all": 0.8, "device_pages": 0, "factor": 0.0},
            "gate_up recomputed 2 times, too few pages (factor needed 0.80)",
        ),
        (
            {"spilled_pages": 4, "dropped_gate_up": 2, "factor_to_keep_all": 1.15},
            "4 pages spilled to the host, gate_up recomputed 2 times, too few pages (factor needed 1.28, given 1.10)",
        ),
        # A step with an unknown order, in a pool with enough pages for all of it.
        ({"dropped_gate_up": 2, "factor_to_keep_all": 0.95}, "gate_up recomputed 2 times"),
        ({"dropped_gate_up": 2, "device_pages": 0, "factor": 0.0}, "gate_up recomputed 2 times"),
        (
            {"spilled_pages": 1, "dropped_gate_up": 1},
            "1 page spilled to the host, too few pages (factor needed 1.28, given 1.10), gate_up recomputed 1 time",
        ),
        (
            {"dropped_gate_up": 2, "factor": 1.0999, "factor_to_keep_all": 1.09995},
            "gate_up recomputed 2 times, too few pages (factor needed 1.09995, given 1.09990)",
        ),
    ],
)
def test_the_console_says_in_words_why_something_was_recomputed(fields: dict[str, Any], words: str) -> None:
    assert shortage_words(pool_report(**fields)) == words


def advised_by(
    device_pages: Callable[[int], int], *, has_notes: bool = True
) -> dict[int, tuple[tuple[str, ...], PoolReport]]:
    memory = Memory()
    meter = StashMeter(memory, RUN_CONFIG, device=torch.device("cpu"), has_notes=has_notes)
    advised = {}
    for iteration in range(1, 67):
        memory.last_step = figures_of_step(0, iteration, device_pages=device_pages(iteration), host_pages=0)[0]
        report = meter.measure(replace(STEP, iteration=iteration, notes=("a",)))
        if report.notes != ("a",):
            advised[iteration] = report.notes[1:], report.stash.pool
    return advised


def test_a_run_advises_once_a_factor_for_typical_steps_that_often_recompute() -> None:
    ((iteration, (notes, pool)),) = advised_by(lambda iteration: 30).items()
    # The first interval of three steps that ends after step 50.
    assert iteration == 54 and notes == (advice_line(pool, steps=3, in_bytes=False),)
    assert advised_by(lambda iteration: 30 if iteration % 3 == 0 else 1000) == {}
    assert [*advised_by(lambda iteration: 1000 if iteration % 3 == 0 else 30)] == [54]
    assert advised_by(lambda iteration: 30, has_notes=False) == {}
    assert f"--moe-paged-stash-buffer-size-factor-cuda {rounded_up(pool.factor_to_keep_all):.2f} would" in notes[0]
    assert "-factor-cpu" in advice_line(replace(pool, device_pages=0), steps=3, in_bytes=False)
    assert " instead of --moe-paged-stash-buffer-bytes would" in advice_line(pool, steps=3, in_bytes=True)


@pytest.mark.parametrize("unknown", [{"reserve": ()}, {"layout": PoolLayout(512, 1000)}], ids=["order", "other reason"])
def test_steps_that_recomputed_for_another_reason_get_no_factor_and_no_advice(unknown: dict[str, Any]) -> None:
    memory = Memory()
    meter = StashMeter(memory, RUN_CONFIG, device=torch.device("cpu"))
    for iteration in range(1, 67):
        step = figures_of_step(0, iteration, device_pages=30, host_pages=0)[0]
        memory.last_step = replace(step, **unknown)
        report = meter.measure(replace(STEP, iteration=iteration, notes=()))
        assert report.notes == ()
    assert report.stash is not None and report.stash.pool is not None
    assert report.stash.pool.dropped_gate_up > 0 == report.stash.pool.factor_to_keep_all


def test_a_run_that_ends_among_its_first_steps_gets_no_advice() -> None:
    memory = Memory()
    meter = StashMeter(memory, RUN_CONFIG, device=torch.device("cpu"))
    memory.last_step = figures_of_step(0, 1, device_pages=30, host_pages=0)[0]
    report = meter.measure(replace(STEP, iteration=20, is_last=True, notes=()))
    assert report.stash is not None and report.stash.pool is not None and report.stash.pool.dropped_gate_up > 0
    assert report.notes == ()


def test_console_files_and_tensorboard_show_the_same(tmp_path: Path) -> None:
    sizes = [{}] * 3 + [{"device_pages": 0, "host_pages": 900}] * 2
    steps = [[figures_of_step(0, step, **size)[0] for step, size in enumerate(sizes, 1)]]
    reports = reports_of_rank(steps, 0)
    # Uses fewer pages, but follows a different plan with all pages on the host.
    host = reports[4].pool
    assert 0 < host.host_high_water < 800 and host.spilled_pages == 0
    assert host.timeline == stash_timeline(max(steps[0][3:], key=held_at_most))
    report, pool = replace(STEP, stash=reports[2]), reports[2].pool
    line = format_training_line([STEP, report], 100)
    share = f"{pool.device_high_water}/60 ({100 * pool.device_high_water / 60:.0f}%) device, {pool.host_high_water}/10 "
    assert f"| expert capacity factor needed: {max(report.stash.factors_needed):.2f} of 1.50 | void steps: 1 |" in line
    assert f"| stash pages of rank {pool.rank}: {share}(" in line and f"| stash: {shortage_words(pool)} |" in line
    assert "stash" not in format_training_line([replace(report, stash=replace(report.stash, pool=None))], 100)
    seldom = LoggingConfig(tensorboard_log_interval=report.iteration + 1)
    logs = JsonlLog(tmp_path), TensorBoardLog(str(tmp_path), seldom)
    for log in logs:
        log.on_train_start(RunStart(iteration=0, train_iters=9))
        log.on_step_end(report)
        log.on_run_end()
    logged = json.loads((tmp_path / "steps.jsonl").read_text())["stash"]
    assert logged["pool"]["timeline"] == pool.timeline
    assert logged["rows"] == {str(layer): rows for layer, rows in report.stash.rows.items()}
    events = EventAccumulator(str(tmp_path)).Reload()
    assert "lm loss" not in events.Tags()["scalars"]
    assert events.Scalars("stash/device-high-water")[0].value == pool.device_high_water
    assert events.Scalars("experts/rows_layer_0")[0].value == report.stash.rows[1]


def test_every_field_of_a_line_and_every_name_of_its_readers_stands_in_the_page(tmp_path: Path) -> None:
    one = {field.name: 1.0 for field in fields(StepReport) if vars(STEP).get(field.name) is None}
    tables = {
        "held": HELD,
        "expert_load": {1: [2]},
        "per_layer": {"z_loss": {1: 0.5}},
        "timers": {},
        "overlap": {},
        "routing": {},
    }
    tables |= {
        "memory": memory_bytes(torch.device("cpu")),
        "rank_times": RankTimes(min_ms=1, min_rank=0, max_ms=2, max_rank=1),
    }
    log = JsonlLog(tmp_path)
    log.on_train_start(RunStart(iteration=0, train_iters=9))
    stash = reports_of_rank([[figures_of_step(0, step)[0] for step in range(1, 6)]], 0)[2]
    log.on_step_end(replace(STEP, **{**one, **tables, "stash": stash}))
    log.on_run_end()
    line = json.loads(log.path.read_text())
    pool = line["stash"]["pool"]
    written = {*line, *line["stash"], *pool, *pool["timeline"], *line["rank_times"]}
    assert len(written) > 50 and {*one} - {*line} == {"routing"}
    read = {
        name for name in read_run(tmp_path).series if name.partition("/")[2] not in written | tables["memory"].keys()
    }
    page = (ROOT / "docs" / "logging.md").read_text(encoding="utf-8")
    assert {*written, *tables["memory"], *read} - {*re.findall(r"`([\w/]+)`", page)} == set()
