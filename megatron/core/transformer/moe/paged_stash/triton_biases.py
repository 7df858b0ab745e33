"""Expert biases in Triton.

The launchers have the names and arguments of the operators in expert_ops.py, on CUDA tensors.

Shapes: max_rows rows of the buffers, sorted by expert; width columns. Arithmetic is in fp32. Loads of rows beyond the
live ones are masked, so that their content, which may be NaN, is never read.
"""
# mypy: allow-untyped-defs

import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.device.triton_compile import CompileCase, Residency, compile_case
from megatron.core.device.triton_launch import MAX_PREPARED, PreparedLaunch, check_dtypes, next_power_of_2
from megatron.core.device.triton_pages import NO_PAGES, Paging, find_rows, row_layout

# Elements of one tile: 16 for each thread of 4 warps.
_ELEMENTS = 2048
_WARPS = {"num_warps": 4}
# Programs per processor that a grid is limited to, so that a recomputation that is not required costs little, and those
# of them that are resident, for the kernels that loop over tiles. See [Note: bytes in flight] in triton_rows.py.
_PROGRAMS = Residency(at_least=4, at_most_launched=8)


@triton.jit(do_not_specialize=["max_rows"], do_not_specialize_on_alignment=["needed", "rows_table"])
def add_bias_kernel(
    rows_at,
    bias,
    scale,
    offsets,
    needed,
    rows_table,
    max_rows,
    num_experts,
    width,
    pitch,
    share,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS_PAGE: tl.constexpr,
):
    """Adds biases in place. ROWS_PAGE: see [Note: lookups] in triton_pages.py."""
    if tl.load(needed) == 0:
        return
    ends = _all_ends(offsets, num_experts, max_rows, GROUPS)
    live = tl.max(ends, 0)
    column_tiles = tl.cdiv(width, COLUMNS)
    for tile in tl.range(tl.program_id(0), tl.cdiv(live, ROWS) * column_tiles, tl.num_programs(0)):
        rows = (tile // column_tiles) * ROWS + tl.arange(0, ROWS)
        columns = (tile % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (rows < live)[:, None] & (columns < width)[None, :]
        addend = _bias_of(bias, rows, columns, ends, num_experts, width, inside) * share
        if scale is not None:
            addend *= tl.load(scale + rows, mask=rows < live, other=0).to(tl.float32)[:, None]
        own_rows = find_rows(rows_table, rows, rows < live, ROWS_PAGE)
        place = rows_at + own_rows[:, None].to(tl.int64) * pitch + columns[None, :]
        values = tl.load(place, mask=inside, other=0).to(tl.float32) + addend
        tl.store(place, values.to(rows_at.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["max_rows"])
def bias_grad_kernel(
    grad,
    scale,
    offsets,
    out,
    max_rows,
    width,
    grad_row,
    grad_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums COLUMNS columns over the rows of one expert, in row order, in each program."""
    column_tiles = tl.cdiv(width, COLUMNS)
    expert = tl.program_id(0) // column_tiles
    columns = (tl.program_id(0) % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.minimum(tl.maximum(tl.load(offsets + expert - 1, mask=expert > 0, other=0), 0), max_rows)
    end = tl.minimum(tl.maximum(tl.load(offsets + expert), 0), max_rows)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(start, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = (rows < end)[:, None] & (columns < width)[None, :]
        place = grad + rows[:, None].to(tl.int64) * grad_row + columns[None, :].to(tl.int64) * grad_column
        values = tl.load(place, mask=inside, other=0).to(tl.float32)
        if scale is not None:
            values *= tl.load(scale + rows, mask=rows < end, other=0).to(tl.float32)[:, None]
        total += values
    sums = tl.sum(total, 0)
    tl.store(out + expert.to(tl.int64) * width + columns, sums.to(out.dtype.element_ty), mask=columns < width)


@triton.jit(do_not_specialize=["max_rows"])
def bias_scale_grad_kernel(
    grad,
    bias,
    offsets,
    out,
    max_rows,
    num_experts,
    width,
    grad_row,
    grad_column,
    share,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    ends = _all_ends(offsets, num_experts, max_rows, GROUPS)
    live = tl.max(ends, 0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(live, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        total = tl.zeros([ROWS], tl.float32)
        for start in tl.range(0, width, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            inside = (rows < live)[:, None] & (columns < width)[None, :]
            place = grad + rows[:, None].to(tl.int64) * grad_row + columns[None, :].to(tl.int64) * grad_column
            values = tl.load(place, mask=inside, other=0).to(tl.float32)
            total += tl.sum(values * _bias_of(bias, rows, columns, ends, num_experts, width, inside), 1)
        tl.store(out + rows, (total * share).to(out.dtype.element_ty), mask=rows < live)


@triton.jit
def _all_ends(offsets, num_experts, max_rows, GROUPS: tl.constexpr):
    """Returns the ends of all experts' rows, at most max_rows; 0 for nonexistent experts."""
    group = tl.arange(0, GROUPS)
    return tl.minimum(tl.maximum(tl.load(offsets + group, mask=group < num_experts, other=0), 0), max_rows)


@triton.jit
def _bias_of(bias, rows, columns, ends, num_experts, width, inside):
    """Returns the bias of each row's expert: [ROWS, COLUMNS], fp32."""
    exists = tl.arange(0, ends.shape[0]) < num_experts
    expert = tl.sum(((rows[:, None] >= ends[None, :]) & exists[None, :]).to(tl.int32), 1)
    return tl.load(bias + expert[:, None].to(tl.int64) * width + columns[None, :], mask=inside, other=0).to(tl.float32)


def add_expert_bias(
    rows: Tensor,
    bias: Tensor,
    *,
    scale: Tensor | None,
    offsets: Tensor,
    share: float,
    needed: Tensor | None = None,
    rows_table: Tensor | None = None,
    rows_sizes: Sequence[int] = (),
) -> None:
    """Adds the bias of each row's expert in place, times the row's scale and `share`, unless `needed` is 0.

    rows: [C, O], may be in pages; bias: [e, O]; scale: [C] or None; one of fp32, bf16 and fp16. needed: [1], int64;
    None means always. Raises ValueError for a table and sizes that do not fit the operands.
    """
    # Viewed as int32, low word first, because the last offset is int32.
    words = offsets[-1:] if needed is None else needed.view(torch.int32)
    pages = (rows_table, rows_sizes)
    add_bias_if(words, rows, bias=bias, scale=scale, offsets=offsets, share=share, pages=pages)


def add_bias_if(
    needed: Tensor,
    rows: Tensor,
    *,
    bias: Tensor,
    scale: Tensor | None,
    offsets: Tensor,
    share: float,
    pages: Paging = NO_PAGES,
) -> None:
    """Runs add_expert_bias unless `needed` is 0.

    needed: [1], int32; rows: [C, O]; bias: [e, O]; scale: [C] or None; float dtypes. pages: table and sizes of rows.
    """
    max_rows, pitch, page = rows.shape[0], rows.stride(0), 0
    if pages[0] is not None or pages[1]:
        num_rows = None if scale is None else scale.shape[0]
        layout = row_layout("rows", rows, pages, num_rows=num_rows, width=bias.shape[1])
        max_rows, pitch, page = layout.num_rows, layout.width, layout.page
    launch, tile_rows, column_tiles = _addition(rows.dtype, bias.dtype, bias.shape, pitch, share, page)
    launch(-(-max_rows // tile_rows) * column_tiles, (rows, bias, scale, offsets, needed, pages[0]), (max_rows,))


@functools.lru_cache(MAX_PREPARED)
def _addition(
    dtype: torch.dtype, bias_dtype: torch.dtype, shape: torch.Size, pitch: int, share: float, page: int
) -> tuple[PreparedLaunch, int, int]:
    """Returns a launch of add_bias_kernel, the rows of a tile, and the number of tiles in a row.

    shape: [e, O]; page: rows of a page, 0 without pages.
    """
    check_dtypes(dtype, bias_dtype)
    (experts, width), tile = shape, _tile(shape[1])
    sizes = {"num_experts": experts, "width": width, "pitch": pitch, "share": share}
    fixed = {**sizes, "GROUPS": next_power_of_2(experts), **tile, "ROWS_PAGE": page}
    launch = PreparedLaunch(add_bias_kernel, fixed, options=_WARPS, per_processor=_PROGRAMS.at_most_launched)
    return launch, tile["ROWS"], -(-width // tile["COLUMNS"])


def expert_bias_grad(grad: Tensor, *, scale: Tensor | None, offsets: Tensor, out: Tensor) -> None:
    """Sums the gradient over each expert's rows, times their scale.

    grad: [C, O], any strides; scale: [C] or None; out: [e, O], float dtypes.
    """
    max_rows, width = grad.shape
    launch, column_tiles = _sum_of_rows(grad.dtype, out.dtype, width, *grad.stride())
    launch(len(out) * column_tiles, (grad, scale, offsets, out), (max_rows,))


@functools.lru_cache(MAX_PREPARED)
def _sum_of_rows(
    dtype: torch.dtype, out_dtype: torch.dtype, width: int, grad_row: int, grad_column: int
) -> tuple[PreparedLaunch, int]:
    """Returns a launch of bias_grad_kernel, and the number of tiles in a row."""
    check_dtypes(dtype, out_dtype)
    tile = {"ROWS": 16, "COLUMNS": 128}
    fixed = {"width": width, "grad_row": grad_row, "grad_column": grad_column, **tile}
    return PreparedLaunch(bias_grad_kernel, fixed, options=_WARPS), -(-width // tile["COLUMNS"])


def expert_bias_scale_grad(grad: Tensor, bias: Tensor, *, offsets: Tensor, share: float, out: Tensor) -> None:
    """Computes the gradient of each live row's scale: `share` times the dot product of its gradient and its bias.

    grad: [C, O], any strides; bias: [e, O]; out: [C]; float dtypes.
    """
    max_rows = grad.shape[0]
    launch, tile_rows = _scale_gradient(grad.dtype, bias.dtype, bias.shape, grad.stride(), share)
    launch(-(-max_rows // tile_rows), (grad, bias, offsets, out), (max_rows,))


@functools.lru_cache(MAX_PREPARED)
def _scale_gradient(
    dtype: torch.dtype, bias_dtype: torch.dtype, shape: torch.Size, strides: tuple[int, int], share: float
) -> tuple[PreparedLaunch, int]:
    """Returns a launch of bias_scale_grad_kernel, and the rows of a tile. shape: [e, O]; strides: of the gradient."""
    check_dtypes(dtype, bias_dtype)
    (experts, width), tile = shape, _tile(shape[1])
    sizes = {"num_experts": experts, "width": width, "grad_row": strides[0], "grad_column": strides[1], "share": share}
    fixed = {**sizes, "GROUPS": next_power_of_2(experts), **tile}
    launch = PreparedLaunch(bias_scale_grad_kernel, fixed, options=_WARPS, per_processor=_PROGRAMS.at_most_launched)
    return launch, tile["ROWS"]


def _tile(width: int) -> dict[str, int]:
    columns = min(256, next_power_of_2(width))
    return {"ROWS": _ELEMENTS // columns, "COLUMNS": columns}


def residencies(num_warps: int) -> Mapping[str, Residency]:
    """Maps each kernel's name to the residency that its launcher assumes. bias_grad_kernel has one program per tile."""
    assert num_warps == _WARPS["num_warps"]
    return {"add_bias_kernel": _PROGRAMS, "bias_grad_kernel": Residency(), "bias_scale_grad_kernel": _PROGRAMS}


def compile_cases() -> Iterator[CompileCase]:
    """Yields compile cases with fp32 scales and without scales, which are of rows in pages, in bf16 and fp32."""
    for name in ("bf16", "fp32"):
        data, size = f"*{name}:16", "i32:16"
        many = {"num_experts": "i32", "max_rows": "i32", "width": size, "GROUPS": 32, **_tile(4096)}
        strides = {"grad_row": size, "grad_column": 1}
        for scale, words in ((None, ""), ("*fp32:16", ", scaled")):
            yield compile_case(
                add_bias_kernel,
                f"add_expert_bias, {name}{words or ', in pages'}",
                options=_WARPS,
                rows_at=data,
                bias=data,
                scale=scale,
                offsets="*i32:16",
                needed="*i32",
                rows_table=None if scale else "*i64",
                pitch=size,
                share="fp32",
                ROWS_PAGE=0 if scale else 96,
                **many,
            )
            yield compile_case(
                bias_grad_kernel,
                f"expert_bias_grad, {name}{words}",
                options=_WARPS,
                grad=data,
                scale=scale,
                offsets="*i32:16",
                out=data,
                max_rows="i32",
                width=size,
                ROWS=16,
                COLUMNS=128,
                **strides,
            )
        yield compile_case(
            bias_scale_grad_kernel,
            f"expert_bias_scale_grad, {name}",
            options=_WARPS,
            grad=data,
            bias=data,
            offsets="*i32:16",
            out="*fp32:16",
            share="fp32",
            **strides,
            **many,
        )
