"""Calls the callables of a model's configuration that reduce gradients and gather parameters, chunk by chunk."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.schedule import Action, ActionKind


class SyncCallables:
    """Calls no_sync_func, grad_sync_func and param_sync_func during one step.

    no_sync_func is entered for each chunk before the first pass and exited before the chunk's last pass, whose
    gradients complete the sums: a backward, or the weight pass of one. If grad_sync_func is given, no_sync_func is
    exited after that pass instead, and grad_sync_func(parameters) follows. A single no_sync_func for several chunks
    defers the reductions of all chunks: it is exited for the last pass of each chunk, and entered again.
    param_sync_func(parameters) is called for the first two chunks before the first pass, and for each other chunk
    before the first forward of the preceding chunk.

    Each setting must be None, one callable for one chunk, or a list with one per chunk; a single no_sync_func may serve
    several chunks. Otherwise ValueError is raised.
    """

    def __init__(self, config: ModelParallelConfig, model: Sequence[nn.Module], *, actions: Sequence[Action]) -> None:
        self._model = model
        # One per chunk, or one for all chunks together.
        self._is_shared = callable(config.no_sync_func)
        self._no_sync = _per_chunk("no_sync_func", config.no_sync_func, num_chunks=1 if self._is_shared else len(model))
        self._grad_sync = _per_chunk("grad_sync_func", config.grad_sync_func, num_chunks=len(model))
        self._param_sync = _per_chunk("param_sync_func", config.param_sync_func, num_chunks=len(model))
        self._first_forward = {a.chunk: a for a in reversed(actions) if a.kind is ActionKind.FORWARD}
        # The passes that complete the gradients of each chunk.
        self._last_pass = {a.chunk: a for a in actions if a.kind is not ActionKind.FORWARD}
        self._unfinished = set(self._last_pass)
        self._deferred = [ExitStack() for _ in self._no_sync]

    def begin(self) -> None:
        """Runs the callables due before the first pass."""
        self._defer()
        for chunk in range(min(2, len(self._model))):
            self._gather(chunk)

    def before(self, action: Action) -> None:
        """Runs the callables due before a pass."""
        if action.chunk > 0 and action == self._first_forward.get(action.chunk):
            self._gather(action.chunk + 1)
        if not self._grad_sync and action == self._last_pass.get(action.chunk):
            self._let_go(action.chunk)

    def after(self, action: Action) -> None:
        """Runs the callables due after a pass."""
        if action != self._last_pass.get(action.chunk):
            return
        if self._grad_sync:
            self._let_go(action.chunk)
            self._grad_sync[action.chunk](self._model[action.chunk].parameters())
        self._unfinished.discard(action.chunk)
        if self._is_shared:
            self._defer()

    def end(self) -> None:
        """Ends deferral after the last pass, or after an error."""
        for deferred in self._deferred:
            deferred.close()

    def _defer(self) -> None:
        if self._unfinished:
            for deferred, no_sync in zip(self._deferred, self._no_sync):
                deferred.enter_context(no_sync())

    def _let_go(self, chunk: int) -> None:
        if self._no_sync:
            self._deferred[0 if self._is_shared else chunk].close()

    def _gather(self, chunk: int) -> None:
        if self._param_sync and chunk < len(self._model):
            self._param_sync[chunk](self._model[chunk].parameters())


def _per_chunk(name: str, given: Any, *, num_chunks: int) -> list[Callable[..., Any]]:
    """Returns a list with one callable per chunk; an empty list for None."""
    if given is None:
        return []
    functions = list(given) if isinstance(given, (list, tuple)) else [given]
    if len(functions) != num_chunks:
        raise ValueError(
            f"{name} has {len(functions)} callables for {num_chunks} model chunks: must be a list with one for each"
        )
    return functions
