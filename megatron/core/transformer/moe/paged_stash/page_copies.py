"""How a tensor's rows lie in its pages: pairs of views that torch copies between on the CPU. No page is allocated here.

A tensor's live rows, without their gaps, are cut into pages. Pages that follow each other in memory form a run. A few
runs are copied one by one, at the rate of a plain copy. A ring that many groups have gone through gives out scattered
pages instead: then the full pages of a tier move in one indexed copy, in the widest words that sizes and addresses
allow (torch moves elements of 16 bytes at nearly the rate of a plain copy, but single bytes far more slowly).
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Bytes and dtype, widest first. Elements are moved, never computed with: any bits survive.
WORDS = ((16, torch.complex128), (8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
# Bytes. If runs are longer on average, a copy of each costs less than one indexed copy, whose rate is a tenth lower.
LONG_RUN = 1024 * 1024
FEW_RUNS = 4  # so many cost less than an indexed copy, however short they are


class Run(NamedTuple):
    """Pages first .. stop - 1 of a tensor, which follow each other in memory from page `page_id` on."""

    first: int
    stop: int
    page_id: int


class WholePages(NamedTuple):
    """Full pages of one tier and the rows that belong in them: rows[i] in pages[indices[i]].

    pages: [P, ...], all of the tier; indices: [n], int64; rows: [n, ...]; pages and rows of one dtype, any of WORDS.
    """

    pages: Tensor
    indices: Tensor
    rows: Tensor


class Moves(NamedTuple):
    """Copies between pages and rows, to be made in either direction: the indexed ones, and pairs of views of one shape,
    pages[i] and rows[i], uint8.
    """

    whole_pages: list[WholePages]
    pages: list[Tensor]
    rows: list[Tensor]


def runs_of(page_ids: list[int], num_device_pages: int, *, most: int) -> list[Run] | None:
    """The runs that these pages form, in their order, each within one tier; None if there are more than `most`."""
    starts = [0]
    for place, (one, following) in enumerate(zip(page_ids, page_ids[1:]), 1):
        if following != one + 1 or following == num_device_pages:
            starts.append(place)
            if len(starts) > most:
                break
    if len(starts) > most:
        return None
    return [Run(first, stop, page_ids[first]) for first, stop in zip(starts, [*starts[1:], len(page_ids)])]


class PagedRows(NamedTuple):
    """The first num_bytes bytes, at least one, of a tensor's rows without their gaps, and the pages they belong in.

    memory: [at least the rows' extent], uint8, from the tensor's first byte on; ids: [pages], int64, in the order of
    the rows; page_ids: the same numbers as a list; device_pages, host_pages: the tiers, [pages * page_bytes], uint8.
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
        """Adds the copies of all pages, made in the cheaper way."""
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
        """The first num_whole pages, by tier."""
        on_device = bisect_left(self.page_ids, num_device_pages, hi=num_whole)  # pages of the device come first
        if on_device:
            yield self._matched(self.device_pages, self.ids[:on_device], first_page=0)
        if on_device < num_whole:
            # New indices, eight bytes a page: the only memory that a copy allocates, and only where pages spilled.
            indices = self.ids[on_device:num_whole] - num_device_pages
            yield self._matched(self.host_pages, indices, first_page=on_device)

    def _add_run(self, run: Run, moves: Moves) -> None:
        """Adds the copies of a run, in as few pieces as views can describe."""
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
        """How many pages an indexed copy can move: full ones, if one view describes the rows in them."""
        is_describable = self._is_dense or self.page_bytes % self.row_bytes == 0
        return self.num_bytes // self.page_bytes if is_describable else 0

    def _matched(self, tier: Tensor, indices: Tensor, *, first_page: int) -> WholePages:
        """The tier's pages and the rows in them; indices: of the tensor's pages from first_page on."""
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
        """The widest word whose size divides all these sizes and addresses."""
        numbers = [*sizes, self.memory.data_ptr(), self.memory.storage_offset(), tier.data_ptr(), tier.storage_offset()]
        return next(word for word in WORDS if not any(number % word[0] for number in numbers))

    def _row_pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        """Bytes start .. stop - 1 of the rows, in order, as views [bytes] and [rows, row_bytes], uint8."""
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
