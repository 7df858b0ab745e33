"""The four operators of a page pool, `paged_stash::plan`, `stash`, `restore` and `release`, with their CPU versions.

The GPU launchers are in triton_kernels.py, the memory that the operators work on in page_pool.py.

[Note: operands] A pool owns these tensors for its lifetime. Operators change them in place and return nothing. A tier
is a kind of memory: 0 is the device's, 1 is pinned host memory (plain memory for a pool on the CPU). Page i starts at
byte i * page_bytes of device_pages [D * page_bytes] if i < D, else at byte (i - D) * page_bytes of host_pages
[Hn * page_bytes], both uint8.

    heads, tails  [2], int64                   pages allocated and released since the reset, by tier; free = tail - head
    ring          [D + Hn], int32              free page ids in order, the device ring followed by the host ring; plan
                                               may reorder the free ids
    table         [entries], int64             page ids that tensors hold, in the dtype that torch indexes with
    held          [slots, 4], int64            one row per tensor; columns as in Held
    counters      [len(Counter)], int64
    places        [entries], int64             parallel to `table`: where kernels that compute in pages find each page,
                                               a position in the arena of device pages and scratch
    num_rows      [1], int64                   live tokens of the group
    reserve       [3], int64                   by priority: pages to leave free after allocating a tensor's pages
    layout        PoolLayout.numbers
    tensors       encode_tensors(), in order of priority, at most MAX_TENSORS
    scratch       by tensor: the position of its scratch in the arena, -1 for a tensor that is not computed in pages
    num_programs  upper limit of a GPU kernel's grid, 0 for the default; ignored on the CPU

[Note: cost of a call] The CPU versions allocate nothing in the steady state except indices of host pages. Most of their
time is call overhead of torch, because all copies of a group may take as little as a millisecond. Page ids and counts
are therefore read and written through numpy, which shares their memory at a tenth of the overhead.

[Note: scratch] A tensor that kernels compute in pages may receive none, or pages on the host. Its missing pages are
then those of a scratch, which has space for all of its rows, so that kernels do not branch. What must reach the host is
copied from there.

[Note: runs of pages] A tensor's live rows, without their gaps, are split into pages. Pages that are adjacent in memory
form a run. For a tensor that is computed in pages plan prefers free pages that form one, because the CPU computes there
without copies, even if pages with lower ids are free. A few runs are copied one by one, at the rate of a plain copy.
After many groups have used a ring, its free pages are scattered. The full pages of a tier then move in one indexed
copy, in the widest words that sizes and addresses allow: torch moves elements of 16 bytes at nearly the rate of a plain
copy, but single bytes far more slowly.
"""

import importlib.util
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.core.operator_library import Register, operator
from megatron.core.transformer.moe.paged_stash.page_layout import (
    EncodedTensor,
    Held,
    PageAccount,
    Priority,
    split_tensors,
)

HAS_TRITON = importlib.util.find_spec("triton") is not None
# Launchers, which have the operators' names.
_LAUNCHERS: tuple[Callable[..., Any], ...] = ()
if HAS_TRITON:
    from megatron.core.transformer.moe.paged_stash import triton_kernels

    _LAUNCHERS = (triton_kernels.plan, triton_kernels.stash, triton_kernels.restore, triton_kernels.release)

# The operators of this file, for callers.
ops = torch.ops.paged_stash

