"""Registers operators with torch: a CPU function, the Triton launcher of the same name, and what fake tensors give."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

Register = Callable[[Callable[..., Any]], Callable[..., Any]]


def returns_nothing(*args: Any, **named: Any) -> None:
    """A fake implementation for operators that only write into memory of the caller: returns None."""


def operator(
    namespace: str, schema: str, *, cuda: Mapping[str, Any], fake: Callable[..., Any] = returns_nothing
) -> Register:
    """A decorator that makes <namespace>::<name> of a CPU function; the schema has everything but the name.

    cuda: launchers by name, empty where Triton is not installed. fake: the results for fake tensors.
    """

    def register(on_cpu: Callable[..., Any]) -> Callable[..., Any]:
        name = f"{namespace}::{on_cpu.__name__}"
        torch.library.define(name, schema)
        torch.library.impl(name, "cpu", on_cpu)
        if cuda:
            torch.library.impl(name, "cuda", cuda[on_cpu.__name__])
        torch.library.register_fake(name, fake)
        return on_cpu

    return register
