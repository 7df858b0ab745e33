"""MessageMemory: memory of messages that were sent, for the next ones, where allocating it anew costs time."""

import torch

# As many as are under way at a time, with one that fills; more are there where nothing is reduced during backward.
_MOST_SPARE = 3


class MessageMemory:
    """A pool of communication buffers of one dtype and device.

    On a CPU, memory of this size returns to the system when it is freed, and allocating it again zeroes its pages one
    by one, which costs a tenth of a step. An accelerator's allocator caches it, stream by stream.

    is_kept: all of it is returned by `give_back`; a few buffers are then kept, also between steps.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, is_kept: bool) -> None:
        self._dtype, self._device = dtype, device
        self._is_kept = is_kept and device.type == "cpu"
        # From the smallest on.
        self._spare: list[torch.Tensor] = []
        # By the address of what was handed out, a part of it.
        self._in_use: dict[int, torch.Tensor] = {}

    def take(self, numel: int) -> torch.Tensor:
        """Uninitialised memory: [numel], its dtype."""
        place = next((place for place, spare in enumerate(self._spare) if spare.numel() >= numel), None)
        if place is None:
            # What is too small for one message is so for its bucket's next.
            del self._spare[:1]
            whole = torch.empty(numel, dtype=self._dtype, device=self._device)
        else:
            whole = self._spare.pop(place)
        if self._is_kept:
            self._in_use[whole.data_ptr()] = whole
        return whole[:numel]

    def give_back(self, message: torch.Tensor) -> None:
        """Returns a buffer of `take` to the pool, [n], its dtype. Ignores tensors it did not allocate."""
        whole = self._in_use.pop(message.data_ptr(), None)
        if whole is not None:
            self._spare = sorted([*self._spare, whole], key=torch.Tensor.numel)[-_MOST_SPARE:]
