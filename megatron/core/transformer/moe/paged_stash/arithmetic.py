"""Page counts derived from events and sizes: peaks, footprint, the reserve table, and a simulated pool.

All functions are pure, and nothing runs on a device. stash_order.py defines the events, page_layout.py the sizes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from megatron.core.transformer.moe.paged_stash.page_layout import (
    LEAST_IMPORTANT,
    Counter,
    PageAccount,
    PagesByPriority,
    PoolLayout,
    Priority,
    TensorSpec,
    planning_order,
)
from megatron.core.transformer.moe.paged_stash.stash_order import (
    EventKind,
    GroupKey,
    StashEvent,
    StashOrder,
    late_groups,
)

PagesOf = Callable[[GroupKey], PagesByPriority]
ReserveRow = tuple[int, int, int]


class _Pass(NamedTuple):
    """An event that allocates pages (forward) or frees them. rank: index of the group's forward."""

    forward: bool
    rank: int


def resident_groups(events: Sequence[StashEvent]) -> set[GroupKey]:
    """Returns the groups whose backward directly follows their forward. They are not stashed and require no pages.

    Groups that keep pages for their weight gradients are not among them.
    """
    kinds = (EventKind.FORWARD, EventKind.BACKWARD)
    pairs = zip(events, events[1:])
    found = {one.group for one, after in pairs if (one.kind, after.kind) == kinds and one.group == after.group}
    return found - late_groups(events)


def peak_pages(events: Sequence[StashEvent], pages: PagesOf, *, up_to: Priority = LEAST_IMPORTANT) -> int:
    """Returns the peak page count of all tensors at least as important as `up_to`, if each of them receives pages.

    By default, these are all tensors.
    """
    passes, groups = _passes(events)
    held = peak = 0
    for forward, rank in passes:
        own = pages(groups[rank]).up_to(up_to)
        held += own if forward else -own
        peak = max(peak, held)
    return peak


class PageMove(NamedTuple):
    """Allocation (is_taken) or release of a group's pages, by the event at index `place` of the step.

    forward_index: index of the group's forward among all forwards of the step, from 0, including resident groups.
    """

    place: int
    group: GroupKey
    forward_index: int
    is_taken: bool


def page_moves(events: Sequence[StashEvent], *, prefetch_groups: int) -> list[PageMove]:
    """Lists the page allocations and releases of a step, in order.

    A backward releases the pages of its group and of the groups that it prefetches, unless their weight gradients still
    need them; then the pass of these gradients does.
    """
    order, resident, late = StashOrder(events), resident_groups(events), late_groups(events)
    indices: dict[GroupKey, int] = {}
    held: set[GroupKey] = set()
    moves = []
    for place, event in enumerate(events):
        order.observe(event)
        if event.kind is EventKind.FORWARD:
            indices[event.group] = len(indices)
            if event.group not in resident:
                held.add(event.group)
                moves.append(PageMove(place, event.group, indices[event.group], is_taken=True))
            continue
        is_late = event.kind is EventKind.WEIGHT
        for done in (event, *(() if is_late else order.upcoming_backwards(event, prefetch_groups))):
            if done.group in held and (done.group in late) == is_late:
                held.remove(done.group)
                moves.append(PageMove(place, done.group, indices[done.group], is_taken=False))
    return moves


@dataclass(frozen=True)
class Footprint:
    """Peak device memory of tensors saved for backward, without and with a stash.

    static_bytes: without a stash, whole buffers of max_rows rows of all groups, also of resident ones. With a stash:
    arena_bytes, the device tier, plus working_set_bytes, the whole buffers of the running group, which may be a
    resident one, and of the prefetched groups, and their encoded rows; or the scratch.
    """

    static_bytes: int
    arena_bytes: int
    working_set_bytes: int

    @property
    def saving(self) -> float:
        """Share of static_bytes that the stash saves. Negative if it costs memory."""
        return 1 - (self.arena_bytes + self.working_set_bytes) / self.static_bytes if self.static_bytes else 0.0


