"""Memory of a device and of its host: how much there is, how much is used, and torch's records of it."""

import os
import resource
import sys
from typing import Any

import torch


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


def peak_memory_bytes(device: torch.device) -> int:
    """Highest memory use so far: allocated bytes of a GPU, resident bytes of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts ru_maxrss in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def total_memory_bytes(device: torch.device) -> int:
    """Returns the memory of a GPU, or of this machine for any other device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def host_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Host memory to copy to and from `device`: [num_bytes], uint8, on the CPU; with a GPU pinned."""
    # Copies from and to memory that is not pinned would make the host wait for each of them.
    place = device if device.type == "meta" else None
    return torch.empty(num_bytes, dtype=torch.uint8, device=place, pin_memory=device.type == "cuda")


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