# Bytes and dtype, widest first. Elements are copied, never computed with, so any bit pattern is preserved.
WORDS = ((16, torch.complex128), (8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
# Size in bytes. Longer runs are copied one by one, because an indexed copy is a tenth slower.
LONG_RUN = 1024 * 1024
FEW_RUNS = 4  # up to this number, copying run by run is cheaper than an indexed copy, even for short runs


def _operator(arguments: str) -> Register:
    return operator("paged_stash", f"({arguments}) -> ()", cuda=_LAUNCHERS)


@_operator(
    "Tensor num_rows, Tensor reserve, *, Tensor(a!) heads, Tensor tails, Tensor(e!) ring, Tensor(b!) table,"
    " Tensor(c!) held, Tensor(d!) counters, Tensor(f!)? places=None, int[] layout, int[] tensors, int[] scratch=[]"
)
def plan(
    num_rows: Tensor,
    reserve: Tensor,
    *,
    heads: Tensor,
    tails: Tensor,
    ring: Tensor,
    table: Tensor,
    held: Tensor,
    counters: Tensor,
    places: Tensor | None = None,
    layout: list[int],
    tensors: list[int],
    scratch: Sequence[int] = (),
) -> None:
    """Allocates pages for a group's tensors, the most important first, and marks the others as dropped.

    num_rows: [1], int64; reserve: [3], int64; places: [entries], int64, or None. See [Note: operands]. See [Note:
    rules] in page_layout.py.
    """
    encoded, (page_bytes, device_pages, host_pages) = split_tensors(tensors), layout
    records, tally, ends = _read_records(held, encoded), _read(counters), _read(heads)
    end, reserved, last = ends.values, reserve.tolist(), tails.tolist()
    table_ids, free_ids = table.numpy(), ring.numpy()
    for ids, head, tail in zip((free_ids[:device_pages], free_ids[device_pages:]), end, last):
        _sort_free(ids, head, tail)
    free = [last[0] - end[0], last[1] - end[1]]
    account = PageAccount(page_bytes, (device_pages, host_pages), free, tally.values)
    (count,) = num_rows.tolist()
    live = account.checked_count(count, min(one.max_rows * one.tokens_per_row for one in encoded))
    for index, one in enumerate(encoded):
        rows, pages, on_host, is_dropped = account.allocate(
            live,
            row_bytes=one.row_bytes,
            tokens_per_row=one.tokens_per_row,
            priority=Priority(one.priority),
            reserve=reserved[one.priority],
        )
        records.write(one.slot, [pages, rows, int(is_dropped), on_host])
        ids, on_device = table_ids[one.table_start : one.table_start + pages], pages - on_host
        is_computed = places is not None and scratch[index] >= 0
        if is_computed:
            _bring_run_forward(free_ids[:device_pages], end[0], last[0], size=on_device)
        for into, freed in _ring_parts(ids[:on_device], free_ids[:device_pages], position=end[0]):
            into[:] = freed
        for into, freed in _ring_parts(ids[on_device:], free_ids[device_pages:], position=end[1]):
            into[:] = freed
        end[0] += on_device
        end[1] += on_host
        if places is not None and is_computed:
            # All entries, so that even rows that were not counted are written to the scratch.
            entries = -(-one.max_rows * one.row_bytes // page_bytes)
            found = places.numpy()[one.table_start : one.table_start + entries]
            found[:] = range(scratch[index], scratch[index] + entries)
            found[:on_device] = ids[:on_device]
    account.end_plan()
    for numbers in (records, tally, ends):
        numbers.store()


@_operator(
    "Tensor[] sources, Tensor(a!) device_pages, *, Tensor(b!) host_pages, Tensor table, Tensor held,"
    " int[] layout, int[] tensors, int num_programs, bool host_only=False"
)
def stash(
    sources: list[Tensor],
    device_pages: Tensor,
    *,
    host_pages: Tensor,
    table: Tensor,
    held: Tensor,
    layout: list[int],
    tensors: list[int],
    num_programs: int,
    host_only: bool = False,
) -> None:
    """Copies live rows into pages. sources: [bytes] each, uint8. host_only: only into pages on the host, of rows
    without gaps. See [Note: operands].
    """
    tiers, encoded = (device_pages, host_pages), split_tensors(tensors)
    moves = _moves(sources, encoded, table=table, held=held, page_bytes=layout[0], tiers=tiers, host_only=host_only)
    for pages, indices, rows in moves.whole_pages:
        # Same as index_copy_, but a tenth faster.
        pages.numpy()[indices.numpy()] = rows.numpy()
    if moves.pages:
        torch._foreach_copy_(moves.pages, moves.rows)


@_operator(
    "Tensor device_pages, Tensor host_pages, *, Tensor table, Tensor held, Tensor(a!)[] targets,"
    " int[] layout, int[] tensors, int num_programs, bool host_only=False"
)
def restore(
    device_pages: Tensor,
    host_pages: Tensor,
    *,
    table: Tensor,
    held: Tensor,
    targets: list[Tensor],
    layout: list[int],
    tensors: list[int],
    num_programs: int,
    host_only: bool = False,
) -> None:
    """Copies live rows out of pages. targets: [bytes] each, uint8. host_only: as in stash. See [Note: operands]."""
    tiers, encoded = (device_pages, host_pages), split_tensors(tensors)
    moves = _moves(targets, encoded, table=table, held=held, page_bytes=layout[0], tiers=tiers, host_only=host_only)
    for pages, indices, rows in moves.whole_pages:
        torch.index_select(pages, 0, indices, out=rows)
    if moves.pages:
        torch._foreach_copy_(moves.rows, moves.pages)


@_operator("Tensor(a!) ring, Tensor(b!) tails, *, Tensor table, Tensor(c!) held, int[] layout, int[] tensors")
def release(ring: Tensor, tails: Tensor, *, table: Tensor, held: Tensor, layout: list[int], tensors: list[int]) -> None:
    """Returns a group's pages to the rings. ring: [pages], int32; tails: [2], int64. See [Note: operands]."""
    encoded, device_pages = split_tensors(tensors), layout[1]
    records, ends = _read_records(held, encoded), _read(tails)
    table_ids, free_ids = table.numpy(), ring.numpy()
    for one in encoded:
        num_pages, rows, dropped, on_host = records.read(one.slot)
        ids, on_device = table_ids[one.table_start : one.table_start + num_pages], num_pages - on_host
        for given, into in _ring_parts(ids[:on_device], free_ids[:device_pages], position=ends.values[0]):
            into[:] = given
        for given, into in _ring_parts(ids[on_device:], free_ids[device_pages:], position=ends.values[1]):
            into[:] = given
        ends.values[0] += on_device
        ends.values[1] += num_pages - on_device
        records.write(one.slot, [0, rows, dropped, 0])
    records.store()
    ends.store()


def _sort_free(ids: np.ndarray, head: int, tail: int) -> None:
    """Sorts the free page ids of one tier's ring, [n], int32, in place; see [Note: lowest pages] in page_pool.py."""
    free = tail - head
    if not free:
        return
    start = head % ids.size
    beyond = start + free - ids.size  # the entries beyond the ring's end wrap around to its start
    # Stable sort is fast on the few sorted runs that releases leave.
    if beyond <= 0:
        ids[start : start + free].sort(kind="stable")
    else:
        ordered = np.concatenate([ids[start:], ids[:beyond]])
        ordered.sort(kind="stable")
        ids[start:], ids[:beyond] = np.split(ordered, [ids.size - start])


def _bring_run_forward(ids: np.ndarray, head: int, tail: int, *, size: int) -> None:
    """Moves the first `size` adjacent pages among the free ones to the head of a tier's ring; others keep their order.

    ids: the ring, [n], int32, whose free part is sorted. Does nothing if no pages are adjacent.
    """
    start, free = head % max(1, ids.size), tail - head
    if size < 2 or start + size <= ids.size and ids[start + size - 1] - ids[start] == size - 1:
        return
    places = np.arange(start, start + free) % ids.size
    ordered = ids[places]
    found = np.flatnonzero(ordered[size - 1 :] - ordered[: free - size + 1] == size - 1)
    if found.size:
        first = found[0]
        ids[places] = np.concatenate([ordered[first : first + size], ordered[:first], ordered[first + size :]])


@dataclass
class _Numbers:
    """The integers of a tensor [n], int64, as a list that `store` writes back."""

    tensor: Tensor
    values: list[int]

    def store(self) -> None:
        # One numpy call. torch would require two calls per number.
        self.tensor.numpy()[:] = self.values


@dataclass
class _Records(_Numbers):
    """Consecutive rows of `held`, starting at first_slot."""

    first_slot: int = 0

    def read(self, slot: int) -> list[int]:
        """Returns the record of `slot`: one integer per column of Held."""
        place = (slot - self.first_slot) * len(Held)
        return self.values[place : place + len(Held)]

    def write(self, slot: int, record: list[int]) -> None:
        place = (slot - self.first_slot) * len(Held)
        self.values[place : place + len(Held)] = record


def _read(tensor: Tensor) -> _Numbers:
    return _Numbers(tensor, tensor.tolist())


def _read_records(held: Tensor, encoded: list[EncodedTensor]) -> _Records:
    """Reads a slice of `held` that contains the records of `encoded`. It is short: a group's slots are consecutive."""
    slots = [one.slot for one in encoded]
    around = held[min(slots) : max(slots) + 1].view(-1)
    return _Records(around, around.tolist(), min(slots))


def _ring_parts(ids: np.ndarray, ring: np.ndarray, *, position: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs `ids` [n] with n entries of a ring [m]. Yields one pair of views, or two if they cross the ring's end.

    position: index of the first entry. Heads and tails grow without bound, so it is taken modulo the ring's size.
    """
    count, size = ids.size, ring.size
    if count:
        start = position % size
        if start + count <= size:
            yield ids, ring[start : start + count]
        else:
            yield ids[: size - start], ring[start:]
            yield ids[size - start :], ring[: start + count - size]


class WholePages(NamedTuple):
    """Full pages of one tier, and their rows: rows[i] belongs in pages[indices[i]].

    pages: [P, ...], all pages of the tier; indices: [n], int64; rows: [n, ...]. Pages and rows have one dtype, any of
    WORDS.
    """

    pages: Tensor
    indices: Tensor
    rows: Tensor


class Moves(NamedTuple):
    """List of copies between pages and rows, which can run in either direction.

    whole_pages: indexed copies. pages[i], rows[i]: pairs of views of one shape, uint8.
    """

    whole_pages: list[WholePages]
    pages: list[Tensor]
    rows: list[Tensor]


class Run(NamedTuple):
    """Pages first .. stop - 1 of a tensor, adjacent in memory, starting at page `page_id`."""

    first: int
    stop: int
    page_id: int


class StoredBytes(NamedTuple):
    """The first num_bytes bytes (at least one) of a tensor's rows without gaps, and the pages that store them.

    memory: [at least the rows' extent], uint8, starting at the tensor's first byte; ids: [pages], int64, in the order
    of the rows; page_ids: the same numbers as a list; device_pages, host_pages: the tiers, [pages * page_bytes], uint8.
    """

    memory: Tensor
    row_bytes: int
    pitch_bytes: int
    num_bytes: int
    ids: Tensor
    page_ids: list[int]
    page_bytes: int
    device_pages: Tensor
    host_pages: Tensor

    def add_to(self, moves: Moves) -> None:
        """Appends the copies of all pages to `moves`, as runs or as indexed copies, whichever is cheaper."""
        num_device_pages = self.device_pages.numel() // self.page_bytes
        num_pages, num_whole = len(self.page_ids), self._num_whole_pages()
        most = max(FEW_RUNS, self.num_bytes // LONG_RUN) if num_whole else num_pages
        runs = runs_of(self.page_ids, num_device_pages, most=most)
        if runs is None:
            moves.whole_pages.extend(self._whole_pages(num_whole, num_device_pages))
            runs = [Run(num_whole, num_pages, self.page_ids[-1])] if num_whole < num_pages else []
        for run in runs:
            self._add_run(run, moves)

    def _whole_pages(self, num_whole: int, num_device_pages: int) -> Iterator[WholePages]:
        """Yields the indexed copies of the first num_whole pages, one per tier."""
        on_device = bisect_left(self.page_ids, num_device_pages, hi=num_whole)  # device pages precede host pages
        if on_device:
            yield self._matched(self.device_pages, self.ids[:on_device], first_page=0)
        if on_device < num_whole:
            # Eight bytes per spilled page, the only memory that a copy allocates.
            indices = self.ids[on_device:num_whole] - num_device_pages
            yield self._matched(self.host_pages, indices, first_page=on_device)

    def _add_run(self, run: Run, moves: Moves) -> None:
        """Appends the copies of a run, in as few pieces as views can describe."""
        stop = min(run.stop * self.page_bytes, self.num_bytes)
        tier, place = self.device_pages, run.page_id * self.page_bytes
        if place >= tier.numel():
            tier, place = self.host_pages, place - tier.numel()
        for rows in self._row_pieces(run.first * self.page_bytes, stop):
            pages = tier[place : place + rows.numel()]
            moves.pages.append(pages if rows.dim() == 1 else pages.view(rows.shape))
            moves.rows.append(rows)
            place += rows.numel()

    @property
    def _is_dense(self) -> bool:
        return self.pitch_bytes == self.row_bytes

    def _num_whole_pages(self) -> int:
        """Returns the number of full pages, which one indexed copy moves.

        Returns 0 if rows have gaps and straddle pages, because no strided view describes them.
        """
        is_describable = self._is_dense or self.page_bytes % self.row_bytes == 0
        return self.num_bytes // self.page_bytes if is_describable else 0

    def _matched(self, tier: Tensor, indices: Tensor, *, first_page: int) -> WholePages:
        """Pairs a tier's pages with their rows. indices: indices of the tensor's pages, starting at first_page."""
        # Without gaps a page is one row.
        row_bytes, pitch_bytes = (self.page_bytes,) * 2 if self._is_dense else (self.row_bytes, self.pitch_bytes)
        width, dtype = self._widest_word(tier, sizes=(row_bytes, pitch_bytes))
        row, pitch, num_rows = row_bytes // width, pitch_bytes // width, self.page_bytes // row_bytes
        usable = self.memory.numel() // width * width
        words = self.memory[:usable].view(dtype)
        start = words.storage_offset() + first_page * num_rows * pitch
        rows = words.as_strided((indices.numel(), num_rows, row), (num_rows * pitch, pitch, 1), start)
        return WholePages(tier.view(dtype).view(-1, num_rows, row), indices, rows)

    def _widest_word(self, tier: Tensor, *, sizes: tuple[int, int]) -> tuple[int, torch.dtype]:
        """Returns the widest word whose size divides `sizes` and the addresses of the rows and of the tier."""
        numbers = [*sizes, self.memory.data_ptr(), self.memory.storage_offset(), tier.data_ptr(), tier.storage_offset()]
        return next(word for word in WORDS if not any(number % word[0] for number in numbers))

    def _row_pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        """Yields bytes start .. stop - 1 of the rows in order, as views [bytes] or [rows, row_bytes], uint8."""
        if self._is_dense:
            yield self.memory[start:stop]
            return
        row, skipped = divmod(start, self.row_bytes)
        if skipped:
            first = min(self.row_bytes - skipped, stop - start)
            yield self.memory[row * self.pitch_bytes + skipped :][:first]
            row, start = row + 1, start + first
        num_rows, rest = divmod(stop - start, self.row_bytes)
        if num_rows > 0:
            begin = self.memory.storage_offset() + row * self.pitch_bytes
            yield self.memory.as_strided((num_rows, self.row_bytes), (self.pitch_bytes, 1), begin)
        if rest > 0:
            yield self.memory[(row + num_rows) * self.pitch_bytes :][:rest]


def runs_of(page_ids: list[int], num_device_pages: int, *, most: int) -> list[Run] | None:
    """Returns the runs of these pages in order, each within one tier, or None if there are more than `most`."""
    starts = [0]
    for place, (one, following) in enumerate(zip(page_ids, page_ids[1:]), 1):
        if following != one + 1 or following == num_device_pages:
            starts.append(place)
            if len(starts) > most:
                break
    if len(starts) > most:
        return None
    return [Run(first, stop, page_ids[first]) for first, stop in zip(starts, [*starts[1:], len(page_ids)])]


def _moves(
    memories: list[Tensor],
    encoded: list[EncodedTensor],
    *,
    table: Tensor,
    held: Tensor,
    page_bytes: int,
    tiers: tuple[Tensor, Tensor],
    host_only: bool,
) -> Moves:
    """Lists all copies of a group, or those of its pages on the host, before any of them runs.

    Each copy evicts the interpreter from the CPU caches, so Python code between two copies takes five times as long.
    """
    records, moves = _read_records(held, encoded), Moves([], [], [])
    for memory, one in zip(memories, encoded, strict=True):
        num_pages, num_rows, _, on_host = records.read(one.slot)
        first = num_pages - on_host if host_only else 0
        if first < num_pages:
            ids = table[one.table_start + first : one.table_start + num_pages]
            skipped = first * page_bytes
            sizes = one.row_bytes, one.pitch_bytes, num_rows * one.row_bytes - skipped
            StoredBytes(memory[skipped:], *sizes, ids, ids.tolist(), page_bytes, *tiers).add_to(moves)
    return moves
