"""Threads that compute on behalf of another one, and the settings that torch keeps for each thread."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from megatron.core.device.current import default_device
from megatron.core.device.torch_internals import TorchDispatchMode, dispatch_mode_stack

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

    def run(self, function: Callable[[], Any]) -> Any:
        """Returns function(), called with these settings on the current thread."""
        return self._context.run(self._run, function)

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
                # Not by the methods of its own class, which may begin a new record.
                TorchDispatchMode.__enter__(mode)
                stack.push(partial(TorchDispatchMode.__exit__, mode))
            for enter in _INHERITED.get():
                stack.enter_context(enter())
            return function()


class DelegateThread:
    """A thread that calls functions on behalf of others, one after the other. It starts with the first call.

    Once it has started, an interrupt in the thread of a caller leaves nothing locked: SimpleQueue is written in C,
    whereas executors and semaphores are written in Python, and an interrupt inside them could leave their locks held.
    """

    def __init__(self, name: str) -> None:
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._functions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def submit(self, function: Callable[[], None]) -> Callable[[], None]:
        """Calls function() on the thread. Returns a function that waits until the call has ended.

        function must not raise errors.
        """
        if self._thread.ident is None:
            self._thread.start()
        ended: SimpleQueue[None] = SimpleQueue()
        self._functions.put(partial(_call, function, ended))
        return ended.get

    def close(self) -> None:
        """Ends the thread after the functions that it was given."""
        self._functions.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while (function := self._functions.get()) is not None:
            function()
            # The next one may come much later.
            del function


def _call(function: Callable[[], None], ended: SimpleQueue[None]) -> None:
    function()
    ended.put(None)
