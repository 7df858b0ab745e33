"""save, load and verify: collective operations on checkpoints of any layout, with identical results on every rank.

A `process_group` of None is all ranks of torch.distributed, or this process alone if that is not initialized.
Background saves are in saving.py, plans in planner.py, data files in storage.py, folders in folder.py and their
manifest in manifest.py.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron.core.dist_checkpointing import folder as folders
from megatron.core.dist_checkpointing.errors import every_rank, one_error_everywhere
from megatron.core.dist_checkpointing.manifest import (
    MANIFEST_FILE,
    NUM_READERS,
    Manifest,
    json_value,
    read_json,
    read_manifest,
    verify_file,
    verify_share,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedState, ShardedTensor, flatten
from megatron.core.dist_checkpointing.planner import Read, check_wanted, plan_reads
from megatron.core.dist_checkpointing.saving import begin_save
from megatron.core.dist_checkpointing.storage import (
    METADATA_FILE,
    PieceReader,
    StoredPieces,
    read_metadata,
    read_object,
    stored_pieces,
)
from megatron.core.group_collectives import all_ranks_agree, gather_objects
from megatron.core.logical_tensors import Box
from megatron.core.process_groups_config import group_rank, group_size

_FEW_ELEMENTS = 1 << 16
# Key, box and dtype: must be equal on two ranks for one to send its elements to the other.
_Request = tuple[str, Box, str]


def save(
    state: ShardedState,
    checkpoint_dir: str | Path,
    *,
    common: dict[str, Any],
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Writes the boxes and objects that all ranks of the group hold, and `common` (JSON, rank 0's), as a checkpoint.

    Collective. `checkpoint_dir` appears, or is replaced, atomically once everything is on disk (see [Note: Atomic
    folders]). After a failure, which all ranks report, it is unchanged. Boxes held by several ranks are written once.
    process_group: None is all ranks.
    """
    begin_save(state, checkpoint_dir, common=common, process_group=process_group).finish()


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint that has passed `verify`: its files, metadata and stored pieces."""

    folder: Path
    files: Manifest
    metadata: Metadata
    pieces: StoredPieces

    @classmethod
    def read(cls, folder: Path, files: Manifest) -> "VerifiedCheckpoint":
        """Reads the contents of `folder`, whose files have passed their checksums.

        Raises ValueError naming folder and tensor if manifest and metadata contradict each other.
        """
        _require(METADATA_FILE, files, folder=folder)
        metadata = read_metadata(folder)
        try:
            return cls(folder, files, metadata, stored_pieces(files, metadata))
        except ValueError as error:
            raise ValueError(f"{folder} is corrupt: {error}") from error

    @property
    def common(self) -> dict[str, Any]:
        """The JSON values saved with the tensors."""
        return _read_common(self.folder)

    # Cached, because a comparison of checkpoints makes thousands of small loads.
    @cached_property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Global shape and dtype of every stored tensor, by key."""
        return _tensors_of(self.metadata)


def verify(checkpoint_dir: str | Path, *, process_group: dist.ProcessGroup | None = None) -> VerifiedCheckpoint:
    """Reads every file of a checkpoint once, shared among the ranks, and compares it with the manifest's checksums.

    Collective. Raises ValueError on every rank, naming file and tensor, if anything is damaged or missing.
    process_group: None is all ranks.
    """
    group = every_rank(process_group)
    with all_ranks_agree(group):
        folder = folders.find_checkpoint(Path(checkpoint_dir))
        files = read_manifest(folder)
        verify_share(folder, files, rank=group_rank(group), num_ranks=group_size(group))
    # After the checksums: every rank unpickles a file that one of them has verified.
    with all_ranks_agree(group):
        return VerifiedCheckpoint.read(folder, files)


