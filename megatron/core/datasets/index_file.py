"""The .idx file of Megatron's indexed format: positions of sequences in the .bin file, which is not read here.

Layout, little-endian: b"MMIDIDX\\0\\0" | u64 version = 1 | u8 dtype code | u64 sequences | u64 document borders |
i32 length per sequence | i64 byte offset into .bin per sequence | i64 document borders (first 0, last = sequences) |
i8 mode per sequence (multimodal only).
"""

import struct
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_FIXED = struct.Struct("<9sQBQQ")
# Pointers are checked in chunks of this many sequences, which bounds the memory for a large corpus.
_CHECK_ROWS = 1 << 22


class DType(Enum):
    """Element types of a .bin file. The value is the code stored in the .idx file."""

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, value: type[np.number]) -> int:
        return cls[np.dtype(value).name].value

    @classmethod
    def dtype_from_code(cls, value: int) -> type[np.number]:
        return np.dtype(cls(value).name).type

    @staticmethod
    def size(key: int | type[np.number]) -> int:
        """Returns the size in bytes of one element, for a stored code or a numpy dtype."""
        return np.dtype(DType.dtype_from_code(key) if isinstance(key, int) else key).itemsize

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> type[np.number]:
        """Returns the dtype in which Megatron stores ids: uint16 for less than 65,500 ids, int32 for more or None."""
        return np.uint16 if cardinality is not None and cardinality < 65500 else np.int32


@dataclass(frozen=True)
class SequenceIndex:
    """Contents of an .idx file.

    lengths: [N], int32, elements of each sequence. pointers: [N], int64, byte offset of each sequence in the .bin file.
    documents: [D + 1], int64, document borders. modes: [N], int8, or None.
    """

    dtype: type[np.number]
    lengths: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray
    modes: np.ndarray | None


def index_bytes(index: SequenceIndex) -> bytes:
    """Serializes `index` to the bytes of an .idx file."""
    fixed = _FIXED.pack(MAGIC, VERSION, DType.code_from_dtype(index.dtype), len(index.lengths), len(index.documents))
    parts = [index.lengths.astype("<i4"), index.pointers.astype("<i8"), index.documents.astype("<i8")]
    if index.modes is not None:
        parts.append(index.modes.astype("<i1"))
    return fixed + b"".join(part.tobytes() for part in parts)


def contiguous_pointers(lengths: np.ndarray, dtype: type[np.number]) -> np.ndarray:
    """Returns the byte offset of each sequence if all are stored contiguously: [N], int64. lengths: [N], integers."""
    ends = np.cumsum(lengths, dtype=np.int64) * DType.size(dtype)
    return np.concatenate([[0], ends[:-1]]).astype(np.int64) if len(ends) else ends


def read_index(path: Path, *, multimodal: bool = False) -> SequenceIndex:
    """Opens an .idx file. The returned arrays are views of a read-only memory map.

    Raises OSError if the file cannot be read, and ValueError if it is not a complete index.
    """
    found = path.stat().st_size
    if found < _FIXED.size:
        raise ValueError(f"{path} has {found} bytes: must have at least {_FIXED.size}; the file is truncated")
    buffer = np.memmap(path, mode="r", dtype=np.uint8)
    magic, version, code, num_sequences, num_borders = _FIXED.unpack(bytes(buffer[: _FIXED.size]))
    _check_header(path, magic, version=version, code=code)
    expected = _FIXED.size + num_sequences * (13 if multimodal else 12) + num_borders * 8
    if found != expected:
        hint = "; it has one mode byte per sequence: open it as multimodal" if found == expected + num_sequences else ""
        raise ValueError(
            f"{path} has {found} bytes: {num_sequences} sequences and {num_borders} document borders require "
            f"{expected}{hint or '; the file is truncated or damaged'}"
        )
    return _map_arrays(buffer, DType.dtype_from_code(code), num_sequences=num_sequences, num_borders=num_borders)


def _check_header(path: Path, magic: bytes, *, version: int, code: int) -> None:
    if magic != MAGIC:
        raise ValueError(f"{path} starts with {magic!r}: must start with {MAGIC!r}")
    if version != VERSION:
        raise ValueError(f"{path} has version {version}: must be {VERSION}")
    if code not in {dtype.value for dtype in DType}:
        raise ValueError(f"{path} has dtype code {code}: must be 1 to {len(DType)}")


def _map_arrays(buffer: np.ndarray, dtype: type[np.number], *, num_sequences: int, num_borders: int) -> SequenceIndex:
    view = buffer.data
    pointers_at = _FIXED.size + 4 * num_sequences
    documents_at = pointers_at + 8 * num_sequences
    modes_at = documents_at + 8 * num_borders
    return SequenceIndex(
        dtype=dtype,
        lengths=np.frombuffer(view, "<i4", num_sequences, _FIXED.size),
        pointers=np.frombuffer(view, "<i8", num_sequences, pointers_at),
        documents=np.frombuffer(view, "<i8", num_borders, documents_at),
        modes=np.frombuffer(view, "<i1", num_sequences, modes_at) if len(buffer) > modes_at else None,
    )


def check_index(index: SequenceIndex, idx_path: Path, *, bin_path: Path) -> None:
    """Raises ValueError if a sequence extends beyond the .bin file, or if document borders are invalid."""
    available = bin_path.stat().st_size
    size = DType.size(index.dtype)
    for start in range(0, len(index.lengths), _CHECK_ROWS):
        lengths = index.lengths[start : start + _CHECK_ROWS].astype(np.int64)
        pointers = index.pointers[start : start + _CHECK_ROWS]
        bad = (lengths < 0) | (pointers < 0) | (pointers > available - lengths * size)
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(
                f"{idx_path}: sequence {start + row} has {lengths[row]} elements of {size} bytes at byte "
                f"{pointers[row]}, but {bin_path} has {available} bytes; the .bin file is truncated or belongs to a "
                "different index"
            )
    borders = index.documents
    if len(borders) and (borders[0] != 0 or borders[-1] != len(index.lengths) or (np.diff(borders) < 0).any()):
        raise ValueError(f"{idx_path}: document borders must increase from 0 to {len(index.lengths)} sequences")
