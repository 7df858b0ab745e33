"""Differentiable conversions between whole activations and their parts on the ranks of a tensor-parallel group.

[Note: conjugates] The backward of each function is the forward of a different one: copy and all-reduce, split and
gather of the last dimension, gather and reduce-scatter of the first dimension (the sequence). The backward of a gather
depends on the computation that follows. If every rank continues with a share of the work, its gradient is a partial sum
and must be reduced. If all ranks compute the same, the gradient is already complete and is only split.

A group of None means the tensor-parallel group of parallel_state, see group_or_existing. With one rank nothing is sent.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.autograd import PlainFunction, first_order
from megatron.core.config_field import require_defaults
from megatron.core.group_collectives import all_gather_rows, all_reduce_sum, arriving, reduce_scatter_rows
from megatron.core.parallel_state import group_or_existing
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.utils import divide

# (x, group) -> the converted x; any float dtype, not in place.
_Move = Callable[[Tensor, ProcessGroup | None], Tensor]


def copy_to_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Returns the input, [*], any float dtype, unchanged. Backward sums the gradient over the ranks."""
    return _move(input_, group, forward=_keep, backward=_all_reduce)


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sums the inputs of all ranks: [*], any float dtype. Backward passes the gradient on unchanged."""
    return _move(input_, group, forward=_all_reduce, backward=_keep)


def reduce_from_tensor_model_parallel_region_(own: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sums the inputs of all ranks in place. own: any shape and float dtype, contiguous, not used elsewhere."""
    if group_size(group) == 1:
        return own
    total: Tensor = _SummedInPlace.apply(own, group)
    return total


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Returns this rank's part of the last dimension: [*, H], any float dtype -> [*, H / ranks].

    Backward gathers the gradient.
    """
    return _move(input_, group, forward=_split_last, backward=_gather_last)


def gather_from_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Gathers the last dimension from all ranks: [*, H / ranks], any float dtype -> [*, H].

    Backward splits the gradient.
    """
    return _move(input_, group, forward=_gather_last, backward=_split_last)


def scatter_to_sequence_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Returns this rank's part of the sequence: [S, *], any float dtype -> [S / ranks, *].

    Backward gathers the gradient.
    """
    return _move(input_, group, forward=_split_first, backward=_gather_first)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: ProcessGroup | None = None,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Gathers the whole sequence: [S / ranks, *], any float dtype -> [S, *].

    tensor_parallel_output_grad: True if ranks continue with shares of the work, so that backward reduce-scatters
    gradients; False if all ranks compute the same, so that backward only splits them. See [Note: conjugates].
    output_split_sizes: number of rows of each rank, if they differ. use_global_buffer: must be False.
    """
    if use_global_buffer:
        _refuse_global_buffer("gather_from_sequence_parallel_region")
    gather, scatter, split = _moves_of_rows(output_split_sizes, group)
    return _move(input_, group, forward=gather, backward=scatter if tensor_parallel_output_grad else split)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: ProcessGroup | None = None,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Sums the inputs of all ranks and returns this rank's part of the sequence: [S, *], any dtype -> [S / ranks, *].

    Backward gathers the gradient. input_split_sizes: number of rows of each rank, if they differ. use_global_buffer:
    must be False.
    """
    if use_global_buffer:
        _refuse_global_buffer("reduce_scatter_to_sequence_parallel_region")
    gather, scatter, _ = _moves_of_rows(input_split_sizes, group)
    return _move(input_, group, forward=scatter, backward=gather)


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Gathers the last dimension from all ranks: [*, H / ranks], any float dtype -> [*, H].

    Backward reduce-scatters the gradient.
    """
    return _move(input_, group, forward=_gather_last, backward=_reduce_scatter_last)


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sums the inputs of all ranks and returns this rank's columns: [*, H] -> [*, H / ranks], any float dtype.

    Backward gathers the gradient.
    """
    return _move(input_, group, forward=_reduce_scatter_last, backward=_gather_last)


def all_to_all(
    group: ProcessGroup | None,
    input_: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    use_nccl_stream: bool = False,
) -> Tensor:
    """Sends rows of [N, *], any float dtype, to each rank, and returns the received rows in rank order: [M, *].

    output_split_sizes_, input_split_sizes: number of rows received from and sent to each rank; None means equal
    numbers. Backward sends gradients back to the senders of the rows. use_nccl_stream: must be False.
    """
    why = "transfers run on the stream of their process group"
    require_defaults("all_to_all", why, use_nccl_stream=(use_nccl_stream, False))
    arriving_rows, leaving_rows = (None if s is None else list(s) for s in (output_split_sizes_, input_split_sizes))
    return _move(
        input_,
        group,
        forward=partial(_exchange, receive=arriving_rows, send=leaving_rows),
        backward=partial(_exchange, receive=leaving_rows, send=arriving_rows),
    )


def all_to_all_sp2hp(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Gathers tokens and splits columns by an all-to-all: [T / ranks, H] -> [T, H / ranks], any float dtype.

    All dimensions before the last are flattened to tokens.
    """
    group = group_or_existing(group)
    rows = input_.reshape(-1, input_.shape[-1])
    columns = divide(rows.shape[-1], group_size(group))
    # Rank r receives its columns of this rank's tokens.
    by_rank = rows.unflatten(-1, (-1, columns)).movedim(1, 0).reshape(-1, columns)
    return all_to_all(group, by_rank)


