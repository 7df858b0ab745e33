"""Start and end times of each pass of a schedule, from the durations of passes and transfers.

All functions are pure. They are used to order transfers, to draw schedules and to plan memory; nothing is measured
here.
"""

from collections.abc import Callable
from typing import NamedTuple

from megatron.core.pipeline_parallel.schedule import Action, ActionKind, Orders, Pipeline, validate_schedule

# A backward computes two GEMMs for each GEMM of a forward.
DURATIONS = {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: 2.0}


class Interval(NamedTuple):
    """The start and end of a pass; by default, the unit is the duration of a chunk's forward."""

    start: float
    end: float


# For each stage, the interval of each of its passes.
Timeline = list[dict[Action, Interval]]


def timeline(
    orders: Orders,
    pipeline: Pipeline,
    *,
    seconds: Callable[[int, Action], float] | None = None,
    transfer: float = 0.0,
    overlap: bool = True,
) -> Timeline:
    """Computes start and end of each stage's passes, which start when their predecessor and their input are complete.

    seconds: duration of a pass of a stage; None means DURATIONS. transfer: duration of a transfer between stages.
    overlap: whether transfers overlap with computation of the receiving stage, as in with_transfers. Raises ValueError
    if a stage repeats a pass or runs backward before forward, or if stages wait for each other in a cycle or for a pass
    that never runs.
    """
    for order in orders:
        validate_schedule(order)
    spans: Timeline = [{} for _ in orders]
    clocks = [0.0] * len(orders)
    # Stages that may now be able to continue.
    awake = list(range(len(orders)))
    while awake:
        stage = awake.pop()
        order, done = orders[stage], spans[stage]
        while len(done) < len(order):
            action = order[len(done)]
            source, target = pipeline.source(stage, action), pipeline.target(stage, action)
            ready = 0.0
            if source is not None:
                its = spans[source.stage].get(source.action)
                if its is None:
                    break
                ready = its.end
            late = transfer if source is not None and source.stage != stage else 0.0
            start = max(clocks[stage], ready + late) if overlap else max(clocks[stage], ready) + late
            clocks[stage] = start + (DURATIONS[action.kind] if seconds is None else seconds(stage, action))
            done[action] = Interval(start, clocks[stage])
            if target is not None and target.stage != stage:
                awake.append(target.stage)
    _check_that_all_ran(orders, spans)
    return spans


def _check_that_all_ran(orders: Orders, spans: Timeline) -> None:
    stuck = [f"stage {s} at {orders[s][len(spans[s])]}" for s in range(len(orders)) if len(spans[s]) < len(orders[s])]
    if stuck:
        raise ValueError(f"schedule deadlocks regardless of the order of transfers: {', '.join(stuck)}")


def bubble_share(spans: Timeline) -> float:
    """Returns the fraction of the stages' time, from the first pass to the last, in which they are idle."""
    total = max((span.end for stage in spans for span in stage.values()), default=0.0)
    busy = sum(span.end - span.start for stage in spans for span in stage.values())
    return 1 - busy / (total * len(spans)) if total else 0.0
