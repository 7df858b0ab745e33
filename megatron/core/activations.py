"""Activation functions that torch does not provide under these names. Gated activations are in fusions/."""

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
