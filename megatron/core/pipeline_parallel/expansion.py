"""Expands a stage's passes into the order in which expert groups run forward and backward.

All functions are pure. Events are numbered like the groups of the paged stash, so a list can be passed to it
(expert_memory.py of megatron.training); nothing is imported from the stash.
"""

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron.core.pipeline_parallel.schedule import Action, ActionKind


class EventKind(enum.Enum):
    """Events of an expert group. RECOMPUTE: its forward is repeated while backward runs."""

    FORWARD = "F"
    BACKWARD = "B"
    RECOMPUTE = "R"


@dataclass(frozen=True)
class ExpertEvent:
    """A pass of one expert group.

    layer: from 1, over the whole model. instance: index of the layer's forward in the step, from 0.
    """

    kind: EventKind
    layer: int
    instance: int

    def __str__(self) -> str:
        return f"{self.kind.value} layer {self.layer}.{self.instance}"


def expand(
    actions: Sequence[Action], layer_map: Sequence[Sequence[int]], *, recompute: Mapping[int, int] | None = None
) -> list[ExpertEvent]:
    """Returns the events of a stage's passes, in order.

    layer_map: for each chunk, the numbers (from 1, over the whole model) of its layers with experts, in order.
    recompute: number of a layer that is recomputed in backward -> number of its segment; layers of one segment are
    recomputed together, before the backward of the last of them.
    """
    recompute = recompute or {}
    forwards: Counter[int] = Counter()
    instances: dict[tuple[int, int], int] = {}
    events = []
    for action in actions:
        layers = layer_map[action.chunk]
        if action.kind is ActionKind.FORWARD:
            for layer in layers:
                instances[layer, action.microbatch] = forwards[layer]
                forwards[layer] += 1
        kinds = _forward(layers) if action.kind is ActionKind.FORWARD else _backward(layers, recompute)
        events += [ExpertEvent(kind, layer, instances[layer, action.microbatch]) for kind, layer in kinds]
    return events


def kept_events(events: Sequence[ExpertEvent]) -> list[ExpertEvent]:
    """Removes recomputed groups, whose first forward saves nothing that could be stashed."""
    again = {(event.layer, event.instance) for event in events if event.kind is EventKind.RECOMPUTE}
    return [event for event in events if (event.layer, event.instance) not in again]


def _forward(layers: Sequence[int]) -> list[tuple[EventKind, int]]:
    return [(EventKind.FORWARD, layer) for layer in layers]


def _backward(layers: Sequence[int], recompute: Mapping[int, int]) -> list[tuple[EventKind, int]]:
    events: list[tuple[EventKind, int]] = []
    # A layer that is not recomputed is its own segment.
    for _, members in groupby(reversed(layers), key=lambda layer: recompute.get(layer, -layer)):
        segment = list(members)
        if segment[0] in recompute:
            events += [(EventKind.RECOMPUTE, layer) for layer in reversed(segment)]
        events += [(EventKind.BACKWARD, layer) for layer in segment]
    return events
