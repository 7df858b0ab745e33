"""Reading and writing the pieces of a checkpoint's data files, and torch.distributed.checkpoint's metadata file.

A piece is what torch.save writes of one tensor, so that torch's own tools read these files; the elements lie inside it
without gaps, so that a part of them can be read alone. The folder around the files is in folder.py; what goes where is
decided in planner.py.
"""

import io
import math
import os
import pickle
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.serialization import skip_data

from megatron.core.dist_checkpointing import disk
from megatron.core.dist_checkpointing.boxes import Box
from megatron.core.dist_checkpointing.manifest import FileEntry, Manifest, Piece
from megatron.core.dist_checkpointing.stored_contents import check_metadata
from megatron.core.dist_checkpointing.torch_files import load_allowed

METADATA_FILE = ".metadata"
_DCP = "torch.distributed.checkpoint"
# Everything that torch's pickled metadata of boxes and objects refers to, torch dtypes and layouts apart.
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
# What reading a part of a piece adds to the process's memory, at most; or one row of elements, if that is more.
_READ_BYTES = 8 << 20
# From here on a second thread's sum of a piece saves more than the call to it costs.
_SHARED_BYTES = 1 << 18
# So many pieces, the last among them, may be written and not summed up yet.
_PIECES_AHEAD = 5


# Writing.


