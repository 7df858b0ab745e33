"""Matrix products whose input gradients are summed over ranks while the weight's gradient is computed."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron.core.group_collectives import Pending, all_gather_rows, all_reduce_sum, reduce_scatter_rows
from megatron.core.parallel_state import group_or_existing
from megatron.core.process_groups_config import group_size


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
    Raises ValueError for gradient_accumulation_fusion: gradients are added up by the data-parallel wrapper.
    """
    if gradient_accumulation_fusion:
        raise ValueError(
            "gradient_accumulation_fusion is True: gradients are accumulated by the wrapper, must be False"
        )
    tp_group = group_or_existing(tp_group)
    if group_size(tp_group) == 1 or not (allreduce_dgrad or sequence_parallel):
        return F.linear(input, weight, bias)
    output: Tensor = _Linear.apply(input, weight, bias, sequence_parallel, tp_group)
    return output


class _Linear(torch.autograd.Function):
    """Under sequence parallelism the input is this rank's part and so is what is kept of it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gathers: bool, group: ProcessGroup | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gathers, ctx.group = gathers, group
        return F.linear(_whole(x, ctx).wait(), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _, _ = ctx.needs_input_grad
        # Started first: the ranks send while this one multiplies.
        whole = _whole(x, ctx) if needs_weight else Pending(x, None)
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            reduce = reduce_scatter_rows if ctx.gathers else all_reduce_sum
            grad_x = reduce(grad.matmul(weight), ctx.group)
        rows = grad.reshape(-1, grad.shape[-1])
        if needs_weight:
            grad_weight = rows.t().matmul(whole.wait().reshape(-1, x.shape[-1]))
        if needs_bias:
            grad_bias = rows.sum(dim=0)
        return None if grad_x is None else grad_x.wait(), grad_weight, grad_bias, None, None


def _whole(x: Tensor, ctx: Any) -> Pending:
    return all_gather_rows(x, ctx.group) if ctx.gathers else Pending(x, None)
