"""The device of this process: its type, name and settings.

This file also contains everything that depends only on the device type: row-chunk sizes, and the decorator of CPU-only
functions.
"""

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
# The device that default_device returns instead of this process's device.
_STAND_IN: ContextVar[torch.device | None] = ContextVar("stand_in", default=None)
# Parameter numbers of mallopt(3) in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 1 << 30


def default_device() -> torch.device:
    """Returns the GPU of LOCAL_RANK, or the CPU if there is no GPU. Returns the meta device inside without_memory."""
    if torch.cuda.is_available() and _STAND_IN.get() is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return _STAND_IN.get() or torch.device("cpu")


@contextmanager
def without_memory() -> Iterator[None]:
    """Makes default_device return the meta device inside the block, so that new tensors use no memory."""
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
    """Returns the name of the torch.distributed backend for `device`."""
    return "nccl" if device.type == "cuda" else "gloo"


def prepare_device(device: torch.device) -> None:
    """Makes a GPU the current device, or calls keep_cpu_heap for a CPU on Linux."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif sys.platform == "linux":
        keep_cpu_heap()


def keep_cpu_heap() -> bool:
    """Makes glibc's malloc keep freed blocks below 1 GiB for reuse. Returns whether glibc accepted the setting.

    Each training step allocates and frees activations of the same sizes. By default, malloc returns each large block to
    the kernel and maps new zero-filled pages for the next one, which costs 11 to 16% of a CPU step.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # a different C library, such as musl, without this setting: slower, with the same results
        return False
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES))


def use_deterministic_kernels() -> None:
    """Makes torch raise an error for nondeterministic kernels. Must be called before the first CUDA call."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # torch would also fill new memory with NaN. No kernel here reads memory before it is written, and the fill costs
    # one pass over every activation.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def cpu_alone(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Marks a function that is called only with CPU tensors, where reading a value does not synchronize."""

    @functools.wraps(function)
    def run_on_cpu_alone(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return function(*args, **kwargs)

    return run_on_cpu_alone


@dataclass(frozen=True)
class RowChunks:
    """Row-chunk sizes in elements for each device type. Small chunks keep temporaries small."""

    cpu_elements: int
    gpu_elements: int

    def of(self, rows: torch.Tensor) -> Iterator[slice]:
        """Returns consecutive row ranges of about one chunk each. rows: [rows, columns], any dtype, on any device."""
        elements = self.cpu_elements if rows.device.type == "cpu" else self.gpu_elements
        step = max(1, elements // rows.shape[1])
        return (slice(start, start + step) for start in range(0, rows.shape[0], step))
