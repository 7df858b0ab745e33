"""How a tensor's rows lie in its pages, as pairs of views that torch copies between on the CPU. No allocator here.

A tensor's live rows, taken without gaps, are cut into pages. Whole pages of one tier move in a single indexed copy of
the widest words that addresses allow (torch moves 16-byte elements at the rate of a plain copy, and bytes not at all
so); a last page that is partly filled, and rows with gaps that straddle pages, move piece by piece.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Bytes and dtype, widest first. Elements are only moved: any bits survive.
WORDS = ((16, torch.complex128), (8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def count_device_pages_sync(ids: Tensor, num_device_pages: int) -> int:
    """How many of a tensor's page ids [pages], int64, are on the device: those come first. NOTE: reads a few."""
    return bisect_left(range(len(ids)), num_device_pages, key=lambda index: int(ids[index].item()))


class PagedRows(NamedTuple):
    """The first num_bytes bytes of a tensor's rows without their gaps, and the pages they belong to.

    memory: [at least the rows' extent], uint8, from the tensor's first byte; ids: [pages], int64, in the rows' order.
    device_pages, host_pages: the tiers, [their pages * page_bytes], uint8.
    """

    memory: Tensor
    row_bytes: int
    pitch_bytes: int
    num_bytes: int
    ids: Tensor
    page_bytes: int
    device_pages: Tensor
    host_pages: Tensor

    def whole_pages_sync(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(a tier's pages [P, ...], indices [n], int64, rows [n, ...]): rows n and the pages of these indices match.

        Both sides have the same dtype, any of WORDS. Nothing where pieces_sync does it all. NOTE: reads ids.
        """
        num_whole = self._num_whole_pages()
        if not num_whole:
            return
        ids = self.ids[:num_whole]
        num_device_pages = self.device_pages.numel() // self.page_bytes
        on_device = count_device_pages_sync(ids, num_device_pages) if self.host_pages.numel() else num_whole
        if on_device:
            yield self._matched(self.device_pages, ids[:on_device], first_page=0)
        if on_device < num_whole:
            # Indices of its own, eight bytes a page: the only memory that a copy takes, and only where pages spilled.
            indices = ids[on_device:] - num_device_pages
            yield self._matched(self.host_pages, indices, first_page=on_device)

    def pieces_sync(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(part of a page, part of the rows), each [n] or [n, row_bytes], uint8, of what whole_pages_sync leaves.

        NOTE: reads ids.
        """
        first = self._num_whole_pages()
        for index, page_id in enumerate(self.ids[first:].tolist(), first):
            start = index * self.page_bytes
            stop = min(start + self.page_bytes, self.num_bytes)
            tier, place = self.device_pages, page_id * self.page_bytes
            if place >= tier.numel():
                tier, place = self.host_pages, place - tier.numel()
            for rows in self._row_pieces(start, stop):
                yield tier[place : place + rows.numel()].view(rows.shape), rows
                place += rows.numel()

    @property
    def _dense(self) -> bool:
        return self.pitch_bytes == self.row_bytes

    def _num_whole_pages(self) -> int:
        """Pages that whole_pages_sync takes: full ones that one view describes."""
        describable = self._dense or self.page_bytes % self.row_bytes == 0
        return self.num_bytes // self.page_bytes if describable else 0

    def _matched(self, tier: Tensor, indices: Tensor, *, first_page: int) -> tuple[Tensor, Tensor, Tensor]:
        """A tier's pages and the rows of as many pages as indices from first_page on, as words."""
        # Without gaps a page is one row.
        row_bytes, pitch_bytes = (self.page_bytes,) * 2 if self._dense else (self.row_bytes, self.pitch_bytes)
        width, dtype = self._widest_word(tier, sizes=(row_bytes, pitch_bytes))
        row, pitch, num_rows = row_bytes // width, pitch_bytes // width, self.page_bytes // row_bytes
        usable = self.memory.numel() // width * width
        words = self.memory[:usable].view(dtype)
        start = words.storage_offset() + first_page * num_rows * pitch
        rows = words.as_strided((indices.numel(), num_rows, row), (num_rows * pitch, pitch, 1), start)
        return tier.view(dtype).view(-1, num_rows, row), indices, rows

    def _widest_word(self, tier: Tensor, *, sizes: tuple[int, int]) -> tuple[int, torch.dtype]:
        """The widest word whose size divides all these sizes and addresses."""
        numbers = [*sizes, self.memory.data_ptr(), self.memory.storage_offset(), tier.data_ptr(), tier.storage_offset()]
        return next(word for word in WORDS if not any(number % word[0] for number in numbers))

    def _row_pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        """Bytes start to stop of the rows as views [bytes] and [rows, row_bytes], uint8, in order."""
        if self._dense:
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
