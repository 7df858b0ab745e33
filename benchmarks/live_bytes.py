"""Counts the memory of tensors that were created in a block of code and are still alive at its end.

Independent of the model.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Records the memory of every result in its body. `total` returns the bytes that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        known = {_address(leaf) for leaf in arguments}
        results = func(*args, **(kwargs or {}))
        # A view allocates nothing. Neither does an in-place write, or replacing the storage of an argument.
        known.update(map(_address, arguments))
        for leaf in tree_leaves(results):
            is_memory = isinstance(leaf, torch.Tensor) and leaf.device.type != "meta"
            if is_memory and _address(leaf) not in known:
                self._made.setdefault(_address(leaf), StorageWeakRef(leaf.untyped_storage()))
        return results

    def total(self) -> int:
        """Returns the number of bytes that are currently alive."""
        storages = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._made.values())
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def settled(self, expected: float) -> int:
        """Returns the live bytes once gloo's threads have released the buffers of completed collectives.

        expected: bytes that are left then. Waits for up to 5 s.
        """
        deadline = time.monotonic() + 5.0
        while self.total() > expected and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.total()


class PeakBytes(LiveBytes):
    """A LiveBytes that also tracks the peak, counting after every operator."""

    def __init__(self) -> None:
        super().__init__()
        self._peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = len(self._made)
        results = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self._made) > known:
            self._made = {address: ref for address, ref in self._made.items() if not ref.expired()}
            self._peak = max(self._peak, self.total())
        return results

    def peak_of(self, call: Callable[[], object]) -> int:
        """Runs `call` and returns the peak number of live bytes."""
        self._peak = self.total()
        call()
        return self._peak


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
