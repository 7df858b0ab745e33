"""How a tensor's rows lie in its pages, as pairs of views that torch copies between on the CPU. No allocator here.

A tensor's live rows, taken without gaps, are cut into pages. Whole pages of one tier move in a single indexed copy of
the widest words that addresses allow (torch moves 16-byte elements at the rate of a plain copy, and bytes not at all
so); a last page that is partly filled, and rows with gaps that straddle pages, move piece by piece.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.transformer.moe.paged_stash.page_layout import PoolLayout, TensorSpec

# Bytes and dtype, widest first. Elements are only moved: any bits survive.
WORDS = ((16, torch.complex128), (8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


@dataclass(frozen=True)
class Arena:
    """The memory of both tiers: [D * page_bytes] and [Hn * page_bytes], uint8, on the CPU."""

    layout: PoolLayout
    device_pages: Tensor
    host_pages: Tensor

    def page_sync(self, page_id: Tensor) -> Tensor:
        """One page [page_bytes], uint8; page_id: scalar, int64. NOTE: reads page_id."""
        number = page_id.item() * self.layout.page_bytes
        if number < len(self.device_pages):
            return self.device_pages[number : number + self.layout.page_bytes]
        number -= len(self.device_pages)
        return self.host_pages[number : number + self.layout.page_bytes]


def count_device_pages_sync(ids: Tensor, layout: PoolLayout) -> int:
    """How many of a tensor's page ids [pages], int64, are device pages: those come first. NOTE: reads a few ids."""
    if layout.host_pages == 0:
        return len(ids)
    return bisect_left(range(len(ids)), layout.device_pages, key=lambda index: int(ids[index].item()))


@dataclass(frozen=True)
class PagedRows:
    """The first num_bytes bytes of a tensor's rows and the pages they belong to.

    memory: [at least the rows' extent], uint8, from the tensor's first byte; ids: [pages], int64, in the rows' order.
    """

    memory: Tensor
    spec: TensorSpec
    arena: Arena
    ids: Tensor
    num_bytes: int

    def whole_pages_sync(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(a tier's pages [P, ...], indices [n], int64, rows [n, ...]): rows n and the pages of these indices match.

        Both sides have the same dtype, any of WORDS. Nothing where pieces_sync does it all. NOTE: reads ids.
        """
        num_whole = self._num_whole_pages()
        if not num_whole:
            return
        num_on_device = count_device_pages_sync(self.ids[:num_whole], self.arena.layout)
        if num_on_device:
            yield self._matched(self.arena.device_pages, self.ids[:num_on_device], first_page=0)
        if num_on_device < num_whole:
            # Indices of its own, eight bytes a page: the only memory that a copy takes, and only where pages spilled.
            indices = self.ids[num_on_device:num_whole] - self.arena.layout.device_pages
            yield self._matched(self.arena.host_pages, indices, first_page=num_on_device)

    def pieces_sync(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(part of a page, part of the rows), each [n] or [n, row_bytes], uint8, of what whole_pages_sync leaves.

        NOTE: reads ids.
        """
        for index in range(self._num_whole_pages(), len(self.ids)):
            page = self.arena.page_sync(self.ids[index])
            start = index * len(page)
            stop = min(start + len(page), self.num_bytes)
            for rows in self._row_pieces(start, stop):
                yield page[: rows.numel()].view(rows.shape), rows
                page = page[rows.numel() :]

    @property
    def _dense(self) -> bool:
        return self.spec.pitch_bytes == self.spec.row_bytes

    def _num_whole_pages(self) -> int:
        """Pages that whole_pages_sync takes: full ones that one view describes."""
        page_bytes = self.arena.layout.page_bytes
        describable = self._dense or page_bytes % self.spec.row_bytes == 0
        return min(self.num_bytes // page_bytes, len(self.ids)) if describable else 0

    def _matched(self, tier: Tensor, indices: Tensor, *, first_page: int) -> tuple[Tensor, Tensor, Tensor]:
        """A tier's pages and the rows of len(indices) pages from first_page on, as words."""
        page_bytes = self.arena.layout.page_bytes
        row_bytes = page_bytes if self._dense else self.spec.row_bytes
        pitch_bytes = page_bytes if self._dense else self.spec.pitch_bytes
        start = first_page * (page_bytes // row_bytes) * pitch_bytes
        width, dtype = self._widest_word(tier, sizes=(row_bytes, pitch_bytes))
        num_words = len(self.memory) // width * width
        words = self.memory[:num_words].view(dtype)
        row, pitch, num_rows = row_bytes // width, pitch_bytes // width, page_bytes // row_bytes
        rows = words.as_strided(
            (len(indices), num_rows, row),
            (num_rows * pitch, pitch, 1),
            words.storage_offset() + start // width,
        )
        return tier.view(dtype).view(-1, num_rows, row), indices, rows

    def _widest_word(self, tier: Tensor, *, sizes: tuple[int, int]) -> tuple[int, torch.dtype]:
        """The widest word whose size divides all these sizes and addresses."""
        places = [self.memory.data_ptr(), self.memory.storage_offset(), tier.data_ptr(), tier.storage_offset()]
        return next(word for word in WORDS if not any(number % word[0] for number in (*places, *sizes)))

    def _row_pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        """Bytes start to stop of the rows as views [bytes] and [rows, row_bytes], uint8, in order."""
        row_bytes, pitch_bytes = self.spec.row_bytes, self.spec.pitch_bytes
        if self._dense:
            yield self.memory[start:stop]
            return
        row, skipped = divmod(start, row_bytes)
        if skipped:
            first = min(row_bytes - skipped, stop - start)
            yield self.memory[row * pitch_bytes + skipped :][:first]
            row, start = row + 1, start + first
        num_rows, rest = divmod(stop - start, row_bytes)
        if num_rows > 0:
            begin = self.memory.storage_offset() + row * pitch_bytes
            yield self.memory.as_strided((num_rows, row_bytes), (pitch_bytes, 1), begin)
        if rest > 0:
            yield self.memory[(row + num_rows) * pitch_bytes :][:rest]
