"""Reserve: pages that gate_up and act have to leave free, on the device, for each forward of a step. How many these are
is computed in arithmetic.py; in which order groups run is stash_order.py's matter.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.transformer.moe.paged_stash.arithmetic import (
    PagesByPriority,
    ReserveRow,
    pages_for,
    peak_pages,
    reserve_table,
    resident_groups,
)
from megatron.core.transformer.moe.paged_stash.page_layout import PoolLayout, Priority, TensorSpec
from megatron.core.transformer.moe.paged_stash.stash_order import EventKind, Group, StashEvent

_NEVER_FREE = 2**62  # pages: more than any pool has


class Reserve:
    """Pages kept back, so that in a pool with room for every x no x lacks pages that gate_up or act took.

    1. Where the order of a step and the sizes of its groups are known: what reserve_table promises.
    2. Where some sizes are still unknown, as in the first step of a given order: groups that have not run count as
       much as the largest that has. x is safe if none turns out larger; act may be given up later than gate_up.
    3. Where the order is unknown: gate_up and act get no pages.
    A step that departs from its order is in case 3 from then on, but what gate_up and act got before, they keep.
    All this with share 1. With less every group is taken to have just that share of max_rows, also those that are open
    and will give their pages back: an expectation, and x lacks pages where it fails. With 0 nothing is kept back.
    """

    def __init__(self, layout: PoolLayout, device: torch.device, *, share: float) -> None:
        self._layout, self._share = layout, share
        self._pages: dict[Group, PagesByPriority] = {}  # the most that a group takes
        self._droppable: set[str] = set()  # names of groups with gate_up or act
        self._events: tuple[StashEvent, ...] = ()
        self._starts: list[int] = []  # positions of forwards in events
        self._resident: set[Group] = set()
        self._table: list[ReserveRow] = []
        self._pages_of_table: dict[Group, PagesByPriority] = {}
        self._is_written = False  # all of the table, to _rows
        # Memory that stays where it is, for a CUDA graph may read it.
        self._rows = torch.zeros(0, len(Priority), dtype=torch.int64, device=device)
        self._inputs_alone = torch.tensor([0, _NEVER_FREE, _NEVER_FREE], device=device)

    def begin_step(self, events: tuple[StashEvent, ...]) -> None:
        """Before a step in which these events are expected, () if none; allocates where their number changed."""
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
            self._rows.copy_(torch.tensor(self._up_to_date_table(), device="cpu"))

    def learn(self, group: Group, specs: Sequence[TensorSpec], *, max_rows: int) -> None:
        """What a group stashed: nothing leaves as known what it stashed in steps before."""
        if specs or group not in self._pages:
            self._pages[group] = pages_for(specs, int(max_rows * self._share), layout=self._layout)
        if any(spec.priority is not Priority.INPUT for spec in specs):
            self._droppable.add(group[0])

    def row(self, group: Group, forward_index: int | None) -> Tensor | None:
        """For the plan of a group that was learned: [3], int64, on the device, or None where nothing is kept back.

        forward_index: which forward of the step's events it is; None where that is unknown.
        """
        if not self._share or group[0] not in self._droppable:
            return None
        if forward_index is None or forward_index >= len(self._rows):
            return self._inputs_alone
        if not self._is_written:
            row = self._up_to_date_table()[forward_index] if self._all_known() else self._guess(forward_index)
            for priority, num_pages in enumerate(row):
                # Neither waits for the device nor takes host memory, as a copy from the host would.
                self._rows[forward_index, priority].fill_(num_pages)
        return self._rows[forward_index]

    def _all_known(self) -> bool:
        stashed = (self._events[place] for place in self._starts if self._events[place].group not in self._resident)
        return all(event.group in self._pages for event in stashed)

    def _up_to_date_table(self) -> list[ReserveRow]:
        if self._pages_of_table != self._pages:
            # What open groups will give back is not known for certain.
            at_least = self._most if self._share < 1 else None
            self._table = reserve_table(self._events, self._most, at_least=at_least)
            self._pages_of_table = dict(self._pages)
        return self._table

    def _guess(self, forward_index: int) -> ReserveRow:
        """Costs as many steps as events follow: the peaks of what is to come."""
        largest = PagesByPriority(*map(max, zip(*self._pages.values())))
        later = self._events[self._starts[forward_index] + 1 :]

        def most(group: Group) -> PagesByPriority:
            return self._most(group) if group in self._pages or group in self._resident else largest

        for_gate_up, for_act = (peak_pages(later, most, up_to=kept) for kept in (Priority.INPUT, Priority.GATE_UP))
        return 0, for_gate_up, for_act

    def _most(self, group: Group) -> PagesByPriority:
        return PagesByPriority() if group in self._resident else self._pages[group]
