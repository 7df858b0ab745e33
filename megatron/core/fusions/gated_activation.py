"""Gated and plain activations with gradients: act = f(gate) * (up + offset) * scale, or f(x) * scale.

GatedActivation is the activation of a layer. `activate` is the fused autograd function that layers and experts share,
with operators, whose CPU versions are at the end of this file. The GPU kernels are in triton_activations.py. A fused
activation saves only its input and the scale for backward. Its result is not saved either where a linear function
follows (activated_product.py): activation_gradients computes it again. Half precision is computed in fp32 and rounded
once.

[Note: choice of implementation] Activations with a name (megatron/core/activations.py) have kernels for fp32, bf16 and
fp16. A layer calls them on a GPU. Elsewhere SwiGLU and quick GeGLU are the same autograd function over torch's
operators, and autograd differentiates all other activations, with their intermediate tensors and roundings. Buffers of
which only num_rows rows are live are always computed by the operators, because the host does not know num_rows.

[Note: order of gradients] On the CPU, gradients have two orders of operations, whose last bits differ. Rows of static
buffers use torch's gradient functions, on gradients that are multiplied by the scale first. Dense layers and dynamic
buffers compute value and slope of x * sigmoid(gain * x) from one sigmoid, and multiply by the scale last. An update of
this code repeats the losses of a run only if each kind of layer keeps its order.
"""

import enum
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.activations import ACTIVATIONS, QUICK_GELU_GAIN, Activation, Curve
from megatron.core.autograd import PlainFunction, first_order
from megatron.core.operator_library import Register, operator
from megatron.core.paged_rows import PagedRows, Rows, memory_of, operand, paging_schema, read_sync

HAS_TRITON = importlib.util.find_spec("triton") is not None
# Launchers, which have the operators' names.
_LAUNCHERS: tuple[Callable[..., Any], ...] = ()
if HAS_TRITON:
    from megatron.core.fusions import triton_activations

    _LAUNCHERS = (triton_activations.gated_activation, triton_activations.gated_activation_backward)
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Elements of gate_up that torch's operators process together. On the CPU, temporaries of this size stay in the shared
# cache. On a GPU, there are only a few chunks.
_CPU_ELEMENTS, _GPU_ELEMENTS = 1 << 19, 1 << 26
# Gains of gated x * sigmoid(gain * x). See [Note: order of gradients].
_GAINS = {Curve.SILU: 1.0, Curve.QUICK_GELU: QUICK_GELU_GAIN}

# The operators of this file, for callers.
ops = torch.ops.activation
_aten = torch.ops.aten

Value = Callable[[Tensor, Tensor], Tensor]
Slope = Callable[..., Tensor]


@dataclass(frozen=True)
class ActivationForm:
    """Name of an activation, with an optional clamp and offset if it is gated.

    clamp: largest gate, and largest magnitude of up; offset: added to up after the clamp. Raises ValueError for an
    unknown name, and for a plain activation with a clamp or an offset.
    """

    name: str = "swiglu"
    clamp: float | None = None
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise ValueError(f"activation ({self.name!r}) must be one of {', '.join(ACTIVATIONS)}")
        if not self.activation.is_gated and (self.clamp is not None or self.offset):
            raise ValueError(
                f"clamp is {self.clamp} and offset is {self.offset}: {self.name} is not gated and supports neither"
            )

    @cached_property
    def activation(self) -> Activation:
        """Activation with this name."""
        return ACTIVATIONS[self.name]

    @cached_property
    def gain(self) -> float | None:
        """Gain of a gated x * sigmoid(gain * x); None for other activations. See [Note: order of gradients]."""
        return _GAINS.get(self.activation.curve) if self.activation.is_gated else None

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """The fields as arguments of operators and of functions that compute this activation."""
        return {"activation": self.name, "clamp": self.clamp, "offset": self.offset}

    def width(self, gate_up: Rows) -> int:
        """Returns F. gate_up: [*, 2F], or [*, F] for a plain activation, any float dtype."""
        return gate_up.shape[-1] // 2 if self.activation.is_gated else gate_up.shape[-1]


@cache
def form_of(activation: str, clamp: float | None = None, offset: float = 0.0) -> ActivationForm:
    """Returns the form with these fields. Operators receive fields instead of forms, so forms are built only once."""
    return ActivationForm(activation, clamp, offset)


