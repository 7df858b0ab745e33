"""Plans of torch.distributed.checkpoint for boxes: any rank may write or read any set of boxes of a tensor.

Decides who writes what and checks what is wanted against what is stored; touches no file.
"""

import dataclasses
import io
import json
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.metadata import (
    STATE_DICT_TYPE,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron.core.dist_checkpointing.boxes import Box, BoxIndex, disjoint_parts, intersection, whole
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

Items = Sequence[ShardedTensor | ShardedObject]
# How many wrong keys an error names before it only counts them.
MAX_NAMED_KEYS = 4


class BoxSavePlanner(SavePlanner):
    """Offers every box of this rank; the coordinator cuts overlaps away and spreads replicas over the ranks."""

    def __init__(self, items: Items):
        # By key, as resolve_data looks them up; one key may have several boxes here.
        self.objects = {item.key: item.data for item in items if isinstance(item, ShardedObject)}
        self.tensors: dict[str, list[ShardedTensor]] = defaultdict(list)
        for item in items:
            if isinstance(item, ShardedTensor):
                self.tensors[item.key].append(item)
        self._places = {key: BoxIndex(tensor.box for tensor in held) for key, held in self.tensors.items()}

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing to do: the items came by the constructor, torch's state dict stays empty."""

    def create_local_plan(self) -> SavePlan:
        """One write item per box and object that this rank holds."""
        objects = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self.objects]
        boxes = [_write_item(t.key, t.box, tensor=_tensor_metadata(t)) for held in self.tensors.values() for t in held]
        return SavePlan(objects + boxes)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Every element written once, bytes spread evenly over the ranks that hold replicas."""
        written, metadata = assign_writes([plan.items for plan in all_plans])
        return [dataclasses.replace(plan, items=w) for plan, w in zip(all_plans, written, strict=True)], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The coordinator's plan, as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The bytes of an object, or a part of a box: [*part shape], the tensor's dtype, a view."""
        key = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(json.dumps(self.objects[key]).encode())
        part = _item_box(write_item)
        # The coordinator may have cut the box: any box of ours that holds the part has the same bytes.
        near = (self.tensors[key][position] for position in self._places[key].touching(part))
        held = next(tensor for tensor in near if part.is_inside(tensor.box))
        return held.data.detach()[part.relative_to(held.box)]


def assign_writes(offers: list[list[WriteItem]]) -> tuple[list[list[WriteItem]], Metadata]:
    """From each rank's offered boxes to each rank's disjoint writes, and the metadata of the whole checkpoint.

    Raises ValueError if ranks disagree about a key or some element is offered by nobody.
    """
    written: list[list[WriteItem]] = [[] for _ in offers]
    stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    # Bytes each rank writes so far: the slowest rank decides how long the save takes.
    num_bytes = [0] * len(offers)
    by_key: dict[str, list[tuple[int, WriteItem]]] = defaultdict(list)
    for rank, items in enumerate(offers):
        for item in items:
            by_key[item.index.fqn].append((rank, item))
    # Large tensors first: the small ones then even out what each rank writes.
    for key in sorted(by_key, key=lambda k: -(by_key[k][0][1].tensor_storage_size() or 0)):
        tensor = _agreed_metadata(key, by_key[key])
        if tensor is None:
            # Objects are small and the same everywhere: the first rank that has one writes it.
            rank, item = by_key[key][0]
            stored[key] = BytesStorageMetadata()
            written[rank].append(item)
            continue
        stored[key] = tensor
        for rank, part in _spread(key, tensor, offers=by_key[key], num_bytes=num_bytes):
            # The index is torch's hint where in `chunks` to look for the box.
            item = _write_item(key, part, tensor=tensor, index=len(tensor.chunks))
            tensor.chunks.append(_chunk(part))
            written[rank].append(item)
    return written, Metadata(stored)


def _agreed_metadata(key: str, offers: list[tuple[int, WriteItem]]) -> TensorStorageMetadata | None:
    """What all ranks say about a tensor, without its boxes; None for an object."""
    # The first rank of each opinion, for the message.
    views: dict[tuple[tuple[int, ...], torch.dtype] | None, int] = {}
    for rank, item in offers:
        data = item.tensor_data
        views.setdefault(None if data is None else (tuple(data.size), data.properties.dtype), rank)
    if len(views) > 1:
        (one, rank), (other, other_rank) = list(views.items())[:2]
        raise ValueError(f"{key}: rank {rank} saves {_words(one)}, rank {other_rank} saves {_words(other)}")
    view = next(iter(views))
    if view is None:
        return None
    return TensorStorageMetadata(TensorProperties(dtype=view[1]), torch.Size(view[0]), [])


def _spread(
    key: str, tensor: TensorStorageMetadata, *, offers: list[tuple[int, WriteItem]], num_bytes: list[int]
) -> list[tuple[int, Box]]:
    """(rank, part) for every disjoint part, each to the least loaded rank that holds it; num_bytes is advanced."""
    owners: dict[Box, list[int]] = defaultdict(list)
    for rank, item in offers:
        owners[_item_box(item)].append(rank)
    # Equal boxes are one key of the dict, so replicas cost no arithmetic.
    boxes = list(owners)
    parts = disjoint_parts(boxes)
    # The parts are disjoint and inside the tensor, so counting elements proves that they fill it.
    if sum(part.volume for _, part in parts) != tensor.size.numel():
        raise ValueError(f"{key}: no rank saves some elements of {list(tensor.size)}; saved are {boxes[:8]}")
    spread = []
    for index, part in parts:
        rank = min(owners[boxes[index]], key=lambda r: num_bytes[r])
        num_bytes[rank] += part.volume * tensor.properties.dtype.itemsize
        spread.append((rank, part))
    return spread


