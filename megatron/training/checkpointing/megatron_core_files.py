"""Reads and checks distributed checkpoints written by Megatron-Core itself (`torch_dist`).

    DIR/latest_checkpointed_iteration.txt
    DIR/iter_0000100/metadata.json           {"sharded_backend": "torch_dist", ...}
                     .metadata               torch.distributed.checkpoint's index of all tensors
                     __0_0.distcp, ...       tensors, and objects such as generator states
                     common.pt               before Megatron-Core 0.19: iteration, arguments and other values that are
                                             not tensors. Later versions store them as an object in a .distcp file,
                                             under the key common_state/shard_0_1.

megatron_core.py maps the tensors to native keys.
"""

import argparse
import io
import os
import re
import types
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron.core.device.torch_internals import FakeTensorMode
from megatron.core.dist_checkpointing.errors import every_rank
from megatron.core.dist_checkpointing.manifest import FileEntry, Manifest, Piece, read_json
from megatron.core.dist_checkpointing.storage import (
    METADATA_FILE,
    StoredPieces,
    check_records,
    load_allowed,
    read_metadata,
    read_object,
    stored_pieces,
)
from megatron.core.group_collectives import all_ranks_agree, gather_objects
from megatron.core.logical_tensors import canonical_name
from megatron.core.process_groups_config import group_rank, group_size
from megatron.training.checkpointing.folder import MEGATRON_CORE_FILE
from megatron.training.checkpointing.megatron_objects import ALLOWED, KNOWN_VALUES, NOT_WEIGHTS, VERSIONS, Inert
from megatron.training.checkpointing.train_state import is_count