def all_to_all_hp2sp(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Inverts all_to_all_sp2hp: [T, H / ranks] -> [T / ranks, H], any float dtype."""
    group = group_or_existing(group)
    rows = all_to_all(group, input_.reshape(-1, input_.shape[-1]))
    return rows.unflatten(0, (group_size(group), -1)).movedim(0, 1).flatten(1)


def part_of(x: Tensor, group: ProcessGroup | None, *, dim: int) -> Tensor:
    """Returns a view of this rank's part of a replicated tensor, split evenly in rank order along `dim`.

    x: any shape and dtype. Raises ValueError if the dimension is not divisible by the number of ranks.
    """
    size = x.shape[dim]
    if size % group_size(group):
        raise ValueError(
            f"dimension {dim} of a {list(x.shape)} tensor is {size}: must be divisible by the {group_size(group)} "
            "tensor-parallel ranks over which it is split"
        )
    part = divide(size, group_size(group))
    return x.narrow(dim, group_rank(group) * part, part)


class _Moved(PlainFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None, forward: _Move, backward: _Move) -> Tensor:
        ctx.group, ctx.backward_move = group, backward
        return forward(x, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backward_move(grad, ctx.group), None, None, None


class _SummedInPlace(PlainFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        assert x.is_contiguous(), "the sum must not be written to a copy"
        # If the tensor was saved for backward despite the contract, autograd raises an error.
        ctx.mark_dirty(x)
        return all_reduce_sum(x, group).wait()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _move(x: Tensor, group: ProcessGroup | None, *, forward: _Move, backward: _Move) -> Tensor:
    group = group_or_existing(group)
    # With one rank the conversion is the identity, and autograd need not record it.
    if group_size(group) == 1:
        return x
    moved: Tensor = _Moved.apply(x, group, forward, backward)
    return moved


def _keep(x: Tensor, group: ProcessGroup | None) -> Tensor:
    # A view, because autograd treats a returned input as modified in place.
    return x.view_as(x)


def _all_reduce(x: Tensor, group: ProcessGroup | None) -> Tensor:
    # A copy, because the sum is computed in place and x may still be read elsewhere.
    return all_reduce_sum(x.clone(memory_format=torch.contiguous_format), group).wait()


def _split_first(x: Tensor, group: ProcessGroup | None) -> Tensor:
    # A copy, because a view would keep the whole sequence in memory as long as the part is used.
    return part_of(x, group, dim=0).clone()


def _gather_first(x: Tensor, group: ProcessGroup | None) -> Tensor:
    return all_gather_rows(x, group).wait()


def _reduce_scatter_first(x: Tensor, group: ProcessGroup | None) -> Tensor:
    return reduce_scatter_rows(x, group).wait()


def _split_last(x: Tensor, group: ProcessGroup | None) -> Tensor:
    return part_of(x, group, dim=-1).contiguous()


def _gather_last(x: Tensor, group: ProcessGroup | None) -> Tensor:
    ranks = group_size(group)
    # The collective returns the ranks as the first dimension. They must be merged into the last dimension.
    by_rank = all_gather_rows(x.unsqueeze(0), group).wait()  # [ranks, *, H / ranks]
    return by_rank.movedim(0, -2).reshape(*x.shape[:-1], ranks * x.shape[-1])


def _reduce_scatter_last(x: Tensor, group: ProcessGroup | None) -> Tensor:
    # The collective expects ranks as the first dimension.
    by_rank = x.unflatten(-1, (group_size(group), -1)).movedim(-2, 0)
    return reduce_scatter_rows(by_rank, group).wait().squeeze(0)


def _exchange(x: Tensor, group: ProcessGroup | None, *, receive: list[int] | None, send: list[int] | None) -> Tensor:
    rows = x.shape[0] if receive is None else sum(receive)
    received = arriving((rows, *x.shape[1:]), group, dtype=x.dtype, device=x.device)
    dist.all_to_all_single(received, x.contiguous(), receive, send, group=group)
    return received


def _moves_of_rows(sizes: Sequence[int] | None, group: ProcessGroup | None) -> tuple[_Move, _Move, _Move]:
    """Returns gather, reduce-scatter and split of the first dimension.

    sizes: number of rows of each rank; None if all are equal.
    """
    if sizes is None:
        return _gather_first, _reduce_scatter_first, _split_first
    ranks = group_size(group_or_existing(group))
    if len(sizes) != ranks:
        raise ValueError(f"the sizes of a split are {list(sizes)}: must be one for each of the {ranks} ranks")
    # A tuple, which the caller cannot change before backward.
    uneven = (partial(move, sizes=tuple(sizes)) for move in (_gather_uneven, _reduce_scatter_uneven, _split_uneven))
    return next(uneven), next(uneven), next(uneven)


def _gather_uneven(x: Tensor, group: ProcessGroup | None, *, sizes: tuple[int, ...]) -> Tensor:
    # torch's collectives require parts of equal size, so shorter parts are padded.
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: x.shape[0]] = x
    parts = all_gather_rows(padded, group).wait().split(max(sizes))
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatter_uneven(x: Tensor, group: ProcessGroup | None, *, sizes: tuple[int, ...]) -> Tensor:
    padded = x.new_zeros(len(sizes), max(sizes), *x.shape[1:])
    for target, part in zip(padded, x.split(list(sizes)), strict=True):
        target[: part.shape[0]] = part
    return reduce_scatter_rows(padded.flatten(0, 1), group).wait()[: sizes[group_rank(group)]]


def _split_uneven(x: Tensor, group: ProcessGroup | None, *, sizes: tuple[int, ...]) -> Tensor:
    return x.split(list(sizes))[group_rank(group)].clone()


def _refuse_global_buffer(call: str) -> NoReturn:
    raise ValueError(f"{call}: use_global_buffer is True: must be False, because results are always newly allocated")
