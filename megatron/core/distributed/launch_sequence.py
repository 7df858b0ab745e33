"""LaunchSequence: decides which bucket group is reduced next, from group numbers only, identically on every rank.

Groups are numbered in the order of `add`. This file launches nothing; scheduler.py does.

[Note: backward passes] Bucket-lifetime gradients are reduced in each backward pass. The scheduler's `end_backward_pass`
ends a pass. Every backward pass launches all of its groups in one order, identical on all ranks, so that launches match
without communication between passes. A gradient that becomes ready after its group's launch is reduced in the next
backward pass, or in `finish`.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from enum import Enum


class LaunchSequence:
    """A total order of bucket groups, and this rank's position in it.

    A group is launched once it and all groups before it are ready, or at the end. The first iteration launches only at
    the end, because the order in which groups become complete is not known yet; `learn` and `adopt` set it afterwards.
    is_armed: whether the first iteration already launches early, in the order of `add`. part: restricts launches to
    these groups until the next `start`; None means all.
    """

    def __init__(self, *, is_armed: bool = False) -> None:
        self.order: list[int] = []
        self.is_frozen = False
        self.part: frozenset[int] | None = None
        self._cursor = 0
        self._ready: set[int] = set()
        self._absent: set[int] = set()
        self._is_armed = is_armed
        self._num_gradients = 0
        # For each group, the position of its last gradient among the gradients of all groups.
        self._last_gradient: dict[int, int] = {}
        self._seen: list[int] | None = None
        # Groups that were taken but not launched yet, for example after an error.
        self._due: deque[int] = deque()

    @property
    def is_armed(self) -> bool:
        """Whether groups are launched before the end."""
        return self._is_armed

    @property
    def may_have_begun(self) -> bool:
        """Whether any rank may have launched part of this iteration, judging by this rank's gradients."""
        return self._cursor > 0 or (self._is_armed and self._num_gradients > 0)

    def add(self, is_present: Sequence[bool]) -> range:
        """Adds groups in front of all earlier ones and returns their numbers.

        Later parts of a model are added later, and backward reaches them first. is_present: for each new group, whether
        it exists on this rank. A group that exists only on other ranks is always considered ready, so that groups after
        it need not wait for it.
        """
        new = range(len(self.order), len(self.order) + len(is_present))
        self._absent.update(number for number, here in zip(new, is_present) if not here)
        self.order = [*new, *self.order]
        return new

    def count_gradient(self, group: int, *, part: frozenset[int] | None = None) -> None:
        """Counts a gradient of a group in the last microbatch, and sets `part`, which the class describes."""
        self.part = part
        self._num_gradients += 1
        self._last_gradient[group] = self._num_gradients

    def mark_ready(self, group: int) -> list[int]:
        """Marks a group as ready and returns the groups to launch now, in order."""
        self._ready.add(group)
        end = self._cursor
        while self._is_armed and end < len(self.order) and self._is_launchable(self.order[end]):
            end += 1
        return self._take_until(end)

    def up_to(self, group: int) -> list[int]:
        """Returns the groups to launch up to and including this one, ready or not; empty if it was already launched."""
        return self._take_until(max(self._cursor, self.order.index(group) + 1))

    def rest(self) -> list[int]:
        """Returns all groups not launched yet, in order."""
        return self._take_until(len(self.order))

    def take(self, groups: Sequence[int]) -> Iterator[int]:
        """Iterates over groups to launch, beginning with groups that an error left unlaunched in an earlier call."""
        self._due.extend(groups)
        while self._due:
            yield self._due.popleft()

    def start(self) -> None:
        """Begins an iteration."""
        self._due.clear()
        self._cursor = self._num_gradients = 0
        self.part = None
        self._ready.clear()
        self._last_gradient.clear()

    def seen(self, incomplete: Collection[int]) -> list[int]:
        """Returns the order in which groups became complete.

        incomplete: groups that lack a gradient. They come last, because groups after them would be launched late.
        """
        last = [group for group in self.order if group in incomplete or group not in self._last_gradient]
        return [*sorted(set(self.order) - set(last), key=self._last_gradient.__getitem__), *last]

    def wants(self, seen: list[int]) -> bool:
        """Returns whether to adopt the order that was observed in this iteration.

        The order of the first iteration is adopted immediately, a later one only if it was observed twice in a row.
        """
        is_settled = not self._is_armed or seen == self._seen
        return is_settled and seen != self.order and not self.is_frozen

    def learn(self, seen: list[int]) -> None:
        """Ends an iteration that no rank aborted, records its observed order and enables early launches."""
        self._is_armed, self._seen = True, seen

    def adopt(self, order: list[int]) -> None:
        """Uses this order of launches from the next iteration on."""
        assert sorted(order) == sorted(self.order), "an order must contain every group exactly once"
        self.order = list(order)

    def _is_launchable(self, group: int) -> bool:
        return group in self._ready or group in self._absent or (self.part is not None and group not in self.part)

    def _take_until(self, end: int) -> list[int]:
        taken, self._cursor = self.order[self._cursor : end], end
        return taken if self.part is None else [group for group in taken if group in self.part]