@dataclass(frozen=True)
class GatedActivation:
    """Activation of a layer: f(gate) * (up + offset), or f(x) if it is not gated, times a scale per row.

    function: f, elementwise. clamp, offset: of a gated activation, as in ActivationForm.
    """

    function: Callable[[Tensor], Tensor]
    is_gated: bool
    clamp: float | None = None
    offset: float = 0.0

    @cached_property
    def form(self) -> ActivationForm | None:
        """The same activation by name, or None if the function has no name."""
        for name, one in ACTIVATIONS.items():
            if one.function is self.function and one.is_gated == self.is_gated:
                return ActivationForm(name, self.clamp, self.offset)
        return None

    def fused_form(self, x: Rows, num_rows: Tensor | None = None) -> ActivationForm | None:
        """Returns the form if a fused function computes the activation of x; None if autograd differentiates it.

        x: [*, 2F] or [*, F], any float dtype. num_rows: as in `activate`. See [Note: choice of implementation].
        """
        form = self.form
        if form is None or (num_rows is None and form.gain is None and not has_kernel(memory_of(x))):
            return None
        return form

    def __call__(self, x: Rows, scale: Tensor | None, num_rows: Tensor | None = None) -> Tensor:
        """Computes the activation; x: [*, 2F], gate before up, or [*, F]; scale: [*], fp32 or x's dtype, or None.

        x has any float dtype. num_rows: as in `activate`; requires an activation with a name. x may be in pages, with
        num_rows and without gradients. Returns [*, F], x's dtype.
        """
        form = self.fused_form(x, num_rows)
        if form is not None and (type(x) is PagedRows or not torch.is_grad_enabled()):
            return activate_plainly(x, scale, form=form, num_rows=num_rows)
        assert type(x) is not PagedRows, "rows in pages have num_rows, and static experts an activation with a name"
        if form is not None:
            return activate(x, scale, form=form, num_rows=num_rows)
        if self.is_gated:
            gate, up = limited(*x.chunk(2, dim=-1), clamp=self.clamp, offset=self.offset)
            act = self.function(gate) * up
        else:
            act = self.function(x)
        return scaled(act, scale)

    def gradients(
        self,
        grad: Tensor | None,
        x: Rows,
        scale: Tensor | None,
        num_rows: Tensor | None,
        *,
        needs: tuple[bool, bool],
        needs_act: bool,
    ) -> "ActivationGradients":
        """Computes the gradients of a call, and act again, bit-identical.

        grad: that of the result, [*, F], x's dtype; None if no gradient is needed. x, scale, num_rows: as in the call.
        needs: whether x and scale need a gradient. needs_act: whether act is needed. In a backward with create_graph
        the results can be differentiated further, unless the activation is fused.
        """
        form = self.fused_form(x, num_rows)
        if form is not None and type(x) is PagedRows:
            if grad is None:
                return ActivationGradients(None, None, activate_plainly(x, scale, form=form, num_rows=num_rows))
        elif grad is None or form is None or torch.is_grad_enabled():
            assert type(x) is not PagedRows, "static experts have an activation with a name"
            return self._recomputed(grad, x, scale, num_rows, needs=needs)
        return activation_gradients(
            grad, x, scale=scale, num_rows=num_rows, form=form, needs_scale=needs[1], needs_act=needs_act
        )

    def _recomputed(
        self,
        grad: Tensor | None,
        x: Tensor,
        scale: Tensor | None,
        num_rows: Tensor | None,
        *,
        needs: tuple[bool, bool],
    ) -> "ActivationGradients":
        is_differentiable = torch.is_grad_enabled()
        if not is_differentiable:
            x = x.detach().requires_grad_(needs[0])
            scale = None if scale is None else scale.detach().requires_grad_(needs[1])
        with torch.enable_grad():
            act = self(x, scale, num_rows)
        inputs = [one for one, needed in zip((x, scale), needs) if needed and one is not None]
        found = iter(torch.autograd.grad(act, inputs, grad, create_graph=is_differentiable) if inputs else ())
        grad_x, grad_scale = (next(found) if needed else None for needed in needs)
        return ActivationGradients(grad_x, grad_scale, act if is_differentiable else act.detach())


def scaled(act: Tensor, scale: Tensor | None) -> Tensor:
    """Multiplies act, [*, F], float dtype, by scale, [*], fp32 or act's dtype, or None; returns act's dtype."""
    return act if scale is None else (act * scale.unsqueeze(-1)).to(act.dtype)


