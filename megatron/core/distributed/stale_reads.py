"""StaleReads: finds the operation that uses a parameter before its all-gather.

Inside a module's forward it finds any use, alike on all ranks. Outside the optimizer is at work: there only what other
ranks own may not be touched.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from megatron.core.distributed.flat_buffer import Entry


@dataclass(frozen=True)
class _Range:
    """Elements [begin, end) of a storage."""

    begin: int
    end: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Range":
        """From a tensor's first element to its last: any shape and dtype."""
        begin = int(tensor.storage_offset())
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        return cls(begin, begin + 1 + reach if tensor.numel() else begin)

    def without(self, other: "_Range") -> "list[_Range]":
        parts = [_Range(self.begin, min(self.end, other.begin)), _Range(max(self.begin, other.end), self.end)]
        return [part for part in parts if part.begin < part.end]

    def meets(self, other: "_Range") -> bool:
        return max(self.begin, other.begin) < min(self.end, other.end)


@dataclass(frozen=True)
class _Stale:
    """A parameter that may not be used now: where it is, and which parts of that are others' to update."""

    name: str
    whole: list[_Range]
    of_others: list[_Range]


class StaleReads:
    """The parameters that may not be touched now, and the modules whose forward is watched; stop: raises a message."""

    def __init__(self, stop: Callable[[str], NoReturn]) -> None:
        self._stop = stop
        self._forbidden: dict[nn.Parameter, _Stale] = {}
        self._is_paused = False
        self._outside = _Watch(self, is_outside=True)

    def watch(self, module: nn.Module) -> None:
        """Looks at each operation of `module`'s forward from now on."""
        modes: list[_Watch] = []

        def enter(*unused: Any) -> None:
            modes.append(_Watch(self, is_outside=False))
            modes[-1].__enter__()

        def leave(*unused: Any) -> None:
            modes.pop().__exit__(None, None, None)
            self._leave_outside()

        # Outermost, so that also what other hooks do is seen; left when forward raises, too.
        module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave, always_call=True)

    def forbid(self, entries: Sequence[Entry], *, own: torch.Tensor) -> None:
        """The parameters are stale from now on; own: [n], any dtype, what this rank may still update."""
        for entry in entries:
            whole = _Range.of(entry.param)
            self._forbidden[entry.param] = _Stale(entry.name, [whole], whole.without(_Range.of(own)))
        if any(stale.of_others for stale in self._forbidden.values()):
            self._enter_outside()

    def allow(self, entries: Sequence[Entry]) -> None:
        """They are current."""
        for entry in entries:
            self._forbidden.pop(entry.param, None)
        self._leave_outside()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations inside are not looked at."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def check(self, operation: Any, tensors: Iterable[Any], *, is_outside: bool) -> None:
        """Stops if one of these, tensors or anything else, shares elements with a stale parameter.

        Any shapes and dtypes. operation: for the message. is_outside: of all modules' forward.
        """
        if not self._forbidden or self._is_paused:
            return
        taken = [(t.untyped_storage().data_ptr(), _Range.of(t)) for t in tensors if isinstance(t, torch.Tensor)]
        names = [
            stale.name
            for param, stale in self._forbidden.items()
            for ranges in [stale.of_others if is_outside else stale.whole]
            if any(
                address == param.untyped_storage().data_ptr() and any(one.meets(reach) for one in ranges)
                for address, reach in taken
            )
        ]
        if names:
            self._stop(
                f"{operation} takes {', '.join(names)} before the gather of these parameters is done: their module "
                "must be called, or DistributedDataParallel.wait_params be called with them, first"
            )

    def _enter_outside(self) -> None:
        # Below all modes of others, so that whoever enters one leaves that one. A model whose step ended in an error
        # may have left its own.
        modes = _get_current_dispatch_mode_stack()
        if self._outside not in modes and all(isinstance(mode, _Watch) and mode.is_outside for mode in modes):
            self._outside.__enter__()

    def _leave_outside(self) -> None:
        if not self._forbidden and _get_current_dispatch_mode_stack()[-1:] == [self._outside]:
            self._outside.__exit__(None, None, None)


class _Watch(TorchDispatchMode):
    def __init__(self, reads: StaleReads, *, is_outside: bool) -> None:
        super().__init__()
        self._reads, self.is_outside = reads, is_outside

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        reads_nothing = func.is_view or name.endswith("_like") or name.startswith("new_")
        # Collectives are what makes the parameters current.
        if not reads_nothing and func.namespace != "c10d":
            self._reads.check(func, tree_leaves((args, kwargs)), is_outside=self.is_outside)
        return func(*args, **kwargs)
