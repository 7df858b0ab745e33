"""Matrix products whose input gradients are summed over ranks while the weight's gradient is computed."""

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron.core.group_collectives import Pending, all_gather_rows, all_reduce_sum, reduce_scatter_rows
from megatron.core.parallel_state import group_or_existing
from megatron.core.process_groups_config import group_size
from megatron.core.tensor_parallel.weight_grads import LinearGrad, hand_over, has_grad_owner


def linear_with_grad_accumulation_and_async_allreduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    *,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """input W^T + bias; the input's gradient is summed over the group while the weight's is computed.

    input: [*, I], or under sequence_parallel this rank's [S / ranks, *, I]; weight: [O, I]; bias: [O] or None, all one
    float dtype. Returns [*, O], or [S, *, O]. allreduce_dgrad: sum the input's gradient; sequence_parallel sums it
    anyway and leaves each rank its part. Backward gathers the sequence once more instead of keeping it.
    tp_group: None is parallel_state's, see group_or_existing.
    gradient_accumulation_fusion: a weight's owner, if it has one, adds up its gradients itself (weight_grads.py).
    Under torch.autocast all are cast to its dtype first, as F.linear does; weights then have no owner.
    """
    tp_group = group_or_existing(tp_group)
    # Casts of autograd's own: the functions below then save, and multiply in backward, tensors of one dtype.
    input, weight, bias = autocast_input(input), autocast_input(weight), autocast_input(bias)
    fuses = gradient_accumulation_fusion and has_grad_owner(weight)
    output: Tensor
    if group_size(tp_group) > 1 and (allreduce_dgrad or sequence_parallel):
        output = _Linear.apply(input, weight, bias, fuses, sequence_parallel, tp_group)
    elif fuses:
        output = _OwnLinear.apply(input, weight, bias)
    else:
        output = F.linear(input, weight, bias)
    return output


_Given = TypeVar("_Given", Tensor, Tensor | None)


def autocast_input(tensor: _Given) -> _Given:
    """Casts an input of a matrix product, any shape and float dtype, as torch.autocast does where it is on: to its
    dtype, but for fp64.
    """
    if tensor is None or tensor.dtype == torch.float64:
        return tensor
    kind = tensor.device.type
    # torch knows no autocast on the meta device, and says so by an error.
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


class _OwnLinear(torch.autograd.Function):
    """The linear layer of one rank whose weight has a gradient owner. Supports double backward, as F.linear does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad.matmul(weight) if needs_x else None
        product = LinearGrad(rows, x.reshape(-1, x.shape[-1]))
        grad_weight = hand_over(ctx.weight, product, node=ctx.next_functions[1][0])
        return grad_x, grad_weight, rows.sum(dim=0) if needs_bias else None


class _Linear(torch.autograd.Function):
    """Under sequence parallelism the input is this rank's part and so is what is kept of it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, fuses: bool, gathers: bool, group: ProcessGroup | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gathers, ctx.group = gathers, group
        # The weight itself: what was saved may come back as another tensor.
        ctx.owned = weight if fuses else None
        return F.linear(_whole(x, ctx).wait(), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        # Started first: the ranks send while this one multiplies.
        whole = _whole(x, ctx) if needs_weight else Pending(x, None)
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            reduce = reduce_scatter_rows if ctx.gathers else all_reduce_sum
            grad_x = reduce(grad.matmul(weight), ctx.group)
        rows = grad.reshape(-1, grad.shape[-1])
        if needs_weight:
            product = LinearGrad(rows, whole.wait().reshape(-1, x.shape[-1]))
            own = ctx.owned
            grad_weight = product.compute() if own is None else hand_over(own, product, node=ctx.next_functions[1][0])
        if needs_bias:
            grad_bias = rows.sum(dim=0)
        return None if grad_x is None else grad_x.wait(), grad_weight, grad_bias, None, None, None


def _whole(x: Tensor, ctx: Any) -> Pending:
    return all_gather_rows(x, ctx.group) if ctx.gathers else Pending(x, None)
