"""The biases of experts over rows sorted by expert, as an autograd function; kernels: see bias_operators.py."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.transformer.moe.paged_stash.bias_operators import ops
from megatron.core.transformer.moe.paged_stash.saved_tensors import say_rows_and_others


def add_expert_bias(
    rows: Tensor, bias: Tensor, *, offsets: Tensor, scale: Tensor | None = None, share: float = 1.0
) -> Tensor:
    """Adds to each live row, in place, its expert's bias, times the row's scale and `share`.

    rows: [C, O], float dtype, fp64 on the CPU only; bias: [e, O], the rows' dtype; offsets: [e], int32, same device:
    where each expert's rows end, the last one is the number of live rows; scale: [C], any float dtype, or None.
    share: where several ranks add a part of a bias that each has whole: the gradient of the bias is that of all of it.
    Returns the rows. Saves scale, and bias where scale needs a gradient. Raises ValueError if shapes or dtypes differ.
    """
    if rows.dim() != 2 or bias.shape != (len(offsets), rows.shape[1]) or rows.dtype != bias.dtype:
        given = f"rows {list(rows.shape)} {rows.dtype}, bias {list(bias.shape)} {bias.dtype}, offsets {len(offsets)}"
        raise ValueError(f"{given}: must be [C, O], [e, O] of one dtype and [e]")
    say_rows_and_others([rows] if scale is None else [rows, scale], [bias, offsets])
    summed: Tensor = _AddExpertBias.apply(rows, bias, scale, offsets, share)
    return summed


class _AddExpertBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, scale: Tensor | None, offsets: Tensor, share: float) -> Tensor:
        ops.add_expert_bias(rows, bias, scale=scale, offsets=offsets, share=share)
        ctx.mark_dirty(rows)
        ctx.share, ctx.bias_layout = share, torch.empty_like(bias, device="meta")
        ctx.save_for_backward(bias if ctx.needs_input_grad[2] else None, scale, offsets)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        bias, scale, offsets = ctx.saved_tensors
        grad_bias = grad_scale = None
        if ctx.needs_input_grad[1]:
            grad_bias = torch.empty_like(ctx.bias_layout, device=grad.device)
            ops.expert_bias_grad(grad, scale=scale, offsets=offsets, out=grad_bias)
        if bias is not None:
            assert scale is not None, "a gradient of what was not given"
            grad_scale = torch.empty_like(scale)
            ops.expert_bias_scale_grad(grad, bias, offsets=offsets, share=ctx.share, out=grad_scale)
        return grad, grad_bias, grad_scale, None, None
