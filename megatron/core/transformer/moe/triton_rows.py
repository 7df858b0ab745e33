"""Triton kernels of static_rows.py's operators, and their launchers, which have the operators' names.

Kernels are not specialized on numbers of rows, so another number causes no compilation.
"""
# mypy: allow-untyped-defs

from collections.abc import Iterator, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.triton_compile import CompileCase, Residency, compile_case

# Elements that a program moves per iteration: 16 bytes for each thread of 4 warps in half precision.
_TILE = 1024
_WARPS = {"num_warps": 4}


@triton.jit(do_not_specialize_on_alignment=["num_rows"])
def gather_kernel(x, source_of_row, num_rows, out, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_live = row < tl.load(num_rows)
    source = tl.load(source_of_row + row, mask=is_live, other=-1)
    is_there = source >= 0
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (column < width)[None, :]
        values = tl.load(x + source[:, None] * width + column[None, :], mask=is_there[:, None] & inside, other=0)
        place = row.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(out + place, values, mask=is_live[:, None] & inside)


@triton.jit(do_not_specialize=["num_tokens", "choices"])
def sum_kernel(rows, row_of_slot, out, num_tokens, choices, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_token = token < num_tokens
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < width)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for choice in range(choices):
        row = tl.load(row_of_slot + token * choices + choice, mask=is_token, other=-1)
        mask = (row >= 0)[:, None] & inside
        total += tl.load(rows + row[:, None] * width + column[None, :], mask=mask, other=0).to(tl.float32)
    place = token.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_token[:, None] & inside)


def gather_rows(x: Tensor, source_of_row: Tensor, *, num_rows: Tensor, out: Tensor) -> None:
    """Writes out[r] = x[source_of_row[r]], zeros for -1, for live rows only.

    x: [T, W], any dtype; source_of_row: [C], int64; num_rows: [1], int64; out: [C, W], x's dtype.
    """
    if out.numel() == 0:
        return
    tile = _tile(out.shape[1])
    with torch.accelerator.device_index(x.device.index):
        gather_kernel[(triton.cdiv(out.shape[0], tile["ROWS"]),)](
            x, source_of_row, num_rows, out, out.shape[1], **tile, **_WARPS
        )


def sum_rows(rows: Tensor, row_of_slot: Tensor) -> Tensor:
    """Sums rows[row_of_slot[t, k]] over k in fp32, leaving out -1.

    rows: [C, W], fp32, bf16 or fp16; row_of_slot: [T, K], int64. Returns [T, W], same dtype. Raises ValueError for
    another dtype.
    """
    if rows.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{rows.dtype} on {rows.device}: only fp32, bf16 and fp16 have kernels")
    (num_tokens, choices), width = row_of_slot.shape, rows.shape[1]
    out = rows.new_empty(num_tokens, width)
    if out.numel():
        tile = _tile(width)
        grid = (triton.cdiv(num_tokens, tile["ROWS"]), triton.cdiv(width, tile["COLUMNS"]))
        with torch.accelerator.device_index(rows.device.index):
            sum_kernel[grid](rows, row_of_slot, out, num_tokens, choices, width, **tile, **_WARPS)
    return out


def residencies(num_warps: int) -> Mapping[str, Residency]:
    """Returns the residency that the launchers assume, by kernel: none, because each tile has a program."""
    assert num_warps == _WARPS["num_warps"]
    return dict.fromkeys(("gather_kernel", "sum_kernel"), Residency())


def compile_cases() -> Iterator[CompileCase]:
    """Yields wide rows in half precision, and weights, which are fp32 rows of one element."""
    for name, width, tile in (("bf16", "i32:16", _tile(4096)), ("fp32", 1, _tile(1))):
        data = f"*{name}:16"
        yield compile_case(
            gather_kernel,
            f"gather_rows, {name}, width {width}",
            options=_WARPS,
            x=data,
            source_of_row="*i64:16",
            num_rows="*i64",
            out=data,
            width=width,
            **tile,
        )
        yield compile_case(
            sum_kernel,
            f"sum_rows, {name}, width {width}",
            options=_WARPS,
            rows=data,
            row_of_slot="*i64:16",
            out=data,
            num_tokens="i32",
            choices="i32",
            width=width,
            **tile,
        )


def _tile(width: int) -> dict[str, int]:
    columns = min(_TILE, triton.next_power_of_2(width))
    return {"ROWS": _TILE // columns, "COLUMNS": columns}
