"""Collective functions that save, load and verify checkpoints in any layout, with equal results on all ranks.

A `process_group` of None means all ranks, or this process alone if torch.distributed is not initialized. Background
saves are in saving.py, plans in planner.py, data files in storage.py, folders in folder.py and manifests in
manifest.py. save and load accept Megatron-Core's arguments and are thin wrappers of save_items and load_items.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron.core.config_field import require_defaults
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
from megatron.core.dist_checkpointing.planner import MAX_NAMED_KEYS, Read, check_wanted, plan_reads
from megatron.core.dist_checkpointing.saving import PendingSave, StagingMemory, begin_save
from megatron.core.dist_checkpointing.state_dicts import (
    joined_state,
    read_boxes,
    split_items,
    split_state,
    written_items,
)
from megatron.core.dist_checkpointing.storage import (
    METADATA_FILE,
    PieceReader,
    ReadsPieces,
    StoredPieces,
    read_metadata,
    read_object,
    stored_pieces,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.group_collectives import all_ranks_agree, gather_objects
from megatron.core.logical_tensors import Box
from megatron.core.process_groups_config import group_rank, group_size

_FEW_ELEMENTS = 1 << 16
# Key in the plain values under which save stores its content_metadata.
_CONTENT_METADATA = "content_metadata"
# Key, box and dtype, which must be equal on two ranks for one to send its elements to the other.
_Request = tuple[str, Box, str]


def save_items(
    state: ShardedState,
    checkpoint_dir: str | Path,
    *,
    common: dict[str, Any],
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Saves the boxes and objects of all ranks in the group, and rank 0's `common` (JSON), as a checkpoint.

    Collective. `checkpoint_dir` appears, or is replaced, atomically once everything is on disk (see [Note: Atomic
    folders]). After a failure, which all ranks report, it is unchanged. Boxes that several ranks store are written
    once. process_group: None means all ranks.
    """
    begin_save(state, checkpoint_dir, common=common, process_group=process_group).finish()


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """Files, metadata and stored pieces of a checkpoint that has passed `verify`."""

    folder: Path
    files: Manifest
    metadata: Metadata
    pieces: StoredPieces

    @classmethod
    def read(cls, folder: Path, files: Manifest) -> "VerifiedCheckpoint":
        """Reads the metadata in `folder`, whose files have passed their checksums.

        Raises ValueError, naming folder and tensor, if manifest and metadata contradict each other.
        """
        _require(METADATA_FILE, files, folder=folder)
        metadata = read_metadata(folder)
        try:
            return cls(folder, files, metadata, stored_pieces(files, metadata))
        except ValueError as error:
            raise ValueError(f"{folder} is corrupt: {error}") from error

    @property
    def common(self) -> dict[str, Any]:
        """JSON values that were saved with the tensors."""
        return _read_common(self.folder)

    # Cached, because a comparison of checkpoints performs thousands of small loads.
    @cached_property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Global shape and dtype of every stored tensor, by key."""
        return _tensors_of(self.metadata)

    def open_file(self, name: str) -> AbstractContextManager[ReadsPieces]:
        """Opens a data file for reading its pieces. Raises OSError."""
        return PieceReader(self.folder / name)


def verify(checkpoint_dir: str | Path, *, process_group: dist.ProcessGroup | None = None) -> VerifiedCheckpoint:
    """Verifies the checksums of all files of a checkpoint. The ranks share the work, so each byte is read once.

    Collective. Raises ValueError on every rank, naming file and tensor, if anything is damaged or missing.
    process_group: None means all ranks.
    """
    group = every_rank(process_group)
    with all_ranks_agree(group):
        folder = folders.find_checkpoint(Path(checkpoint_dir))
        files = read_manifest(folder)
        verify_share(folder, files, rank=group_rank(group), num_ranks=group_size(group))
    # After the checksums, because every rank unpickles a file that one of the ranks has verified.
    with all_ranks_agree(group):
        return VerifiedCheckpoint.read(folder, files)


def load_items(
    state: ShardedState,
    checkpoint: str | Path | VerifiedCheckpoint,
    *,
    process_group: dist.ProcessGroup | None = None,
    replicas: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fills the tensors of `state` in place, replaces the data of its objects, and returns the saved `common`.

    Collective. Ranks may request different boxes than were saved, and any subset of the keys. The ranks first verify
    all files together, unless `checkpoint` is already verified. Raises ValueError on every rank, with nothing changed,
    if a file is damaged, or if a key is missing or has a different shape or dtype (naming key, stored and requested
    value). Each rank reads only the elements that it requests, a few MiB at a time. process_group: None means all
    ranks. replicas: group in which boxes that all ranks request are read by one rank and broadcast to the others; None
    means that each rank reads its boxes.
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


# State dicts in Megatron-Core's format.


def save(
    sharded_state_dict: Mapping[str, Any],
    checkpoint_dir: str | Path,
    sharded_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[dict[str, Any]], Any] | None = None,
    content_metadata: dict[str, Any] | None = None,
    async_strategy: str = "nvrx",
    verify_integrity: bool = False,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> PendingSave | None:
    """Writes a nested state dict: its ShardedTensors and ShardedObjects, and its other values, which must be JSON.

    Collective and atomic, like save_items. Among equal items, the one with replica_id 0 is written. The other values
    are taken from rank 0; a warning names ranks where they differ, after preprocess_common_before_consistancy_check.
    content_metadata: JSON, see load_content_metadata. async_sharded_save: returns a PendingSave, which all ranks must
    `finish`; the state may change immediately. async_strategy: no effect, because one strategy exists.
    verify_integrity: no effect, because checksums are always written.
    """
    require_defaults(
        "dist_checkpointing.save",
        "there is only one format, and the parts of a tensor must cover it",
        sharded_strategy=(sharded_strategy, None),
        validate_access_integrity=(validate_access_integrity, True),
    )
    group = every_rank(process_group)
    with all_ranks_agree(group):
        split = split_state(sharded_state_dict)
        items = written_items(split.items)
    _warn_of_differences(split.plain, preprocess_common_before_consistancy_check, group)
    common = split.plain if content_metadata is None else {**split.plain, _CONTENT_METADATA: content_metadata}
    if not async_sharded_save:
        save_items(items, checkpoint_dir, common=common, process_group=process_group)
        return None
    return begin_save(items, checkpoint_dir, common=common, process_group=process_group, staging=StagingMemory())


def _warn_of_differences(
    plain: dict[str, Any], preprocess: Callable[[dict[str, Any]], Any] | None, group: dist.ProcessGroup | None
) -> None:
    compared = plain if preprocess is None else preprocess(plain)
    texts = gather_objects(hashlib.sha256(repr(compared).encode()).hexdigest(), group)
    others = [rank for rank, text in enumerate(texts) if text != texts[0]]
    if others and group_rank(group) == 0:
        shown = ", ".join(map(str, others[:8]))
        print(
            f"WARNING: plain values of the state dict differ on ranks {shown}: the values of rank 0 are saved",
            flush=True,
        )


def load(
    sharded_state_dict: Mapping[str, Any],
    checkpoint_dir: str | Path,
    sharded_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: StrictHandling | str = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify_integrity: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Any:
    """Loads a nested state dict: the saved plain values, and loaded data in place of the sharded items.

    Collective. Tensors with data are filled in place. Other tensors are allocated on the CPU. Plain values of the given
    state dict are not used. strict: see StrictHandling; RETURN_UNEXPECTED and RETURN_ALL return (state dict, missing
    keys, unexpected keys). verify_integrity: no effect, because checksums are always verified. Raises ValueError on
    every rank, with nothing changed, like load_items.
    """
    require_defaults(
        "dist_checkpointing.load",
        "there is only one format, and every element must be stored",
        sharded_strategy=(sharded_strategy, None),
        validate_access_integrity=(validate_access_integrity, True),
    )
    strict, group = StrictHandling(strict), every_rank(process_group)
    checkpoint = verify(checkpoint_dir, process_group=group)
    items = split_items(sharded_state_dict)
    asked = set().union(*gather_objects({item.stored_key for item in items}, group))
    stored = checkpoint.metadata.state_dict_metadata.keys()
    unexpected, missing = asked - stored, (stored - asked if strict.minds_missing else set())
    _report_keys(checkpoint.folder, strict, unexpected=unexpected, missing=missing)
    with all_ranks_agree(group):
        wanted = [item for item in items if item.stored_key in stored]
        tensors = [
            box
            for item in wanted
            if isinstance(item, ShardedTensor)
            for box in read_boxes(item, checkpoint.tensors.get(item.key, ((), item.dtype))[0])
        ]
        objects = [(item, ShardedObject(item.stored_key, None)) for item in wanted if isinstance(item, ShardedObject)]
    common = load_items([*tensors, *(read for _, read in objects)], checkpoint, process_group=process_group)
    for item, read in objects:
        item.data = read.data
    common.pop(_CONTENT_METADATA, None)
    loaded = joined_state(sharded_state_dict, common, absent=unexpected)
    return (loaded, missing, unexpected) if strict.returns else loaded


def _report_keys(folder: Path, strict: StrictHandling, *, unexpected: set[str], missing: set[str]) -> None:
    problems = []
    if unexpected:
        problems.append(f"the checkpoint lacks {_some(unexpected)}")
    if missing:
        problems.append(f"no item requests {_some(missing)}")
    text = f"the keys of checkpoint {folder} and of the state dict differ: {'; '.join(problems)}"
    if (unexpected and strict.raises) or (missing and strict is StrictHandling.RAISE_ALL):
        raise ValueError(text)
    if problems and strict.logs and (not dist.is_initialized() or dist.get_rank() == 0):
        print(f"WARNING: {text}", flush=True)


def _some(keys: set[str]) -> str:
    more = f" and {len(keys) - MAX_NAMED_KEYS} more" if len(keys) > MAX_NAMED_KEYS else ""
    return ", ".join(sorted(keys)[:MAX_NAMED_KEYS]) + more


def load_content_metadata(checkpoint_dir: str | Path) -> dict[str, Any] | None:
    """Returns the content_metadata that was saved with a checkpoint, or None. Not collective."""
    metadata: dict[str, Any] | None = load_common(checkpoint_dir).get(_CONTENT_METADATA)
    return metadata


def load_common_state_dict(checkpoint_dir: str | Path) -> dict[str, Any]:
    """Returns the plain values of a saved state dict. Not collective."""
    return {key: value for key, value in load_common(checkpoint_dir).items() if key != _CONTENT_METADATA}


# Reading without other ranks.


def load_common(checkpoint_dir: str | Path) -> dict[str, Any]:
    """Returns the `common` values of a checkpoint after verifying their file. Not collective."""
    folder = folders.find_checkpoint(Path(checkpoint_dir))
    _verify_one(folder, folders.COMMON_FILE)
    return _read_common(folder)


def list_tensors(checkpoint_dir: str | Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns global shape and dtype of every stored tensor, by key. Not collective."""
    folder = folders.find_checkpoint(Path(checkpoint_dir))
    _verify_one(folder, METADATA_FILE)
    return _tensors_of(read_metadata(folder))


