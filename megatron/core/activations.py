"""Activation functions of feed-forward layers, and the names of those that have kernels.

fusions/gated_activation.py computes activations and their gradients.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# With this gain, x * sigmoid(gain * x) approximates GELU.
QUICK_GELU_GAIN = 1.702


def squared_relu(x: Tensor) -> Tensor:
    """Returns max(x, 0)^2 for each element.

    x: [*], any float dtype. Returns the same shape and dtype.
    """
    return torch.square(F.relu(x))


def quick_gelu(x: Tensor) -> Tensor:
    """Returns x * sigmoid(1.702 x), an approximation of GELU, for each element.

    x: [*], any float dtype. Returns the same shape and dtype.
    """
    return x * torch.sigmoid(QUICK_GELU_GAIN * x)


class Curve(enum.IntEnum):
    """Activation functions f that have kernels. Kernels receive the value of a member."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    QUICK_GELU = 3
    SQUARED_RELU = 4


@dataclass(frozen=True)
class Activation:
    """Activation with a name: f(gate) * up if it is gated, or f(x). function: f in a config, or None."""

    curve: Curve
    is_gated: bool
    function: Callable[[Tensor], Tensor] | None


ACTIVATIONS = {
    "swiglu": Activation(Curve.SILU, True, F.silu),
    "geglu": Activation(Curve.GELU, True, F.gelu),
    "geglu_tanh": Activation(Curve.GELU_TANH, True, None),
    "quick_geglu": Activation(Curve.QUICK_GELU, True, quick_gelu),
    "silu": Activation(Curve.SILU, False, F.silu),
    "gelu": Activation(Curve.GELU, False, F.gelu),
    "gelu_tanh": Activation(Curve.GELU_TANH, False, None),
    "quick_gelu": Activation(Curve.QUICK_GELU, False, quick_gelu),
    "squared_relu": Activation(Curve.SQUARED_RELU, False, squared_relu),
}
