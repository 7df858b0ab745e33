"""The operators of a page pool on the CPU, as kernels.py describes them: Python's numbers and torch's copies.

All functions read their tensors, which lie on the CPU. In the steady state nothing is allocated except indices of pages
on the host tier. What costs time is the number of calls into torch, as all copies of a group may take as little as a
millisecond: page ids and counts are read and written through numpy, which shares their memory and costs a tenth.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.core.transformer.moe.paged_stash.page_copies import Moves, PagedRows
from megatron.core.transformer.moe.paged_stash.page_layout import (
    COUNTER_OF_DROPPED,
    Counter,
    EncodedTensor,
    Held,
    Priority,
    split_tensors,
)


def plan_sync(
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
    """paged_stash::plan. num_rows: [1], int64; reserve: [3], int64; others as in kernels.py. NOTE: reads them."""
    encoded, (page_bytes, device_pages, host_pages) = split_tensors(tensors), layout
    records, tally, ends = _read_records_sync(held, encoded), _read_sync(counters), _read_sync(heads)
    live = _checked_count_sync(num_rows, encoded, tally=tally.values)
    end, kept, last = ends.values, reserve.tolist(), tails.tolist()
    table_ids, free_ids = table.numpy(), ring.numpy()
    for one in encoded:
        rows = -(-live // one.tokens_per_row)
        need = -(-rows * one.row_bytes // page_bytes)
        if need and need + kept[one.priority] > sum(last) - sum(end):
            records.write(one.slot, [0, rows, 1])
            tally.values[COUNTER_OF_DROPPED[Priority(one.priority)]] += 1
            continue
        records.write(one.slot, [need, rows, 0])
        on_device = min(need, last[0] - end[0])
        ids = table_ids[one.table_start : one.table_start + need]
        for into, freed in _ring_parts(ids[:on_device], free_ids[:device_pages], position=end[0]):
            into[:] = freed
        for into, freed in _ring_parts(ids[on_device:], free_ids[device_pages:], position=end[1]):
            into[:] = freed
        end[0] += on_device
        end[1] += need - on_device
        tally.values[Counter.PLANNED_PAGES] += need
        tally.values[Counter.SPILLED_PAGES] += need - on_device
        tally.values[Counter.LIVE_BYTES] += rows * one.row_bytes
    for counter, pages in ((Counter.HIGH_WATER_DEVICE, device_pages), (Counter.HIGH_WATER_HOST, host_pages)):
        tier = counter - Counter.HIGH_WATER_DEVICE
        tally.values[counter] = max(tally.values[counter], pages - (last[tier] - end[tier]))
    for numbers in (records, tally, ends):
        numbers.store()


def release_sync(
    ring: Tensor, tails: Tensor, *, table: Tensor, held: Tensor, layout: list[int], tensors: list[int]
) -> None:
    """paged_stash::release. ring: [pages], int32; tails: [2], int64; others as in kernels.py. NOTE: reads them."""
    encoded, (_, device_pages, host_pages) = split_tensors(tensors), layout
    records, ends = _read_records_sync(held, encoded), _read_sync(tails)
    table_ids, free_ids = table.numpy(), ring.numpy()
    for one in encoded:
        num_pages, rows, dropped = records.read(one.slot)
        ids = table_ids[one.table_start : one.table_start + num_pages]
        on_device = int(np.searchsorted(ids, device_pages)) if host_pages else num_pages  # device pages come first
        for given, into in _ring_parts(ids[:on_device], free_ids[:device_pages], position=ends.values[0]):
            into[:] = given
        for given, into in _ring_parts(ids[on_device:], free_ids[device_pages:], position=ends.values[1]):
            into[:] = given
        ends.values[0] += on_device
        ends.values[1] += num_pages - on_device
        records.write(one.slot, [0, rows, dropped])
    records.store()
    ends.store()


def stash_sync(
    sources: list[Tensor],
    device_pages: Tensor,
    *,
    host_pages: Tensor,
    table: Tensor,
    held: Tensor,
    layout: list[int],
    tensors: list[int],
    num_programs: int,
) -> None:
    """paged_stash::stash. sources: [bytes] each, uint8; others as in kernels.py. NOTE: reads records."""
    tiers = device_pages, host_pages
    moves = _moves_sync(sources, split_tensors(tensors), table=table, held=held, page_bytes=layout[0], tiers=tiers)
    for pages, indices, rows in moves.whole_pages:
        # As index_copy_, but a tenth faster.
        pages.numpy()[indices.numpy()] = rows.numpy()
    if moves.pages:
        torch._foreach_copy_(moves.pages, moves.rows)


def restore_sync(
    device_pages: Tensor,
    host_pages: Tensor,
    *,
    table: Tensor,
    held: Tensor,
    targets: list[Tensor],
    layout: list[int],
    tensors: list[int],
    num_programs: int,
) -> None:
    """paged_stash::restore. targets: [bytes] each, uint8; others as in kernels.py. NOTE: reads records."""
    tiers = device_pages, host_pages
    moves = _moves_sync(targets, split_tensors(tensors), table=table, held=held, page_bytes=layout[0], tiers=tiers)
    for pages, indices, rows in moves.whole_pages:
        torch.index_select(pages, 0, indices, out=rows)
    if moves.pages:
        torch._foreach_copy_(moves.rows, moves.pages)


@dataclass
class _Numbers:
    """The integers of a tensor [n], int64, as a list to work on, which `store` writes back."""

    tensor: Tensor
    values: list[int]

    def store(self) -> None:
        # Through numpy, which shares the memory: one call, where torch takes two for each number.
        self.tensor.numpy()[:] = self.values


@dataclass
class _Records(_Numbers):
    """Consecutive rows of `held`, from first_slot on."""

    first_slot: int = 0

    def read(self, slot: int) -> list[int]:
        """In the order of Held."""
        place = (slot - self.first_slot) * len(Held)
        return self.values[place : place + len(Held)]

    def write(self, slot: int, record: list[int]) -> None:
        place = (slot - self.first_slot) * len(Held)
        self.values[place : place + len(Held)] = record


def _read_sync(tensor: Tensor) -> _Numbers:
    return _Numbers(tensor, tensor.tolist())


def _read_records_sync(held: Tensor, encoded: list[EncodedTensor]) -> _Records:
    """The records of these tensors and of what lies between them; a group's slots follow each other."""
    slots = [one.slot for one in encoded]
    around = held[min(slots) : max(slots) + 1].view(-1)
    return _Records(around, around.tolist(), min(slots))


