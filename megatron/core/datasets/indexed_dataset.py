"""Reader and writer of Megatron's .bin/.idx pairs, with byte-identical files, and reader of the tokens' loss masks.

The layout of the .idx file is in index_file.py. Samples are created in gpt_dataset.py.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from torch.utils.data import Dataset

from megatron.core.config_field import require_defaults
from megatron.core.datasets.index_file import (
    DType,
    SequenceIndex,
    check_index,
    contiguous_pointers,
    index_bytes,
    read_index,
)

# Reasons why Megatron's arguments that skip reading the .idx file are rejected.
_WITHOUT_INDEX = "the .idx file is always read, which takes milliseconds"

_ON_DISK = "object stores are not supported; mount the store and pass a path"

# Chunk size for appending a pair.
_COPY_BYTES = 1 << 22

__all__ = ["DType", "DataError", "IndexedDataset", "IndexedDatasetBuilder", "get_bin_path", "get_idx_path"]


class DataError(ValueError):
    """Raised if the data does not match the settings of the run. The message explains how to fix it."""


def get_bin_path(path_prefix: str) -> str:
    return path_prefix + ".bin"


def get_idx_path(path_prefix: str) -> str:
    return path_prefix + ".idx"


class IndexedDataset(Dataset[Any]):
    """Dataset of the sequences in PREFIX.bin, whose positions PREFIX.idx lists.

    mmap: maps the .bin file into memory. Otherwise each sequence is read with one positioned read, which some file
    systems require. Both ways return the same elements and are safe in forked and spawned workers. Raises OSError for a
    missing file, and ValueError for a damaged file.
    """

    def __init__(
        self,
        path_prefix: str,
        multimodal: bool = False,
        mmap: bool = True,
        object_storage_config: None = None,
        s3_config: None = None,
        fast_cache_load: bool = False,
        sequences_per_dataset: None = None,
        dtype_code: None = None,
    ) -> None:
        require_defaults("IndexedDataset", _ON_DISK, s3_config=(s3_config, None))
        self.initialize(
            path_prefix, multimodal, mmap, object_storage_config, fast_cache_load, sequences_per_dataset, dtype_code
        )

    def initialize(
        self,
        path_prefix: str,
        multimodal: bool,
        mmap: bool,
        object_storage_config: None = None,
        fast_cache_load: bool = False,
        sequences_per_dataset: None = None,
        dtype_code: None = None,
    ) -> None:
        """Opens the files, or reopens them on repeated calls. The last four arguments must equal their defaults."""
        require_defaults("IndexedDataset", _ON_DISK, object_storage_config=(object_storage_config, None))
        require_defaults(
            "IndexedDataset",
            _WITHOUT_INDEX,
            fast_cache_load=(fast_cache_load, False),
            sequences_per_dataset=(sequences_per_dataset, None),
            dtype_code=(dtype_code, None),
        )
        self.path_prefix = path_prefix
        self.multimodal = multimodal
        self.mmap = mmap
        self._bin_path, self._idx_path = Path(get_bin_path(path_prefix)), Path(get_idx_path(path_prefix))
        for path in (self._idx_path, self._bin_path):
            if not path.is_file():
                raise FileNotFoundError(f"{path} does not exist: {_what_to_give(path_prefix)}")
        self.index = read_index(self._idx_path, multimodal=multimodal)
        check_index(self.index, self._idx_path, bin_path=self._bin_path)
        self._itemsize = DType.size(self.index.dtype)
        self._bytes = _MappedBytes(self._bin_path) if mmap else _ReadBytes(self._bin_path)

    @staticmethod
    def exists(path_prefix: str) -> bool:
        return os.path.exists(get_idx_path(path_prefix)) and os.path.exists(get_bin_path(path_prefix))

    def __reduce__(self) -> tuple[Any, ...]:
        # A process that unpickles the dataset opens a new map or file descriptor.
        return IndexedDataset, (self.path_prefix, self.multimodal, self.mmap), self.index.documents

    def __setstate__(self, document_indices: np.ndarray) -> None:
        self.set_document_indices(document_indices)

    def __len__(self) -> int:
        return len(self.index.lengths)

    @property
    def sequence_lengths(self) -> np.ndarray:
        """Number of elements of each sequence: [N], int32."""
        return self.index.lengths

    @property
    def document_indices(self) -> np.ndarray:
        """Document borders as sequence numbers: [D + 1], int64, from 0 to the number of sequences."""
        return self.index.documents

    def set_document_indices(self, document_indices: np.ndarray) -> None:
        """Replaces the document borders in this object, but not in the file. document_indices: [D + 1], integers."""
        self.index = dataclasses.replace(self.index, documents=np.asarray(document_indices, dtype=np.int64))

    @property
    def sequence_modes(self) -> np.ndarray | None:
        """Mode of each sequence: [N], int8; None if the dataset is not multimodal."""
        return self.index.modes

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        """Returns `length` elements of sequence `idx` from `offset`, as a read-only array.

        length: None means up to the end of the sequence. Multimodal datasets return (array, mode). Raises IndexError if
        the range exceeds the sequence.
        """
        total = int(self.index.lengths[idx])
        length = total - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > total:
            raise IndexError(
                f"{self.path_prefix}: sequence {idx} has {total} elements, but {offset} + {length} were requested"
            )
        start = int(self.index.pointers[idx]) + offset * self._itemsize
        array = np.frombuffer(self._bytes.read(start, length * self._itemsize), self.index.dtype, length)
        return array if self.index.modes is None else (array, self.index.modes[idx])

    def __getitem__(self, idx: int | slice) -> Any:
        """Returns sequence `idx`, or a list with the sequences of a slice. Multimodal datasets also return modes."""
        if isinstance(idx, (int, np.integer)):
            return self.get(int(idx))
        if not isinstance(idx, slice):
            raise TypeError(f"index of an IndexedDataset is {type(idx).__name__}: must be int or slice")
        items = [self.get(i) for i in range(*idx.indices(len(self)))]
        if self.index.modes is None:
            return items
        return [item[0] for item in items], self.index.modes[idx]


class _MappedBytes:
    def __init__(self, path: Path) -> None:
        # The empty file of a corpus without tokens cannot be mapped.
        mapped = path.stat().st_size > 0
        self._view = np.memmap(path, mode="r", dtype=np.uint8).data if mapped else memoryview(b"")

    def read(self, start: int, num_bytes: int) -> memoryview:
        return self._view[start : start + num_bytes]


class _ReadBytes:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "rb", buffering=0)

    def read(self, start: int, num_bytes: int) -> bytes:
        # pread does not use the file position, so forked workers can share the descriptor.
        data = os.pread(self._file.fileno(), num_bytes, start)
        while len(data) < num_bytes:
            more = os.pread(self._file.fileno(), num_bytes - len(data), start + len(data))
            if not more:
                raise OSError(f"{self._path}: expected {num_bytes} bytes at offset {start}, found {len(data)}")
            data += more
        return data


class IndexedDatasetBuilder:
    """Writes a .bin/.idx pair. `finalize` renames both files to their final names, the .idx file last.

    An interrupted write therefore leaves only `*.partial-PID` files, which are removed at the end of a `with` block.
    """

    def __init__(self, bin_path: str, dtype: type[np.number] = np.int32, multimodal: bool = False) -> None:
        self.dtype = dtype
        self.multimodal = multimodal
        self.sequence_lengths: list[int] = []
        self.document_indices: list[int] = [0]
        self.sequence_modes: list[int] = []
        self._bin_path = Path(bin_path)
        self._partial_bin = _partial(self._bin_path)
        self._file: BinaryIO = open(self._partial_bin, "wb")

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def add_item(self, tensor: Any, mode: int = 0) -> None:
        """Appends one sequence. tensor: [L], integers or floats in the range of the file's dtype."""
        self._append(np.asarray(tensor), [len(tensor)], modes=[mode])

    def add_document(self, tensor: Any, lengths: Sequence[int], modes: Sequence[int] | None = None) -> None:
        """Appends one document with several sequences. tensor: [sum(lengths)], the concatenated elements."""
        self._append(np.asarray(tensor), lengths, modes=modes if modes is not None else [0] * len(lengths))
        self.end_document()

    def add_documents(
        self,
        documents: Iterable[Any],
        modes: Sequence[int] | None = None,
        eod_token: int | None = None,
        chunk_size: int = 1_000_000,
    ) -> None:
        """Appends documents with one sequence each. documents: [L] each, integers or floats in the dtype's range.

        modes: mode of each document; None means 0. eod_token: appended to each document. chunk_size: approximate number
        of elements per write.
        """
        waiting: list[np.ndarray] = []
        num_waiting = 0
        numbers = itertools.repeat(0) if modes is None else iter(modes)
        waiting_modes: list[int] = []
        end = self._elements([] if eod_token is None else [eod_token])
        for document in documents:
            # Converted one by one, because the array of an empty list has a different dtype.
            waiting.append(np.concatenate([self._elements(document), end]))
            waiting_modes.append(next(numbers))
            num_waiting += len(waiting[-1])
            if num_waiting >= chunk_size:
                self._add_waiting(waiting, waiting_modes)
                waiting, waiting_modes, num_waiting = [], [], 0
        self._add_waiting(waiting, waiting_modes)

    def _add_waiting(self, documents: Sequence[np.ndarray], modes: Sequence[int]) -> None:
        if documents:
            self.add_concatenated(np.concatenate(documents), [len(one) for one in documents], modes=modes)

    def add_concatenated(self, tensor: Any, lengths: Sequence[int], *, modes: Sequence[int] | None = None) -> None:
        """Appends documents with one sequence each. tensor: [sum(lengths)], the concatenated elements."""
        first = len(self.sequence_lengths) + 1
        self._append(np.asarray(tensor), lengths, modes=[0] * len(lengths) if modes is None else modes)
        self.document_indices.extend(range(first, first + len(lengths)))

    def end_document(self) -> None:
        """Ends the current document, which consists of all sequences since the previous document border."""
        self.document_indices.append(len(self.sequence_lengths))

    def add_index(self, path_prefix: str) -> None:
        """Appends all documents of a .bin/.idx pair. Raises ValueError if its dtype differs."""
        other = IndexedDataset(path_prefix, multimodal=self.multimodal)
        if np.dtype(other.index.dtype) != np.dtype(self.dtype):
            raise ValueError(
                f"{path_prefix} contains {np.dtype(other.index.dtype).name}: must be {np.dtype(self.dtype).name}"
            )
        first = len(self.sequence_lengths)
        if np.array_equal(other.index.pointers, contiguous_pointers(other.index.lengths, self.dtype)):
            total = int(other.index.lengths.sum(dtype=np.int64)) * DType.size(self.dtype)
            for start in range(0, total, _COPY_BYTES):
                self._file.write(other._bytes.read(start, min(_COPY_BYTES, total - start)))
        else:
            # A .bin file may store its sequences in any order.
            for idx in range(len(other)):
                start = int(other.index.pointers[idx])
                self._file.write(memoryview(other._bytes.read(start, self._num_bytes(other, idx))))
        self.sequence_lengths.extend(other.index.lengths.tolist())
        self.document_indices.extend((first + other.index.documents[1:]).tolist())
        if other.index.modes is not None:
            self.sequence_modes.extend(other.index.modes.tolist())

    def finalize(self, idx_path: str) -> None:
        """Writes the .idx file and renames both files to their final names."""
        _flush_to_disk(self._file)
        self._file.close()
        lengths = np.asarray(self.sequence_lengths, dtype=np.int64)
        index = SequenceIndex(
            dtype=self.dtype,
            lengths=lengths,
            pointers=contiguous_pointers(lengths, self.dtype),
            documents=np.asarray(self.document_indices, dtype=np.int64),
            modes=np.asarray(self.sequence_modes, dtype=np.int8) if self.multimodal else None,
        )
        final_idx = Path(idx_path)
        partial_idx = _partial(final_idx)
        with open(partial_idx, "wb") as file:
            file.write(index_bytes(index))
            _flush_to_disk(file)
        # Removes the old .idx first, which must not be used with the new .bin.
        final_idx.unlink(missing_ok=True)
        os.replace(self._partial_bin, self._bin_path)
        os.replace(partial_idx, final_idx)

    def discard(self) -> None:
        """Removes the unfinished .bin file. Does nothing after `finalize`."""
        self._file.close()
        self._partial_bin.unlink(missing_ok=True)

    def _append(self, array: np.ndarray, lengths: Sequence[int], *, modes: Sequence[int]) -> None:
        if len(array) != sum(lengths):
            raise ValueError(
                f"got {len(array)} elements for sequences of lengths {list(lengths)}: must be {sum(lengths)} elements"
            )
        self._file.write(self._elements(array).tobytes())
        self.sequence_lengths.extend(int(length) for length in lengths)
        if self.multimodal:
            self.sequence_modes.extend(modes)

    def _elements(self, values: Any) -> np.ndarray:
        return _exactly(np.asarray(values), self.dtype, path=self._bin_path)

    @staticmethod
    def _num_bytes(dataset: IndexedDataset, idx: int) -> int:
        return int(dataset.index.lengths[idx]) * DType.size(dataset.index.dtype)


