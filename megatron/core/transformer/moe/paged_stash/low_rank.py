"""What a low-rank adapter of each expert adds to rows sorted by expert, as an autograd function.

Kernels: see rung_operators.py. Shapes: C rows of the buffers; e experts; r the adapters' width; O any width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.transformer.moe.paged_stash.rung_operators import ops
from megatron.core.transformer.moe.paged_stash.saved_tensors import say_rows_and_others


def add_low_rank(rows: Tensor, low: Tensor, *, weight: Tensor, offsets: Tensor, scale: float) -> Tensor:
    """Adds to each live row, in place, scale times `low` times its expert's weight: the wide half of an adapter.

    rows: [C, O], float dtype, fp64 on the CPU only; low: [C, r], what the narrow half made, and weight: [e, r, O], of
    the rows' dtype; offsets: [e], int32, same device: where each expert's rows end, the last one is the number of live
    rows. Returns the rows. Saves low and weight, each only if needed. Raises ValueError if shapes or dtypes differ.
    """
    fits = weight.shape == (len(offsets), low.shape[-1], rows.shape[-1]) and low.shape[:-1] == rows.shape[:-1]
    if rows.dim() != 2 or not fits or not rows.dtype == low.dtype == weight.dtype:
        given = [f"{name} {list(t.shape)} {t.dtype}" for name, t in (("rows", rows), ("low", low), ("weight", weight))]
        raise ValueError(f"{', '.join(given)}, offsets {len(offsets)}: must be [C, O], [C, r], [e, r, O], [e]")
    say_rows_and_others([rows, low], [weight, offsets])
    summed: Tensor = _AddLowRank.apply(rows, low, weight, offsets, scale)
    return summed


class _AddLowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, low: Tensor, weight: Tensor, offsets: Tensor, scale: float) -> Tensor:
        ops.add_low_rank(rows, low, weight=weight, offsets=offsets, scale=scale)
        ctx.mark_dirty(rows)
        needs_low, needs_weight = ctx.needs_input_grad[1:3]
        ctx.scale, ctx.weight_layout = scale, torch.empty_like(weight, device="meta")
        ctx.save_for_backward(low if needs_weight else None, weight if needs_low else None, offsets)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        low, weight, offsets = ctx.saved_tensors
        grad_low = grad_weight = None
        if weight is not None:
            grad_low = grad.new_empty(grad.shape[0], weight.shape[1])
            ops.grouped_gemm(grad, weight.transpose(1, 2), offsets=offsets, out=grad_low)
            # Rows that are not live hold any bytes, times the scale too.
            grad_low.mul_(ctx.scale)
        if low is not None:
            grad_weight = torch.empty_like(ctx.weight_layout, device=grad.device)
            ops.grouped_gemm_weight_grad(low, grad, offsets=offsets, out=grad_weight)
            grad_weight.mul_(ctx.scale)
        return grad, grad_low, grad_weight, None, None
