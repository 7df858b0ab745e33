"""SwiGLU, optionally weighted per row, that keeps only its input for backward; other activations are plain torch."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.device import RowChunks

# Rows worked on together: on the CPU the temporaries of a chunk stay in the shared cache, on a GPU they stay few.
_CHUNKS = RowChunks(cpu_elements=1 << 19, gpu_elements=1 << 26)


def bias_swiglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """silu(gate) * up of input + bias.

    input: [*, 2F], gate before up, any float dtype; bias: [2F] or None. Returns [*, F], same dtype.
    """
    gate_up = input if bias is None else input + bias
    return _SwiGLU.apply(gate_up, None)


def weighted_bias_swiglu_impl(input: Tensor, bias: Tensor | None, weights: Tensor) -> Tensor:
    """silu(gate) * up * weight of input + bias.

    input: [R, 2F], gate before up, any float dtype; bias: [2F] or None; weights: [R, 1], fp32 or the input's dtype.
    Returns [R, F], the input's dtype.
    """
    gate_up = input if bias is None else input + bias
    return _SwiGLU.apply(gate_up, weights)


class _SwiGLU(torch.autograd.Function):
    """Saves gate_up and the weights; the sigmoid is computed again in backward."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        rows, ffn = gate_up.reshape(-1, gate_up.shape[-1]), gate_up.shape[-1] // 2  # [R, 2F]
        act = torch.empty(rows.shape[0], ffn, dtype=gate_up.dtype, device=gate_up.device)
        for chunk in _CHUNKS.of(rows):
            gate, up = _halves(rows[chunk])
            out = _destination(act[chunk], gate.dtype)
            torch.ops.aten.silu.out(gate, out=out).mul_(up)
            if weights is not None:
                out.mul_(weights[chunk])
            _write(act[chunk], out)
        return act.view(*gate_up.shape[:-1], ffn)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_act: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate_up, weights = ctx.saved_tensors
        rows, ffn = gate_up.reshape(-1, gate_up.shape[-1]), gate_up.shape[-1] // 2  # [R, 2F]
        grads = grad_act.reshape(-1, ffn)
        grad_rows = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        grad_weights = None if weights is None else torch.empty_like(weights)
        for chunk in _CHUNKS.of(rows):
            gate, up = _halves(rows[chunk])
            grad = grads[chunk].to(gate.dtype)
            out_gate = _destination(grad_rows[chunk, :ffn], gate.dtype)
            out_up = _destination(grad_rows[chunk, ffn:], gate.dtype)
            _swiglu_backward(grad, gate=gate, up=up, out_gate=out_gate, out_up=out_up)
            if grad_weights is not None:
                grad_weights[chunk] = (out_up * up).sum(-1, keepdim=True)
                out_gate.mul_(weights[chunk])
                out_up.mul_(weights[chunk])
            _write(grad_rows[chunk, :ffn], out_gate)
            _write(grad_rows[chunk, ffn:], out_up)
        return grad_rows.view(gate_up.shape), grad_weights


def _swiglu_backward(grad: Tensor, *, gate: Tensor, up: Tensor, out_gate: Tensor, out_up: Tensor) -> None:
    """Writes the gradients of silu(gate) * up; all [C, F], one dtype."""
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    torch.mul(grad, silu, out=out_up)
    # d silu / d gate = sigmoid + silu - silu * sigmoid
    torch.add(sigmoid, silu, out=out_gate).addcmul_(silu, sigmoid, value=-1)
    out_gate.mul_(torch.mul(grad, up, out=silu))


def _destination(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """`rows` itself where it has the dtype of the arithmetic; else a buffer, so that half precision is rounded once."""
    return rows if rows.dtype == dtype else torch.empty(rows.shape, dtype=dtype, device=rows.device)


def _write(rows: Tensor, values: Tensor) -> None:
    if rows.dtype != values.dtype:
        rows.copy_(values)


def _halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up of gate_up rows [C, 2F], in fp32 where the rows are in half precision."""
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    ffn = rows.shape[-1] // 2
    return rows[:, :ffn], rows[:, ffn:]
