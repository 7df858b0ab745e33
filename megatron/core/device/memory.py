"""Memory of a device and of its host: sizes, usage and peaks, pinned buffers, and the recordings of
torch's allocator.
"""

import os
import resource
import sys
from collections.abc import Iterable
from typing import Any

import torch

from megatron.core.device.pinned_memory import pinned_bytes


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Returns the memory in use now and its peaks since the start, by kind.

    For a GPU, these are allocated and reserved bytes of torch's allocator. The resident set of the process is "rss" and
    "peak_rss"; the former only on Linux.
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
    # The kernel counts the two separately, and its peak may be a few pages less than the current size.
    memory["peak_rss"] = max(peak_memory_bytes(torch.device("cpu")), memory.get("rss", 0))
    return memory


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the peak memory use: allocated bytes of a GPU, resident bytes of the process for the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts ru_maxrss in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def total_memory_bytes(device: torch.device) -> int:
    """Returns the size of a GPU's memory, or of this machine's for any other device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def host_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocates host memory for copies from and to `device`: [num_bytes], uint8, on the CPU, pinned for a GPU.

    Intended for long-lived buffers, because its release waits for the device with a GPU, see [Note: end of pinned
    memory] in pinned_memory.py. Raises PinnedMemoryError, a RuntimeError, if a GPU's memory cannot be pinned.
    """
    # The host would wait for each copy from or to memory that is not pinned.
    if device.type == "cuda":
        return pinned_bytes(num_bytes, device)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device if device.type == "meta" else None)


class OffloadedMemory:
    """Memory of tensors that was copied to the host and freed on its device, until `restore`.

    tensors: any shapes and dtypes, on one device; all views of their storages lose their memory until it is restored.
    Work already launched on the current stream is completed first.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        # An empty storage has address 0, and nothing to free.
        self._held = [(one, _host_copy(one)) for one in storages.values() if one.nbytes()]
        for storage, copy in self._held:
            if copy.device != storage.device and storage.device.type == "cuda":
                torch.cuda.current_stream(storage.device).synchronize()
            storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        """Bytes that were freed on the device."""
        return sum(copy.nbytes for _, copy in self._held)

    def restore(self) -> None:
        """Allocates the memory again, possibly at other addresses, and copies its contents back."""
        for storage, copy in self._held:
            storage.resize_(copy.nbytes)
            _bytes_in(storage).copy_(copy)
        self._held.clear()


def _host_copy(storage: torch.UntypedStorage) -> torch.Tensor:
    return host_bytes(storage.nbytes(), storage.device).copy_(_bytes_in(storage), non_blocking=True)


def _bytes_in(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def release_cached_memory(device: torch.device) -> None:
    """Returns memory that torch's allocator caches to a GPU; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def start_cuda_profiler() -> None:
    """Starts the recording of nsys, if it runs with --capture-range=cudaProfilerApi."""
    torch.cuda.profiler.start()


def stop_cuda_profiler() -> None:
    """Ends the recording of nsys after all launched work has completed."""
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def start_cuda_memory_history() -> None:
    """Makes torch's allocator record its last 100,000 actions with their Python stacks."""
    torch.cuda.memory._record_memory_history(max_entries=100_000)


def cuda_memory_snapshot() -> dict[str, Any]:
    """Returns the recorded actions, in the format of torch.cuda.memory._snapshot."""
    return torch.cuda.memory._snapshot()
