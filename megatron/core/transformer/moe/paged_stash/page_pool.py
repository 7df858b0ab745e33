"""PagePool: memory of two tiers in pages, and the groups of tensors that hold them. The operators are in kernels.py.

    pool = PagePool(torch.device("cpu"), PoolLayout(page_bytes=65536, device_pages=1024, host_pages=256))
    group = pool.open_group([TensorSpec(row_bytes=512, pitch_bytes=512, max_rows=4096)])
    pool.plan(group, num_rows)           # decides on the device which tensors get which pages
    pool.stash(group, [rows])            # copies the live rows into them
    pool.restore(group, [rows_again])
    pool.release(group)
    pool.close_group(group)

Nothing here waits for the device but what is named *_sync. plan and stash may run on one stream while restore and
release run on another: plan alone takes from the rings' heads, release alone appends at their tails, and a tail read
too early only hides free pages. All work of a pool has to be joined before its reset.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.moe.paged_stash.huge_pages import use_huge_pages
from megatron.core.transformer.moe.paged_stash.page_layout import Counter, Held, PoolLayout, Priority, TensorSpec, Tier
from megatron.core.transformer.moe.paged_stash.page_tables import PageGroup, PageTables
from megatron.core.transformer.moe.paged_stash.restored_memory import RestoredMemory


@dataclass(frozen=True)
class Occupancy:
    """Pages free and held of each tier, and what a pool's counters say about the time since the last reset.

    tail_bytes: bytes of the pages given out that no live row filled.
    """

    device_free: int
    device_held: int
    host_free: int
    host_held: int
    tail_bytes: int
    counters: dict[Counter, int]


class TierMemoryError(ValueError):
    """The memory of a tier cannot be had; nothing of the pool is left."""

    def __init__(self, message: str, *, tier: Tier, num_bytes: int) -> None:
        super().__init__(message)
        self.tier, self.num_bytes = tier, num_bytes


class PagePool:
    """Pages of one device and of pinned host memory; on the CPU both are ordinary memory and behave the same.

    All memory is allocated here, except page tables, which grow with the groups open at once. Attributes for reading:
    device_pages [D * page_bytes], host_pages [Hn * page_bytes], uint8; heads, tails [2], int64; ring [D + Hn], int32;
    counters [len(Counter)], int64; generation: number of resets.
    """

    @torch.inference_mode(False)  # tensors made in inference mode could not be changed outside of it
    def __init__(self, device: torch.device | str, layout: PoolLayout) -> None:
        """Raises TierMemoryError, a ValueError, where there is too little memory."""
        self.layout = layout
        self.device_pages = _device_memory(layout.device_pages * layout.page_bytes, torch.device(device))
        self.device = self.device_pages.device
        self.host_pages = _host_memory(layout.host_pages * layout.page_bytes, self.device)
        self.heads = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.tails = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.ring = torch.zeros(layout.num_pages, dtype=torch.int32, device=self.device)
        self.counters = torch.zeros(len(Counter), dtype=torch.int64, device=self.device)
        self.generation = -1
        self._no_reserve = torch.zeros(len(Priority), dtype=torch.int64, device=self.device)
        self._tables = PageTables(layout, self.device)
        # Here, as stashes that take turns over one pool need it once.
        self.restored = RestoredMemory(self.device)
        self.reset()

    def __reduce__(self) -> Any:
        """A copy is a pool of the same size with all pages free, in memory of its own."""
        return PagePool, (str(self.device), self.layout)

    @property
    def num_bytes(self) -> dict[str, int]:
        """Bytes of its memory, by name: device_pages, host_pages, and tables, which is everything else."""
        records = (self.heads, self.tails, self.ring, self.counters, self._no_reserve)
        tables = self._tables.num_bytes + sum(record.nbytes for record in records)
        return {"device_pages": self.device_pages.nbytes, "host_pages": self.host_pages.nbytes, "tables": tables}

    def reset(self) -> None:
        """Frees all pages, in their first order, clears counters and makes open groups stale. Allocates nothing.

        For a stale group, as for a closed one, release and close_group do nothing; other calls raise RuntimeError.
        """
        self.heads.zero_()
        self.tails[:1].fill_(self.layout.device_pages)
        self.tails[1:].fill_(self.layout.host_pages)
        torch.arange(self.layout.num_pages, out=self.ring, device=self.device)
        self.counters.zero_()
        self._tables.reset()
        self.generation += 1

    def open_group(self, specs: Sequence[TensorSpec], *, is_fixed: bool = False) -> PageGroup:
        """Room in the page table for tensors that are planned together; no pages yet. Raises ValueError for none.

        is_fixed: a CUDA graph that is being captured will repeat the group's calls; the room is its own for good.
        """
        if not specs:
            raise ValueError("specs is empty: a group needs a tensor at least")
        if is_fixed:
            return self._tables.open_fixed_group(specs, self.generation)
        return self._tables.open_group(specs, self.generation)

    def plan(self, group: PageGroup, num_rows: Tensor, *, reserve: Tensor | None = None) -> None:
        """Gives tensors their pages, the most important ones first, or marks them as dropped.

        num_rows: [1], int64, on the device: live tokens. reserve: [3], int64, on the device: by priority, how many
        pages must stay free once a tensor has its own; 0 if not given. Raises ValueError for other shapes and dtypes.
        """
        self._check_fresh(group)
        reserve = self._no_reserve if reserve is None else reserve
        for name, tensor, length in (("num_rows", num_rows, 1), ("reserve", reserve, len(Priority))):
            if tensor.shape != (length,) or tensor.dtype != torch.int64 or tensor.device != self.device:
                found = f"{list(tensor.shape)}, {tensor.dtype}, on {tensor.device}"
                raise ValueError(f"{name} ({found}) must be [{length}], torch.int64, on {self.device}")
        for call in group.calls:
            torch.ops.paged_stash.plan(
                num_rows,
                reserve,
                heads=self.heads,
                tails=self.tails,
                ring=self.ring,
                table=group.slab.table,
                held=group.slab.held,
                counters=self.counters,
                layout=self.layout.encode(),
                tensors=call.tensors,
            )

    def stash(self, group: PageGroup, sources: Sequence[Tensor], *, num_programs: int = 0) -> None:
        """Copies live rows into the group's pages.

        sources: in the order of the specs, each [>= (max_rows - 1) * pitch_bytes + row_bytes], uint8, on the device:
        the memory from a tensor's first byte on. num_programs: how many programs a GPU may use for it, 0 for as many as
        are useful. Raises ValueError for sources that do not fit.
        """
        self._check_fresh(group)
        self._check_memories(group, sources, name="sources")
        for call in group.calls:
            torch.ops.paged_stash.stash(
                [sources[index] for index in call.indices],
                self.device_pages,
                host_pages=self.host_pages,
                table=group.slab.table,
                held=group.slab.held,
                layout=self.layout.encode(),
                tensors=call.tensors,
                num_programs=num_programs,
            )

    def restore(self, group: PageGroup, targets: Sequence[Tensor], *, num_programs: int = 0) -> None:
        """Copies live rows out of the group's pages; every other byte of the targets stays as it is.

        targets: as the sources of stash, [bytes], uint8. Raises ValueError for targets that do not fit.
        """
        self._check_fresh(group)
        self._check_memories(group, targets, name="targets")
        for call in group.calls:
            torch.ops.paged_stash.restore(
                self.device_pages,
                self.host_pages,
                table=group.slab.table,
                held=group.slab.held,
                targets=[targets[index] for index in call.indices],
                layout=self.layout.encode(),
                tensors=call.tensors,
                num_programs=num_programs,
            )

    def release(self, group: PageGroup) -> None:
        """Gives the group's pages back; a second time does nothing."""
        for call in group.calls if group.generation == self.generation else ():
            torch.ops.paged_stash.release(
                self.ring,
                self.tails,
                table=group.slab.table,
                held=group.slab.held,
                layout=self.layout.encode(),
                tensors=call.tensors,
            )

    def dropped(self, group: PageGroup, index: int) -> Tensor:
        """1 if that tensor got no pages when it was planned, else 0: [1], int64, on the device, a view."""
        return group.dropped(index)

    def close_group(self, group: PageGroup, after: torch.Event | None = None) -> None:
        """Gives the group's room in the page table to later ones, which wait for `after`, the event behind its release.

        Pages that it still holds stay taken until the next reset.
        """
        if group.generation == self.generation:
            self._tables.close_group(group, after)

    def occupancy_sync(self) -> Occupancy:
        """Pages of each tier, and counters. NOTE: waits for the device."""
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
        """Raises AssertionError if a page is lost, doubled or on the wrong tier. NOTE: waits for the device.

        Call it when no other stream works on this pool.
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
            assert not doubled, f"{name} pages {sorted(doubled)} are there twice among free and held ones"
            lost = sorted(set(pages) - set(known))
            assert not lost, f"{name} pages {lost} are neither free nor held by an open group"
        outside = [page for page in held if not 0 <= page < self.layout.num_pages]
        assert not outside, f"groups hold page ids outside 0 .. {self.layout.num_pages - 1}: {outside}"

    def _tiers(self) -> tuple[range, range]:
        """Page ids of the device tier and of the host tier."""
        return range(self.layout.device_pages), range(self.layout.device_pages, self.layout.num_pages)

    def _held_pages_sync(self) -> list[int]:
        """Ids that open groups hold. NOTE: waits for the device."""
        pages: list[int] = []
        for group in self._tables.open_groups:
            for placed in group.tensors:
                count = group.slab.held[placed.slot, Held.PAGES].item()
                pages += group.slab.table[placed.table_start :][:count].tolist()
        return pages

    def _check_fresh(self, group: PageGroup) -> None:
        if group.generation != self.generation:
            raise RuntimeError("the group is closed, or was opened before its pool's last reset: it has no pages")

    def _check_memories(self, group: PageGroup, memories: Sequence[Tensor], *, name: str) -> None:
        if len(memories) != len(group.tensors):
            raise ValueError(f"{name}: {len(memories)} tensors for a group of {len(group.tensors)}")
        for index, (memory, placed) in enumerate(zip(memories, group.tensors)):
            if memory.dim() != 1 or memory.dtype != torch.uint8 or not memory.is_contiguous():
                found = f"{list(memory.shape)}, {memory.dtype}"
                raise ValueError(f"{name}[{index}] ({found}) must be one row of torch.uint8 without gaps")
            if memory.device != self.device:
                raise ValueError(f"{name}[{index}] is on {memory.device}, its pool on {self.device}")
            spec = placed.spec
            needed = (spec.max_rows - 1) * spec.pitch_bytes + spec.row_bytes if spec.max_rows else 0
            if len(memory) < needed:
                raise ValueError(f"{name}[{index}] has {len(memory)} bytes, {spec} needs {needed}")


def _device_memory(num_bytes: int, device: torch.device) -> Tensor:
    """[num_bytes], uint8, on the device."""
    try:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise TierMemoryError(
            f"device_pages: {num_bytes} bytes cannot be had on {device} ({_first_line(error)}); fewer device_pages may"
            " help",
            tier=Tier.DEVICE,
            num_bytes=num_bytes,
        ) from error
    use_huge_pages(memory)
    return memory


def _host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """[num_bytes], uint8, page-locked unless the device is the CPU itself."""
    locked = device.type != "cpu" and num_bytes > 0
    try:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=locked)
    except RuntimeError as error:
        raise TierMemoryError(
            f"host_pages: {num_bytes} bytes of {'page-locked ' if locked else ''}host memory cannot be had"
            f" ({_first_line(error)}); fewer host_pages, or a higher limit of locked memory (ulimit -l), may help",
            tier=Tier.HOST,
            num_bytes=num_bytes,
        ) from error
    if not locked:
        use_huge_pages(memory)
    return memory


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
