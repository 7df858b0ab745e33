"""Opens compressed files as streams of their decompressed bytes, a few at a time."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PeekableFile = io.BufferedReader | gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile

# The library decompresses a whole piece in one call, to thousands of times its size at most.
ZSTD_PIECE = 4 << 10
# The maximum in zstd, which files from `zstd --long=31` require. The window is only as large as the file declares.
ZSTD_MAX_WINDOW = 1 << 31


def open_file(path: Path) -> PeekableFile:
    """Opens a file for reading, and decompresses it if its suffix is in COMPRESSIONS."""
    opener = _OPENERS.get(path.suffix)
    return open(path, "rb") if opener is None else opener(path)


@contextmanager
def named_damage(path: Path) -> Iterator[None]:
    """Converts errors from damaged compressed files to ValueErrors that name the file."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(_damage(path, error)) from error
    except OSError as error:
        if error.errno is not None:  # from the operating system, not caused by the content
            raise
        raise ValueError(_damage(path, error)) from error


def _damage(path: Path, error: Exception) -> str:
    kind = {".gz": "gzip", ".bz2": "bzip2", ".zst": "zstd"}.get(path.suffix, path.suffix.removeprefix("."))
    return f"{path} is truncated or not a {kind} file: {error}"


class _ZstdReader(io.RawIOBase):
    """Reads the frames of a zstd file in order.

    Raises EOFError if the last frame is incomplete, which the library's stream reader does not detect.
    """

    def __init__(self, path: Path) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ValueError(f"{path} requires the package zstandard: pip install 'megatron-stash[data]'") from error
        self._error: type[Exception] = zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_MAX_WINDOW)
        self._file = open(path, "rb")
        self._frame: Any = None  # None between frames
        self._compressed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._compressed:
                self._compressed = self._file.read(ZSTD_PIECE)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the last frame is incomplete")
                return 0
            self._ready = memoryview(self._decompress())
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _decompress(self) -> bytes:
        if self._frame is None:
            self._frame = self._decompressor.decompressobj()
        try:
            data: bytes = self._frame.decompress(self._compressed)
        except self._error as error:
            raise EOFError(str(error)) from error
        self._compressed = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None
        return data


_OPENERS: dict[str, Callable[[Path], PeekableFile]] = {
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": lambda path: io.BufferedReader(_ZstdReader(path), 64 << 10),
}
COMPRESSIONS = tuple(_OPENERS)
