"""Operators paged_stash::* for the biases of experts over rows sorted by expert: schemas and CPU versions.

Shapes: C rows of the buffers, of which the first R are live; e experts; O any width. offsets [e], int32: where each
expert's rows end. No row from R on is read or written. Half precision is computed in fp32 and rounded once. CUDA runs
triton_biases.py, which allocates nothing and reads nothing from the device, so that a CUDA graph can hold it.
"""

import importlib.util
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.core.transformer.moe.paged_stash.operator_library import Register, operator

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from megatron.core.transformer.moe.paged_stash import triton_biases

# What callers use: ops.add_expert_bias and the others of this file.
ops = torch.ops.paged_stash


def _operator(arguments: str) -> Register:
    return operator("paged_stash", f"({arguments}) -> ()", cuda=vars(triton_biases) if HAS_TRITON else {})


@_operator("Tensor(a!) rows, Tensor bias, *, Tensor? scale, Tensor offsets, float share")
def add_expert_bias(rows: Tensor, bias: Tensor, *, scale: Tensor | None, offsets: Tensor, share: float) -> None:
    """Adds its expert's bias to each row, times the row's scale and `share`.

    rows: [C, O], float dtype; bias: [e, O], the rows' dtype; scale: [C], any float dtype, or None.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    for expert, part in _parts_sync(rows, offsets):
        addend = bias[expert].to(wide) * share
        rows[part].add_(addend if scale is None else addend * scale[part, None].to(wide))


@_operator("Tensor grad, *, Tensor? scale, Tensor offsets, Tensor(a!) out")
def expert_bias_grad(grad: Tensor, *, scale: Tensor | None, offsets: Tensor, out: Tensor) -> None:
    """The sum of each expert's rows of the gradient, times their scale; zeros for one without rows.

    grad: [C, O], any strides; scale: [C] or None; out: [e, O], the gradient's dtype.
    """
    out.zero_()
    wide = torch.promote_types(grad.dtype, torch.float32)
    for expert, part in _parts_sync(grad, offsets):
        values = grad[part].to(wide)
        out[expert] = (values if scale is None else values * scale[part, None].to(wide)).sum(0)


@_operator("Tensor grad, Tensor bias, *, Tensor offsets, float share, Tensor(a!) out")
def expert_bias_scale_grad(grad: Tensor, bias: Tensor, *, offsets: Tensor, share: float, out: Tensor) -> None:
    """The gradient of each live row's scale: `share` times the gradient's product with the bias.

    grad: [C, O], any strides; bias: [e, O]; out: [C], any float dtype.
    """
    wide = torch.promote_types(grad.dtype, torch.float32)
    for expert, part in _parts_sync(grad, offsets):
        out[part] = (grad[part].to(wide) @ bias[expert].to(wide)).mul_(share).to(out.dtype)


def _parts_sync(rows: Tensor, offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and which. NOTE: reads memory of the CPU, where this implementation runs."""
    ends = offsets.clamp(0, rows.shape[0]).tolist()
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end > start:
            yield expert, slice(start, end)