def limited(gate: Tensor, up: Tensor, *, clamp: float | None, offset: float) -> tuple[Tensor, Tensor]:
    """Applies clamp and offset; returns gate and up. Arguments and results are [*, F], any float dtype."""
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(min=-clamp, max=clamp)
    return gate, up + offset if offset else up


def activate(gate_up: Tensor, scale: Tensor | None, *, form: ActivationForm, num_rows: Tensor | None = None) -> Tensor:
    """Computes f(gate) * (up + offset) * scale, or f(x) * scale if the activation is not gated.

    gate_up: [*, 2F], gate before up (plain: [*, F]), any float dtype; scale: [*], any float dtype, or None; num_rows:
    [1], int64, same device: rows of a two-dimensional gate_up to compute, or None for all. Returns [*, F], gate_up's
    dtype; other rows are undefined. Saves gate_up and scale for backward. Raises ValueError for a scale of another
    shape, and for a gated activation of an odd width.
    """
    act: Tensor = _GatedActivation.apply(gate_up, scale, num_rows, form)
    return act


def has_kernel(x: Tensor) -> bool:
    """Returns whether named activations of x have a kernel. x: any shape and dtype.

    The meta device stands for a GPU.
    """
    return x.is_meta or (x.is_cuda and HAS_TRITON and x.dtype in _KERNEL_DTYPES)


class _GatedActivation(PlainFunction):
    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, scale: Tensor | None, num_rows: Tensor | None, form: ActivationForm
    ) -> Tensor:
        ctx.save_for_backward(gate_up, scale, num_rows)
        ctx.form = form
        return activate_plainly(gate_up, scale, form=form, num_rows=num_rows)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        gate_up, scale, num_rows = ctx.saved_tensors
        gradients = activation_gradients(
            grad, gate_up, scale=scale, num_rows=num_rows, form=ctx.form, needs_scale=ctx.needs_input_grad[1]
        )
        return gradients.gate_up, gradients.scale, None, None


def activate_plainly(
    gate_up: Rows, scale: Tensor | None, *, form: ActivationForm, num_rows: Tensor | None = None
) -> Tensor:
    """Computes the same as `activate`, but records nothing for backward.

    gate_up: [*, 2F] or [*, F], any float dtype, or rows in pages, which require num_rows; the other arguments, the
    result and errors are those of `activate`.
    """
    if scale is not None and scale.shape != gate_up.shape[:-1]:
        raise ValueError(
            f"scale has shape {tuple(scale.shape)}: must be {tuple(gate_up.shape[:-1])}, one number for each row of "
            "the activation's input"
        )
    if form.activation.is_gated and gate_up.shape[-1] % 2:
        raise ValueError(f"the activation's input has a width of {gate_up.shape[-1]}: must be even, gate before up")
    rows, weights = _as_rows(gate_up), _as_numbers(scale)
    memory, places = operand("gate_up", rows)
    out = memory.new_empty(rows.shape[0], form.width(rows))
    if num_rows is not None or has_kernel(memory):
        ops.gated_activation(memory, weights, num_rows=num_rows, out=out, **places, **form.arguments)
    else:
        act_rows(memory, weights, rows=rows.shape[0], out=out, form=form)
    return out if rows is gate_up else out.view(*gate_up.shape[:-1], out.shape[1])


@dataclass(frozen=True)
class ActivationGradients:
    """Gradients of an activation's arguments, in their shapes and dtypes, and act, [*, F], as in the forward.

    The gradients are None if they were not requested, except that a fused function always computes that of gate_up. act
    may be None if it was not requested.
    """

    gate_up: Tensor | None
    scale: Tensor | None
    act: Tensor | None


