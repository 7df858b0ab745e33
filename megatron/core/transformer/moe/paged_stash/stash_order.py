"""StashOrder: records the order in which expert groups run forward and backward in a step, and predicts next events.

An expert group is one forward of a layer's experts, i.e. one micro-batch of one layer. It is not a process group.
A wrong prediction costs time or memory, but changes no result. stash.py acts on the predictions. This file contains no
tensors and no streams.
"""

import enum
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

# Name and instance: the key of one expert group in a step.
GroupKey = tuple[str, int]

# Maximum number of recorded events in one step. Steps have far fewer, but in a stash that is never reset the list would
# grow without bound.
MAX_EVENTS = 2**17


def layer_name(layer: int) -> str:
    """Returns the name of the expert groups of a layer. layer: from 1, over the whole model."""
    return f"layer {layer}"


def layer_of(name: str) -> int:
    """Returns the layer number of a name that layer_name returned."""
    return int(name.removeprefix("layer "))


class EventKind(enum.Enum):
    """Kind of an event of a group: its forward, its backward, or weight gradients that its backward held.

    WEIGHT exists only for groups that keep pages for these gradients, and is then their last event.
    """

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"

    # By identity, because Enum hashes its name in Python, in each look-up of an event.
    __hash__ = object.__hash__


class StashEvent(NamedTuple):
    """An event of one expert group. instance: number of earlier forwards with the same name in the step."""

    kind: EventKind
    name: str
    instance: int

    @property
    def group(self) -> GroupKey:
        """Key that the events of a group share."""
        return (self.name, self.instance)

    def __str__(self) -> str:
        return f"{self.kind.value} {self.name}.{self.instance}"


def late_groups(events: Sequence[StashEvent]) -> set[GroupKey]:
    """Returns the groups that keep pages until their weight gradients are computed."""
    return {event.group for event in events if event.kind is EventKind.WEIGHT}


class StashOrder:
    """Follows a step event by event and predicts the next events.

    1. A list of events predicts the step. It is the given list, or otherwise the list of the last finished step.
    2. Once an event differs from the list, the list is ignored until the step ends. Backward is then predicted to visit
       groups in the reverse order of their forwards. This holds within a micro-batch of any schedule.
    3. finish_step() begins the next step, with the given list, or otherwise with the observed events.

    A step may end before its list does, have no list, or contain groups that never run backward, without an error. A
    step without any backward is not learned, so an evaluation between steps changes nothing.
    """

    def __init__(self, events: Sequence[StashEvent] | None = None) -> None:
        self._learns = events is None
        self._seen: list[StashEvent] = []
        self._departed = False
        self._forwards: dict[GroupKey, int] = {}  # number of forwards before each group's forward in this step
        self._waiting: dict[
            GroupKey, None
        ] = {}  # groups that ran forward but not backward yet, in the order of their forwards
        self._set_events(tuple(events or ()))

    @property
    def events(self) -> tuple[StashEvent, ...]:
        """Events that are expected in this step. The same object is returned as long as they do not change."""
        return self._events

    @property
    def departed(self) -> bool:
        """Whether an event of this step differed from `events`."""
        return self._departed

    def observe(self, event: StashEvent) -> None:
        """Records an event of the step. Must be called once for each event, when it happens."""
        position = len(self._seen)
        if position >= MAX_EVENTS:
            # Too long for a step, so nothing is predicted or learned.
            self._departed, self._forwards, self._waiting = True, {}, {}
            return
        self._departed = self._departed or position >= len(self._events) or self._events[position] != event
        self._seen.append(event)
        group = event.group
        if event.kind is EventKind.FORWARD:
            self._forwards[group] = len(self._forwards)
            self._waiting[group] = None
        else:
            self._waiting.pop(group, None)

    def is_backward_next(self, event: StashEvent) -> bool:
        """Returns whether the same group's backward is the next event after this forward. False if unknown.

        Also False for a group that keeps pages for its weight gradients.
        """
        following = self._next_backward(event)
        return following is not None and following.group == event.group and event.group not in self._late

    def is_late(self, event: StashEvent) -> bool:
        """Returns whether the group of this forward is expected to keep pages for its weight gradients."""
        return not self._departed and event.group in self._late

    def adjacent_backward(self, event: StashEvent) -> StashEvent | None:
        """Returns the next event after this one if it is a backward whose group ran forward; None if unknown."""
        following = self._next_backward(event)
        return following if following is not None and following.group in self._waiting else None

    def backward_index(self, event: StashEvent) -> int:
        """Returns the index of a group's backward among the backwards of `events`; 0 if unknown."""
        return self._backward_index.get(event.group, 0)

    def upcoming_backwards(self, event: StashEvent, count: int) -> list[StashEvent]:
        """Returns the next backward events after this event, in order, at most `count` of them.

        Stops before a group whose forward has not run yet, since it has nothing to restore. PagedStash passes its
        prefetch_groups as `count`.
        """
        position = self._position(event)
        return self._guess(event, count) if position is None else self._listed_after(position, count)

    def forward_index(self, event: StashEvent) -> int | None:
        """Returns a forward's index among the forwards of `events`; None unless it is the latest or next event."""
        is_here = self._position(event) in (len(self._seen) - 1, len(self._seen))
        return self._forward_index.get(event.group) if is_here else None

    def finish_step(self) -> None:
        """Ends a complete step and begins the next one."""
        if self._learns and any(event.kind is EventKind.BACKWARD for event in self._seen):
            is_other = self._departed or len(self._seen) != len(self._events)
            if is_other and len(self._seen) < MAX_EVENTS:
                self._set_events(tuple(self._seen))
        self.abandon_step()

    def abandon_step(self) -> None:
        """Drops an incomplete step, without learning from it."""
        self._seen = []
        self._departed = False
        self._forwards = {}
        self._waiting = {}

    def _set_events(self, events: tuple[StashEvent, ...]) -> None:
        self._events = events
        self._late = late_groups(events)
        # The first part of a split backward counts.
        self._positions = {event: position for position, event in reversed(list(enumerate(events)))}
        forwards = (event.group for event in events if event.kind is EventKind.FORWARD)
        self._forward_index = {group: index for index, group in enumerate(forwards)}
        backwards = dict.fromkeys(event.group for event in events if event.kind is EventKind.BACKWARD)
        self._backward_index = {group: index for index, group in enumerate(backwards)}

    def _position(self, event: StashEvent) -> int | None:
        if self._departed:
            return None
        if self._seen and self._seen[-1] == event:
            return len(self._seen) - 1
        return self._positions.get(event)

    def _next_backward(self, event: StashEvent) -> StashEvent | None:
        """Returns the listed event after this one if it is a backward; None if unknown."""
        position = self._position(event)
        if position is None or position + 1 >= len(self._events):
            return None
        following = self._events[position + 1]
        return following if following.kind is EventKind.BACKWARD else None

    def _listed_after(self, position: int, count: int) -> list[StashEvent]:
        found: list[StashEvent] = []
        for later, event in enumerate(islice(self._events, position + 1, None), position + 1):
            if len(found) == count:
                break
            if event.kind is EventKind.BACKWARD and self._positions[event] == later:
                if event.group not in self._waiting:
                    break
                found.append(event)
        return found

    def _guess(self, event: StashEvent, count: int) -> list[StashEvent]:
        own = self._forwards.get(event.group, 0)
        if event.kind is EventKind.FORWARD:
            return []
        earlier = (group for group in reversed(self._waiting) if self._forwards[group] < own)
        return [StashEvent(EventKind.BACKWARD, *group) for group in islice(earlier, count)]
