"""PagePool: memory of two tiers, split into pages, and the groups of tensors that hold pages.

    pool = PagePool(torch.device("cpu"), PoolLayout(page_bytes=65536, device_pages=1024, host_pages=256))
    group = pool.open_group([TensorSpec(row_bytes=512, pitch_bytes=512, max_rows=4096)])
    pool.plan(group, num_rows)           # allocates pages on the device
    pool.stash(group, [rows])            # copies the live rows into the pages
    pool.restore(group, [restored])      # copies them back
    pool.release(group)                  # frees the pages
    pool.close_group(group)
    pool.close_sync()                    # frees the memory of the pool

cpu_kernels.py implements the operators for the CPU, triton_kernels.py for GPUs. group_memory.py decides when they run.

Kernels address both tiers, device memory and page-locked host memory, directly: on a GPU a page is read and written at
its address. Storage without addresses, such as a file, could therefore not be a third tier.

[Note: computed in pages] Experts may compute their rows in pages. The pool then also has scratch, pages that no tensor
holds. The device's pages and the scratch are one arena, and `rows_in_pages` returns where the kernels find the rows of
a tensor. See [Note: scratch] in cpu_kernels.py. The scratch has one or two sets of pages, each for one group. With two,
rows of the next group are copied from the host into one set while the kernels of this group use the other.

[Note: streams of a pool] Only methods named *_sync wait for the device. plan and stash may run on one stream while
restore and release run on another: only plan advances the rings' heads, only release appends at their tails, and a
stale tail merely hides free pages. See [Note: two ends of a ring] in triton_kernels.py. The stream that plans a group
must follow the one on which it was opened, which may still fill a new page table with zeros. All work of a pool must be
joined before its reset.

[Note: persistent buffers] On a GPU, restored rows are in memory of the caching allocator. On the CPU they are in reused
buffers, because fresh memory costs 5 to 7 times as much as the copy into it: the operating system must find, zero and
map its pages. If the process keeps its heap (megatron.core.device.keep_cpu_heap), the heap already reuses such memory,
up to blocks of 1 GiB, and separate buffers would only occupy additional memory. The heap has no huge pages.

[Note: lowest pages] On a CPU an untouched page of the pool occupies no memory. plan therefore sorts the free pages
there and allocates those with the lowest addresses, so an oversized pool occupies only the memory of its peak. On a GPU
all memory is allocated up front, and rings keep the order of release, which requires no sort in a kernel.
"""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.device.pinned_memory import pinned_bytes
from megatron.core.device.torch_internals import storage_id
from megatron.core.paged_rows import PagedRows
from megatron.core.transformer.moe.paged_stash.cpu_kernels import ops
from megatron.core.transformer.moe.paged_stash.page_layout import (
    MAX_TENSORS,
    NUM_PRIORITIES,
    Counter,
    Held,
    PlacedTensor,
    PoolLayout,
    TensorSpec,
    Tier,
    encode_tensors,
    is_whole,
    planning_order,
)
from megatron.core.transformer.moe.paged_stash.scratch import ScratchSets

# Restored rows have the original's offset from a multiple of this number of bytes. Kernels choose their vector loops by
# alignment, and a different loop may round differently.
RESTORE_ALIGNMENT = 64
_KNOWN_SIZES = 4096  # entries of caches; training needs one for each group in flight
GROUPS_PER_SLAB = 16  # if all groups have the size of the group for which the slab is allocated
CLOSED = -1
_HUGE_PAGE_BYTES = 2**21
# Advice of Linux's madvise(2): use huge pages from now on, and collapse existing pages immediately.
_HUGEPAGE, _COLLAPSE = 14, 25


@dataclass(frozen=True)
class OperatorCall:
    """Part of a group that one operator call processes.

    indices: positions in the specs; tensors: encoded tensors; scratch: position of each tensor's scratch in the arena.
    """

    indices: list[int]
    tensors: list[int]
    scratch: list[int]


