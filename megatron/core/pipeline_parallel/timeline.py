"""Start and end times of each pass of a schedule, from the durations of passes and transfers.

All functions are pure. They are used to order transfers, to draw schedules and to plan memory; nothing is measured
here.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from megatron.core.pipeline_parallel.schedule import (
    Action,
    ActionKind,
    Orders,
    Pair,
    Pipeline,
    held_backwards,
    validate_schedule,
)

# A backward computes two GEMMs for each GEMM of a forward, one of them for the weight gradients.
DURATIONS = {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: 2.0, ActionKind.WEIGHT: 1.0}


class Interval(NamedTuple):
    """The start and end of a pass; by default, the unit is the duration of a chunk's forward."""

    start: float
    end: float


# For each stage, the interval of each of its passes. Both passes of a pair have the interval of the pair.
Timeline = list[dict[Action, Interval]]


def timeline(
    orders: Orders,
    pipeline: Pipeline,
    *,
    seconds: Callable[[int, Action | Pair], float] | None = None,
    transfer: float = 0.0,
    overlap: bool = True,
) -> Timeline:
    """Computes start and end of each stage's passes, which start when their predecessor and their input are complete.

    A pair starts when the inputs of both passes are complete, and its outputs are complete when it ends. seconds:
    duration of a pass or pair of a stage; None means DURATIONS, and their sum for a pair, where a backward whose weight
    gradients are a pass of their own is as much shorter. transfer: duration of a
    transfer between stages. overlap: whether transfers overlap with computation of the receiving stage, as in
    with_transfers. Raises ValueError if a stage cannot run its passes in their order (see validate_schedule), or if
    stages wait for each other in a cycle or for a pass that never runs.
    """
    for order in orders:
        validate_schedule(order)
    spans: Timeline = [{} for _ in orders]
    held = [held_backwards(order) for order in orders]
    clocks, positions = [0.0] * len(orders), [0] * len(orders)
    # Stages that may now be able to continue.
    awake = list(range(len(orders)))
    while awake:
        stage = awake.pop()
        order, done = orders[stage], spans[stage]
        while positions[stage] < len(order):
            step = order[positions[stage]]
            ready = late = 0.0
            for action in step.passes:
                source = pipeline.source(stage, action)
                if source is not None:
                    sent = spans[source.stage].get(source.action)
                    ready = max(ready, sent.end) if sent is not None else math.inf
                    late = max(late, transfer if source.stage != stage else 0.0)
            if ready == math.inf:
                break
            start = max(clocks[stage], ready + late) if overlap else max(clocks[stage], ready) + late
            clocks[stage] = start + (_duration(step, held[stage]) if seconds is None else seconds(stage, step))
            positions[stage] += 1
            for action in step.passes:
                done[action] = Interval(start, clocks[stage])
                target = pipeline.target(stage, action)
                if target is not None and target.stage != stage:
                    awake.append(target.stage)
    stuck = [f"stage {stage} at {orders[stage][n]}" for stage, n in enumerate(positions) if n < len(orders[stage])]
    if stuck:
        raise ValueError(f"schedule deadlocks regardless of the order of transfers: {', '.join(stuck)}")
    return spans


def _duration(step: Action | Pair, held: frozenset[Action]) -> float:
    return sum(DURATIONS[one.kind] - (DURATIONS[ActionKind.WEIGHT] if one in held else 0.0) for one in step.passes)


def bubble_share(spans: Timeline) -> float:
    """Returns the fraction of the stages' time, from the first pass to the last, in which they are idle."""
    total = max((span.end for stage in spans for span in stage.values()), default=0.0)
    # The passes of a pair share an interval.
    busy = sum(span.end - span.start for stage in spans for span in dict.fromkeys(stage.values()))
    return 1 - busy / (total * len(spans)) if total else 0.0
