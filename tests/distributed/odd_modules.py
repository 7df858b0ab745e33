"""Modules for data-parallel tests, with parts that are unused, used repeatedly or read late. Holds no tests."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Parts(nn.Module):
    """Runs layers in the order of a plan; a negative index recomputes its layer in backward, one gradient per use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(5))

    def forward(self, x: torch.Tensor, plan: Sequence[int]) -> torch.Tensor:
        for index in plan:
            layer = self.layers[index]
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if index < 0 else layer(x))
        return x


class ReadDetached(nn.Module):
    """A module whose backward reads a weight at its very end, long after the weight's gradient is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(5, 5) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.layers
        x = nn.functional.linear(first(x), others[-1].weight.detach())
        for layer in others:
            x = layer(x)
        return x
