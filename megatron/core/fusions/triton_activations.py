"""Activations and their gradients in Triton.

The launchers have the names and arguments of the operators in gated_activation.py, on CUDA tensors.

Shapes: max_rows rows of the buffers; ffn columns of act; gate_up has gate before up. Arithmetic is in fp32. Loads of
rows beyond the live ones are masked, so that their content, which may be NaN, is never read. Without num_rows, all rows
are live.

Forward and recomputation run the same compiled kernel, so both are bit-identical. In forward the number of rows is
passed as the flag `needed`.

[Note: emitted act] The gradient kernel can also write act, which the weight gradient of the next layer reads. It must
have the bits of the forward, whose kernel is compiled separately. A compiler may round differently only where it may
contract a multiplication and an addition into one instruction. The curves in _EMITTED multiply only, up to the sum in
the sigmoid, which both kernels take from one library function. For the others act_kernel runs again.
"""
# mypy: allow-untyped-defs

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.activations import ACTIVATIONS, Curve
from megatron.core.device.triton_compile import CompileCase, Residency, compile_case
from megatron.core.device.triton_launch import (
    MAX_PREPARED,
    PreparedLaunch,
    check_adjacent_columns,
    check_dtypes,
    next_power_of_2,
)
from megatron.core.device.triton_pages import Paging, find_rows, row_layout
from megatron.core.device.triton_tiles import live_rows

SILU = tl.constexpr(int(Curve.SILU))
GELU = tl.constexpr(int(Curve.GELU))
GELU_TANH = tl.constexpr(int(Curve.GELU_TANH))
QUICK_GELU = tl.constexpr(int(Curve.QUICK_GELU))
SQUARED_RELU = tl.constexpr(int(Curve.SQUARED_RELU))
# Curves whose act the gradient kernel may write. See [Note: emitted act].
_EMITTED = frozenset({Curve.SILU, Curve.QUICK_GELU, Curve.SQUARED_RELU})
# Elements of one tile: 32 for each thread of 4 warps, and 8 in the gradient, which requires several registers for each.
_ACT_ELEMENTS, _GRADIENT_ELEMENTS = 4096, 1024
_WARPS = {"num_warps": 4}
# Programs per processor that a grid is limited to, so that a recomputation that is not required costs little, and those
# of them that are resident for every activation. See [Note: bytes in flight] in triton_rows.py.
_ACT_PROGRAMS, _GRADIENT_PROGRAMS = Residency(at_least=2, at_most_launched=8), Residency(at_least=4, at_most_launched=8)


