"""Moves between whole activations and parts of them on the ranks of a tensor-parallel group, with their gradients.

[Note: conjugates] Each function's backward is another's forward: copy and all-reduce, split and gather of the last
dimension, gather and reduce-scatter of the first (the sequence). Which one undoes a gather depends on what follows:
where every rank goes on with a share of the work, its gradient is a share of the sum and is reduced; where all ranks
do the same, the gradient is whole already and is only split. A group of None is parallel_state's of tensor parallelism,
see group_or_existing; with one rank nothing moves.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron.core.group_collectives import all_gather_rows, all_reduce_sum, reduce_scatter_rows
from megatron.core.parallel_state import group_or_existing
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.utils import divide

# (x, group) -> x's other form; any float dtype, not in place.
_Move = Callable[[Tensor, ProcessGroup | None], Tensor]


def copy_to_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """The input as it is, [*], any float dtype; its gradient is the sum of the ranks'."""
    return _move(input_, group, forward=_keep, backward=_all_reduce)


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """The sum of the ranks' inputs, [*], any float dtype -> same; the gradient goes to each rank as it is."""
    return _move(input_, group, forward=_all_reduce, backward=_keep)


def reduce_from_tensor_model_parallel_region_(own: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sums over the group in the input's memory; own: any shape and float dtype, contiguous, not used elsewhere."""
    if group_size(group) == 1:
        return own
    total: Tensor = _SummedInPlace.apply(own, group)
    return total


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """This rank's part of the last dimension, [*, H] -> [*, H / ranks], any float dtype; gradients are gathered."""
    return _move(input_, group, forward=_split_last, backward=_gather_last)


def gather_from_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """The ranks' parts side by side, [*, H / ranks] -> [*, H], any float dtype; gradients are split."""
    return _move(input_, group, forward=_gather_last, backward=_split_last)


def scatter_to_sequence_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """This rank's part of the sequence, [S, *] -> [S / ranks, *], any float dtype; gradients are gathered."""
    return _move(input_, group, forward=_split_first, backward=_gather_first)


def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool = True, *, group: ProcessGroup | None = None
) -> Tensor:
    """The whole sequence, [S / ranks, *] -> [S, *], any float dtype.

    tensor_parallel_output_grad: ranks go on with shares of the work, so gradients are summed and split; False where
    all do the same, so gradients are split alone. See [Note: conjugates].
    """
    backward = _reduce_scatter_first if tensor_parallel_output_grad else _split_first
    return _move(input_, group, forward=_gather_first, backward=backward)


def reduce_scatter_to_sequence_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """This rank's part of the sum of the ranks' sequences, [S, *] -> [S / ranks, *], any dtype."""
    return _move(input_, group, forward=_reduce_scatter_first, backward=_gather_first)


def part_of(x: Tensor, group: ProcessGroup | None, *, dim: int) -> Tensor:
    """This rank's part, a view, of a tensor that all ranks have, cut evenly in rank order along `dim`.

    x: any shape and dtype. Raises ValueError where the dimension does not divide by the ranks.
    """
    size = x.shape[dim]
    if size % group_size(group):
        raise ValueError(
            f"dimension {dim} of a {list(x.shape)} tensor is {size}: must be divisible by the {group_size(group)} "
            "tensor-parallel ranks that it is split over"
        )
    part = divide(size, group_size(group))
    return x.narrow(dim, group_rank(group) * part, part)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None, forward: _Move, backward: _Move) -> Tensor:
        ctx.group, ctx.backward_move = group, backward
        return forward(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backward_move(grad, ctx.group), None, None, None


class _SummedInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        assert x.is_contiguous(), "a copy would take the sum"
        # Should somebody have kept it for backward after all, autograd says so.
        ctx.mark_dirty(x)
        return all_reduce_sum(x, group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _move(x: Tensor, group: ProcessGroup | None, *, forward: _Move, backward: _Move) -> Tensor:
    group = group_or_existing(group)
    # One rank has both forms in one tensor: nothing to run, nothing for autograd to keep.
    if group_size(group) == 1:
        return x
    moved: Tensor = _Moved.apply(x, group, forward, backward)
    return moved


def _keep(x: Tensor, group: ProcessGroup | None) -> Tensor:
    # A view: autograd takes an input that is returned itself for one changed in place.
    return x.view_as(x)


def _all_reduce(x: Tensor, group: ProcessGroup | None) -> Tensor:
    # A copy, since the sum is taken in place and others may still read x.
    return all_reduce_sum(x.clone(memory_format=torch.contiguous_format), group).wait()


def _split_first(x: Tensor, group: ProcessGroup | None) -> Tensor:
    # A copy: a view would keep the whole sequence in memory for as long as anyone needs the part.
    return part_of(x, group, dim=0).clone()


def _gather_first(x: Tensor, group: ProcessGroup | None) -> Tensor:
    return all_gather_rows(x, group).wait()


def _reduce_scatter_first(x: Tensor, group: ProcessGroup | None) -> Tensor:
    return reduce_scatter_rows(x, group).wait()


def _split_last(x: Tensor, group: ProcessGroup | None) -> Tensor:
    return part_of(x, group, dim=-1).contiguous()


def _gather_last(x: Tensor, group: ProcessGroup | None) -> Tensor:
    ranks = group_size(group)
    # Ranks come first out of the collective and belong beside the last dimension.
    by_rank = all_gather_rows(x.unsqueeze(0), group).wait()  # [ranks, *, H / ranks]
    return by_rank.movedim(0, -2).reshape(*x.shape[:-1], ranks * x.shape[-1])
