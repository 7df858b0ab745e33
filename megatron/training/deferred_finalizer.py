"""Gradients are finalized when the loop says so, not when the schedule is done; how, is megatron.core.distributed's."""

from collections.abc import Callable
from typing import Any


class DeferredFinalizer:
    """Stands in for finalize_model_grads in the schedule, and does its work once losses are known to be finite."""

    def __init__(self, finalize: Callable[..., None]) -> None:
        self._finalize = finalize
        self._waiting: tuple[Any, ...] | None = None

    def __call__(self, *arguments: Any) -> None:
        """Keeps what the schedule hands over after the last backward: the chunks and their number of tokens."""
        self._waiting = arguments

    def forget(self) -> None:
        """Drops what the last backward handed over: its gradients count nowhere."""
        self._waiting = None

    def finish(self) -> None:
        """Finalizes the gradients of the last backward. Collective."""
        assert self._waiting is not None, "no backward pass since the last step"
        arguments, self._waiting = self._waiting, None
        self._finalize(*arguments)
