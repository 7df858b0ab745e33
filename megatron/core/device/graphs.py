"""CudaGraphs: captures GPU work as torch CUDA graphs. It implements GraphDevice of graphs/capture.py.

Tests without a GPU replace torch.cuda with a stub.

[Note: broken captures] The GPU may abort a capture, for example at an operation that a graph cannot contain.
capture_end then raises an error and leaves three things to clean up. The first is the current stream, if
torch.cuda.graph made it current. The second is the allocator's use of the memory pool, which torch ends only for an
intact capture. The allocator would keep the memory for a graph that does not exist, and would stop checking events. The
third is the registered generators, which raise an error at the next draw (up to torch 2.11 at least). A further capture
releases them when it ends. That capture must not be empty, because torch warns about empty captures.
"""

import enum
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def is_capturing(device: torch.device) -> bool:
    """Returns whether work launched now on this device becomes part of a CUDA graph; False on a CPU."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _GraphPool:
    """A memory pool and the graphs captured in it; see [Note: pools] in graphs/capture.py."""

    def __init__(self) -> None:
        self._handle = torch.cuda.graph_pool_handle()
        self.graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self.is_broken = False  # the GPU aborted the last capture into torch's current pool

    def handle_for_capture(self) -> Any:
        """Returns the handle of torch's pool for the next capture."""
        if self.is_broken or not self.graphs:
            # Once its last graph has been freed, torch accepts no capture into a pool that still has live tensors.
            self._handle, self.is_broken = torch.cuda.graph_pool_handle(), False
        return self._handle


class _Tidying(enum.Enum):
    """Determines whether the next capture first waits for the GPU and frees the allocator's cached memory."""

    EACH = "captures outside of on_capture_stream each tidy up"
    DUE = "within on_capture_stream, the first capture tidies up"
    DONE = "further captures within on_capture_stream do not"


class CudaGraphs:
    """Captures the work of one GPU; see GraphDevice.

    generators: function that returns the generators, other than the default one, that captured work uses. It is called
    for each capture.
    """

    def __init__(self, device: torch.device, *, generators: Callable[[], Sequence[torch.Generator]] = tuple) -> None:
        """Creates the capture stream and an empty pool on `device`. Raises ValueError if it is not a GPU."""
        if device.type != "cuda":
            raise ValueError(f"device is {device}: CUDA graphs require a GPU; use TapeGraphs() for tests without one")
        self._device, self._generators = device, generators
        # The default stream cannot be captured. All captures use the same stream, because the allocator reuses memory
        # freed by a capture in a later capture only on that stream.
        self._stream = torch.cuda.Stream(device)
        self._own_pool = _GraphPool()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # graphs of all pools
        self._tidying = _Tidying.EACH
        self._scratch = torch.zeros(1, dtype=torch.float32, device=device)

    @contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        """Runs its body on the capture stream, so that cuBLAS and other libraries create their workspaces for it.

        Captures in the body belong to one step, so only the first one waits for the GPU and empties the allocator's
        cache.
        """
        main = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main)
        self._tidying = _Tidying.DUE
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._tidying = _Tidying.EACH
            # Also after an error, because later work uses the same memory.
            main.wait_stream(self._stream)

    def new_pool(self) -> _GraphPool:
        """Creates an empty memory pool for captures."""
        return _GraphPool()

    @contextmanager
    def capturing(self, pool: _GraphPool | None = None) -> Iterator[torch.cuda.CUDAGraph]:
        """Captures its body into the graph that it yields. Raises RuntimeError if the GPU aborted the capture.

        The caller must wait for all other streams before the body ends.
        """
        self._tidy_up()
        pool = self._own_pool if pool is None else pool
        handle = pool.handle_for_capture()
        graph = self._new_graph()
        # torch.cuda.graph would leave its stream current after an error; see [Note: broken captures].
        with torch.cuda.stream(self._stream), _no_collections():
            # "thread_local": threads of NCCL and of data loaders may still query the GPU.
            graph.capture_begin(handle, capture_error_mode="thread_local")
            try:
                yield graph
            finally:
                pool.is_broken = True
                self._end(graph, handle)
                pool.is_broken = False
        pool.graphs.add(graph)

    def capturing_together(self) -> AbstractContextManager[None]:
        """Does nothing, because memory that a capture allocates on a GPU remains reserved for its graph."""
        return nullcontext()

    def _tidy_up(self) -> None:
        """Frees the allocator's cached memory, which a graph's pool could not use otherwise."""
        if self._tidying is _Tidying.DONE:
            return
        if not self._graphs:
            # Frees memory that only reference cycles keep alive, before graphs allocate memory.
            gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        if self._tidying is _Tidying.DUE:
            self._tidying = _Tidying.DONE

    def _new_graph(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators():
            graph.register_generator_state(generator)
        return graph

    def _end(self, graph: torch.cuda.CUDAGraph, handle: Any) -> None:
        """Ends a capture. If the GPU aborted it, cleans up and raises RuntimeError."""
        try:
            graph.capture_end()
        except RuntimeError:
            if self._tidying is _Tidying.DONE:
                # The capture may have run out of memory because eager work since the first capture has left memory in
                # the cache.
                self._tidying = _Tidying.DUE
            self._forget_broken_capture(handle)
            raise
        self._graphs.add(graph)

    def _forget_broken_capture(self, handle: Any) -> None:
        """Releases the memory pool and the generators; see [Note: broken captures]."""
        try:
            torch._C._cuda_endAllocateToPool(self._stream.device_index, handle)
        except RuntimeError:
            # Some versions of torch have already ended it.
            return
        else:
            torch._C._cuda_releasePool(self._stream.device_index, handle)
        finally:
            graph = self._new_graph()
            graph.capture_begin(capture_error_mode="thread_local")
            self._scratch.zero_()
            graph.capture_end()


@contextmanager
def _no_collections() -> Iterator[None]:
    """Disables garbage collection, because finalizers of earlier graphs or stash pages would run within the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
