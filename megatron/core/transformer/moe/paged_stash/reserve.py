"""Reserve: the numbers of pages that gate_up and act must leave free in each forward of a step, on the device.

arithmetic.py computes the numbers. stash_order.py provides the order in which groups run.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.transformer.moe.paged_stash.arithmetic import ReserveRow, peak_pages, reserve_table, resident_groups
from megatron.core.transformer.moe.paged_stash.page_layout import (
    PagesByPriority,
    PoolLayout,
    Priority,
    TensorSpec,
    pages_for,
)
from megatron.core.transformer.moe.paged_stash.stash_order import EventKind, GroupKey, StashEvent

_NEVER_FREE = 2**62  # a page count larger than any pool


class Reserve:
    """Reserves pages for x. If the pool is large enough for every x, gate_up and act never occupy pages that x needs.

    With share 1:
    1. If the order of a step and the sizes of its groups are known, the guarantees of reserve_table hold.
    2. If some sizes are still unknown, as in the first step of a given order, groups that have not run are assumed to
       be as large as the largest known group. Every x receives pages unless a group turns out larger. gate_up may be
       dropped before act.
    3. If the order is unknown, gate_up and act receive no pages.

    A step that departs from its order is in case 3 from then on. Pages that gate_up and act already have are kept.

    With a smaller share, every group is assumed to have exactly that share of max_rows, including open groups, whose
    pages will be released. If the assumption is wrong, x may run out of pages. With share 0 nothing is reserved.
    """

    def __init__(self, layout: PoolLayout, device: torch.device, *, share: float) -> None:
        self._layout, self._share = layout, share
        self._stashed: dict[GroupKey, tuple[Sequence[TensorSpec], int]] = {}  # specs and max_rows of each group
        self._pages: dict[GroupKey, PagesByPriority] = {}  # upper bound for each group
        self._droppable: set[str] = set()  # names of groups with gate_up or act
        self._events: tuple[StashEvent, ...] = ()
        self._starts: list[int] = []  # positions of forwards in events
        self._resident: set[GroupKey] = set()
        self._table: list[ReserveRow] = []
        self._pages_of_table: dict[GroupKey, PagesByPriority] = {}
        self._is_written = False  # whether _rows contains the whole table
        # Persistent memory, because a CUDA graph may read it.
        self._rows = torch.zeros(0, len(Priority), dtype=torch.int64, device=device)
        self._inputs_alone = torch.tensor([0, _NEVER_FREE, _NEVER_FREE], dtype=torch.int64, device=device)

    def begin_step(self, events: tuple[StashEvent, ...]) -> None:
        """Prepares the reserve of the next step. Allocates only if the number of forwards changed.

        events: expected events of the step; () if they are unknown.
        """
        if events is not self._events:
            self._events, self._resident = events, resident_groups(events)
            self._starts = [place for place, event in enumerate(events) if event.kind is EventKind.FORWARD]
            self._pages_of_table, self._is_written = {}, False
            if len(self._rows) != len(self._starts):
                self._rows = self._rows.new_zeros(len(self._starts), len(Priority))
        if self._is_written and self._pages_of_table == self._pages:
            return
        self._is_written = bool(self._droppable) and self._all_known()
        if self._is_written and self._starts:
            self._rows.copy_(torch.tensor(self._up_to_date_table(), dtype=torch.int64, device="cpu"))

    def learn(self, group: GroupKey, specs: Sequence[TensorSpec], *, max_rows: int) -> None:
        """Records the sizes of the tensors that a group stashes. Empty specs do not replace recorded sizes."""
        if specs or group not in self._pages:
            self._stashed[group] = specs, max_rows
            self._pages[group] = self._pages_of_share(group)
        if any(spec.priority is not Priority.INPUT for spec in specs):
            self._droppable.add(group[0])

    def knows(self, group: GroupKey, specs: Sequence[TensorSpec], *, max_rows: int) -> bool:
        """Returns whether `learn` with these arguments would change nothing."""
        return self._stashed.get(group) == (specs, max_rows)

    def forget_others(self, groups: set[GroupKey]) -> None:
        """Drops the records of all groups that are not in `groups`. Call it before begin_step."""
        if self._pages.keys() <= groups:
            return
        self._stashed = {group: stashed for group, stashed in self._stashed.items() if group in groups}
        self._pages = {group: pages for group, pages in self._pages.items() if group in groups}
        self._droppable &= {name for name, _ in groups}

    @property
    def share(self) -> float:
        """Share of max_rows for which pages are reserved."""
        return self._share

    def set_share(self, share: float) -> None:
        """Sets the reserved share from the next begin_step on. The rows keep their memory address."""
        before = self._pages, self._share < 1
        self._share = share
        self._pages = {group: self._pages_of_share(group) for group in self._stashed}
        if (self._pages, share < 1) == before:
            return
        # Not written here, because copies of the ending step may still be reading the rows.
        self._pages_of_table, self._is_written = {}, False

    def row(self, group: GroupKey, forward_index: int | None) -> Tensor | None:
        """Returns the pages that a group's plan must leave free: [3], int64, on the device; None for no reserve.

        forward_index: index among the forwards of the step's events, from 0; None if it is unknown.
        """
        if not self._share:
            return None
        if group not in self._pages:
            return self._inputs_alone
        if group[0] not in self._droppable:
            return None
        if forward_index is None or forward_index >= len(self._rows):
            return self._inputs_alone
        if not self._is_written:
            row = self._up_to_date_table()[forward_index] if self._all_known() else self._guess(forward_index)
            for priority, num_pages in enumerate(row):
                # A copy from the host would wait for the device or require pinned memory.
                self._rows[forward_index, priority].fill_(num_pages)
        return self._rows[forward_index]

    @property
    def table(self) -> tuple[ReserveRow, ...]:
        """Pages to leave free in each forward of the step; () if nothing is reserved or known yet."""
        return tuple(self._table) if self._is_written and self._share else ()

    def _pages_of_share(self, group: GroupKey) -> PagesByPriority:
        specs, max_rows = self._stashed[group]
        return pages_for(specs, int(max_rows * self._share), layout=self._layout)

    def _all_known(self) -> bool:
        stashed = (self._events[place] for place in self._starts if self._events[place].group not in self._resident)
        return all(event.group in self._pages for event in stashed)

    def _up_to_date_table(self) -> list[ReserveRow]:
        if self._pages_of_table != self._pages:
            # Share 1 assumes nothing about pages that open groups will release, because their number is uncertain.
            at_least = self._most if self._share < 1 else None
            self._table = reserve_table(self._events, self._most, at_least=at_least)
            self._pages_of_table = dict(self._pages)
        return self._table

    def _guess(self, forward_index: int) -> ReserveRow:
        """Returns the peak page counts of the rest of the step, as a reserve row.

        Assumes that unknown groups are as large as the largest known group. The cost is linear in the number of later
        events.
        """
        largest = PagesByPriority(*map(max, zip(*self._pages.values())))
        later = self._events[self._starts[forward_index] + 1 :]

        def most(group: GroupKey) -> PagesByPriority:
            return self._most(group) if group in self._pages or group in self._resident else largest

        for_gate_up, for_act = (peak_pages(later, most, up_to=kept) for kept in (Priority.INPUT, Priority.GATE_UP))
        return 0, for_gate_up, for_act

    def _most(self, group: GroupKey) -> PagesByPriority:
        return PagesByPriority() if group in self._resident else self._pages[group]