def activation_gradients(
    grad: Tensor,
    gate_up: Rows,
    *,
    scale: Tensor | None,
    num_rows: Tensor | None,
    form: ActivationForm,
    needs_scale: bool,
    needs_act: bool = False,
) -> ActivationGradients:
    """Computes the gradients of `activate`; grad: [*, F], gate_up's dtype; the others as in `activate_plainly`.

    needs_scale: whether to compute the gradient of scale. needs_act: whether to compute act again, bit-identical.
    Records nothing for a second derivative.
    """
    rows, weights = _as_rows(gate_up), _as_numbers(scale)
    memory, places = operand("gate_up", rows)
    new = memory.new_empty
    grad_rows = new(rows.shape)
    grad_weights = torch.empty_like(weights) if weights is not None and needs_scale else None
    act = new(rows.shape[0], form.width(rows)) if needs_act else None
    if rows is not gate_up:
        grad = grad.reshape(rows.shape[0], grad.shape[-1])
    if num_rows is not None or has_kernel(memory):
        ops.gated_activation_backward(
            grad,
            memory,
            scale=weights,
            num_rows=num_rows,
            grad_gate_up=grad_rows,
            grad_scale=grad_weights,
            act=act,
            **places,
            **form.arguments,
        )
    else:
        act_gradient_rows(
            grad,
            memory,
            scale=weights,
            rows=rows.shape[0],
            grad_gate_up=grad_rows,
            grad_scale=grad_weights,
            act=act,
            form=form,
            order=Order.SCALE_LAST,
        )
    if rows is not gate_up:
        grad_rows = grad_rows.view(gate_up.shape)
        act = None if act is None else act.view(*gate_up.shape[:-1], act.shape[1])
    if grad_weights is not None and scale is not None and weights is not scale:
        grad_weights = grad_weights.view(scale.shape)
    return ActivationGradients(grad_rows, grad_weights, act)


def _as_rows(x: Rows) -> Rows:
    """Returns x, [*, F], as [C, F] with adjacent columns."""
    if type(x) is PagedRows:
        return x
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _as_numbers(scale: Tensor | None) -> Tensor | None:
    """Returns a scale, [*], as [C] in adjacent memory."""
    if scale is None or (scale.dim() == 1 and scale.is_contiguous()):
        return scale
    return scale.reshape(-1).contiguous()


# --- Operators, as ops.<name> ---


class Order(enum.Enum):
    """Whether gradients are multiplied by the scale first or last. See [Note: order of gradients]."""

    SCALE_FIRST = enum.auto()
    SCALE_LAST = enum.auto()


# The fields of an ActivationForm, in the schemas of operators.
_FORM = "str activation, float? clamp=None, float offset=0.0"


def _operator(name: str, arguments: str) -> Register:
    return operator("activation", f"({arguments}) -> ()", name=name, cuda=_LAUNCHERS)


@_operator(
    "gated_activation",
    "Tensor gate_up, Tensor? scale, *, Tensor? num_rows, Tensor? needed=None, Tensor(a!) out, "
    f"{paging_schema('gate_up')}, {_FORM}",
)
def _gated_activation(
    gate_up: Tensor,
    scale: Tensor | None,
    *,
    num_rows: Tensor | None,
    needed: Tensor | None = None,
    out: Tensor,
    gate_up_table: Tensor | None = None,
    gate_up_sizes: Sequence[int] = (),
    activation: str,
    clamp: float | None = None,
    offset: float = 0.0,
) -> None:
    """Computes act of the first num_rows rows, or of all, unless `needed` is 0.

    gate_up: [C, 2F] or [C, F], float dtype, or pages; scale: [C] or None; out: [C, F], same dtype. num_rows, needed:
    [1], int64, or None; `needed` and pages require num_rows.
    """
    if needed is None or _is_set_sync(needed):
        rows = _live_rows_sync(num_rows, out)
        gate_up = read_sync(gate_up, gate_up_table, gate_up_sizes, num_rows=rows)
        act_rows(gate_up, scale, rows=rows, out=out, form=form_of(activation, clamp, offset))


@_operator(
    "gated_activation_backward",
    "Tensor grad, Tensor gate_up, *, Tensor? scale, Tensor? num_rows, "
    f"Tensor(a!) grad_gate_up, Tensor(b!)? grad_scale, Tensor(c!)? act=None, {paging_schema('gate_up')}, {_FORM}",
)
def _gated_activation_backward(
    grad: Tensor,
    gate_up: Tensor,
    *,
    scale: Tensor | None,
    num_rows: Tensor | None,
    grad_gate_up: Tensor,
    grad_scale: Tensor | None,
    act: Tensor | None = None,
    gate_up_table: Tensor | None = None,
    gate_up_sizes: Sequence[int] = (),
    activation: str,
    clamp: float | None = None,
    offset: float = 0.0,
) -> None:
    """Writes the gradients of gate_up and scale, in the shapes and dtypes of gate_up and scale, and act.

    grad: [C, F], any strides, gate_up's dtype; act: [C, F], same dtype, or None. gate_up, num_rows: as in
    gated_activation.
    """
    rows = _live_rows_sync(num_rows, grad)
    act_gradient_rows(
        grad,
        read_sync(gate_up, gate_up_table, gate_up_sizes, num_rows=rows),
        scale=scale,
        rows=rows,
        grad_gate_up=grad_gate_up,
        grad_scale=grad_scale,
        act=act,
        form=form_of(activation, clamp, offset),
        order=Order.SCALE_LAST if num_rows is None else Order.SCALE_FIRST,
    )


