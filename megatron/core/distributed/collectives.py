"""Sums of flat gradient tensors over ranks: in the back end's order, and in rank order.

Stateless; who owns the tensors is in grad_buffer.py. A group of None is this rank alone: nothing is sent.
"""

import torch
import torch.distributed as dist

from megatron.core.group_collectives import all_gather_single
from megatron.core.process_groups_config import group_size

# Bounds what a rank-ordered sum holds besides its input: one slice of all ranks.
_SLICE_ELEMENTS = 1 << 22


def all_reduce_(flat: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Sums `flat`, any shape, contiguous, floating point, in place; the back end chooses the order.

    group: None is this rank alone, which leaves `flat` as it is.
    """
    if group_size(group) > 1:
        dist.all_reduce(flat, group=group)


def rank_ordered_all_reduce_(flat: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Sums `flat`, any shape, contiguous, any dtype, in place; each element in rank order, whatever the tensor's size.

    All-to-all, local sum, all-gather, in slices of bounded size. group: None is this rank alone, which leaves `flat`
    as it is.
    """
    ranks = group_size(group)
    if ranks == 1:
        return
    assert group is not None
    # A multiple of the ranks, so that all slices but the last divide without padding.
    for piece in flat.view(-1).split(_SLICE_ELEMENTS * ranks):
        if piece.numel() % ranks == 0:
            _rank_ordered_slice_(piece, group)
        else:
            # Only the last slice of a tensor that does not divide by the ranks comes here.
            padded = piece.new_zeros(-(-piece.numel() // ranks) * ranks)
            padded[: piece.numel()] = piece
            _rank_ordered_slice_(padded, group)
            piece.copy_(padded[: piece.numel()])


def _rank_ordered_slice_(flat: torch.Tensor, group: dist.ProcessGroup) -> None:
    # [ranks, N / ranks]: row r is what rank r holds of this rank's share.
    received = torch.empty_like(flat)
    # Each rank sums one share of the elements, then all gather the shares.
    dist.all_to_all_single(received, flat, group=group)
    total = _sum_in_order(received.view(group_size(group), -1))  # [N / ranks]
    all_gather_single(flat, total, group=group)


def _sum_in_order(rows: torch.Tensor) -> torch.Tensor:
    # One addition at a time: a reduction kernel over rows may pair them as it likes.
    total = rows[0].clone()
    for row in rows[1:]:
        total.add_(row)
    return total
