"""Everything that differs between CPU and CUDA: the device, its seeds, its memory, its allocator, its chunk sizes.

The only file that asks torch.cuda anything; kernels are chosen elsewhere by the device of their tensors.
"""

import functools
import gc
import os
import random
import resource
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy
import torch
import torch.distributed as dist

from megatron.core.cpu_heap import keep_cpu_heap

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
# What default_device says instead of this process's own device.
_STAND_IN: ContextVar[torch.device | None] = ContextVar("stand_in", default=None)


@dataclass(frozen=True)
class RowChunks:
    """Sizes of the chunks of a table, in elements, on each kind of device, to keep temporaries small."""

    cpu_elements: int
    gpu_elements: int

    def of(self, rows: torch.Tensor) -> Iterator[slice]:
        """Consecutive row ranges of about one chunk each; rows: [rows, columns], any dtype."""
        elements = self.cpu_elements if rows.device.type == "cpu" else self.gpu_elements
        step = max(1, elements // rows.shape[1])
        return (slice(start, start + step) for start in range(0, rows.shape[0], step))


def cpu_alone(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Marks a function for the CPU alone, whose reads are no wait; graph_safety.py allows them."""

    @functools.wraps(function)
    def run_on_cpu_alone(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return function(*args, **kwargs)

    return run_on_cpu_alone


@contextmanager
def without_memory() -> Iterator[None]:
    """Makes torch's meta device this process's device inside the block: tensors have shapes but no memory."""
    before = _STAND_IN.set(torch.device("meta"))
    try:
        yield
    finally:
        _STAND_IN.reset(before)


def default_device() -> torch.device:
    """This process's device: the GPU of LOCAL_RANK where there is one, else the CPU; see without_memory."""
    if torch.cuda.is_available() and _STAND_IN.get() is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return _STAND_IN.get() or torch.device("cpu")


def device_name(device: torch.device) -> str:
    """Returns a GPU's product name, or "cpu" with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.get_num_threads()} threads)"


def prepare_device(device: torch.device) -> None:
    """Makes `device` current; on the CPU also tells glibc to keep freed memory."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif sys.platform == "linux":
        keep_cpu_heap()


def distributed_backend(device: torch.device) -> str:
    """Name of the torch.distributed backend that serves `device`."""
    return "nccl" if device.type == "cuda" else "gloo"


def seed_all(seed: int) -> None:
    """Seeds Python's, numpy's and torch's generators, on every device."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state_bytes(device: torch.device) -> list[torch.Tensor]:
    """States of torch's generators that `device` uses: each [N], uint8, on the CPU."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_rng_state_bytes(states: list[torch.Tensor], device: torch.device) -> None:
    """Restores what `rng_state_bytes` returned: each [N], uint8, on the CPU."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


class RandomStream:
    """Random numbers that go on by themselves beside torch's default ones: the host's, and the device's where it is a
    GPU. The GPU side has not been run yet.

    A GPU's state is an object that takes the default one's place, since the capture of a CUDA graph forbids to read or
    set its bytes. A replay moves on the objects that were registered with the graph before it was captured.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._host = torch.Generator().manual_seed(seed).get_state()
        # One object for good: what a checkpoint brings is written into it, so that graphs go on with that.
        self.gpu = torch.Generator(device).manual_seed(seed) if device.type == "cuda" else None

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Makes torch draw from this stream inside the block."""
        default = torch.get_rng_state()
        torch.set_rng_state(self._host)
        try:
            with nullcontext() if self.gpu is None else _gpu_draws_from(self.gpu):
                yield
        finally:
            self._host = torch.get_rng_state()
            torch.set_rng_state(default)

    def state_bytes(self) -> list[torch.Tensor]:
        """States as rng_state_bytes gives them: each [N], uint8, on the CPU. Not while a CUDA graph is captured."""
        return [self._host] if self.gpu is None else [self._host, self.gpu.get_state()]

    def set_state_bytes(self, states: list[torch.Tensor]) -> None:
        """Takes what state_bytes returned: each [N], uint8, on the CPU. Not while a CUDA graph is captured."""
        self._host = states[0]
        if self.gpu is not None:
            self.gpu.set_state(states[1])


@contextmanager
def _gpu_draws_from(generator: torch.Generator) -> Iterator[None]:
    default = torch.cuda.default_generators[generator.device.index]
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(generator)
    try:
        yield
    finally:
        default.graphsafe_set_state(before)


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


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Memory by kind: what torch holds of a GPU, and how much of the process is in memory; peaks since the start."""
    memory = {}
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        memory = {
            "allocated": stats.get("allocated_bytes.all.current", 0),
            "max_allocated": stats.get("allocated_bytes.all.peak", 0),
            "reserved": stats.get("reserved_bytes.all.current", 0),
            "max_reserved": stats.get("reserved_bytes.all.peak", 0),
        }
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as stream:
            memory["rss"] = int(stream.read().split()[1]) * resource.getpagesize()
    # The kernel counts the two in different places: the peak may lag behind by some pages.
    memory["peak_rss"] = max(peak_memory_bytes(torch.device("cpu")), memory.get("rss", 0))
    return memory


def start_cuda_profiler() -> None:
    """Tells nsys, which was started with --capture-range=cudaProfilerApi, to begin."""
    torch.cuda.profiler.start()


def stop_cuda_profiler() -> None:
    """Tells nsys to end, once the GPU has done what was launched."""
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def start_cuda_memory_history() -> None:
    """Lets torch's allocator keep its last 100,000 actions, with the Python lines behind them."""
    torch.cuda.memory._record_memory_history(max_entries=100_000)


def cuda_memory_snapshot() -> dict[str, Any]:
    """Returns the allocator's recorded history, as torch.cuda.memory describes it."""
    return torch.cuda.memory._snapshot()


def total_memory_bytes(device: torch.device) -> int:
    """Returns the memory of a GPU, or of this machine for any other device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_memory_bytes(device: torch.device) -> int:
    """Highest memory use so far: allocated bytes of a GPU, resident bytes of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts ru_maxrss in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all work that was launched; nothing to wait for on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Host memory to copy to and from `device`: [num_bytes], uint8, on the CPU; with a GPU pinned."""
    # Copies from and to memory that is not pinned would make the host wait for each of them.
    place = device if device.type == "meta" else None
    return torch.empty(num_bytes, dtype=torch.uint8, device=place, pin_memory=device.type == "cuda")


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


class _GraphPool:
    """A memory pool of CUDA graphs, and the graphs in it; see [Note: pools] in graph_capture.py."""

    def __init__(self) -> None:
        self._handle = torch.cuda.graph_pool_handle()
        self.graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def handle_for_capture(self) -> Any:
        """Returns the handle of torch's pool."""
        if not self.graphs:
            # A pool whose last graph has gone, while somebody holds a tensor of it, takes no other graph.
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle


class CudaGraphs:
    """CUDA graphs of a GPU: see GraphDevice. Not run on a GPU yet.

    generators: those beside the default one that captured work draws from, asked for at each capture.
    """

    def __init__(self, device: torch.device, *, generators: Callable[[], Sequence[torch.Generator]] = tuple) -> None:
        """Raises ValueError where there is no GPU."""
        if device.type != "cuda":
            raise ValueError(f"device is {device}: CUDA graphs need a GPU; for tests TapeGraphs() stands for one")
        self._device, self._generators = device, generators
        # Captures need a stream of their own, as the default one takes part in no capture. One for all of them: memory
        # that one graph has freed goes to the next only on the same stream.
        self._stream = torch.cuda.Stream(device)
        self._own_pool = _GraphPool()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # those of all pools
        self._scratch = torch.zeros(1, dtype=torch.float32, device=device)

    @contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        """Runs its body on the stream that captures, for which cuBLAS and other libraries set up their workspaces."""
        main = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            # After an error too: what runs next works on the same memory.
            main.wait_stream(self._stream)

    def new_pool(self) -> _GraphPool:
        """Returns an empty pool."""
        return _GraphPool()

    @contextmanager
    def capturing(self, pool: _GraphPool | None = None) -> Iterator[torch.cuda.CUDAGraph]:
        if not self._graphs:
            # What only a cycle of references keeps alive would hold its memory beside that of the graphs.
            gc.collect()
        pool = self._own_pool if pool is None else pool
        handle = pool.handle_for_capture()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        graph = self._new_graph()
        # Not by torch.cuda.graph: after a capture that the GPU broke off that leaves its own stream the current one.
        with torch.cuda.stream(self._stream), _no_collections():
            # "thread_local": the threads of NCCL and of data loaders may go on asking the GPU meanwhile.
            graph.capture_begin(handle, capture_error_mode="thread_local")
            try:
                yield graph
            finally:
                self._end(graph, handle)
        pool.graphs.add(graph)

    def capturing_together(self) -> AbstractContextManager[None]:
        """Does nothing: memory that a capture allocated stays as it is."""
        return nullcontext()

    def _new_graph(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators():
            graph.register_generator_state(generator)
        return graph

    def _end(self, graph: torch.cuda.CUDAGraph, handle: Any) -> None:
        """Raises RuntimeError if the GPU has broken the capture off, and leaves no trace of it then."""
        try:
            graph.capture_end()
        except RuntimeError:
            self._forget_broken_capture(handle)
            raise
        self._graphs.add(graph)

    def _forget_broken_capture(self, handle: Any) -> None:
        """Ends a broken capture's use of the memory pool, which torch does only for intact ones."""
        try:
            torch._C._cuda_endAllocateToPool(self._stream.device_index, handle)
        except RuntimeError:
            # It was done already, in torch versions that do it first.
            return
        else:
            # Else the allocator would keep the memory for a graph that never was, and ask no event again.
            torch._C._cuda_releasePool(self._stream.device_index, handle)
        finally:
            # Up to torch 2.11 at least generators stay in the capture, and would raise at the next number drawn. The
            # end of another capture lets them out, which is not empty, as torch warns of that.
            graph = self._new_graph()
            graph.capture_begin(capture_error_mode="thread_local")
            self._scratch.zero_()
            graph.capture_end()


@contextmanager
def _no_collections() -> Iterator[None]:
    """Garbage is not collected inside: its finalizers, of graphs or pages of earlier steps, would be captured."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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


def use_deterministic_kernels() -> None:
    """Makes torch refuse kernels whose result depends on timing; call before the first CUDA call."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory would hide nothing here and costs a pass over every activation.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
