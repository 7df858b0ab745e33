"""Stash events of pipeline schedules and of random schedules. Stages, microbatches and layers are counted from 0.

Contains no tests.
"""

import random
from collections.abc import Iterator

from megatron.core.transformer.moe.paged_stash.stash_order import EventKind, StashEvent

Pass = tuple[str, int, int]  # "F", "B" or "W" (weight gradients of a split backward), chunk, microbatch


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> Iterator[Pass]:
    """Yields the passes of 1F1B. With one stage there is no pipelining."""
    warmup = min(stages - stage - 1, microbatches)
    return _alternate([(0, m) for m in range(microbatches)], [(0, m) for m in range(microbatches)], warmup)


def interleaved(stage: int, stages: int, microbatches: int, chunks: int = 2) -> Iterator[Pass]:
    """Yields the passes of interleaved 1F1B. Each round of up to `stages` microbatches goes through all chunks."""
    rounds = [range(m, min(m + stages, microbatches)) for m in range(0, microbatches, stages)]
    forwards = [(chunk, m) for one in rounds for chunk in range(chunks) for m in one]
    backwards = [(chunk, m) for one in rounds for chunk in reversed(range(chunks)) for m in one]
    warmup = min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(forwards))
    return _alternate(forwards, backwards, warmup if microbatches >= stages else len(forwards))


def split_backward(stage: int, stages: int, microbatches: int) -> Iterator[Pass]:
    """Yields passes as in zero bubble: input gradients immediately, weight gradients one microbatch later."""
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
    """Returns events of all layers of each pass's chunk. Both parts of a split backward are backward events."""
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
    """Returns forwards in order, each followed by its backward at a random later place or not at all."""
    events, waiting = [], []
    for instance in range(num_groups):
        events.append(StashEvent(EventKind.FORWARD, "g", instance))
        waiting.append(instance)
        while waiting and choose.random() < 0.4:
            events.append(StashEvent(EventKind.BACKWARD, "g", waiting.pop(choose.randrange(len(waiting)))))
    choose.shuffle(waiting)
    left = waiting[choose.randrange(2) * len(waiting) // 3 :]
    return events + [StashEvent(EventKind.BACKWARD, "g", instance) for instance in left]
