"""Activation functions that torch does not have by these names; gated ones are in fusions/."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Of quick_gelu's sigmoid, which is then close to GELU's.
QUICK_GELU_GAIN = 1.702


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2; x: [*], any float dtype -> same."""
    return torch.square(F.relu(x))


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x); x: [*], any float dtype -> same."""
    return x * torch.sigmoid(QUICK_GELU_GAIN * x)
