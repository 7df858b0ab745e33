"""Places in a spec that stay empty: a module and a function that give back what they get."""

from typing import Any

from torch import nn


class IdentityOp(nn.Module):
    """Returns its first argument."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """x: anything, returned as it is."""
        return x


class IdentityFuncOp(IdentityOp):
    """Called, it returns the identity function: for places such as bias-dropout-add that give a function."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a function that returns its argument."""
        return super().forward
