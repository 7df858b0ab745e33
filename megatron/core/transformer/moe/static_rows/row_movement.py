"""Rows into a static buffer and back, as autograd functions that read no row beyond the live ones.

Each is the other's gradient. Shapes: T tokens, K choices, C rows of the buffer, of which the first R are live, W wide.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.transformer.moe.static_rows.row_operators import ops


def gather_rows(x: Tensor, source_of_row: Tensor, *, row_of_slot: Tensor, num_rows: Tensor) -> Tensor:
    """Row r of the result is x[source_of_row[r]], or zeros where that is -1; rows from R on hold any bytes.

    x: [T, W], any float dtype; source_of_row: [C], int64; row_of_slot: [T, K], int64, the inverse, -1 for none;
    num_rows: [1], int64; all on one device. Returns [C, W], x's dtype.
    """
    return _Gather.apply(x, source_of_row, row_of_slot, num_rows)


def sum_rows(rows: Tensor, row_of_slot: Tensor, *, source_of_row: Tensor, num_rows: Tensor) -> Tensor:
    """Row t of the result is the sum of rows[row_of_slot[t, k]] over the k whose entry is not -1.

    rows: [C, W], any float dtype, half precision is summed in fp32; row_of_slot, source_of_row, num_rows: as in
    gather_rows. Returns [T, W], the rows' dtype. In backward, rows from R on get a gradient of any bytes.
    """
    return _Sum.apply(rows, row_of_slot, source_of_row, num_rows)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source_of_row: Tensor, row_of_slot: Tensor, num_rows: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_slot)
        return _gather(x, source_of_row, num_rows=num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (row_of_slot,) = ctx.saved_tensors
        return _sum(grad, row_of_slot), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_of_slot: Tensor, source_of_row: Tensor, num_rows: Tensor) -> Tensor:
        ctx.save_for_backward(source_of_row, num_rows)
        return _sum(rows, row_of_slot)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        source_of_row, num_rows = ctx.saved_tensors
        return _gather(grad, source_of_row, num_rows=num_rows), None, None, None


def _gather(x: Tensor, source_of_row: Tensor, *, num_rows: Tensor) -> Tensor:
    out = x.new_empty(len(source_of_row), x.shape[1])
    ops.gather_rows(x.contiguous(), source_of_row, num_rows=num_rows, out=out)
    return out


def _sum(rows: Tensor, row_of_slot: Tensor) -> Tensor:
    summed: Tensor = ops.sum_rows(rows.contiguous(), row_of_slot)
    return summed
