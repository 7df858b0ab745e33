"""Grouped GEMMs of experts in Triton: rows times weights, and gradients of the weights.

The launchers have the names and arguments of the operators in expert_ops.py, on CUDA tensors.

Shapes: max_rows rows of the buffers, sorted by expert; weights [num_experts, inner, outer]. The kernels find the expert
of each tile on the device, from the offsets, and its pages from a table, if rows are in pages (triton_pages.py). Sums
are in fp32, and fp32 inputs are not rounded to tf32. Rows beyond the live ones, whose content may be NaN, are not
read, except by descriptors.

Forward and recomputation run the same compiled kernel, so both are bit-identical. In forward the number of rows is
passed as the flag `needed`. The tile depends only on dtype and widths, never on addresses or row counts.

[Note: loads] Tensor cores wait for memory unless loads are asynchronous, 16 bytes at a time. Masks cost registers and
time, so loads are unmasked if 16 divides both widths: a tile that reaches beyond the last row or column reads other
elements of the same expert, whose sums are not stored. Other widths have small tiles, because the masks and addresses
of single elements would not fit the registers of large ones. A weight gradient sums over rows, so its last rows need a
mask, unless each expert has a multiple of TERMS rows, as in the static buffers of a run on a GPU ([Note: row alignment]
in dispatch_static.py). The padding is zero, so the sums have the same bits with and without it.

[Note: tiles] Sizes were chosen on an H200 (docs/gpu_results.md). A tile of [128, 256] uses 8 warps and in most shapes
leaves enough registers for a program of a copy, see [Note: copies during GEMMs] in triton_kernels.py.

[Note: registers] A product with the largest tile needs nearly all registers while it stores one. Values that are the
same for all tiles occupy registers at that time too if they were computed before the loop over tiles. On sm_100, Triton
3.7 and 3.8 then spill: 38 instructions in most hot shapes. Therefore LLVM must not move computations out of that loop.
Triton itself still moves the offsets of weight rows. They have 32 bits for this reason, which TERMS rows never exceed.

[Note: descriptors] With Loads.DESCRIPTORS, sm_90 and later copy boxes of x's arena and of the weights to shared memory
with 2 instructions an iteration instead of 12, and need no addresses in registers. A box must not cross the end of a
page. Tiles therefore begin at multiples of ROWS, of which a page has a whole number, and not at each expert's first
row. That costs at most one more tile per expert and column of tiles, and none if all experts begin at multiples of
ROWS. Rows of other experts and rows beyond the live ones are read, but their sums are not stored. The others have the
same bits as with pointers, if the sum of a row does not depend on its place in a tile. No caller but measurements
chooses descriptors: no GPU has run them yet.
"""
# mypy: allow-untyped-defs

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron.core.device.triton_compile import CompileCase, Residency, compile_case
from megatron.core.device.triton_launch import (
    MAX_PREPARED,
    PreparedLaunch,
    check_adjacent_columns,
    check_dtypes,
    next_power_of_2,
)
from megatron.core.device.triton_pages import (
    NO_PAGES,
    Paging,
    find_rows,
    find_tile,
    row_layout,
)
from megatron.core.device.triton_tiles import ends_of_experts, near_tile
from megatron.core.transformer.moe.paged_stash.triton_biases import add_bias_if

# Resident programs per processor of grouped_gemm_kernel, which loops over tiles, by number of warps.
_PRODUCTS_PER_PROCESSOR = {4: 2, 8: 1}
# Compiler options among the entries of a tile.
_OPTIONS = ("num_warps", "num_stages")


class Loads(Enum):
    """How a product reads its operands. See [Note: descriptors]."""

    POINTERS = auto()
    DESCRIPTORS = auto()


