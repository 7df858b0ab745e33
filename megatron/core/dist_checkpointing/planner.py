"""Plans saves and loads: assigns boxes to ranks, in any layout, and checks requests against a checkpoint's contents.

Plans are pure data. storage.py reads and writes the files.
"""

import enum
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron.core.dist_checkpointing.disk import json_bytes
from megatron.core.dist_checkpointing.manifest import Piece
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.logical_tensors import Box, BoxIndex, disjoint_parts, intersection

Items = Sequence[ShardedTensor | ShardedObject]
# Number of invalid keys that an error names. The remaining keys are only counted.
MAX_NAMED_KEYS = 4


class ReplicaWriters(enum.Enum):
    """Policy that selects the writer among the ranks that store the same box."""

    SPREAD = "the rank with the fewest bytes to write so far"
    FIRST = "the lowest rank"


class HeldItems:
    """Items that this rank stores and offers to write. The coordinator removes overlaps and selects replicas."""

    def __init__(self, items: Items):
        self._objects = {item.key: item.data for item in items if isinstance(item, ShardedObject)}
        self._tensors: dict[str, list[ShardedTensor]] = defaultdict(list)
        for item in items:
            if isinstance(item, ShardedTensor):
                self._tensors[item.key].append(item)
        self._places = {key: BoxIndex(tensor.box for tensor in held) for key, held in self._tensors.items()}

    def offers(self) -> list[WriteItem]:
        """Returns one write item for each box and object that this rank stores."""
        objects = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._objects]
        boxes = [_write_item(t.key, t.box, tensor=_tensor_metadata(t)) for held in self._tensors.values() for t in held]
        return objects + boxes

    def content(self, item: WriteItem) -> tuple[str, Box | None, torch.Tensor | bytes]:
        """Returns the key, box and content of a write.

        The content is the bytes of an object, or part of a box: [*part shape], any dtype, a view. Raises ValueError if
        an object is not JSON-serializable.
        """
        key = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            return key, None, json_bytes(key, self._objects[key], indent=None)
        part = _item_box(item)
        # The coordinator may have split the box. Any local box that contains the part stores the same values.
        near = (self._tensors[key][position] for position in self._places[key].overlapping(part))
        held = next(tensor for tensor in near if part.is_inside(tensor.box))
        return key, part, held.data.detach()[part.relative_to(held.box)]


def assign_writes(
    offers: list[list[WriteItem]], replicas: ReplicaWriters = ReplicaWriters.SPREAD
) -> tuple[list[list[WriteItem]], Metadata]:
    """Assigns disjoint writes to ranks from the boxes that they offer, and builds the checkpoint's metadata.

    Raises ValueError if ranks disagree about a key, or if no rank offers one of the elements.
    """
    written: list[list[WriteItem]] = [[] for _ in offers]
    stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    # Bytes assigned to each rank so far. The slowest rank determines the duration of the save.
    num_bytes = [0] * len(offers)
    by_key: dict[str, list[tuple[int, WriteItem]]] = defaultdict(list)
    for rank, items in enumerate(offers):
        for item in items:
            by_key[item.index.fqn].append((rank, item))
    # Large tensors first, so that small ones even out the load.
    for key in sorted(by_key, key=lambda k: -(by_key[k][0][1].tensor_storage_size() or 0)):
        tensor = _agreed_metadata(key, by_key[key])
        if tensor is None:
            # Objects are small and identical on all ranks, so the first rank with the object writes it.
            rank, item = by_key[key][0]
            stored[key] = BytesStorageMetadata()
            written[rank].append(item)
            continue
        stored[key] = tensor
        for rank, part in _spread(key, tensor, offers=by_key[key], num_bytes=num_bytes, replicas=replicas):
            # The index is torch's hint for finding the box in `chunks`.
            item = _write_item(key, part, tensor=tensor, index=len(tensor.chunks))
            tensor.chunks.append(_chunk(part))
            written[rank].append(item)
    return written, Metadata(stored)


def _agreed_metadata(key: str, offers: list[tuple[int, WriteItem]]) -> TensorStorageMetadata | None:
    """Returns the metadata that all ranks agree on for a tensor, without its boxes; None for an object."""
    # Shape and dtype (None for an object) -> the first rank that saves it, for the message.
    views: dict[tuple[tuple[int, ...], torch.dtype] | None, int] = {}
    for rank, item in offers:
        data = item.tensor_data
        views.setdefault(None if data is None else (tuple(data.size), data.properties.dtype), rank)
    if len(views) > 1:
        (one, rank), (other, other_rank) = list(views.items())[:2]
        raise ValueError(f"{key}: rank {rank} saves {_describe(one)}, rank {other_rank} saves {_describe(other)}")
    view = next(iter(views))
    if view is None:
        return None
    return TensorStorageMetadata(TensorProperties(dtype=view[1]), torch.Size(view[0]), [])


