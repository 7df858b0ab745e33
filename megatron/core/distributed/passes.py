"""Passes: the backwards of an iteration, where gradients are reduced and freed in each; what of them holds memory.

Launches nothing: launch_order.py does.

[Note: passes] Groups whose gradients are freed once they are reduced are so in each backward: a pass, which `end_pass`
of the launch order ends. Every pass goes through the whole order of its groups, on all ranks alike, so that launches
pair up although the ranks tell each other nothing between passes. What comes behind its group's launch waits for the
next pass, or for `finish`.
"""

from collections import deque
from collections.abc import Collection
from enum import Enum

from megatron.core.distributed.launch_sequence import LaunchSequence
from megatron.core.distributed.synced_group import SyncedGroup


class PassScope(Enum):
    """The groups that a backward pass reduces.

    ITERATION: there are no passes, gradients are reduced once in an iteration. ALL: all groups; an iteration may have
    no pass. CHUNK: the groups of one chunk; each chunk has at least one pass in an iteration, which `finish` makes up
    for.
    """

    ITERATION = "iteration"
    ALL = "all"
    CHUNK = "chunk"


class Passes:
    """The backward passes of one launch order. max_in_flight: how many reductions may hold memory at a time."""

    def __init__(self, scope: PassScope, *, max_in_flight: int) -> None:
        self.scope = scope
        # The order in which the groups of the last pass became complete.
        self._seen: list[int] | None = None
        self._max_in_flight = max_in_flight
        # One for each reduction that holds memory, the oldest first.
        self._in_flight: deque[SyncedGroup] = deque()
        self._chunks: list[frozenset[int]] = []
        # Groups of the passes that ended in this iteration.
        self._ended: set[int] = set()

    def add_chunk(self, numbers: Collection[int]) -> None:
        """Registers a model chunk's bucket groups."""
        self._chunks.append(frozenset(numbers))

    def begin(self) -> None:
        """Begins an iteration; nothing is under way."""
        self._ended.clear()
        self._in_flight.clear()

    def groups_with(self, number: int) -> frozenset[int] | None:
        """Returns the groups of a backward pass in which this group has a gradient; None for all."""
        if self.scope is not PassScope.CHUNK:
            return None
        return next(chunk for chunk in self._chunks if number in chunk)

    def launched(self, group: SyncedGroup) -> SyncedGroup | None:
        """Records a reduction and returns the group whose oldest one must be settled now.

        It is returned at the same places on all ranks, since its wait may send more.
        """
        if self.scope is PassScope.ITERATION:
            return None
        self._in_flight.append(group)
        return self._in_flight.popleft() if len(self._in_flight) > self._max_in_flight else None

    def all_in_flight(self) -> list[SyncedGroup]:
        """The groups whose reductions hold memory, the oldest first; they are to be settled."""
        found = list(self._in_flight)
        self._in_flight.clear()
        return found

    def all_settled(self) -> None:
        """Records that no reduction is in flight."""
        self._in_flight.clear()

    def ended(self, numbers: Collection[int], *, seen: list[int]) -> None:
        """Records that the pass of these groups, and of other ranks' groups of their chunk, was launched completely."""
        self._seen = seen
        for chunk in self._chunks:
            if not chunk.isdisjoint(numbers):
                self._ended |= chunk

    def rest(self, sequence: LaunchSequence) -> list[int]:
        """Returns the groups still to be launched at the end of an iteration, or when one is aborted.

        They are those of the pass in progress, and where each chunk has a pass, those of chunks without one.
        """
        if self.scope is not PassScope.CHUNK:
            return sequence.rest()
        under_way = sequence.part or frozenset()
        left = sequence.rest() if under_way else []
        left += [number for number in sequence.order if number not in self._ended | under_way]
        self._ended.update(sequence.order)
        return left

    def order_seen(self, sequence: LaunchSequence, *, incomplete: Collection[int]) -> list[int]:
        """Returns the order in which groups became complete, with `incomplete` groups last.

        Passes of several chunks do not determine an order of all groups, which then stays as it was.
        """
        if self.scope is PassScope.ITERATION:
            return sequence.seen(incomplete)
        return sequence.order if self._seen is None or len(self._chunks) > 1 else self._seen

    def may_launch_early(self, *, overlap: bool) -> bool:
        """Whether ranks may have launched something of an iteration that was begun, and of which this rank has seen
        nothing.
        """
        return overlap if self.scope is PassScope.ITERATION else self.scope is PassScope.CHUNK
