"""Operations on rows that are sorted by expert: grouped GEMM, gated activation, bias and low-rank adapter.

Each has a public function, an autograd function and operators `paged_stash::*`, whose CPU versions are here. The CUDA
versions are in triton_grouped_gemm.py and triton_biases.py. They allocate nothing and read nothing from the device, so
that a CUDA graph can capture them. The activation is that of fusions/gated_activation.py, of live rows.

Shapes: C rows of the buffers, of which the first R are live; e experts; H hidden; F ffn; O any width; r the width of
low-rank adapters. offsets [e], int32: end offset of each expert's rows; the last one is R. Rows beyond the first R are
never read and are undefined in all results, including gradients. Operators with a table and sizes for an operand accept
the arena of PagedRows (core/paged_rows.py) in its place.

[Note: recompute levels] A pool that runs out of pages drops act at the first level, and gate_up as well at the second.
The operators gated_activation, gate_up_from_x and add_low_rank recompute them. They do nothing if `needed`, [1], int64,
is 0. A recomputation is bit-identical to the forward, because both run the same kernel on the same live rows: on the
CPU one GEMM for each expert, like torch.nn.functional.grouped_mm there, and on CUDA a Triton kernel.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.autograd import PlainFunction, first_order
from megatron.core.fusions.gated_activation import activate, form_of
from megatron.core.fusions.gated_activation import ops as activation_ops
from megatron.core.operator_library import Register, operator
from megatron.core.paged_rows import (
    Rows,
    num_rows_of,
    operand,
    paging_schema,
    read_sync,
    store_sync,
    write_sync,
)
from megatron.core.transformer.moe.paged_stash.saved_tensors import say_rows_and_others

HAS_TRITON = importlib.util.find_spec("triton") is not None
# Launchers, which have the operators' names.
_LAUNCHERS: tuple[Callable[..., Any], ...] = ()
if HAS_TRITON:
    from megatron.core.transformer.moe.paged_stash import triton_biases, triton_grouped_gemm

    _LAUNCHERS = (
        triton_grouped_gemm.grouped_gemm,
        triton_grouped_gemm.grouped_gemm_weight_grad,
        triton_grouped_gemm.gate_up_from_x,
        triton_grouped_gemm.add_low_rank,
        triton_biases.add_expert_bias,
        triton_biases.expert_bias_grad,
        triton_biases.expert_bias_scale_grad,
    )

# The operators of this file, for callers.
ops = torch.ops.paged_stash

# Function (out, needed, *sources) that recomputes a dropped tensor from its sources into `out`, unless `needed` is 0.
Recompute = Callable[..., None]


def _operator(name: str, arguments: str) -> Register:
    return operator("paged_stash", f"({arguments}) -> ()", name=name, cuda=_LAUNCHERS)


# --- Grouped GEMM ---


def grouped_gemm(x: Tensor, weight: Tensor, *, offsets: Tensor) -> Tensor:
    """Multiplies the rows of expert i by weight[i]. Result rows that belong to no expert are undefined.

    x: [C, H]; weight: [e, H, O], any strides; both of one float dtype, fp64 on the CPU only; offsets: [e], int32, same
    device. Returns [C, O], same dtype. Saves x and weight for backward if their gradients require them. Raises
    ValueError for mismatched shapes or dtypes.
    """
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1] or offsets.shape != weight.shape[:1]:
        shapes = f"x {list(x.shape)}, weight {list(weight.shape)}, offsets {list(offsets.shape)}"
        raise ValueError(f"{shapes}: must be [C, H], [e, H, O], [e]")
    if x.dtype != weight.dtype or offsets.dtype != torch.int32:
        dtypes = f"x {x.dtype}, weight {weight.dtype}, offsets {offsets.dtype}"
        raise ValueError(f"{dtypes}: x and weight must have the same dtype, and offsets must be torch.int32")
    say_rows_and_others([x], [weight, offsets])
    product: Tensor = _GroupedGemm.apply(x, weight, offsets)
    say_rows_and_others([product], [])
    return product


class _GroupedGemm(PlainFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        needs_grad_x, needs_grad_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_grad_weight else None, weight if needs_grad_x else None, offsets)
        # The gradient has the weight's strides, transposed or not, so that it is accumulated without a copy.
        ctx.weight_layout = torch.empty_like(weight, device="meta")
        out = x.new_empty(x.shape[0], weight.shape[2])
        ops.grouped_gemm(x, weight, offsets=offsets, out=out)
        return out

    @staticmethod
    @first_order
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


def multiply_rows(x: Rows, weight: Tensor, *, offsets: Tensor, out: Rows) -> None:
    """Calls the operator grouped_gemm, whose operands may be in pages.

    x: [C, H]; weight: [e, H, O]; out: [C, O]; one float dtype.
    """
    (x_memory, x_places), (out_memory, out_places) = operand("x", x), operand("out", out)
    ops.grouped_gemm(x_memory, weight, offsets=offsets, out=out_memory, **x_places, **out_places)


@_operator(
    "grouped_gemm",
    f"Tensor x, Tensor weight, *, Tensor offsets, Tensor(a!) out, {paging_schema('x')}, {paging_schema('out')}",
)
def _grouped_gemm(
    x: Tensor,
    weight: Tensor,
    *,
    offsets: Tensor,
    out: Tensor,
    x_table: Tensor | None = None,
    x_sizes: Sequence[int] = (),
    out_table: Tensor | None = None,
    out_sizes: Sequence[int] = (),
) -> None:
    """Multiplies the rows of expert i by weight[i].

    x: [C, H] or pages; weight: [e, H, O]; out: [C, O] or pages; one float dtype.
    """
    ends = _ends_sync(offsets, num_rows_of(x, x_sizes))
    rows = read_sync(x, x_table, x_sizes, num_rows=ends[-1])
    target, is_copy = write_sync(out, out_table, out_sizes, num_rows=ends[-1])
    for expert, part in _parts(ends):
        torch.mm(rows[part], weight[expert], out=target[part])
    if is_copy and out_table is not None:
        store_sync(target, out, out_table, out_sizes)


@_operator(
    "grouped_gemm_weight_grad",
    "Tensor x, Tensor grad, *, Tensor offsets, Tensor(a!) out, float scale=1.0, bool is_added=False, "
    f"int row_alignment=1, {paging_schema('x')}",
)
def _grouped_gemm_weight_grad(
    x: Tensor,
    grad: Tensor,
    *,
    offsets: Tensor,
    out: Tensor,
    scale: float = 1.0,
    is_added: bool = False,
    row_alignment: int = 1,
    x_table: Tensor | None = None,
    x_sizes: Sequence[int] = (),
) -> None:
    """Computes scale * x^T grad of each expert, 0 for an expert without rows, and writes or adds it to `out`.

    x: [C, H] or pages; grad: [C, O], x's dtype; out: [e, H, O], any float dtype. Values are rounded once, to out's
    dtype. is_added: whether to add to `out`. row_alignment: a divisor of all offsets and of C, for the GPU's kernel.
    """
    ends = _ends_sync(offsets, num_rows_of(x, x_sizes))
    x = read_sync(x, x_table, x_sizes, num_rows=ends[-1])
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        left, right = x[start:end].t(), grad[start:end]
        if out.dtype != x.dtype:
            left, right = left.to(out.dtype), right.to(out.dtype)
        torch.addmm(out[expert], left, right, beta=int(is_added), alpha=scale, out=out[expert])


@_operator(
    "gate_up_from_x",
    "Tensor x, Tensor weight, *, Tensor offsets, Tensor needed, Tensor(a!) out, Tensor? bias=None, "
    f"{paging_schema('x')}, {paging_schema('out')}",
)
def _gate_up_from_x(
    x: Tensor,
    weight: Tensor,
    *,
    offsets: Tensor,
    needed: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    x_table: Tensor | None = None,
    x_sizes: Sequence[int] = (),
    out_table: Tensor | None = None,
    out_sizes: Sequence[int] = (),
) -> None:
    """Recomputes gate_up, including the bias, unless `needed` is 0. Costs 2 R H O operations.

    x: [C, H] or pages; weight: [e, H, O]; bias: [e, O] or None; out: [C, O] or pages; one float dtype. needed: [1],
    int64.
    """
    if _is_set_sync(needed):
        places = {"out_table": out_table, "out_sizes": out_sizes}
        _grouped_gemm(x, weight, offsets=offsets, out=out, x_table=x_table, x_sizes=x_sizes, **places)
        if bias is not None:
            of_rows = {"rows_table": out_table, "rows_sizes": out_sizes}
            _add_expert_bias(out, bias, scale=None, offsets=offsets, share=1.0, **of_rows)


# --- Activation ---


def gated_activation(
    gate_up: Tensor,
    scale: Tensor | None,
    *,
    num_rows: Tensor,
    activation: str = "swiglu",
    clamp: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    """Computes f(gate) * up * scale for the first num_rows rows. Plain activations have no `up`.

    gate_up: [C, 2F], gate before up (plain: [C, F]), any float dtype, fp64 on the CPU only; scale: [C], any float
    dtype, or None; num_rows: [1], int64, same device; activation: swiglu, geglu, geglu_tanh, quick_geglu, or plain
    silu, gelu, gelu_tanh, quick_gelu, squared_relu. clamp: largest gate, and largest magnitude of up, of a gated
    activation; offset: added to up after the clamp. Returns [C, F], gate_up's dtype; other rows are undefined. Saves
    gate_up and scale for backward. Raises ValueError for an unknown activation, for a plain one with clamp or offset,
    and for mismatched shapes.
    """
    form = form_of(activation, clamp, offset)
    if form.activation.is_gated and gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up {list(gate_up.shape)}: {activation} requires [C, 2F], an even width")
    if gate_up.dim() != 2 or (scale is not None and scale.shape != gate_up.shape[:1]):
        raise ValueError(f"gate_up {list(gate_up.shape)} must have two dimensions, and scale one value for each row")
    say_rows_and_others([gate_up] if scale is None else [gate_up, scale], [num_rows])
    act = activate(gate_up, scale, form=form, num_rows=num_rows)
    say_rows_and_others([act], [])
    return act


# --- Bias. Half precision is computed in fp32 and rounded once. ---


def add_expert_bias(
    rows: Tensor, bias: Tensor, *, offsets: Tensor, scale: Tensor | None = None, share: float = 1.0
) -> Tensor:
    """Adds the bias of each live row's expert in place, times the row's scale and `share`.

    rows: [C, O], float dtype, fp64 on the CPU only; bias: [e, O], the rows' dtype; offsets: [e], int32, same device;
    scale: [C], any float dtype, or None. share: fraction of the bias that this rank adds, if several ranks store the
    whole bias; the gradient is computed for the whole bias. Returns the rows. Saves scale, and bias if scale requires
    grad. Raises ValueError for mismatched shapes or dtypes.
    """
    if rows.dim() != 2 or bias.shape != (len(offsets), rows.shape[1]) or rows.dtype != bias.dtype:
        given = f"rows {list(rows.shape)} {rows.dtype}, bias {list(bias.shape)} {bias.dtype}, offsets {len(offsets)}"
        raise ValueError(f"{given}: must be [C, O], [e, O] of one dtype and [e]")
    say_rows_and_others([rows] if scale is None else [rows, scale], [bias, offsets])
    summed: Tensor = _AddExpertBias.apply(rows, bias, scale, offsets, share)
    return summed


class _AddExpertBias(PlainFunction):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, scale: Tensor | None, offsets: Tensor, share: float) -> Tensor:
        ops.add_expert_bias(rows, bias, scale=scale, offsets=offsets, share=share)
        ctx.mark_dirty(rows)
        ctx.share, ctx.bias_layout = share, torch.empty_like(bias, device="meta")
        ctx.save_for_backward(bias if ctx.needs_input_grad[2] else None, scale, offsets)
        return rows

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        bias, scale, offsets = ctx.saved_tensors
        grad_bias = grad_scale = None
        if ctx.needs_input_grad[1]:
            grad_bias = torch.empty_like(ctx.bias_layout, device=grad.device)
            ops.expert_bias_grad(grad, scale=scale, offsets=offsets, out=grad_bias)
        if bias is not None:
            assert scale is not None, "gradient of a scale that was not passed in"
            grad_scale = torch.empty_like(scale)
            ops.expert_bias_scale_grad(grad, bias, offsets=offsets, share=ctx.share, out=grad_scale)
        return grad, grad_bias, grad_scale, None, None


def add_bias_to(
    rows: Rows, bias: Tensor, *, scale: Tensor | None, offsets: Tensor, share: float, needed: Tensor | None = None
) -> None:
    """Calls the operator add_expert_bias, whose rows may be in pages.

    rows: [C, O], float dtype; bias: [e, O], the rows' dtype; scale: [C], any float dtype, or None. needed: [1], int64,
    or None.
    """
    memory, places = operand("rows", rows)
    ops.add_expert_bias(memory, bias, scale=scale, offsets=offsets, share=share, needed=needed, **places)


@_operator(
    "add_expert_bias",
    "Tensor(a!) rows, Tensor bias, *, Tensor? scale, Tensor offsets, float share, Tensor? needed=None, "
    + paging_schema("rows"),
)
def _add_expert_bias(
    rows: Tensor,
    bias: Tensor,
    *,
    scale: Tensor | None,
    offsets: Tensor,
    share: float,
    needed: Tensor | None = None,
    rows_table: Tensor | None = None,
    rows_sizes: Sequence[int] = (),
) -> None:
    """Adds the bias of each row's expert in place, times the row's scale and `share`, unless `needed` is 0.

    rows: [C, O], float dtype, or pages; bias: [e, O], the rows' dtype; scale: [C], any float dtype, or None. needed:
    [1], int64; None means always.
    """
    if needed is not None and not _is_set_sync(needed):
        return
    wide, ends = torch.promote_types(rows.dtype, torch.float32), _ends_sync(offsets, num_rows_of(rows, rows_sizes))
    target = read_sync(rows, rows_table, rows_sizes, num_rows=ends[-1])
    for expert, part in _parts(ends):
        addend = bias[expert].to(wide) * share
        target[part].add_(addend if scale is None else addend * scale[part, None].to(wide))
    _store_changed_sync(target, rows, rows_table, rows_sizes)


@_operator("expert_bias_grad", "Tensor grad, *, Tensor? scale, Tensor offsets, Tensor(a!) out")
def _expert_bias_grad(grad: Tensor, *, scale: Tensor | None, offsets: Tensor, out: Tensor) -> None:
    """Sums the gradient over each expert's rows, times their scale. The sum is 0 for an expert without rows.

    grad: [C, O], any strides; scale: [C] or None; out: [e, O], the gradient's dtype.
    """
    out.zero_()
    wide = torch.promote_types(grad.dtype, torch.float32)
    for expert, part in _parts(_ends_sync(offsets, grad.shape[0])):
        values = grad[part].to(wide)
        out[expert] = (values if scale is None else values * scale[part, None].to(wide)).sum(0)


@_operator("expert_bias_scale_grad", "Tensor grad, Tensor bias, *, Tensor offsets, float share, Tensor(a!) out")
def _expert_bias_scale_grad(grad: Tensor, bias: Tensor, *, offsets: Tensor, share: float, out: Tensor) -> None:
    """Computes the gradient of each live row's scale: `share` times the dot product of its gradient and its bias.

    grad: [C, O], any strides; bias: [e, O]; out: [C], any float dtype.
    """
    wide = torch.promote_types(grad.dtype, torch.float32)
    for expert, part in _parts(_ends_sync(offsets, grad.shape[0])):
        out[part] = (grad[part].to(wide) @ bias[expert].to(wide)).mul_(share).to(out.dtype)


# --- Low-rank adapter ---


def add_low_rank(rows: Tensor, low: Tensor, *, weight: Tensor, offsets: Tensor, scale: float) -> Tensor:
    """Adds scale * low @ weight of the row's expert to each live row in place, the second half of a low-rank adapter.

    rows: [C, O], float dtype, fp64 on the CPU only; low: [C, r], output of the first half, and weight: [e, r, O], both
    in the rows' dtype; offsets: [e], int32, same device. Returns the rows. Saves low and weight if their gradients
    require them. Raises ValueError for mismatched shapes or dtypes.
    """
    fits = weight.shape == (len(offsets), low.shape[-1], rows.shape[-1]) and low.shape[:-1] == rows.shape[:-1]
    if rows.dim() != 2 or not fits or not rows.dtype == low.dtype == weight.dtype:
        given = [f"{name} {list(t.shape)} {t.dtype}" for name, t in (("rows", rows), ("low", low), ("weight", weight))]
        raise ValueError(f"{', '.join(given)}, offsets {len(offsets)}: must be [C, O], [C, r], [e, r, O], [e]")
    say_rows_and_others([rows, low], [weight, offsets])
    summed: Tensor = _AddLowRank.apply(rows, low, weight, offsets, scale)
    return summed


class _AddLowRank(PlainFunction):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, low: Tensor, weight: Tensor, offsets: Tensor, scale: float) -> Tensor:
        ops.add_low_rank(rows, low, weight=weight, offsets=offsets, scale=scale)
        ctx.mark_dirty(rows)
        needs_low, needs_weight = ctx.needs_input_grad[1:3]
        ctx.scale, ctx.weight_layout = scale, torch.empty_like(weight, device="meta")
        ctx.save_for_backward(low if needs_weight else None, weight if needs_low else None, offsets)
        return rows

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        low, weight, offsets = ctx.saved_tensors
        grad_low = grad_weight = None
        if weight is not None:
            grad_low = grad.new_empty(grad.shape[0], weight.shape[1])
            ops.grouped_gemm(grad, weight.transpose(1, 2), offsets=offsets, out=grad_low)
            # This also scales the undefined contents of rows that are not live.
            grad_low.mul_(ctx.scale)
        if low is not None:
            grad_weight = torch.empty_like(ctx.weight_layout, device=grad.device)
            ops.grouped_gemm_weight_grad(low, grad, offsets=offsets, out=grad_weight)
            grad_weight.mul_(ctx.scale)
        return grad, grad_low, grad_weight, None, None


def add_low_rank_to(
    rows: Rows, low: Tensor, *, weight: Tensor, offsets: Tensor, scale: float, needed: Tensor | None = None
) -> None:
    """Calls the operator add_low_rank, whose rows may be in pages.

    rows: [C, O]; low: [C, r]; weight: [e, r, O]; one float dtype. needed: [1], int64, or None.
    """
    memory, places = operand("rows", rows)
    ops.add_low_rank(memory, low, weight=weight, offsets=offsets, scale=scale, needed=needed, **places)


@_operator(
    "add_low_rank",
    "Tensor(a!) rows, Tensor low, *, Tensor weight, Tensor offsets, float scale, Tensor? needed=None, "
    + paging_schema("rows"),
)
def _add_low_rank(
    rows: Tensor,
    low: Tensor,
    *,
    weight: Tensor,
    offsets: Tensor,
    scale: float,
    needed: Tensor | None = None,
    rows_table: Tensor | None = None,
    rows_sizes: Sequence[int] = (),
) -> None:
    """Adds scale * low @ weight of the row's expert to each row in place, unless `needed` is 0.

    rows: [C, O] or pages; low: [C, r]; weight: [e, r, O]; one float dtype. needed: [1], int64; None means always.
    """
    if needed is not None and not _is_set_sync(needed):
        return
    ends = _ends_sync(offsets, low.shape[0])
    target = read_sync(rows, rows_table, rows_sizes, num_rows=ends[-1])
    for expert, part in _parts(ends):
        into = target[part]
        torch.addmm(into, low[part], weight[expert], alpha=scale, out=into)
    _store_changed_sync(target, rows, rows_table, rows_sizes)


# --- Recomputation of dropped tensors ---


def recompute_gate_up(
    weight: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    low_rank: tuple[Tensor, float] | None = None,
    low_weight: Tensor | None = None,
) -> Recompute:
    """Returns a function that recomputes gate_up, for StashGroup.mark with sources (x,) or (x, low).

    weight: [e, H, O], x's dtype; offsets: [e], int32; bias: [e, O], x's dtype, or None; low_rank: the weight [e, r, O]
    and scale passed to add_low_rank, or None without `low`. low_weight: [e, H, r], x's dtype, computes `low` from x,
    for sources (x,). All are on the device.
    """
    weight = weight.detach()
    if bias is not None:
        bias = bias.detach()
    if low_rank is not None:
        low_rank = low_rank[0].detach(), low_rank[1]

    if low_weight is not None:
        low_weight = low_weight.detach()

    def recompute_product(x: Rows, matrices: Tensor, out: Rows, *, needed: Tensor, bias: Tensor | None) -> None:
        (x_memory, x_places), (memory, places) = operand("x", x), operand("out", out)
        places = {**x_places, **places}
        ops.gate_up_from_x(x_memory, matrices, offsets=offsets, needed=needed, out=memory, bias=bias, **places)

    def recompute(out: Rows, needed: Tensor, x: Rows, *lows: Tensor) -> None:
        recompute_product(x, weight, out, needed=needed, bias=bias)
        if low_rank is None:
            return
        if low_weight is not None:
            lows = (low_weight.new_empty(x.shape[0], low_weight.shape[2]),)
            recompute_product(x, low_weight, lows[0], needed=needed, bias=None)
        add_low_rank_to(out, lows[0], weight=low_rank[0], offsets=offsets, scale=low_rank[1], needed=needed)

    return recompute


def recompute_act(
    num_rows: Tensor, activation: str = "swiglu", *, clamp: float | None = None, offset: float = 0.0
) -> Recompute:
    """Returns a function that recomputes act, for StashGroup.mark with sources (gate_up,) or (gate_up, scale).

    num_rows: [1], int64. The other arguments are as in gated_activation. Raises ValueError for an unknown activation.
    """
    form = form_of(activation, clamp, offset).arguments

    def recompute(out: Tensor, needed: Tensor, *sources: Tensor) -> None:
        gate_up, *rest = sources
        (scale,) = rest or (None,)
        activation_ops.gated_activation(gate_up, scale, num_rows=num_rows, needed=needed, out=out, **form)

    return recompute


# --- Counts that the CPU versions read. NOTE: they are in CPU memory, so the host waits for no device. ---


def _is_set_sync(flag: Tensor) -> bool:
    return bool(flag.item())


def _ends_sync(offsets: Tensor, max_rows: int) -> list[int]:
    """Returns the end offset of each expert's rows, clamped to the buffer; [0] if there is no expert."""
    return offsets.clamp(0, max_rows).tolist() or [0]


def _store_changed_sync(target: Tensor, memory: Tensor, table: Tensor | None, sizes: Sequence[int]) -> None:
    """Copies rows that read_sync returned, and that were changed in place, back to their pages if they are a copy."""
    if table is not None and target.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr():
        store_sync(target, memory, table, sizes)


def _parts(ends: list[int]) -> Iterator[tuple[int, slice]]:
    """Yields each expert that has rows, and the range of its rows."""
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end > start:
            yield expert, slice(start, end)
