"""The four operators of a page pool, `paged_stash::plan`, `stash`, `restore` and `release`, with their CPU versions.
Launchers of the GPU kernels are in triton_kernels.py, the memory they work on in page_pool.py.

All arguments are standing tensors of a pool, changed in place; nothing is returned. A tier is a kind of memory: 0 on
the device, 1 pinned host memory (ordinary memory in pools on the CPU). Page id i lies at byte i * page_bytes of
device_pages [D * page_bytes], uint8, if i < D, else at byte (i - D) * page_bytes of host_pages, of the same kind.

    heads, tails  [2], int64                   pages taken and given back since the reset, by tier: free = tail - head
    ring          [D + Hn], int32              free page ids in order, each tier's ring after the other's
    table         [entries], int64             page ids that tensors hold: what torch indexes with as it is
    held          [slots, 3], int64            by tensor; columns as in Held
    counters      [len(Counter)], int64
    num_rows      [1], int64                   live tokens of the group
    reserve       [3], int64                   pages that must stay free once a tensor of that priority got its own
    layout        PoolLayout.encode()
    tensors       encode_tensors(), in order of priority, at most 16
    num_programs  most programs that a GPU kernel may occupy, 0 for as many as are useful; without effect on the CPU
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.moe.paged_stash.page_copies import Arena, PagedRows, count_device_pages_sync
from megatron.core.transformer.moe.paged_stash.page_layout import Counter, Held, PoolLayout, Priority, decode_tensors

MAX_TENSORS = 16  # of one call: kernels unroll over them

torch.library.define(
    "paged_stash::plan",
    "(Tensor num_rows, Tensor reserve, *, Tensor(a!) heads, Tensor tails, Tensor ring, Tensor(b!) table,"
    " Tensor(c!) held, Tensor(d!) counters, int[] layout, int[] tensors) -> ()",
)
torch.library.define(
    "paged_stash::stash",
    "(Tensor[] sources, Tensor(a!) device_pages, *, Tensor(b!) host_pages, Tensor table, Tensor held,"
    " int[] layout, int[] tensors, int num_programs) -> ()",
)
torch.library.define(
    "paged_stash::restore",
    "(Tensor device_pages, Tensor host_pages, *, Tensor table, Tensor held, Tensor(a!)[] targets,"
    " int[] layout, int[] tensors, int num_programs) -> ()",
)
torch.library.define(
    "paged_stash::release",
    "(Tensor(a!) ring, Tensor(b!) tails, *, Tensor table, Tensor(c!) held, int[] layout, int[] tensors) -> ()",
)


@torch.library.register_fake("paged_stash::plan")
@torch.library.register_fake("paged_stash::stash")
@torch.library.register_fake("paged_stash::restore")
@torch.library.register_fake("paged_stash::release")
def _fake(*_arguments: object, **_by_name: object) -> None:
    """Nothing to infer: no operator returns anything."""


def _launchers() -> ModuleType:
    """triton_kernels.py, imported at the first use on a GPU: Triton is not installed everywhere."""
    return importlib.import_module("megatron.core.transformer.moe.paged_stash.triton_kernels")


@torch.library.impl("paged_stash::plan", "cuda")
def _plan_cuda(num_rows: Tensor, reserve: Tensor, **rest: object) -> None:
    _launchers().plan(num_rows, reserve, **rest)


@torch.library.impl("paged_stash::stash", "cuda")
def _stash_cuda(sources: list[Tensor], device_pages: Tensor, **rest: object) -> None:
    _launchers().stash(sources, device_pages, **rest)


@torch.library.impl("paged_stash::restore", "cuda")
def _restore_cuda(device_pages: Tensor, host_pages: Tensor, **rest: object) -> None:
    _launchers().restore(device_pages, host_pages, **rest)


@torch.library.impl("paged_stash::release", "cuda")
def _release_cuda(ring: Tensor, tails: Tensor, **rest: object) -> None:
    _launchers().release(ring, tails, **rest)


@torch.library.impl("paged_stash::plan", "cpu")
def _plan_cpu_sync(
    num_rows: Tensor,
    reserve: Tensor,
    *,
    heads: Tensor,
    tails: Tensor,
    ring: Tensor,
    table: Tensor,
    held: Tensor,
    counters: Tensor,
    layout: list[int],
    tensors: list[int],
) -> None:
    """Gives each tensor of a group its pages or drops it. NOTE: reads its tensors, all on the CPU."""
    sizes, placed = PoolLayout(*layout), decode_tensors(tensors)
    before, reserved = counters.tolist(), reserve.tolist()
    tally = list(before)
    live = _checked_count_sync(num_rows, min((one.spec.max_tokens for one in placed), default=0), tally=tally)
    rings = ring[: sizes.device_pages], ring[sizes.device_pages :]
    tiers = [_Ring(*ends) for ends in zip(rings, heads.tolist(), tails.tolist())]
    for one in placed:
        rows = -(-live // one.spec.tokens_per_row)
        need = sizes.pages_for(rows * one.spec.row_bytes)
        admitted = need == 0 or need + reserved[one.spec.priority] <= tiers[0].free + tiers[1].free
        record = held[one.slot]
        record[Held.PAGES].fill_(need if admitted else 0)
        record[Held.ROWS].fill_(rows)
        record[Held.DROPPED].fill_(not admitted)
        if not admitted:
            tally[_DROPS[one.spec.priority]] += 1
            continue
        on_device = min(need, tiers[0].free)
        tiers[0].take(table[one.table_start : one.table_start + on_device])
        tiers[1].take(table[one.table_start + on_device : one.table_start + need])
        tally[Counter.PLANNED_PAGES] += need
        tally[Counter.SPILLED_PAGES] += need - on_device
        tally[Counter.LIVE_BYTES] += rows * one.spec.row_bytes
    for tier, counter in enumerate((Counter.HIGH_WATER_DEVICE, Counter.HIGH_WATER_HOST)):
        tally[counter] = max(tally[counter], len(tiers[tier].ids) - tiers[tier].free)
        heads[tier].fill_(tiers[tier].head)
    for index, count in enumerate(tally):
        if count != before[index]:
            counters[index].fill_(count)


_DROPS = {
    Priority.INPUT: Counter.VOID,
    Priority.GATE_UP: Counter.DROPPED_GATE_UP,
    Priority.ACT: Counter.DROPPED_ACT,
}


def _checked_count_sync(num_rows: Tensor, limit: int, *, tally: list[int]) -> int:
    """num_rows [1], int64, as a number between 0 and limit; out of range is counted. NOTE: reads num_rows."""
    count = num_rows.tolist()[0]
    if not 0 <= count <= limit:
        tally[Counter.BAD_COUNT] += 1
        tally[Counter.VOID] += 1
    return min(max(count, 0), limit)


@dataclass
class _Ring:
    """One tier's ring of free page ids [pages], int32, with its ends as numbers that grow for ever."""

    ids: Tensor
    head: int
    tail: int

    @property
    def free(self) -> int:
        return self.tail - self.head

    def take(self, into: Tensor) -> None:
        """Moves the next len(into) ids out of the ring."""
        for piece, ids in self._pieces(into, self.head):
            piece.copy_(ids)
        self.head += len(into)

    def give(self, freed: Tensor) -> None:
        """Appends ids to the ring."""
        for piece, ids in self._pieces(freed, self.tail):
            ids.copy_(piece)
        self.tail += len(freed)

    def _pieces(self, outside: Tensor, position: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`outside` beside the ring's entries from `position` on, cut where the ring wraps around."""
        if len(outside):
            start = position % len(self.ids)
            before_wrap = min(len(outside), len(self.ids) - start)
            yield outside[:before_wrap], self.ids[start : start + before_wrap]
            if before_wrap < len(outside):
                yield outside[before_wrap:], self.ids[: len(outside) - before_wrap]


@torch.library.impl("paged_stash::release", "cpu")
def _release_cpu_sync(
    ring: Tensor, tails: Tensor, *, table: Tensor, held: Tensor, layout: list[int], tensors: list[int]
) -> None:
    """Gives a group's pages back. NOTE: reads its tensors, all on the CPU."""
    sizes, ends = PoolLayout(*layout), tails.tolist()
    on_device, on_host = _Ring(ring[: sizes.device_pages], 0, ends[0]), _Ring(ring[sizes.device_pages :], 0, ends[1])
    for one in decode_tensors(tensors):
        record = held[one.slot]
        ids = table[one.table_start :][: record.tolist()[Held.PAGES]]
        num_on_device = count_device_pages_sync(ids, sizes)
        on_device.give(ids[:num_on_device])
        on_host.give(ids[num_on_device:])
        record[Held.PAGES].fill_(0)
    tails[0].fill_(on_device.tail)
    tails[1].fill_(on_host.tail)


@torch.library.impl("paged_stash::stash", "cpu")
def _stash_cpu_sync(sources: list[Tensor], device_pages: Tensor, *, host_pages: Tensor, **records: Any) -> None:
    """Copies live rows into the pages that plan gave. NOTE: reads its tensors, all on the CPU."""
    for rows in _paged_rows_sync(sources, (device_pages, host_pages), **records):
        for pages, indices, whole in rows.whole_pages_sync():
            pages.index_copy_(0, indices, whole)
        for page, piece in rows.pieces_sync():
            page.copy_(piece)


@torch.library.impl("paged_stash::restore", "cpu")
def _restore_cpu_sync(device_pages: Tensor, host_pages: Tensor, *, targets: list[Tensor], **records: Any) -> None:
    """Copies live rows back from their pages. NOTE: reads its tensors, all on the CPU."""
    for rows in _paged_rows_sync(targets, (device_pages, host_pages), **records):
        for pages, indices, whole in rows.whole_pages_sync():
            torch.index_select(pages, 0, indices, out=whole)
        for page, piece in rows.pieces_sync():
            piece.copy_(page)


def _paged_rows_sync(
    memories: list[Tensor],
    tiers: tuple[Tensor, Tensor],
    *,
    table: Tensor,
    held: Tensor,
    layout: list[int],
    tensors: list[int],
    num_programs: int,
) -> Iterator[PagedRows]:
    """Each tensor's rows with its pages, where it holds any. NOTE: reads held."""
    arena = Arena(PoolLayout(*layout), *tiers)
    for memory, one in zip(memories, decode_tensors(tensors), strict=True):
        num_pages, num_rows, _ = held[one.slot].tolist()
        if num_pages:
            ids = table[one.table_start : one.table_start + num_pages]
            yield PagedRows(memory, one.spec, arena, ids, num_rows * one.spec.row_bytes)
