"""StaleReads: finds the operation that uses a parameter before its all-gather, inside a module's forward."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.distributed.flat_buffer import Entry


class StaleReads:
    """The parameters that may not be touched now, and the modules whose forward is watched; stop: raises a message."""

    def __init__(self, stop: Callable[[str], NoReturn]) -> None:
        self._stop = stop
        self._forbidden: dict[nn.Parameter, Entry] = {}
        self._is_paused = False

    def watch(self, module: nn.Module) -> None:
        """Looks at each operation of `module`'s forward from now on."""
        modes: list[_Watch] = []

        def enter(*unused: Any) -> None:
            modes.append(_Watch(self))
            modes[-1].__enter__()

        def leave(*unused: Any) -> None:
            modes.pop().__exit__(None, None, None)

        # Outermost, so that also what other hooks do is seen; left when forward raises, too.
        module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave, always_call=True)

    def forbid(self, entries: Sequence[Entry]) -> None:
        """The parameters are stale from now on."""
        self._forbidden.update((entry.param, entry) for entry in entries)

    def allow(self, entries: Sequence[Entry]) -> None:
        """They are current."""
        for entry in entries:
            self._forbidden.pop(entry.param, None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations inside are not looked at."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def check(self, operation: Any, tensors: Iterable[Any]) -> None:
        """Stops if one of these, tensors or anything else, shares elements with a stale parameter.

        Any shapes and dtypes. operation: for the message.
        """
        if not self._forbidden or self._is_paused:
            return
        taken = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
        stale = [
            entry.name for param, entry in self._forbidden.items() if any(_share_elements(t, param) for t in taken)
        ]
        if stale:
            self._stop(
                f"{operation} takes {', '.join(stale)} before the gather of these parameters is done: their module "
                "must be called, or wait_params be called with them, first"
            )


class _Watch(TorchDispatchMode):
    def __init__(self, reads: StaleReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # A view reads nothing; collectives are what makes the parameters current.
        if not func.is_view and func.namespace != "c10d":
            self._reads.check(func, tree_leaves((args, kwargs)))
        return func(*args, **kwargs)


def _share_elements(tensor: torch.Tensor, param: torch.Tensor) -> bool:
    if tensor.numel() == 0 or param.numel() == 0:
        return False
    if tensor.untyped_storage().data_ptr() != param.untyped_storage().data_ptr():
        return False
    begin, end = _reach(tensor)
    param_begin, param_end = _reach(param)
    return begin < param_end and param_begin < end


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """First element in its storage, and one past the last."""
    begin = int(tensor.storage_offset())
    return begin, begin + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
