"""Room in page tables for groups of tensors, handed out on the host. Operators (kernels.py) write the page ids."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.core.transformer.moe.paged_stash.kernels import MAX_TENSORS
from megatron.core.transformer.moe.paged_stash.page_layout import (
    Held,
    PlacedTensor,
    PoolLayout,
    TensorSpec,
    encode_tensors,
)

GROUPS_PER_SLAB = 16  # if all are as large as the one that the slab is made for
CLOSED = -1


@dataclass(frozen=True)
class _Room:
    """A range of a slab's table entries and one of its slots."""

    start: int
    slot: int
    num_entries: int
    num_slots: int

    @property
    def size(self) -> tuple[int, int]:
        return self.num_entries, self.num_slots


@dataclass(frozen=True)
class OperatorCall:
    """The tensors of a group that one call of an operator takes: their positions in the specs, and encoded."""

    indices: list[int]
    tensors: list[int]


@dataclass(eq=False)
class TableSlab:
    """A page table and its records, on the device, and which groups have room in them.

    table: [entries], int64; held: [slots, 3], int64. Room that a group gave back goes undivided to the next group of
    the same size, which waits for the events that came with it. waits: the events that new room has to wait for, of
    groups that had left when the slab was last empty.
    """

    table: Tensor
    held: Tensor
    used: _Room = _Room(0, 0, 0, 0)
    open_groups: set["PageGroup"] = field(default_factory=set)
    returned: dict[tuple[int, int], list[tuple[_Room, list[torch.Event]]]] = field(default_factory=dict)
    waits: list[torch.Event] = field(default_factory=list)

    def reset(self) -> None:
        """Leaves no group with room here, and no tensor with pages."""
        self.held.zero_()
        self.used = _Room(0, 0, 0, 0)
        self.open_groups.clear()
        self.returned.clear()
        self.waits = []

    def take_returned(self, size: tuple[int, int]) -> tuple[_Room, list[torch.Event]] | None:
        """Room of exactly this size that was given back, the longest ago first, and the events to wait for."""
        rooms = self.returned.get(size)
        return rooms.pop(0) if rooms else None

    def take_new(self, size: tuple[int, int]) -> tuple[_Room, list[torch.Event]] | None:
        """Room that no group has had since the slab was last empty, and the events to wait for."""
        start, slot = self.used.num_entries, self.used.num_slots
        if start + size[0] > len(self.table) or slot + size[1] > len(self.held):
            return None
        self.used = _Room(0, 0, start + size[0], slot + size[1])
        return _Room(start, slot, *size), list(self.waits)

    def renew(self) -> None:
        """Joins all room into one piece again; for a slab that every group has left."""
        self.waits += [event for rooms in self.returned.values() for _, events in rooms for event in events]
        self.returned.clear()
        self.used = _Room(0, 0, 0, 0)


@dataclass(eq=False)
class PageGroup:
    """Tensors that are planned, copied and given back together.

    tensors: in the order of the specs. waits: events that the stream of its first plan has to wait for: until then
    the room's last owner may still read its records. generation: number of the pool's resets before it was opened;
    CLOSED once it is closed. is_fixed: it never is.
    """

    tensors: list[PlacedTensor]
    waits: list[torch.Event]
    generation: int
    slab: TableSlab
    room: _Room
    calls: list[OperatorCall]
    is_fixed: bool = False

    def dropped(self, index: int) -> Tensor:
        """1 if the tensor got no pages when it was planned, else 0: [1], int64, on the device, a view."""
        return self.slab.held[self.tensors[index].slot, Held.DROPPED :][:1]


