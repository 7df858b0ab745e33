"""Expert activations by name, with their values and gradients of live rows on the CPU.

The GPU kernels are in triton_activations.py.

Shapes: C rows of the buffers, of which the first R are live; F ffn; [C, 2F] holds gate before up. act = f(gate) * up *
scale, multiplied in this order. Half precision is computed in fp32 and rounded once. A clamp c limits gate to at most c
and up to the range from -c to c. An offset is added to up after the clamp.
"""

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements of gate_up per chunk. Temporaries of this size stay in the shared cache.
_CHUNK_ELEMENTS = 1 << 19
_aten = torch.ops.aten

Value = Callable[[Tensor, Tensor], Tensor]
Slope = Callable[..., Tensor]


class Curve(enum.IntEnum):
    """Activation functions f. Kernels receive the value of a member."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    QUICK_GELU = 3
    SQUARED_RELU = 4


@dataclass(frozen=True)
class Activation:
    """Activation function f. is_gated: whether f(gate) is multiplied by up.

    value(x, out) writes f(x) to out and returns it. slope(g, x, out=out) writes g * f'(x) to out and returns it.
    """

    curve: Curve
    is_gated: bool
    value: Value
    slope: Slope

    def width(self, gate_up: Tensor) -> int:
        """Returns F. gate_up: [C, 2F], or [C, F] for a plain activation, any float dtype."""
        return gate_up.shape[1] // 2 if self.is_gated else gate_up.shape[1]


@dataclass(frozen=True)
class ActivationForm:
    """Name of an activation, with an optional clamp and offset if it is gated.

    Raises ValueError for an unknown name, and for a plain activation with a clamp or an offset.
    """

    name: str = "swiglu"
    clamp: float | None = None
    offset: float = 0.0

    def __post_init__(self) -> None:
        if not self.activation.is_gated and (self.clamp is not None or self.offset):
            raise ValueError(
                f"clamp is {self.clamp} and offset is {self.offset}: {self.name} is not gated and supports neither"
            )

    @property
    def activation(self) -> Activation:
        """Activation with this name."""
        return activation_of(self.name)

    def limited(self, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Applies clamp and offset; returns gate and up. Arguments and results are [R, F], fp32 or fp64."""
        if up is None:
            return gate, None
        if self.clamp is not None:
            gate, up = gate.clamp(max=self.clamp), up.clamp(min=-self.clamp, max=self.clamp)
        return gate, up + self.offset if self.offset else up

    def stop_clamped(self, grad: Tensor, given: Tensor) -> Tensor:
        """Zeroes the gradient of clamped values in place and returns it; grad, given: [R, F], of one dtype."""
        return grad if self.clamp is None else grad.masked_fill_(given > self.clamp, 0)