def footprint(
    events: Sequence[StashEvent],
    max_bytes: Callable[[GroupKey], int],
    *,
    layout: PoolLayout,
    prefetch_groups: int,
    scratch_sets: int = 0,
    encoded_bytes: int = 0,
) -> Footprint:
    """Returns the footprint of a step. max_bytes: bytes of a group's whole buffers.

    scratch_sets: the sets of scratch pages if groups compute in pages. They are then the only whole buffers. Copied
    groups have scratch_sets 0, and whole buffers of the running group and of prefetch_groups others. encoded_bytes: of
    the largest group whose rows are encoded. Such rows pass through memory of their own for each whole buffer, and a
    resident group decodes its rows into a second one.
    """
    sizes = {group: max_bytes(group) for group in {event.group for event in events}}
    peak_bytes = peak_pages(events, lambda group: PagesByPriority(sizes[group]))  # the same sums, in bytes
    largest = sorted(sizes.values(), reverse=True)
    num_whole = 1 + max(prefetch_groups, int(encoded_bytes > 0 and bool(resident_groups(events))))
    whole = largest[:1] * scratch_sets if scratch_sets else largest[:num_whole]
    working_set_bytes = sum(whole) + encoded_bytes * len(whole)
    return Footprint(peak_bytes, layout.device_pages * layout.page_bytes, working_set_bytes)


def reserve_table(events: Sequence[StashEvent], pages: PagesOf, *, at_least: PagesOf | None = None) -> list[ReserveRow]:
    """Returns (0, r1, r2) for each forward: pages that must remain free after admitting a tensor of each priority.

    pages: upper bound of a group's pages. at_least: lower bound of the pages that its inputs, and its gate_up even if
    partly dropped, will occupy; 0 if omitted. If both bounds hold, then

    (1) a pool of at least peak_pages(events, pages, up_to=INPUT) pages never runs out of pages for inputs;

    (2) once an act has received pages, the gate_ups of all later groups receive pages, so that act is dropped first.

    Proof. At a given moment, a group is old if it has run forward, and new otherwise. For each group, a is the upper
    bound of the pages of its inputs, x their true number, l <= x <= a the lower bound (at_least), and b the upper bound
    of the pages of its gate_up.

    (1) Invariant: for each later moment t, free pages >= sum of a over new groups open at t - sum of x over old groups
    whose backward has run by t. It holds at the start, because the pool is as large as the peak. An input allocates
    x <= a pages and its group turns from new to old, so the right side falls by a for t before its backward, and by x
    for later t. A backward releases x or more, and the right side grows by x. A gate_up or act is admitted only if free
    pages afterwards are >= r1 (or r2 >= r1), the largest right side with x replaced by l. For t at the next forward the
    invariant says free >= a, so its inputs receive pages.

    (2) r2 is the largest, over new groups g, of: sum of a + b over new groups open once g has run, minus the pages that
    old groups have released by then, plus r1 of g. Consider g's gate_up and the last act admitted before it: r2 pages
    were free then, and only inputs and gate_ups were admitted since. So b + r1 of g are free, which admits g's gate_up.

    Costs (number of forwards) x (number of events) steps, or the number of events if `at_least` is `pages`.
    """
    passes, groups = _passes(events)
    most = [pages(group) for group in groups]
    least = [at_least(group) if at_least else PagesByPriority() for group in groups]
    least_inputs, least_both = [own.inputs for own in least], [own.up_to(Priority.GATE_UP) for own in least]
    inputs = [own.inputs for own in most]
    both = [own.up_to(Priority.GATE_UP) for own in most]
    nothing = [0] * len(groups)
    for_gate_up = _highest_after_each(passes, inputs, given_back=least_inputs, above=nothing)
    for_act = _highest_after_each(passes, both, given_back=least_both, above=for_gate_up)
    return [(0, first, max(first, second)) for first, second in zip(for_gate_up, for_act)]


@dataclass(frozen=True)
class TensorPages:
    """Numbers of pages of a tensor on each tier. dropped: whether it received none and must be recomputed."""

    device: int
    host: int
    dropped: bool = False


class PoolModel:
    """Pool without memory: numbers of pages and counters by the rules of PageAccount.

    held: the pages of each group, in the order of its specs. counters: as in a pool.
    """

    def __init__(self, layout: PoolLayout) -> None:
        self.layout = layout
        self.held: dict[GroupKey, list[TensorPages]] = {}
        self.counters: dict[Counter, int] = dict.fromkeys(Counter, 0)
        sizes = layout.device_pages, layout.host_pages
        self._account = PageAccount(layout.page_bytes, sizes, list(sizes), self.counters)

    @property
    def free(self) -> tuple[int, int]:
        """Number of free pages on the device and on the host."""
        device, host = self._account.free
        return device, host

    def plan(
        self, group: GroupKey, specs: Sequence[TensorSpec], *, num_rows: int, reserve: ReserveRow = (0, 0, 0)
    ) -> list[TensorPages]:
        """Allocates pages for a group's tensors, the most important first. Returns the pages in the order of specs."""
        tokens = self._account.checked_count(num_rows, min((spec.max_tokens for spec in specs), default=num_rows))
        got: dict[int, TensorPages] = {}
        for index in planning_order(specs):
            one = specs[index]
            _, pages, on_host, is_dropped = self._account.allocate(
                tokens,
                row_bytes=one.row_bytes,
                tokens_per_row=one.tokens_per_row,
                priority=one.priority,
                reserve=reserve[one.priority],
            )
            got[index] = TensorPages(pages - on_host, on_host, dropped=is_dropped)
        self._account.end_plan()
        self.held[group] = [got[index] for index in range(len(specs))]
        return self.held[group]

    def release(self, group: GroupKey) -> None:
        """Frees the group's pages. Does nothing for groups without pages."""
        for one in self.held.pop(group, ()):
            self._account.release(one.device + one.host, on_host=one.host)