def load(
    state: ShardedState,
    checkpoint: str | Path | VerifiedCheckpoint,
    *,
    process_group: dist.ProcessGroup | None = None,
    replicas: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fills the tensors of `state` in place, replaces the data of its objects, and returns the saved `common`.

    Collective. Ranks may hold other boxes than those saved, and any subset of the keys. All files are verified first,
    by the ranks together, unless `checkpoint` already is verified. Raises ValueError on every rank, with nothing
    changed, if a file is damaged, or if a key is missing or has another shape or dtype (naming key, stored and
    requested). Each rank reads only the elements it needs, a few MiB at a time. process_group: None is all ranks.
    replicas: boxes that all ranks of this group need are read by one of them and broadcast to the others; None is this
    rank alone.
    """
    items, group = list(flatten(state)), every_rank(process_group)
    # All checks precede the first write to a tensor.
    if not isinstance(checkpoint, VerifiedCheckpoint):
        checkpoint = verify(checkpoint, process_group=group)
    with all_ranks_agree(group):
        check_wanted(items, checkpoint.metadata)
    shared = share_reads([item for item in items if isinstance(item, ShardedTensor)], replicas)
    with torch.no_grad(), one_error_everywhere(f"cannot load checkpoint {checkpoint.folder}", group):
        read_tensors(checkpoint, plan_reads(shared.own, checkpoint.pieces))
        _read_objects(checkpoint, [item for item in items if isinstance(item, ShardedObject)])
    with torch.no_grad():
        send_shared(shared, replicas)
    return checkpoint.common


def load_common(checkpoint_dir: str | Path) -> dict[str, Any]:
    """Returns the `common` of a checkpoint after verifying that file; not collective."""
    folder = folders.find_checkpoint(Path(checkpoint_dir))
    _verify_one(folder, folders.COMMON_FILE)
    return _read_common(folder)


def list_tensors(checkpoint_dir: str | Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns global shape and dtype of every stored tensor by key; not collective."""
    folder = folders.find_checkpoint(Path(checkpoint_dir))
    _verify_one(folder, METADATA_FILE)
    return _tensors_of(read_metadata(folder))


class StreamReader:
    """Reads boxes of a checkpoint in one process, in any number of calls."""

    def __init__(self, checkpoint: VerifiedCheckpoint) -> None:
        self._checkpoint = checkpoint

    def fill(self, tensors: list[ShardedTensor]) -> None:
        """Fills `tensors`: any shape, dtype and strides; raises ValueError if a key, shape or dtype does not match."""
        check_wanted(tensors, self._checkpoint.metadata)
        with torch.no_grad():
            read_tensors(self._checkpoint, plan_reads(tensors, self._checkpoint.pieces))


def read_tensors(checkpoint: VerifiedCheckpoint, reads: list[Read]) -> None:
    """Executes `reads`, which are sorted by file."""
    for name, in_file in groupby(reads, key=lambda read: read.name):
        in_one = list(in_file)
        with PieceReader(checkpoint.folder / name) as reader:
            read_one = partial(_read_one, checkpoint, reader=reader)
            # Starting threads takes as long as reading this much.
            if sum(read.window.volume for read in in_one) < _FEW_ELEMENTS:
                deque(map(read_one, in_one), maxlen=0)
                continue
            with ThreadPoolExecutor(NUM_READERS) as pool:
                deque(pool.map(read_one, in_one), maxlen=0)


def _read_one(checkpoint: VerifiedCheckpoint, read: Read, *, reader: PieceReader) -> None:
    entry = checkpoint.metadata.state_dict_metadata[read.piece.key]
    assert isinstance(entry, TensorStorageMetadata), "check_wanted has passed"
    # New threads start with gradients enabled, regardless of the caller.
    with torch.no_grad():
        target = read.tensor.data[read.window.relative_to(read.tensor.box)]
        reader.read(read.piece, read.window, dtype=entry.properties.dtype, target=target)


def _read_objects(checkpoint: VerifiedCheckpoint, objects: list[ShardedObject]) -> None:
    for item in objects:
        name, piece = checkpoint.pieces[item.key][0]
        item.data = json_value(read_object(checkpoint.folder / name, piece), f"{item.key} of {checkpoint.folder}")


def _read_common(folder: Path) -> dict[str, Any]:
    values = read_json(folder / folders.COMMON_FILE)
    if not isinstance(values, dict):
        raise ValueError(f"{folder / folders.COMMON_FILE} is corrupt: holds a {type(values).__name__}, must be a dict")
    return values


def _tensors_of(metadata: Metadata) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {
        key: (tuple(entry.size), entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _verify_one(folder: Path, name: str) -> None:
    files = read_manifest(folder)
    _require(name, files, folder=folder)
    verify_file(folder, name, expected=files[name])


def _require(name: str, files: Manifest, *, folder: Path) -> None:
    if name not in files:
        raise ValueError(f"{folder / MANIFEST_FILE} does not list {name}")


# Shared reads.


@dataclass(frozen=True)
class SharedReads:
    """Assignment of reads to the ranks of a group.

    own: tensors that this rank reads, for itself or for others. sent: (reader, target), in the same order on all ranks.
    """

    own: list[ShardedTensor]
    sent: list[tuple[int, ShardedTensor]]


def share_reads(tensors: Sequence[ShardedTensor], group: dist.ProcessGroup | None) -> SharedReads:
    """Distributes the reads of boxes that all ranks of `group` need evenly over them. Collective over `group`.

    tensors: any shape and dtype.
    """
    if group_size(group) == 1:
        return SharedReads(list(tensors), [])
    by_request: dict[_Request, ShardedTensor] = {}
    for tensor in tensors:
        if tensor.box.volume and _can_be_sent(tensor, group):
            by_request.setdefault((tensor.key, tensor.box, str(tensor.data.dtype)), tensor)
    everywhere = set.intersection(*map(set, gather_objects(list(by_request), group)))
    # Large boxes first, so that small ones even out the load.
    order = sorted(everywhere, key=lambda request: (-by_request[request].data.nbytes, request))
    sent, num_bytes = [], [0] * group_size(group)
    for request in order:
        reader = num_bytes.index(min(num_bytes))
        num_bytes[reader] += by_request[request].data.nbytes
        sent.append((reader, by_request[request]))
    elsewhere = {id(tensor) for reader, tensor in sent if reader != group_rank(group)}
    return SharedReads([tensor for tensor in tensors if id(tensor) not in elsewhere], sent)


def send_shared(reads: SharedReads, group: dist.ProcessGroup | None) -> None:
    """Broadcasts the shared boxes from their readers. Collective over `group`, after all ranks have read their own."""
    for reader, tensor in reads.sent:
        target = tensor.data.detach()
        message = target.contiguous()
        dist.broadcast(message, group=group, group_src=reader)
        if message is not target and reader != group_rank(group):
            target.copy_(message)


def _can_be_sent(tensor: ShardedTensor, group: dist.ProcessGroup | None) -> bool:
    # NCCL without a CPU backend cannot send host tensors.
    return tensor.data.device.type != "cpu" or "cpu:" in dist.get_backend_config(group)
