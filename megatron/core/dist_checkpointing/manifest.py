"""The manifest of a checkpoint: its files, the pieces inside each of them, and their checksums.

Written last, it vouches for all other files. Where a checkpoint lies, and how it appears there, is in folder.py.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megatron.core.dist_checkpointing import disk
from megatron.core.dist_checkpointing.boxes import Box
from megatron.core.files import range_crc32

MANIFEST_FILE = "manifest.json"
# Version 1 has one checksum a file, and no pieces.
FORMAT_VERSION = 2
# Threads that read for one rank: checksums and copies release the interpreter.
NUM_READERS = 4


@dataclass(frozen=True)
class Piece:
    """One stored tensor box, or object (box is None), inside a file.

    start, num_bytes: its bytes in the file, as torch.save wrote them. data_start: where in the file the elements begin,
    row-major and without gaps; None where that is not known, as in files of format version 1, and for objects.
    crc32: of all its bytes; None in files of format version 1, where the file has one.
    """

    key: str
    box: Box | None
    start: int
    num_bytes: int
    data_start: int | None
    crc32: int | None

    @property
    def end(self) -> int:
        """First byte of the file beyond the piece."""
        return self.start + self.num_bytes

    def __str__(self) -> str:
        if self.box is None or not self.box.shape:
            return self.key
        ranges = (f"{start}:{end}" for start, end in zip(self.box.offset, self.box.end, strict=True))
        return f"{self.key}[{', '.join(ranges)}]"

    def to_json(self) -> dict[str, Any]:
        """Returns the piece in the manifest's form."""
        box = {} if self.box is None else {"offset": self.box.offset, "shape": self.box.shape}
        data = {} if self.data_start is None else {"data": self.data_start}
        return {"key": self.key, **box, "start": self.start, "bytes": self.num_bytes, **data, "crc32": self.crc32}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Piece":
        """Returns the piece of to_json's values; raises KeyError, TypeError or ValueError for anything else."""
        box = Box(tuple(map(_count, value["offset"])), tuple(map(_count, value["shape"]))) if "shape" in value else None
        data = _count(value["data"]) if "data" in value else None
        piece = cls(value["key"], box, _count(value["start"]), _count(value["bytes"]), data, _count(value["crc32"]))
        if not isinstance(piece.key, str) or (box is not None and len(box.offset) != len(box.shape)):
            raise ValueError(f"{value} is no piece of a tensor")
        return piece


@dataclass(frozen=True)
class FileEntry:
    """The manifest's entry of one file: its size, and a checksum of the whole or of each of its pieces."""

    num_bytes: int
    crc32: int | None = None
    pieces: tuple[Piece, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the entry in the manifest's form."""
        if self.crc32 is not None:
            return {"bytes": self.num_bytes, "crc32": self.crc32}
        return {"bytes": self.num_bytes, "pieces": [piece.to_json() for piece in self.pieces]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "FileEntry":
        """Returns the entry of to_json's values; raises KeyError, TypeError or ValueError for anything else."""
        crc32 = _count(value["crc32"]) if "crc32" in value else None
        entry = cls(_count(value["bytes"]), crc32, tuple(map(Piece.from_json, value.get("pieces", ()))))
        ends = [0, *(piece.end for piece in entry.pieces)]
        if entry.crc32 is None and [*(piece.start for piece in entry.pieces), entry.num_bytes] != ends:
            raise ValueError("its pieces leave gaps, which no checksum is of")
        return entry

    def checked_parts(self) -> Iterator[Piece | None]:
        """Yields the parts with a checksum of their own: the pieces, or None for the whole file."""
        yield from self.pieces if self.crc32 is None else (None,)


Manifest = dict[str, FileEntry]


def write_manifest(folder: Path, files: Manifest) -> None:
    """Writes the manifest: the last file of a checkpoint, its presence says that the others are whole."""
    # The manifest vouches for the others, so its own checksum is inside.
    entries = {name: files[name].to_json() for name in sorted(files)}
    body = {"version": FORMAT_VERSION, "files": entries}
    content = disk.json_bytes(MANIFEST_FILE, body | {"crc32": _crc32_of_json(body)}, indent=None)
    disk.write_file(folder / MANIFEST_FILE, content)


def read_manifest(folder: Path) -> Manifest:
    """The entries by file name; raises ValueError if the manifest itself is damaged or of a later format."""
    path = folder / MANIFEST_FILE
    body = read_json(path)
    if not isinstance(body, dict) or body.pop("crc32", None) != _crc32_of_json(body):
        raise ValueError(f"{path} is corrupt: its checksum does not match")
    version = body.get("version")
    if version not in range(1, FORMAT_VERSION + 1):
        raise ValueError(f"{path} has format version {version}: this program reads 1 to {FORMAT_VERSION}")
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
    """Raises ValueError naming the file, and the tensor, if a part of it was changed since the save."""
    start, num_bytes = (0, expected.num_bytes) if part is None else (part.start, part.num_bytes)
    if range_crc32(folder / name, start, num_bytes=num_bytes) != (expected.crc32 if part is None else part.crc32):
        what = "its checksum does not match" if part is None else str(part)
        raise ValueError(f"{folder / name} is corrupt: {what}")


def verify_size(folder: Path, name: str, *, expected: FileEntry) -> None:
    """Raises ValueError naming the file if it is missing or has another size than at the save."""
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    num_bytes = path.stat().st_size
    if num_bytes != expected.num_bytes:
        raise ValueError(f"{path} is truncated or changed: {num_bytes} bytes, {expected.num_bytes} were saved")


def verify_file(folder: Path, name: str, *, expected: FileEntry) -> None:
    """Raises ValueError naming the file if it is missing, truncated or changed since the save."""
    # Size first: it is free, and "truncated" says more than a wrong checksum.
    verify_size(folder, name, expected=expected)
    for part in expected.checked_parts():
        verify_part(folder, name, expected=expected, part=part)


def verify_share(folder: Path, files: Manifest, *, rank: int, num_ranks: int) -> None:
    """Raises ValueError if this rank's share of the checkpoint's bytes is damaged; the shares of all make it whole."""
    parts = [(name, part) for name in sorted(files) for part in files[name].checked_parts()]
    sizes = [files[name].num_bytes if part is None else part.num_bytes for name, part in parts]
    begin, total, own = 0, max(1, sum(sizes)), []
    for entry, size in zip(parts, sizes, strict=True):
        # To whom the middle of a part belongs: nothing is read twice, and what lies together mostly by one rank.
        if (begin + size // 2) * num_ranks // total == rank:
            own.append(entry)
        begin += size
    # A file without parts has no bytes, but has to be there.
    for name in sorted({name for name, _ in own} | {name for name in files if not files[name].num_bytes}):
        verify_size(folder, name, expected=files[name])
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for _ in pool.map(lambda entry: verify_part(folder, entry[0], expected=files[entry[0]], part=entry[1]), own):
            pass


def read_json(path: Path) -> Any:
    """The value of a JSON file; raises ValueError naming the file if it is not JSON."""
    return json_value(path.read_bytes(), path)


def json_value(content: bytes, where: object) -> Any:
    """The value of JSON text; raises ValueError naming where it is from if it is none."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is corrupt: {error}") from error


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.60} is no number of bytes or elements")
    return value


def _crc32_of_json(body: dict[str, Any]) -> int:
    # Sorted, because what is read back need not keep the order in which it was written.
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