class PageTables:
    """The slabs of one pool. A new one is made only if no room is left; none is ever freed."""

    def __init__(self, layout: PoolLayout, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self.slabs: list[TableSlab] = []
        # Of groups that CUDA graphs plan and release, for as long as these live.
        self._fixed: weakref.WeakSet[PageGroup] = weakref.WeakSet()

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs, on the device."""
        slabs = [*self.slabs, *(group.slab for group in self._fixed)]
        return sum(slab.table.nbytes + slab.held.nbytes for slab in slabs)

    @property
    def open_groups(self) -> list[PageGroup]:
        """Fixed, or opened since the last reset and not closed, in no particular order."""
        return [*self._fixed, *(group for slab in self.slabs for group in slab.open_groups)]

    @torch.inference_mode(False)  # as in PagePool
    def open_group(self, specs: Sequence[TensorSpec], generation: int) -> PageGroup:
        """Room for the page ids of these tensors if all their rows are live."""
        slab, room, waits = self._take(self._size(specs))
        placed = self._placed(specs, room)
        group = PageGroup(placed, waits, generation, slab, room, _operator_calls(placed))
        slab.open_groups.add(group)
        return group

    @torch.inference_mode(False)  # as in PagePool
    def open_fixed_group(self, specs: Sequence[TensorSpec], generation: int) -> PageGroup:
        """Room in a slab that no other group ever gets, for as long as this group lives.

        For a group of which a CUDA graph repeats the plan: room that was taken and given back under capture would go to
        two graphs. The slab may be memory of the graph, as nothing but its operators and resets writes to it.
        """
        size = self._size(specs)
        slab, room = self._slab(*size), _Room(0, 0, *size)
        placed = self._placed(specs, room)
        group = PageGroup(placed, [], generation, slab, room, _operator_calls(placed), is_fixed=True)
        self._fixed.add(group)
        return group

    def close_group(self, group: PageGroup, after: torch.Event | None) -> None:
        """Takes the room back. Its next owner waits for `after`, or if that is None for what this group waited for.

        Fixed groups keep theirs.
        """
        if group.is_fixed:
            return
        events = [after] if after is not None else group.waits
        group.generation = CLOSED
        group.slab.open_groups.remove(group)
        group.slab.returned.setdefault(group.room.size, []).append((group.room, events))

    def reset(self) -> None:
        """Frees all room; no group but fixed ones is open then, and these hold no pages."""
        for slab in self.slabs:
            slab.reset()
        for group in self._fixed:
            group.slab.reset()

    def _take(self, size: tuple[int, int]) -> tuple[TableSlab, _Room, list[torch.Event]]:
        for slab in self.slabs:
            if taken := slab.take_returned(size) or slab.take_new(size):
                return slab, *taken
        for slab in self.slabs:
            if not slab.open_groups:
                slab.renew()
                if taken := slab.take_new(size):
                    return slab, *taken
        self.slabs.append(self._slab(*(GROUPS_PER_SLAB * number for number in size)))
        return self._take(size)

    def _slab(self, num_entries: int, num_slots: int) -> TableSlab:
        table = torch.zeros(max(1, num_entries), dtype=torch.int64, device=self.device)
        held = torch.zeros(max(1, num_slots), len(Held), dtype=torch.int64, device=self.device)
        return TableSlab(table, held)

    def _size(self, specs: Sequence[TensorSpec]) -> tuple[int, int]:
        """Entries and slots that these tensors need."""
        return sum(self.layout.pages_for(spec.max_bytes) for spec in specs), len(specs)

    def _placed(self, specs: Sequence[TensorSpec], room: _Room) -> list[PlacedTensor]:
        placed, start = [], room.start
        for index, spec in enumerate(specs):
            placed.append(PlacedTensor(spec, start, room.slot + index))
            start += self.layout.pages_for(spec.max_bytes)
        return placed


def _operator_calls(placed: list[PlacedTensor]) -> list[OperatorCall]:
    """The calls for a group, at most MAX_TENSORS tensors each, in order of priority and among equals as given."""
    order = sorted(range(len(placed)), key=lambda index: placed[index].spec.priority)
    chunks = [order[start : start + MAX_TENSORS] for start in range(0, len(order), MAX_TENSORS)]
    return [OperatorCall(chunk, encode_tensors(placed[index] for index in chunk)) for chunk in chunks]
