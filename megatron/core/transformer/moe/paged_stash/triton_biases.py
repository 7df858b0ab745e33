"""Triton kernels for the biases of experts, and their launchers under the names of the operators in bias_operators.py.

Shapes: max_rows rows of the buffers, sorted by expert; width columns. Arithmetic is in fp32. Loads of rows beyond the
live ones are masked: what lies there, which may be NaN, is never read.
"""
# mypy: allow-untyped-defs

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.triton_compile import CompileCase, compile_case

# Elements of one tile: 16 for each thread of 4 warps.
_ELEMENTS = 2048
_WARPS = {"num_warps": 4}


@triton.jit(do_not_specialize_on_alignment=["needed"])
def add_bias_kernel(
    rows_at,
    bias,
    scale,
    offsets,
    needed,
    num_experts,
    max_rows,
    width,
    pitch,
    share,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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
        place = rows_at + rows[:, None].to(tl.int64) * pitch + columns[None, :]
        values = tl.load(place, mask=inside, other=0).to(tl.float32) + addend
        tl.store(place, values.to(rows_at.dtype.element_ty), mask=inside)


@triton.jit
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
    """A program for each expert's COLUMNS columns: sums over its rows, in their order."""
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


@triton.jit
def bias_scale_grad_kernel(
    grad,
    bias,
    offsets,
    out,
    num_experts,
    max_rows,
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
    """Where rows of experts end, none beyond max_rows; 0 for an expert that does not exist."""
    group = tl.arange(0, GROUPS)
    return tl.minimum(tl.maximum(tl.load(offsets + group, mask=group < num_experts, other=0), 0), max_rows)


@triton.jit
def _bias_of(bias, rows, columns, ends, num_experts, width, inside):
    """[ROWS, COLUMNS], fp32: the bias of each row's expert."""
    exists = tl.arange(0, ends.shape[0]) < num_experts
    expert = tl.sum(((rows[:, None] >= ends[None, :]) & exists[None, :]).to(tl.int32), 1)
    return tl.load(bias + expert[:, None].to(tl.int64) * width + columns[None, :], mask=inside, other=0).to(tl.float32)


def add_expert_bias(rows: Tensor, bias: Tensor, *, scale: Tensor | None, offsets: Tensor, share: float) -> None:
    """Adds its expert's bias to each row, times its scale and `share`; rows: [C, O]; bias: [e, O]; scale: [C] or None;
    one of fp32, bf16 and fp16.
    """
    add_bias_if(offsets[-1:], rows, bias=bias, scale=scale, offsets=offsets, share=share)


def add_bias_if(
    needed: Tensor, rows: Tensor, *, bias: Tensor, scale: Tensor | None, offsets: Tensor, share: float
) -> None:
    """The same where needed [1], int32, is not 0; rows: [C, O]; bias: [e, O]; scale: [C] or None, float dtypes."""
    _refuse_what_no_kernel_takes(rows, bias)
    (max_rows, width), experts = rows.shape, len(bias)
    tile = _tile(width)
    tiles = triton.cdiv(max_rows, tile["ROWS"]) * triton.cdiv(width, tile["COLUMNS"])
    with torch.accelerator.device_index(rows.device.index):
        add_bias_kernel[(_programs(rows, tiles),)](
            rows,
            bias,
            scale,
            offsets,
            needed,
            experts,
            max_rows,
            width,
            rows.stride(0),
            share,
            GROUPS=triton.next_power_of_2(experts),
            **tile,
            **_WARPS,
        )


def expert_bias_grad(grad: Tensor, *, scale: Tensor | None, offsets: Tensor, out: Tensor) -> None:
    """The sum of each expert's rows of the gradient, times their scale.

    grad: [C, O], any strides; scale: [C] or None; out: [e, O], float dtypes.
    """
    _refuse_what_no_kernel_takes(grad, out)
    (max_rows, width), tile = grad.shape, {"ROWS": 16, "COLUMNS": 128}
    programs = len(out) * triton.cdiv(width, tile["COLUMNS"])
    with torch.accelerator.device_index(grad.device.index):
        bias_grad_kernel[(programs,)](grad, scale, offsets, out, max_rows, width, *grad.stride(), **tile, **_WARPS)


def expert_bias_scale_grad(grad: Tensor, bias: Tensor, *, offsets: Tensor, share: float, out: Tensor) -> None:
    """The gradient of each live row's scale; grad: [C, O], any strides; bias: [e, O]; out: [C]; float dtypes."""
    _refuse_what_no_kernel_takes(grad, bias)
    (max_rows, width), experts = grad.shape, len(bias)
    tile = _tile(width)
    with torch.accelerator.device_index(grad.device.index):
        bias_scale_grad_kernel[(_programs(grad, triton.cdiv(max_rows, tile["ROWS"])),)](
            grad,
            bias,
            offsets,
            out,
            experts,
            max_rows,
            width,
            *grad.stride(),
            share,
            GROUPS=triton.next_power_of_2(experts),
            **tile,
            **_WARPS,
        )


def _tile(width: int) -> dict[str, int]:
    columns = min(256, triton.next_power_of_2(width))
    return {"ROWS": _ELEMENTS // columns, "COLUMNS": columns}


def _refuse_what_no_kernel_takes(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{tensor.dtype} on {tensor.device}: only fp32, bf16 and fp16 have kernels")


def _programs(tensor: Tensor, tiles: int) -> int:
    """Programs to launch: as many as run at once, so that a rung that is not needed costs little; interpreted: two."""
    if tensor.device.type == "cpu":
        return 2
    device: Any = torch.get_device_module(tensor.device).get_device_properties(tensor.device)
    return max(1, min(tiles, 4 * device.multi_processor_count))


def compile_cases() -> Iterator[CompileCase]:
    """With and without scales, which are fp32."""
    for name in ("bf16", "fp32"):
        data, size = f"*{name}:16", "i32:16"
        many = {"num_experts": "i32", "max_rows": "i32", "width": size, "GROUPS": 32, **_tile(4096)}
        strides = {"grad_row": size, "grad_column": 1}
        for scale, words in ((None, ""), ("*fp32:16", ", scaled")):
            yield compile_case(
                add_bias_kernel,
                f"add_expert_bias, {name}{words}",
                options=_WARPS,
                rows_at=data,
                bias=data,
                scale=scale,
                offsets="*i32:16",
                needed="*i32",
                pitch=size,
                share="fp32",
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