def _exactly(array: np.ndarray, dtype: type[np.number], *, path: Path) -> np.ndarray:
    # A plain cast wraps silently, so that an id of 70,000 in uint16 would become a wrong token.
    if np.can_cast(array.dtype, dtype) or not array.size or not np.issubdtype(dtype, np.integer):
        return array.astype(dtype)
    limits = np.iinfo(dtype)  # type: ignore[type-var]
    if not np.issubdtype(array.dtype, np.integer) or array.min() < limits.min or array.max() > limits.max:
        raise ValueError(
            f"{path}: values {array.min()} to {array.max()} do not fit {limits.dtype} ({limits.min} to {limits.max})"
        )
    return array.astype(dtype)


def _what_to_give(path_prefix: str) -> str:
    prefix = path_prefix.removesuffix(".bin").removesuffix(".idx")
    if prefix != path_prefix and IndexedDataset.exists(prefix):
        return f"use {prefix}, without the file extension"
    if os.path.isdir(path_prefix):
        return f"{path_prefix} is a folder; use the path of a .bin and .idx file, without the file extension"
    return f"{path_prefix} must name a .bin and an .idx file"


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial-{os.getpid()}")


def _flush_to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def loss_mask_prefix(path_prefix: str) -> str:
    """Returns the prefix of the loss-mask files for the tokens at `path_prefix`."""
    return path_prefix + "_loss_mask"