class BoxLoadPlanner(LoadPlanner):
    """Reads, for every wanted box, its intersections with the stored boxes, in place."""

    def __init__(self, items: Items):
        self.objects = [item for item in items if isinstance(item, ShardedObject)]
        self.tensors = [item for item in items if isinstance(item, ShardedTensor)]
        self.metadata: Metadata | None = None

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keeps the metadata; the items came by the constructor, torch's state dict stays empty."""
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Read items of this rank; `check_wanted` has passed before."""
        assert self.metadata is not None
        metadata = self.metadata.state_dict_metadata
        reads = [_read_object(index, item.key) for index, item in enumerate(self.objects)]
        stored: dict[str, list[Box]] = {}
        places: dict[str, BoxIndex] = {}
        for index, tensor in enumerate(self.tensors):
            key = tensor.key
            if key not in stored:
                entry = metadata[key]
                assert isinstance(entry, TensorStorageMetadata)
                stored[key] = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
                places[key] = BoxIndex(stored[key])
            # In most layouts a rank needs few of the stored boxes; the others are not even opened.
            needed = [stored[key][position] for position in places[key].touching(tensor.box)]
            reads += [_read_part(tensor, box, index=index) for box in needed]
        return LoadPlan(reads)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads its own boxes."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The local plan, as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Replaces an object's data."""
        self.objects[_position(read_item)].data = json.loads(value.getvalue())

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The view to fill: [*lengths], the wanted tensor's dtype and device."""
        # Indexing gives a view whatever the strides, so copying into it loads in place.
        target = self.tensors[_position(read_item)].data.detach()  # [*box shape]
        return target[Box(tuple(read_item.dest_offsets), tuple(read_item.lengths)).relative_to(whole(target.shape))]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do, `tensor`: [*lengths], the wanted dtype, is a view of the target."""


def check_wanted(items: Items, metadata: Metadata) -> None:
    """Raises ValueError, naming keys, unless the checkpoint holds every item with the same shape and dtype."""
    problems = [problem for item in items if (problem := _problem(item, metadata)) is not None]
    if problems:
        more = f"; and {len(problems) - MAX_NAMED_KEYS} more" if len(problems) > MAX_NAMED_KEYS else ""
        raise ValueError(f"checkpoint of another model: {'; '.join(problems[:MAX_NAMED_KEYS])}{more}")


def _problem(item: ShardedTensor | ShardedObject, metadata: Metadata) -> str | None:
    stored = metadata.state_dict_metadata.get(item.key)
    if stored is None:
        return f"{item.key} is not in it"
    if isinstance(item, ShardedObject) or isinstance(stored, BytesStorageMetadata):
        # "Not in it" would be wrong here and send the user looking for a key that is there.
        same_kind = isinstance(item, ShardedObject) == isinstance(stored, BytesStorageMetadata)
        return None if same_kind else f"{item.key} is an object on one side and a tensor on the other"
    if tuple(stored.size) != item.global_shape:
        return f"{item.key} has shape {list(stored.size)} in it, {list(item.global_shape)} is wanted"
    dtype, wanted = stored.properties.dtype, item.data.dtype
    # Integers are positions, counts and generator states: converting those is always a mistake.
    castable = item.allow_cast and dtype.is_floating_point and wanted.is_floating_point
    return None if dtype == wanted or castable else f"{item.key} is {dtype} in it, {wanted} is wanted"


def _read_part(tensor: ShardedTensor, stored: Box, *, index: int) -> ReadItem:
    common = intersection(tensor.box, stored)
    assert common is not None, "boxes that touch share elements"
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(tensor.key, tensor.box.offset, index),
        dest_offsets=torch.Size(s.start for s in common.relative_to(tensor.box)),
        storage_index=MetadataIndex(tensor.key, stored.offset),
        storage_offsets=torch.Size(s.start for s in common.relative_to(stored)),
        lengths=torch.Size(common.shape),
    )


def _read_object(index: int, key: str) -> ReadItem:
    # Sizes are those of tensors: an object is read whole.
    nothing = torch.Size(())
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(key, None, index),
        dest_offsets=nothing,
        storage_index=MetadataIndex(key),
        storage_offsets=nothing,
        lengths=nothing,
    )


def _position(read_item: ReadItem) -> int:
    # The index hint of the destination carries the item's position: two boxes of one key may share an offset.
    assert read_item.dest_index.index is not None
    return read_item.dest_index.index


def _write_item(key: str, box: Box, *, tensor: TensorStorageMetadata, index: int | None = None) -> WriteItem:
    data = TensorWriteData(chunk=_chunk(box), properties=tensor.properties, size=tensor.size)
    return WriteItem(MetadataIndex(key, box.offset, index), WriteItemType.SHARD, tensor_data=data)


def _tensor_metadata(tensor: ShardedTensor) -> TensorStorageMetadata:
    # Nothing but the dtype: strides, device and requires_grad are the reader's business.
    properties = TensorProperties(dtype=tensor.data.dtype)
    return TensorStorageMetadata(properties, torch.Size(tensor.global_shape), [])


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.shape))


def _item_box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _words(view: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "an object" if view is None else f"{list(view[0])} of {view[1]}"
