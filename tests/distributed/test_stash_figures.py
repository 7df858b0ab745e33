"""Statistics of real steps: pages as the pool counted them, rows and factors as the routing trace recorded them."""

from pathlib import Path
from typing import Any

import pytest

import pretrain_gpt
from megatron.core.transformer.moe.paged_stash import Counter
from megatron.planner.stash.outlook import Needs, needs_of_steps
from megatron.planner.stash.routing import traced_spans
from megatron.planner.stash.stages import planned_run
from megatron.planner.stash.walk import Walk, walk
from megatron.training.arguments import read_run_config
from megatron.training.callbacks import RunStart
from megatron.training.callbacks.routing_trace import read_routing
from megatron.training.meters.stash import stash_timeline
from megatron.training.training import run_step
from tests.distributed.stash_runs import stash
from tests.distributed.tiny_runs import started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

FLAGS: Flags = {
    "num-layers": 4,
    "micro-batch-size": 1,
    "global-batch-size": 8,
    "moe-expert-rank-capacity-factor": 2.0,
    "log-interval": 1,
}
# The pools are too small: pages are spilled, and tensors are recomputed.
LAYOUTS: dict[str, Flags] = {
    "experts": {"expert-model-parallel-size": 2, **stash(0.8, 0.2, page_size=4)},
    "stages": {
        "pipeline-model-parallel-size": 2,
        "num-layers-per-virtual-pipeline-stage": 1,
        "rampup-batch-size": [2, 6, 2],
        **stash(0.5, page_size=4, prefetch_layers=2, compute="copies"),
    },
}


@pytest.fixture(autouse=True)
def plans_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes plans assume the defaults of the runs with which they are compared."""
    monkeypatch.setenv("MEGATRON_PLAN_DEVICE", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_figures_of_a_step_are_what_happened_in_it(tmp_path: Path, layout: str) -> None:
    flags = {**read_bases()["moe"], **FLAGS, **LAYOUTS[layout], "record-routing": str(tmp_path / "trace.jsonl")}
    ranks = run_on_ranks(_figures_of_steps, 2, command_line(flags))
    num_ranks = flags.get("expert-model-parallel-size", 1)
    plan, needs = _planned(command_line(flags), tmp_path / "trace.jsonl")
    assert len(plan.levels) == 3 and not plan.discards.any()
    for step in range(3):
        (first, report, routing, load), (second, other, *_) = ranks[0][step], ranks[1][step]
        assert report == other and first["pool"] == first["timeline"] and second["pool"] == second["timeline"]
        assert first["dropped"] + first["pool"]["spilled"] > 0
        expected = {layer: _rows_by_rank(counts, num_ranks) for layer, counts in routing.items()}
        assert load == {layer: _tokens_of_experts(counts) for layer, counts in routing.items()}
        passes = first["rows"] | second["rows"] if layout == "stages" else first["rows"]
        assert passes == {layer: [ranks[0] for ranks in rows] for layer, rows in expected.items()}
        most = {layer: max(map(max, rows)) for layer, rows in expected.items()}
        # A plan from the run's own trace must predict the counts of the run.
        assert (needs.rows[step],) == pytest.approx(report.factors_needed)
        assert (needs.pages[step],) == pytest.approx(report.pool.factors_needed)
        places = [(0, 0), (1, 0)] if layout == "stages" else [(0, 0), (0, 1)]
        for real, (stage, number) in zip((first, second), places, strict=True):
            counted = {name: int(of[step, number]) for name, of in plan.stages[stage].counters.items()}
            assert counted.items() <= real["counters"].items()
        assert report.rows == most and report.factors_needed == pytest.approx((max(most.values()) / (32 * 2),))


def test_an_expert_rank_has_the_rows_of_all_its_tensor_ranks_in_a_balanced_step() -> None:
    flags: Flags = {"tensor-model-parallel-size": 2, "sequence-parallel": True, "expert-tensor-parallel-size": 2}
    argv = command_line({**read_bases()["moe"], **FLAGS, **flags, "global-batch-size": 1, **stash(1.0, page_size=4)})
    for rows, balanced_rows in run_on_ranks(_rows_of_step, 2, argv):
        # Every rank has all experts, so any routing is balanced.
        assert set(rows) == {balanced_rows}


def _planned(argv: list[str], trace: Path) -> tuple[Walk, Needs]:
    """Plans a run of two ranks from the routing trace of that run."""
    run = planned_run(read_run_config([*argv, "--dry-run", "--world-size", "2"]), pretrain_gpt.model_provider)
    spans, guesses = traced_spans(read_routing(trace), run, num_groups=run.ranks.num_groups, seed=1)
    assert not guesses
    return walk(run, run.flags, spans=spans, grows=True), needs_of_steps(run, spans)


def _rows_by_rank(counts: list[Any], num_ranks: int) -> list[list[int]]:
    """Sums the rows of each rank. counts: [M][R][E] -> [M][ranks that share the experts]."""
    num_local = 4 // num_ranks
    sums = [[sum(column) for column in zip(*microbatch)] for microbatch in counts]
    return [[sum(row[rank * num_local : (rank + 1) * num_local]) for rank in range(num_ranks)] for row in sums]


def _tokens_of_experts(counts: list[Any]) -> list[int]:
    """Sums over micro-batches and ranks. counts: [M][R][E] -> [E]."""
    return [sum(column) for column in zip(*(rank for microbatch in counts for rank in microbatch))]


# Functions that run on the ranks.


def _figures_of_steps(argv: list[str]) -> list[Any]:
    with started_run(argv) as run:
        assert run.expert_memory is not None
        found = []
        run.callbacks.on_train_start(RunStart(iteration=0, train_iters=3))
        for _ in range(3):
            report = run.measured(run_step(run)[0])
            run.callbacks.on_step_end(report)
            routing = {layer: counts.tolist() for layer, counts in (report.routing or {}).items()}
            found.append((_compared(run.expert_memory.last_step), report.stash, routing, report.expert_load))
        return found


def _rows_of_step(argv: list[str]) -> tuple[tuple[int, ...], int]:
    with started_run(argv) as run:
        run_step(run)
        assert run.expert_memory is not None and run.expert_memory.last_step is not None
        return run.expert_memory.last_step.rows, run.expert_memory.last_step.balanced_rows


def _compared(step: Any) -> dict[str, Any]:
    changes = stash_timeline(step)["changes"]
    taken = [change for change in changes if change[2] + change[3] > 0]
    rows: dict[int, list[int]] = {}
    for layer, count in zip(step.passes, step.rows):
        rows.setdefault(layer, []).append(count)
    return {
        "rows": rows,
        "counters": dict(step.counters),
        "pool": {
            "most": [step.counters[Counter.HIGH_WATER_DEVICE], step.counters[Counter.HIGH_WATER_HOST]],
            "planned": step.counters[Counter.PLANNED_PAGES],
            "spilled": step.counters[Counter.SPILLED_PAGES],
        },
        "timeline": {
            "most": [max(_held(changes, tier)) for tier in (2, 3)],
            "planned": sum(device + host for *_, device, host in taken),
            "spilled": sum(host for *_, host in taken),
        },
        "dropped": step.counters[Counter.DROPPED_GATE_UP],
    }


def _held(changes: list[list[int]], tier: int) -> list[int]:
    return [sum(change[tier] for change in changes[:end]) for end in range(len(changes) + 1)]
