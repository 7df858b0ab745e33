"""Operations on block-scaled rows: functions for callers, and the operators block_scaled::* that they call.

Functions check their arguments and allocate results. Operators write into the caller's memory. The CPU versions are
here, over reference.py; the CUDA versions are in triton_quantize.py and triton_products.py. They allocate nothing and
read nothing from the device, so that a CUDA graph can capture them.

Shapes: C rows of the buffers, W elements in a row, e experts, H x O weights of an expert. num_rows, [1], int64: number
of live rows, or None if all are live. Rows beyond the live ones are not read, and remain unchanged in the results.
offsets, [e], int32: end of each expert's rows. format.py describes packed rows, [*, row_bytes(W)], uint8.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.block_scaled import reference
from megatron.core.block_scaled.format import BlockFormat
from megatron.core.fusions.gated_activation import ActivationForm, act_rows, form_of
from megatron.core.operator_library import Register, operator

HAS_TRITON = importlib.util.find_spec("triton") is not None
# Launchers, which have the operators' names.
_LAUNCHERS: tuple[Callable[..., Any], ...] = ()
if HAS_TRITON:
    from megatron.core.block_scaled import triton_products, triton_quantize

    _LAUNCHERS = (
        triton_quantize.quantize,
        triton_quantize.gated_activation_quantize,
        triton_quantize.dequantize,
        triton_quantize.quantize_columns,
        triton_quantize.quantize_squares,
        triton_products.scaled_product,
        triton_products.scaled_weight_grad,
    )

# The operators of this file, for callers.
ops = torch.ops.block_scaled


def quantize_rows(x: Tensor, form: BlockFormat, *, num_rows: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Quantizes rows and returns them packed, [C, row_bytes(W)], uint8. x: [C, W], bf16 or fp32, adjacent columns.

    out: memory for the result, such as rows of a larger buffer; None allocates it. Raises ValueError for other dtypes
    and shapes.
    """
    _check_elements("x", x)
    _check_count(num_rows, x)
    out = _given_rows(out, form, *x.shape, device=x.device)
    ops.quantize(x, block=form.block, num_rows=num_rows, out=out)
    return out


def dequantize_rows(packed: Tensor, form: BlockFormat, *, num_rows: Tensor | None = None, out: Tensor) -> Tensor:
    """Decodes packed rows, [C, row_bytes(W)], uint8, into `out`, [C, W], bf16 or fp32, and returns it.

    Raises ValueError for other dtypes and shapes.
    """
    _check_elements("out", out)
    form.check("packed", packed, out.shape[1])
    _check_rows("packed", packed, out.shape[0])
    _check_count(num_rows, packed)
    _check_device("out", out, packed)
    ops.dequantize(packed, block=form.block, num_rows=num_rows, out=out)
    return out