# --- Counts that the CPU versions read. NOTE: they are in CPU memory, so the host waits for no device. ---


def _is_set_sync(flag: Tensor) -> bool:
    return bool(flag.item())


def _live_rows_sync(num_rows: Tensor | None, rows: Tensor) -> int:
    return rows.shape[0] if num_rows is None else max(0, min(int(num_rows.item()), rows.shape[0]))


# --- In torch, on rows: C rows, of which the first R are computed ---


def act_rows(gate_up: Tensor, scale: Tensor | None, *, rows: int, out: Tensor, form: ActivationForm) -> None:
    """Writes act of the first `rows` rows into `out` and leaves all other rows unchanged.

    gate_up: [C, 2F] (or [C, F]), any float dtype; scale: [C] or None, any float dtype; out: [C, F], gate_up's dtype.
    """
    value_of, _ = _FUNCTIONS[form.activation.curve]
    for chunk, gate, up in _chunks(gate_up, rows, form=form):
        if up is not None:
            gate, up = limited(gate, up, clamp=form.clamp, offset=form.offset)
        act = value_of(gate, _destination(out[chunk], gate.dtype))
        if up is not None:
            act.mul_(up)
        if scale is not None:
            act.mul_(scale[chunk, None].to(act.dtype))
        _write(out[chunk], act)


def act_gradient_rows(
    grad: Tensor,
    gate_up: Tensor,
    *,
    scale: Tensor | None,
    rows: int,
    grad_gate_up: Tensor,
    grad_scale: Tensor | None,
    act: Tensor | None = None,
    form: ActivationForm,
    order: Order,
) -> None:
    """Writes the gradients of the first `rows` rows, and act, and leaves all other rows unchanged.

    grad: [C, F], gate_up's dtype; grad_gate_up, grad_scale: shapes and dtypes of gate_up and scale; act: [C, F],
    gate_up's dtype, or None; the other arguments as in act_rows. order: activations without a gain have only
    SCALE_FIRST.
    """
    value_of, slope_of = _FUNCTIONS[form.activation.curve]
    ffn, clamp, gain = form.width(gate_up), form.clamp, form.gain if order is Order.SCALE_LAST else None
    is_strided = clamp is not None or (form.activation.is_gated and form.activation.curve is Curve.QUICK_GELU)
    if act is not None and (gain is not None or is_strided):
        # The values below may differ from the forward's in the last bits: the formula that also yields the slope is
        # another one, and clamped gates, or a sigmoid in the memory of the gradient, have another memory layout, on
        # which torch's choice of instructions depends.
        act_rows(gate_up, scale, rows=rows, out=act, form=form)
        act = None
    for chunk, given_gate, given_up in _chunks(gate_up, rows, form=form):
        gate, up = given_gate, given_up
        if up is not None:
            gate, up = limited(gate, up, clamp=clamp, offset=form.offset)
        incoming = grad[chunk].to(gate.dtype)
        weight = 1 if scale is None else scale[chunk, None].to(gate.dtype)
        grad_gate = _destination(grad_gate_up[chunk, :ffn], gate.dtype)
        if gain is None:
            value = value_of(gate, grad_gate)  # in the memory that the gradient will overwrite
        else:
            value = _value_beside_slope(gate, gain=gain, slope=grad_gate)
        if act is not None:
            # The operations of act_rows, on the same value.
            emitted = _destination(act[chunk], gate.dtype)
            emitted.copy_(value) if up is None else torch.mul(value, up, out=emitted)
            if scale is not None:
                emitted.mul_(weight)
            _write(act[chunk], emitted)
        if up is None or given_up is None:
            if grad_scale is not None:
                grad_scale[chunk] = (incoming * value).sum(1)
        else:
            grad_up = torch.mul(incoming, value, out=_destination(grad_gate_up[chunk, ffn:], gate.dtype))
            if grad_scale is not None:
                grad_scale[chunk] = (grad_up * up).sum(1)
            if scale is not None:
                grad_up.mul_(weight)
            if clamp is not None:
                grad_up.masked_fill_(given_up.abs() > clamp, 0)
            _write(grad_gate_up[chunk, ffn:], grad_up)
        if gain is None:
            grad_value = incoming * weight
            slope_of(grad_value if up is None else grad_value.mul_(up), gate, out=grad_gate)
        else:
            grad_gate.mul_(incoming if up is None else torch.mul(incoming, up, out=value))
            if scale is not None:
                grad_gate.mul_(weight)
        if clamp is not None:
            grad_gate.masked_fill_(given_gate > clamp, 0)
        _write(grad_gate_up[chunk, :ffn], grad_gate)


