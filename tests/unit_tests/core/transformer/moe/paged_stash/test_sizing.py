"""Pool sizes follow from settings and steps, as in a simulated step; contradictory settings raise errors."""

import json
from dataclasses import replace
from math import ceil
from typing import Any

import pytest
import torch

from megatron.core.pipeline_parallel.expansion import expand
from megatron.core.pipeline_parallel.schedule import Pipeline, stage_orders
from megatron.core.transformer.moe.paged_stash import EventKind, PoolLayout, Priority, StashEvent
from megatron.core.transformer.moe.paged_stash.sizing import (
    LearnedSizes,
    StepNeeds,
    buffer_row_bytes,
    capacity_factor,
    check_effect,
    check_encoding,
    encoding_words,
    expert_specs,
    factor_at,
    gain_line,
    grown_sizes,
    learned_lines,
    mean_row_bytes,
    page_size_on_gpu,
    pool_bytes,
    pool_layout,
    prefetch_groups,
    rounded_up,
    scratch_pages,
    scratch_sets,
    stash_footprint,
    step_needs,
)
from megatron.core.transformer.paged_stash_config import parse_bytes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.step.expert_memory import stash_events
from tests.unit_tests.core.models.small_models import LLAMA_LIKE, small_config

COMPUTE, DTYPE = "moe_paged_stash_compute", "moe_paged_stash_dtype"
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
MOE: dict[str, Any] = {
    **LLAMA_LIKE,
    "num_moe_experts": 4,
    "moe_grouped_gemm": True,
    "moe_expert_rank_capacity_factor": 2.0,
    "moe_paged_stash": True,
    COMPUTE: "copies",
}
# Experts of the first and the last of 4 layers compute in bf16, the others in 8 bits.
MIXED = {**BF16, "num_layers": 4, "fp8": "e4m3", "fp8_recipe": "mxfp8", "first_last_layers_bf16": True}
BALANCED, FULL = 100, 200
PAGE = 64 * 32 * 4


def settings(**fields: Any) -> TransformerConfig:
    """Returns the configuration of a model with the stash. cuda and cpu: abbreviations of the two size factors."""
    for name in {"cuda", "cpu"} & fields.keys():
        fields[f"moe_paged_stash_buffer_size_factor_{name}"] = fields.pop(name)
    return small_config(**{**MOE, **fields})


def events_of(stages: int, layers: int, microbatches: int) -> list[list[StashEvent]]:
    """Returns the events of each stage. All layers have experts and are distributed evenly."""
    own = layers // stages
    return [
        list(stash_events(expand(order, [range(stage * own + 1, stage * own + own + 1)])))
        for stage, order in enumerate(stage_orders(Pipeline(stages), microbatches))
    ]


def needs_of(config: TransformerConfig, events: list[StashEvent]) -> StepNeeds:
    """Returns the step's needs with buffers of FULL rows."""
    return step_needs(config, events, max_rows=FULL, balanced_rows=BALANCED)


def walked_peak(events: list[StashEvent], rows: dict[str, int], *, widths: tuple[int, ...] = (128, 4, 384)) -> int:
    held: dict[tuple[str, int], int] = {}
    peak = 0
    for event, following in zip(events, [*events[1:], None]):
        if event.kind is EventKind.BACKWARD:
            held.pop(event.group, None)
        elif following is None or following.group != event.group:
            held[event.group] = sum(ceil(rows[event.name] * width / PAGE) for width in widths)
        peak = max(peak, sum(held.values()))
    return peak