def _checked_count_sync(num_rows: Tensor, encoded: list[EncodedTensor], *, tally: list[int]) -> int:
    """num_rows, [1], int64, limited to what all tensors have room for; a value out of range is counted in `tally`."""
    limit = min(one.max_rows * one.tokens_per_row for one in encoded)
    (count,) = num_rows.tolist()
    if not 0 <= count <= limit:
        tally[Counter.BAD_COUNT] += 1
        tally[Counter.VOID] += 1
    return min(max(count, 0), limit)


def _ring_parts(ids: np.ndarray, ring: np.ndarray, *, position: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`ids` [n] and as many entries of a ring, [m], in pairs of views: two pairs where the ring's end lies between.

    position: of the first entry, as heads and tails count: without end, so modulo the ring's size.
    """
    count, size = ids.size, ring.size
    if count:
        start = position % size
        if start + count <= size:
            yield ids, ring[start : start + count]
        else:
            yield ids[: size - start], ring[start:]
            yield ids[size - start :], ring[: start + count - size]


def _moves_sync(
    memories: list[Tensor],
    encoded: list[EncodedTensor],
    *,
    table: Tensor,
    held: Tensor,
    page_bytes: int,
    tiers: tuple[Tensor, Tensor],
) -> Moves:
    """All copies of a group, listed before the first one is made: a copy drives the interpreter out of the caches, so
    that Python code between two copies takes five times as long. NOTE: reads records and page ids.
    """
    records, moves = _read_records_sync(held, encoded), Moves([], [], [])
    for memory, one in zip(memories, encoded, strict=True):
        num_pages, num_rows, _ = records.read(one.slot)
        if num_pages:
            ids = table[one.table_start : one.table_start + num_pages]
            num_bytes = num_rows * one.row_bytes
            sizes = one.row_bytes, one.pitch_bytes, num_bytes
            PagedRows(memory, *sizes, ids, ids.tolist(), page_bytes, *tiers).add_to(moves)
    return moves
