"""Expands a stage's passes into the order in which expert groups run forward and backward.

All functions are pure. Events are numbered like the groups of the paged stash, so lists of events can be passed to the
stash (by expert_memory.py of megatron.training); nothing is imported from the stash.
"""

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron.core.pipeline_parallel.schedule import Action, ActionKind


class EventKind(enum.Enum):
    """Events of an expert group. RECOMPUTE: the group's forward is repeated while backward runs."""

    FORWARD = "F"
    BACKWARD = "B"
    RECOMPUTE = "R"


@dataclass(frozen=True)
class ExpertEvent:
    """A pass of one expert group.

    layer: number of the layer in the whole model, from 1. instance: index of the layer's forward in the step, from 0.
    """

    kind: EventKind
    layer: int
    instance: int

    def __str__(self) -> str:
        return f"{self.kind.value} layer {self.layer}.{self.instance}"


def expand(
    actions: Sequence[Action], layer_map: Sequence[Sequence[int]], *, recompute: Mapping[int, int] | None = None
) -> list[ExpertEvent]:
    """Returns the expert events of a stage's passes, in the order of execution.

    layer_map: for each chunk, the numbers (from 1, over the whole model) of its layers with experts, in order.
    recompute: maps the number of each layer that is recomputed in backward to the number of its segment. The layers of
    one segment are recomputed together, before the backward of the segment's last layer.
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
    """Removes the events of recomputed groups, whose first forward saves nothing that could be stashed."""
    again = {(event.layer, event.instance) for event in events if event.kind is EventKind.RECOMPUTE}
    return [event for event in events if (event.layer, event.instance) not in again]


def _forward(layers: Sequence[int]) -> list[tuple[EventKind, int]]:
    return [(EventKind.FORWARD, layer) for layer in layers]


def _backward(layers: Sequence[int], recompute: Mapping[int, int]) -> list[tuple[EventKind, int]]:
    events: list[tuple[EventKind, int]] = []
    # A layer that is not recomputed forms a separate segment.
    for _, members in groupby(reversed(layers), key=lambda layer: recompute.get(layer, -layer)):
        segment = list(members)
        if segment[0] in recompute:
            events += [(EventKind.RECOMPUTE, layer) for layer in reversed(segment)]
        events += [(EventKind.BACKWARD, layer) for layer in segment]
    return events
