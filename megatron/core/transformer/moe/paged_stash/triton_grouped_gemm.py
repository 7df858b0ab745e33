"""Triton kernels for the matrix products of experts: rows times weights, and gradients of the weights.

Shapes: max_rows rows of the buffers, sorted by expert; weights [num_experts, inner, outer]. Which expert's rows a tile
has is found on the device, from the offsets. Sums are in fp32, and fp32 products are not rounded to tf32.
Loads of rows beyond the live ones are masked: what lies there, which may be NaN, is never read.
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["needed"])
def grouped_gemm_kernel(
    x,
    weight,
    offsets,
    needed,
    out,
    scale,
    num_experts,
    max_rows,
    inner,
    outer,
    x_row,
    x_column,
    weight_expert,
    weight_row,
    weight_column,
    out_row,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
):
    """Tiles [ROWS, COLUMNS] of the product in turn, or, with a scale, of what is added to `out`; rows of no expert are
    left alone.
    """
    if tl.load(needed) == 0:
        return
    group = tl.arange(0, GROUPS)
    ends = _ends(offsets + group, max_rows, group < num_experts)
    starts = _ends(offsets + group - 1, max_rows, (group > 0) & (group < num_experts))
    column_tiles = tl.cdiv(outer, COLUMNS)
    tiles = tl.cdiv(tl.maximum(ends - starts, 0), ROWS) * column_tiles
    tile_ends = tl.cumsum(tiles, 0)
    for tile in tl.range(tl.program_id(0), tl.sum(tiles, 0), tl.num_programs(0)):
        expert = tl.sum((tile_ends <= tile).to(tl.int32), 0)
        chosen = group == expert
        start = tl.sum(tl.where(chosen, starts, 0), 0)
        end = tl.sum(tl.where(chosen, ends, 0), 0)
        local = tile - tl.sum(tl.where(chosen, tile_ends - tiles, 0), 0)
        row_tile, column_tile = _near_tile(local, tl.cdiv(end - start, ROWS), column_tiles)
        rows = start + row_tile * ROWS + tl.arange(0, ROWS)
        columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        term = tl.arange(0, TERMS)
        x_at = x + rows[:, None].to(tl.int64) * x_row + term[None, :].to(tl.int64) * x_column
        weight_at = weight + expert.to(tl.int64) * weight_expert
        weight_at += term[:, None].to(tl.int64) * weight_row + columns[None, :].to(tl.int64) * weight_column
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in tl.range(0, inner, TERMS):
            left = tl.load(x_at, mask=(rows < end)[:, None] & (term[None, :] < inner - first), other=0)
            is_weight = (term[:, None] < inner - first) & (columns[None, :] < outer)
            right = tl.load(weight_at, mask=is_weight, other=0)
            sums = tl.dot(left, right, sums, input_precision="ieee")
            x_at += TERMS * x_column
            weight_at += TERMS * weight_row
        out_at = out + rows[:, None].to(tl.int64) * out_row + columns[None, :]
        is_out = (rows < end)[:, None] & (columns[None, :] < outer)
        if scale is not None:
            sums = tl.load(out_at, mask=is_out, other=0).to(tl.float32) + sums * scale
        tl.store(out_at, sums.to(out.dtype.element_ty), mask=is_out)


@triton.jit
def _ends(offset_at, max_rows, exists):
    """Where rows of experts end, none beyond max_rows; 0 for an expert that does not exist."""
    return tl.minimum(tl.maximum(tl.load(offset_at, mask=exists, other=0), 0), max_rows)


@triton.jit
def _near_tile(local, row_tiles, column_tiles):
    """Row and column of a tile, in an order in which neighbours read the same data while it is still in the cache."""
    BAND: tl.constexpr = 8
    band = local // (BAND * column_tiles)
    first_row = band * BAND
    height = tl.minimum(row_tiles - first_row, BAND)
    within = local - band * BAND * column_tiles
    return first_row + within % height, within // height


@triton.jit
def weight_grad_kernel(
    x,
    grad,
    offsets,
    out,
    max_rows,
    inner,
    outer,
    x_row,
    x_column,
    grad_row,
    grad_column,
    out_expert,
    out_row,
    out_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
):
    """A program for each tile [ROWS, COLUMNS] of an expert's gradient: sums over the expert's rows in their order."""
    row_tiles, column_tiles = tl.cdiv(inner, ROWS), tl.cdiv(outer, COLUMNS)
    expert = tl.program_id(0) // (row_tiles * column_tiles)
    row_tile, column_tile = _near_tile(tl.program_id(0) % (row_tiles * column_tiles), row_tiles, column_tiles)
    start = _ends(offsets + expert - 1, max_rows, expert > 0)
    end = _ends(offsets + expert, max_rows, expert >= 0)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(start, end, TERMS):
        term = first + tl.arange(0, TERMS)
        x_at = x + rows[:, None].to(tl.int64) * x_column + term[None, :].to(tl.int64) * x_row
        grad_at = grad + term[:, None].to(tl.int64) * grad_row + columns[None, :].to(tl.int64) * grad_column
        left = tl.load(x_at, mask=(rows < inner)[:, None] & (term < end)[None, :], other=0)
        right = tl.load(grad_at, mask=(term < end)[:, None] & (columns < outer)[None, :], other=0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    out_at = out + expert.to(tl.int64) * out_expert
    out_at += rows[:, None].to(tl.int64) * out_row + columns[None, :].to(tl.int64) * out_column
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=(rows < inner)[:, None] & (columns < outer)[None, :])
