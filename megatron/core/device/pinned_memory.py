"""Pinned host memory of an exact size: pages mapped from the operating system and registered with CUDA.

    memory = pinned_bytes(20 << 30, torch.device("cuda", 0))    # [num_bytes], uint8, on the CPU

It is intended for buffers that live longer than a step: host pages of the stash, master weights and staging buffers of
an optimizer on the host, host buffers of offloaded activations and of saves, and shards of FSDP2 on the host. Torch's
allocator (pin_memory=True) rounds sizes up to powers of two and keeps freed memory until the process ends. That
allocator suits buffers that are allocated in every step, such as batches and released gradient buckets, because it
reuses their memory without waiting.

[Note: end of pinned memory] The memory is unregistered and unmapped when the storage is deleted, that is, with the last
tensor that uses it. Torch's allocators do not manage it, so neither record_stream nor a copy keeps it alive. Its
release therefore waits for the device. A CUDA graph stores addresses but no tensors. The owner of the graph must keep a
tensor for as long as the graph may be replayed, as graphs of a stash keep the stash and its pool. CUDA forbids the wait
and the unregistration during a capture. Memory whose last tensor is deleted during a capture remains registered until
the process ends, and a warning is issued.
"""

import ctypes
import mmap
import os
import resource
import warnings
import weakref
from contextlib import suppress

import torch
from torch import Tensor

# Pinned for all contexts of the process. With unified addressing, a kernel accesses the memory at the host's address.
_PORTABLE = 1
_HUGE_PAGE_BYTES = 2**21


class PinnedMemoryError(RuntimeError):
    """Raised if host memory cannot be mapped, registered or unregistered. A failed allocation leaves no memory."""


@torch.inference_mode(False)  # tensors created in inference mode cannot be changed outside of it
def pinned_bytes(num_bytes: int, device: torch.device) -> Tensor:
    """Allocates zeroed host memory for GPU kernels and asynchronous copies: [num_bytes], uint8, on the CPU.

    The size is rounded up to pages of the operating system. The memory is released with the last tensor that uses it,
    after a wait for the device; see [Note: end of pinned memory]. Raises PinnedMemoryError, a RuntimeError.
    """
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    if not torch.cuda.is_available():
        raise PinnedMemoryError(f"{num_bytes} bytes cannot be pinned for {device}: no GPU is visible to this process")
    mapping = _mapped(-(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    view = (ctypes.c_ubyte * num_bytes).from_buffer(mapping)
    try:
        _register(ctypes.addressof(view), len(mapping), device)
    except PinnedMemoryError:
        # Unmapped explicitly, because the traceback keeps the frame, and so the mapping, alive.
        del view
        mapping.close()
        raise
    # The storage references the view, so both are deleted together. The finalizer references the mapping.
    end = weakref.finalize(view, _return_sync, ctypes.addressof(view), mapping, device, os.getpid())
    end.atexit = False  # the driver cleans up; graphs and copies may still use the memory
    return torch.frombuffer(view, dtype=torch.uint8)


def _mapped(num_bytes: int) -> mmap.mmap:
    """Maps anonymous memory of whole pages, without populating them, because registration touches and zeroes them."""
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise PinnedMemoryError(f"{_size(num_bytes)} of host memory cannot be mapped ({error})") from error
    # A forked process must not share the pages: the first write would move this process to copies, while the device
    # uses the originals.
    mapping.madvise(mmap.MADV_DONTFORK)
    if num_bytes >= _HUGE_PAGE_BYTES:
        # Registration works page by page, so huge pages are faster. Linux may be built without them.
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _register(address: int, num_bytes: int, device: torch.device) -> None:
    """Registers `num_bytes` bytes at `address` with the device's CUDA context."""
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()
        status = runtime.cudaHostRegister(address, num_bytes, _PORTABLE)
        if not int(status):
            return
        reason = f"{runtime.cudaGetErrorString(status)} ({int(status)})"
        noticed = _take_pending_error(device)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    raise PinnedMemoryError(
        f"{_size(num_bytes)} of host memory cannot be registered with {device}: {reason}{noticed};"
        f" the limit of locked memory (ulimit -l) is {'none' if limit == resource.RLIM_INFINITY else _size(limit)}"
    )


def _take_pending_error(device: torch.device) -> str:
    """Clears the runtime's last error and returns its text for a message, or "" if torch finds no error.

    A failed call leaves its error in the runtime, and the next launch that torch checks would raise it. Torch has no
    function that only clears the error, so a small kernel is launched to raise it.
    """
    try:
        torch.ones(1, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        return f" [{str(error).partition(chr(10))[0]}]"
    return ""


def _return_sync(address: int, mapping: mmap.mmap, device: torch.device, process: int) -> None:
    """Unregisters memory that no tensor uses any longer. NOTE: waits for the device.

    process: id of the process that mapped the memory. A forked process does not inherit the mapping, and may use the
    address for other memory.
    """
    # The addresses must not be reused before the memory is unregistered, even if an error is raised here.
    keep_until_exit = weakref.finalize(_return_sync, len, mapping)
    keep_until_exit.atexit = False
    if os.getpid() != process:
        return
    if torch.cuda.is_current_stream_capturing():
        warnings.warn(
            f"{_size(len(mapping))} of pinned memory remain allocated until the process ends, because their last "
            "tensor was deleted during a CUDA graph capture",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    with torch.cuda.device(device):
        # Copies and kernels that were launched before the last tensor was deleted may still use the memory.
        torch.cuda.synchronize()
        runtime = torch.cuda.cudart()
        status = runtime.cudaHostUnregister(address)
    if int(status):
        raise PinnedMemoryError(
            f"{_size(len(mapping))} of pinned memory cannot be unregistered from {device}:"
            f" {runtime.cudaGetErrorString(status)} ({int(status)})"
        )
    # The mapping cannot be closed here. It is closed with the view, which is being deleted.
    keep_until_exit.detach()


def _size(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({num_bytes / 2**30:.2f} GiB)"
