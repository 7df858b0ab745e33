"""Activation functions that torch does not have under these names; gated ones are in fusions/."""

import torch
import torch.nn.functional as F
from torch import Tensor

# With this gain the sigmoid of quick_gelu approximates that of GELU.
QUICK_GELU_GAIN = 1.702


def squared_relu(x: Tensor) -> Tensor:
    """Returns max(x, 0)^2; x: [*], any float dtype -> same."""
    return torch.square(F.relu(x))


def quick_gelu(x: Tensor) -> Tensor:
    """Returns x * sigmoid(1.702 x); x: [*], any float dtype -> same."""
    return x * torch.sigmoid(QUICK_GELU_GAIN * x)
