"""broadcast_data: the first rank of a tensor-parallel group reads a batch, the others get it from there."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.device import default_device
from megatron.core.process_groups_config import group_rank, group_size


def broadcast_data(
    keys: Sequence[str], data: dict[str, Tensor] | None, datatype: torch.dtype, *, tp_group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """The tensors of the group's first rank on every rank, on this process's device, by key. Collective.

    data: any shapes, datatype; read on the first rank alone. Raises ValueError on every rank for a tensor of another
    dtype there.
    """
    is_source = group_rank(tp_group) == 0
    shapes: list[list[torch.Size] | str] = [""]
    if is_source:
        assert data is not None, "the group's first rank has the data"
        wrong = [key for key in keys if data[key].dtype != datatype]
        shapes[0] = (
            f"broadcast_data: {wrong[0]} is {data[wrong[0]].dtype}: must be {datatype}"
            if wrong
            else [data[key].shape for key in keys]
        )
    if group_size(tp_group) > 1:
        dist.broadcast_object_list(shapes, group=tp_group, group_src=0)
    if isinstance(shapes[0], str):
        raise ValueError(shapes[0])
    sizes = [shape.numel() for shape in shapes[0]]
    # One message for all tensors.
    flat = torch.empty(sum(sizes), dtype=datatype, device=default_device())
    if is_source and data is not None:
        torch.cat([data[key].reshape(-1).to(flat.device) for key in keys], out=flat)
    if group_size(tp_group) > 1:
        dist.broadcast(flat, group=tp_group, group_src=0)
    return {key: part.view(shape) for key, part, shape in zip(keys, flat.split(sizes), shapes[0], strict=True)}
