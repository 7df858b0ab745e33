"""Splits sequences and batches over the ranks of a context-parallel group.

A sequence of S tokens is split into 2 * size chunks. Rank r holds the r-th chunk from the front and the r-th from the
back. Under a causal mask the work of a token grows with its position, so pairing an early with a late chunk balances
the work. Attention over split sequences is in context_parallel_attention.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.process_groups_config import group_rank, group_size

# Batch entries that describe whole samples and are therefore not split.
_OF_WHOLE_SAMPLES = ("cu_seqlens",)


def chunks_of_rank(seq_length: int, *, size: int, rank: int) -> list[slice]:
    """Returns the two ranges of the sequence that `rank` holds, in local order, or one full range for a size of 1.

    Raises ValueError unless seq_length is divisible by 2 * size.
    """
    if size == 1:
        return [slice(0, seq_length)]
    if seq_length % (2 * size):
        raise ValueError(
            f"the sequence has {seq_length} tokens and context_parallel_size is {size}: "
            f"must be divisible by 2 x context_parallel_size ({2 * size})"
        )
    width = seq_length // (2 * size)
    return [slice(index * width, (index + 1) * width) for index in (rank, 2 * size - 1 - rank)]


def split_sequence(tensor: Tensor, dim: int, *, size: int, rank: int) -> Tensor:
    """Returns the chunks of `rank`, concatenated. tensor: any shape and dtype; S tokens along `dim` become S / size."""
    chunks = chunks_of_rank(tensor.shape[dim], size=size, rank=rank)
    parts = [tensor.narrow(dim, chunk.start, chunk.stop - chunk.start) for chunk in chunks]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def join_sequence(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Inverts split_sequence. parts: one tensor per rank, in rank order, any shape and dtype."""
    if len(parts) == 1:
        return parts[0]
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim)


def slice_batch(batch: dict[str, Tensor], group: ProcessGroup | None) -> dict[str, Tensor]:
    """Splits a batch along the sequence and returns this rank's tokens: [B, S, ...], any dtype -> [B, S / size, ...].

    Returns the batch itself for a group of size 1. cu_seqlens, the document boundaries, are not split. Raises
    ValueError for a batch with an attention_mask.
    """
    size, rank = group_size(group), group_rank(group)
    if size == 1:
        return batch
    if batch.get("attention_mask") is not None:
        raise ValueError(
            f"the batch contains an attention_mask and context_parallel_size is {size}: masks are not split over "
            "ranks; pass document boundaries as cu_seqlens"
        )
    return {
        key: value if key in _OF_WHOLE_SAMPLES or value is None else split_sequence(value, 1, size=size, rank=rank)
        for key, value in batch.items()
    }
