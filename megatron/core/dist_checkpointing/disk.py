"""Durable file operations, ordered so that a kill or power failure cannot corrupt a checkpoint.

Every write of a save goes through this file, so that tests can kill a process at each write. The contents of the files
are defined elsewhere.
"""

import json
import os
import shutil
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# Large enough for full disk throughput, small enough to stay in the CPU cache between checksum and write.
CHUNK_BYTES = 1 << 20


class DurableFile:
    """Context manager for a new file. Syncs it to disk if the body succeeds, and always closes it. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_bytes = 0

    def __enter__(self) -> Self:
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        try:
            if error is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def write(self, content: bytes | memoryview, checksum: int = 0) -> int:
        """Writes all of `content` and returns the running CRC-32, which continues from `checksum`."""
        view = memoryview(content)
        for start in range(0, len(view), CHUNK_BYTES):
            # Both calls release the GIL, so that training continues during a background save.
            checksum = zlib.crc32(chunk := view[start : start + CHUNK_BYTES], checksum)
            self.put(chunk)
        return checksum

    def put(self, content: bytes | memoryview) -> None:
        """Writes all of `content` without computing a checksum."""
        self.num_bytes += len(content)
        _write_all(self._descriptor, content)


def write_file(path: Path, content: bytes) -> int:
    """Writes a new file, syncs it to disk, and returns its CRC-32."""
    with DurableFile(path) as file:
        return file.write(content)


def replace_file(path: Path, content: bytes, *, temporary: Path) -> None:
    """Replaces a small file atomically through `temporary`. Readers see the old or the new content, never a mix."""
    write_file(temporary, content)
    # Atomic on POSIX, unlike writing into the file that readers may have open.
    os.replace(temporary, path)
    sync(path.parent)


def hand_over(path: Path, content: bytes, *, temporary: Path) -> None:
    """Publishes a small new file atomically through `temporary`, without a sync, so a power failure may lose it."""
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write_all(descriptor, content)
    finally:
        os.close(descriptor)
    rename(temporary, path)


def json_bytes(name: str, value: Any, *, indent: int | None = 1) -> bytes:
    """Encodes `value` as the content of the JSON file `name`. Raises ValueError if it is not serializable."""
    try:
        return json.dumps(value, indent=indent).encode()
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error


def make_folder(path: Path) -> None:
    """Creates a new folder."""
    os.mkdir(path)


def rename(path: Path, target: Path) -> None:
    """Renames a file or folder within its folder, atomically. Durable after `sync` of that folder."""
    os.rename(path, target)


def remove_file(path: Path) -> None:
    """Deletes a file."""
    os.unlink(path)


def remove_tree(path: Path) -> None:
    """Deletes a folder and its contents."""
    shutil.rmtree(path)


def try_to_remove_tree(path: Path) -> None:
    """Deletes a folder and its contents, and ignores errors."""
    shutil.rmtree(path, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Syncs a folder and its contents to disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Syncs a file's content, or a folder's directory entries, to disk."""
    # A rename is durable only once the containing folder is on disk.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while len(view):
        view = view[os.write(descriptor, view[:CHUNK_BYTES]) :]
