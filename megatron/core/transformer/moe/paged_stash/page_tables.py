"""Room in page tables for groups of tensors, handed out on the host. Which pages are in it is kernels.py's matter."""

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

GROUPS_PER_SLAB = 16  # of the size of the first
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
    """What one call of an operator takes of a group: positions in the group's specs, and the encoded tensors."""

    indices: list[int]
    tensors: list[int]


@dataclass(eq=False)
class TableSlab:
    """A page table [entries], int64, its records `held` [slots, 3], int64, both on the device, and who has room in it.

    Room that a group gave back goes as it is to the next group of the same size, after the events that it came with.
    waits: events before which no room may be written that was given back before the slab was last empty.
    """

    table: Tensor
    held: Tensor
    used: _Room = _Room(0, 0, 0, 0)
    open_groups: set["PageGroup"] = field(default_factory=set)
    returned: dict[tuple[int, int], list[tuple[_Room, list[torch.Event]]]] = field(default_factory=dict)
    waits: list[torch.Event] = field(default_factory=list)

    def reset(self) -> None:
        """Nobody has room here, no tensor holds pages."""
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
        """Room that nobody had since the slab was last empty."""
        start, slot = self.used.num_entries, self.used.num_slots
        if start + size[0] > len(self.table) or slot + size[1] > len(self.held):
            return None
        self.used = _Room(0, 0, start + size[0], slot + size[1])
        return _Room(start, slot, *size), list(self.waits)

    def renew(self) -> None:
        """Where every group has left: joins the pieces of all sizes to one that nobody had."""
        self.waits += [event for rooms in self.returned.values() for _, events in rooms for event in events]
        self.returned.clear()
        self.used = _Room(0, 0, 0, 0)


@dataclass(eq=False)
class PageGroup:
    """Tensors that are planned, copied and given back together.

    tensors: in the order of the specs. waits: events that the stream of its first plan has to wait for: until then
    the room's last owner may still read its records. generation: number of the pool's resets before it was opened;
    CLOSED once it is closed.
    """

    tensors: list[PlacedTensor]
    waits: list[torch.Event]
    generation: int
    slab: TableSlab
    room: _Room
    calls: list[OperatorCall]

    def dropped(self, index: int) -> Tensor:
        """1 if the tensor got no pages at its planning: [1], int64, on the device, a view."""
        return self.slab.held[self.tensors[index].slot, Held.DROPPED :][:1]


class PageTables:
    """The slabs of one pool. A new one is made only where no room is left; none is ever given up."""

    def __init__(self, layout: PoolLayout, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self.slabs: list[TableSlab] = []

    @property
    def num_bytes(self) -> int:
        """Of all slabs, on the device."""
        return sum(slab.table.nbytes + slab.held.nbytes for slab in self.slabs)

    @property
    def open_groups(self) -> list[PageGroup]:
        """Opened since the last reset and not closed, in no particular order."""
        return [group for slab in self.slabs for group in slab.open_groups]

    @torch.inference_mode(False)  # as in PagePool
    def open_group(self, specs: Sequence[TensorSpec], generation: int) -> PageGroup:
        """Room for the page ids of tensors that may all be full."""
        lengths = [self.layout.pages_for(spec.max_bytes) for spec in specs]
        slab, room, waits = self._take((sum(lengths), len(specs)))
        placed, start = [], room.start
        for index, (spec, length) in enumerate(zip(specs, lengths)):
            placed.append(PlacedTensor(spec, start, room.slot + index))
            start += length
        group = PageGroup(placed, waits, generation, slab, room, _operator_calls(placed))
        slab.open_groups.add(group)
        return group

    def close_group(self, group: PageGroup, after: torch.Event | None) -> None:
        """Takes the room back; its next owner waits for `after`, or without it for what this group had to wait for."""
        events = [after] if after is not None else group.waits
        group.generation = CLOSED
        group.slab.open_groups.remove(group)
        group.slab.returned.setdefault(group.room.size, []).append((group.room, events))

    def reset(self) -> None:
        """All room is free; no group is open."""
        for slab in self.slabs:
            slab.reset()

    def _take(self, size: tuple[int, int]) -> tuple[TableSlab, _Room, list[torch.Event]]:
        for slab in self.slabs:
            if taken := slab.take_returned(size) or slab.take_new(size):
                return slab, *taken
        for slab in self.slabs:
            if not slab.open_groups:
                slab.renew()
                if taken := slab.take_new(size):
                    return slab, *taken
        entries, slots = (max(1, GROUPS_PER_SLAB * number) for number in size)
        table = torch.zeros(entries, dtype=torch.int64, device=self.device)
        self.slabs.append(TableSlab(table, torch.zeros(slots, len(Held), dtype=torch.int64, device=self.device)))
        return self._take(size)


def _operator_calls(placed: list[PlacedTensor]) -> list[OperatorCall]:
    """In order of priority, the first given first among equals; at most MAX_TENSORS a call."""
    order = sorted(range(len(placed)), key=lambda index: placed[index].spec.priority)
    chunks = [order[start : start + MAX_TENSORS] for start in range(0, len(order), MAX_TENSORS)]
    return [OperatorCall(chunk, encode_tensors(placed[index] for index in chunk)) for chunk in chunks]