@dataclass(eq=False)
class PageGroup:
    """Tensors that are planned, copied and released together.

    tensors: in the order of the specs. waits: events that the stream of its first plan must wait for, because the
    previous owner of the table entries may still be reading its records. generation: number of the pool's resets before
    the group was opened, or CLOSED. scratch: pages of scratch in which all rows fit, and whether rows have gaps.
    scratch_set: the set of scratch pages that the group uses. is_fixed: the group belongs to a CUDA graph and is never
    closed.
    """

    tensors: list[PlacedTensor]
    waits: list[torch.Event]
    generation: int
    slab: "TableSlab"
    room: "_Room"
    calls: list[OperatorCall]
    scratch: tuple[int, bool]
    scratch_set: int
    is_fixed: bool = False

    def dropped(self, index: int) -> Tensor:
        """Returns a flag that is 1 if the tensor received no pages, else 0: [1], int64, on the device, a view."""
        return self.slab.held[self.tensors[index].slot, Held.DROPPED :][:1]


@dataclass(frozen=True)
class Occupancy:
    """Numbers of free and held pages of each tier, and the counters since the last reset.

    tail_bytes: bytes of allocated pages that contain no live rows.
    """

    device_free: int
    device_held: int
    host_free: int
    host_held: int
    tail_bytes: int
    counters: dict[Counter, int]


class TierMemoryError(ValueError):
    """Raised if a tier's memory cannot be allocated. The pool then has no memory."""

    def __init__(self, message: str, *, tier: Tier, num_bytes: int) -> None:
        super().__init__(message)
        self.tier, self.num_bytes = tier, num_bytes


