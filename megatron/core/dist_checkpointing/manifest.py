"""The manifest of a checkpoint, which lists its files, the pieces inside each file, and their checksums.

It is written last, so its presence means that all other files are complete. folder.py handles the folder itself.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megatron.core.dist_checkpointing import disk
from megatron.core.files import range_crc32
from megatron.core.logical_tensors import Box

MANIFEST_FILE = "manifest.json"
# Version 1 has one checksum for each file and lists no pieces.
FORMAT_VERSION = 2
# Reader threads per rank; checksums and copies release the GIL.
NUM_READERS = 4


@dataclass(frozen=True)
class Piece:
    """One stored tensor box, or object (box is None), inside a file.

    start, num_bytes: the byte range in the file, as torch.save wrote it. data_start: file offset of the elements, which
    are row-major and contiguous; None if unknown, as in format version 1, and for objects. crc32: checksum of the byte
    range; None in format version 1, which has one checksum for each file.
    """

    key: str
    box: Box | None
    start: int
    num_bytes: int
    data_start: int | None
    crc32: int | None

    @property
    def end(self) -> int:
        """Position of the first byte in the file after the piece."""
        return self.start + self.num_bytes

    def __str__(self) -> str:
        if self.box is None or not self.box.shape:
            return self.key
        ranges = (f"{start}:{end}" for start, end in zip(self.box.offset, self.box.end, strict=True))
        return f"{self.key}[{', '.join(ranges)}]"

    def to_json(self) -> dict[str, Any]:
        """Encodes the piece for the manifest."""
        box = {} if self.box is None else {"offset": self.box.offset, "shape": self.box.shape}
        data = {} if self.data_start is None else {"data": self.data_start}
        return {"key": self.key, **box, "start": self.start, "bytes": self.num_bytes, **data, "crc32": self.crc32}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Piece":
        """Decodes the result of to_json. Raises KeyError, TypeError or ValueError for anything else."""
        box = Box(tuple(map(_count, value["offset"])), tuple(map(_count, value["shape"]))) if "shape" in value else None
        data = _count(value["data"]) if "data" in value else None
        piece = cls(value["key"], box, _count(value["start"]), _count(value["bytes"]), data, _count(value["crc32"]))
        if not isinstance(piece.key, str) or (box is not None and len(box.offset) != len(box.shape)):
            raise ValueError(f"{value} does not describe a piece of a tensor")
        return piece


@dataclass(frozen=True)
class FileEntry:
    """Manifest entry of one file: its size, and a checksum of the whole file or of each piece."""

    num_bytes: int
    crc32: int | None = None
    pieces: tuple[Piece, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Encodes the entry for the manifest."""
        if self.crc32 is not None:
            return {"bytes": self.num_bytes, "crc32": self.crc32}
        return {"bytes": self.num_bytes, "pieces": [piece.to_json() for piece in self.pieces]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "FileEntry":
        """Decodes the result of to_json. Raises KeyError, TypeError or ValueError for anything else."""
        crc32 = _count(value["crc32"]) if "crc32" in value else None
        entry = cls(_count(value["bytes"]), crc32, tuple(map(Piece.from_json, value.get("pieces", ()))))
        ends = [0, *(piece.end for piece in entry.pieces)]
        if entry.crc32 is None and [*(piece.start for piece in entry.pieces), entry.num_bytes] != ends:
            raise ValueError("its pieces do not cover the whole file, so parts have no checksum")
        return entry

    def checked_parts(self) -> Iterator[Piece | None]:
        """Yields the parts that have a checksum: each piece, or None for the whole file."""
        yield from self.pieces if self.crc32 is None else (None,)


Manifest = dict[str, FileEntry]


def write_manifest(folder: Path, files: Manifest) -> None:
    """Writes the manifest, which completes a checkpoint."""
    # The manifest certifies the other files, and also contains a checksum of itself.
    entries = {name: files[name].to_json() for name in sorted(files)}
    body = {"version": FORMAT_VERSION, "files": entries}
    content = disk.json_bytes(MANIFEST_FILE, body | {"crc32": _crc32_of_json(body)}, indent=None)
    disk.write_file(folder / MANIFEST_FILE, content)


def read_manifest(folder: Path) -> Manifest:
    """Returns the entries by file name. Raises ValueError if the manifest is damaged or has a newer format."""
    path = folder / MANIFEST_FILE
    body = read_json(path)
    if not isinstance(body, dict) or body.pop("crc32", None) != _crc32_of_json(body):
        raise ValueError(f"{path} is corrupt: its checksum does not match")
    version = body.get("version")
    if version not in range(1, FORMAT_VERSION + 1):
        raise ValueError(f"{path} has format version {version}: must be 1 to {FORMAT_VERSION}")
    try:
        files = {name: FileEntry.from_json(entry) for name, entry in body["files"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is corrupt: {error!r}") from error
    for name in files:
        path_inside = PurePosixPath(name)
        if path_inside.is_absolute() or ".." in path_inside.parts or not path_inside.parts or "\0" in name:
            raise ValueError(f"{path} is corrupt: it lists {name!r}, which is outside the checkpoint")
    return files


def verify_part(folder: Path, name: str, *, expected: FileEntry, part: Piece | None) -> None:
    """Raises ValueError, naming file and tensor, if the part of the file has changed since the save."""
    start, num_bytes = (0, expected.num_bytes) if part is None else (part.start, part.num_bytes)
    if range_crc32(folder / name, start, num_bytes=num_bytes) != (expected.crc32 if part is None else part.crc32):
        what = "its checksum does not match" if part is None else str(part)
        raise ValueError(f"{folder / name} is corrupt: {what}")


def verify_size(folder: Path, name: str, *, expected: FileEntry) -> None:
    """Raises ValueError naming the file if it is missing or its size has changed since the save."""
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    num_bytes = path.stat().st_size
    if num_bytes != expected.num_bytes:
        raise ValueError(f"{path} is truncated or changed: {num_bytes} bytes, {expected.num_bytes} were saved")


def verify_file(folder: Path, name: str, *, expected: FileEntry) -> None:
    """Raises ValueError naming the file if it is missing, truncated or changed since the save."""
    # Size first: it costs nothing, and "truncated" is more helpful than a wrong checksum.
    verify_size(folder, name, expected=expected)
    for part in expected.checked_parts():
        verify_part(folder, name, expected=expected, part=part)


def verify_share(folder: Path, files: Manifest, *, rank: int, num_ranks: int) -> None:
    """Raises ValueError if this rank's share of the files is damaged. The shares of all ranks cover all files."""
    parts = [(name, part) for name in sorted(files) for part in files[name].checked_parts()]
    sizes = [files[name].num_bytes if part is None else part.num_bytes for name, part in parts]
    begin, total, own = 0, max(1, sum(sizes)), []
    for entry, size in zip(parts, sizes, strict=True):
        # The rank that owns the middle of a part checks it, so each byte is read once, mostly in contiguous ranges.
        if (begin + size // 2) * num_ranks // total == rank:
            own.append(entry)
        begin += size
    # An empty file has no parts to check, but must exist.
    for name in sorted({name for name, _ in own} | {name for name in files if not files[name].num_bytes}):
        verify_size(folder, name, expected=files[name])
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for _ in pool.map(lambda entry: verify_part(folder, entry[0], expected=files[entry[0]], part=entry[1]), own):
            pass


def read_json(path: Path) -> Any:
    """Reads a JSON file. Raises ValueError, naming the file, if it is not JSON."""
    return json_value(path.read_bytes(), path)


def json_value(content: bytes, where: object) -> Any:
    """Decodes JSON text. Raises ValueError, naming the source `where`, if it is not JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is corrupt: {error}") from error


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.60} is not a number of bytes or elements")
    return value


def _crc32_of_json(body: dict[str, Any]) -> int:
    # Sorted, because the key order may change between writing and reading.
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
