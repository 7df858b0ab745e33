"""Registers operators with torch: a CPU function, a Triton launcher, and an implementation for fake tensors."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

Register = Callable[[Callable[..., Any]], Callable[..., Any]]


def returns_nothing(*args: Any, **named: Any) -> None:
    """Implementation for fake tensors of operators that only write into the caller's memory. Returns None."""


def operator(
    namespace: str,
    schema: str,
    *,
    cuda: Iterable[Callable[..., Any]],
    name: str | None = None,
    fake: Callable[..., Any] = returns_nothing,
) -> Register:
    """Returns a decorator that registers a CPU function as <namespace>::<name>.

    schema: the signature without the name. cuda: launchers, including one with the operator's name; empty if Triton is
    not installed. name: None means the name of the CPU function. fake: implementation for fake tensors.
    """

    launchers = {launcher.__name__: launcher for launcher in cuda}

    def register(on_cpu: Callable[..., Any]) -> Callable[..., Any]:
        own_name = name or on_cpu.__name__
        full_name = f"{namespace}::{own_name}"
        torch.library.define(full_name, schema)
        torch.library.impl(full_name, "cpu", on_cpu)
        if launchers:
            torch.library.impl(full_name, "cuda", launchers[own_name])
        torch.library.register_fake(full_name, fake)
        return on_cpu

    return register