def open_loss_mask(path_prefix: str | None, lengths: np.ndarray, *, mmap: bool) -> IndexedDataset | None:
    """Opens the loss masks of the tokens at `path_prefix`, or returns None if there are none.

    Masks are a pair PREFIX_loss_mask.bin/.idx with one uint8 per token, in documents of the same lengths: 1 if the
    token contributes to the loss as a target, otherwise 0. lengths: [N], int32, lengths of the token documents. Raises
    DataError if the masks do not match the tokens, and FileNotFoundError if one file of the pair is missing.
    """
    if path_prefix is None:
        return None
    return open_token_mask(loss_mask_prefix(path_prefix), path_prefix, lengths, mmap=mmap, kind="loss masks")


def open_token_mask(
    prefix: str, path_prefix: str, lengths: np.ndarray, *, mmap: bool, kind: str
) -> IndexedDataset | None:
    """Opens the pair at `prefix` with one uint8 for each token of `path_prefix`, or returns None if there is none.

    kind: name of the masks in errors. lengths and errors: as for open_loss_mask.
    """
    if not (os.path.exists(get_bin_path(prefix)) or os.path.exists(get_idx_path(prefix))):
        return None
    masks = IndexedDataset(prefix, mmap=mmap)
    if masks.index.dtype is not np.uint8:
        raise DataError(f"{prefix}.idx contains {np.dtype(masks.index.dtype).name}: {kind} must be uint8, 0 or 1")
    if len(masks) != len(lengths):
        raise DataError(f"{prefix}.idx has {len(masks)} documents: must have {len(lengths)}, like {path_prefix}.idx")
    different = np.flatnonzero(masks.sequence_lengths != lengths)
    if len(different):
        document = int(different[0])
        raise DataError(
            f"{prefix}.idx: document {document} has {masks.sequence_lengths[document]} values for "
            f"{lengths[document]} tokens of {path_prefix}.idx; the masks belong to other data and must be recreated"
        )
    return masks


def check_loss_mask(mask: np.ndarray, where: str) -> None:
    """Raises DataError if a loss mask contains values other than 0 and 1. mask: [S], float32, read as uint8."""
    if mask.max(initial=0) > 1:
        raise DataError(f"the loss mask of {where} contains {int(mask.max())}: must be 0 or 1")
