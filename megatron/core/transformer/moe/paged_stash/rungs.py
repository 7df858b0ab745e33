"""Rungs, which compute dropped tensors of an expert group again, and the forward functions that run the same kernels.

The rungs are those of a ladder that a pool short of pages climbs down: first act is dropped, then gate_up.
Shapes: C rows of the buffers, of which the first R are live, sorted by expert; e experts; H hidden; F ffn; O any width.
Rows from R on are never read; in what comes out, gradients among it, they hold any bytes.
A rung and its forward function give the same bits, because they run one kernel on the same live rows: on the CPU a
matrix product for each expert, as torch.nn.functional.grouped_mm does there too; on CUDA a Triton kernel.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.transformer.moe.paged_stash.expert_activations import ActivationForm
from megatron.core.transformer.moe.paged_stash.rung_operators import ops
from megatron.core.transformer.moe.paged_stash.saved_tensors import say_rows_and_others

# Writes into `out` what was dropped, from its sources, if the flag `needed` is set: (out, needed, *sources).
Recompute = Callable[..., None]


def grouped_gemm(x: Tensor, weight: Tensor, *, offsets: Tensor) -> Tensor:
    """Rows of expert i times weight[i]; rows of no expert hold any bytes.

    x: [C, H]; weight: [e, H, O], any strides; both of one float dtype, fp64 on the CPU only; offsets: [e], int32, same
    device: where each expert's rows end. Returns [C, O], same dtype. Saves x and weight for backward, each only if
    needed. Raises ValueError if shapes or dtypes do not fit.
    """
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1] or offsets.shape != weight.shape[:1]:
        shapes = f"x {list(x.shape)}, weight {list(weight.shape)}, offsets {list(offsets.shape)}"
        raise ValueError(f"{shapes}: must be [C, H], [e, H, O], [e]")
    if x.dtype != weight.dtype or offsets.dtype != torch.int32:
        dtypes = f"x {x.dtype}, weight {weight.dtype}, offsets {offsets.dtype}"
        raise ValueError(f"{dtypes}: x and weight must have one dtype, offsets torch.int32")
    say_rows_and_others([x], [weight, offsets])
    product: Tensor = _GroupedGemm.apply(x, weight, offsets)
    say_rows_and_others([product], [])
    return product


def gated_activation(
    gate_up: Tensor,
    scale: Tensor | None,
    *,
    num_rows: Tensor,
    activation: str = "swiglu",
    clamp: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    """f(gate) * up * scale of the first num_rows rows, the others hold any bytes; plain activations have no `up`.

    gate_up: [C, 2F], gate before up (plain: [C, F]), any float dtype, fp64 on the CPU only; scale: [C], any float
    dtype, or None; num_rows: [1], int64, same device; activation: swiglu, geglu, geglu_tanh, quick_geglu, or plain
    silu, gelu, gelu_tanh, quick_gelu, squared_relu. clamp: of gated ones, the largest gate, and the largest up of
    either sign; offset: added to up after that. Returns [C, F], gate_up's dtype. Saves gate_up and scale for backward.
    Raises ValueError for an unknown activation, for a plain one with clamp or offset, for shapes that do not fit.
    """
    form = ActivationForm(activation, clamp, offset)
    if form.activation.is_gated and gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up {list(gate_up.shape)}: {activation} needs [C, 2F], an even width")
    if gate_up.dim() != 2 or (scale is not None and scale.shape != gate_up.shape[:1]):
        raise ValueError(f"gate_up {list(gate_up.shape)} must have two dimensions, and scale one value for each row")
    say_rows_and_others([gate_up] if scale is None else [gate_up, scale], [num_rows])
    act: Tensor = _GatedActivation.apply(gate_up, scale, num_rows, form)
    say_rows_and_others([act], [])
    return act


def recompute_gate_up(
    weight: Tensor, offsets: Tensor, *, bias: Tensor | None = None, low_rank: tuple[Tensor, float] | None = None
) -> Recompute:
    """For StashGroup.mark with sources (x,), or (x, low): computes gate_up again.

    weight: [e, H, O], x's dtype; offsets: [e], int32; bias: [e, O], x's dtype, or None; low_rank: what add_low_rank
    added, its weight [e, r, O] and its scale, or None without `low`; all on the device.
    """
    weight = weight.detach()
    if bias is not None:
        bias = bias.detach()
    if low_rank is not None:
        low_rank = low_rank[0].detach(), low_rank[1]

    def recompute(out: Tensor, needed: Tensor, *sources: Tensor) -> None:
        ops.gate_up_from_x(sources[0], weight, offsets=offsets, needed=needed, out=out, bias=bias)
        if low_rank is not None:
            ops.add_low_rank(out, sources[1], weight=low_rank[0], offsets=offsets, scale=low_rank[1], needed=needed)

    return recompute


def recompute_act(
    num_rows: Tensor, activation: str = "swiglu", *, clamp: float | None = None, offset: float = 0.0
) -> Recompute:
    """For StashGroup.mark with sources (gate_up,) or (gate_up, scale): computes act again. num_rows: [1], int64.

    The others are gated_activation's. Raises ValueError for an unknown activation.
    """
    options = _options(ActivationForm(activation, clamp, offset))

    def recompute(out: Tensor, needed: Tensor, *sources: Tensor) -> None:
        gate_up, *rest = sources
        (scale,) = rest or (None,)
        ops.act_from_gate_up(gate_up, scale, num_rows=num_rows, needed=needed, out=out, **options)

    return recompute


def _options(form: ActivationForm) -> dict[str, Any]:
    """As the operators take them."""
    return {"activation": form.name, "clamp": form.clamp, "offset": form.offset}


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        needs_grad_x, needs_grad_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_grad_weight else None, weight if needs_grad_x else None, offsets)
        # The gradient gets the weight's strides, transposed or not: it is then accumulated without a copy.
        ctx.weight_layout = torch.empty_like(weight, device="meta")
        out = x.new_empty(x.shape[0], weight.shape[2])
        ops.grouped_gemm(x, weight, offsets=offsets, out=out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, offsets = ctx.saved_tensors
        grad_x = grad_weight = None
        if weight is not None:
            grad_x = grad.new_empty(grad.shape[0], weight.shape[1])
            ops.grouped_gemm(grad, weight.transpose(1, 2), offsets=offsets, out=grad_x)
        if x is not None:
            grad_weight = torch.empty_like(ctx.weight_layout, device=x.device)
            ops.grouped_gemm_weight_grad(x, grad, offsets=offsets, out=grad_weight)
        return grad_x, grad_weight, None


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, scale: Tensor | None, num_rows: Tensor, form: ActivationForm) -> Tensor:
        ctx.save_for_backward(gate_up, scale, num_rows)
        ctx.form = form
        out = gate_up.new_empty(gate_up.shape[0], form.activation.width(gate_up))
        ops.gated_activation(gate_up, scale, num_rows=num_rows, out=out, **_options(form))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        gate_up, scale, num_rows = ctx.saved_tensors
        grad_gate_up = torch.empty_like(gate_up)
        grad_scale = torch.empty_like(scale) if ctx.needs_input_grad[1] else None
        ops.gated_activation_backward(
            grad,
            gate_up,
            scale=scale,
            num_rows=num_rows,
            grad_gate_up=grad_gate_up,
            grad_scale=grad_scale,
            **_options(ctx.form),
        )
        return grad_gate_up, grad_scale, None, None
