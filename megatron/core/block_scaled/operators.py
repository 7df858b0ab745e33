"""Operations on block-scaled rows: functions for callers, and the operators block_scaled::* that they call.

Functions check their arguments and allocate results. Operators write into the caller's memory. The CPU versions are
here, over reference.py; the CUDA versions are in triton_quantize.py and triton_products.py. They allocate nothing and
read nothing from the device, so that a CUDA graph can capture them.

Shapes: C rows of the buffers, W elements in a row, e experts, H x O weights of an expert. num_rows, [1], int64: number
of live rows, or None if all are live. Rows beyond the live ones are not read, and remain unchanged in the results.
offsets, [e], int32: end of each expert's rows. format.py describes packed rows, [*, row_bytes(W)], uint8. Functions
whose arguments have the type Rows also accept rows in pages of an arena (core/paged_rows.py); packed rows have an arena
of bytes. Results have the same bits with and without pages.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron.core.block_scaled import reference
from megatron.core.block_scaled.format import BlockFormat
from megatron.core.fusions.gated_activation import ActivationForm, act_rows, form_of
from megatron.core.operator_library import Register, operator
from megatron.core.paged_rows import (
    PagedRows,
    Rows,
    num_rows_of,
    operand,
    paging_schema,
    read_sync,
    store_sync,
    write_sync,
)

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

Result = TypeVar("Result", bound=Rows)

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
    packed: Rows, form: BlockFormat, *, width: int, num_rows: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Quantizes the columns of packed rows and returns them packed, [W, row_bytes(C)], uint8.

    packed: [C, row_bytes(W)], uint8; width: W; out: memory for the result, or None. A block of columns consists of
    `block` rows, so each expert's rows must begin and end at multiples of the block. Rows beyond the live ones count as
    zeros in a block with live rows. Pages require num_rows. Raises ValueError for other dtypes and shapes.
    """
    _check_packed("packed", packed, form, width)
    if len(packed.shape) != 2:
        raise ValueError(f"packed has shape {list(packed.shape)}: must be [rows, bytes]")
    _check_count(num_rows, packed)
    out = _given_rows(out, form, width, packed.shape[0], device=packed.device)
    memory, places = operand("packed", packed)
    ops.quantize_columns(memory, block=form.block, num_rows=num_rows, out=out, **places)
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
    gate_up: Rows,
    scale: Tensor | None,
    form: BlockFormat,
    *,
    activation: ActivationForm,
    num_rows: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes an activation times a scale for each row, and returns it quantized, [C, row_bytes(F)], uint8.

    gate_up: [C, 2F], or [C, F] for a plain activation, bf16 or fp32; scale: [C], float dtype, or None; out: memory for
    the result, or None. The bytes are those of quantize_rows after an activation in gate_up's dtype. Pages require
    num_rows. Raises ValueError for other dtypes and shapes.
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
    memory, places = operand("gate_up", gate_up)
    ops.gated_activation_quantize(
        memory, scale, block=form.block, num_rows=num_rows, out=out, **places, **activation.arguments
    )
    return out


def multiply(
    x: Rows,
    weight: Tensor,
    form: BlockFormat,
    *,
    offsets: Tensor,
    width: int,
    is_transposed: bool,
    out: Result,
    needed: Tensor | None = None,
) -> Result:
    """Multiplies packed rows with the packed weights of their expert, or with the transposed ones; returns `out`.

    x: [C, row_bytes(H)], uint8; weight: [e, H, row_bytes(O)], uint8, in square blocks; out: [C, O], bf16 or fp32. With
    is_transposed, as for the gradient of x, x is [C, row_bytes(O)] and out is [C, H]. width: O. needed: [1], int64:
    nothing is read or written if it is 0; None means always. triton_products.py states the accuracy. Raises ValueError
    for other dtypes and shapes.
    """
    _check_elements("out", out)
    if weight.dim() != 3:
        raise ValueError(f"weight has shape {list(weight.shape)}: must be packed rows of [experts, rows, columns]")
    form.check("weight", weight, width)
    inner, outer = (width, weight.shape[1]) if is_transposed else (weight.shape[1], width)
    _check_packed("x", x, form, inner)
    _check_rows("x", x, out.shape[0])
    if out.shape[1] != outer:
        raise ValueError(f"out has a width of {out.shape[1]}: the weights require {outer}")
    _check_offsets(offsets, weight.shape[0])
    if needed is not None:
        _check_number("needed", needed, x)
    for name, one in (("weight", weight), ("offsets", offsets), ("out", out)):
        _check_device(name, one, x)
    (memory, x_places), (out_memory, out_places) = operand("x", x), operand("out", out)
    ops.scaled_product(
        memory,
        weight,
        block=form.block,
        offsets=offsets,
        width=width,
        is_transposed=is_transposed,
        out=out_memory,
        needed=needed,
        **x_places,
        **out_places,
    )
    return out