def _chunks(gate_up: Tensor, rows: int, *, form: ActivationForm) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yields row ranges with their gate and up, in fp32 if gate_up is in half precision."""
    elements = _CPU_ELEMENTS if gate_up.device.type == "cpu" else _GPU_ELEMENTS
    step, ffn = max(1, elements // max(1, gate_up.shape[1])), form.width(gate_up)
    for start in range(0, rows, step):
        chunk = slice(start, min(start + step, rows))
        values = gate_up[chunk].to(torch.promote_types(gate_up.dtype, torch.float32))
        yield chunk, values[:, :ffn], values[:, ffn:] if form.activation.is_gated else None


def _value_beside_slope(x: Tensor, *, gain: float, slope: Tensor) -> Tensor:
    """Returns x * sigmoid(gain * x), and writes its derivative to `slope`; all [C, F], fp32 or fp64."""
    sigmoid = torch.sigmoid(x if gain == 1 else gain * x)
    value = x * sigmoid
    # The derivative is sigmoid + gain (value - value * sigmoid).
    torch.add(sigmoid, value, alpha=gain, out=slope).addcmul_(value, sigmoid, value=-gain)
    return value


def _destination(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `rows` if it has the compute dtype, else a buffer, so that half precision is rounded once."""
    return rows if rows.dtype == dtype else torch.empty_like(rows, dtype=dtype)


def _write(rows: Tensor, values: Tensor) -> None:
    """Copies values into rows, with rounding. Values of the same dtype were computed in place; see _destination."""
    if rows.dtype != values.dtype:
        rows.copy_(values)


def _gelu(approximate: str) -> tuple[Value, Slope]:
    def value(x: Tensor, out: Tensor) -> Tensor:
        if out.is_contiguous() or x.dtype is torch.float64:
            return _aten.gelu.out(x, approximate=approximate, out=out)
        # With a contiguous x in fp32, torch 2.13 on a CPU ignores the strides of `out`.
        return out.copy_(_aten.gelu(x, approximate=approximate))

    def slope(grad: Tensor, x: Tensor, *, out: Tensor) -> Tensor:
        return _aten.gelu_backward.grad_input(grad, x, approximate=approximate, grad_input=out)

    return value, slope


def _silu(x: Tensor, out: Tensor) -> Tensor:
    return _aten.silu.out(x, out=out)


def _silu_slope(grad: Tensor, x: Tensor, *, out: Tensor) -> Tensor:
    return _aten.silu_backward.grad_input(grad, x, grad_input=out)


def _quick_gelu(x: Tensor, out: Tensor) -> Tensor:
    return torch.mul(x, QUICK_GELU_GAIN, out=out).sigmoid_().mul_(x)


def _quick_gelu_slope(grad: Tensor, x: Tensor, *, out: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(QUICK_GELU_GAIN * x)
    return torch.mul(grad, sigmoid + QUICK_GELU_GAIN * x * sigmoid * (1 - sigmoid), out=out)


def _squared_relu(x: Tensor, out: Tensor) -> Tensor:
    return torch.clamp(x, min=0, out=out).square_()


def _squared_relu_slope(grad: Tensor, x: Tensor, *, out: Tensor) -> Tensor:
    return torch.mul(grad * 2, F.relu(x), out=out)


_FUNCTIONS: dict[Curve, tuple[Value, Slope]] = {
    Curve.SILU: (_silu, _silu_slope),
    Curve.GELU: _gelu("none"),
    Curve.GELU_TANH: _gelu("tanh"),
    Curve.QUICK_GELU: (_quick_gelu, _quick_gelu_slope),
    Curve.SQUARED_RELU: (_squared_relu, _squared_relu_slope),
}
