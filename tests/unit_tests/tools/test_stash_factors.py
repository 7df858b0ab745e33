"""stash_factors.py: rows and pages of layouts that were not recorded, against sums over ranks one by one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.training.routing_trace import RoutingHeader, RoutingStep, step_line
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
        for needs in planner.needs(len(passes[2]) // side_by_side):
            groups = list(dict.fromkeys(event.group for event in needs.events))
            for place in range(side_by_side):
                for rank in range(expert_ranks):
                    own = [passes[int(name[6:])][instance * side_by_side + place][rank] for name, instance in groups]
                    peaks.append(needs.pages(dict(zip(groups, own)).__getitem__) / needs.balanced_pages)
        assert found.pages == pytest.approx(max(peaks))


def test_pages_of_a_growing_batch_are_over_those_of_its_longest_step_in_any_order() -> None:
    header, layout = replace(HEADER, layers=[1, 2, 3]), Layout(num_stages=2, page_size=2)
    tokens = [{layer - 1: counts for layer, counts in step.tokens.items()} for step in recorded(3)]
    long = [RoutingStep(header, 1, of_step) for of_step in tokens]
    short = [RoutingStep(header, 1, {layer: counts[:1] for layer, counts in step.items()}) for step in tokens]
    growing, shrinking = demands([*short, *long], layout), demands([*long, *short], layout)
    assert growing == shrinking[3:] + shrinking[:3] and growing[3:] == demands(long, layout)
    # Alone, the first stage keeps a layer of one micro-batch; else both layers of two. The last stage never keeps any.
    assert growing[:3] == [replace(alone, pages=alone.pages / 4) for alone in demands(short, layout)]


def test_the_table_rounds_up_and_too_few_tokens_are_an_error() -> None:
    steps = recorded(30)
    lines = table(demands(steps, Layout(expert_ranks=2)), Layout(expert_ranks=2), quantile=0.9).splitlines()
    assert lines[0].split() == ["of", "30", "steps", "p90", "median", "most"] and len(lines) == 4
    peaks = sorted(one.rows for one in demands(steps, Layout(expert_ranks=2)))
    assert 0 <= float(lines[1].split()[-3]) - peaks[26] < 0.01 and 0 <= float(lines[1].split()[-1]) - peaks[-1] < 0.01
    with pytest.raises(ValueError, match="16 ranks are to share .* too few to fill one pass"):
        demands(steps, Layout(expert_ranks=8, expert_shards=2))


def test_bad_input_is_one_line_that_names_flags_or_the_place_in_the_file(tmp_path: Path, capsys) -> None:
    counts = {layer: torch.from_numpy(counts) for layer, counts in recorded(1)[0].tokens.items()}
    step = step_line(1, counts)
    (tmp_path / "trace").write_bytes(HEADER.line(0) + step)
    (tmp_path / "empty").write_bytes(HEADER.line(0))
    (tmp_path / "late").write_bytes(HEADER.line(0) + step + b"words\n")
    (tmp_path / "log").write_text('{"iteration": 1, "lm_loss": 5.5}\n')
    (tmp_path / "negative").write_bytes(HEADER.line(0) + step_line(1, {**counts, 3: -counts[3]}))
    (tmp_path / "of two layers").write_bytes(HEADER.line(0) + step_line(1, {2: counts[2], 4: counts[4]}))
    (tmp_path / "without tokens").write_bytes(replace(HEADER, tokens_of_microbatch=0).line(0) + step)
    (tmp_path / "text").write_text("words\n")
    (tmp_path / "text.gz").write_text("words\n")
    for name, flags, words in (
        ("none", "", "none: No such file or directory: give what --record-routing wrote"),
        ("text.gz", "", "text.gz: Not a gzipped file"),
        ("text", "", "text, line 1 is not of a routing trace: b'words"),
        ("late", "", "late, line 3 is not of a routing trace: b'words"),
        ("log", "", "log, line 1 is not the header of a routing trace of format 1"),
        ("negative", "", "negative, line 2 must have, for each of the layers [2, 3, 4], tokens [M][R][8], whole"),
        ("of two layers", "", "of two layers, line 2 must have, for each of the layers [2, 3, 4]"),
        ("without tokens", "", "without tokens, line 1 has {'tokens_of_microbatch': 0}: must be whole numbers"),
        ("empty", "", "the trace has no step yet"),
        ("trace", "--num-microbatches 0", "--num-microbatches is 0: must be at least 1"),
        ("trace", "--quantile 2", "--quantile is 2: must be above 0 and at most 1"),
        ("trace", "--moe-paged-stash-page-size 5", "--moe-paged-stash-page-size is 5: must be a power of two"),
        ("trace", "--expert-model-parallel-size 3", "must be a multiple of --expert-model-parallel-size (3)"),
        ("trace", "--num-virtual-stages-per-pipeline-rank 2", "--num-virtual-stages-per-pipeline-rank 2 needs at"),
        ("trace", "--pipeline-model-parallel-size 3", "it has 4 layers: must be a multiple of --pipeline-model-"),
    ):
        assert main([str(tmp_path / name), *flags.split()]) == 2, name
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error and error.count("\n") == 1, error