@pytest.mark.parametrize("stages, layers, microbatches", [(1, 2, 1), (1, 5, 3), (2, 4, 1), (4, 8, 9)])
@pytest.mark.parametrize("fields, learned, factors", [
    ({}, {}, (1.1, 0.0, "balanced")),
    ({"cuda": 0.6, "cpu": 0.5}, {}, (0.6, 0.5, "balanced")),
    ({"cuda": 0.0, "cpu": 1.0}, {}, (0.0, 1.0, "balanced")),
    ({"cuda": -1.2}, {}, (1.2, 0.0, "balanced")),
    ({"cuda": -1.2, "cpu": -0.5}, {"rows_share": {1: 1.37, 2: 9.0}}, (1.2, 0.5, "measured")),
    ({"cuda": 0.6}, {"device_factor": 1.7, "host_factor": 0.3}, (1.7, 0.0, "balanced")),
    ({"cuda": 2.0}, {"device_factor": 1.7}, (2.0, 0.0, "balanced")),
    ({"cuda": 0.0, "cpu": 1.0}, {"device_factor": 1.7, "host_factor": 1.2}, (0.0, 1.2, "balanced")),
])  # fmt: skip
def test_tiers_are_multiples_of_the_need_of_the_step(
    stages: int, layers: int, microbatches: int, fields: dict, learned: dict, factors: tuple[float, float, str]
) -> None:
    config = settings(**fields)
    for events in events_of(stages, layers, microbatches):
        rows = {event.name: BALANCED for event in events}
        if factors[2] == "measured":
            rows |= {"layer 1": 137, "layer 2": FULL}
        needed = walked_peak(events, rows)
        layout = pool_layout(config, needs_of(config, events), learned=LearnedSizes(**learned))
        if not needed:
            assert layout is None
        else:
            device, host = (ceil(round(factor * needed, 6)) for factor in factors[:2])
            assert layout == PoolLayout(PAGE, device, host)


def test_bytes_overrule_the_factor() -> None:
    (events,) = events_of(1, 3, 2)
    config = settings(cuda=0.0, moe_paged_stash_buffer_bytes=10 * PAGE + 5)
    layout = pool_layout(config, needs_of(config, events), learned=LearnedSizes())
    assert layout == PoolLayout(PAGE, 10)
    absurd = settings(cpu=1e9)
    with pytest.raises(ValueError, match="factor_cpu requests .* pages of 8192 bytes: must be fewer than 2..31; even"):
        pool_layout(absurd, needs_of(absurd, events), learned=LearnedSizes())


def test_a_row_in_pages_is_x_its_weight_gate_up_and_the_rows_of_adapters() -> None:
    of_parts = settings(recompute_granularity="selective", recompute_modules=["moe_act"])
    for config in (settings(), of_parts):
        assert [(spec.row_bytes, spec.priority) for spec in expert_specs(config, rows=7)] == [
            (128, Priority.INPUT),
            (4, Priority.INPUT),
            (384, Priority.GATE_UP),
        ]
    of_fc1, of_both = (
        settings(lora_rank=4, lora_target_modules=["linear_fc1", *more]) for more in ([], ["linear_fc2"])
    )
    assert [spec.row_bytes for spec in expert_specs(of_fc1, rows=7)] == [128, 4, 384, 16]
    assert [spec.row_bytes for spec in expert_specs(of_both, rows=7)] == [128, 4, 384, 16, 16]
    config = settings(expert_tensor_parallel_size=2, expert_model_parallel_size=2, num_attention_heads=2)
    assert [spec.row_bytes for spec in expert_specs(config, rows=7)] == [128, 4, 192]


def test_pools_grow_until_full_buffers_fit_and_a_resumed_run_starts_with_the_grown_one() -> None:
    (events,) = events_of(1, 4, 1)
    config = settings(cuda=0.3)
    needs, learned = needs_of(config, events), LearnedSizes()
    sizes = []
    while True:
        layout = pool_layout(config, needs, learned=learned)
        assert layout is not None
        sizes.append(layout.device_pages)
        grown = grown_sizes(layout, needs, wanted_pages=9)
        if grown is None:
            break
        learned = learned.merged(grown)
        learned = LearnedSizes.from_json(json.loads(json.dumps(learned.to_json())))
    full = walked_peak(events, {event.name: FULL for event in events})
    assert sizes[-1] == full and sizes == sorted(set(sizes)) and sizes[1] >= 10 and len(sizes) <= 8
    on_host = grown_sizes(PoolLayout(PAGE, 0, 5), needs, wanted_pages=9)
    assert on_host is not None and on_host.device_factor is None and on_host.host_factor is not None
    assert ceil(on_host.host_factor * needs.balanced_pages) == 10