class PagePool:
    """Pool of pages in device memory and in pinned host memory. On the CPU both are plain memory.

    The constructor allocates all memory, except page tables, which grow with the number of open groups. keeps_restored:
    whether CPU memory of restored rows is kept for reuse, see [Note: persistent buffers]. scratch_pages: S, pages of
    scratch for one group; scratch_sets: s, the number of such sets; see [Note: computed in pages]. scratch: the users
    of these sets. Read-only attributes: arena [(D + s S) * page_bytes], device_pages [D * page_bytes], a part of it,
    host_pages [Hn * page_bytes], uint8; heads, tails [2], int64; ring [D + Hn], int32; counters [len(Counter)], int64;
    generation: number of resets.
    """

    @torch.inference_mode(False)  # tensors made in inference mode cannot be changed outside of it
    def __init__(
        self,
        device: torch.device | str,
        layout: PoolLayout,
        *,
        keeps_restored: bool = True,
        scratch_pages: int = 0,
        scratch_sets: int = 1,
    ) -> None:
        """Allocates the pages. Raises TierMemoryError, a ValueError, if a tier's memory cannot be allocated.

        Raises ValueError if scratch_pages is not an integer of at least 0, or scratch_sets not one of at least 1.
        """
        for argument, number, least in (("scratch_pages", scratch_pages, 0), ("scratch_sets", scratch_sets, 1)):
            if not is_whole(number) or number < least:
                raise ValueError(f"{argument} ({number!r}) must be an integer of at least {least}")
        self.layout, self._keeps_restored = layout, keeps_restored
        self.scratch_pages, self.scratch_sets = scratch_pages, scratch_sets
        num_bytes = (layout.device_pages + scratch_pages * scratch_sets) * layout.page_bytes
        name = "device_pages + scratch_pages" if scratch_pages else "device_pages"
        self.arena = _device_memory(num_bytes, torch.device(device), name=name)
        self.device_pages = self.arena[: layout.device_pages * layout.page_bytes]
        self.device = self.arena.device
        self.host_pages = _host_memory(layout.host_pages * layout.page_bytes, self.device)
        self.heads = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.tails = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.ring = torch.zeros(layout.num_pages, dtype=torch.int32, device=self.device)
        self.counters = torch.zeros(len(Counter), dtype=torch.int64, device=self.device)
        self.generation = -1
        self._no_reserve = torch.zeros(NUM_PRIORITIES, dtype=torch.int64, device=self.device)
        self._tables = PageTables(layout, self.device, scratch_pages=scratch_pages)
        self._arenas: dict[torch.dtype, Tensor] = {}  # views of the arena
        # Numbers of the pages of the scratch: [s S], int64.
        self._scratch_places = torch.arange(scratch_pages * scratch_sets, device=self.device) + layout.device_pages
        self.scratch = ScratchSets(scratch_sets)
        # Owned by the pool, so that stashes that use the pool in turn can share the buffers.
        self.restored = RestoredMemory(self.device, is_kept=keeps_restored and self.device.type == "cpu")
        self.reset()

    def __reduce__(self) -> Any:
        """Makes deepcopy and pickle create a pool of the same size with separate memory and only free pages."""
        settings: dict[str, Any] = {
            "keeps_restored": self._keeps_restored,
            "scratch_pages": self.scratch_pages,
            "scratch_sets": self.scratch_sets,
        }
        return partial(PagePool, **settings), (str(self.device), self.layout)

    @property
    def num_bytes(self) -> dict[str, int]:
        """Memory sizes in bytes by name: device_pages, host_pages, scratch, and tables, which includes the rest."""
        records = (self.heads, self.tails, self.ring, self.counters, self._no_reserve, self._scratch_places)
        return {
            "device_pages": self.device_pages.nbytes,
            "host_pages": self.host_pages.nbytes,
            "scratch": self.arena.nbytes - self.device_pages.nbytes,
            "tables": self._tables.num_bytes + sum(record.nbytes for record in records),
        }

    def reset(self) -> None:
        """Frees all pages in their initial order, clears the counters and invalidates open groups. Allocates nothing.

        For an invalidated group, as for a closed one, release and close_group do nothing; other calls raise
        RuntimeError.
        """
        self.heads.zero_()
        self.tails[:1].fill_(self.layout.device_pages)
        self.tails[1:].fill_(self.layout.host_pages)
        torch.arange(self.layout.num_pages, out=self.ring, device=self.device)
        self.counters.zero_()
        self._tables.reset()
        if self.scratch_pages:
            self.scratch.forget()
        self.generation += 1

    @property
    def is_in_graphs(self) -> bool:
        """Whether a CUDA graph that uses the pool is alive."""
        return self._tables.has_fixed_groups

    def close_sync(self) -> None:
        """Frees the memory of both tiers, even if the pool is still referenced.

        NOTE: waits for the device if there are pinned pages. Groups become invalid as in a reset. All work of the pool
        must be joined. Raises RuntimeError if a CUDA graph that uses the pages is alive.
        """
        if self.is_in_graphs:
            raise RuntimeError("cannot close the pool: a CUDA graph that uses its pages is alive; delete it first")
        self.reset()
        self.arena, self.host_pages = self.arena.new_empty(0), self.host_pages.new_empty(0)
        self.device_pages, self._arenas = self.arena, {}

    def open_group(self, specs: Sequence[TensorSpec], *, scratch_set: int = 0, is_fixed: bool = False) -> PageGroup:
        """Reserves table entries for tensors that are planned together. Raises ValueError if specs is empty.

        scratch_set: the set of scratch pages in which rows without pages on the device are computed. is_fixed: whether
        a CUDA graph that is being captured will repeat the group's calls. Its table entries are then never reused.
        """
        self._check_open()
        if not specs:
            raise ValueError("specs is empty: must contain at least one tensor")
        if is_fixed:
            return self._tables.open_fixed_group(specs, self.generation, scratch_set)
        return self._tables.open_group(specs, self.generation, scratch_set)

    def plan(
        self, group: PageGroup, num_rows: Tensor, *, reserve: Tensor | None = None, in_pages: bool = False
    ) -> None:
        """Allocates pages for tensors, the most important first, or marks tensors as dropped.

        num_rows: [1], int64, on the device: live tokens. reserve: [3], int64, on the device: for each priority, the
        pages that must remain free after a tensor of this priority received pages; zeros if omitted. in_pages: whether
        rows_in_pages will be called. Raises ValueError for other shapes and dtypes, and with in_pages for rows with
        gaps or rows that do not fit the scratch.
        """
        self.check_fresh(group.generation)
        if in_pages:
            self._check_scratch(group.tensors, group.scratch)
        reserve = self._no_reserve if reserve is None else reserve
        for name, tensor, length in (("num_rows", num_rows, 1), ("reserve", reserve, NUM_PRIORITIES)):
            if tensor.shape != (length,) or tensor.dtype != torch.int64 or tensor.device != self.device:
                found = f"{list(tensor.shape)}, {tensor.dtype}, on {tensor.device}"
                raise ValueError(f"{name} ({found}) must be [{length}], torch.int64, on {self.device}")
        for call in group.calls:
            ops.plan(
                num_rows,
                reserve,
                heads=self.heads,
                tails=self.tails,
                ring=self.ring,
                table=group.slab.table,
                held=group.slab.held,
                counters=self.counters,
                places=group.slab.places if in_pages else None,
                layout=self.layout.numbers,
                tensors=call.tensors,
                scratch=call.scratch if in_pages else [],
            )

    def rows_in_pages(self, group: PageGroup, index: int, dtype: torch.dtype) -> PagedRows:
        """Returns where kernels find the rows of a tensor, [max_rows, row_bytes / itemsize], planned in pages."""
        assert group.slab.places is not None, "planned in pages"
        return self._paged_rows(group.tensors[index], group.slab.places, dtype)

    def rows_in_scratch(
        self, specs: Sequence[TensorSpec], dtypes: Sequence[torch.dtype], *, scratch_set: int = 0
    ) -> list[PagedRows]:
        """Returns tensors that are computed in the scratch alone, [max_rows, row_bytes / itemsize] each.

        The caller must first take the set, see ScratchSets. Raises ValueError for rows with gaps or rows that do not
        fit the scratch.
        """
        self._check_open()
        start = scratch_set * self.scratch_pages
        # _scratch_places is a table of the scratch's own pages, so a set begins at the same entry as in the scratch.
        placed, _, required = _placement_of(tuple(specs), self.layout, start=start, slot=0, scratch_start=start)
        self._check_scratch(placed, required)
        return [self._paged_rows(one, self._scratch_places, dtype) for one, dtype in zip(placed, dtypes, strict=True)]

    def _paged_rows(self, placed: PlacedTensor, places: Tensor, dtype: torch.dtype) -> PagedRows:
        spec, start, page_bytes = placed.spec, placed.table_start, self.layout.page_bytes
        end = start - (-spec.max_rows * spec.row_bytes // page_bytes)
        arena = self._arenas.get(dtype)
        if arena is None:
            arena = self._arenas[dtype] = self.arena.view(dtype)
        return PagedRows(arena, places[start:end], page_bytes, spec.max_rows, spec.row_bytes // dtype.itemsize)

    def scratch_of(self, group: PageGroup, index: int) -> Tensor:
        """Returns the scratch of a tensor: [max_rows * row_bytes], uint8."""
        placed = group.tensors[index]
        scratch = self.layout.device_pages + group.scratch_set * self.scratch_pages
        page = scratch + placed.table_start - group.room.start
        return self.arena[page * self.layout.page_bytes :][: placed.spec.max_bytes]

    def leave_to_readers(self, group: PageGroup) -> None:
        """Ends a group's use of the scratch, unless products that run later may read rows of its first tensor there."""
        # A CPU can read the record. On a GPU the host does not know it.
        record = group.slab.held[group.tensors[0].slot]
        if self.layout.host_pages and (self.device.type != "cpu" or int(record[Held.ON_HOST]) > 0):
            self.scratch.leave_to_readers(group)
        else:
            self.scratch.leave(group)

    def _check_open(self) -> None:
        if not self.device_pages.nbytes + self.host_pages.nbytes:
            raise RuntimeError("the pool is closed: it has no pages")

    def _check_scratch(self, tensors: Sequence[PlacedTensor], required: tuple[int, bool]) -> None:
        needed, has_gaps = required
        if needed > self.scratch_pages or has_gaps:
            raise ValueError(
                f"scratch_pages ({self.scratch_pages}) must be at least {needed} to compute these tensors in pages, "
                f"and their rows without gaps: {[placed.spec for placed in tensors]}; buffers larger than "
                "planned need --moe-paged-stash-compute copies"
            )

    def check_count(self, num_rows: Tensor, max_rows: int) -> None:
        """Updates the counters if num_rows is out of range, as `plan` does, for a group without pages.

        num_rows: [1], int64, on the device. Runs on the current stream, which must follow the pool's earlier plans.
        """
        is_bad = (num_rows < 0).logical_or_(num_rows > max_rows)
        self.counters[Counter.VOID : Counter.BAD_COUNT + 1].add_(is_bad)

    def stash(
        self, group: PageGroup, sources: Sequence[Tensor], *, num_programs: int = 0, host_only: bool = False
    ) -> None:
        """Copies live rows into the group's pages, or into those on the host.

        sources: in the order of the specs, each [>= (max_rows - 1) * pitch_bytes + row_bytes], uint8, on the device:
        the memory starting at a tensor's first byte. num_programs: upper limit of the grid on a GPU, 0 for the default.
        Raises ValueError for sources of the wrong size, dtype or device.
        """
        self.check_fresh(group.generation)
        self._check_memories(group.tensors, sources, name="sources")
        for call in group.calls:
            ops.stash(
                [sources[index] for index in call.indices],
                self.device_pages,
                host_pages=self.host_pages,
                table=group.slab.table,
                held=group.slab.held,
                layout=self.layout.numbers,
                tensors=call.tensors,
                num_programs=num_programs,
                host_only=host_only,
            )

    def restore(
        self,
        group: PageGroup,
        targets: Sequence[Tensor],
        *,
        num_programs: int = 0,
        host_only: bool = False,
        only: int | None = None,
    ) -> None:
        """Copies live rows out of the group's pages, or of those on the host. Other bytes remain unchanged.

        targets: like the sources of stash, [bytes], uint8. only: position of the one tensor to copy, to targets[0].
        Raises ValueError for targets of the wrong size, dtype or device.
        """
        self.check_fresh(group.generation)
        placed = group.tensors if only is None else [group.tensors[only]]
        self._check_memories(placed, targets, name="targets")
        for call in group.calls if only is None else [OperatorCall([0], encode_tensors(placed), [])]:
            ops.restore(
                self.device_pages,
                self.host_pages,
                table=group.slab.table,
                held=group.slab.held,
                targets=[targets[index] for index in call.indices],
                layout=self.layout.numbers,
                tensors=call.tensors,
                num_programs=num_programs,
                host_only=host_only,
            )

    def release(self, group: PageGroup) -> None:
        """Releases the group's pages. A second call does nothing."""
        for call in group.calls if group.generation == self.generation else ():
            ops.release(
                self.ring,
                self.tails,
                table=group.slab.table,
                held=group.slab.held,
                layout=self.layout.numbers,
                tensors=call.tensors,
            )

    def dropped(self, group: PageGroup, index: int) -> Tensor:
        """Returns a flag that is 1 if the tensor received no pages, else 0: [1], int64, on the device, a view."""
        return group.dropped(index)

    def close_group(self, group: PageGroup, after: torch.Event | None = None) -> None:
        """Makes the group's table entries available to later groups, which wait for the event `after`.

        Pages that the group still holds remain allocated until the next reset.
        """
        if group.generation == self.generation:
            self._tables.close_group(group, after)

    def occupancy_sync(self) -> Occupancy:
        """Returns the page counts of each tier, and the counters. NOTE: waits for the device."""
        counts = dict(zip(Counter, self.counters.tolist()))
        free = (self.tails - self.heads).tolist()
        return Occupancy(
            device_free=free[0],
            device_held=self.layout.device_pages - free[0],
            host_free=free[1],
            host_held=self.layout.host_pages - free[1],
            tail_bytes=counts[Counter.PLANNED_PAGES] * self.layout.page_bytes - counts[Counter.LIVE_BYTES],
            counters=counts,
        )

    def check_integrity_sync(self) -> None:
        """Raises AssertionError if a page is lost, duplicated or on the wrong tier. NOTE: waits for the device.

        Call it only while no other stream uses this pool.
        """
        held = self._held_pages_sync()
        ends = zip(self.heads.tolist(), self.tails.tolist(), self._tiers())
        for name, (head, tail, pages) in zip(("device", "host"), ends):
            assert 0 <= tail - head <= len(pages), f"{name} ring: tail {tail} - head {head} is not in 0 .. {len(pages)}"
            ring = self.ring[pages.start : pages.stop].tolist()
            free = [ring[position % len(ring)] for position in range(head, tail)]
            assert all(page in pages for page in free), f"{name} ring: ids outside {pages}: {free}"
            known = sorted(free + [page for page in held if page in pages])
            doubled = {first for first, second in zip(known, known[1:]) if first == second}
            assert not doubled, f"{name} pages {sorted(doubled)} occur twice among free and held pages"
            lost = sorted(set(pages) - set(known))
            assert not lost, f"{name} pages {lost} are neither free nor held by an open group"
        outside = [page for page in held if not 0 <= page < self.layout.num_pages]
        assert not outside, f"groups hold page ids outside 0 .. {self.layout.num_pages - 1}: {outside}"

    def _tiers(self) -> tuple[range, range]:
        """Returns the page ids of the device tier and of the host tier."""
        return range(self.layout.device_pages), range(self.layout.device_pages, self.layout.num_pages)

    def _held_pages_sync(self) -> list[int]:
        """Returns the ids of all pages that open groups hold. NOTE: waits for the device."""
        pages: list[int] = []
        for group in self._tables.open_groups:
            for placed in group.tensors:
                count = group.slab.held[placed.slot, Held.PAGES].item()
                pages += group.slab.table[placed.table_start :][:count].tolist()
        return pages

    def check_fresh(self, generation: int) -> None:
        """Raises RuntimeError for the generation of a group that is closed, or was opened before the last reset."""
        if generation != self.generation:
            raise RuntimeError("the group has no pages: it is closed, or was opened before its pool's last reset")

    def _check_memories(self, tensors: Sequence[PlacedTensor], memories: Sequence[Tensor], *, name: str) -> None:
        if len(memories) != len(tensors):
            raise ValueError(f"{name} contains {len(memories)} tensors: the group requires {len(tensors)}")
        for index, (memory, placed) in enumerate(zip(memories, tensors)):
            if memory.ndim != 1 or memory.dtype != torch.uint8 or not memory.is_contiguous():
                found = f"{list(memory.shape)}, {memory.dtype}"
                raise ValueError(f"{name}[{index}] ({found}) must be one-dimensional, contiguous and torch.uint8")
            if memory.device != self.device:
                raise ValueError(f"{name}[{index}] is on {memory.device}: must be on the pool's device, {self.device}")
            spec = placed.spec
            needed = (spec.max_rows - 1) * spec.pitch_bytes + spec.row_bytes if spec.max_rows else 0
            if memory.nbytes < needed:
                raise ValueError(f"{name}[{index}] has {memory.nbytes} bytes: must be at least {needed} for {spec}")


def _device_memory(num_bytes: int, device: torch.device, *, name: str) -> Tensor:
    """Allocates device memory: [num_bytes], uint8. Raises TierMemoryError if it cannot be allocated.

    name: the sizes that determine it, for the error.
    """
    try:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise TierMemoryError(
            f"{name}: {num_bytes} bytes cannot be allocated on {device} ({_first_line(error)}); reduce {name}",
            tier=Tier.DEVICE,
            num_bytes=num_bytes,
        ) from error
    use_huge_pages(memory)
    return memory


def _host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Allocates host memory: [num_bytes], uint8, page-locked unless the device is the CPU.

    Raises TierMemoryError if it cannot be allocated.
    """
    locked = device.type != "cpu" and num_bytes > 0
    try:
        memory = pinned_bytes(num_bytes, device) if locked else torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise TierMemoryError(
            f"host_pages: {num_bytes} bytes of {'page-locked ' if locked else ''}host memory cannot be allocated"
            f" ({_first_line(error)}); reduce host_pages or raise the limit of locked memory (ulimit -l)",
            tier=Tier.HOST,
            num_bytes=num_bytes,
        ) from error
    if not locked:
        use_huge_pages(memory)
    return memory


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


@dataclass(frozen=True)
class _Room:
    """Space in a slab: a range of its table entries and a range of its slots."""

    start: int
    slot: int
    num_entries: int
    num_slots: int

    @property
    def size(self) -> tuple[int, int]:
        return self.num_entries, self.num_slots


@dataclass(eq=False)
class TableSlab:
    """A page table and its records, on the device, and the groups that have space in them.

    table: [entries], int64; places: the same, or None if nothing is computed in pages; held: [slots, len(Held)], int64.
    Returned space is reused undivided by the next group of the same size, which waits for the events that were returned
    with it. waits: events that must complete before unused space is used, from groups that were closed before the slab
    was last empty.
    """

    table: Tensor
    places: Tensor | None
    held: Tensor
    used: _Room = _Room(0, 0, 0, 0)
    open_groups: set[PageGroup] = field(default_factory=set)
    returned: dict[tuple[int, int], list[tuple[_Room, list[torch.Event]]]] = field(default_factory=dict)
    waits: list[torch.Event] = field(default_factory=list)

    def reset(self) -> None:
        """Removes all groups, and clears the records of all tensors."""
        self.held.zero_()
        self.used = _Room(0, 0, 0, 0)
        self.open_groups.clear()
        self.returned.clear()
        self.waits = []

    def take_returned(self, size: tuple[int, int]) -> tuple[_Room, list[torch.Event]] | None:
        """Takes the first returned space of exactly this size, with the events to wait for; None if there is none."""
        rooms = self.returned.get(size)
        return rooms.pop(0) if rooms else None

    def take_new(self, size: tuple[int, int]) -> tuple[_Room, list[torch.Event]] | None:
        """Takes space that was not used since the slab was last empty, with the events to wait for; None if full."""
        start, slot = self.used.num_entries, self.used.num_slots
        if start + size[0] > self.table.shape[0] or slot + size[1] > self.held.shape[0]:
            return None
        self.used = _Room(0, 0, start + size[0], slot + size[1])
        return _Room(start, slot, *size), list(self.waits)

    def renew(self) -> None:
        """Merges all space of a slab without groups into one piece."""
        self.waits += [event for rooms in self.returned.values() for _, events in rooms for event in events]
        self.returned.clear()
        self.used = _Room(0, 0, 0, 0)


class PageTables:
    """Page tables of one pool, in slabs. A slab is added when no space is left. Slabs are never freed."""

    def __init__(self, layout: PoolLayout, device: torch.device, *, scratch_pages: int) -> None:
        self.layout, self.device, self._scratch_pages = layout, device, scratch_pages
        self._has_places = scratch_pages > 0
        self.slabs: list[TableSlab] = []
        # Groups of CUDA graphs, kept as long as the graphs exist.
        self._fixed: weakref.WeakSet[PageGroup] = weakref.WeakSet()

    @property
    def num_bytes(self) -> int:
        """Size of all slabs in bytes."""
        slabs = [*self.slabs, *(group.slab for group in self._fixed)]
        return sum((1 + self._has_places) * slab.table.nbytes + slab.held.nbytes for slab in slabs)

    @property
    def has_fixed_groups(self) -> bool:
        """Whether a CUDA graph that uses the pool is alive."""
        return len(self._fixed) > 0

    @property
    def open_groups(self) -> list[PageGroup]:
        """Fixed groups, and groups that were opened since the last reset and not closed, in no particular order."""
        return [*self._fixed, *(group for slab in self.slabs for group in slab.open_groups)]

    def open_group(self, specs: Sequence[TensorSpec], generation: int, scratch_set: int) -> PageGroup:
        """Opens a group with space for the page ids of these tensors, even if all their rows are live."""
        specs = tuple(specs)
        slab, room, waits = self._take(_size_of(specs, self.layout))
        placed = self._placed(specs, room, scratch_set)
        group = PageGroup(waits=waits, generation=generation, slab=slab, room=room, **placed)
        slab.open_groups.add(group)
        return group

    def open_fixed_group(self, specs: Sequence[TensorSpec], generation: int, scratch_set: int) -> PageGroup:
        """Opens a group with a separate slab, for a CUDA graph that repeats the group's plan.

        Space that is allocated and returned during capture would end up in two graphs. The slab may be in the graph's
        memory, because only the graph's operators and resets write to it.
        """
        specs = tuple(specs)
        size = _size_of(specs, self.layout)
        slab, room = self._slab(*size), _Room(0, 0, *size)
        placed = self._placed(specs, room, scratch_set)
        group = PageGroup(waits=[], generation=generation, slab=slab, room=room, is_fixed=True, **placed)
        self._fixed.add(group)
        return group

    def _placed(self, specs: tuple[TensorSpec, ...], room: _Room, scratch_set: int) -> dict[str, Any]:
        scratch_start = scratch_set * self._scratch_pages
        placed, calls, scratch = _placement_of(
            specs, self.layout, start=room.start, slot=room.slot, scratch_start=scratch_start
        )
        return {"tensors": placed, "calls": calls, "scratch": scratch, "scratch_set": scratch_set}

    def close_group(self, group: PageGroup, after: torch.Event | None) -> None:
        """Returns the group's space to its slab. Fixed groups keep their space.

        The next owner waits for `after`, or, if it is None, for the events that this group waited for.
        """
        if group.is_fixed:
            return
        events = [after] if after is not None else group.waits
        group.generation = CLOSED
        group.slab.open_groups.remove(group)
        group.slab.returned.setdefault(group.room.size, []).append((group.room, events))

    def reset(self) -> None:
        """Frees all space and closes all groups except fixed groups, which hold no pages afterwards."""
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

    @torch.inference_mode(False)  # as in PagePool
    def _slab(self, num_entries: int, num_slots: int) -> TableSlab:
        table = torch.zeros(max(1, num_entries), dtype=torch.int64, device=self.device)
        held = torch.zeros(max(1, num_slots), len(Held), dtype=torch.int64, device=self.device)
        return TableSlab(table, torch.zeros_like(table) if self._has_places else None, held)


# The layers of a model have few sizes and reuse the same space, so that the host computes each only once.


@lru_cache(_KNOWN_SIZES)
def _size_of(specs: tuple[TensorSpec, ...], layout: PoolLayout) -> tuple[int, int]:
    """Returns the numbers of table entries and slots that these tensors require."""
    return sum(layout.pages_for(spec.max_bytes) for spec in specs), len(specs)


@lru_cache(_KNOWN_SIZES)
def _placement_of(
    specs: tuple[TensorSpec, ...], layout: PoolLayout, *, start: int, slot: int, scratch_start: int
) -> tuple[list[PlacedTensor], list[OperatorCall], tuple[int, bool]]:
    """Places tensors in a table from entry `start` and slot `slot` on. Callers must not change the result.

    scratch_start: position in the scratch of the first tensor. Returns the calls of operators too, each with at most
    MAX_TENSORS tensors, sorted by priority, then by their given order, and PageGroup.scratch.
    """
    placed, scratch, first_entry = [], [], start
    for index, spec in enumerate(specs):
        placed.append(PlacedTensor(spec, start, slot + index))
        scratch.append(layout.device_pages + scratch_start + start - first_entry)
        start += layout.pages_for(spec.max_bytes)
    order = planning_order(specs)
    chunks = [order[first : first + MAX_TENSORS] for first in range(0, len(order), MAX_TENSORS)]
    calls = [
        OperatorCall(chunk, encode_tensors(placed[index] for index in chunk), [scratch[index] for index in chunk])
        for chunk in chunks
    ]
    return placed, calls, (start - first_entry, any(spec.pitch_bytes != spec.row_bytes for spec in specs))


class RestoredMemory:
    """Allocates memory that rows are restored into, for all stashes of a pool. See [Note: persistent buffers].

    is_kept: whether buffers are kept for reuse. A kept buffer becomes reusable as soon as no other tensor shares its
    storage.
    """

    def __init__(self, device: torch.device, *, is_kept: bool) -> None:
        self._device, self._is_kept = device, is_kept
        self._persistent: dict[int, list[Tensor]] = {}
        self._most_used: dict[int, int] = {}

    def take(self, num_bytes: int) -> Tensor:
        """Returns uninitialized memory: [N], uint8, on the device, N at least num_bytes."""
        num_bytes = -(-num_bytes // RESTORE_ALIGNMENT) * RESTORE_ALIGNMENT
        if not self._is_kept:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        buffers = self._persistent.setdefault(num_bytes, [])
        found = next((number for number, buffer in enumerate(buffers) if _is_free(buffer)), len(buffers))
        if found == len(buffers):
            buffers.append(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))
            use_huge_pages(buffers[found])
        self._most_used[num_bytes] = max(self._most_used.get(num_bytes, 0), found + 1)
        # A view, so that the storage's use count shows whether the caller still uses it.
        return buffers[found].view(-1)

    def trim(self) -> None:
        """Frees buffers that were not used since the last trim."""
        self._persistent = {size: buffers[: self._most_used.get(size, 0)] for size, buffers in self._persistent.items()}
        self._most_used = {}


def _is_free(buffer: Tensor) -> bool:
    # The buffer and the storage object created here count one use each. No public function returns the count.
    return torch._C._storage_Use_Count(storage_id(buffer.untyped_storage())) == 2


def use_huge_pages(memory: Tensor) -> None:
    """Requests pages of 2 MiB for a persistent tensor, [n], uint8. Does nothing if the system has none.

    Copies between such tensors take a fifth less time, because the processor translates fewer addresses. Contents
    remain unchanged. Partly covered huge pages and tensors on other devices, which use large pages anyway, are skipped.
    """
    if memory.device.type != "cpu":
        return
    start = -(-memory.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    size = (memory.data_ptr() + memory.nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES - start
    if size <= 0:
        return
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # a different C library or operating system
        return
    # Both calls are needed, because untouched memory can only be advised, and memory that malloc reuses can only be
    # collapsed.
    for advice in (_HUGEPAGE, _COLLAPSE):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)