def weight_gradient(
    x: Tensor,
    grad: Tensor,
    form: BlockFormat,
    *,
    offsets: Tensor,
    rows: int,
    out: Tensor,
    scale: float = 1.0,
    is_added: bool = False,
) -> Tensor:
    """Computes scale * x^T grad of each expert's rows from packed columns, writes or adds it to `out`, and returns it.

    x: [H, row_bytes(C)], uint8; grad: [O, row_bytes(C)], uint8; out: [e, H, O], bf16 or fp32, any strides; rows: C.
    offsets: multiples of the block, or C. Sums are in fp32, also with the values in `out`, and are rounded once, to
    out's dtype. is_added: whether to add to `out`. Experts without rows have a gradient of 0. Raises ValueError for
    other dtypes and shapes.
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
    ops.scaled_weight_grad(
        x, grad, block=form.block, offsets=offsets, rows=rows, out=out, scale=scale, is_added=is_added
    )
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


def _check_elements(name: str, x: Rows) -> None:
    _check_dtype(name, x)
    if type(x) is PagedRows:
        return
    if x.dim() != 2 or (x.stride(-1) != 1 and x.shape[-1] > 1 and x.shape[0] > 0):
        raise ValueError(
            f"{name} has shape {list(x.shape)} and strides {list(x.stride())}: must have 2 dimensions and "
            "adjacent columns"
        )


def _check_packed(name: str, packed: Rows, form: BlockFormat, width: int) -> None:
    """Raises ValueError unless `packed` is packed rows of `width` elements, which may be in pages."""
    if type(packed) is not PagedRows:
        form.check(name, packed, width)
    elif packed.dtype is not torch.uint8 or packed.width != form.row_bytes(width):
        raise ValueError(
            f"{name} has pages of {packed.dtype} with rows of {packed.width}: packed rows of {width} elements in "
            f"blocks of {form.block} must have {form.row_bytes(width)} bytes, in pages of torch.uint8"
        )


def _check_dtype(name: str, x: Rows) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{name} has dtype {x.dtype}: must be bf16 or fp32")


def _check_device(name: str, one: Rows, other: Rows) -> None:
    if one.device != other.device:
        raise ValueError(f"{name} is on {one.device}: must be on {other.device}")


def _check_count(num_rows: Tensor | None, rows: Rows) -> None:
    if num_rows is not None:
        _check_number("num_rows", num_rows, rows)
    elif type(rows) is PagedRows:
        raise ValueError("num_rows is None: rows in pages require it, because only pages of live rows are in the table")


def _check_number(name: str, number: Tensor, rows: Rows) -> None:
    if number.shape != (1,) or number.dtype is not torch.int64 or number.device != rows.device:
        found = f"{list(number.shape)}, {number.dtype}, on {number.device}"
        raise ValueError(f"{name} ({found}) must be [1], torch.int64, on {rows.device}")


def _check_rows(name: str, packed: Rows, rows: int) -> None:
    if len(packed.shape) != 2 or packed.shape[0] != rows:
        raise ValueError(f"{name} has shape {list(packed.shape)}: must have {rows} packed rows")


def _check_offsets(offsets: Tensor, experts: int) -> None:
    if offsets.shape != (experts,) or offsets.dtype is not torch.int32:
        raise ValueError(f"offsets has shape {list(offsets.shape)}, {offsets.dtype}: must be [{experts}], int32")


# --- Operators, as ops.<name> ---


def _operator(name: str, arguments: str) -> Register:
    return operator("block_scaled", f"({arguments}) -> ()", name=name, cuda=_LAUNCHERS)


@_operator("quantize", "Tensor x, *, int block, Tensor? num_rows, Tensor(a!) out")
def _quantize(x: Tensor, *, block: int, num_rows: Tensor | None, out: Tensor) -> None:
    rows = _live_rows_sync(num_rows, x.shape[0])
    reference.quantize_rows(x[:rows], BlockFormat(block), out=out[:rows])


@_operator(
    "gated_activation_quantize",
    f"Tensor gate_up, Tensor? scale, *, int block, Tensor? num_rows, Tensor(a!) out, {paging_schema('gate_up')}, "
    "str activation, float? clamp=None, float offset=0.0",
)
def _gated_activation_quantize(
    gate_up: Tensor,
    scale: Tensor | None,
    *,
    block: int,
    num_rows: Tensor | None,
    out: Tensor,
    gate_up_table: Tensor | None = None,
    gate_up_sizes: Sequence[int] = (),
    activation: str,
    clamp: float | None = None,
    offset: float = 0.0,
) -> None:
    rows, form = _live_rows_sync(num_rows, out.shape[0]), form_of(activation, clamp, offset)
    gate_up = read_sync(gate_up, gate_up_table, gate_up_sizes, num_rows=rows)
    act = gate_up.new_empty(rows, form.width(gate_up))
    act_rows(gate_up, scale, rows=rows, out=act, form=form)
    reference.quantize_rows(act, BlockFormat(block), out=out[:rows])


@_operator("dequantize", "Tensor packed, *, int block, Tensor? num_rows, Tensor(a!) out")
def _dequantize(packed: Tensor, *, block: int, num_rows: Tensor | None, out: Tensor) -> None:
    rows = _live_rows_sync(num_rows, out.shape[0])
    reference.dequantize_rows(packed[:rows], BlockFormat(block), out=out[:rows])


@_operator(
    "quantize_columns",
    f"Tensor packed, *, int block, Tensor? num_rows, Tensor(a!) out, {paging_schema('packed')}",
)
def _quantize_columns(
    packed: Tensor,
    *,
    block: int,
    num_rows: Tensor | None,
    out: Tensor,
    packed_table: Tensor | None = None,
    packed_sizes: Sequence[int] = (),
) -> None:
    capacity = num_rows_of(packed, packed_sizes)
    rows = _live_rows_sync(num_rows, capacity)
    packed = read_sync(packed, packed_table, packed_sizes, num_rows=rows)
    reference.quantize_columns(packed, BlockFormat(block), rows=rows, capacity=capacity, out=out)


@_operator("quantize_squares", "Tensor weight, *, int block, Tensor(a!) out")
def _quantize_squares(weight: Tensor, *, block: int, out: Tensor) -> None:
    reference.quantize_squares(weight, BlockFormat(block), out=out)


@_operator(
    "scaled_product",
    "Tensor x, Tensor weight, *, int block, Tensor offsets, int width, bool is_transposed, Tensor(a!) out, "
    f"Tensor? needed=None, {paging_schema('x')}, {paging_schema('out')}",
)
def _scaled_product(
    x: Tensor,
    weight: Tensor,
    *,
    block: int,
    offsets: Tensor,
    width: int,
    is_transposed: bool,
    out: Tensor,
    needed: Tensor | None = None,
    x_table: Tensor | None = None,
    x_sizes: Sequence[int] = (),
    out_table: Tensor | None = None,
    out_sizes: Sequence[int] = (),
) -> None:
    if needed is not None and not _is_set_sync(needed):
        return
    ends = _ends_sync(offsets, num_rows_of(out, out_sizes))
    rows = max(ends, default=0)
    x = read_sync(x, x_table, x_sizes, num_rows=rows)
    target, is_copy = write_sync(out, out_table, out_sizes, num_rows=rows)
    reference.scaled_product(
        x, weight, BlockFormat(block), ends=ends, width=width, is_transposed=is_transposed, out=target
    )
    if is_copy and out_table is not None:
        store_sync(target, out, out_table, out_sizes)


@_operator(
    "scaled_weight_grad",
    "Tensor x, Tensor grad, *, int block, Tensor offsets, int rows, Tensor(a!) out, float scale=1.0, "
    "bool is_added=False",
)
def _scaled_weight_grad(
    x: Tensor,
    grad: Tensor,
    *,
    block: int,
    offsets: Tensor,
    rows: int,
    out: Tensor,
    scale: float = 1.0,
    is_added: bool = False,
) -> None:
    ends = _ends_sync(offsets, rows)
    reference.scaled_weight_grad(
        x, grad, BlockFormat(block), ends=ends, rows=rows, out=out, scale=scale, is_added=is_added
    )


# --- Numbers that the CPU versions read. NOTE: they are in CPU memory, so the host waits for no device. ---


def _is_set_sync(flag: Tensor) -> bool:
    return bool(flag.item())


def _live_rows_sync(num_rows: Tensor | None, max_rows: int) -> int:
    return max_rows if num_rows is None else max(0, min(int(num_rows.item()), max_rows))


def _ends_sync(offsets: Tensor, max_rows: int) -> list[int]:
    return [max(0, min(end, max_rows)) for end in offsets.tolist()]