class ReduceScope(Enum):
    """Set of groups that each backward pass reduces.

    ITERATION: none, because gradients are reduced once in an iteration. ALL: all groups; an iteration may have no
    backward pass. CHUNK: the groups of one chunk; each chunk has at least one backward pass in an iteration, and
    `finish` launches the reductions of missing passes.
    """

    ITERATION = "iteration"
    ALL = "all"
    CHUNK = "chunk"


class _BackwardPasses:
    """Backward passes of a scheduler's iteration; max_in_flight: maximum number of reductions that occupy memory."""

    def __init__(self, scope: ReduceScope, *, max_in_flight: int) -> None:
        self.scope = scope
        # The order in which the groups of the last backward pass became complete.
        self._seen: list[int] | None = None
        self._max_in_flight = max_in_flight
        # One entry for each reduction that occupies memory, oldest first.
        self._in_flight: deque[int] = deque()
        self._chunks: list[frozenset[int]] = []
        # Groups of the backward passes that ended in this iteration.
        self._ended: set[int] = set()

    def add_chunk(self, numbers: Collection[int]) -> None:
        """Registers a model chunk's bucket groups."""
        self._chunks.append(frozenset(numbers))

    def begin(self) -> None:
        """Begins an iteration, with nothing in flight."""
        self._ended.clear()
        self._in_flight.clear()

    def groups_with(self, number: int) -> frozenset[int] | None:
        """Returns the groups of the backward pass that reduces this group; None means all groups."""
        if self.scope is not ReduceScope.CHUNK:
            return None
        return next(chunk for chunk in self._chunks if number in chunk)

    def launched(self, number: int) -> int | None:
        """Records the launch of a group's reduction, and returns the group whose oldest reduction must be settled now.

        Returns None if no reduction must be settled. All ranks settle at the same point, because the wait may launch
        further collectives.
        """
        if self.scope is ReduceScope.ITERATION:
            return None
        self._in_flight.append(number)
        return self._in_flight.popleft() if len(self._in_flight) > self._max_in_flight else None

    def all_in_flight(self) -> list[int]:
        """Returns the groups whose reductions occupy memory, oldest first; the caller must settle them."""
        found = list(self._in_flight)
        self._in_flight.clear()
        return found

    def all_settled(self) -> None:
        """Records that no reduction is in flight."""
        self._in_flight.clear()

    def ended(self, numbers: Collection[int], *, seen: list[int]) -> None:
        """Records that all groups of a backward pass were launched, including groups of other ranks in its chunks."""
        self._seen = seen
        for chunk in self._chunks:
            if not chunk.isdisjoint(numbers):
                self._ended |= chunk

    def rest(self, sequence: LaunchSequence) -> list[int]:
        """Returns the groups still to be launched when an iteration ends or is aborted.

        These are the remaining groups of the backward pass in progress and, with ReduceScope.CHUNK, the groups of
        chunks that had no backward pass.
        """
        if self.scope is not ReduceScope.CHUNK:
            return sequence.rest()
        in_progress = sequence.part or frozenset()
        left = sequence.rest() if in_progress else []
        left += [number for number in sequence.order if number not in self._ended | in_progress]
        self._ended.update(sequence.order)
        return left

    def order_seen(self, sequence: LaunchSequence, *, incomplete: Collection[int]) -> list[int]:
        """Returns the order in which groups became complete, with `incomplete` groups last.

        With several chunks, backward passes do not determine an order of all groups; the current order is then
        returned.
        """
        if self.scope is ReduceScope.ITERATION:
            return sequence.seen(incomplete)
        return sequence.order if self._seen is None or len(self._chunks) > 1 else self._seen

    def may_launch_early(self, *, overlap: bool) -> bool:
        """Returns whether other ranks may have launched part of an iteration in which this rank has no gradient yet."""
        return overlap if self.scope is ReduceScope.ITERATION else self.scope is ReduceScope.CHUNK