def test_learned_sizes_are_those_of_all_ranks_and_shares_end_where_experts_are_spread_further() -> None:
    one = LearnedSizes(capacity_factor=3.0, rows_share={1: 1.5, 2: 1.0}, expert_ranks=4, row_bytes=516)
    two = LearnedSizes(device_factor=1.4, rows_share={2: 2.0, 7: 1.1}, expert_ranks=4, row_bytes=516)
    both = one.merged(two)
    assert both == two.merged(one) == LearnedSizes(3.0, 1.4, None, {1: 1.5, 2: 2.0, 7: 1.1}, 4, 516)
    assert LearnedSizes.from_json({**json.loads(json.dumps(both.to_json())), "of_a_later_version": 1}) == both
    assert LearnedSizes.from_json(None) == LearnedSizes()
    assert both.valid_for(expert_ranks=4, row_bytes=516) == both
    assert both.valid_for(expert_ranks=2, row_bytes=516).rows_share == both.rows_share
    assert both.valid_for(expert_ranks=8, row_bytes=516) == LearnedSizes(3.0, 1.4, None, {}, 8, 516)
    lines = learned_lines(settings(moe_expert_rank_capacity_factor=3.5), both, valid=both)
    assert (
        len(lines) == 1 and lines[0].startswith("moe_paged_stash_buffer_size_factor_cuda: ") and "to 1.4 " in lines[0]
    )
    for fields, count in (
        ({"cuda": 0.0, "cpu": 1.0}, 1),
        ({"cuda": 2.0}, 1),
        ({"moe_paged_stash_buffer_bytes": PAGE}, 2),
    ):
        assert len(learned_lines(settings(**fields), both, valid=both)) == count
    assert [capacity_factor(flag, both) for flag in (2.0, 3.5)] == [3.0, 3.5]
    assert capacity_factor(2.0, LearnedSizes()) == 2.0


# Saved by a run at commit 50a2af34, whose pages also held act, and which did not record the size of a row.
SIZES_WITH_ACT = """
    {"capacity_factor": 1.3, "device_factor": 1.7, "host_factor": null, "rows_share": {"1": 1.5, "2": 1.0},
     "expert_ranks": 4}
"""


def test_pools_learned_for_other_rows_are_learned_from_scratch_and_all_else_stays() -> None:
    old = LearnedSizes.from_json(json.loads(SIZES_WITH_ACT))
    assert old == LearnedSizes(1.3, 1.7, None, {1: 1.5, 2: 1.0}, 4, row_bytes=0)
    valid = old.valid_for(expert_ranks=4, row_bytes=516)
    assert valid == LearnedSizes(1.3, None, None, {1: 1.5, 2: 1.0}, 4, row_bytes=516)
    config = settings(moe_expert_rank_capacity_factor=2.0)
    lines = learned_lines(config, old, valid=valid)
    assert len(lines) == 1 and "rows with an unknown number of bytes in pages, and this run's have 516" in lines[0]
    other = replace(old, row_bytes=512)
    assert "rows with 512 bytes in pages" in learned_lines(config, other, valid=valid)[0]
    # Without grown pools nothing changes, and no line says so.
    calm = LearnedSizes(rows_share={1: 1.5}, expert_ranks=4)
    assert learned_lines(config, calm, valid=calm.valid_for(expert_ranks=4, row_bytes=516)) == []
    grown = valid.merged(LearnedSizes(device_factor=1.7))
    saved = LearnedSizes.from_json(json.loads(json.dumps(grown.to_json())))
    assert saved.valid_for(expert_ranks=4, row_bytes=516) == grown


def test_a_stash_that_never_keeps_anything_is_refused_in_the_whole_model_alone() -> None:
    for stages in (events_of(1, 2, 1), events_of(2, 2, 2), [[], *events_of(1, 2, 1)]):
        check_effect(stages)
    for stages in (events_of(1, 1, 8), events_of(2, 2, 1)[1:], [[], []], []):
        with pytest.raises(ValueError, match="moe_paged_stash is True but has no effect"):
            check_effect(stages)


