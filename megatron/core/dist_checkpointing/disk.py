"""Durable files: what this package writes gets to disk here, in an order that a kill or a power cut cannot spoil.

What the files mean is known elsewhere. Every write of a save passes through this file, so that tests can end a process
at each of them.
"""

import json
import os
import shutil
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# Large enough for full disk speed, small enough that a checksum finds the bytes in the processor's cache.
CHUNK_BYTES = 1 << 20


class DurableFile:
    """A new file for `with`: synced to disk where the body ends well, closed in any case; raises OSError."""

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
        """Writes all of it and returns the CRC-32 of what `checksum` is that of and of `content`."""
        view = memoryview(content)
        for start in range(0, len(view), CHUNK_BYTES):
            # Both calls release the interpreter: training goes on beside them.
            checksum = zlib.crc32(chunk := view[start : start + CHUNK_BYTES], checksum)
            self.put(chunk)
        return checksum

    def put(self, content: bytes | memoryview) -> None:
        """Writes all of it; somebody else sums it up."""
        self.num_bytes += len(content)
        _write_all(self._descriptor, content)


def write_file(path: Path, content: bytes) -> int:
    """Writes a new file, waits until it is on disk, and returns its CRC-32."""
    with DurableFile(path) as file:
        return file.write(content)


def replace_file(path: Path, content: bytes, *, temporary: Path) -> None:
    """Writes a small file by way of `temporary`: readers see the old or the new content, never a part."""
    write_file(temporary, content)
    # Atomic on POSIX, unlike writing into the file that readers may have open.
    os.replace(temporary, path)
    sync(path.parent)


def hand_over(path: Path, content: bytes, *, temporary: Path) -> None:
    """Writes a small new file by way of `temporary`, at once for readers; a power cut may lose it."""
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write_all(descriptor, content)
    finally:
        os.close(descriptor)
    rename(temporary, path)


def json_bytes(name: str, value: Any, *, indent: int | None = 1) -> bytes:
    """`value` as the content of a JSON file; raises ValueError with the file's name if JSON cannot hold it."""
    try:
        return json.dumps(value, indent=indent).encode()
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error


def make_folder(path: Path) -> None:
    """A new folder."""
    os.mkdir(path)


def rename(path: Path, target: Path) -> None:
    """Gives a file or folder another name in the same folder, at once; on disk after `sync` of that folder."""
    os.rename(path, target)


def remove_file(path: Path) -> None:
    """Deletes a file."""
    os.unlink(path)


def remove_tree(path: Path) -> None:
    """Deletes a folder with all that is in it."""
    shutil.rmtree(path)


def try_to_remove_tree(path: Path) -> None:
    """Deletes a folder as far as the file system lets us."""
    shutil.rmtree(path, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Waits until a folder with all that is in it is on disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Waits until the content of a file, or the names in a folder, are on disk."""
    # A rename is durable only when the folder that holds the name is on disk.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while len(view):
        view = view[os.write(descriptor, view[:CHUNK_BYTES]) :]