def quantize_columns(
    packed: Tensor, form: BlockFormat, *, width: int, num_rows: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Quantizes the columns of packed rows and returns them packed, [W, row_bytes(C)], uint8.

    packed: [C, row_bytes(W)], uint8; width: W; out: memory for the result, or None. A block of columns consists of
    `block` rows, so each expert's rows must begin and end at multiples of the block. Rows beyond the live ones count as
    zeros in a block with live rows. Raises ValueError for other dtypes and shapes.
    """
    form.check("packed", packed, width)
    if packed.dim() != 2:
        raise ValueError(f"packed has shape {list(packed.shape)}: must be [rows, bytes]")
    _check_count(num_rows, packed)
    out = _given_rows(out, form, width, packed.shape[0], device=packed.device)
    ops.quantize_columns(packed, block=form.block, num_rows=num_rows, out=out)
    return out


def quantize_weight(weight: Tensor, form: BlockFormat, *, out: Tensor | None = None) -> Tensor:
    """Quantizes weights in square blocks and returns them packed, [e, H, row_bytes(O)], uint8.

    weight: [e, H, O], bf16 or fp32, any strides; out: memory for the result, or None. Raises ValueError for other
    dtypes and shapes.
    """
    if weight.dim() != 3:
        raise ValueError(f"weight has shape {list(weight.shape)}: must be [experts, rows, columns]")
    _check_dtype("weight", weight)
    out = _given_rows(out, form, *weight.shape, device=weight.device)
    ops.quantize_squares(weight, block=form.block, out=out)
    return out


def activate_and_quantize(
    gate_up: Tensor,
    scale: Tensor | None,
    form: BlockFormat,
    *,
    activation: ActivationForm,
    num_rows: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes an activation times a scale for each row, and returns it quantized, [C, row_bytes(F)], uint8.

    gate_up: [C, 2F], or [C, F] for a plain activation, bf16 or fp32; scale: [C], float dtype, or None; out: memory for
    the result, or None. The bytes are those of quantize_rows after an activation in gate_up's dtype. Raises ValueError
    for other dtypes and shapes.
    """
    _check_elements("gate_up", gate_up)
    if activation.activation.is_gated and gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has a width of {gate_up.shape[1]}: must be even, gate before up")
    if scale is not None and (scale.shape != gate_up.shape[:1] or not scale.is_contiguous()):
        raise ValueError(f"scale has shape {list(scale.shape)}: must be [{gate_up.shape[0]}], one number for each row")
    if scale is not None:
        _check_device("scale", scale, gate_up)
        if not scale.is_floating_point():
            raise ValueError(f"scale has dtype {scale.dtype}: must be a float dtype")
    _check_count(num_rows, gate_up)
    out = _given_rows(out, form, gate_up.shape[0], activation.width(gate_up), device=gate_up.device)
    ops.gated_activation_quantize(gate_up, scale, block=form.block, num_rows=num_rows, out=out, **activation.arguments)
    return out


def multiply(
    x: Tensor, weight: Tensor, form: BlockFormat, *, offsets: Tensor, width: int, is_transposed: bool, out: Tensor
) -> Tensor:
    """Multiplies packed rows with the packed weights of their expert, or with the transposed ones; returns `out`.

    x: [C, row_bytes(H)], uint8; weight: [e, H, row_bytes(O)], uint8, in square blocks; out: [C, O], bf16 or fp32. With
    is_transposed, as for the gradient of x, x is [C, row_bytes(O)] and out is [C, H]. width: O. triton_products.py
    states the accuracy. Raises ValueError for other dtypes and shapes.
    """
    _check_elements("out", out)
    if weight.dim() != 3:
        raise ValueError(f"weight has shape {list(weight.shape)}: must be packed rows of [experts, rows, columns]")
    form.check("weight", weight, width)
    inner, outer = (width, weight.shape[1]) if is_transposed else (weight.shape[1], width)
    form.check("x", x, inner)
    _check_rows("x", x, out.shape[0])
    if out.shape[1] != outer:
        raise ValueError(f"out has a width of {out.shape[1]}: the weights require {outer}")
    _check_offsets(offsets, weight.shape[0])
    for name, one in (("weight", weight), ("offsets", offsets), ("out", out)):
        _check_device(name, one, x)
    ops.scaled_product(x, weight, block=form.block, offsets=offsets, width=width, is_transposed=is_transposed, out=out)
    return out


def weight_gradient(x: Tensor, grad: Tensor, form: BlockFormat, *, offsets: Tensor, rows: int, out: Tensor) -> Tensor:
    """Computes x^T grad of each expert's rows from packed columns, and returns `out`, [e, H, O], bf16 or fp32.

    x: [H, row_bytes(C)], uint8; grad: [O, row_bytes(C)], uint8; rows: C. offsets: multiples of the block. Experts
    without rows receive 0. Raises ValueError for other dtypes and shapes.
    """
    if out.dim() != 3:
        raise ValueError(f"out has shape {list(out.shape)}: must be [experts, rows, columns]")
    _check_dtype("out", out)
    for name, packed, columns in (("x", x, out.shape[1]), ("grad", grad, out.shape[2])):
        form.check(name, packed, rows)
        _check_rows(name, packed, columns)
    _check_offsets(offsets, out.shape[0])
    for name, one in (("grad", grad), ("offsets", offsets), ("out", out)):
        _check_device(name, one, x)
    ops.scaled_weight_grad(x, grad, block=form.block, offsets=offsets, rows=rows, out=out)
    return out


def _given_rows(out: Tensor | None, form: BlockFormat, *shape: int, device: torch.device) -> Tensor:
    """Returns `out`, or new memory if it is None, for packed rows of elements of a shape."""
    if out is None:
        return form.empty_rows(*shape, device=device)
    form.check("out", out, shape[-1])
    if out.device != device:
        raise ValueError(f"out is on {out.device}: must be on {device}")
    if out.shape[:-1] != shape[:-1]:
        raise ValueError(f"out has shape {list(out.shape)}: must be {[*shape[:-1], form.row_bytes(shape[-1])]}")
    return out


def _check_elements(name: str, x: Tensor) -> None:
    _check_dtype(name, x)
    if x.dim() != 2 or (x.shape[-1] > 1 and x.stride(-1) != 1):
        raise ValueError(
            f"{name} has shape {list(x.shape)} and strides {list(x.stride())}: must have 2 dimensions and "
            "adjacent columns"
        )


def _check_dtype(name: str, x: Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{name} has dtype {x.dtype}: must be bf16 or fp32")


def _check_device(name: str, one: Tensor, other: Tensor) -> None:
    if one.device != other.device:
        raise ValueError(f"{name} is on {one.device}: must be on {other.device}")


def _check_count(num_rows: Tensor | None, rows: Tensor) -> None:
    if num_rows is None:
        return
    if num_rows.shape != (1,) or num_rows.dtype is not torch.int64 or num_rows.device != rows.device:
        found = f"{list(num_rows.shape)}, {num_rows.dtype}, on {num_rows.device}"
        raise ValueError(f"num_rows ({found}) must be [1], torch.int64, on {rows.device}")


def _check_rows(name: str, packed: Tensor, rows: int) -> None:
    if packed.dim() != 2 or packed.shape[0] != rows:
        raise ValueError(f"{name} has shape {list(packed.shape)}: must have {rows} packed rows")


def _check_offsets(offsets: Tensor, experts: int) -> None:
    if offsets.shape != (experts,) or offsets.dtype is not torch.int32:
        raise ValueError(f"offsets has shape {list(offsets.shape)}, {offsets.dtype}: must be [{experts}], int32")


# --- Operators, as ops.<name> ---


def _operator(name: str, arguments: str) -> Register:
    return operator("block_scaled", f"({arguments}) -> ()", name=name, cuda=_LAUNCHERS)


@_operator("quantize", "Tensor x, *, int block, Tensor? num_rows, Tensor(a!) out")
def _quantize(x: Tensor, *, block: int, num_rows: Tensor | None, out: Tensor) -> None:
    rows = _live_rows_sync(num_rows, x)
    reference.quantize_rows(x[:rows], BlockFormat(block), out=out[:rows])


@_operator(
    "gated_activation_quantize",
    "Tensor gate_up, Tensor? scale, *, int block, Tensor? num_rows, Tensor(a!) out, "
    "str activation, float? clamp=None, float offset=0.0",
)
def _gated_activation_quantize(
    gate_up: Tensor,
    scale: Tensor | None,
    *,
    block: int,
    num_rows: Tensor | None,
    out: Tensor,
    activation: str,
    clamp: float | None = None,
    offset: float = 0.0,
) -> None:
    rows, form = _live_rows_sync(num_rows, gate_up), form_of(activation, clamp, offset)
    act = gate_up.new_empty(rows, form.width(gate_up))
    act_rows(gate_up, scale, rows=rows, out=act, form=form)
    reference.quantize_rows(act, BlockFormat(block), out=out[:rows])


@_operator("dequantize", "Tensor packed, *, int block, Tensor? num_rows, Tensor(a!) out")
def _dequantize(packed: Tensor, *, block: int, num_rows: Tensor | None, out: Tensor) -> None:
    rows = _live_rows_sync(num_rows, out)
    reference.dequantize_rows(packed[:rows], BlockFormat(block), out=out[:rows])


@_operator("quantize_columns", "Tensor packed, *, int block, Tensor? num_rows, Tensor(a!) out")
def _quantize_columns(packed: Tensor, *, block: int, num_rows: Tensor | None, out: Tensor) -> None:
    reference.quantize_columns(packed, BlockFormat(block), rows=_live_rows_sync(num_rows, packed), out=out)


@_operator("quantize_squares", "Tensor weight, *, int block, Tensor(a!) out")
def _quantize_squares(weight: Tensor, *, block: int, out: Tensor) -> None:
    reference.quantize_squares(weight, BlockFormat(block), out=out)


@_operator(
    "scaled_product",
    "Tensor x, Tensor weight, *, int block, Tensor offsets, int width, bool is_transposed, Tensor(a!) out",
)
def _scaled_product(
    x: Tensor, weight: Tensor, *, block: int, offsets: Tensor, width: int, is_transposed: bool, out: Tensor
) -> None:
    reference.scaled_product(
        x,
        weight,
        BlockFormat(block),
        ends=_ends_sync(offsets, out.shape[0]),
        width=width,
        is_transposed=is_transposed,
        out=out,
    )


@_operator("scaled_weight_grad", "Tensor x, Tensor grad, *, int block, Tensor offsets, int rows, Tensor(a!) out")
def _scaled_weight_grad(x: Tensor, grad: Tensor, *, block: int, offsets: Tensor, rows: int, out: Tensor) -> None:
    ends = _ends_sync(offsets, rows)
    reference.scaled_weight_grad(x, grad, BlockFormat(block), ends=ends, rows=rows, out=out)


# --- Counts that the CPU versions read. NOTE: they are in CPU memory, so the host waits for no device. ---


def _live_rows_sync(num_rows: Tensor | None, rows: Tensor) -> int:
    return rows.shape[0] if num_rows is None else max(0, min(int(num_rows.item()), rows.shape[0]))


def _ends_sync(offsets: Tensor, max_rows: int) -> list[int]:
    return [max(0, min(end, max_rows)) for end in offsets.tolist()]
