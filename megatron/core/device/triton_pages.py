"""Rows in pages, for Triton kernels and their launchers: lookups of rows in page tables, and checks of operands.

paged_rows.py describes such rows. Contains functions that kernels call, and no kernel that is launched.

[Note: lookups] PAGE is the number of rows of a page, and 0 for an operand without pages. Pages contain whole rows, so
row r of the operand is row table[r // PAGE] * PAGE + r % PAGE of the arena. Kernels replace the numbers of rows by
those in the arena, and compute addresses from them as without pages. Table entries beyond the pages of live rows are
undefined, and are not loaded. A tile of rows is found in one of three modes:
  WHOLE    if the tile begins at a multiple of its length, which divides that of a page: one entry for each tile
  PAIR     if a page has at least as many rows as the tile, which may begin anywhere in a page and then ends in the same
           or in the following one: two entries for each tile
  ROWWISE  if pages are smaller: one entry for each row
The mode follows from constants of the compiled kernel, PAGE, the length of the tile and whether it is aligned, so that
no launch has a mode that its pages do not allow. Kernels whose tiles have a few wide rows always use ROWWISE, which is
shorter for these.

[Note: lookups ahead] The loop of a weight gradient needs table entries to find a tile. If one iteration loaded both,
Triton's pipeline would load the entries in one stage and the tile in the next, and keep fewer tiles in flight. Each
iteration therefore finds the rows of the next one. Numbers of rows need half the registers of addresses meanwhile.
"""
# mypy: allow-untyped-defs

import functools
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
def find_rows(table, rows, is_live, PAGE: tl.constexpr):
    """Returns the rows' numbers in the arena, or `rows` without pages. is_live: rows to find. Mode ROWWISE."""
    found = rows
    if PAGE > 0:
        # Numbers of rows fit 32 bits, in which division is cheaper.
        rows = rows.to(tl.int32)
        found = tl.load(table + rows // PAGE, mask=is_live, other=0).to(tl.int32) * PAGE + rows % PAGE
    return found


@triton.jit
def find_tile(table, first, rows, end, PAGE: tl.constexpr, IS_WHOLE: tl.constexpr = False):
    """Returns the rows' numbers in the arena, or `rows` without pages. See [Note: lookups].

    first: first row of the tile. rows: at least `first`, and less than `first` plus their number. Rows from `end` on
    are not found. IS_WHOLE: whether the mode is WHOLE, which requires a page.
    """
    found = rows
    if IS_WHOLE:
        page = first // PAGE
        found = rows + (tl.load(table + page, mask=first < end, other=0).to(tl.int32) - page) * PAGE
    elif PAGE >= rows.shape[0]:
        page = first // PAGE
        following = (page + 1) * PAGE
        shift = (tl.load(table + page, mask=first < end, other=0).to(tl.int32) - page) * PAGE
        next_page = tl.load(table + page + 1, mask=following < end, other=0).to(tl.int32)
        found = rows + tl.where(rows < following, shift, (next_page - page - 1) * PAGE)
    elif PAGE > 0:
        found = find_rows(table, rows, rows < end, PAGE)
    return found


class RowLayout(NamedTuple):
    """Placement of an operand's rows. strides: of rows and columns, in elements. page: rows of a page, 0 without pages.

    num_rows: C, live or not.
    """

    num_rows: int
    width: int
    strides: tuple[int, ...]
    page: int


def row_layout(
    name: str, rows: Tensor, paging: Paging, *, num_rows: int | None = None, width: int | None = None
) -> RowLayout:
    """Returns the placement of an operand. Raises ValueError for an arena, table or sizes that kernels cannot use.

    name: the operand's. rows: [C, W], or an arena, [elements], any dtype. num_rows, width: C and W that the other
    operands require; None if any.
    """
    table, sizes = paging
    if table is None and not sizes:
        layout = RowLayout(rows.shape[0], rows.shape[1], rows.stride(), 0)
        _check_rows(name, layout, num_rows=num_rows, width=width)
        return layout
    if table is None or not sizes:
        raise ValueError(
            f"{name}_table ({_words(table)}) and {name}_sizes ({list(sizes)}) must be given together: "
            "page ids and [page_bytes, max_rows, width]"
        )
    is_arena, is_table = rows.stride() == (1,), table.stride() == (1,) and table.dtype is torch.int64
    if not is_arena:
        raise ValueError(f"{name} ({_words(rows)}) must be an arena, which has one dimension and no gaps")
    if not is_table or table.device != rows.device:
        raise ValueError(f"{name}_table ({_words(table)}) must be contiguous int64 on {rows.device}, [n]")
    return _paged_layout(name, tuple(sizes), rows.dtype, rows.shape[0], table.shape[0], (num_rows, width))


# Layers have few sizes, so that each combination is checked only once.
@functools.lru_cache(4096)
def _paged_layout(
    name: str,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    num_elements: int,
    num_entries: int,
    required: tuple[int | None, int | None],
) -> RowLayout:
    if len(sizes) != 3:
        raise ValueError(f"{name}_sizes ({list(sizes)}) must be [page_bytes, max_rows, width]")
    (page_bytes, max_rows, width), row_bytes = sizes, sizes[2] * dtype.itemsize
    if width < 1 or not 0 <= max_rows <= 2**30:
        raise ValueError(f"{name}_sizes ({list(sizes)}): width must be at least 1, max_rows between 0 and 2**30")
    if page_bytes < row_bytes or page_bytes % row_bytes:
        raise ValueError(
            f"{name}_sizes: page_bytes ({page_bytes}) must be a multiple of {row_bytes} bytes, a row of {width} "
            f"elements of {dtype}: kernels read whole rows from a page"
        )
    if num_elements // width >= 2**31:
        raise ValueError(f"{name} has {num_elements // width} rows of {width}, but kernels number at most 2**31 - 1")
    page = page_bytes // row_bytes
    entries = -(-max_rows // page)
    if num_entries < entries:
        raise ValueError(
            f"{name}_table has {num_entries} entries, but {max_rows} rows need {entries} pages of {page} rows"
        )
    layout = RowLayout(max_rows, width, (width, 1), page)
    _check_rows(name, layout, num_rows=required[0], width=required[1])
    return layout


def _check_rows(name: str, layout: RowLayout, *, num_rows: int | None, width: int | None) -> None:
    """Raises ValueError unless an operand has the rows and the width that the other operands require."""
    required = layout.num_rows if num_rows is None else num_rows, layout.width if width is None else width
    if (layout.num_rows, layout.width) != required:
        raise ValueError(
            f"{name} has {layout.num_rows} rows of {layout.width} elements, but the other operands require "
            f"{required[0]} rows of {required[1]}"
        )


def _words(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{list(tensor.shape)}, {tensor.dtype}, {tensor.device}"
