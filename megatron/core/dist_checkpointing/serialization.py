"""save and load of canonical checkpoints: collective, atomic, verified, the same on every rank.

A `process_group` of None is every rank of torch.distributed, or this process alone where that is not initialised.
Saves beside training are in saving.py, which boxes go where is in planner.py, the data files in storage.py, the folder
in folder.py and its manifest in manifest.py.
"""

from collections import deque
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
from megatron.core.dist_checkpointing.group_errors import every_rank, one_error_everywhere
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
from megatron.core.dist_checkpointing.shared_reads import send_shared, share_reads
from megatron.core.dist_checkpointing.storage import (
    METADATA_FILE,
    PieceReader,
    read_metadata,
    read_object,
)
from megatron.core.dist_checkpointing.stored_contents import StoredPieces, stored_pieces
from megatron.core.group_collectives import all_ranks_agree
from megatron.core.process_groups_config import group_rank, group_size

_FEW_ELEMENTS = 1 << 16


def save(
    state: ShardedState,
    checkpoint_dir: str | Path,
    *,
    common: dict[str, Any],
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Writes the boxes and objects that all ranks of the group hold, and `common` (JSON, rank 0's), as a checkpoint.

    Collective. `checkpoint_dir` appears, or is replaced, at once when everything is on disk (see [Note: Atomic
    folders]); after a failure, which all ranks report, it is as before. Boxes that several ranks hold are written once.
    process_group: None is every rank.
    """
    begin_save(state, checkpoint_dir, common=common, process_group=process_group).finish()


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint whose files are what was saved, as `verify` found it."""

    folder: Path
    files: Manifest
    metadata: Metadata
    pieces: StoredPieces

    @classmethod
    def read(cls, folder: Path, files: Manifest) -> "VerifiedCheckpoint":
        """Returns the contents of `folder`, whose files have passed their checksums.

        Raises ValueError naming folder and tensor where they contradict each other.
        """
        _require(METADATA_FILE, files, folder=folder)
        metadata = read_metadata(folder)
        try:
            return cls(folder, files, metadata, stored_pieces(files, metadata))
        except ValueError as error:
            raise ValueError(f"{folder} is corrupt: {error}") from error

    @property
    def common(self) -> dict[str, Any]:
        """The JSON values that were saved beside the tensors."""
        return _read_common(self.folder)

    # Kept: who compares checkpoints loads a thousand times a little from one that has a thousand pieces.
    @cached_property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Global shape and dtype of every stored tensor by key."""
        return _tensors_of(self.metadata)


def verify(checkpoint_dir: str | Path, *, process_group: dist.ProcessGroup | None = None) -> VerifiedCheckpoint:
    """Reads every file of a checkpoint's manifest once, the ranks together, and compares it with its checksums.

    Collective. Raises on every rank if anything is damaged or missing: ValueError, which names file and tensor.
    process_group: None is every rank.
    """
    group = every_rank(process_group)
    with all_ranks_agree(group):
        folder = folders.find_checkpoint(Path(checkpoint_dir))
        files = read_manifest(folder)
        verify_share(folder, files, rank=group_rank(group), num_ranks=group_size(group))
    # Only now: what every rank unpickles has been compared by one of them.
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

    Collective. Ranks may hold other boxes than those saved, and any subset of the keys. Unless `checkpoint` has been,
    all files are verified first, by the ranks together. Raises on every rank, with nothing changed, if a file is
    damaged (ValueError) or a key is missing or has another shape or dtype (ValueError naming key, stored and wanted).
    Each rank reads the elements that it wants, a few MiB at a time. process_group: None is every rank. replicas: what
    all ranks of this group want is read by one of them and sent to the others; None is this rank alone.
    """
    items, group = list(flatten(state)), every_rank(process_group)
    # Everything that can be wrong is looked for before the first tensor is touched.
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
    """The `common` of a checkpoint, after verifying that one file; any rank alone may ask."""
    folder = folders.find_checkpoint(Path(checkpoint_dir))
    _verify_one(folder, folders.COMMON_FILE)
    return _read_common(folder)


def list_tensors(checkpoint_dir: str | Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Global shape and dtype of every stored tensor by key; any rank alone may ask."""
    folder = folders.find_checkpoint(Path(checkpoint_dir))
    _verify_one(folder, METADATA_FILE)
    return _tensors_of(read_metadata(folder))


def read_tensors(checkpoint: VerifiedCheckpoint, reads: list[Read]) -> None:
    """Carries out `reads`, which are ordered by file."""
    for name, in_file in groupby(reads, key=lambda read: read.name):
        in_one = list(in_file)
        with PieceReader(checkpoint.folder / name) as reader:
            read_one = partial(_read_one, checkpoint, reader=reader)
            # To start threads takes as long as to read this much.
            if sum(read.window.volume for read in in_one) < _FEW_ELEMENTS:
                deque(map(read_one, in_one), maxlen=0)
                continue
            with ThreadPoolExecutor(NUM_READERS) as pool:
                deque(pool.map(read_one, in_one), maxlen=0)


def _read_one(checkpoint: VerifiedCheckpoint, read: Read, *, reader: PieceReader) -> None:
    entry = checkpoint.metadata.state_dict_metadata[read.piece.key]
    assert isinstance(entry, TensorStorageMetadata), "check_wanted has passed"
    # Threads begin with gradients on, whatever the caller has.
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
