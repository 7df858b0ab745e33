"""Lists of stash events as pipeline schedules make them, or at random. Stages, microbatches and layers from 0.

Holds no tests.
"""

import random
from collections.abc import Iterator

from megatron.core.transformer.moe.paged_stash.stash_order import EventKind, StashEvent

Pass = tuple[str, int, int]  # "F", "B" or "W" (the weights' part of a split backward), chunk, microbatch


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> Iterator[Pass]:
    """1F1B; with one stage, no pipelining."""
    warmup = min(stages - stage - 1, microbatches)
    return _alternate([(0, m) for m in range(microbatches)], [(0, m) for m in range(microbatches)], warmup)


def interleaved(stage: int, stages: int, microbatches: int, chunks: int = 2) -> Iterator[Pass]:
    """Microbatches in rounds of `stages`, the last round as short as it comes; each round through all chunks."""
    rounds = [range(m, min(m + stages, microbatches)) for m in range(0, microbatches, stages)]
    forwards = [(chunk, m) for one in rounds for chunk in range(chunks) for m in one]
    backwards = [(chunk, m) for one in rounds for chunk in reversed(range(chunks)) for m in one]
    warmup = min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(forwards))
    return _alternate(forwards, backwards, warmup if microbatches >= stages else len(forwards))


def split_backward(stage: int, stages: int, microbatches: int) -> Iterator[Pass]:
    """Like zero bubble: the gradients of inputs at once, those of weights one microbatch later."""
    pending = None
    for kind, chunk, microbatch in one_forward_one_backward(stage, stages, microbatches):
        yield kind, chunk, microbatch
        if kind == "B":
            if pending is not None:
                yield "W", chunk, pending
            pending = microbatch
    if pending is not None:
        yield "W", 0, pending


SCHEDULES = (one_forward_one_backward, interleaved, split_backward)


def stash_events(passes: Iterator[Pass], layers: int) -> list[StashEvent]:
    """Each pass runs the groups of all layers of its chunk; both parts of a split backward are backward events."""
    events = []
    for kind, chunk, microbatch in passes:
        order = range(layers) if kind == "F" else reversed(range(layers))
        event_kind = EventKind.FORWARD if kind == "F" else EventKind.BACKWARD
        events += [StashEvent(event_kind, f"chunk{chunk}.layer{layer}", microbatch) for layer in order]
    return events


def _alternate(forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], warmup: int) -> Iterator[Pass]:
    yield from (("F", *unit) for unit in forwards[:warmup])
    for backward, forward in zip(backwards, forwards[warmup:]):
        yield "F", *forward
        yield "B", *backward
    yield from (("B", *unit) for unit in backwards[len(forwards) - warmup :])


def random_events(choose: random.Random, num_groups: int) -> list[StashEvent]:
    """Forwards in order; each backward at a random later place, some never."""
    events, waiting = [], []
    for instance in range(num_groups):
        events.append(StashEvent(EventKind.FORWARD, "g", instance))
        waiting.append(instance)
        while waiting and choose.random() < 0.4:
            events.append(StashEvent(EventKind.BACKWARD, "g", waiting.pop(choose.randrange(len(waiting)))))
    choose.shuffle(waiting)
    left = waiting[choose.randrange(2) * len(waiting) // 3 :]
    return events + [StashEvent(EventKind.BACKWARD, "g", instance) for instance in left]