def _spread(
    key: str,
    tensor: TensorStorageMetadata,
    *,
    offers: list[tuple[int, WriteItem]],
    num_bytes: list[int],
    replicas: ReplicaWriters,
) -> list[tuple[int, Box]]:
    """Assigns each disjoint part to a rank that stores it. Returns (rank, part) pairs and updates num_bytes."""
    owners: dict[Box, list[int]] = defaultdict(list)
    for rank, item in offers:
        owners[_item_box(item)].append(rank)
    # Replicas share a dict key, so they cost no box arithmetic.
    boxes = list(owners)
    parts = disjoint_parts(boxes)
    # The parts are disjoint and inside the tensor, so an equal element count proves full coverage.
    if sum(part.volume for _, part in parts) != tensor.size.numel():
        raise ValueError(f"{key}: no rank saves some elements of {list(tensor.size)}; the saved boxes are {boxes[:8]}")
    spread = []
    for index, part in parts:
        holders = owners[boxes[index]]
        spread_evenly = replicas is ReplicaWriters.SPREAD
        rank = min(holders, key=lambda r: num_bytes[r]) if spread_evenly else min(holders)
        num_bytes[rank] += part.volume * tensor.properties.dtype.itemsize
        spread.append((rank, part))
    return spread


@dataclass(frozen=True)
class Read:
    """Elements shared by a requested box and a stored piece, with the name of the piece's file."""

    tensor: ShardedTensor
    name: str
    piece: Piece
    window: Box


def plan_reads(items: Items, stored: dict[str, list[tuple[str, Piece]]]) -> list[Read]:
    """Returns the reads that fill the tensors among `items`, in file order. `check_wanted` must be called first.

    Raises ValueError if the stored pieces do not fill a box exactly.
    """
    reads: list[Read] = []
    places: dict[str, BoxIndex] = {}
    for tensor in items:
        if not isinstance(tensor, ShardedTensor) or not tensor.box.volume:
            continue
        held, windows = stored.get(tensor.key, []), []
        if tensor.key not in places:
            places[tensor.key] = BoxIndex(piece.box for _, piece in held if piece.box is not None)
        # In most layouts, a rank requires few of the stored boxes, and never opens the other files.
        for position in places[tensor.key].overlapping(tensor.box):
            name, piece = held[position]
            assert piece.box is not None, "overlapping boxes share elements"
            window = intersection(tensor.box, piece.box)
            assert window is not None, "overlapping boxes share elements"
            reads.append(Read(tensor, name, piece, window))
            windows.append(window)
        # Disjoint windows inside the box with the same total volume fill every element.
        volumes = sum(window.volume for window in windows), sum(part.volume for _, part in disjoint_parts(windows))
        if volumes != (tensor.box.volume, tensor.box.volume):
            raise ValueError(f"the checkpoint is corrupt: the pieces of {tensor.key} leave gaps or overlap")
    return sorted(reads, key=lambda read: (read.name, read.piece.start))


def check_wanted(items: Items, metadata: Metadata) -> None:
    """Raises ValueError, naming keys, unless the checkpoint stores every item with the same shape and dtype."""
    problems = [problem for item in items if (problem := _problem(item, metadata)) is not None]
    if problems:
        more = f"; and {len(problems) - MAX_NAMED_KEYS} more" if len(problems) > MAX_NAMED_KEYS else ""
        raise ValueError(f"the checkpoint is from a different model: {'; '.join(problems[:MAX_NAMED_KEYS])}{more}")


def _problem(item: ShardedTensor | ShardedObject, metadata: Metadata) -> str | None:
    stored = metadata.state_dict_metadata.get(item.key)
    if stored is None:
        return f"{item.key} is not in it"
    if isinstance(item, ShardedObject) or isinstance(stored, BytesStorageMetadata):
        # "is not in it" would send the user looking for a key that exists.
        same_kind = isinstance(item, ShardedObject) == isinstance(stored, BytesStorageMetadata)
        return None if same_kind else f"{item.key} is an object on one side and a tensor on the other"
    if tuple(stored.size) != item.global_shape:
        return f"{item.key} has shape {list(stored.size)} in it, but {list(item.global_shape)} is requested"
    dtype, wanted = stored.properties.dtype, item.data.dtype
    # Integers are positions, counts and generator states, which must never be converted.
    castable = item.allow_cast and dtype.is_floating_point and wanted.is_floating_point
    return None if dtype == wanted or castable else f"{item.key} is {dtype} in it, but {wanted} is requested"


def _write_item(key: str, box: Box, *, tensor: TensorStorageMetadata, index: int | None = None) -> WriteItem:
    data = TensorWriteData(chunk=_chunk(box), properties=tensor.properties, size=tensor.size)
    return WriteItem(MetadataIndex(key, box.offset, index), WriteItemType.SHARD, tensor_data=data)


def _tensor_metadata(tensor: ShardedTensor) -> TensorStorageMetadata:
    # Only the dtype: strides, device and requires_grad are up to the reader.
    properties = TensorProperties(dtype=tensor.data.dtype)
    return TensorStorageMetadata(properties, torch.Size(tensor.global_shape), [])


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.shape))


def _item_box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _describe(view: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "an object" if view is None else f"{list(view[0])} of {view[1]}"
