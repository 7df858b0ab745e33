"""Differences between a CPU and a GPU: devices, memory, streams, random numbers and graphs; re-exports only.

Calls of torch.cuda belong here. The paged stash makes its own, since it imports only pinned_memory and triton_compile.
"""

from megatron.core.device.current import (
    RowChunks,
    cpu_alone,
    default_device,
    device_name,
    distributed_backend,
    keep_cpu_heap,
    prepare_device,
    use_deterministic_kernels,
    without_memory,
)
from megatron.core.device.graphs import CudaGraphs, is_capturing
from megatron.core.device.memory import (
    cuda_memory_snapshot,
    host_bytes,
    memory_bytes,
    peak_memory_bytes,
    start_cuda_memory_history,
    start_cuda_profiler,
    stop_cuda_profiler,
    total_memory_bytes,
)
from megatron.core.device.rng import (
    MODEL_PARALLEL_RNG,
    CudaRNGStatesTracker,
    RandomStream,
    RngStates,
    rng_state_bytes,
    rng_tracker,
    seed_all,
    set_rng_state_bytes,
)
from megatron.core.device.streams import (
    Arrival,
    CompletionMarks,
    CopyStream,
    SideStream,
    TimeMark,
    Writers,
    keep_for_current_stream,
    mark_time,
    seconds_between,
    synchronize,
)

__all__ = [
    "Arrival",
    "CompletionMarks",
    "CopyStream",
    "CudaGraphs",
    "CudaRNGStatesTracker",
    "MODEL_PARALLEL_RNG",
    "RandomStream",
    "RngStates",
    "RowChunks",
    "SideStream",
    "TimeMark",
    "Writers",
    "cpu_alone",
    "cuda_memory_snapshot",
    "default_device",
    "device_name",
    "distributed_backend",
    "host_bytes",
    "is_capturing",
    "keep_cpu_heap",
    "keep_for_current_stream",
    "mark_time",
    "memory_bytes",
    "peak_memory_bytes",
    "prepare_device",
    "rng_state_bytes",
    "rng_tracker",
    "seconds_between",
    "seed_all",
    "set_rng_state_bytes",
    "start_cuda_memory_history",
    "start_cuda_profiler",
    "stop_cuda_profiler",
    "synchronize",
    "total_memory_bytes",
    "use_deterministic_kernels",
    "without_memory",
]
