"""Ordering and timing of device work: synchronization, timestamps, and streams in addition to the main stream.

A CPU has no streams. Work completes before its call returns, so the classes below never wait. The file imports torch
alone, so that the paged stash may use it.

[Note: memory across streams] The caching allocator reuses freed memory for the stream that allocated it, in the order
of that stream. A tensor that another stream still uses must be recorded there (record_stream). Otherwise its memory is
reused while it is being read or written.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has completed all launched work. Returns immediately for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# A point in time: seconds of the host's clock for a CPU, an event in a stream for a GPU.
TimeMark = float | torch.cuda.Event


def mark_time(device: torch.device) -> TimeMark:
    """Returns a mark of the time at which the current stream of `device` reaches this call. Does not wait."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: TimeMark, end: TimeMark) -> float:
    """Returns the seconds between two marks of the same device. Waits until a GPU has reached the later mark."""
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return start.elapsed_time(end) / 1000.0
    assert isinstance(start, float) and isinstance(end, float), "times of two different devices"
    return end - start


class CompletionMarks:
    """Records the times at which collectives complete, on the clock of mark_time, without waiting for them."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self, works: Sequence[dist.Work], note: Callable[[TimeMark], None]) -> None:
        """Calls `note` with the time at which the last of `works` completes.

        For a GPU, calls `note` immediately, with an event. For a CPU, a thread of the backend calls `note` once for
        each work, and the last call is the relevant one. The caller must keep the tensors of the works until it has
        waited for the works.
        """
        if self._stream is not None:
            event = torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(self._stream):
                for work in works:
                    work.wait()
                event.record()
            note(event)
            return
        for work in works:
            work.get_future().add_done_callback(lambda _: note(time.perf_counter()))


class SideStream:
    """Stream for work that runs concurrently with the main stream. On the CPU all work runs immediately."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def current(self) -> Iterator[bool]:
        """Makes this stream current, without a wait, and yields True. Yields False on a CPU, where only the host waits.

        A collective can wait here for an earlier collective without blocking the main stream.
        """
        if self._stream is None:
            yield False
            return
        with self._stream:
            yield True

    def behind_main(self, *events: torch.Event | None) -> AbstractContextManager[Any]:
        """Makes this stream wait for the events and the main stream's queued work; returns a context that uses it."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        for event in events:
            if event is not None:
                self._stream.wait_event(event)
        return self._stream

    def record(self) -> torch.Event | None:
        """Returns an event at the end of all work launched on this stream; None on the CPU."""
        return None if self._stream is None else self._stream.record_event()


def record_main(device: torch.device) -> torch.Event | None:
    """Returns an event at the end of all work launched on the main stream; None on the CPU."""
    return torch.accelerator.current_stream(device).record_event() if device.type == "cuda" else None


def main_waits_for(event: torch.Event | None, device: torch.device) -> None:
    """Makes subsequent work on the main stream start after the event. The host does not wait."""
    if event is not None:
        torch.accelerator.current_stream(device).wait_event(event)


class CopyStream:
    """Side stream for copies that overlap with the main stream's work. Copies run in the order of their calls."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, SideStream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Event | None:
        """Starts a copy of `source` to `target`. Completes the copy immediately for a CPU.

        target, source: same shape, any shape and dtype, one of them on the device. Returns the event of the copy's end
        for host_waits_for and main_waits_for, or None for a CPU.
        """
        # Behind the main stream, because otherwise the copy may read a source that the main stream has not written
        # yet, or write to the memory of a freed tensor that kernels of the main stream still read.
        with self._side.behind_main():
            target.copy_(source, non_blocking=True)
            keep_for_current_stream(target)
            keep_for_current_stream(source)
        return self._side.record()

    def host_waits_for(self, copied: torch.Event | None) -> None:
        """Blocks the host until the copy has ended, so that it may read the target and overwrite the source."""
        if copied is not None:
            copied.synchronize()

    def main_waits_for(self, copied: torch.Event | None) -> None:
        """Makes the current stream wait for the copy. Does not block the host."""
        main_waits_for(copied, self._device)


class Writers:
    """Records the streams that write the tensors of one collective, so that the collective can wait for them.

    Autograd runs a parameter's hook on the stream of its forward, so gradients of one bucket may be written on several
    streams. A collective waits only for the stream that launches it. Without `join`, it may send gradients before the
    other streams have written them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._streams: set[torch.Stream] = set()

    def note(self) -> None:
        """Records the current stream as a writer; called for each gradient."""
        if self._is_cuda:
            # Unlike torch.cuda.current_stream, builds no torch.cuda.Stream in Python.
            self._streams.add(torch.accelerator.current_stream(self._device.index))

    def join(self) -> None:
        """Makes the current stream wait for the recorded streams, and clears the record."""
        if self._streams:
            current = torch.accelerator.current_stream(self._device.index)
            for stream in self._streams - {current}:
                current.wait_stream(stream)
            self._streams.clear()


class Arrival:
    """Event of a stream that has waited for a collective. Other streams wait for this event instead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = None
        self._waited: set[torch.cuda.Stream] = set()

    def note(self) -> None:
        """Records that the current stream has waited for the collective."""
        if self._device.type == "cuda":
            current = torch.cuda.current_stream(self._device)
            self._event = torch.cuda.Event()
            self._event.record(current)
            self._waited = {current}

    def forget(self) -> None:
        """Discards the event, so that `wait` does nothing."""
        self._event = None
        self._waited.clear()

    def wait(self) -> None:
        """Makes the current stream wait for the collective, once for each stream. Does not block the host."""
        if self._event is not None:
            current = torch.cuda.current_stream(self._device)
            if current not in self._waited:
                current.wait_event(self._event)
                self._waited.add(current)


def keep_for_current_stream(tensor: torch.Tensor) -> None:
    """Keeps the memory of `tensor` until the work launched so far on the current stream has completed.

    tensor: any shape and dtype, allocated on a different stream; see [Note: memory across streams].
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
