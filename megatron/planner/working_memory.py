"""Memory that is alive at once: what passes and updates take, and free again, found by running them."""

from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts memory that operations on a device return, from its allocation until its last tensor is gone.

    While it is the innermost mode, on this thread. What was there before counts as nothing. peaks: the most at once, of
    each part that `begin` named, "" before. messages_peak: of what has been handed to collectives alone, in and out.
    """

    def __init__(self, device_type: str = "meta") -> None:
        super().__init__()
        self._device_type, self._part = device_type, ""
        self._alive: dict[int, int] = {}
        self._messages: set[int] = set()
        self._bytes = self._message_bytes = 0
        self.peaks, self.messages_peak = {"": 0}, 0

    def begin(self, part: str) -> None:
        """Counts what is alive from now on for this part."""
        self._part = part
        self.peaks[part] = self._bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and counts the storages that it allocated."""
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in self._storages((args, kwargs))}
        for storage in self._storages(result):
            # Views of what was there before are nothing new.
            if storage._cdata not in given:
                self._note(storage)
        if func.namespace == "c10d":
            for key in given:
                self._note_message(key)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = storage.nbytes()
            finalize(storage, self._forget, key)
            self._bytes += storage.nbytes()
            self.peaks[self._part] = max(self.peaks[self._part], self._bytes)

    def _note_message(self, key: int) -> None:
        if key in self._alive and key not in self._messages:
            self._messages.add(key)
            self._message_bytes += self._alive[key]
            self.messages_peak = max(self.messages_peak, self._message_bytes)

    def _forget(self, key: int) -> None:
        num_bytes = self._alive.pop(key)
        self._bytes -= num_bytes
        if key in self._messages:
            self._messages.remove(key)
            self._message_bytes -= num_bytes

    def _storages(self, tree: Any) -> list[torch.UntypedStorage]:
        tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
        return [tensor.untyped_storage() for tensor in tensors if tensor.device.type == self._device_type]