def activation_of(name: str) -> Activation:
    """Returns the activation with this name. Raises ValueError if the name is unknown."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation ({name!r}) must be one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def act_rows(gate_up: Tensor, scale: Tensor | None, *, rows: int, out: Tensor, form: ActivationForm) -> None:
    """Writes act of the first `rows` rows into `out` and leaves all other rows unchanged.

    gate_up: [C, 2F] (or [C, F]), any float dtype; scale: [C] or None, any float dtype; out: [C, F], gate_up's dtype.
    """
    activation = form.activation
    for chunk, given_gate, given_up in _chunks(gate_up, rows, activation=activation):
        gate, up = form.limited(given_gate, given_up)
        act = activation.value(gate, _destination(out[chunk], gate.dtype))
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
    form: ActivationForm,
) -> None:
    """Writes the gradients of the first `rows` rows and leaves all other rows unchanged.

    grad: [C, F], gate_up's dtype; grad_gate_up, grad_scale: shapes and dtypes of gate_up and scale; the other arguments
    as in act_rows.
    """
    activation = form.activation
    ffn = activation.width(gate_up)
    for chunk, given_gate, given_up in _chunks(gate_up, rows, activation=activation):
        gate, up = form.limited(given_gate, given_up)
        incoming = grad[chunk].to(gate.dtype)
        weight = 1 if scale is None else scale[chunk, None].to(gate.dtype)
        grad_gate = _destination(grad_gate_up[chunk, :ffn], gate.dtype)
        value = activation.value(gate, grad_gate)  # in the memory that the gradient will overwrite
        if up is None or given_up is None:
            if grad_scale is not None:
                grad_scale[chunk] = (incoming * value).sum(1)
            incoming = incoming * weight
        else:
            grad_up = torch.mul(incoming, value, out=_destination(grad_gate_up[chunk, ffn:], gate.dtype))
            if grad_scale is not None:
                grad_scale[chunk] = (grad_up * up).sum(1)
            incoming = (incoming * weight).mul_(up)
            _write(grad_gate_up[chunk, ffn:], form.stop_clamped(grad_up.mul_(weight), given_up.abs()))
        grad_gate = form.stop_clamped(activation.slope(incoming, gate, out=grad_gate), given_gate)
        _write(grad_gate_up[chunk, :ffn], grad_gate)


def _chunks(gate_up: Tensor, rows: int, *, activation: Activation) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yields row ranges with their gate and up, in fp32 if gate_up is in half precision."""
    step, ffn = max(1, _CHUNK_ELEMENTS // max(1, gate_up.shape[1])), activation.width(gate_up)
    for start in range(0, rows, step):
        chunk = slice(start, min(start + step, rows))
        values = gate_up[chunk].to(torch.promote_types(gate_up.dtype, torch.float32))
        yield chunk, values[:, :ffn], values[:, ffn:] if activation.is_gated else None


def _destination(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `rows` if it has the compute dtype, else a buffer, so that half precision is rounded once."""
    return rows if rows.dtype == dtype else torch.empty_like(rows, dtype=dtype)


def _write(rows: Tensor, values: Tensor) -> None:
    """Copies values into rows, with rounding. Values of the same dtype were computed in place; see _destination."""
    if rows.dtype != values.dtype:
        rows.copy_(values)


def _gelu(approximate: str) -> tuple[Value, Slope]:
    def value(x: Tensor, out: Tensor) -> Tensor:
        return _aten.gelu.out(x, approximate=approximate, out=out)

    def slope(grad: Tensor, x: Tensor, *, out: Tensor) -> Tensor:
        return _aten.gelu_backward.grad_input(grad, x, approximate=approximate, grad_input=out)

    return value, slope


def _silu(x: Tensor, out: Tensor) -> Tensor:
    return _aten.silu.out(x, out=out)


def _silu_slope(grad: Tensor, x: Tensor, *, out: Tensor) -> Tensor:
    return _aten.silu_backward.grad_input(grad, x, grad_input=out)


def _quick_gelu(x: Tensor, out: Tensor) -> Tensor:
    return torch.mul(x, 1.702, out=out).sigmoid_().mul_(x)


def _quick_gelu_slope(grad: Tensor, x: Tensor, *, out: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(1.702 * x)
    return torch.mul(grad, sigmoid + 1.702 * x * sigmoid * (1 - sigmoid), out=out)


def _squared_relu(x: Tensor, out: Tensor) -> Tensor:
    return torch.clamp(x, min=0, out=out).square_()


def _squared_relu_slope(grad: Tensor, x: Tensor, *, out: Tensor) -> Tensor:
    return torch.mul(grad * 2, F.relu(x), out=out)


_ACTIVATIONS = {
    "swiglu": Activation(Curve.SILU, True, _silu, _silu_slope),
    "geglu": Activation(Curve.GELU, True, *_gelu("none")),
    "geglu_tanh": Activation(Curve.GELU_TANH, True, *_gelu("tanh")),
    "quick_geglu": Activation(Curve.QUICK_GELU, True, _quick_gelu, _quick_gelu_slope),
    "silu": Activation(Curve.SILU, False, _silu, _silu_slope),
    "gelu": Activation(Curve.GELU, False, *_gelu("none")),
    "gelu_tanh": Activation(Curve.GELU_TANH, False, *_gelu("tanh")),
    "quick_gelu": Activation(Curve.QUICK_GELU, False, _quick_gelu, _quick_gelu_slope),
    "squared_relu": Activation(Curve.SQUARED_RELU, False, _squared_relu, _squared_relu_slope),
}
