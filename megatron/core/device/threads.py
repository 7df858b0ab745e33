"""Settings that torch keeps for each thread, passed on to another thread that computes on its behalf."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from typing import Any

import torch

from megatron.core.device.current import default_device
from megatron.core.device.torch_internals import dispatch_mode_stack

# Contexts of inherited_by_threads.
_INHERITED: ContextVar[tuple[Callable[[], AbstractContextManager[Any]], ...]] = ContextVar("inherited", default=())


@contextmanager
def inherited_by_threads(enter: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Makes threads that compute on behalf of code inside the block enter a context, as ThreadSettings does.

    enter: returns the context, on the other thread.
    """
    before = _INHERITED.set((*_INHERITED.get(), enter))
    try:
        yield
    finally:
        _INHERITED.reset(before)


class ThreadSettings:
    """The settings of the thread that constructs this object.

    These are the GPU and the current stream, the default device, autocast, dispatch modes, context variables, and the
    contexts of inherited_by_threads. Autograd's grad mode and hooks on saved tensors are not included, because a
    backward needs neither.
    """

    def __init__(self) -> None:
        device, self._context = default_device(), copy_context()
        self._kind, self._default = device.type, torch.get_default_device()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._modes = dispatch_mode_stack()
        self._autocast = None
        if torch.is_autocast_enabled(self._kind):
            self._autocast = torch.get_autocast_dtype(self._kind), torch.is_autocast_cache_enabled()

    def submit(self, function: Callable[[], Any], executor: ThreadPoolExecutor) -> Future[Any]:
        """Calls function() with these settings on a thread of the executor, while the caller waits for its turn."""
        return executor.submit(self._context.run, self._run, function)

    def _run(self, function: Callable[[], Any]) -> Any:
        with ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(self._stream.device))
                stack.enter_context(torch.cuda.stream(self._stream))
            if self._default.type != "cpu":
                stack.enter_context(self._default)
            if self._autocast is not None:
                dtype, caches = self._autocast
                stack.enter_context(torch.autocast(self._kind, dtype=dtype, cache_enabled=caches))
            for mode in self._modes:
                stack.enter_context(mode)
            for enter in _INHERITED.get():
                stack.enter_context(enter())
            return function()
