"""Which bucket group may be reduced next: pure decisions over numbers, the same on every rank. Launches nothing.

Groups are numbered as they were added. scheduler.py acts on what is decided here.

[Note: backward passes] Bucket-lifetime gradients are reduced in each backward pass, which `end_backward_pass` of the
scheduler ends. Every backward pass goes through the whole order of its groups, identically on all ranks, so that
launches pair up although ranks exchange nothing between them. A gradient that becomes ready after its group's launch
waits for the next backward pass, or for `finish`.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from enum import Enum


class LaunchSequence:
    """One total order of bucket groups and how far this rank has come in it.

    A group is launched once it and all groups before it are ready, or at the end. In the first iteration nothing is
    launched before the end: nobody knows yet what to wait for. Then `learn` tells in which order they became complete.
    is_armed: not so, the order that they were added in is as good as any. part: the groups that alone are launched and
    waited for until the next `start`; None: all.
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
        # Of each group, the number of its last gradient among all.
        self._last_gradient: dict[int, int] = {}
        self._seen: list[int] | None = None
        # What is to be launched and was not yet.
        self._due: deque[int] = deque()

    @property
    def is_armed(self) -> bool:
        """Whether groups are launched before the end."""
        return self._is_armed

    @property
    def may_have_begun(self) -> bool:
        """Whether some rank may have launched something of this iteration, as far as this one's gradients tell."""
        return self._cursor > 0 or (self._is_armed and self._num_gradients > 0)

    def add(self, is_present: Sequence[bool]) -> range:
        """Numbers of new groups, which come before all others: the model's later parts are added later.

        is_present: of each, whether this rank has it; those of other ranks alone are never waited for.
        """
        new = range(len(self.order), len(self.order) + len(is_present))
        self._absent.update(number for number, here in zip(new, is_present) if not here)
        self.order = [*new, *self.order]
        return new

    def count_gradient(self, group: int, *, part: frozenset[int] | None = None) -> None:
        """Counts a gradient of a group in the last microbatch. part: see the class, from now on."""
        self.part = part
        self._num_gradients += 1
        self._last_gradient[group] = self._num_gradients

    def mark_ready(self, group: int) -> list[int]:
        """Marks a group as ready and returns the groups to be launched now, in order."""
        self._ready.add(group)
        end = self._cursor
        while self._is_armed and end < len(self.order) and self._need_not_wait_for(self.order[end]):
            end += 1
        return self._take_until(end)

    def up_to(self, group: int) -> list[int]:
        """The groups that are to be launched before and with this one, ready or not; none if it was launched."""
        return self._take_until(max(self._cursor, self.order.index(group) + 1))

    def rest(self) -> list[int]:
        """All groups that were not launched yet, in order."""
        return self._take_until(len(self.order))

    def take(self, groups: Sequence[int]) -> Iterator[int]:
        """Each of the groups in turn; before them those that an error in an earlier turn has left."""
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
        """The order in which groups became complete. incomplete: groups without some gradient, which go last, since
        what waits for them is late.
        """
        last = [group for group in self.order if group in incomplete or group not in self._last_gradient]
        return [*sorted(set(self.order) - set(last), key=self._last_gradient.__getitem__), *last]

    def wants(self, seen: list[int]) -> bool:
        """Whether to adopt the order seen: after the first iteration at once, then only if seen twice running."""
        is_settled = not self._is_armed or seen == self._seen
        return is_settled and seen != self.order and not self.is_frozen

    def learn(self, seen: list[int]) -> None:
        """Ends an iteration that no rank broke off."""
        self._is_armed, self._seen = True, seen

    def adopt(self, order: list[int]) -> None:
        """Launches in this order from the next iteration on."""
        assert sorted(order) == sorted(self.order), "an order has every group once"
        self.order = list(order)

    def _need_not_wait_for(self, group: int) -> bool:
        return group in self._ready or group in self._absent or (self.part is not None and group not in self.part)

    def _take_until(self, end: int) -> list[int]:
        taken, self._cursor = self.order[self._cursor : end], end
        return taken if self.part is None else [group for group in taken if group in self.part]


class ReduceScope(Enum):
    """The groups that a backward pass reduces.

    ITERATION: none, as gradients are reduced once in an iteration. ALL: all groups; an iteration may have no backward
    pass. CHUNK: the groups of one chunk; each chunk has at least one backward pass in an iteration, and `finish`
    launches what is missing of it.
    """

    ITERATION = "iteration"
    ALL = "all"
    CHUNK = "chunk"


class _BackwardPasses:
    """The backward passes of a scheduler's iteration. max_in_flight: how many reductions may hold memory at a time."""

    def __init__(self, scope: ReduceScope, *, max_in_flight: int) -> None:
        self.scope = scope
        # The order in which the groups of the last backward pass became complete.
        self._seen: list[int] | None = None
        self._max_in_flight = max_in_flight
        # One for each reduction that holds memory, the oldest first.
        self._in_flight: deque[int] = deque()
        self._chunks: list[frozenset[int]] = []
        # Groups of the backward passes that ended in this iteration.
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
        if self.scope is not ReduceScope.CHUNK:
            return None
        return next(chunk for chunk in self._chunks if number in chunk)

    def launched(self, number: int) -> int | None:
        """Records a group's reduction and returns the group whose oldest one must be settled now.

        It is returned at the same places on all ranks, since its wait may send more.
        """
        if self.scope is ReduceScope.ITERATION:
            return None
        self._in_flight.append(number)
        return self._in_flight.popleft() if len(self._in_flight) > self._max_in_flight else None

    def all_in_flight(self) -> list[int]:
        """The groups whose reductions hold memory, the oldest first; they are to be settled."""
        found = list(self._in_flight)
        self._in_flight.clear()
        return found

    def all_settled(self) -> None:
        """Records that no reduction is in flight."""
        self._in_flight.clear()

    def ended(self, numbers: Collection[int], *, seen: list[int]) -> None:
        """Records that all groups of a backward pass were launched, also other ranks' groups of the same chunk."""
        self._seen = seen
        for chunk in self._chunks:
            if not chunk.isdisjoint(numbers):
                self._ended |= chunk

    def rest(self, sequence: LaunchSequence) -> list[int]:
        """Returns the groups still to be launched at the end of an iteration, or when one is aborted.

        They are those of the backward pass in progress and, if each chunk has one, those of chunks without one.
        """
        if self.scope is not ReduceScope.CHUNK:
            return sequence.rest()
        under_way = sequence.part or frozenset()
        left = sequence.rest() if under_way else []
        left += [number for number in sequence.order if number not in self._ended | under_way]
        self._ended.update(sequence.order)
        return left

    def order_seen(self, sequence: LaunchSequence, *, incomplete: Collection[int]) -> list[int]:
        """Returns the order in which groups became complete, with `incomplete` groups last.

        Backward passes of several chunks do not determine an order of all groups, which then stays as it was.
        """
        if self.scope is ReduceScope.ITERATION:
            return sequence.seen(incomplete)
        return sequence.order if self._seen is None or len(self._chunks) > 1 else self._seen

    def may_launch_early(self, *, overlap: bool) -> bool:
        """Whether ranks may have launched something of an iteration that was begun, and of which this rank has seen
        nothing.
        """
        return overlap if self.scope is ReduceScope.ITERATION else self.scope is ReduceScope.CHUNK
