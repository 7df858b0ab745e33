"""Helpers under Megatron's import path that split tensors over ranks.

The differentiable conversions are in mappings.py.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.group_collectives import all_gather_rows
from megatron.core.parallel_state import group_or_existing
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.utils import divide


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> list[Tensor]:
    """Splits the last dimension evenly: [*, H], any dtype -> num_partitions views [*, H / num_partitions].

    contiguous_split_chunks: return contiguous copies instead of views.
    """
    parts = torch.split(tensor, divide(tensor.shape[-1], num_partitions), dim=-1)
    return [part.contiguous() if contiguous_split_chunks else part for part in parts]


def split_tensor_into_1d_equal_chunks(
    tensor: Tensor, new_buffer: bool = False, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Returns this rank's part of a flattened tensor: any shape and dtype -> [elements / ranks], a view if possible.

    new_buffer: always return a copy. tp_group: None means the group of parallel_state, see group_or_existing. Raises
    ValueError if the number of elements is not divisible by the number of ranks.
    """
    tp_group = group_or_existing(tp_group)
    length = divide(tensor.numel(), group_size(tp_group))
    chunk = tensor.reshape(-1).narrow(0, group_rank(tp_group) * length, length)
    return chunk.clone() if new_buffer else chunk


def gather_split_1d_tensor(tensor: Tensor, tp_group: ProcessGroup | None = None) -> Tensor:
    """Inverts split_tensor_into_1d_equal_chunks: [N], any dtype -> [ranks * N]. Collective, not differentiable."""
    return all_gather_rows(tensor.detach().reshape(-1), group_or_existing(tp_group)).wait()
