"""Device and host memory: sizes, current and peak use, pinned buffers, and recordings of torch's allocator."""

import os
import resource
import sys
from collections.abc import Iterable
from typing import Any

import torch

from megatron.core.device.pinned_memory import pinned_bytes


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Returns the current and peak memory use in bytes, by kind.

    For a GPU, these are the allocated and reserved bytes of torch's allocator. "rss" (only on Linux) and "peak_rss" are
    the resident set of the process.
    """
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
    # The kernel counts both values separately, and its peak may be a few pages less than the current size.
    memory["peak_rss"] = max(peak_memory_bytes(torch.device("cpu")), memory.get("rss", 0))
    return memory


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the peak memory use in bytes: allocated memory of a GPU, or resident memory of the process for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts ru_maxrss in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def total_memory_bytes(device: torch.device) -> int:
    """Returns the memory size of a GPU in bytes, or of this machine for any other device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def host_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocates host memory for copies from and to `device`: [num_bytes], uint8, on the CPU, pinned for a GPU.

    Intended for long-lived buffers, because the release of pinned memory waits for the device; see [Note: end of pinned
    memory] in pinned_memory.py. Raises PinnedMemoryError, a RuntimeError, if the memory cannot be pinned.
    """
    # The host would wait for each copy from or to memory that is not pinned.
    if device.type == "cuda":
        return pinned_bytes(num_bytes, device)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device if device.type == "meta" else None)


class OffloadedMemory:
    """Copies the memory of tensors to the host and frees it on the device, until `restore`.

    tensors: any shapes and dtypes, on one device. Views of their storages are unusable until `restore`. Work that was
    already launched on the current stream is completed first.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        # An empty storage has address 0 and no memory to free.
        self._held = [(one, _host_copy(one)) for one in storages.values() if one.nbytes()]
        for storage, copy in self._held:
            if copy.device != storage.device and storage.device.type == "cuda":
                torch.cuda.current_stream(storage.device).synchronize()
            storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        """Number of bytes that were freed on the device."""
        return sum(copy.nbytes for _, copy in self._held)

    def restore(self) -> None:
        """Reallocates the memory, possibly at different addresses, and copies its contents back."""
        for storage, copy in self._held:
            storage.resize_(copy.nbytes)
            _bytes_in(storage).copy_(copy)
        self._held.clear()


def _host_copy(storage: torch.UntypedStorage) -> torch.Tensor:
    return host_bytes(storage.nbytes(), storage.device).copy_(_bytes_in(storage), non_blocking=True)


def _bytes_in(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def release_cached_memory(device: torch.device) -> None:
    """Releases the unused memory that torch's allocator caches on a GPU. Does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def start_cuda_profiler() -> None:
    """Starts recording in nsys, if it was launched with --capture-range=cudaProfilerApi."""
    torch.cuda.profiler.start()


def stop_cuda_profiler() -> None:
    """Stops recording in nsys after all launched work has completed."""
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def start_cuda_memory_history() -> None:
    """Makes torch's allocator record its last 100,000 actions with their Python stacks."""
    torch.cuda.memory._record_memory_history(max_entries=100_000)


def cuda_memory_snapshot() -> dict[str, Any]:
    """Returns the allocator's recorded actions, in the format of torch.cuda.memory._snapshot."""
    return torch.cuda.memory._snapshot()
