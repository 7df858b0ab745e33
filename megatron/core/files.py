"""Atomic replacement and checksums of single files. Checkpoint folders are in dist_checkpointing/."""

import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

# Large enough for full disk throughput, small enough that the checksum reads the bytes from the CPU cache.
_CHUNK_BYTES = 1 << 20


@contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a temporary file that replaces `path` when the body succeeds, so that readers never see a partial file.

    If the body fails, `path` is unchanged and the temporary file is removed. A killed process may leave a file
    `path`.partial-*. Raises OSError.
    """
    # Processes on several nodes may write the same file with the same process id, hence the random bytes.
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            # Without this, a power failure after the rename could leave an empty file.
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def file_crc32(path: Path) -> int:
    """Returns the CRC-32 of a file, read in chunks."""
    return range_crc32(path, 0, num_bytes=path.stat().st_size)


def range_crc32(path: Path, start: int, *, num_bytes: int) -> int:
    """Returns the CRC-32 of `num_bytes` bytes from offset `start`, or of the rest of a shorter file."""
    checksum, left = 0, num_bytes
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, num_bytes)))
    # Unbuffered: all reads reuse the same memory, which avoids further page faults.
    with open(path, "rb", buffering=0) as file:
        if sys.platform == "linux":
            # Starts read-ahead of the range, which increases disk throughput.
            os.posix_fadvise(file.fileno(), start, num_bytes, os.POSIX_FADV_WILLNEED)
        file.seek(start)
        while left and (num_read := file.readinto(buffer[:left])):
            checksum = zlib.crc32(buffer[:num_read], checksum)
            left -= num_read
    return checksum