@triton.jit(do_not_specialize=["max_rows"], do_not_specialize_on_alignment=["needed", "x_table", "out_table"])
def grouped_gemm_kernel(
    x,
    weight,
    offsets,
    needed,
    out,
    x_table,
    out_table,
    max_rows,
    x_boxes,
    weight_boxes,
    scale,
    num_experts,
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
    IS_EVEN: tl.constexpr,
    X_PAGE: tl.constexpr,
    OUT_PAGE: tl.constexpr,
):
    """Computes tiles [ROWS, COLUMNS] of the GEMM and writes them to `out`, or, with a scale, adds them to `out`.

    Rows of `out` that belong to no expert remain unchanged. IS_EVEN: whether loads are unmasked, see [Note: loads].
    X_PAGE, OUT_PAGE: see [Note: lookups] in triton_pages.py. x_boxes: descriptor of x's arena, boxes [ROWS, TERMS].
    weight_boxes: descriptor of the rows of all weights, boxes [TERMS, COLUMNS]. Both are None if operands are read by
    pointers. See [Note: descriptors].
    """
    if tl.load(needed) == 0:
        return
    group = tl.arange(0, GROUPS)
    ends = ends_of_experts(offsets + group, max_rows, group < num_experts)
    starts = ends_of_experts(offsets + group - 1, max_rows, (group > 0) & (group < num_experts))
    column_tiles = tl.cdiv(outer, COLUMNS)
    covered = tl.maximum(ends - starts, 0)
    if x_boxes is not None:
        covered += tl.where(covered > 0, starts % ROWS, 0)
    tiles = tl.cdiv(covered, ROWS) * column_tiles
    tile_ends = tl.cumsum(tiles, 0)
    # See [Note: registers].
    IS_LARGEST: tl.constexpr = COLUMNS >= 256
    for tile in tl.range(tl.program_id(0), tl.sum(tiles, 0), tl.num_programs(0), disable_licm=IS_LARGEST):
        expert = tl.sum((tile_ends <= tile).to(tl.int32), 0)
        chosen = group == expert
        start = tl.sum(tl.where(chosen, starts, 0), 0)
        end = tl.sum(tl.where(chosen, ends, 0), 0)
        local = tile - tl.sum(tl.where(chosen, tile_ends - tiles, 0), 0)
        first_row = start - start % ROWS if x_boxes is not None else start
        row_tile, column_tile = near_tile(local, tl.cdiv(end - first_row, ROWS), column_tiles)
        first_row += row_tile * ROWS
        rows = first_row + tl.arange(0, ROWS)
        columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        term = tl.arange(0, TERMS)
        if x_boxes is not None:
            first_x = find_rows(x_table, first_row, first_row < end, X_PAGE)
        else:
            # Rows and columns beyond the last one are replaced with valid ones, whose sums are not stored.
            # Masked loads require that only in pages, where the compiler otherwise spills registers.
            read_rows = tl.minimum(rows, end - 1) if IS_EVEN or X_PAGE > 0 else rows
            read_columns = columns % outer if IS_EVEN else columns
            x_rows = find_tile(x_table, first_row, read_rows, end, X_PAGE)
            x_at = x + x_rows[:, None].to(tl.int64) * x_row + term[None, :].to(tl.int64) * x_column
            weight_at = weight + expert.to(tl.int64) * weight_expert
            weight_at += (term[:, None] * weight_row).to(tl.int64) + read_columns[None, :].to(tl.int64) * weight_column
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in tl.range(0, inner, TERMS):
            if x_boxes is not None:
                left = x_boxes.load([first_x, first])
                right = weight_boxes.load([expert * inner + first, column_tile * COLUMNS])
            elif IS_EVEN:
                left = tl.load(x_at)
                right = tl.load(weight_at)
            else:
                left = tl.load(x_at, mask=(rows < end)[:, None] & (term[None, :] < inner - first), other=0)
                is_weight = (term[:, None] < inner - first) & (columns[None, :] < outer)
                right = tl.load(weight_at, mask=is_weight, other=0)
            sums = tl.dot(left, right, sums, input_precision="ieee")
            if x_boxes is None:
                x_at += TERMS * x_column
                weight_at += TERMS * weight_row
        out_rows = find_tile(out_table, first_row, rows, end, OUT_PAGE)
        out_at = out + out_rows[:, None].to(tl.int64) * out_row + columns[None, :]
        is_out = (rows < end)[:, None] & (columns[None, :] < outer)
        if x_boxes is not None:
            is_out &= (rows >= start)[:, None]
        if scale is not None:
            sums = tl.load(out_at, mask=is_out, other=0).to(tl.float32) + sums * scale
        tl.store(out_at, sums.to(out.dtype.element_ty), mask=is_out)


