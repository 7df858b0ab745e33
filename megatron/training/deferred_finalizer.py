"""Gradients are finalized when the loop says so, not when the schedule is done; how, is megatron.core.distributed's."""

from collections.abc import Callable
from typing import Any

from megatron.core.distributed import finalize_model_grads


class DeferredFinalizer:
    """Stands in for finalize_model_grads in the schedule, and does its work once losses are known to be finite."""

    def __init__(self, finalize: Callable[..., None] | None) -> None:
        """finalize: a script's own; None for finalize_model_grads."""
        self._finalize, self.is_default = finalize or finalize_model_grads, finalize is None
        self._waiting: tuple[Any, ...] | None = None

    def __call__(self, *arguments: Any) -> None:
        """Keeps what the schedule hands over after the last backward: the chunks and their number of tokens."""
        self._waiting = arguments

    def forget(self) -> None:
        """Drops what the last backward handed over: its gradients count nowhere."""
        self._waiting = None

    def replayed(self, handed_over: tuple[Any, ...]) -> None:
        """Says that a CUDA graph has run the passes whose schedule handed this over, in the same memory."""
        self._waiting = handed_over

    @property
    def handed_over(self) -> tuple[Any, ...]:
        """What the schedule gave after the last backward."""
        assert self._waiting is not None, "no backward pass since the last step"
        return self._waiting

    def finish(self) -> None:
        """Finalizes the gradients of the last backward. Collective."""
        self._finalize(*self.take())

    def take(self) -> tuple[Any, ...]:
        """What the schedule gave after the last backward, for whom finalizes it in another way."""
        arguments, self._waiting = self.handed_over, None
        return arguments
