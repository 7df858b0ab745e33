"""The few helpers that Megatron users import from here by name; nothing else belongs in this file."""

from typing import Any

from torch import nn


def divide(numerator: int, denominator: int) -> int:
    """Exact quotient; raises ValueError where there is a remainder."""
    if denominator <= 0 or numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


def unwrap_model(model: nn.Module | list[nn.Module]) -> Any:
    """The model, or each of a list, without wrappers that keep it as `module`."""
    if isinstance(model, list):
        return [unwrap_model(chunk) for chunk in model]
    while isinstance(inner := model._modules.get("module"), nn.Module):
        model = inner
    return model


def get_model_config(model: nn.Module) -> Any:
    """The `config` of a model, looked up through its wrappers."""
    return unwrap_model(model).config