COMMON_FILE = "common.pt"
_COMMON_STATE = "common_state"
_SHARD = re.compile(r"shard_0(?:\.0)*_1(?:\.1)*")
_COMMON_KEY = re.compile(rf"{_COMMON_STATE}(?:/{_SHARD.pattern})?")
_BACKEND = "torch_dist"
# Save plans in torch's metadata, as classes of Megatron-Core or torch. They contain nothing more about the tensors.
_PLANNER, _STRATEGY = "torch.distributed.checkpoint.planner", "megatron.core.dist_checkpointing.strategies.torch"
STAND_INS: dict[tuple[str, str], type] = {
    **{(_PLANNER, name): Inert for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")},
    # Original location of the checkpoint.
    **{(module, "PosixPath"): Inert for module in ("pathlib", "pathlib._local")},
    (_STRATEGY, "MCoreSavePlan"): Inert,
    (_STRATEGY, "MCoreMetadata"): Metadata,
}
# Entries that do not belong to a parameter and are never read.
_RUN_STATE = re.compile(r"rng_state|rerun_state_machine")
# Keys of optimizer state. The optimizers of dense and of expert parameters are numbered.
STATE_KEY = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_OPTIMIZER_KEY = re.compile(r"(?:chained_\d+\.)?optimizer\.")
# State of the distributed optimizer for its flat buffers, whose layout the files do not describe.
_BUCKET_KEY = re.compile(rf"{_OPTIMIZER_KEY.pattern}distributed\.")
# Modules of a model. An object below them that is not a known one would be a part of the model.
_MODEL_KEY = re.compile(r"(embedding|decoder|encoder|mtp|output_layer)\.")
_NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LOCAL_HEADER_BYTES = 30  # precedes the name of a record in a zip archive


@dataclass(frozen=True)
class MegatronCoreFiles:
    """A checkpoint whose index has been read.

    common: values that are not tensors. common_place: the file, and in it the key, from which they were read, for
    messages. metadata, pieces: entries of weights and optimizer state, keyed without wrappers' prefixes; checksums of
    the pieces have not been verified. num_left: number of all other entries. weights: keys of all weights. states: maps
    a kind of optimizer state, such as exp_avg, to a mapping from weight keys to state keys. bucket_states: keys of
    optimizer state that is stored by bucket of the distributed optimizer, not by parameter. unknown: names of entries
    and values that no reader here knows.
    """

    folder: Path
    common: dict[str, Any]
    common_place: str
    metadata: Metadata
    pieces: StoredPieces
    num_left: int
    weights: frozenset[str]
    states: dict[str, dict[str, str]]
    bucket_states: tuple[str, ...]
    unknown: tuple[str, ...]

    @classmethod
    def open(cls, folder: Path) -> "MegatronCoreFiles":
        """Reads the index of the checkpoint in `folder`.

        Raises ValueError naming file and tensor for a different format or an inconsistent index, and OSError for an
        unreadable file.
        """
        config = read_json(folder / MEGATRON_CORE_FILE)
        backend = config.get("sharded_backend") if isinstance(config, dict) else None
        if backend != _BACKEND:
            raise ValueError(f"{folder / MEGATRON_CORE_FILE}: sharded_backend is {backend!r:.60}: must be {_BACKEND!r}")
        if not (folder / METADATA_FILE).is_file():
            raise ValueError(f"{folder} has no {METADATA_FILE}, the index of its tensors")
        metadata = read_metadata(folder, stand_ins=STAND_INS)
        files: Manifest = {path.name: FileEntry(path.stat().st_size) for path in sorted(folder.glob("*.distcp"))}
        common, place = _common_values(folder, metadata, files=files)
        kept, others = _tensors_alone(metadata, folder=folder)
        try:
            pieces = stored_pieces(files, kept)
        except ValueError as error:
            raise ValueError(f"{folder} is corrupt: {error}") from error
        weights, states = _weights_and_states(kept)
        buckets = sorted(key for key in others if _BUCKET_KEY.match(key))
        entries = {key.split("/")[0] for key in others if not (_is_never_read(key) or _OPTIMIZER_KEY.match(key))}
        unknown = sorted(entries | {str(name) for name in common.keys() - KNOWN_VALUES})
        return cls(folder, common, place, kept, pieces, len(others), weights, states, tuple(buckets), tuple(unknown))

    @property
    def iteration(self) -> int | None:
        """Number of training steps completed before the save, or None if it was not saved."""
        found: int | None = self.common.get("iteration")
        return found

    @property
    def args(self) -> dict[str, Any] | None:
        """The arguments of the run, or None if they were not saved."""
        args = self.common.get("args")
        return None if args is None else dict(vars(args))

    @property
    def num_states(self) -> int:
        """Number of tensors of optimizer state."""
        return sum(map(len, self.states.values()))

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of a stored tensor."""
        return tuple(_tensor(self.metadata.state_dict_metadata[key]).size)

    def dtype(self, key: str) -> torch.dtype:
        """Returns the dtype of a stored tensor."""
        return _tensor(self.metadata.state_dict_metadata[key]).properties.dtype

    def checked(self, process_group: dist.ProcessGroup | None = None) -> StoredPieces:
        """Verifies all checksums, and returns the pieces with the file offsets of their elements.

        Collective over the group, whose ranks share the reading. None means all ranks, or this process alone. Raises
        ValueError on every rank, naming file and tensor, for damaged data.
        """
        group = every_rank(process_group)
        held = [(key, name, piece) for key, of_key in self.pieces.items() for name, piece in of_key]
        with all_ranks_agree(group):
            own = [
                (index, _checked_piece(self.folder / name, piece, dtype=self.dtype(key)).data_start)
                for index, (key, name, piece) in enumerate(held)
                if index % group_size(group) == group_rank(group)
            ]
        starts = dict(pair for of_rank in gather_objects(own, group) for pair in of_rank)
        found: StoredPieces = {}
        for index, (key, name, piece) in enumerate(held):
            found.setdefault(key, []).append((name, replace(piece, data_start=starts[index])))
        return found


def _tensor(entry: Any) -> TensorStorageMetadata:
    assert isinstance(entry, TensorStorageMetadata), "objects are left out"
    return entry


def _weights_and_states(metadata: Metadata) -> tuple[frozenset[str], dict[str, dict[str, str]]]:
    """Extracts the keys of weights and of optimizer states, in the form of MegatronCoreFiles.weights and .states."""
    weights: set[str] = set()
    states: dict[str, dict[str, str]] = {}
    for key in metadata.state_dict_metadata:
        if state := STATE_KEY.fullmatch(key):
            states.setdefault(state[1], {})[canonical_name(state[2])] = key
        else:
            weights.add(key)
    return frozenset(weights), states


def _common_values(folder: Path, metadata: Metadata, *, files: Manifest) -> tuple[dict[str, Any], str]:
    """Reads the values that are not tensors, from either place, and returns them and the place.

    Raises ValueError if neither or both places hold values and these differ, or for an invalid iteration, arguments or
    version.
    """
    found = {
        place: content
        for place, content in (_values_in_file(folder / COMMON_FILE), _values_in_index(folder, metadata, files=files))
        if place
    }
    if not found:
        raise ValueError(
            f"{folder} has neither {COMMON_FILE} nor common_state/shard_0_1 in {METADATA_FILE}, the values that are "
            "not tensors"
        )
    for place, content in found.items():
        _check_values(place, content)
    (place, content), *others = reversed(found.items())
    if others and not _are_equal(content, others[0][1]):
        raise ValueError(f"{others[0][0]} and {place} hold different values: remove the one of an earlier save")
    return content, place


def _values_in_file(path: Path) -> tuple[str, Any]:
    return (str(path), load_allowed(path, path, allowed=ALLOWED)) if path.is_file() else ("", None)


def _values_in_index(folder: Path, metadata: Metadata, *, files: Manifest) -> tuple[str, Any]:
    """Reads the values from .distcp files. Returns their place, "" if the index does not list them, and the values.

    They are stored as one object. torch.distributed.checkpoint, used directly, stores one entry for each leaf, and
    lists the path of each leaf in the index.
    """
    entries = {key: entry for key, entry in metadata.state_dict_metadata.items() if is_common_state(key)}
    if not entries:
        return "", None
    places = {index: place for index, place in _storage_of(metadata, folder).items() if index.fqn in entries}
    try:
        pieces = stored_pieces(files, Metadata(entries, storage_data=places))
    except ValueError as error:
        raise ValueError(f"{folder} is corrupt: {error}") from error
    leaves = {key: _stored_value(folder, key, pieces[key]) for key in entries}
    first = next(iter(entries))
    is_whole = len(leaves) == 1 and _COMMON_KEY.fullmatch(canonical_name(first)) is not None
    place = f"{folder / pieces[first][0][0]}: {first if is_whole else _COMMON_STATE}"
    if is_whole:
        return place, _without_shards(leaves[first])
    paths = vars(metadata).get("planner_data")
    nested: dict[str | int, Any] = {}
    for key, value in leaves.items():
        path = paths.get(key) if isinstance(paths, dict) else None
        if not (isinstance(path, tuple) and path and all(type(step) in (str, int) for step in path)):
            raise ValueError(f"{folder / METADATA_FILE} does not locate {key} among the values of the common state")
        inner: Any = nested
        for step in path[:-1]:
            inner = inner.setdefault(step, {}) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or path[-1] in inner:
            raise ValueError(f"{folder / METADATA_FILE} is corrupt: two values of the common state are at {path}")
        inner[path[-1]] = value
    if len(nested) != 1:
        raise ValueError(f"{folder} holds its common state in parts, {', '.join(map(str, nested))}: must be one")
    return place, _without_shards(_with_lists(next(iter(nested.values()))))


def _without_shards(values: Any) -> Any:
    """Returns the values of an object's only shard. Its shards may be a list, or a dict by shard."""
    if isinstance(values, list) and len(values) == 1:
        return values[0]
    if isinstance(values, dict) and len(values) == 1 and _SHARD.fullmatch(str(next(iter(values)))):
        return next(iter(values.values()))
    return values


def _with_lists(value: Any) -> Any:
    """Replaces dicts whose keys are the indices of a list."""
    if not isinstance(value, dict):
        return value
    inner = {step: _with_lists(one) for step, one in value.items()}
    is_list = bool(inner) and all(isinstance(step, int) for step in inner)
    return [inner[index] for index in sorted(inner)] if is_list else inner


def _storage_of(metadata: Metadata, folder: Path) -> dict[MetadataIndex, Any]:
    """Returns the places of all entries in the data files. Raises ValueError if the index does not contain them."""
    stored = vars(metadata).get("storage_data")
    if not isinstance(stored, dict) or not all(
        isinstance(index, MetadataIndex) and isinstance(index.fqn, str) for index in stored
    ):
        raise ValueError(f"{folder / METADATA_FILE} does not locate its tensors")
    return stored


def is_common_state(key: str) -> bool:
    """Returns whether an entry of the index holds the values that are not tensors, or a part of them."""
    return canonical_name(key).split("/")[0].split(".")[0] == _COMMON_STATE


def _stored_value(folder: Path, key: str, pieces: list[tuple[str, Piece]]) -> Any:
    """Loads an object, or a tensor that is stored as one piece, after verifying its checksums."""
    if len(pieces) != 1:
        raise ValueError(f"{folder} holds {key} in {len(pieces)} pieces: must be 1")
    [(name, piece)] = pieces
    content = read_object(folder / name, piece)
    value = _saved_value(content, folder / name, key)
    # torch.distributed.checkpoint, used directly, saves the saved object of Megatron-Core once more.
    if isinstance(value, (bytes, io.BytesIO)):
        return _saved_value(value if isinstance(value, bytes) else value.getvalue(), folder / name, key)
    return value


def _saved_value(content: bytes, path: Path, key: str) -> Any:
    """Loads the result of torch.save, after verifying its checksums."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            check_records(archive)
    except (zipfile.BadZipFile, zlib.error, RuntimeError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is corrupt: {key}: {error}") from error
    return load_allowed(io.BytesIO(content), f"{path}: {key}", allowed=[*ALLOWED, io.BytesIO])


def _check_values(place: str, content: Any) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{place} holds a {type(content).__name__}: must be a dict")
    iteration, args, version = content.get("iteration"), content.get("args"), content.get("checkpoint_version")
    if iteration is not None and not is_count(iteration):
        raise ValueError(f"{place} holds {iteration!r:.60} as iteration: must be a non-negative integer")
    if args is not None and not isinstance(args, (argparse.Namespace, types.SimpleNamespace)):
        raise ValueError(f"{place} holds {args!r:.60} as args: must be the Namespace of a run's arguments")
    if version is not None and (type(version) not in (int, float) or version not in VERSIONS):
        raise ValueError(f"{place} holds {version!r:.60} as checkpoint_version: must be 2.0 or 3.0")


def _are_equal(one: Any, two: Any) -> bool:
    """Returns whether two nested values are equal. Tensors are compared bitwise."""
    if isinstance(one, (argparse.Namespace, types.SimpleNamespace)) and type(one) is type(two):
        return _are_equal(vars(one), vars(two))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_are_equal(value, two[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and type(one) is type(two):
        return len(one) == len(two) and all(map(_are_equal, one, two))
    if isinstance(one, torch.Tensor) or isinstance(two, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) and torch.equal(one, two)
    return isinstance(one, Inert) or bool(one == two)


def _is_never_read(name: str) -> bool:
    """Returns whether an entry is known to hold nothing that a run could read. Keys of objects end in `/shard_0_4`."""
    return _RUN_STATE.match(name) is not None or name.split("/")[0].endswith(NOT_WEIGHTS)


def _tensors_alone(metadata: Metadata, *, folder: Path) -> tuple[Metadata, list[str]]:
    """Selects weights and optimizer state, and removes wrapper prefixes, so that keys equal parameter names.

    Also returns the names of all other entries, except for the common state.
    """
    kept: dict[str, Any] = {}
    others: list[str] = []
    for key, entry in metadata.state_dict_metadata.items():
        name = canonical_name(key)
        if is_common_state(key):
            continue
        is_object = not isinstance(entry, TensorStorageMetadata)
        if is_object and _MODEL_KEY.match(name) and not _is_never_read(name):
            raise ValueError(f"{folder} holds an object as {key}: must be a tensor")
        if not isinstance(entry, TensorStorageMetadata) or _BUCKET_KEY.match(name) or _is_never_read(name):
            others.append(name)
            continue
        if entry.properties.dtype not in _NUMBERS:
            raise ValueError(
                f"{folder} holds {key} as {entry.properties.dtype}: must be fp64, fp32, bf16 or fp16; save it "
                "without --fp8-param-gather"
            )
        if name in kept:
            raise ValueError(f"{folder} holds {name} twice, with and without a wrapper's prefix")
        kept[name] = entry
    places = {
        replace(index, fqn=canonical_name(index.fqn)): place
        for index, place in _storage_of(metadata, folder).items()
        if canonical_name(index.fqn) in kept
    }
    return Metadata(kept, storage_data=places), others


def _checked_piece(path: Path, piece: Piece, *, dtype: torch.dtype) -> Piece:
    """Verifies the torch.save checksum of a piece, and returns the piece with the file offset of its elements."""
    assert piece.box is not None, "weights are never objects"
    with open(path, "rb", buffering=0) as file:
        try:
            data_start = piece.start + _checked_data(io.BufferedReader(_Section(file.fileno(), piece)))
        except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError) as error:
            raise ValueError(f"{path} is corrupt: {piece}: {error}") from error
        section = io.BufferedReader(_Section(file.fileno(), piece))
        # In fake mode torch creates the tensor without allocating its elements.
        with FakeTensorMode():
            tensor = load_allowed(section, f"{path}: {piece}")
    is_plain = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.is_contiguous()
    if not is_plain or (tuple(tensor.shape), tensor.dtype) != (piece.box.shape, dtype):
        raise ValueError(f"{path} is corrupt: {piece} does not match its entry in {METADATA_FILE}")
    return replace(piece, data_start=data_start + tensor.storage_offset() * dtype.itemsize)


def _checked_data(section: io.BufferedReader) -> int:
    """Verifies a torch.save archive of a single tensor, and returns the offset of the tensor's elements."""
    with zipfile.ZipFile(section) as archive:
        records = [record for record in archive.infolist() if re.fullmatch(r"[^/]+/data/\d+", record.filename)]
        if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"holds {len(records)} plain tensors: must be 1")
        check_records(archive)
    section.seek(records[0].header_offset)
    header = section.read(_LOCAL_HEADER_BYTES)
    lengths = (int.from_bytes(header[start : start + 2], "little") for start in (26, 28))
    return records[0].header_offset + _LOCAL_HEADER_BYTES + sum(lengths)


class _Section(io.RawIOBase):
    """Exposes the bytes of a piece as a read-only file."""

    def __init__(self, descriptor: int, piece: Piece) -> None:
        self._descriptor, self._piece, self._place = descriptor, piece, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._piece.num_bytes}[whence]
        self._place = max(0, begin + offset)
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, target: Any) -> int:
        left = max(0, self._piece.num_bytes - self._place)
        view = memoryview(target)[:left]
        num_read = os.preadv(self._descriptor, [view], self._piece.start + self._place) if left else 0
        self._place += num_read
        return num_read
