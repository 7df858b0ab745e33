"""Data files of a checkpoint, and the metadata file of torch.distributed.checkpoint.

A data file is a sequence of pieces. A piece is the output of torch.save for one tensor, so torch's own tools can read
the files. Its elements are contiguous, so parts of them can be read separately. folder.py handles the folder, and
planner.py decides which rank writes or reads which piece.
"""

import io
import math
import os
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import skip_data

from megatron.core.dist_checkpointing import disk
from megatron.core.dist_checkpointing.manifest import FileEntry, Manifest, Piece
from megatron.core.logical_tensors import Box, whole

METADATA_FILE = ".metadata"
_DCP = "torch.distributed.checkpoint"
# All globals in torch's pickled metadata of boxes and objects, except for torch dtypes and layouts.
_METADATA_GLOBALS = {
    (f"{_DCP}.metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {(f"{_DCP}.filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout")}
# Upper bound of the buffer for reading part of a piece, unless a single row of elements is larger.
_READ_BYTES = 8 << 20
# Minimum size at which computing the checksum on a second thread saves more than the handover costs.
_SHARED_BYTES = 1 << 18
# Number of pieces, including the last one written, whose checksums may be pending.
_PIECES_AHEAD = 5
StoredPieces = dict[str, list[tuple[str, Piece]]]
# Dtypes with plain contiguous elements. Quantized dtypes also have a scale.
_PLAIN_DTYPE = re.compile(r"torch\.(b?float\w+|complex\d+|u?int(8|16|32|64)|bool)")


# Writing pieces.


def data_file(rank: int) -> str:
    """Returns the name of the data file that a rank writes, as in torch.distributed.checkpoint."""
    return f"__{rank}_0.distcp"


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous host tensor without a copy. tensor: any shape and dtype."""
    # view(-1) would fail, because the stride of a dimension of size 1 is arbitrary.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # [elements], same dtype
    return flat.view(torch.uint8).numpy().data


def write_pieces(
    path: Path,
    contents: Iterable[tuple[str, Box | None, torch.Tensor | bytes]],
    *,
    helper: Executor | None = None,
    with_zip_checksums: bool = False,
) -> FileEntry:
    """Writes pieces to a new file, syncs it to disk and returns its manifest entry. Raises OSError.

    contents: key, box and content of each piece. The content is the bytes of an object, or a tensor: [*box shape], any
    dtype, contiguous, on the host. helper: executor that computes the checksums of large pieces while this thread
    writes; None computes them on this thread. with_zip_checksums: whether the zip format of torch.save contains correct
    checksums, for other programs; requires a copy of each tensor in memory.
    """
    pieces: list[Piece] = []
    sums: list[Callable[[], int]] = []
    frames: dict[tuple[torch.Size, torch.dtype], tuple[bytes, bytes]] = {}
    with disk.DurableFile(path) as file:
        for key, box, content in contents:
            start, data_start = file.num_bytes, None
            if isinstance(content, torch.Tensor) and with_zip_checksums:
                buffer = io.BytesIO()
                torch.save(content.clone(), buffer)  # excludes the memory around a view
                sums.append(_write_parts(file, (buffer.getbuffer(),), helper=None))
            elif isinstance(content, torch.Tensor):
                kind = content.shape, content.dtype
                if kind not in frames:
                    frames[kind] = _frame(*kind)
                before, after = frames[kind]
                data_start = start + len(before)
                sums.append(_write_parts(file, (before, bytes_of(content), after), helper=helper))
            else:
                sums.append(_write_parts(file, (content,), helper=helper))
            pieces.append(Piece(key, box, start, file.num_bytes - start, data_start, None))
            # A host copy remains in memory until its checksum is computed.
            if len(sums) >= _PIECES_AHEAD:
                sums[-_PIECES_AHEAD]()
            # Released before the iterator produces the next content.
            del content
    summed = tuple(replace(piece, crc32=checksum()) for piece, checksum in zip(pieces, sums, strict=True))
    return FileEntry(file.num_bytes, pieces=summed)


def _write_parts(
    file: disk.DurableFile, parts: tuple[bytes | memoryview, ...], *, helper: Executor | None
) -> Callable[[], int]:
    """Writes the parts in sequence and returns a function that returns their CRC-32, waiting for it if necessary."""
    if helper is None or sum(map(len, parts)) < _SHARED_BYTES:
        checksum = 0
        for part in parts:
            checksum = file.write(part, checksum)
        return lambda: checksum
    checksum_of_parts = helper.submit(_crc32, parts)
    for part in parts:
        file.put(part)
    return checksum_of_parts.result


def _crc32(parts: tuple[bytes | memoryview, ...]) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


class _Recorder(io.RawIOBase):
    """File that records the output of torch.save except for the elements, which torch.save skips with a seek."""

    def __init__(self) -> None:
        self.before, self.after = bytearray(), bytearray()
        self._skipped = False

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        (self.after if self._skipped else self.before).extend(content)
        return len(content)

    def seek(self, _offset: int, _whence: int = 0) -> int:
        self._skipped = True
        return 0


def _frame(shape: torch.Size, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """Returns the bytes that torch.save writes before and after the elements of a tensor of this shape and dtype."""
    recorder = _Recorder()
    # The elements are written and checksummed in one pass here. Torch's readers ignore the checksums in the frame.
    with skip_data():
        torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], recorder))
    return bytes(recorder.before), bytes(recorder.after)


# Reading pieces.


def read_object(path: Path, piece: Piece) -> bytes:
    """Returns the bytes of a stored object."""
    with open(path, "rb") as file:
        file.seek(piece.start)
        return file.read(piece.num_bytes)


class ReadsPieces(Protocol):
    """Interface of an open data file. Several threads may read its pieces."""

    def read(self, piece: Piece, window: Box, *, dtype: torch.dtype, target: torch.Tensor) -> None:
        """Fills `target` with the elements of `window`, a box inside the piece's box. dtype: stored dtype.

        target: [*window shape], any strides, dtype and device; filled in place, with conversion.
        """
        ...


class PieceReader:
    """Context manager for an open data file. Several threads may read from it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> "PieceReader":
        self._file = open(self._path, "rb", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, piece: Piece, window: Box, *, dtype: torch.dtype, target: torch.Tensor) -> None:
        """Fills `target` with the elements of `window`, a box inside the piece's box. dtype: stored dtype.

        target: [*window shape], any strides, dtype and device; filled in place, with conversion.
        """
        assert piece.box is not None, "an object has no elements"
        corner = tuple(o - start for o, start in zip(window.offset, piece.box.offset, strict=True))
        target = target.detach()
        if piece.data_start is None:
            content = io.BytesIO(os.pread(self._file.fileno(), piece.num_bytes, piece.start))
            # Format version 1 does not record where the elements begin, so torch reads the whole piece.
            stored = load_allowed(content, f"{self._path}: {piece}")  # [*stored box]
            expected = piece.box.shape, dtype, torch.strided
            if not isinstance(stored, torch.Tensor) or (stored.shape, stored.dtype, stored.layout) != expected:
                raise ValueError(f"{self._path} is corrupt: {piece} contains a different tensor")
            target.copy_(stored[tuple(slice(o, o + n) for o, n in zip(corner, window.shape, strict=True))])
        elif target.ndim == 0:
            self._fill(piece.data_start, (1,), dtype=dtype, corner=(0,), target=target.view(1))
        else:
            self._fill(piece.data_start, piece.box.shape, dtype=dtype, corner=corner, target=target)

    def _fill(
        self, start: int, stored: tuple[int, ...], *, dtype: torch.dtype, corner: tuple[int, ...], target: torch.Tensor
    ) -> None:
        """Fills `target`, [*window], from a stored box of shape `stored` that begins at byte `start` of the file.

        corner: index of the window's first element in the stored box.
        """
        row_bytes = math.prod(stored[1:]) * dtype.itemsize
        begin = start + corner[0] * row_bytes
        whole_rows = tuple(target.shape[1:]) == stored[1:]
        if whole_rows and target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous():
            self._read_into(begin, target)
        elif row_bytes > _READ_BYTES and len(stored) > 1:
            for index, row in enumerate(target):
                self._fill(begin + index * row_bytes, stored[1:], dtype=dtype, corner=corner[1:], target=row)
        else:
            num_rows = max(1, min(_READ_BYTES // row_bytes, len(target)))
            rows = torch.empty((num_rows, *stored[1:]), dtype=dtype)  # [rows, *row], the stored dtype
            columns = tuple(slice(o, o + n) for o, n in zip(corner[1:], target.shape[1:], strict=True))
            for first in range(0, len(target), num_rows):
                part = target[first : first + num_rows]
                self._read_into(begin + first * row_bytes, rows[: len(part)])
                # Converts dtype and device; check_wanted has already verified that this is allowed.
                part.copy_(rows[(slice(0, len(part)), *columns)])

    def _read_into(self, start: int, target: torch.Tensor) -> None:
        """Fills `target` from byte `start` of the file. target: any shape and dtype, contiguous, on the host."""
        left = bytes_of(target)
        while len(left):
            # seek and read cannot be used, because several threads share this open file.
            num_read = os.preadv(self._file.fileno(), [left], start)
            if not num_read:
                raise OSError(f"{self._path} has been truncated since it was verified")
            left, start = left[num_read:], start + num_read


def load_allowed(source: Path | IO[bytes], where: object, *, allowed: Sequence[Any] = (), mmap: bool = False) -> Any:
    """Loads the output of torch.save if it contains only tensors, plain values and the classes in `allowed`.

    Runs no other code that the file names. Raises ValueError, naming the source `where`, if the file is damaged or
    refers to anything else. mmap: maps tensors from the file instead of reading them.
    """
    try:
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except (
        RuntimeError,
        pickle.UnpicklingError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        MemoryError,
        AssertionError,
    ) as error:
        raise ValueError(f"{where} cannot be read: {_reason_of(error)}") from error


def _reason_of(error: Exception) -> str:
    """Returns why torch.load failed, without its advice to unpickle without checks."""
    if (name := re.search(r"GLOBAL (\S+)", str(error))) is not None:
        return f"it refers to {name[1]}, which is not one of the allowed classes"
    text = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
    first = next(iter(text.strip().splitlines()), "")
    return type(error).__name__ if not first or first.startswith("Weights only load failed") else first


def check_records(archive: zipfile.ZipFile) -> None:
    """Reads all records of a torch.save archive, which verifies their checksums.

    Raises BadZipFile, ValueError or a different zipfile error if the archive is damaged, and ValueError if its byte
    order is not little-endian.
    """
    for record in archive.infolist():
        with archive.open(record) as data:
            while data.read(_READ_BYTES):
                pass
        if record.filename.endswith("/byteorder") and archive.read(record) != b"little":
            raise ValueError("it was written by a machine with a different byte order")


# The metadata file.


def write_metadata(folder: Path, metadata: Metadata, *, files: Manifest) -> FileEntry:
    """Writes torch's metadata file for the pieces in `files`, for use by torch's own tools."""
    metadata.storage_data = {
        MetadataIndex(piece.key, None if piece.box is None else piece.box.offset): _StorageInfo(
            name, piece.start, piece.num_bytes
        )
        for name, entry in files.items()
        for piece in entry.pieces
    }
    content = pickle.dumps(metadata)
    return FileEntry(len(content), disk.write_file(folder / METADATA_FILE, content))


def read_metadata(folder: Path, *, stand_ins: Mapping[tuple[str, str], type] | None = None) -> Metadata:
    """Reads the metadata of the checkpoint in `folder`. Raises ValueError if the file is not in torch's format.

    stand_ins: replacements, by module and name, for classes that another program's metadata refers to.
    """
    content = (folder / METADATA_FILE).read_bytes()
    try:
        # Read from memory, so that a length beyond the end of the file allocates nothing for the missing bytes.
        return check_metadata(_MetadataUnpickler(io.BytesIO(content), stand_ins or {}).load())
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        OverflowError,
        MemoryError,
        RecursionError,
        RuntimeError,
    ) as error:
        raise ValueError(f"{folder / METADATA_FILE} is corrupt: {str(error) or type(error).__name__}") from error


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, content: IO[bytes], stand_ins: Mapping[tuple[str, str], type]) -> None:
        super().__init__(content)
        self._stand_ins = stand_ins

    # A pickle can call anything that it names, but metadata requires only a handful of classes.
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._stand_ins:
            return self._stand_ins[module, name]
        if (module, name) in _METADATA_GLOBALS:
            return super().find_class(module, name)
        # torch pickles a dtype as a plain name in its namespace.
        if module == "torch" and isinstance(found := vars(torch).get(name), (torch.dtype, torch.layout)):
            return found
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def check_metadata(metadata: object) -> Metadata:
    """Returns `metadata` if each of its entries describes a tensor or an object. Raises ValueError otherwise."""
    if type(metadata) is not Metadata or not isinstance(vars(metadata).get("state_dict_metadata"), dict):
        raise ValueError(f"it contains a {type(metadata).__name__} without a list of tensors")
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(key, str) or not isinstance(entry, (TensorStorageMetadata, BytesStorageMetadata)):
            raise ValueError(f"{key!r:.80} is neither a tensor nor an object")
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(key, entry)
    return metadata


def _check_tensor(key: str, entry: TensorStorageMetadata) -> None:
    facts = vars(entry)
    if not _is_shape(facts.get("size")) or math.prod(entry.size) >= 1 << 60:
        raise ValueError(f"{key} has the size {facts.get('size')!r:.80}")
    properties = facts.get("properties")
    dtype = vars(properties).get("dtype") if isinstance(properties, TensorProperties) else None
    if not isinstance(dtype, torch.dtype) or not _PLAIN_DTYPE.fullmatch(str(dtype)):
        raise ValueError(f"{key} has the dtype {dtype}, which is not supported")


def stored_pieces(files: Manifest, metadata: Metadata) -> StoredPieces:
    """Returns the (file name, piece) pairs of every key. metadata: as returned by read_metadata.

    Files and metadata must have passed their checksums. Raises ValueError if they are inconsistent: a piece exceeds its
    tensor or its file, or elements are missing.
    """
    pieces = [(name, piece) for name, entry in files.items() for piece in entry.pieces]
    if not pieces:
        # Format version 1 lists pieces only in torch's metadata.
        pieces = _pieces_of_metadata(files, metadata)
    by_key: StoredPieces = {key: [] for key in metadata.state_dict_metadata}
    for name, piece in pieces:
        if piece.key not in by_key:
            raise ValueError(f"{name} contains {piece}, which the metadata does not list")
        by_key[piece.key].append((name, piece))
    for key, held in by_key.items():
        entry = metadata.state_dict_metadata[key]
        if isinstance(entry, TensorStorageMetadata):
            _check_pieces(entry, held, key=key)
        elif not held or any(piece.box is not None for _, piece in held):
            raise ValueError(f"the object {key} is not stored")
    return by_key


def _check_pieces(entry: TensorStorageMetadata, held: list[tuple[str, Piece]], *, key: str) -> None:
    box, itemsize, num_elements = whole(tuple(entry.size)), entry.properties.dtype.itemsize, 0
    for name, piece in held:
        if piece.box is None or len(piece.box.shape) != len(box.shape) or not piece.box.is_inside(box):
            raise ValueError(f"{name} contains {piece}, which is not part of a tensor of {list(entry.size)}")
        begin = piece.start if piece.data_start is None else piece.data_start
        if begin < piece.start or begin + piece.box.volume * itemsize > piece.end:
            raise ValueError(f"{name} reserves {piece.num_bytes} bytes for {piece}: too few for its elements")
        num_elements += piece.box.volume
    if num_elements != math.prod(entry.size):
        raise ValueError(f"only {num_elements} elements of {key} are stored, out of {math.prod(entry.size)}")


def _pieces_of_metadata(files: Manifest, metadata: Metadata) -> list[tuple[str, Piece]]:
    stored = vars(metadata).get("storage_data")
    if not isinstance(stored, dict):
        raise ValueError("the metadata does not contain the positions of the tensors")
    pieces = []
    for index, info in stored.items():
        is_index = isinstance(index, MetadataIndex) and isinstance(index.fqn, str)
        if not is_index or not isinstance(info, _StorageInfo):
            raise ValueError(f"the storage entry of {index!r:.80} is invalid: {info!r:.80}")
        place = vars(info)
        name, start, num_bytes = place.get("relative_path"), place.get("offset", -1), place.get("length", -1)
        if name not in files or not _is_shape((start, num_bytes)) or start + num_bytes > files[name].num_bytes:
            raise ValueError(
                f"{index.fqn} is in {name!r:.80}, bytes {start!r:.20} + {num_bytes!r:.20}: no file contains this range"
            )
        pieces.append((name, Piece(index.fqn, _chunk_box(metadata, index), start, num_bytes, None, None)))
    return pieces


def _chunk_box(metadata: Metadata, index: MetadataIndex) -> Box | None:
    if index.offset is None:
        return None
    entry = metadata.state_dict_metadata.get(index.fqn)
    chunks = vars(entry).get("chunks") if isinstance(entry, TensorStorageMetadata) else None
    for chunk in chunks if isinstance(chunks, list) else ():
        facts = vars(chunk) if isinstance(chunk, ChunkStorageMetadata) else {}
        offset, shape = facts.get("offsets", ()), facts.get("sizes", ())
        if offset == index.offset and _is_shape(offset) and _is_shape(shape) and len(offset) == len(shape):
            return Box(tuple(offset), tuple(shape))
    raise ValueError(f"{index.fqn} has no piece at {index.offset!r:.80}")


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)
