"""Checkpoints that one process writes or reads a tensor at a time: conversions need memory for no more than that.

The format is that of saving.py and serialization.py; what conversions make of tensors is theirs.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing import disk
from megatron.core.dist_checkpointing import folder as folders
from megatron.core.dist_checkpointing.boxes import Box
from megatron.core.dist_checkpointing.manifest import FileEntry, Manifest, write_manifest
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.planner import check_wanted, plan_reads
from megatron.core.dist_checkpointing.serialization import VerifiedCheckpoint, read_tensors
from megatron.core.dist_checkpointing.storage import (
    METADATA_FILE,
    data_file,
    write_metadata,
    write_pieces,
)

# A new data file begins beyond so many bytes, so that many can read at once.
_FILE_BYTES = 16 << 30


def save_stream(
    tensors: Iterable[ShardedTensor],
    checkpoint_dir: Path,
    *,
    common: dict[str, Any],
    file_bytes: int = _FILE_BYTES,
) -> None:
    """Writes boxes: [*box shape], any dtype and strides, as they come, and `common` (JSON), as a checkpoint.

    Of this process alone. Each box is let go of before the next one is asked for. `checkpoint_dir` appears at once when
    everything is on disk; after an error it is as before. Raises ValueError where boxes do not fill their tensors.
    """
    temporary = folders.incomplete_folder(checkpoint_dir, folders.new_id())
    folders.begin(temporary, checkpoint_dir)
    done = False
    try:
        stream = _Stream(tensors)
        files: Manifest = {}
        while not stream.is_over:
            name = data_file(len(files))
            files[name] = write_pieces(temporary / name, stream.until(file_bytes))
            if not files[name].pieces:
                # The last file was full to the byte.
                disk.remove_file(temporary / name)
                del files[name]
        _complete(temporary, files, metadata=stream.metadata(), common=common)
        folders.commit(temporary, checkpoint_dir)
        done = True
    finally:
        if not done:
            folders.discard(temporary)


class StreamReader:
    """Reads boxes of a checkpoint, one call after the other, by this process alone."""

    def __init__(self, checkpoint: VerifiedCheckpoint) -> None:
        self._checkpoint = checkpoint

    def fill(self, tensors: list[ShardedTensor]) -> None:
        """Fills `tensors`: any shape, dtype and strides; raises ValueError for what is not stored so."""
        check_wanted(tensors, self._checkpoint.metadata)
        with torch.no_grad():
            read_tensors(self._checkpoint, plan_reads(tensors, self._checkpoint.pieces))


class _Stream:
    """Boxes that are still to come, and what is known of the tensors of those that have."""

    def __init__(self, tensors: Iterable[ShardedTensor]) -> None:
        self._coming = iter(tensors)
        self._stored: dict[str, TensorStorageMetadata] = {}
        self.is_over = False

    def until(self, num_bytes: int) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Key, box and content, contiguous, of the next boxes, up to the one that goes beyond num_bytes."""
        left = num_bytes
        while left > 0:
            tensor = next(self._coming, None)
            if tensor is None:
                self.is_over = True
                return
            self._note(tensor)
            left -= tensor.data.nbytes
            key, box, content = tensor.key, tensor.box, tensor.data.contiguous()
            del tensor
            yield key, box, content
            # Before the next one is made.
            del content

    def metadata(self) -> Metadata:
        """Torch's account of all tensors; ValueError where boxes leave elements out, or overlap."""
        for key, entry in self._stored.items():
            present = sum(chunk.sizes.numel() for chunk in entry.chunks)
            if present != entry.size.numel():
                raise ValueError(f"{key}: boxes have {present} elements of {list(entry.size)}")
        return Metadata(dict(self._stored))

    def _note(self, tensor: ShardedTensor) -> None:
        size, dtype = torch.Size(tensor.global_shape), tensor.data.dtype
        entry = self._stored.setdefault(tensor.key, TensorStorageMetadata(TensorProperties(dtype=dtype), size, []))
        if (entry.size, entry.properties.dtype) != (size, dtype):
            raise ValueError(
                f"{tensor.key} is {list(entry.size)} of {entry.properties.dtype}, and then {list(size)} of {dtype}"
            )
        entry.chunks.append(ChunkStorageMetadata(torch.Size(tensor.global_offset), tensor.data.shape))


def _complete(temporary: Path, data: Manifest, *, metadata: Metadata, common: dict[str, Any]) -> None:
    """Writes what makes data files a checkpoint; the manifest last."""
    files = dict(data)
    files[METADATA_FILE] = write_metadata(temporary, metadata, files=data)
    content = disk.json_bytes(folders.COMMON_FILE, common)
    files[folders.COMMON_FILE] = FileEntry(len(content), disk.write_file(temporary / folders.COMMON_FILE, content))
    write_manifest(temporary, files)