def test_encoded_rows_are_counted_as_stored_and_the_line_says_that_they_are_lossy() -> None:
    (events,) = events_of(1, 12, 1)
    lines, pages = {}, {}
    for dtype in (None, "mxfp8"):
        config = settings(**BF16, hidden_size=128, lora_rank=64, lora_target_modules=["linear_fc2"], **{DTYPE: dtype})
        needs = needs_of(config, events)
        layout = pool_layout(config, needs, learned=LearnedSizes())
        assert layout is not None
        own, pages[dtype] = stash_footprint(config, needs, layout=layout), layout.device_pages
        assert own.static_bytes == 12 * FULL * buffer_row_bytes(config), "buffers have the rows themselves"
        lines[dtype] = gain_line(own, layout, config=config)
        assert config.stash_recomputes == (dtype is None)
    # x, routing weights, gate_up and the product of an adapter.
    x, ffn = 128, config.moe_ffn_hidden_size
    assert [spec.row_bytes for spec in needs.specs["layer 1"]] == [144, 4, -(-(2 * ffn + 2 * ffn // 32) // 16) * 16, 80]
    assert buffer_row_bytes(config) == 2 * x + 4 + 4 * ffn + 2 * 64
    assert pages["mxfp8"] < 0.7 * pages[None], "also tails of pages"
    assert "lossy" not in lines[None] and "moe_paged_stash_dtype mxfp8 is lossy: backward reads rows" in lines["mxfp8"]


@pytest.mark.parametrize("fields, of_8_bits, of_bf16", [
    ({}, (48, 4, 192), (64, 4, 192)),
    ({COMPUTE: "pages"}, (48, 192), (64, 192)),
    ({DTYPE: "mxfp8"}, (48, 4, 112), (48, 4, 112)),
])  # fmt: skip
def test_each_layer_is_counted_with_the_rows_of_its_own_precision(
    fields: dict[str, Any], of_8_bits: tuple[int, ...], of_bf16: tuple[int, ...]
) -> None:
    (events,) = events_of(1, 4, 2)
    config = settings(**{**MIXED, **fields})
    needs, page = needs_of(config, events), 64 * 32 * 2
    widths = {"layer 1": of_bf16, "layer 2": of_8_bits, "layer 3": of_8_bits, "layer 4": of_bf16}
    assert {name: tuple(spec.row_bytes for spec in specs) for name, specs in needs.specs.items()} == widths
    pages = {name: sum(-(-BALANCED * width // page) for width in own) for name, own in widths.items()}
    # At the peak of each microbatch, the first three layers have pages, and the last layer's backward follows.
    assert needs.balanced_pages == sum(pages[name] for name in ("layer 1", "layer 2", "layer 3"))
    largest = sum(-(-FULL * width // page) for width in of_bf16) if COMPUTE in fields else 0
    assert scratch_pages(config, needs) == largest
    layout = PoolLayout(page, 1)
    assert pool_bytes(config, needs, layout).one_group == (FULL * sum(of_bf16) if COMPUTE in fields else 0)
    whole = dict.fromkeys(("layer 2", "layer 3"), FULL * (48 + 192 + (0 if COMPUTE in fields else 4)))
    whole |= dict.fromkeys(("layer 1", "layer 4"), whole["layer 2"] + FULL * 16)
    own = stash_footprint(config, needs, layout=layout)
    assert own.static_bytes == sum(whole.values())
    # The running group and a prefetched or decoded one, or the scratch; and what is encoded: gate_up, in bf16 also x.
    encoded = FULL * (48 + 112) if DTYPE in fields else 0
    assert own.working_set_bytes == (1 if COMPUTE in fields else 2) * (whole["layer 1"] + encoded)
    assert mean_row_bytes(config) == (sum(of_bf16) + sum(of_8_bits)) // 2
    if DTYPE in fields:
        check_encoding(config)
        assert "in 8 bits, 164 instead of 260 or 164 instead of 244 bytes of each" in encoding_words(config)[0]


def test_the_line_for_the_log_says_gains_and_costs() -> None:
    for layers, factor, word in ((12, 1.0, "saves 25%"), (2, 1.0, "COSTS"), (12, 0.0, "pages on the host, ")):
        (events,) = events_of(1, layers, 1)
        config = settings(cuda=factor, cpu=float(factor == 0))
        needs = needs_of(config, events)
        layout = pool_layout(config, needs, learned=LearnedSizes())
        assert layout is not None
        own = stash_footprint(config, needs, layout=layout)
        assert own.working_set_bytes == 2 * FULL * 516
        assert own.static_bytes == layers * FULL * 516, "the last group is not stashed, and has whole buffers"
        assert word in gain_line(own, layout, config=config)


def test_pages_in_which_a_gpu_computes_hold_whole_rows_and_a_tile_of_them() -> None:
    size, given = "moe_paged_stash_page_size", "moe_paged_stash_buffer_bytes"
    # Rows of x have 128 bytes and rows of gate_up 384, so pages of 3 rows of x hold whole rows of both.
    for fields, rows in (({}, 3 * 128), ({size: 6}, 6), ({given: 3 * 128 * 128}, 3 * 128)):
        config = settings(**{COMPUTE: "pages", **fields})
        assert page_size_on_gpu(config) == rows
    assert page_size_on_gpu(settings(**{size: 32})) == 32, "rows that are copied may straddle pages"
    for fields, message in (
        ({size: 32}, "page_size is 32: must be a multiple of 3, so that a page holds whole rows of x"),
        ({given: 3 * 128 * 128 - 1}, "buffer_bytes is 49151: must be at least one page, 49152 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            page_size_on_gpu(settings(**{COMPUTE: "pages", **fields}))


def test_pages_of_packed_rows_are_whole_in_all_layers_and_refused_if_they_are_huge() -> None:
    size = "moe_paged_stash_page_size"
    # Rows of x have 64 bytes in bf16 and 48 in 8 bits, and rows of gate_up 192.
    config = settings(**MIXED, **{COMPUTE: "pages"})
    assert page_size_on_gpu(config) == 3 * 128 and page_size_on_gpu(replace(config, **{size: 9})) == 9
    with pytest.raises(ValueError, match=r"multiple of 3, .* \(64 and 192 and 48 bytes\), or moe_paged_stash_compute"):
        page_size_on_gpu(replace(config, **{size: 8}))
    wide = {"hidden_size": 7168, "moe_ffn_hidden_size": 2048, COMPUTE: "pages"}
    with pytest.raises(
        ValueError, match="7232 bytes, and pages that .* have 791.0 MiB, more than 64 MiB; must be copies"
    ):
        page_size_on_gpu(settings(**{**MIXED, "fp8_recipe": "blockwise", **wide}))
    assert page_size_on_gpu(settings(**BF16, **wide)) == 4 * 128, "in bf16, pages have 7 MiB"


def test_experts_in_pages_prefetch_nothing_and_have_a_scratch_of_whole_buffers() -> None:
    (events,) = events_of(1, 3, 2)
    config, copied = settings(**{COMPUTE: "pages"}), settings()
    needs = needs_of(config, events)
    assert [spec.row_bytes for spec in needs.specs["layer 1"]] == [128, 384]
    assert (prefetch_groups(config), prefetch_groups(copied)) == (0, 1)
    pages = sum(-(-FULL * width // PAGE) for width in (128, 384))
    assert (scratch_pages(config, needs), scratch_pages(copied, needs)) == (pages, 0)
    layout = pool_layout(config, needs, learned=LearnedSizes())
    assert layout is not None
    assert pool_bytes(config, needs, layout)[:2] == ((layout.device_pages + pages) * PAGE, 0)
    assert stash_footprint(config, needs, layout=layout).working_set_bytes == FULL * (128 + 384)


@pytest.mark.parametrize("fields, sets", [
    ({}, 2),
    ({"cpu": -0.5, "moe_paged_stash_prefetch_layers": 3}, 2),
    ({"cpu": 0.0}, 1),
    ({"moe_paged_stash_prefetch_layers": 0}, 1),
    ({"cuda_graph_impl": "local"}, 1),
    ({COMPUTE: "copies", "moe_paged_stash_prefetch_layers": 0}, 0),
])  # fmt: skip
def test_rows_that_are_prefetched_from_the_host_have_a_second_set_of_scratch(fields: dict[str, Any], sets: int) -> None:
    (events,) = events_of(1, 2, 1)  # a single group is saved for backward
    config = settings(**{COMPUTE: "pages", "cpu": 0.5, **fields})
    needs = needs_of(config, events)
    layout = pool_layout(config, needs, learned=LearnedSizes())
    assert layout is not None and scratch_sets(config) == sets
    pages = scratch_pages(config, needs)
    assert pool_bytes(config, needs, layout)[0] == (layout.device_pages + sets * pages) * PAGE
    # Copied rows of probs have 4 bytes, and one group is in whole buffers while it runs.
    whole = sets * 512 or 516
    assert stash_footprint(config, needs, layout=layout).working_set_bytes == FULL * whole


def test_factor_at_a_quantile_is_an_order_statistic_of_recorded_steps() -> None:
    peaks = [1 + step / 1000 for step in (3, 1, 2, *range(4, 1001))]
    found = {q: factor_at(q, peaks) for q in (0.001, 0.5, 0.999, 1.0)}
    assert found == {0.001: 1.001, 0.5: 1.5, 0.999: 1.999, 1.0: 2.0}
    assert factor_at(0.999, [1.2, 1.1]) == 1.2
    for quantile, sample in ((0.0, [1.0]), (1.5, [1.0]), (0.5, [])):
        with pytest.raises(ValueError, match="quantile"):
            factor_at(quantile, sample)
    assert [rounded_up(one) for one in (1.1, 11 * 0.1, 1.101, 0.0)] == [1.1, 1.1, 1.11, 0.0]
    assert rounded_up(1.1001, decimals=3) == 1.101
    (events,) = events_of(1, 3, 1)
    needs, rows = needs_of(settings(), events), {"layer 1": 150, "layer 2": 120, "layer 3": 0}
    assert needs.pages(lambda group: rows[group[0]]) == walked_peak(events, rows) and needs.page_bytes == PAGE


DENSE: dict[str, Any] = {"num_moe_experts": None, "moe_grouped_gemm": False}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
STAGES = {"pipeline_model_parallel_size": 2, "num_layers": 4, "pipeline_dtype": None}


@pytest.mark.parametrize("fields, message", [
    ({**DENSE, "moe_expert_rank_capacity_factor": None}, "moe_paged_stash is True but no layer has experts"),
    (DENSE, "moe_expert_rank_capacity_factor is 2.0 but num_moe_experts is not set"),
    ({"moe_expert_rank_capacity_factor": float("nan")}, "moe_expert_rank_capacity_factor is nan: must be a number"),
    ({"moe_layer_freq": [0, 0]}, "no layer has experts"),
    ({"moe_expert_rank_capacity_factor": None}, "moe_expert_rank_capacity_factor is not set"),
    ({"moe_grouped_gemm": False}, "moe_grouped_gemm is not"),
    ({"cuda": float("nan")}, "factor_cuda is nan: must be a number"),
    ({"cpu": float("inf")}, "factor_cpu is inf: must be finite"),
    ({"cuda": True}, "factor_cuda is True: must be a number"),
    ({"cuda": 0.0}, "factor_cuda and moe_paged_stash_buffer_size_factor_cpu are both 0"),
    ({"moe_paged_stash_page_size": 48}, "page_size is 48: must be a power of two, such as 32 or 64"),
    ({"moe_paged_stash_page_size": 0}, "page_size is 0: must be at least 1"),
    ({"moe_paged_stash_prefetch_layers": -1}, "prefetch_layers is -1: must be at least 0"),
    ({DTYPE: "fp8"}, "stash_dtype is 'fp8': must be one of mxfp8"),
    ({DTYPE: "mxfp8"}, "stash_dtype is 'mxfp8', but experts do not compute in bf16"),
    ({**BF16, DTYPE: "mxfp8", COMPUTE: "pages"}, "compute is 'pages' and moe_paged_stash_dtype is 'mxfp8', but rows"),
    ({"moe_paged_stash": False, COMPUTE: None, DTYPE: "mxfp8"}, "dtype is mxfp8: requires moe_paged_stash"),
    ({"moe_paged_stash_overflow_policy": "spill"}, "must be one of recompute, rerun, error"),
    ({"moe_paged_stash_buffer_bytes": 0}, "buffer_bytes is 0: must be at least 1"),
    ({"moe_paged_stash_buffer_bytes": PAGE - 1}, "buffer_bytes is 8191: must be at least one page, 8192 bytes"),
    ({**FULL_RECOMPUTE, "recompute_method": "uniform"}, "recompute_granularity is full for every layer"),
    (FULL_RECOMPUTE, "recompute_granularity is full for every layer"),
    ({**FULL_RECOMPUTE, **STAGES}, "recompute_granularity is full for every layer"),
    ({"moe_layer_recompute": True}, "recompute_modules contains moe"),
    ({"fine_grained_activation_offloading": True, "offload_modules": ["moe_act"]}, "offload_modules contains moe_act"),
    ({"moe_layer_freq": [1, 0], "cpu_offloading_num_layers": 1}, "cpu_offloading_num_layers is 1, which offloads"),
    ({"moe_paged_stash": False, COMPUTE: None, "cpu": 0.5}, "factor_cpu is 0.5: requires moe_paged_stash"),
])  # fmt: skip
def test_settings_that_make_no_sense_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**fields)


def test_sizes_in_bytes_take_decimal_and_binary_units() -> None:
    texts = {"512MB": 512 * 10**6, "2GiB": 2 << 30, "1.5 kib": 1536, "7": 7, "8B": 8, "3TB": 3 * 10**12}
    assert {text: parse_bytes(text) for text in texts} == texts
    for wrong in ("", "MB", "-1MB", "2 parsecs", "1e9", "nan"):
        with pytest.raises(ValueError, match="size is .*: must be a number of bytes, optionally with a unit"):
            parse_bytes(wrong)