@triton.jit(do_not_specialize=["max_rows"], do_not_specialize_on_alignment=["x_table"])
def weight_grad_kernel(
    x,
    grad,
    offsets,
    out,
    x_table,
    max_rows,
    scale,
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
    IS_EVEN: tl.constexpr,
    IS_ADDED: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    X_PAGE: tl.constexpr,
):
    """Computes the gradients of all experts' weights. Each program sums one tile over the expert's rows, in order.

    scale: factor of the sum, or None. IS_ADDED: whether to add to the value in `out`, in fp32, with one rounding.
    IS_ALIGNED: whether the rows of each expert begin and end at multiples of TERMS, so that none are left for a masked
    tail. X_PAGE: see [Note: lookups ahead] in triton_pages.py.
    """
    row_tiles, column_tiles = tl.cdiv(inner, ROWS), tl.cdiv(outer, COLUMNS)
    expert = tl.program_id(0) // (row_tiles * column_tiles)
    row_tile, column_tile = near_tile(tl.program_id(0) % (row_tiles * column_tiles), row_tiles, column_tiles)
    start = ends_of_experts(offsets + expert - 1, max_rows, expert > 0)
    end = ends_of_experts(offsets + expert, max_rows, expert >= 0)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    # With unmasked loads, columns beyond the last one are replaced with valid ones, whose sums are not stored.
    read_rows, read_columns = (rows % inner, columns % outer) if IS_EVEN else (rows, columns)
    x_at = x + read_rows[:, None].to(tl.int64) * x_column
    grad_at = grad + read_columns[None, :].to(tl.int64) * grad_column
    is_row, is_column = (rows < inner)[:, None], (columns < outer)[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    # See [Note: lookups] in triton_pages.py.
    IS_WHOLE: tl.constexpr = IS_ALIGNED and X_PAGE > 0 and X_PAGE % TERMS == 0
    whole = end if IS_ALIGNED else start + (end - start) // TERMS * TERMS
    if X_PAGE > 0:
        ahead = find_tile(x_table, start, start + tl.arange(0, TERMS), end, X_PAGE, IS_WHOLE)
    # Pointers that advance take fewer instructions, but more registers, which are scarce if loads are not asynchronous.
    ADVANCES: tl.constexpr = IS_ALIGNED and IS_EVEN
    if ADVANCES:
        term = start + tl.arange(0, TERMS)
        right_at = grad_at + term[:, None].to(tl.int64) * grad_row
        if X_PAGE == 0:
            left_at = x_at + term[None, :].to(tl.int64) * x_row
    for first in tl.range(start, whole, TERMS):
        if not ADVANCES:
            term = first + tl.arange(0, TERMS)
            right_at = grad_at + term[:, None].to(tl.int64) * grad_row
        if X_PAGE > 0:
            left_at = x_at + ahead[None, :].to(tl.int64) * x_row
        elif not ADVANCES:
            left_at = x_at + term[None, :].to(tl.int64) * x_row
        if IS_EVEN:
            left = tl.load(left_at)
            right = tl.load(right_at)
        else:
            left = tl.load(left_at, mask=is_row, other=0)
            right = tl.load(right_at, mask=is_column, other=0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
        if ADVANCES:
            right_at += TERMS * grad_row
            if X_PAGE == 0:
                left_at += TERMS * x_row
        if X_PAGE > 0:
            following = first + tl.full((), TERMS, tl.int32)
            ahead = find_tile(x_table, following, following + tl.arange(0, TERMS), end, X_PAGE, IS_WHOLE)
    if not IS_ALIGNED:
        if whole < end:
            term = whole + tl.arange(0, TERMS)
            x_term = ahead if X_PAGE > 0 else term
            left = tl.load(x_at + x_term[None, :].to(tl.int64) * x_row, mask=is_row & (term < end)[None, :], other=0)
            right = tl.load(
                grad_at + term[:, None].to(tl.int64) * grad_row, mask=is_column & (term < end)[:, None], other=0
            )
            sums = tl.dot(left, right, sums, input_precision="ieee")
    out_at = out + expert.to(tl.int64) * out_expert
    out_at += rows[:, None].to(tl.int64) * out_row + columns[None, :].to(tl.int64) * out_column
    if scale is not None:
        sums *= scale
    if IS_ADDED:
        sums += tl.load(out_at, mask=is_row & is_column, other=0).to(tl.float32)
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=is_row & is_column)


def grouped_gemm(
    x: Tensor,
    weight: Tensor,
    *,
    offsets: Tensor,
    out: Tensor,
    x_table: Tensor | None = None,
    x_sizes: Sequence[int] = (),
    out_table: Tensor | None = None,
    out_sizes: Sequence[int] = (),
    loads: Loads = Loads.POINTERS,
) -> None:
    """Multiplies the rows of expert i by weight[i]. x: [C, H]; weight: [e, H, O]; out: [C, O]; one float dtype.

    x and out may be in pages. loads: descriptors are for measurements. Raises ValueError for tables and sizes that do
    not fit the operands, and for operands that descriptors cannot read.
    """
    x_pages, out_pages, needed = (x_table, x_sizes), (out_table, out_sizes), offsets[-1:]
    _launch_grouped_gemm(
        x, weight, offsets=offsets, needed=needed, out=out, x_pages=x_pages, out_pages=out_pages, loads=loads
    )


def grouped_gemm_weight_grad(
    x: Tensor,
    grad: Tensor,
    *,
    offsets: Tensor,
    out: Tensor,
    scale: float = 1.0,
    is_added: bool = False,
    row_alignment: int = 1,
    x_table: Tensor | None = None,
    x_sizes: Sequence[int] = (),
) -> None:
    """Computes scale * x^T grad of each expert, 0 for an expert without rows, and writes or adds it to `out`.

    x: [C, H], may be in pages; grad: [C, O], x's dtype; out: [e, H, O], any float dtype. Values are rounded once, to
    out's dtype. is_added: whether to add to `out`. row_alignment: a divisor of all offsets and of C. Raises ValueError
    for a table and sizes that do not fit, and if C is not a multiple of row_alignment.
    """
    if grad.shape[0] % row_alignment:
        raise ValueError(f"grad has {grad.shape[0]} rows: must be a multiple of row_alignment ({row_alignment})")
    max_rows, x_strides, page = x.shape[0], x.stride(), 0
    if x_table is not None or x_sizes:
        layout = row_layout("x", x, (x_table, x_sizes), num_rows=grad.shape[0], width=out.shape[1])
        max_rows, x_strides, page = layout.num_rows, layout.strides, layout.page
    strides = (*x_strides, *grad.stride(), *out.stride())
    launch, tiles = _weight_gradient(x.dtype, out.shape, strides, scale, is_added, row_alignment, page)
    launch(tiles, (x, grad, offsets, out, x_table), (max_rows,))


@functools.lru_cache(MAX_PREPARED)
def _weight_gradient(
    dtype: torch.dtype,
    shape: torch.Size,
    strides: tuple[int, ...],
    scale: float,
    is_added: bool,
    row_alignment: int,
    page: int,
) -> tuple[PreparedLaunch, int]:
    """Returns a launch of weight_grad_kernel, and its number of programs.

    shape: [e, H, O]; strides: x, grad, out; page: rows of a page of x, 0 without pages.
    """
    check_dtypes(dtype)
    experts, inner, outer = shape
    check_adjacent_columns(inner, strides[1])
    is_even = _is_even(inner, outer)
    tile = weight_grad_tile(dtype, is_even=is_even, is_added=is_added)
    names = ("x_row", "x_column", "grad_row", "grad_column", "out_expert", "out_row", "out_column")
    sizes = {"scale": None if scale == 1.0 else scale, "inner": inner, "outer": outer, **dict(zip(names, strides))}
    options = {key: tile.pop(key) for key in _OPTIONS}
    is_aligned = row_alignment % tile["TERMS"] == 0
    fixed = {**sizes, **tile, "IS_EVEN": is_even, "IS_ADDED": is_added, "IS_ALIGNED": is_aligned, "X_PAGE": page}
    programs = experts * -(-inner // tile["ROWS"]) * -(-outer // tile["COLUMNS"])
    return PreparedLaunch(weight_grad_kernel, fixed, options=options), programs


def gate_up_from_x(
    x: Tensor,
    weight: Tensor,
    *,
    offsets: Tensor,
    needed: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    x_table: Tensor | None = None,
    x_sizes: Sequence[int] = (),
    out_table: Tensor | None = None,
    out_sizes: Sequence[int] = (),
) -> None:
    """Recomputes gate_up, including the bias, unless `needed` is 0.

    x: [C, H]; weight: [e, H, O]; bias: [e, O] or None; out: [C, O]; one float dtype. needed: [1], int64. x and out may
    be in pages. Raises ValueError for tables and sizes that do not fit the operands.
    """
    # Viewed as int32, low word first, because in forward the kernels receive the last offset, which is int32.
    words = needed.view(torch.int32)
    x_pages, out_pages = (x_table, x_sizes), (out_table, out_sizes)
    _launch_grouped_gemm(x, weight, offsets=offsets, needed=words, out=out, x_pages=x_pages, out_pages=out_pages)
    if bias is not None:
        add_bias_if(words, out, bias=bias, scale=None, offsets=offsets, share=1.0, pages=out_pages)


def add_low_rank(
    rows: Tensor,
    low: Tensor,
    *,
    weight: Tensor,
    offsets: Tensor,
    scale: float,
    needed: Tensor | None = None,
    rows_table: Tensor | None = None,
    rows_sizes: Sequence[int] = (),
) -> None:
    """Adds scale * low @ weight of the row's expert to each row in place, unless `needed` is 0.

    rows: [C, O], may be in pages; low: [C, r]; weight: [e, r, O]; one float dtype. needed: [1], int64; None means
    always. Raises ValueError for a table and sizes that do not fit the operands.
    """
    words = offsets[-1:] if needed is None else needed.view(torch.int32)
    pages, names = (rows_table, rows_sizes), ("low", "rows")
    _launch_grouped_gemm(
        low, weight, offsets=offsets, needed=words, out=rows, scale=scale, out_pages=pages, names=names
    )


def _launch_grouped_gemm(
    x: Tensor,
    weight: Tensor,
    *,
    offsets: Tensor,
    needed: Tensor,
    out: Tensor,
    scale: float | None = None,
    x_pages: Paging = NO_PAGES,
    out_pages: Paging = NO_PAGES,
    names: tuple[str, str] = ("x", "out"),
    loads: Loads = Loads.POINTERS,
) -> None:
    """Launches grouped_gemm_kernel. scale: factor of the result that is added to `out`; None overwrites `out`.

    names: of x and out in error messages.
    """
    shape = weight.shape
    if x_pages[0] is not None or out_pages[0] is not None or x_pages[1] or out_pages[1]:
        of_x = row_layout(names[0], x, x_pages, width=shape[1])
        of_out = row_layout(names[1], out, out_pages, width=shape[2])
        if of_x.num_rows != of_out.num_rows:
            rows = [f"{name} has {one.num_rows} rows" for name, one in zip(names, (of_x, of_out))]
            raise ValueError(f"{' and '.join(rows)}, but both must have the same number of rows")
        max_rows, x_strides, out_strides = of_x.num_rows, of_x.strides, of_out.strides
        pages = (of_x.page, of_out.page)
    else:
        max_rows, x_strides, out_strides, pages = x.shape[0], x.stride(), out.stride(), (0, 0)
    strides = (*x_strides, *weight.stride(), *out_strides)
    launch, tile_rows, column_tiles = _product(x.dtype, out.dtype, shape, strides, scale, pages, loads)
    # The last tile of each expert's rows may be partly empty, and the first one too if it is read by descriptors.
    tiles = (-(-max_rows // tile_rows) + shape[0]) * column_tiles
    tensors = (x, weight, offsets, needed, out, x_pages[0], out_pages[0])
    if loads is Loads.POINTERS:
        launch(tiles, tensors, (max_rows,))
    else:
        launch(tiles, tensors, (max_rows, *_boxes(x, weight, page=pages[0])))


def _boxes(x: Tensor, weight: Tensor, *, page: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Returns descriptors of x, an arena, [elements], and of weights, [e, H, O], x's dtype. See [Note: descriptors].

    page: rows of a page of x, 0 without pages. Raises ValueError for operands that descriptors cannot read.
    """
    experts, inner, outer = weight.shape
    tile = product_tile(x.dtype, inner, outer)
    rows, columns, terms = tile["ROWS"], tile["COLUMNS"], tile["TERMS"]
    if page == 0 or page % rows:
        raise ValueError(
            f"x has pages of {page} rows, but boxes of descriptors need pages of a multiple of {rows} rows"
        )
    if not _is_even(inner, outer):
        raise ValueError(f"weight has [{inner}, {outer}] for an expert, but boxes need multiples of 16")
    if not weight.is_contiguous() or any(one.data_ptr() % 16 for one in (x, weight)):
        raise ValueError("x and weight must start at a multiple of 16 bytes, and weight must be contiguous")
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (9, 0):
        raise ValueError(f"{x.device} must have at least sm_90: older ones have no descriptors")
    return (
        TensorDescriptor(x, [x.numel() // inner, inner], [inner, 1], [rows, terms]),
        TensorDescriptor(weight, [experts * inner, outer], [outer, 1], [terms, columns]),
    )


@functools.lru_cache(MAX_PREPARED)
def _product(
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    shape: torch.Size,
    strides: tuple[int, ...],
    scale: float | None,
    pages: tuple[int, int],
    loads: Loads,
) -> tuple[PreparedLaunch, int, int]:
    """Returns a launch of grouped_gemm_kernel, the rows of a tile, and the number of tiles in a row; 0 without experts.

    shape: [e, H, O]; strides: x, weight, out; pages: rows of a page of x and of out, 0 without pages. With descriptors,
    launches have them as counts, in the order of x_boxes and weight_boxes.
    """
    check_dtypes(dtype, out_dtype)
    experts, inner, outer = shape
    check_adjacent_columns(inner, strides[1])
    check_adjacent_columns(outer, strides[-1])
    tile = product_tile(dtype, inner, outer, is_added=scale is not None)
    names = ("x_row", "x_column", "weight_expert", "weight_row", "weight_column", "out_row")
    sizes = {"scale": scale, "num_experts": experts, "inner": inner, "outer": outer, **dict(zip(names, strides))}
    options = {key: tile.pop(key) for key in _OPTIONS}
    constants = {"GROUPS": next_power_of_2(max(experts, 1)), "IS_EVEN": _is_even(inner, outer)}
    # Descriptors are arguments of each launch.
    boxes = {"x_boxes": None, "weight_boxes": None} if loads is Loads.POINTERS else {}
    fixed = {**boxes, **sizes, **tile, **constants, "X_PAGE": pages[0], "OUT_PAGE": pages[1]}
    per_processor = _PRODUCTS_PER_PROCESSOR[options["num_warps"]]
    launch = PreparedLaunch(grouped_gemm_kernel, fixed, options=options, per_processor=per_processor)
    return launch, tile["ROWS"], -(-outer // tile["COLUMNS"]) if experts else 0


def _is_even(inner: int, outer: int) -> bool:
    """Returns whether loads can be unmasked. See [Note: loads]."""
    return inner % 16 == 0 and outer % 16 == 0


def product_tile(dtype: torch.dtype, inner: int, outer: int, *, is_added: bool = False) -> dict[str, int]:
    """Returns the tile sizes, warps and stages of a grouped GEMM. Larger tiles would spill registers.

    is_added: whether the result is added to `out`, whose values occupy as many registers per thread as the sums.
    """
    is_even = _is_even(inner, outer)
    if dtype == torch.float32:
        return {"ROWS": 64 if is_even else 32, "COLUMNS": 64, "TERMS": 16, "num_warps": 4, "num_stages": 3}
    if not is_even:
        return {"ROWS": 64, "COLUMNS": 128, "TERMS": 32, "num_warps": 8, "num_stages": 3}
    # The largest power of two, at most 64, that divides inner.
    terms = min(inner & -inner, 64)
    return {"ROWS": 128, "COLUMNS": 128 if is_added else 256, "TERMS": terms, "num_warps": 8, "num_stages": 3}


def weight_grad_tile(dtype: torch.dtype, *, is_even: bool, is_added: bool = False) -> dict[str, int]:
    """Returns the tile sizes, warps and stages of a weight gradient. Larger tiles would spill registers."""
    if dtype == torch.float32:
        return {"ROWS": 64 if is_even else 32, "COLUMNS": 64, "TERMS": 16, "num_warps": 4, "num_stages": 3}
    if not is_even:
        return {"ROWS": 64, "COLUMNS": 128, "TERMS": 32, "num_warps": 8, "num_stages": 3}
    if is_added:
        return {"ROWS": 128, "COLUMNS": 128, "TERMS": 64, "num_warps": 8, "num_stages": 3}
    return {"ROWS": 128, "COLUMNS": 128, "TERMS": 32, "num_warps": 4, "num_stages": 4}


def residencies(num_warps: int) -> Mapping[str, Residency]:
    """Maps each kernel's name to the residency that its launcher assumes, for programs of num_warps warps."""
    products = Residency(at_least=_PRODUCTS_PER_PROCESSOR[num_warps])
    return {"grouped_gemm_kernel": products, "weight_grad_kernel": Residency()}


def compile_cases() -> Iterator[CompileCase]:
    """Yields compile cases of widths divisible by 16, of rows without pages, and in pages of a tile or smaller."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        for page, words in ((0, ""), (128, ", in pages"), (16, ", in small pages")):
            yield from _product_cases(dtype, name, page, words)
            yield from _weight_grad_cases(dtype, name, page, words)
        yield _descriptor_case(dtype, name)


def _product_cases(dtype: torch.dtype, name: str, page: int, words: str) -> Iterator[CompileCase]:
    """Yields cases with weights as stored and transposed, and with an added result, whose x is never in pages."""
    data, size = f"*{name}:16", "i32:16"
    weights = ((size, 1, None, "as stored"), (1, size, None, "transposed"), (size, 1, "fp32", "added"))
    for row, column, scale, kind in weights:
        tile = product_tile(dtype, 64, 64, is_added=scale is not None)
        options = {key: tile.pop(key) for key in _OPTIONS}
        x_page = 0 if scale is not None else page
        yield compile_case(
            grouped_gemm_kernel,
            f"grouped_gemm, {name}, weights {kind}{words}",
            options=options,
            weight=data,
            needed="*i32",
            out=data,
            x_boxes=None,
            weight_boxes=None,
            scale=scale,
            weight_row=row,
            weight_column=column,
            **_sizes_case(page),
            **_x_case(data, x_page),
            **tile,
        )


def _descriptor_case(dtype: torch.dtype, name: str) -> CompileCase:
    data, size, page = f"*{name}:16", "i32:16", 128
    tile = product_tile(dtype, 64, 64)
    options = {key: tile.pop(key) for key in _OPTIONS}
    case = compile_case(
        grouped_gemm_kernel,
        f"grouped_gemm by descriptors, {name}",
        options=options,
        weight=data,
        needed="*i32",
        out=data,
        x_boxes=f"tensordesc<{name}[{tile['ROWS']}, {tile['TERMS']}]>",
        weight_boxes=f"tensordesc<{name}[{tile['TERMS']}, {tile['COLUMNS']}]>",
        scale=None,
        weight_row=size,
        weight_column=1,
        **_sizes_case(page),
        **_x_case(data, page),
        **tile,
    )
    return replace(case, first_architecture=90)


def _weight_grad_cases(dtype: torch.dtype, name: str, page: int, words: str) -> Iterator[CompileCase]:
    """Yields cases of aligned experts with a written result, and with a scaled one that is added to fp32."""
    data, size = f"*{name}:16", "i32:16"
    for out, is_added in ((data, False), ("*fp32:16", True)):
        tile = weight_grad_tile(dtype, is_even=True, is_added=is_added)
        options = {key: tile.pop(key) for key in _OPTIONS}
        yield compile_case(
            weight_grad_kernel,
            f"grouped_gemm_weight_grad, {name}, {'added to fp32' if is_added else 'written'}{words}",
            options=options,
            grad=data,
            out=out,
            scale="fp32" if is_added else None,
            grad_row=size,
            grad_column=1,
            out_expert=size,
            out_row=size,
            out_column=1,
            IS_ADDED=is_added,
            IS_ALIGNED=True,
            **_x_case(data, page),
            **tile,
        )


def _x_case(data: str, page: int) -> dict[str, object]:
    """Returns the arguments that the cases of both kernels share."""
    size = "i32:16"
    shapes = {"inner": size, "outer": size, "max_rows": "i32", "offsets": "*i32:16", "IS_EVEN": True}
    return {**shapes, "x": data, "x_row": size, "x_column": 1, **_table_case("x", page)}


def _sizes_case(page: int) -> dict[str, object]:
    """Returns the arguments that all cases of products share. page: rows of a page of out, 0 without pages."""
    sizes = {"num_experts": "i32", "weight_expert": "i32:16", "out_row": "i32:16", "GROUPS": 32}
    return {**sizes, **_table_case("out", page)}


def _table_case(name: str, page: int) -> dict[str, object]:
    return {f"{name}_table": "*i64" if page else None, f"{name.upper()}_PAGE": page}
