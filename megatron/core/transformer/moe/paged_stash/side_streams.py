"""The two streams that copies of the stash run on beside the main work, and how the three wait for each other. What
is copied, and which memory is kept for how long, is in stash_group.py.

[Note: side streams] Pages are taken by the planning kernel, which alone writes the heads of the rings, on the stash
stream; they are given back by the release kernel, which alone writes the tails, on the restore stream. So a stash and
a restore may run at the same time. With one stream for both, the prefetch of the next group would wait behind stashes
that nothing waits for. Whatever either stream starts waits for the main stream first:
- stash: the experts' kernels may still be writing its sources; and its plan has to find the pages free that backward
  gave back, as the reserve assumes: the main stream waited for these releases before it ran backward;
- restore: its targets may be memory that kernels launched earlier on the main stream still read, because the allocator
  hands memory out in the order of the main stream.
A reset clears the pool on the main stream, so the main stream waits for both streams before it, and both wait for the
main stream after it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Work beside the device's main stream, in the order it was asked for; on the CPU it is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    @contextmanager
    def behind_main(self, *events: torch.Event | None) -> Iterator[None]:
        """What is launched inside runs on this stream, after what the main stream has now and after the events."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        for event in events:
            if event is not None:
                self._stream.wait_event(event)
        with self._stream:
            yield

    def record(self) -> torch.Event | None:
        """The moment when all that was launched on this stream is done; None on the CPU."""
        return None if self._stream is None else self._stream.record_event()


def record_main(device: torch.device) -> torch.Event | None:
    """The moment when all that was launched on the main stream is done; None on the CPU."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()


def main_waits_for(event: torch.Event | None, device: torch.device) -> None:
    """Work launched on the main stream from now on starts after the event; the host does not wait."""
    if event is not None:
        torch.accelerator.current_stream(device).wait_event(event)
