"""All-reduces of flat gradient tensors: the back end's own, and one that sums in rank order.

Stateless; who owns the tensors is in grad_buffer.py. A group of None is this rank alone.
"""

import enum

import torch
import torch.distributed as dist

# Bounds what a rank-ordered sum holds besides its input: one slice of all ranks.
_SLICE_ELEMENTS = 1 << 22


class Reduction(enum.Enum):
    """What becomes of the ranks' values."""

    SUM = "sum"
    MEAN = "mean"


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks in `group`; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This rank's place in `group`; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def all_reduce_(flat: torch.Tensor, group: dist.ProcessGroup | None, *, reduction: Reduction) -> None:
    """Reduces `flat`, any shape, contiguous, floating point, in place; the back end chooses the order of the sum."""
    if group_size(group) == 1:
        return
    dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=group)
    if reduction is Reduction.MEAN:
        flat.div_(group_size(group))


def rank_ordered_all_reduce_(flat: torch.Tensor, group: dist.ProcessGroup | None, *, reduction: Reduction) -> None:
    """As all_reduce_, but each element is the sum in rank order in `flat`'s dtype, whatever the size of the tensor.

    All-to-all, local sum, all-gather, in slices of bounded size.
    """
    ranks = group_size(group)
    if ranks == 1:
        return
    assert group is not None
    for piece in flat.view(-1).split(_SLICE_ELEMENTS * ranks):
        if piece.numel() % ranks == 0:
            _rank_ordered_slice_(piece, group, reduction=reduction)
        else:
            padded = piece.new_zeros(-(-piece.numel() // ranks) * ranks)
            padded[: piece.numel()] = piece
            _rank_ordered_slice_(padded, group, reduction=reduction)
            piece.copy_(padded[: piece.numel()])


def _rank_ordered_slice_(flat: torch.Tensor, group: dist.ProcessGroup, *, reduction: Reduction) -> None:
    ranks = group_size(group)
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat, group=group)
    total = _sum_in_order(received.view(ranks, -1))
    if reduction is Reduction.MEAN:
        total.div_(ranks)
    dist.all_gather_into_tensor(flat, total, group=group)


def _sum_in_order(rows: torch.Tensor) -> torch.Tensor:
    total = rows[0].clone()  # [N]
    for row in rows[1:]:
        total.add_(row)
    return total
