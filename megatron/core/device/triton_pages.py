"""Rows in pages, for Triton kernels and their launchers: placement of operands, and lookups of rows in page tables.

paged_rows.py describes such rows. Contains functions that kernels call, and no kernel that is launched.

[Note: lookups] PAGE is the number of rows of a page, which are whole rows without gaps, and 0 for an operand without
pages. Row r is at row table[r // PAGE] * PAGE + r % PAGE of the arena. Table entries beyond the pages of live rows are
undefined. They are never loaded, so no address is computed from them. A tile of rows is found in one of two modes:
  PAIR     for pages with at least as many rows as the tile, which then starts anywhere in one page and ends in the same
           or in the following one: two entries for each tile
  ROWWISE  for smaller pages: one entry for each row
Functions choose the mode at compile time, from PAGE and the length of the tile. A kernel can therefore not be launched
in a mode that its pages do not allow. Tiles of a few wide rows are always found in mode ROWWISE, with fewer
instructions.

[Note: lookups ahead] In the loop of a weight gradient, the addresses of a tile depend on a table entry. Triton would
load the entry in one stage of its pipeline and the tile in the next one, and a pipeline of three stages would hold two
tiles. Each iteration therefore looks up the rows of the next one.
"""
# mypy: allow-untyped-defs

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# An operand's page table and sizes: page_bytes, max_rows and width, as PagedRows.sizes. (None, ()) without pages.
Paging = tuple[Tensor | None, Sequence[int]]
NO_PAGES: Final[Paging] = (None, ())


@triton.jit
def row_starts(table, rows, is_live, row, PAGE: tl.constexpr):
    """Returns the first element of each row, int64, in mode ROWWISE. row: elements of a row; is_live: rows to find."""
    if PAGE == 0:
        starts = rows.to(tl.int64) * row
    else:
        rows = rows.to(tl.int32)
        page = tl.load(table + rows // PAGE, mask=is_live, other=0)
        starts = (page * PAGE + rows % PAGE) * row
    return starts


@triton.jit
def tile_starts(table, first, rows, end, row, PAGE: tl.constexpr):
    """Returns the first element of each row, int64. See [Note: lookups].

    rows: at least `first` and less than first + their number; rows from `end` on are not looked up.
    """
    if PAGE >= rows.shape[0]:
        page = first // PAGE
        following = (page + 1) * PAGE
        shift = tl.load(table + page, mask=first < end, other=0) * PAGE - page * PAGE
        next_shift = tl.load(table + page + 1, mask=following < end, other=0) * PAGE - following
        starts = tl.where(rows < following, shift * row, next_shift * row) + rows.to(tl.int64) * row
    else:
        starts = row_starts(table, rows, rows < end, row, PAGE)
    return starts


@triton.jit
def starts_ahead(table, first, lane, end, row, PAGE: tl.constexpr):
    """Returns the first element of rows first + lane minus lane * row, int64. See [Note: lookups ahead].

    Callers add lane * row, which does not depend on the iteration. Rows from `end` on are not looked up.
    """
    if PAGE >= lane.shape[0]:
        page = first // PAGE
        left = (page + 1) * PAGE - first
        here = (tl.load(table + page, mask=first < end, other=0) * PAGE + first % PAGE) * row
        following = (tl.load(table + page + 1, mask=first + left < end, other=0) * PAGE - left) * row
        starts = tl.where(lane < left, here, following)
    else:
        starts = row_starts(table, first + lane, first + lane < end, row, PAGE) - lane.to(tl.int64) * row
    return starts


def is_paged(paging: Paging) -> bool:
    """Returns whether an operand has a table or sizes, so that row_layout must check them."""
    return paging[0] is not None or bool(paging[1])


class RowLayout(NamedTuple):
    """Placement of an operand's rows. strides: of rows and columns, in elements. page: rows of a page, 0 without pages.

    num_rows: C, live or not.
    """

    num_rows: int
    width: int
    strides: tuple[int, ...]
    page: int


def row_layout(name: str, rows: Tensor, paging: Paging) -> RowLayout:
    """Returns the placement of an operand. Raises ValueError for an arena, table or sizes that kernels cannot use.

    name: the operand's. rows: [C, W], or an arena, [elements].
    """
    table, sizes = paging
    if not is_paged(paging):
        return RowLayout(*rows.shape, rows.stride(), 0)
    if table is None or len(sizes) != 3:
        raise ValueError(
            f"{name}_table ({_words(table)}) and {name}_sizes ({list(sizes)}) must be given together: "
            "page ids and [page_bytes, max_rows, width]"
        )
    page_bytes, max_rows, width = sizes
    row_bytes = width * rows.itemsize
    if width < 1 or not 0 <= max_rows <= 2**30:
        raise ValueError(f"{name}_sizes ({list(sizes)}): width must be at least 1, max_rows between 0 and 2**30")
    if page_bytes < row_bytes or page_bytes % row_bytes:
        raise ValueError(
            f"{name}_sizes: page_bytes ({page_bytes}) must be a multiple of {row_bytes} bytes, a row of {width} "
            f"elements of {rows.dtype}: kernels read whole rows from a page"
        )
    if rows.dim() != 1 or not rows.is_contiguous():
        raise ValueError(f"{name} ({_words(rows)}) must be an arena, which has one dimension and no gaps")
    page = page_bytes // row_bytes
    entries = -(-max_rows // page)
    if table.dtype != torch.int64 or table.device != rows.device or table.dim() != 1 or not table.is_contiguous():
        raise ValueError(f"{name}_table ({_words(table)}) must be contiguous int64 on {rows.device}, [n]")
    if len(table) < entries:
        raise ValueError(
            f"{name}_table has {len(table)} entries, but {max_rows} rows need {entries} pages of {page} rows"
        )
    return RowLayout(max_rows, width, (width, 1), page)


def check_rows(name: str, layout: RowLayout, *, num_rows: int, width: int) -> None:
    """Raises ValueError unless an operand has the rows and the width that the other operands require."""
    if (layout.num_rows, layout.width) != (num_rows, width):
        raise ValueError(
            f"{name} has {layout.num_rows} rows of {layout.width} elements, but the other operands require "
            f"{num_rows} rows of {width}"
        )


def _words(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{list(tensor.shape)}, {tensor.dtype}, {tensor.device}"