class StreamReader:
    """Reads boxes of a checkpoint in one process, in any number of calls."""

    def __init__(self, checkpoint: VerifiedCheckpoint) -> None:
        self._checkpoint = checkpoint

    def fill(self, tensors: list[ShardedTensor]) -> None:
        """Fills `tensors`: any shape, dtype and strides. Raises ValueError if a key, shape or dtype does not match."""
        check_wanted(tensors, self._checkpoint.metadata)
        with torch.no_grad():
            read_tensors(self._checkpoint, plan_reads(tensors, self._checkpoint.pieces))


def read_tensors(checkpoint: VerifiedCheckpoint, reads: list[Read]) -> None:
    """Executes `reads`, which must be sorted by file. Fills their tensors in place."""
    for name, in_file in groupby(reads, key=lambda read: read.name):
        in_one = list(in_file)
        with checkpoint.open_file(name) as reader:
            read_one = partial(_read_one, checkpoint, reader=reader)
            # Starting threads takes as long as reading this many elements.
            if sum(read.window.volume for read in in_one) < _FEW_ELEMENTS:
                deque(map(read_one, in_one), maxlen=0)
                continue
            with ThreadPoolExecutor(NUM_READERS) as pool:
                deque(pool.map(read_one, in_one), maxlen=0)


