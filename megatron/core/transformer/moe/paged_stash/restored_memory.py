"""Memory that stashed rows come back to. On a GPU it is the caching allocator's. On the CPU it is buffers that live on,
because fresh memory costs 5 to 7 times as much as the copy into it: the kernel has to find, zero and map its pages.
"""

import torch
from torch import Tensor

from megatron.core.transformer.moe.paged_stash.huge_pages import use_huge_pages

# Restored rows start as many bytes after a multiple of this as the original ones did: kernels choose their vector loops
# by alignment, and another loop may give other bits.
ALIGNMENT = 64


class RestoredMemory:
    """Hands out memory for the stashes of a pool, which take turns.

    A buffer is free again as soon as no other tensor shares its storage.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._standing: dict[int, list[Tensor]] = {}
        self._most_used: dict[int, int] = {}

    def take(self, num_bytes: int) -> Tensor:
        """Memory that holds any bytes: [N], uint8, on the device, N at least num_bytes."""
        num_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if self._device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        buffers = self._standing.setdefault(num_bytes, [])
        found = next((number for number, buffer in enumerate(buffers) if _is_free(buffer)), len(buffers))
        if found == len(buffers):
            buffers.append(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))
            use_huge_pages(buffers[found])
        self._most_used[num_bytes] = max(self._most_used.get(num_bytes, 0), found + 1)
        # Not the buffer itself: the caller's tensor must be another one for its life to be seen.
        return buffers[found].view(-1)

    def trim(self) -> None:
        """Lets go of buffers that were not used since the last trim."""
        self._standing = {size: buffers[: self._most_used.get(size, 0)] for size, buffers in self._standing.items()}
        self._most_used = {}


def _is_free(buffer: Tensor) -> bool:
    # One use is the buffer's own, the other that of the storage object made here. No public function counts them.
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) == 2
