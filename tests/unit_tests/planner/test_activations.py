"""Bytes that pairs of passes hold, compared with a simulation of the turns of all passes in the order of execution."""

import random
from collections.abc import Sequence

import pytest

from megatron.core.pipeline_parallel.expansion import turn_order
from megatron.core.pipeline_parallel.schedule import (
    ActionKind,
    Order,
    Pipeline,
    Schedule,
    ScheduleKind,
    passes,
    pipeline_of,
    stage_orders,
)
from megatron.planner.activations import ChunkSaved, peak_bytes, turns_of_pair
from megatron.planner.recorders import PassBytes, TurnBytes
from megatron.planner.work import EXPERTS

# Bytes that each turn of a pass saves when it begins, and those that it frees when it ends.
Turns = list[tuple[int, int]]


def _chunk(sizes: Sequence[int], *, pace: int = 1) -> ChunkSaved:
    """Returns a chunk of layers with experts. sizes: bytes up to the end of each layer, and after the last one."""
    first, *others = sizes[:-1]
    by_part = {"embedding": {"embedding": 1}, "layer 0": {"attention": first - 1}}
    by_part |= {f"layer {number}": {"attention": size} for number, size in enumerate(others, start=1)}
    expert_layers = {f"layer {number}": 1 for number in range(len(sizes) - 1)}
    return ChunkSaved(by_part | {"end": {"output and loss": sizes[-1]}}, expert_layers, pace=pace)


def _forward(sizes: Sequence[int]) -> Turns:
    return [(0 if turn % 2 else sizes[turn // 2], 0) for turn in range(2 * len(sizes) - 1)]


def _backward(sizes: Sequence[int], *, pace: int) -> Turns:
    of_layer, last = 2 * pace, len(sizes) - 1
    return [(0, 0 if turn % of_layer else sizes[last - turn // of_layer]) for turn in range(of_layer * last + 1)]


def _simulated_peak(order: Order, sizes: Sequence[Sequence[int]], *, pace: int) -> int:
    alive = peak = 0
    for step in order:
        passes = [
            _forward(sizes[one.chunk]) if one.kind is ActionKind.FORWARD else _backward(sizes[one.chunk], pace=pace)
            for one in step.passes
        ]
        for saved, freed in turn_order(*passes) if len(passes) == 2 else passes[0]:
            alive += saved
            peak = max(peak, alive)
            alive -= freed
    assert alive == 0, "every microbatch is freed"
    return peak


@pytest.mark.parametrize("pace", [1, 2])
@pytest.mark.parametrize(
    ("pipeline", "num_microbatches"), [(Pipeline(1), 3), (Pipeline(4), 9), (Pipeline(2, 2), 4), (Pipeline(3, 3), 5)]
)
def test_the_peak_of_pairs_is_that_of_their_turns(pipeline: Pipeline, num_microbatches: int, pace: int) -> None:
    choose = random.Random(str(pipeline))
    # Chunks have different numbers of layers.
    sizes = [[choose.randint(1, 99) for _ in range(length)] for length in (5, 3, 2)][: pipeline.num_chunks]
    chunks = [_chunk(own, pace=pace) for own in sizes]
    for paired in (False, True):
        for order in stage_orders(pipeline, num_microbatches, Schedule(paired=paired)):
            assert peak_bytes(order, chunks).total() == _simulated_peak(order, sizes, pace=pace)


def test_pairs_hold_the_microbatches_of_the_longer_warm_up_and_one_layer_more() -> None:
    layer, microbatch = 10, 40
    chunk = _chunk([layer] * 4 + [0])
    for stages in (1, 2, 5):
        alone, paired = (stage_orders(Pipeline(stages), 20, Schedule(paired=paired)) for paired in (False, True))
        for stage in range(stages):
            following = stages - stage - 1
            assert peak_bytes(alone[stage], [chunk]).total() == (following + 1) * microbatch
            assert peak_bytes(paired[stage], [chunk]).total() == (2 * following + 1) * microbatch + layer
    # A step without enough microbatches for pairs.
    order = stage_orders(Pipeline(5), 4, Schedule(paired=True))[0]
    assert peak_bytes(order, [chunk]).total() == 4 * microbatch


def test_microbatches_hold_operands_between_backward_and_weight_pass() -> None:
    for stages, num_microbatches in ((4, 9), (4, 2), (2, 5)):
        for held in (1, 7, 30):
            chunk = ChunkSaved({"layer 0": {"attention": 7}}, held={"attention": 1, "gradients": held - 1})
            orders = [
                order
                for kind, num_chunks in ((ScheduleKind.ZB_H1, 1), (ScheduleKind.ZBV, 2))
                for order in stage_orders(
                    pipeline_of(Schedule(kind), stages, num_chunks), num_microbatches, Schedule(kind)
                )
            ]
            for order in orders:
                alive = peak = 0
                for action in passes(order):
                    alive += {ActionKind.FORWARD: 7, ActionKind.BACKWARD: held - 7, ActionKind.WEIGHT: -held}[
                        action.kind
                    ]
                    peak = max(peak, alive)
                chunks = [chunk] * (1 + max(action.chunk for action in passes(order)))
                assert alive == 0 and peak_bytes(order, chunks).total() == peak


def test_a_chunk_without_experts_runs_alone_in_a_pair() -> None:
    order = stage_orders(Pipeline(1), 5, Schedule(paired=True))[0]
    assert peak_bytes(order, [ChunkSaved({"layer 0": {"attention": 7}})]).total() == 7


def test_turns_add_what_one_pass_allocates_to_what_the_other_one_holds() -> None:
    saved = ChunkSaved(
        {"layer 0": {EXPERTS: 3, "attention": 4}, "layer 1": {EXPERTS: 3, "attention": 4}}, {"layer 0": 1, "layer 1": 1}
    )
    forward = PassBytes(0, tuple(TurnBytes(*its) for its in ((6, 4), (8, 7), (13, 11), (15, 14), (16, 14))))
    backward = PassBytes(14, tuple(TurnBytes(*its) for its in ((20, 15), (17, 12), (13, 8), (9, 5), (7, 0))))
    found = list(turns_of_pair(backward, forward, saved=(saved, saved)))
    assert [one.live for one in found] == [20, 6 + 15, 17 + 4, 8 + 12, 13 + 7, 13 + 8, 9 + 11, 15 + 5, 7 + 14, 16]
    # While the backward begins the last layer, the experts of the first one keep theirs. The forward ends its first
    # layer in the third turn, when the backward has begun the first one.
    assert [one.of_experts for one in found] == [3, 3, 3, 3, 0, 3, 3, 3, 3, 6]
