"""Standing host memory for activations, lent by size and given back; what is copied there is offloader.py's matter."""

import torch
from torch import Tensor

from megatron.core.device import host_bytes

_SMALLEST = 4096


class HostBuffers:
    """Buffers of a few sizes: each is made once and lent again and again, since pinning memory is slow.

    `free` + `lent` are all buffers ever made, as bytes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[Tensor]] = {}
        self.free_bytes = self.lent_bytes = 0

    def lend(self, num_bytes: int) -> Tensor:
        """A buffer of at least num_bytes: [N], uint8, on the CPU, with anything in it."""
        size = buffer_size(num_bytes)
        free = self._free.setdefault(size, [])
        self.lent_bytes += size
        if not free:
            return host_bytes(size, self._device)
        self.free_bytes -= size
        return free.pop()

    def give_back(self, buffer: Tensor) -> None:
        """Takes a lent buffer, [N], uint8, of which nobody will ask another copy; copies under way may finish."""
        # All copies go through one stream: whoever gets the buffer next writes after they are done.
        self._free[buffer.numel()].append(buffer)
        self.free_bytes += buffer.numel()
        self.lent_bytes -= buffer.numel()

    def check_integrity(self) -> None:
        """Fails if the counts and the lists disagree, or a buffer is free twice."""
        buffers = [buffer for free in self._free.values() for buffer in free]
        assert sum(buffer.numel() for buffer in buffers) == self.free_bytes and self.lent_bytes >= 0
        assert len({buffer.data_ptr() for buffer in buffers}) == len(buffers), "a buffer was given back twice"


def buffer_size(num_bytes: int) -> int:
    """num_bytes rounded up to one of four sizes per power of two: tensors of similar sizes share buffers."""
    step = max(_SMALLEST, 1 << max(0, (num_bytes - 1).bit_length() - 3))
    return -(-num_bytes // step) * step
