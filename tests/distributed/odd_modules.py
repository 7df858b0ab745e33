"""Modules for tests of data parallelism: some parts are not used, used again or read late. Holds no tests."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Parts(nn.Module):
    """Layers of which a forward uses some, in any order; those below 0 run again in backward, with a gradient each."""

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
    """Backward needs the last layer's weight once more at its very end, long after its gradient is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(5, 5) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.layers
        x = nn.functional.linear(first(x), others[-1].weight.detach())
        for layer in others:
            x = layer(x)
        return x
