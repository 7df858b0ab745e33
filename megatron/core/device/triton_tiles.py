"""Numbers of rows and orders of tiles, for Triton kernels. Contains functions that kernels call, and no kernel."""
# mypy: allow-untyped-defs

import triton
import triton.language as tl


@triton.jit
def live_rows(num_rows, max_rows):
    """Returns the number of live rows, at most max_rows. num_rows: its address, or None if all rows are live."""
    if num_rows is None:
        live = max_rows
    else:
        live = tl.minimum(tl.maximum(tl.load(num_rows), 0), max_rows)
    return live


@triton.jit
def ends_of_experts(offset_at, max_rows, exists):
    """Returns the ends of experts' rows, at most max_rows; 0 for nonexistent experts."""
    return tl.minimum(tl.maximum(tl.load(offset_at, mask=exists, other=0), 0), max_rows)


@triton.jit
def near_tile(local, row_tiles, column_tiles):
    """Returns the row and column of a tile, in an order in which tiles that read the same data run close in time."""
    BAND: tl.constexpr = 8
    band = local // (BAND * column_tiles)
    first_row = band * BAND
    height = tl.minimum(row_tiles - first_row, BAND)
    within = local - band * BAND * column_tiles
    return first_row + within % height, within // height
