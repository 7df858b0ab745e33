"""A step of many microbatches, estimated from two short steps: in between a schedule repeats itself; pure."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from megatron.planner.step_time import StageTime, StepTime

# Rounds of the shorter step: as many as it takes to fill the pipeline.
_ROUNDS = 3


def long_step(estimate: Callable[[int], StepTime], num_microbatches: int, *, group_size: int) -> StepTime:
    """A step of so many microbatches; spans are those of a short one. estimate: of a step of a number of microbatches.

    group_size: microbatches of one round of the schedule, by which the two short steps differ.
    """
    short = _ROUNDS * group_size + num_microbatches % group_size
    if num_microbatches <= short + group_size:
        return estimate(num_microbatches)
    first, second = estimate(short), estimate(short + group_size)
    rounds = (num_microbatches - short) // group_size

    def grown(before: float, after: float) -> float:
        return before + rounds * (after - before)

    stages = tuple(
        _grown(before, after, grown=grown) for before, after in zip(first.stages, second.stages, strict=True)
    )
    seconds = grown(first.seconds, second.seconds)
    # Of a step that takes so long and has so many times the short one's tokens.
    share = (num_microbatches / short) * (first.seconds / seconds)
    return replace(
        first,
        seconds=seconds,
        tokens_per_second=first.tokens_per_second * share,
        tflops=first.tflops * share,
        mfu=None if first.mfu is None else first.mfu * share,
        stages=stages,
    )


def _grown(before: StageTime, after: StageTime, *, grown: Callable[[float, float], float]) -> StageTime:
    def of_kinds(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
        return {kind: grown(one.get(kind, 0.0), other.get(kind, 0.0)) for kind in {**one, **other}}

    return StageTime(
        grown(before.forward, after.forward),
        recompute=grown(before.recompute, after.recompute),
        backward=grown(before.backward, after.backward),
        exposed=of_kinds(before.exposed, after.exposed),
        hidden=grown(before.hidden, after.hidden),
        optimizer=before.optimizer,
        bubble=grown(before.bubble, after.bubble),
        by_kind=of_kinds(before.by_kind, after.by_kind),
    )
