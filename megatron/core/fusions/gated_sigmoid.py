"""GatedSigmoid: gate * sigmoid(gain * gate) * (up + offset), optionally clamped and weighted per row.

It saves only its input for backward. SwiGLU under the names that Megatron users import is in fused_bias_swiglu.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.autograd import PlainFunction, first_order
from megatron.core.device import RowChunks

# Sizes of the chunks of rows that are processed together. On the CPU, a chunk's temporaries fit in the shared cache. On
# a GPU, there are only a few chunks.
_CHUNKS = RowChunks(cpu_elements=1 << 19, gpu_elements=1 << 26)


@dataclass(frozen=True)
class GatedSigmoid:
    """Gated activation; SwiGLU by default.

    gain: 1 gives SiLU. clamp: upper bound of gate, and of the magnitude of up; None means no limit. offset: added to up
    after the clamp.
    """

    gain: float = 1.0
    clamp: float | None = None
    offset: float = 0.0

    def __call__(self, gate_up: Tensor, weights: Tensor | None) -> Tensor:
        """Computes the activation; gate_up: [*, 2F], gate before up, any float dtype; weights: [*, 1] or None.

        weights are fp32 or of the same dtype. Returns [*, F], same dtype. Half-precision inputs are computed in fp32
        and rounded once.
        """
        # One weight for each of the R rows.
        per_row = weights if weights is None or weights.dim() == 2 else weights.reshape(-1, 1)
        act: Tensor = _GatedSigmoid.apply(gate_up, per_row, self)
        return act

    def limited(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Applies the clamp and the offset to gate and up: [C, F] each, fp32 or fp64 -> same shapes and dtype."""
        if self.clamp is not None:
            gate, up = gate.clamp(max=self.clamp), up.clamp(min=-self.clamp, max=self.clamp)
        return gate, up + self.offset if self.offset else up

    def value(self, gate: Tensor, *, out: Tensor) -> Tensor:
        """Writes gate * sigmoid(gain * gate) to `out`, which may be `gate` itself; both [C, F], fp32 or fp64."""
        if self.gain == 1:
            return torch.ops.aten.silu.out(gate, out=out)
        return torch.mul(gate, torch.sigmoid(self.gain * gate), out=out)

    def backward(self, grad: Tensor, *, gate: Tensor, up: Tensor, out_gate: Tensor, out_up: Tensor) -> None:
        """Writes the gradients of value(gate) * up to out_gate and out_up.

        All tensors: [C, F], one dtype, fp32 or fp64.
        """
        sigmoid = torch.sigmoid(gate if self.gain == 1 else self.gain * gate)
        value = gate * sigmoid
        torch.mul(grad, value, out=out_up)
        # d value / d gate = sigmoid + gain (value - value * sigmoid)
        torch.add(sigmoid, value, alpha=self.gain, out=out_gate).addcmul_(value, sigmoid, value=-self.gain)
        out_gate.mul_(torch.mul(grad, up, out=value))

    def stop_clamped(self, out_gate: Tensor, out_up: Tensor, *, gate: Tensor, up: Tensor) -> None:
        """Zeroes the gradients of clamped values; all [C, F], one dtype; gate and up: values before the clamp."""
        if self.clamp is not None:
            out_gate.masked_fill_(gate > self.clamp, 0)
            out_up.masked_fill_(up.abs() > self.clamp, 0)


class _GatedSigmoid(PlainFunction):
    """Autograd function that saves only gate_up and the weights; backward recomputes the sigmoid."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor | None, unit: GatedSigmoid) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.unit = unit
        rows, ffn = gate_up.reshape(-1, gate_up.shape[-1]), gate_up.shape[-1] // 2  # [R, 2F]
        act = torch.empty(rows.shape[0], ffn, dtype=gate_up.dtype, device=gate_up.device)
        for chunk in _CHUNKS.of(rows):
            gate, up = unit.limited(*_halves(rows[chunk]))
            out = _destination(act[chunk], gate.dtype)
            unit.value(gate, out=out).mul_(up)
            if weights is not None:
                out.mul_(weights[chunk])
            _write(act[chunk], out)
        return act.view(*gate_up.shape[:-1], ffn)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_act: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        gate_up, weights = ctx.saved_tensors
        unit: GatedSigmoid = ctx.unit
        rows, ffn = gate_up.reshape(-1, gate_up.shape[-1]), gate_up.shape[-1] // 2  # [R, 2F]
        grads = grad_act.reshape(-1, ffn)
        grad_rows = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        grad_weights = None if weights is None else torch.empty_like(weights)
        for chunk in _CHUNKS.of(rows):
            given_gate, given_up = _halves(rows[chunk])
            gate, up = unit.limited(given_gate, given_up)
            grad = grads[chunk].to(gate.dtype)
            out_gate = _destination(grad_rows[chunk, :ffn], gate.dtype)
            out_up = _destination(grad_rows[chunk, ffn:], gate.dtype)
            unit.backward(grad, gate=gate, up=up, out_gate=out_gate, out_up=out_up)
            if grad_weights is not None:
                grad_weights[chunk] = (out_up * up).sum(-1, keepdim=True)
                out_gate.mul_(weights[chunk])
                out_up.mul_(weights[chunk])
            unit.stop_clamped(out_gate, out_up, gate=given_gate, up=given_up)
            _write(grad_rows[chunk, :ffn], out_gate)
            _write(grad_rows[chunk, ffn:], out_up)
        return grad_rows.view(gate_up.shape), grad_weights, None


def _destination(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `rows` if it has the compute dtype, else a buffer, so that half precision is rounded once."""
    return rows if rows.dtype == dtype else torch.empty(rows.shape, dtype=dtype, device=rows.device)


def _write(rows: Tensor, values: Tensor) -> None:
    if rows.dtype != values.dtype:
        rows.copy_(values)


def _halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns gate and up of gate_up rows [C, 2F], in fp32 if the rows are in half precision."""
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    ffn = rows.shape[-1] // 2
    return rows[:, :ffn], rows[:, ffn:]
