"""Nested state dicts in Megatron-Core's format, which mix sharded items and plain values, and their conversion.

A checkpoint stores the items under their keys, and the plain values as one JSON value (`common`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.core.dist_checkpointing.mapping import BoxesOfTensor, ShardedObject, ShardedTensor
from megatron.core.logical_tensors import intersection, whole

Item = ShardedTensor | ShardedObject
_ABSENT = object()


@dataclass
class SplitState:
    """Items of a state dict, in order, and its plain values."""

    items: list[Item] = field(default_factory=list)
    plain: dict[str, Any] = field(default_factory=dict)


def split_state(state: Mapping[str, Any]) -> SplitState:
    """Separates the items of a state dict from its plain values.

    Raises ValueError, naming the path, for a plain value that is not JSON.
    """
    split = SplitState()
    for key, value in state.items():
        rest = _split(value, split.items, path=str(key))
        if rest is not _ABSENT:
            split.plain[_text_key(key, path="the state dict")] = rest
    return split


def split_items(state: Any) -> list[Item]:
    """Returns the items of a nested state in order, and ignores its other values."""
    if isinstance(state, (ShardedTensor, ShardedObject)):
        return [state]
    if isinstance(state, (Mapping, list, tuple)):
        parts = state.values() if isinstance(state, Mapping) else state
        return [item for part in parts for item in split_items(part)]
    return []


def _split(value: Any, items: list[Item], *, path: str) -> Any:
    if isinstance(value, (ShardedTensor, ShardedObject)):
        items.append(value)
        return _ABSENT
    if isinstance(value, Mapping):
        parts = {_text_key(key, path=path): _split(part, items, path=f"{path}.{key}") for key, part in value.items()}
        rest = {key: part for key, part in parts.items() if part is not _ABSENT}
        return rest if rest or not value else _ABSENT
    if isinstance(value, (list, tuple)):
        num_before = len(items)
        parts_of_list = [_split(part, items, path=f"{path}.{index}") for index, part in enumerate(value)]
        if len(items) == num_before:
            return parts_of_list
        # By index, because the items leave gaps.
        rest = {str(index): part for index, part in enumerate(parts_of_list) if part is not _ABSENT}
        return rest or _ABSENT
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise ValueError(
        f"{path} is a {type(value).__name__}: must be a ShardedTensor, a ShardedObject, or consist of numbers, "
        "strings, lists and dicts"
    )


def _text_key(key: Any, *, path: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{path} has the key {key!r}: must be a string")
    return key


def joined_state(state: Mapping[str, Any], plain: Mapping[str, Any], *, absent: set[str]) -> dict[str, Any]:
    """Returns the plain values with the data of the state's items inserted at their positions.

    plain: plain values of a checkpoint. absent: keys of items that the checkpoint lacks, which are omitted.
    """
    joined = dict(plain)
    for key, value in state.items():
        part = _joined(value, plain.get(key, _ABSENT), absent=absent)
        if part is not _ABSENT:
            joined[key] = part
    return joined


def _joined(value: Any, plain: Any, *, absent: set[str]) -> Any:
    if isinstance(value, (ShardedTensor, ShardedObject)):
        return _ABSENT if value.stored_key in absent else value.data
    if isinstance(value, BoxesOfTensor):
        return _ABSENT if any(box.stored_key in absent for box in value) else value.tensor
    if isinstance(value, Mapping):
        held = plain if isinstance(plain, Mapping) else {}
        parts = joined_state(value, held, absent=absent)
        return parts if parts or isinstance(plain, Mapping) else _ABSENT
    if isinstance(value, (list, tuple)) and isinstance(plain, (Mapping, type(_ABSENT))):
        held = plain if isinstance(plain, Mapping) else {}
        listed = [_joined(part, held.get(str(index), _ABSENT), absent=absent) for index, part in enumerate(value)]
        listed = [part for part in listed if part is not _ABSENT]
        return listed or plain
    return plain


def written_items(items: list[Item]) -> list[Item]:
    """Returns the boxes and objects that this rank offers to write: its main replicas."""
    written: list[Item] = []
    for item in items:
        item.validate_metadata_integrity()
        if not item.is_main_replica:
            continue
        if isinstance(item, ShardedTensor):
            if item.data is None:
                raise ValueError(f"{item.key} has no data: saving requires the elements of every main replica")
            written += item.boxes()
        else:
            written.append(ShardedObject(item.stored_key, item.data))
    return written


def read_boxes(item: ShardedTensor, stored_shape: tuple[int, ...]) -> list[ShardedTensor]:
    """Returns the boxes to read for an item. Allocates the item's data on the CPU if it is None.

    stored_shape: global shape in the checkpoint. With allow_shape_mismatch, the elements beyond it keep their values.
    """
    item.validate_metadata_integrity()
    if item.data is None:
        item.init_data(torch.device("cpu"))
    boxes = item.boxes()
    if not item.allow_shape_mismatch or len(stored_shape) != len(item.global_shape):
        return boxes
    return [part for box in boxes for part in _within(box, stored_shape)]


def _within(box: ShardedTensor, shape: tuple[int, ...]) -> list[ShardedTensor]:
    common = intersection(box.box, whole(shape))
    if common is None:
        return []
    data = box.data[common.relative_to(box.box)]
    return [ShardedTensor.at(box.key, data, shape, common.offset, allow_cast=box.allow_cast)]