def data_file(rank: int) -> str:
    """The file that a rank writes, named as torch.distributed.checkpoint does."""
    return f"__{rank}_0.distcp"


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor: any shape and dtype, contiguous, on the host. Nothing is copied."""
    # Not view(-1): the stride of a dimension of one element may be anything.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # [elements], same dtype
    return flat.view(torch.uint8).numpy().data


def write_pieces(
    path: Path, contents: Iterable[tuple[str, Box | None, torch.Tensor | bytes]], *, helper: Executor | None = None
) -> FileEntry:
    """Writes key, box and content of each piece to a new file, which is then on disk; raises OSError.

    Contents: bytes of an object, or a tensor: [*box shape], any dtype, contiguous, on the host. helper: its thread sums
    up large pieces while the caller's writes; None where the caller does both.
    """
    pieces: list[Piece] = []
    sums: list[Callable[[], int]] = []
    frames: dict[tuple[torch.Size, torch.dtype], tuple[bytes, bytes]] = {}
    with disk.DurableFile(path) as file:
        for key, box, content in contents:
            start, data_start = file.num_bytes, None
            if isinstance(content, torch.Tensor):
                kind = content.shape, content.dtype
                if kind not in frames:
                    frames[kind] = _frame(*kind)
                before, after = frames[kind]
                data_start = start + len(before)
                sums.append(_write_parts(file, (before, bytes_of(content), after), helper=helper))
            else:
                sums.append(_write_parts(file, (content,), helper=helper))
            pieces.append(Piece(key, box, start, file.num_bytes - start, data_start, None))
            # What was copied to the host stays in memory until it is summed up.
            if len(sums) >= _PIECES_AHEAD:
                sums[-_PIECES_AHEAD]()
            # Whoever makes the next one need not keep this one in memory.
            del content
    summed = tuple(replace(piece, crc32=checksum()) for piece, checksum in zip(pieces, sums, strict=True))
    return FileEntry(file.num_bytes, pieces=summed)


def _write_parts(
    file: disk.DurableFile, parts: tuple[bytes | memoryview, ...], *, helper: Executor | None
) -> Callable[[], int]:
    """Writes them one behind the other; their CRC-32, for which the call may wait."""
    if helper is None or sum(map(len, parts)) < _SHARED_BYTES:
        checksum = 0
        for part in parts:
            checksum = file.write(part, checksum)
        return lambda: checksum
    beside = helper.submit(_crc32, parts)
    for part in parts:
        file.put(part)
    return beside.result


def _crc32(parts: tuple[bytes | memoryview, ...]) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def write_metadata(folder: Path, metadata: Metadata, *, files: Manifest) -> FileEntry:
    """Writes torch's metadata file of what `files` hold, for torch's own tools."""
    metadata.storage_data = {
        MetadataIndex(piece.key, None if piece.box is None else piece.box.offset): _StorageInfo(
            name, piece.start, piece.num_bytes
        )
        for name, entry in files.items()
        for piece in entry.pieces
    }
    content = pickle.dumps(metadata)
    return FileEntry(len(content), disk.write_file(folder / METADATA_FILE, content))


class _Recorder(io.RawIOBase):
    """Takes what torch.save writes but the elements, which it skips with a seek."""

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
    """Returns the bytes that torch.save writes before and after the elements of such a tensor."""
    recorder = _Recorder()
    # The elements are then written, and summed up, in one pass of ours; torch's readers look at no checksum of a piece.
    with skip_data():
        torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], recorder))
    return bytes(recorder.before), bytes(recorder.after)


# Reading.


def read_metadata(folder: Path, *, stand_ins: Mapping[tuple[str, str], type] | None = None) -> Metadata:
    """Returns the metadata of the checkpoint in `folder`; raises ValueError if its file is not what torch writes.

    stand_ins: by module and name, what is made in place of classes that another program's metadata refers to.
    """
    content = (folder / METADATA_FILE).read_bytes()
    try:
        # From memory: what names more bytes than there are gets those that there are, and no room for the others.
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
    ) as error:
        raise ValueError(f"{folder / METADATA_FILE} is corrupt: {str(error) or type(error).__name__}") from error


def read_object(path: Path, piece: Piece) -> bytes:
    """The bytes of a stored object."""
    with open(path, "rb") as file:
        file.seek(piece.start)
        return file.read(piece.num_bytes)


class PieceReader:
    """An open data file, for `with`; several threads may read from it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> "PieceReader":
        self._file = open(self._path, "rb", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, piece: Piece, window: Box, *, dtype: torch.dtype, target: torch.Tensor) -> None:
        """Reads the elements of `window`, a box inside the piece's, of the stored `dtype`.

        target: [*window shape], any strides, dtype and device, is filled, and the elements converted.
        """
        assert piece.box is not None, "an object has no elements"
        corner = tuple(o - start for o, start in zip(window.offset, piece.box.offset, strict=True))
        target = target.detach()
        if piece.data_start is None:
            content = io.BytesIO(os.pread(self._file.fileno(), piece.num_bytes, piece.start))
            # Format version 1 says nothing of where the elements are: torch knows, and reads all of them.
            stored = load_allowed(content, f"{self._path}: {piece}")  # [*stored box]
            expected = piece.box.shape, dtype, torch.strided
            if not isinstance(stored, torch.Tensor) or (stored.shape, stored.dtype, stored.layout) != expected:
                raise ValueError(f"{self._path} is corrupt: {piece} is another tensor")
            target.copy_(stored[tuple(slice(o, o + n) for o, n in zip(corner, window.shape, strict=True))])
        elif target.ndim == 0:
            self._fill(piece.data_start, (1,), dtype=dtype, corner=(0,), target=target.view(1))
        else:
            self._fill(piece.data_start, piece.box.shape, dtype=dtype, corner=corner, target=target)

    def _fill(
        self, start: int, stored: tuple[int, ...], *, dtype: torch.dtype, corner: tuple[int, ...], target: torch.Tensor
    ) -> None:
        """Fills `target`: [*window], from elements of shape `stored` that begin at byte `start`."""
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
                # Converts dtype and device on the way; check_wanted has said where that is allowed.
                part.copy_(rows[(slice(0, len(part)), *columns)])

    def _read_into(self, start: int, target: torch.Tensor) -> None:
        """Fills `target`: any shape and dtype, contiguous, on the host."""
        left = bytes_of(target)
        while len(left):
            # Not by seek and read: several threads read from one open file.
            num_read = os.preadv(self._file.fileno(), [left], start)
            if not num_read:
                raise OSError(f"{self._path} has become shorter since it was verified")
            left, start = left[num_read:], start + num_read


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, content: IO[bytes], stand_ins: Mapping[tuple[str, str], type]) -> None:
        super().__init__(content)
        self._stand_ins = stand_ins

    # A pickle may call anything it can name; metadata needs a handful of classes.
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._stand_ins:
            return self._stand_ins[module, name]
        if (module, name) in _METADATA_GLOBALS:
            return super().find_class(module, name)
        # torch pickles a dtype as a bare name in its own namespace.
        if module == "torch" and isinstance(found := vars(torch).get(name), (torch.dtype, torch.layout)):
            return found
        raise pickle.UnpicklingError(f"refers to {module}.{name}")
