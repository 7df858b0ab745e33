"""stash_factors.py: rows and pages of layouts that were not recorded, against sums over ranks one by one."""

from pathlib import Path

import numpy as np
import pytest

from megatron.core.transformer.moe.paged_stash.peak_factors import peaks_of_trace
from megatron.training.routing_trace import RoutingHeader, RoutingStep
from tools.stash_factors import Layout, _Planner, demands, main, table

MICROBATCHES, RANKS, EXPERTS, TOKENS = 4, 2, 8, 32
SIZES = {"num_layers": 4, "num_experts": EXPERTS, "topk": 2, "tokens_of_microbatch": TOKENS, "itemsize": 2}
HEADER = RoutingHeader(
    **{**dict.fromkeys(RoutingHeader.__dataclass_fields__, 1), **SIZES},  # type: ignore[arg-type]
)
HEADER = RoutingHeader(**{**vars(HEADER), "layers": [2, 3, 4], "hidden_size": 64, "moe_ffn_hidden_size": 32})


def recorded(steps: int) -> list[RoutingStep]:
    chosen = np.random.default_rng(1)
    shape = (MICROBATCHES, RANKS, EXPERTS)
    return [
        RoutingStep(
            HEADER, number, {layer: chosen.integers(0, 2 * TOKENS * 2 // EXPERTS, shape) for layer in (2, 3, 4)}
        )
        for number in range(1, steps + 1)
    ]


@pytest.mark.parametrize(("expert_ranks", "shards", "stages"), [(1, 1, 2), (2, 1, 2), (4, 1, 1), (2, 2, 2)])
def test_ranks_take_neighbours_tokens_and_then_those_of_later_microbatches(
    expert_ranks: int, shards: int, stages: int
) -> None:
    layout, steps = Layout(expert_ranks, shards, stages, page_size=2), recorded(3)
    local, balanced = EXPERTS // expert_ranks, TOKENS * 2 * shards
    planner = _Planner(HEADER, layout)
    for step, found in zip(steps, demands(steps, layout)):
        most = pair = 0
        passes: dict[int, list[list[int]]] = {layer: [] for layer in step.tokens}
        for layer, counts in step.tokens.items():
            parts = [counts[batch, rank] for batch in range(MICROBATCHES) for rank in range(RANKS)]
            for start in range(0, len(parts), expert_ranks * shards):
                group = parts[start : start + expert_ranks * shards]
                sent = [[int(part[to * local :][:local].sum()) for to in range(expert_ranks)] for part in group]
                passes[layer].append([sum(column) for column in zip(*sent)])
                most, pair = max(most, *passes[layer][-1]), max(pair, *map(max, sent))
        assert (found.rows, found.pairs) == (most / balanced, pair / (balanced / (expert_ranks * shards)))
        # Every rank's own passes, in the order of its stage's events.
        side_by_side = max(1, RANKS // (expert_ranks * shards))
        peaks = []
        for needs in planner._needs(len(passes[2]) // side_by_side):
            groups = list(dict.fromkeys(event.group for event in needs.events))
            for place in range(side_by_side):
                for rank in range(expert_ranks):
                    own = [passes[int(name[6:])][instance * side_by_side + place][rank] for name, instance in groups]
                    peaks += peaks_of_trace(needs, [own])
        assert found.pages == pytest.approx(max(peaks))


def test_the_table_rounds_up_and_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    steps = recorded(30)
    lines = table(demands(steps, Layout(expert_ranks=2)), Layout(expert_ranks=2), quantile=0.9).splitlines()
    assert lines[0].split() == ["of", "30", "steps", "p90", "median", "most"] and len(lines) == 4
    peaks = sorted(one.rows for one in demands(steps, Layout(expert_ranks=2)))
    assert 0 <= float(lines[1].split()[-3]) - peaks[26] < 0.01 and 0 <= float(lines[1].split()[-1]) - peaks[-1] < 0.01
    with pytest.raises(ValueError, match="16 ranks are to share .* too few to fill one pass"):
        demands(steps, Layout(expert_ranks=8, expert_shards=2))
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(HEADER.line(0))
    for argv, words in (
        ([str(tmp_path / "none")], "No such file"),
        ([str(trace)], "the trace has no step yet"),
        ([str(trace), "--num-microbatches", "0"], "--num-microbatches is 0: must be at least 1"),
    ):
        with pytest.raises(SystemExit, match=f"error: .*{words}"):
            main(argv)
