"""Placeholders in a spec: a module and a function that return their input."""

from typing import Any

from torch import nn


class IdentityOp(nn.Module):
    """Returns its first argument."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns x, any object, unchanged."""
        return x


class IdentityFuncOp(IdentityOp):
    """Returns the identity function when called, for places in a spec such as bias-dropout-add that
    return a function.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a function that returns its argument."""
        return super().forward
