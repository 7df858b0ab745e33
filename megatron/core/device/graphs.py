"""CudaGraphs: torch's CUDA graphs as a GraphDevice of graph_capture.py, with their memory pools."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


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
