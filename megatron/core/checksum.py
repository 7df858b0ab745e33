"""The checksum of a file, as manifests of checkpoints and of index caches hold it; no manifest is read here."""

import os
import sys
import zlib
from pathlib import Path

# Large enough for full disk speed, small enough that the checksum finds the bytes in the processor's cache.
_CHUNK_BYTES = 1 << 20


def file_crc32(path: Path) -> int:
    """CRC-32 of the file's bytes, read in chunks."""
    return range_crc32(path, 0, num_bytes=path.stat().st_size)


def range_crc32(path: Path, start: int, *, num_bytes: int) -> int:
    """CRC-32 of so many of the file's bytes from `start` on, or of those that there are, read in chunks."""
    checksum, left = 0, num_bytes
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, num_bytes)))
    # Unbuffered: what is read goes into memory that is used again and again, which costs no page faults.
    with open(path, "rb", buffering=0) as file:
        if sys.platform == "linux":
            # Ahead of the checksum, also of what other threads read of the same file: a disk is faster then.
            os.posix_fadvise(file.fileno(), start, num_bytes, os.POSIX_FADV_WILLNEED)
        file.seek(start)
        while left and (num_read := file.readinto(buffer[:left])):
            checksum = zlib.crc32(buffer[:num_read], checksum)
            left -= num_read
    return checksum
