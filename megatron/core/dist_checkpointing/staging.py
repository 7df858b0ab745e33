"""StagingMemory: host memory that a save copies a rank's tensors to, so that training may change them at once.

Who writes the copies, and when, is saving.py's matter.
"""

from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.device import CopyStream, default_device, host_bytes

_ALIGNMENT = 64  # bytes: every dtype's elements, and what a copy moves at full speed


class StagingMemory:
    """Kept from save to save, as memory asked for anew costs several times a copy; pinned beside a GPU.

    One save at a time uses it: from `copy` until its files are written.
    """

    def __init__(self) -> None:
        self._device = default_device()
        self._stream = CopyStream(self._device)
        self._memory = host_bytes(0, self._device)  # [bytes], uint8
        self._last: Any = None  # what the copy stream says of the last copy

    @property
    def num_bytes(self) -> int:
        """How much host memory it keeps."""
        return self._memory.numel()

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of `tensors`, any shape and dtype: on the host, contiguous, to be read after `host_waits_sync`.

        Work that the device is given from now on runs after the copies.
        """
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > self._memory.numel():
            # Given back first, where nobody reads it any more.
            self._memory = host_bytes(0, self._device)
            self._memory = host_bytes(size, self._device)
        copies = []
        self._last = None
        for tensor, start in zip(tensors, starts, strict=True):
            held = self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            if tensor.device.type == "cpu":
                held.copy_(tensor)
            else:
                self._last = self._stream.copy(held, tensor)
            copies.append(held)
        # An optimizer's next step would change what is still being copied.
        self._stream.main_waits_for(self._last)
        return copies

    def host_waits_sync(self) -> None:
        """Returns once the copies are complete. NOTE: a thread of the host may wait here, never the training step."""
        self._stream.host_waits_for(self._last)
