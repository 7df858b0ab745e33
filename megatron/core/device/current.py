"""The device of this process: which one it is, its name, its settings; functions that run on the CPU alone."""

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
# What default_device says instead of this process's own device.
_STAND_IN: ContextVar[torch.device | None] = ContextVar("stand_in", default=None)
# Parameter numbers of mallopt(3) in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 1 << 30


def default_device() -> torch.device:
    """This process's device: the GPU of LOCAL_RANK where there is one, else the CPU; see without_memory."""
    if torch.cuda.is_available() and _STAND_IN.get() is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return _STAND_IN.get() or torch.device("cpu")


@contextmanager
def without_memory() -> Iterator[None]:
    """Makes torch's meta device this process's device inside the block: tensors have shapes but no memory."""
    before = _STAND_IN.set(torch.device("meta"))
    try:
        yield
    finally:
        _STAND_IN.reset(before)


def device_name(device: torch.device) -> str:
    """Returns a GPU's product name, or "cpu" with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.get_num_threads()} threads)"


def distributed_backend(device: torch.device) -> str:
    """Name of the torch.distributed backend that serves `device`."""
    return "nccl" if device.type == "cuda" else "gloo"


def prepare_device(device: torch.device) -> None:
    """Makes `device` current; on the CPU also tells glibc to keep freed memory."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif sys.platform == "linux":
        keep_cpu_heap()


def keep_cpu_heap() -> bool:
    """Lets glibc's malloc keep blocks below 1 GiB instead of returning them to the kernel; False where refused.

    A training step frees and asks for the same activations again and again. By default each large one is a
    fresh mmap whose pages the kernel zeroes anew, which costs 11 to 16% of a CPU step.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # another C library (musl): no such knob, and nothing to lose but speed
        return False
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES))


def use_deterministic_kernels() -> None:
    """Makes torch refuse kernels whose result depends on timing; call before the first CUDA call."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory would hide nothing here and costs a pass over every activation.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def cpu_alone(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Marks a function for the CPU alone, whose reads are no wait; graph_safety.py allows them."""

    @functools.wraps(function)
    def run_on_cpu_alone(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return function(*args, **kwargs)

    return run_on_cpu_alone


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
