"""broadcast_data: the first rank of a tensor-parallel group reads a batch and broadcasts it to the other ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.device import default_device
from megatron.core.parallel_state import group_or_existing
from megatron.core.process_groups_config import group_rank, group_size


def broadcast_data(
    keys: Sequence[str],
    data: dict[str, Tensor] | None,
    datatype: torch.dtype,
    tp_group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Broadcasts tensors from the first rank of the group to all ranks, and returns them by key. Collective.

    data: tensors of any shape, dtype `datatype`; read only on the first rank. Results are on this process's device.
    tp_group: None means the group of parallel_state, see group_or_existing. Raises ValueError on every rank if the data
    of the first rank is None, lacks a key, or has a different dtype.
    """
    tp_group = group_or_existing(tp_group)
    is_source, is_shared = group_rank(tp_group) == 0, group_size(tp_group) > 1
    # Sends the shapes or an error, so that the other ranks do not wait for a broadcast that never starts.
    told: list[list[torch.Size] | str] = [_shapes_or_fault(keys, data, datatype=datatype) if is_source else ""]
    if is_shared:
        dist.broadcast_object_list(told, group=tp_group, group_src=0)
    shapes = told[0]
    if isinstance(shapes, str):
        raise ValueError(f"broadcast_data: {shapes}")
    sizes = [shape.numel() for shape in shapes]
    # One broadcast for all tensors.
    flat = torch.empty(sum(sizes), dtype=datatype, device=default_device())
    if is_source and data is not None:
        for key, part in zip(keys, flat.split(sizes), strict=True):
            part.view(data[key].shape).copy_(data[key])
    if is_shared:
        dist.broadcast(flat, group=tp_group, group_src=0)
    return {key: part.view(shape) for key, part, shape in zip(keys, flat.split(sizes), shapes, strict=True)}


def _shapes_or_fault(
    keys: Sequence[str], data: dict[str, Tensor] | None, *, datatype: torch.dtype
) -> list[torch.Size] | str:
    if data is None:
        return "data is None: the group's first rank must provide the data"
    for key in keys:
        if not isinstance(data.get(key), Tensor):
            return f"{key} is {data.get(key)!r}: must be a tensor; available keys are {', '.join(map(str, data))}"
        if data[key].dtype != datatype:
            return f"{key} is {data[key].dtype}: must be {datatype}"
    return [data[key].shape for key in keys]