@dataclass(frozen=True)
class GroupRows:
    """Tensor specs of a group and its number of live tokens."""

    specs: Sequence[TensorSpec]
    num_rows: int


@dataclass(frozen=True)
class Simulation:
    """Pages of every group of a step, and the pool's counters at its end."""

    placements: dict[GroupKey, list[TensorPages]]
    counters: dict[Counter, int]


def simulate(
    events: Sequence[StashEvent],
    rows: Callable[[GroupKey], GroupRows],
    *,
    layout: PoolLayout,
    reserve: Sequence[ReserveRow] | None = None,
) -> Simulation:
    """Simulates the page allocations of a step in which the last event of each group releases its pages."""
    pool, placements = PoolModel(layout), {}
    passes, groups = _passes(events)
    for forward, rank in passes:
        group = groups[rank]
        if not forward:
            pool.release(group)
            continue
        own = rows(group)
        reserve_row = reserve[rank] if reserve else (0, 0, 0)
        placements[group] = pool.plan(group, own.specs, num_rows=own.num_rows, reserve=reserve_row)
    return Simulation(placements, pool.counters)


def _passes(events: Sequence[StashEvent]) -> tuple[list[_Pass], list[GroupKey]]:
    """Returns the events that allocate or release pages, and the groups in the order of their forwards.

    Skips the second part of a split backward, a backward without a forward, and one whose weight gradients still need
    the pages.
    """
    late = late_groups(events)
    rank_of: dict[GroupKey, int] = {}
    closed: set[GroupKey] = set()
    passes = []
    for event in events:
        group, forward = event.group, event.kind is EventKind.FORWARD
        if forward and group not in rank_of:
            rank_of[group] = len(rank_of)
        elif forward or group not in rank_of or group in closed:
            continue
        elif event.kind is EventKind.BACKWARD and group in late:
            continue
        else:
            closed.add(group)
        passes.append(_Pass(forward, rank_of[group]))
    return passes, list(rank_of)


def _highest_after_each(
    passes: Sequence[_Pass], taken: list[int], *, given_back: list[int], above: list[int]
) -> list[int]:
    """Returns the result of _highest for each forward, in order, for the passes that start with this forward."""
    if taken == given_back:
        return _highest_in_one_walk(passes, taken, above=above)
    starts = [position for position, one in enumerate(passes) if one.forward]
    return [_highest(passes[start:], taken, given_back=given_back, above=above) for start in starts]


def _highest_in_one_walk(passes: Sequence[_Pass], taken: list[int], *, above: list[int]) -> list[int]:
    """Computes _highest_after_each for groups that release exactly the pages that they took.

    Levels are then independent of the starting point. A level after a forward is the level in the whole step minus the
    level at that forward.
    """
    signed = (taken[rank] if forward else -taken[rank] for forward, rank in passes)
    levels = list(accumulate(signed))
    highest, most_later = [0] * len(taken), -1
    for (forward, rank), level in zip(reversed(passes), reversed(levels)):
        if forward:
            highest[rank] = max(0, most_later - level)
            most_later = max(most_later, level + above[rank])
    return highest


def _highest(passes: Sequence[_Pass], taken: list[int], *, given_back: list[int], above: list[int]) -> int:
    """Returns the maximum of level + above[g] after the forward of each group g that follows the first pass.

    level: number of pages allocated since the first pass, a forward. Later groups allocate and release the page counts
    in `taken`. The first group and earlier groups release the counts in `given_back`.
    """
    level = highest = 0
    start = passes[0].rank
    for forward, rank in passes[1:]:
        if forward:
            level += taken[rank]
            highest = max(highest, level + above[rank])
        else:
            level -= taken[rank] if rank > start else given_back[rank]
    return highest