def _read_one(checkpoint: VerifiedCheckpoint, read: Read, *, reader: ReadsPieces) -> None:
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
        raise ValueError(f"{folder / folders.COMMON_FILE} is corrupt: must contain a dict, got {type(values).__name__}")
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

    own: tensors that this rank reads, for itself or for other ranks. sent: (rank that reads, target) for each box that
    is broadcast, in the same order on all ranks.
    """

    own: list[ShardedTensor]
    sent: list[tuple[int, ShardedTensor]]


def share_reads(tensors: Sequence[ShardedTensor], group: dist.ProcessGroup | None) -> SharedReads:
    """Assigns each box that all ranks of `group` request to one reading rank, and balances the bytes. Collective.

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
    """Broadcasts the shared boxes from the ranks that read them. Collective over `group`, after all ranks have read."""
    for reader, tensor in reads.sent:
        target = tensor.data.detach()
        message = target.contiguous()
        dist.broadcast(message, group=group, group_src=reader)
        if message is not target and reader != group_rank(group):
            target.copy_(message)


def _can_be_sent(tensor: ShardedTensor, group: dist.ProcessGroup | None) -> bool:
    # NCCL without a CPU backend cannot send host tensors.
    return tensor.data.device.type != "cpu" or "cpu:" in dist.get_backend_config(group)
