"""Expands a stage's passes into the order in which expert groups run forward and backward.

All functions are pure. Events are numbered like the groups of the paged stash, so lists of events can be passed to the
stash (by expert_memory.py of megatron.training); nothing is imported from the stash.

[Note: turns of a layer] A pass of a pair hands over to the other pass whenever it would wait for an exchange of rows. A
layer with experts exchanges rows before its experts (dispatch) and after them (combine). No turn is for row counts in
the layers that a stash supports; [Note: what covers an exchange] in expert_overlap.py has the others.

    forward:   router, launch dispatch     | experts, launch combine               | sum of each token's rows
    backward:  launch gradients of combine | experts, launch gradients of dispatch | router

The turns, drawn as bars, cut each pass into segments, which `turn_order` interleaves.
"""

import enum
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import TypeVar

from megatron.core.pipeline_parallel.schedule import ActionKind, Order, Pair

_Segment = TypeVar("_Segment")


class EventKind(enum.Enum):
    """Events of an expert group.

    RECOMPUTE: the group's forward is repeated while backward runs. WEIGHT: weight gradients that its backward held.
    """

    FORWARD = "F"
    BACKWARD = "B"
    RECOMPUTE = "R"
    WEIGHT = "W"


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


def turn_order(backward: Sequence[_Segment], forward: Sequence[_Segment]) -> list[_Segment]:
    """Lists the segments of a pair in the order of execution.

    backward, forward: each pass, cut at its turns. The backward begins, and the passes alternate until one of them
    ends. The other one then runs to its end.
    """
    both = min(len(backward), len(forward))
    return [*chain.from_iterable(zip(backward, forward)), *backward[both:], *forward[both:]]


def expand(
    order: Order,
    layer_map: Sequence[Sequence[int]],
    *,
    recompute: Mapping[int, int] | None = None,
    recomputed_alone: Collection[int] = (),
) -> list[ExpertEvent]:
    """Returns the expert events of a stage's passes, in the order of execution.

    layer_map: for each chunk, the numbers (from 1, over the whole model) of its layers with experts, in order.
    recompute: maps the number of each layer that is recomputed in backward to the number of its segment. The layers of
    one segment are recomputed together, before the backward of the segment's last layer. recomputed_alone: numbers of
    layers that hand over in no pair while they are recomputed, because they restore states of random-number generators.
    """
    recompute = recompute or {}
    forwards: Counter[int] = Counter()
    instances: dict[tuple[int, int], int] = {}
    events: list[ExpertEvent] = []
    for step in order:
        cut = []
        for action in step.passes:
            layers = layer_map[action.chunk]
            if action.kind is ActionKind.FORWARD:
                for layer in layers:
                    instances[layer, action.microbatch] = forwards[layer]
                    forwards[layer] += 1
            match action.kind:
                case ActionKind.FORWARD:
                    kinds = [(EventKind.FORWARD, layer) for layer in layers]
                case ActionKind.BACKWARD:
                    kinds = _backward(layers, recompute)
                case ActionKind.WEIGHT:
                    kinds = [(EventKind.WEIGHT, layer) for layer in reversed(layers)]
            of_pass = [ExpertEvent(kind, layer, instances[layer, action.microbatch]) for kind, layer in kinds]
            cut.append(_segments(of_pass, recomputed_alone))
        events += chain.from_iterable(turn_order(*cut) if isinstance(step, Pair) else cut[0])
    return events


def kept_events(events: Sequence[ExpertEvent]) -> list[ExpertEvent]:
    """Removes the events of recomputed groups, whose first forward saves nothing that could be stashed."""
    again = {(event.layer, event.instance) for event in events if event.kind is EventKind.RECOMPUTE}
    return [event for event in events if (event.layer, event.instance) not in again]


def _backward(layers: Sequence[int], recompute: Mapping[int, int]) -> list[tuple[EventKind, int]]:
    events: list[tuple[EventKind, int]] = []
    # A layer that is not recomputed forms a separate segment.
    for _, members in groupby(reversed(layers), key=lambda layer: recompute.get(layer, -layer)):
        segment = list(members)
        if segment[0] in recompute:
            events += [(EventKind.RECOMPUTE, layer) for layer in reversed(segment)]
        events += [(EventKind.BACKWARD, layer) for layer in segment]
    return events


def _segments(events: Sequence[ExpertEvent], recomputed_alone: Collection[int]) -> list[list[ExpertEvent]]:
    """Cuts the events of a pass at its turns. See [Note: turns of a layer]."""
    segments: list[list[ExpertEvent]] = [[]]
    for event in events:
        if event.kind is EventKind.RECOMPUTE and event.layer in recomputed_alone:
            segments[-1].append(event)
        else:
            segments += [[event], []]
    return segments
