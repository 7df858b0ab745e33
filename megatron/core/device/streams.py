"""Order of work on a device: waiting for it, times at which it reaches a point, and streams besides the main one."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all work that was launched; nothing to wait for on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# A moment: seconds of the host's clock on the CPU, an event in the current stream of a GPU.
TimeMark = float | torch.cuda.Event


def mark_time(device: torch.device) -> TimeMark:
    """This moment of `device`, as its stream reaches it; waits for nothing."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: TimeMark, end: TimeMark) -> float:
    """Seconds between two moments of one device; waits until a GPU has reached the later one."""
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return start.elapsed_time(end) / 1000.0
    assert isinstance(start, float) and isinstance(end, float), "moments of two devices"
    return end - start


class CompletionMarks:
    """Times at which collectives end, on the clock of mark_time, without waiting. The GPU side has not been run yet."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self, works: Sequence[dist.Work], note: Callable[[TimeMark], None]) -> None:
        """Calls `note` with the moment at which the last of them ends: on the CPU then, from a thread of the back end.

        On a GPU at once, with an event; the tensors of the works must live until they have been waited for.
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
            # The last call counts.
            work.get_future().add_done_callback(lambda _: note(time.perf_counter()))


class CopyStream:
    """Copies that run beside the device's main work, in the order they were asked for; on the CPU they run at once.

    The GPU side has not been run yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> "torch.cuda.Event | None":
        """Copies source to target, [N], uint8, one of them on the device, and returns what main_waits_for takes."""
        if self._stream is None:
            target.copy_(source)
            return None
        # Without it the copy would read what the main stream has yet to write, or overwrite memory of freed tensors
        # that its kernels are still reading.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            for tensor in (target, source):
                if tensor.device.type == "cuda":
                    # Without it the allocator would hand the memory out anew as soon as Python lets go of the tensor.
                    tensor.record_stream(self._stream)
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def host_waits_for(self, copied: "torch.cuda.Event | None") -> None:
        """Returns once that copy has ended: what it wrote may be read by the host, and what it read be written."""
        if copied is not None:
            copied.synchronize()

    def main_waits_for(self, copied: "torch.cuda.Event | None") -> None:
        """Work launched from now on starts after that copy; the host does not wait."""
        if copied is not None:
            torch.cuda.current_stream(self._device).wait_event(copied)


class Writers:
    """The streams that have written to some tensors, which one collective is about to send; none on the CPU.

    Autograd runs a hook on the stream of its parameter's forward. A collective reads behind the stream that launches it
    alone: without `join` it would send gradients that the others have yet to write. The GPU side has not been run yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: set[torch.cuda.Stream] = set()

    def note(self) -> None:
        """The current stream writes."""
        if self._device.type == "cuda":
            self._streams.add(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        """Lets the current stream wait for what all of them have been given so far, and forgets them."""
        if self._streams:
            current = torch.cuda.current_stream(self._device)
            for stream in self._streams - {current}:
                current.wait_stream(stream)
            self._streams.clear()


class Arrival:
    """Lets other streams wait for a collective that one stream has waited for. Not run on a GPU yet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = None
        self._told: set[torch.cuda.Stream] = set()

    def note(self) -> None:
        """Records that the current stream has waited."""
        if self._device.type == "cuda":
            current = torch.cuda.current_stream(self._device)
            self._event = torch.cuda.Event()
            self._event.record(current)
            self._told = {current}

    def forget(self) -> None:
        """Drops the event: there is nothing to wait for."""
        self._event = None
        self._told.clear()

    def wait(self) -> None:
        """Makes the current stream wait as well, unless it has; the host does not wait."""
        if self._event is not None:
            current = torch.cuda.current_stream(self._device)
            if current not in self._told:
                current.wait_event(self._event)
                self._told.add(current)


class SideStream:
    """A stream on which one collective waits for another, in place of the main stream. Not run on a GPU yet."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def current(self) -> Iterator[bool]:
        """Makes this stream the current one and yields True; on the CPU, where only the host waits, yields False."""
        if self._stream is None:
            yield False
        else:
            with torch.cuda.stream(self._stream):
                yield True


def keep_for_current_stream(tensor: torch.Tensor) -> None:
    """Lets the memory of `tensor`, any shape and dtype, outlive what the current stream does with it.

    For tensors that another stream has made: the allocator would hand their memory to that one as soon as Python lets
    go of them.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
