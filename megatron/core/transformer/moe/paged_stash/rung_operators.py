"""Operators paged_stash::* that compute gate_up and act, in forward and again in backward: schemas and CPU versions.

Shapes: C rows of the buffers, of which the first R are live, sorted by expert; e experts; H hidden; F ffn; O any width;
r the width of low-rank adapters. No row from R on is read or written. act_from_gate_up, gate_up_from_x, add_low_rank:
the rungs, which do nothing where needed [1], int64, is 0. CUDA runs triton_rungs.py, which allocates nothing and reads
nothing from the device, so that a CUDA graph can hold it.
"""

import importlib.util

import torch
from torch import Tensor

from megatron.core.transformer.moe.paged_stash.bias_operators import add_expert_bias
from megatron.core.transformer.moe.paged_stash.expert_activations import ActivationForm, act_gradient_rows, act_rows
from megatron.core.transformer.moe.paged_stash.operator_library import Register, operator

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from megatron.core.transformer.moe.paged_stash import triton_rungs

# What callers use: ops.act_from_gate_up and the others of this file.
ops = torch.ops.paged_stash

_ACT = "Tensor gate_up, Tensor? scale, *, Tensor num_rows"
# What act is: see expert_activations.ActivationForm.
_FORM = "str activation, float? clamp=None, float offset=0.0"
_GEMM = "Tensor x, Tensor weight, *, Tensor offsets"


def _operator(arguments: str) -> Register:
    return operator("paged_stash", f"({arguments}) -> ()", cuda=vars(triton_rungs) if HAS_TRITON else {})


@_operator(f"{_ACT}, Tensor needed, Tensor(a!) out, {_FORM}")
def act_from_gate_up(
    gate_up: Tensor,
    scale: Tensor | None,
    *,
    num_rows: Tensor,
    needed: Tensor,
    out: Tensor,
    activation: str,
    clamp: float | None = None,
    offset: float = 0.0,
) -> None:
    """act again, if needed; gate_up: [C, 2F] or [C, F], float dtype; scale: [C] or None; out: [C, F], same dtype."""
    if _is_set_sync(needed):
        rows = _live_rows_sync(num_rows, out)
        act_rows(gate_up, scale, rows=rows, out=out, form=ActivationForm(activation, clamp, offset))


@_operator(f"{_ACT}, Tensor(a!) out, {_FORM}")
def gated_activation(
    gate_up: Tensor,
    scale: Tensor | None,
    *,
    num_rows: Tensor,
    out: Tensor,
    activation: str,
    clamp: float | None = None,
    offset: float = 0.0,
) -> None:
    """act in forward; gate_up: [C, 2F] or [C, F], float dtype; scale: [C] or None; out: [C, F], same dtype."""
    rows = _live_rows_sync(num_rows, out)
    act_rows(gate_up, scale, rows=rows, out=out, form=ActivationForm(activation, clamp, offset))


@_operator(
    "Tensor grad, Tensor gate_up, *, Tensor? scale, Tensor num_rows, "
    f"Tensor(a!) grad_gate_up, Tensor(b!)? grad_scale, {_FORM}"
)
def gated_activation_backward(
    grad: Tensor,
    gate_up: Tensor,
    *,
    scale: Tensor | None,
    num_rows: Tensor,
    grad_gate_up: Tensor,
    grad_scale: Tensor | None,
    activation: str,
    clamp: float | None = None,
    offset: float = 0.0,
) -> None:
    """Gradients of gate_up and scale, of their shapes and dtypes; grad: [C, F], any strides, gate_up's dtype."""
    rows = _live_rows_sync(num_rows, grad)
    act_gradient_rows(
        grad,
        gate_up,
        scale=scale,
        rows=rows,
        grad_gate_up=grad_gate_up,
        grad_scale=grad_scale,
        form=ActivationForm(activation, clamp, offset),
    )


@_operator(f"{_GEMM}, Tensor needed, Tensor(a!) out, Tensor? bias=None")
def gate_up_from_x(
    x: Tensor, weight: Tensor, *, offsets: Tensor, needed: Tensor, out: Tensor, bias: Tensor | None = None
) -> None:
    """x times each row's expert's weight again, plus its bias, if needed; 2 R H O operations then.

    x: [C, H]; weight: [e, H, O]; bias: [e, O] or None; out: [C, O]; one float dtype.
    """
    if _is_set_sync(needed):
        _multiply(x, weight, ends=_ends_sync(offsets, x), out=out)
        if bias is not None:
            add_expert_bias(out, bias, scale=None, offsets=offsets, share=1.0)


@_operator("Tensor(a!) rows, Tensor low, *, Tensor weight, Tensor offsets, float scale, Tensor? needed=None")
def add_low_rank(
    rows: Tensor, low: Tensor, *, weight: Tensor, offsets: Tensor, scale: float, needed: Tensor | None = None
) -> None:
    """Adds to each row, in place, scale times `low` times its expert's weight, if needed; None: it is.

    rows: [C, O]; low: [C, r]; weight: [e, r, O]; one float dtype.
    """
    if needed is not None and not _is_set_sync(needed):
        return
    ends = _ends_sync(offsets, low)
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end > start:
            part = rows[start:end]
            torch.addmm(part, low[start:end], weight[expert], alpha=scale, out=part)


@_operator(f"{_GEMM}, Tensor(a!) out")
def grouped_gemm(x: Tensor, weight: Tensor, *, offsets: Tensor, out: Tensor) -> None:
    """x times each row's expert's weight in forward; x: [C, H]; weight: [e, H, O]; out: [C, O]; one float dtype."""
    _multiply(x, weight, ends=_ends_sync(offsets, x), out=out)


@_operator("Tensor x, Tensor grad, *, Tensor offsets, Tensor(a!) out")
def grouped_gemm_weight_grad(x: Tensor, grad: Tensor, *, offsets: Tensor, out: Tensor) -> None:
    """Each expert's x^T grad, zeros for one without rows; x: [C, H]; grad: [C, O]; out: [e, H, O]; one float dtype."""
    ends = _ends_sync(offsets, x)
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        torch.mm(x[start:end].t(), grad[start:end], out=out[expert])


def _multiply(x: Tensor, weight: Tensor, *, ends: list[int], out: Tensor) -> None:
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end > start:
            torch.mm(x[start:end], weight[expert], out=out[start:end])


def _is_set_sync(flag: Tensor) -> bool:
    """NOTE: reads memory of the CPU, where this implementation runs, as the next two functions do."""
    return bool(flag.item())


def _live_rows_sync(num_rows: Tensor, rows: Tensor) -> int:
    return max(0, min(int(num_rows.item()), rows.shape[0]))


def _ends_sync(offsets: Tensor, rows: Tensor) -> list[int]:
    """Where each expert's rows end, none beyond the buffer; [0] if there is no expert."""
    return offsets.clamp(0, rows.shape[0]).tolist() or [0]
