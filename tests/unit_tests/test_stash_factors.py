"""benchmarks/stash_factors.py: factors needed by a run with hand-written routing."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.stash_factors import (
    MORE_RANKS,
    RANKS,
    SHAPES,
    Shape,
    by_part,
    check_simulation,
    figures_of,
    learned_multiples,
    num_groups,
    planned,
)
from megatron.core.transformer.moe.paged_stash import Counter
from megatron.planner.stash.routing import RoutingSpan
from megatron.planner.stash.stages import PlannedRun
from megatron.planner.stash.walk import walk
from megatron.tools.run_log import Series
from megatron.training.arguments import read_run_config
from megatron.training.callbacks.routing_trace import RoutingHeader
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.routing_traces import write_trace

# Tokens of each of 4 experts, with two choices for 32 tokens. The first two experts are on the first rank.
BALANCED, SKEWED, ALL_ON_ONE = [16, 16, 16, 16], [24, 24, 8, 8], [32, 32, 0, 0]
FLAGS: Flags = {
    "num-layers": 4,
    "expert-model-parallel-size": 2,
    "micro-batch-size": 1,
    "global-batch-size": 2,
    "moe-grouped-gemm": True,
    "moe-expert-rank-capacity-factor": 2.0,
    "moe-paged-stash": True,
    "moe-paged-stash-page-size": 4,
}


def small_run(tmp_path: Path, steps: list[list[int]]) -> tuple[PlannedRun, list[RoutingSpan]]:
    """Plans a run of two ranks in which all layers have the token counts of `steps`. Also returns its routing steps."""
    words = command_line({**read_bases()["moe"], **FLAGS})
    header = RoutingHeader.of(read_run_config([*words, "--dry-run", "--world-size", "2"]))
    tokens = ({layer: torch.tensor([[counts] * 2]) for layer in header.layers} for counts in steps)
    write_trace(tmp_path / "trace", header, tokens)
    return planned(words, tmp_path / "trace", ranks=2)


def test_factors_are_those_of_the_worst_rank_by_part_of_the_run(tmp_path: Path) -> None:
    run, spans = small_run(tmp_path, [ALL_ON_ONE] * 10 + [SKEWED] * 40 + [BALANCED] * 10)
    assert num_groups(run) == 3  # the last layer's backward directly follows its forward
    found = figures_of(run, spans)
    for what in ("rows", "pages"):
        assert [found[what][part] for part in found[what]] == [
            pytest.approx(dict.fromkeys(("median", "p99", "most"), factor), abs=0.03) for factor in (2.0, 1.5, 1.0)
        ]
    everything, little = found["recomputed"]["2"], found["recomputed"]["0.9"]
    assert all(part["gate_up"] == part["steps_with_gate_up"] == 0 for part in everything.values())
    assert little["1-10"]["steps_with_gate_up"] == 1 and little["1-10"]["gate_up"] > little["later"]["gate_up"] > 0


def test_learned_multiples_are_over_the_first_step_or_all_before_a_checkpoint(tmp_path: Path) -> None:
    run, spans = small_run(tmp_path, [BALANCED] + [ALL_ON_ONE] + [SKEWED] * 58)
    found = learned_multiples(run, spans)
    assert found["fresh"]["most"] == pytest.approx(1.5, abs=0.03)
    assert found["resumed"]["median"] == pytest.approx(0.75, abs=0.03)
    assert learned_multiples(*small_run(tmp_path, [BALANCED] * 50)) == {}


def test_a_simulation_that_counts_otherwise_than_the_run_is_an_error(tmp_path: Path) -> None:
    run, spans = small_run(tmp_path, [ALL_ON_ONE, BALANCED])
    simulated = walk(run, run.flags, spans=spans, grows=True)
    dropped = sum(stage.counters[Counter.DROPPED_GATE_UP].sum(axis=1) for stage in simulated.stages)
    assert dropped[0] > 0

    def logged(counts: np.ndarray) -> dict[str, Series]:
        return {"stash/rungs/dropped_gate_up": Series(np.array([1, 2]), counts)}

    check_simulation(logged(dropped), simulated)
    with pytest.raises(AssertionError, match="dropped_gate_up: .* simulated, .* in the run"):
        check_simulation(logged(dropped + 1), simulated)


def test_parts_without_steps_are_left_out() -> None:
    needed = np.concatenate([np.full(10, 2.0), np.arange(1, 41) / 10])
    assert list(by_part(needed)) == ["1-10", "11-50"] and list(by_part(needed[:3])) == ["1-10"]
    assert by_part(needed)["11-50"] == {"median": 2.0, "p99": 4.0, "most": 4.0}


def test_a_step_on_more_ranks_has_a_micro_batch_for_each() -> None:
    for shape in (*SHAPES.values(), Shape("", micro_batch=2, num_microbatches=8)):
        for ranks in (RANKS, MORE_RANKS):
            _, micro, _, batch = shape.batch(ranks)
            assert int(batch) % (int(micro) * ranks) == 0 and int(micro) == shape.micro_batch
        assert int(shape.batch(RANKS)[3]) == RANKS * shape.micro_batch * shape.num_microbatches