@triton.jit(do_not_specialize=["max_rows"], do_not_specialize_on_alignment=["num_rows", "needed", "gate_up_table"])
def act_kernel(
    gate_up,
    scale,
    num_rows,
    needed,
    out,
    gate_up_table,
    max_rows,
    ffn,
    gate_up_pitch,
    out_pitch,
    clamp,
    offset,
    CURVE: tl.constexpr,
    IS_GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATE_UP_PAGE: tl.constexpr,
):
    """Computes act. GATE_UP_PAGE: see [Note: lookups] in triton_pages.py."""
    if needed is not None:
        if tl.load(needed) == 0:
            return
    live = live_rows(num_rows, max_rows)
    column_tiles = tl.cdiv(ffn, COLUMNS)
    for tile in tl.range(tl.program_id(0), tl.cdiv(live, ROWS) * column_tiles, tl.num_programs(0)):
        rows = ((tile // column_tiles) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        columns = (tile % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = columns[None, :] < ffn
        read = (rows < live)[:, None] & is_column
        gate_up_rows = find_rows(gate_up_table, rows, rows < live, GATE_UP_PAGE).to(tl.int64)
        gate_at = gate_up + gate_up_rows[:, None] * gate_up_pitch + columns[None, :]
        act = load_act(gate_at, gate_at + ffn, read, clamp, offset, CURVE, IS_GATED)
        if scale is not None:
            act *= tl.load(scale + rows, mask=rows < live, other=0).to(tl.float32)[:, None]
        out_at = out + rows[:, None] * out_pitch + columns[None, :]
        tl.store(out_at, act.to(out.dtype.element_ty), mask=read)


@triton.jit(do_not_specialize=["max_rows"], do_not_specialize_on_alignment=["num_rows", "gate_up_table"])
def act_gradient_kernel(
    grad,
    gate_up,
    scale,
    num_rows,
    grad_gate_up,
    grad_scale,
    act,
    gate_up_table,
    max_rows,
    ffn,
    grad_row,
    grad_column,
    gate_up_pitch,
    grad_gate_up_pitch,
    act_pitch,
    clamp,
    offset,
    CURVE: tl.constexpr,
    IS_GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATE_UP_PAGE: tl.constexpr,
):
    """Computes the gradients, and act unless it is None. GATE_UP_PAGE: see [Note: lookups] in triton_pages.py."""
    live = live_rows(num_rows, max_rows)
    for tile in tl.range(tl.program_id(0), tl.cdiv(live, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        is_live = rows < live
        total = tl.zeros([ROWS], tl.float32)
        gate_up_rows = find_rows(gate_up_table, rows, is_live, GATE_UP_PAGE).to(tl.int64)
        for start in tl.range(0, ffn, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            read = is_live[:, None] & (columns[None, :] < ffn)
            gate_at = gate_up + gate_up_rows[:, None] * gate_up_pitch + columns[None, :]
            grad_gate_at = grad_gate_up + rows[:, None] * grad_gate_up_pitch + columns[None, :]
            grad_at = grad + rows[:, None] * grad_row + columns[None, :].to(tl.int64) * grad_column
            given_gate = tl.load(gate_at, mask=read, other=0).to(tl.float32)
            gate = _gate(given_gate, clamp)
            incoming = tl.load(grad_at, mask=read, other=0).to(tl.float32)
            value, slope = _value(gate, CURVE), _stop_clamped(_slope(gate, CURVE), given_gate, clamp)
            if IS_GATED:
                given_up = tl.load(gate_at + ffn, mask=read, other=0).to(tl.float32)
                up = _up(given_up, clamp, offset)
            if grad_scale is not None:
                product = incoming * value
                if IS_GATED:
                    product *= up
                total += tl.sum(product, 1)
            if scale is not None:
                factor = tl.load(scale + rows, mask=is_live, other=0).to(tl.float32)[:, None]
                incoming *= factor
            if act is not None:
                emitted = value
                if IS_GATED:
                    emitted *= up
                if scale is not None:
                    emitted *= factor
                act_at = act + rows[:, None] * act_pitch + columns[None, :]
                tl.store(act_at, emitted.to(act.dtype.element_ty), mask=read)
            if IS_GATED:
                grad_up = _stop_clamped(incoming * value, tl.abs(given_up), clamp)
                tl.store(grad_gate_at + ffn, grad_up.to(grad_gate_up.dtype.element_ty), mask=read)
                incoming *= up
            tl.store(grad_gate_at, (incoming * slope).to(grad_gate_up.dtype.element_ty), mask=read)
        if grad_scale is not None:
            tl.store(grad_scale + rows, total.to(grad_scale.dtype.element_ty), mask=is_live)


@triton.jit
def load_act(gate_at, up_at, read, clamp, offset, CURVE: tl.constexpr, IS_GATED: tl.constexpr):
    """Returns act, without a scale, in fp32. gate_at, up_at: addresses; `read` masks them. CURVE: as an int."""
    act = _value(_gate(tl.load(gate_at, mask=read, other=0).to(tl.float32), clamp), CURVE)
    if IS_GATED:
        act *= _up(tl.load(up_at, mask=read, other=0).to(tl.float32), clamp, offset)
    return act


@triton.jit
def _value(x, CURVE: tl.constexpr):
    if CURVE == SILU:
        result = x * tl.sigmoid(x)
    elif CURVE == GELU:
        result = x * _erf_cdf(x)
    elif CURVE == GELU_TANH:
        result = x * _tanh_cdf(x)
    elif CURVE == QUICK_GELU:
        result = x * tl.sigmoid(1.702 * x)
    else:
        tl.static_assert(CURVE == SQUARED_RELU)
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        result = positive * positive
    return result


@triton.jit
def _slope(x, CURVE: tl.constexpr):
    if CURVE == SILU:
        sigmoid = tl.sigmoid(x)
        result = sigmoid + x * sigmoid * (1 - sigmoid)
    elif CURVE == GELU:
        result = _erf_cdf(x) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif CURVE == GELU_TANH:
        cdf = _tanh_cdf(x)
        result = cdf + x * cdf * (1 - cdf) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    elif CURVE == QUICK_GELU:
        sigmoid = tl.sigmoid(1.702 * x)
        result = sigmoid + 1.702 * x * sigmoid * (1 - sigmoid)
    else:
        tl.static_assert(CURVE == SQUARED_RELU)
        result = 2 * tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return result


@triton.jit
def _gate(x, clamp):
    if clamp is not None:
        x = tl.minimum(x, clamp, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def _up(x, clamp, offset):
    if clamp is not None:
        x = tl.minimum(x, clamp, propagate_nan=tl.PropagateNan.ALL)
        x = tl.maximum(x, -clamp, propagate_nan=tl.PropagateNan.ALL)
    if offset is not None:
        x += offset
    return x


@triton.jit
def _stop_clamped(grad, given, clamp):
    """Sets the gradient of values above the clamp to zero."""
    if clamp is not None:
        grad = tl.where(given > clamp, 0.0, grad)
    return grad


@triton.jit
def _erf_cdf(x):
    return 0.5 * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _tanh_cdf(x):
    """Computes (1 + tanh(z)) / 2 of gelu's tanh form as the sigmoid of 2z, which avoids cancellation."""
    return tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


def gated_activation(
    gate_up: Tensor,
    scale: Tensor | None,
    *,
    num_rows: Tensor | None,
    needed: Tensor | None = None,
    out: Tensor,
    activation: str,
    clamp: float | None = None,
    offset: float = 0.0,
    gate_up_table: Tensor | None = None,
    gate_up_sizes: Sequence[int] = (),
) -> None:
    """Computes act of the first num_rows rows, or of all, unless `needed` is 0.

    gate_up: [C, 2F] or [C, F], float dtype, may be in pages; scale: [C] or None; out: [C, F], same dtype. num_rows,
    needed: [1], int64, or None. Raises ValueError for a table and sizes that do not fit the operands.
    """
    kinds, strides, page = (gate_up.dtype, out.dtype), gate_up.stride(), 0
    if gate_up_table is not None or gate_up_sizes:
        strides, page = _gate_up_layout(gate_up, (gate_up_table, gate_up_sizes), out.shape, activation)
    launch, tile_rows, column_tiles = _act(kinds, out.shape[1], strides, out.stride(), page, activation, clamp, offset)
    max_rows = out.shape[0]
    needed = num_rows if needed is None else needed
    tensors = (gate_up, scale, num_rows, needed, out, gate_up_table)
    launch(-(-max_rows // tile_rows) * column_tiles, tensors, (max_rows,))


def gated_activation_backward(
    grad: Tensor,
    gate_up: Tensor,
    *,
    scale: Tensor | None,
    num_rows: Tensor | None,
    grad_gate_up: Tensor,
    grad_scale: Tensor | None,
    act: Tensor | None = None,
    activation: str,
    clamp: float | None = None,
    offset: float = 0.0,
    gate_up_table: Tensor | None = None,
    gate_up_sizes: Sequence[int] = (),
) -> None:
    """Writes the gradients of gate_up and scale, in the shapes and dtypes of gate_up and scale, and act.

    grad: [C, F], any strides, gate_up's dtype; act: [C, F], same dtype, or None. gate_up may be in pages, unlike its
    gradient. num_rows: as in gated_activation. Raises ValueError for a table and sizes that do not fit the operands.
    """
    form = (activation, clamp, offset)
    gate_up_strides, page = gate_up.stride(), 0
    if gate_up_table is not None or gate_up_sizes:
        gate_up_strides, page = _gate_up_layout(gate_up, (gate_up_table, gate_up_sizes), grad.shape, activation)
    if act is not None and ACTIVATIONS[activation].curve not in _EMITTED:
        gated_activation(
            gate_up,
            scale,
            num_rows=num_rows,
            out=act,
            activation=activation,
            clamp=clamp,
            offset=offset,
            gate_up_table=gate_up_table,
            gate_up_sizes=gate_up_sizes,
        )
        act = None
    kinds, strides = (gate_up.dtype, grad_gate_up.dtype), (*grad.stride(), *gate_up_strides, *grad_gate_up.stride())
    act_strides = None if act is None else act.stride()
    launch, tile_rows = _act_gradient(kinds, grad.shape[1], strides, act_strides, page, *form)
    max_rows = grad.shape[0]
    tensors = (grad, gate_up, scale, num_rows, grad_gate_up, grad_scale, act, gate_up_table)
    launch(-(-max_rows // tile_rows), tensors, (max_rows,))


def _gate_up_layout(
    gate_up: Tensor, pages: Paging, act_shape: torch.Size, activation: str
) -> tuple[tuple[int, ...], int]:
    """Returns the strides and the rows of a page of a paged gate_up, for an act of [C, F]."""
    width = act_shape[1] * (2 if ACTIVATIONS[activation].is_gated else 1)
    layout = row_layout("gate_up", gate_up, pages, num_rows=act_shape[0], width=width)
    return layout.strides, layout.page


@functools.lru_cache(MAX_PREPARED)
def _act(
    dtypes: tuple[torch.dtype, ...],
    ffn: int,
    gate_up_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    page: int,
    *form: Any,
) -> tuple[PreparedLaunch, int, int]:
    """Returns a launch of act_kernel, the rows of a tile, and the number of tiles in a row.

    page: rows of a page of gate_up, 0 without pages. form: name, clamp and offset of the activation.
    """
    check_dtypes(*dtypes)
    check_adjacent_columns(ffn, gate_up_strides[1], out_strides[1])
    tile = _act_tile(ffn, _ACT_ELEMENTS)
    sizes = {"ffn": ffn, "gate_up_pitch": gate_up_strides[0], "out_pitch": out_strides[0]}
    fixed = {**sizes, **_form_arguments(*form), **tile, "GATE_UP_PAGE": page}
    launch = PreparedLaunch(act_kernel, fixed, options=_WARPS, per_processor=_ACT_PROGRAMS.at_most_launched)
    return launch, tile["ROWS"], -(-ffn // tile["COLUMNS"])


@functools.lru_cache(MAX_PREPARED)
def _act_gradient(
    dtypes: tuple[torch.dtype, ...],
    ffn: int,
    strides: tuple[int, ...],
    act_strides: tuple[int, ...] | None,
    page: int,
    *form: Any,
) -> tuple[PreparedLaunch, int]:
    """Returns a launch of act_gradient_kernel, and the rows of a tile.

    strides: grad, gate_up, grad_gate_up. act_strides: None if act is not written. page: as in _act.
    """
    check_dtypes(*dtypes)
    grad_row, grad_column, gate_up_pitch, gate_up_column, grad_gate_up_pitch, grad_gate_up_column = strides
    act_pitch, act_column = act_strides or (ffn, 1)
    check_adjacent_columns(ffn, gate_up_column, grad_gate_up_column, act_column)
    tile = _act_tile(ffn, _GRADIENT_ELEMENTS)
    sizes = {"ffn": ffn, "grad_row": grad_row, "grad_column": grad_column}
    pitches = {"gate_up_pitch": gate_up_pitch, "grad_gate_up_pitch": grad_gate_up_pitch, "act_pitch": act_pitch}
    fixed = {**sizes, **pitches, **_form_arguments(*form), **tile, "GATE_UP_PAGE": page}
    per_processor = _GRADIENT_PROGRAMS.at_most_launched
    launch = PreparedLaunch(act_gradient_kernel, fixed, options=_WARPS, per_processor=per_processor)
    return launch, tile["ROWS"]


def _act_tile(ffn: int, elements: int) -> dict[str, int]:
    columns = min(elements, next_power_of_2(ffn))
    return {"ROWS": elements // columns, "COLUMNS": columns}


def _form_arguments(activation: str, clamp: float | None, offset: float) -> dict[str, Any]:
    known = ACTIVATIONS[activation]
    # None instead of 0, so that the common kernels have no instruction for it.
    return {"clamp": clamp, "offset": offset or None, "CURVE": int(known.curve), "IS_GATED": known.is_gated}


def residencies(num_warps: int) -> Mapping[str, Residency]:
    """Maps each kernel's name to the residency that its launcher assumes, for programs of 4 warps."""
    assert num_warps == _WARPS["num_warps"]
    return {"act_kernel": _ACT_PROGRAMS, "act_gradient_kernel": _GRADIENT_PROGRAMS}


def compile_cases() -> Iterator[CompileCase]:
    """Yields compile cases for a simple and for expensive activations, in bf16 and fp32.

    Rows: live ones or all, and live ones in pages.
    """
    for name in ("bf16", "fp32"):
        yield from _cases(name, Curve.SILU, clamp=None, offset=None)
        yield from _cases(name, Curve.SILU, clamp=None, offset=None, num_rows=None)
        yield from _cases(name, Curve.SILU, clamp=None, offset=None, page=96)
        yield from _cases(name, Curve.GELU_TANH, clamp=None, offset=None)
        yield from _cases(name, Curve.QUICK_GELU, clamp="fp32", offset="fp32")


def _cases(
    name: str, curve: Curve, *, num_rows: str | None = "*i64", page: int = 0, **form: str | None
) -> Iterator[CompileCase]:
    data, size, words = f"*{name}:16", "i32:16", f"{name}, {curve.name}{', all rows' if num_rows is None else ''}"
    words += ", in pages" if page else ""
    sizes = {"max_rows": "i32", "ffn": size, "gate_up_pitch": size, **form, "CURVE": int(curve), "IS_GATED": True}
    pages = {"gate_up_table": "*i64" if page else None, "GATE_UP_PAGE": page}
    shared = {"gate_up": data, "scale": "*fp32:16", "num_rows": num_rows, **sizes, **pages}
    yield compile_case(
        act_kernel,
        f"gated_activation, {words}",
        options=_WARPS,
        needed=num_rows,
        out=data,
        out_pitch=size,
        **shared,
        **_act_tile(1024, _ACT_ELEMENTS),
    )
    yield compile_case(
        act_gradient_kernel,
        f"gated_activation_backward, {words}",
        options=_WARPS,
        grad=data,
        grad_gate_up=data,
        grad_scale="*fp32:16",
        grad_row=size,
        grad_column=1,
        grad_gate_up_pitch=size,
        act=data if curve in _EMITTED else None,
        act_pitch=size,
        **shared,
        **_act_tile(1024, _GRADIENT_ELEMENTS),
    )
