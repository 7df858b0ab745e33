"""Linear functions that overlap the reduction of input gradients with the GEMM of the weight gradient."""

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.autograd import PlainFunction, first_order
from megatron.core.config_field import require_defaults
from megatron.core.group_collectives import Pending, all_gather_rows, all_reduce_sum, reduce_scatter_rows
from megatron.core.parallel_state import group_or_existing
from megatron.core.process_groups_config import group_size
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.weight_grads import LinearGrad, deliver, takes_products


def linear_with_grad_accumulation_and_async_allreduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    tp_group: ProcessGroup | None = None,
    gtp_remat_size: int = 1,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes input W^T + bias. Backward overlaps the input gradient's reduction with the weight gradient's GEMM.

    input: [*, I], or with sequence_parallel this rank's part, [S / ranks, *, I]; weight: [O, I]; bias: [O] or None, all
    of one float dtype. Returns [*, O], or with sequence_parallel [S, *, O].

    allreduce_dgrad: all-reduce the input's gradient. sequence_parallel: gather the input, and reduce-scatter its
    gradient. Backward gathers the input a second time instead of saving it. tp_group: None means the group of
    parallel_state, see group_or_existing. gradient_accumulation_fusion: pass the weight's gradient to its owner or
    queue, if it has one (weight_grads.py). Under torch.autocast, all tensors are first cast to the autocast dtype, as
    in F.linear, and neither is used. grad_output_buffer, wgrad_deferral_limit, gtp_remat_size, output_dtype: must have
    their defaults.
    """
    if grad_output_buffer is not None or wgrad_deferral_limit or gtp_remat_size != 1 or output_dtype is not None:
        _require_plain_product(grad_output_buffer, wgrad_deferral_limit, gtp_remat_size, output_dtype)
    tp_group = group_or_existing(tp_group)
    if is_autocast_on(input):
        # Autograd records these casts, so that the functions below save and multiply tensors of one dtype.
        input, weight, bias = autocast_input(input), autocast_input(weight), autocast_input(bias)
    fuses = gradient_accumulation_fusion and takes_products(weight)
    output: Tensor
    if group_size(tp_group) > 1 and (allreduce_dgrad or sequence_parallel):
        output = LinearWithGradAccumulationAndAsyncCommunication.apply(
            input, weight, bias, fuses, allreduce_dgrad, sequence_parallel, None, 0, tp_group, 1, None
        )
    elif fuses:
        output = _OwnLinear.apply(input, weight, bias)
    else:
        output = F.linear(input, weight, bias)
    return output


_Given = TypeVar("_Given", Tensor, Tensor | None)


def autocast_input(tensor: _Given) -> _Given:
    """Casts an operand of a GEMM as torch.autocast does: to the autocast dtype if enabled, except fp64.

    tensor: any shape and float dtype, or None.
    """
    if tensor is None or tensor.dtype == torch.float64 or not is_autocast_on(tensor):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def is_autocast_on(tensor: Tensor) -> bool:
    """Returns whether torch.autocast is enabled for the device of a tensor: any shape and dtype."""
    kind = tensor.device.type
    # torch raises an error for autocast on the meta device.
    return kind != "meta" and torch.is_autocast_enabled(kind)


class _OwnLinear(PlainFunction):
    """Linear function of a single rank for a weight with an owner or queue. Supports double backward, like F.linear."""

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
        grad_weight = deliver(ctx.weight, product, node=ctx.next_functions[1][0])
        return grad_x, grad_weight, rows.sum(dim=0) if needs_bias else None


class LinearWithGradAccumulationAndAsyncCommunication(PlainFunction):
    """Linear function over a tensor-parallel group. With sequence_parallel, saves only this rank's input."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[Tensor] | None,
        wgrad_deferral_limit: int | None,
        tp_group: ProcessGroup | None,
        gtp_remat_size: int,
        output_dtype: torch.dtype | None,
    ) -> Tensor:
        """Computes input W^T + bias. See linear_with_grad_accumulation_and_async_allreduce.

        input: [*, I]; weight: [O, I]; bias: [O] or None, one float dtype. Returns [*, O], same dtype. tp_group: None
        means this rank alone.
        """
        _require_plain_product(grad_output_buffer, wgrad_deferral_limit, gtp_remat_size, output_dtype)
        ctx.save_for_backward(input, weight)
        # None for a collective that the layer does not need.
        ctx.gather_group = tp_group if sequence_parallel else None
        ctx.sum_group = tp_group if allreduce_dgrad else None
        # The weight itself, because hooks on saved tensors may return a different tensor.
        ctx.owned = weight if gradient_accumulation_fusion else None
        return F.linear(all_gather_rows(input, ctx.gather_group).wait(), weight, bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients of input, weight and bias. grad_output: [*, O], the dtype of the input."""
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *others = ctx.needs_input_grad
        # Started first, so that the gather overlaps with the GEMM of the input's gradient.
        gathers = needs_weight and ctx.gather_group is not None
        whole = all_gather_rows(x, ctx.gather_group) if gathers else Pending(x, None)
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_whole = grad_output.matmul(weight)
            if ctx.gather_group is None:
                grad_x = all_reduce_sum(grad_whole, ctx.sum_group)
            else:
                grad_x = reduce_scatter_rows(grad_whole, ctx.gather_group)
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        if needs_weight:
            product = LinearGrad(rows, whole.wait().reshape(-1, x.shape[-1]))
            own = ctx.owned
            grad_weight = product.compute() if own is None else deliver(own, product, node=ctx.next_functions[1][0])
        if needs_bias:
            grad_bias = rows.sum(dim=0)
        return None if grad_x is None else grad_x.wait(), grad_weight, grad_bias, *(None for _ in others)


def linear_with_frozen_weight(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: ProcessGroup | None,
    grad_output_buffer: list[Tensor] | None = None,
    wgrad_deferral_limit: int | None = None,
    gtp_remat_size: int = 1,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes input W^T + bias for a frozen weight, so that backward need not save or gather the input.

    input: [*, I], or with sequence_parallel this rank's part, [S / ranks, *, I]; weight: [O, I]; bias: [O] or None, all
    of one float dtype. Returns [*, O], or with sequence_parallel [S, *, O], same dtype. The other arguments are as in
    linear_with_grad_accumulation_and_async_allreduce, except that gradient_accumulation_fusion has no effect.
    """
    _require_plain_product(grad_output_buffer, wgrad_deferral_limit or 0, gtp_remat_size, output_dtype)
    tp_group = group_or_existing(tp_group)
    input, weight, bias = autocast_input(input), autocast_input(weight), autocast_input(bias)
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)
        allreduce_dgrad = False  # the backward of the gather sums the gradient
    output: Tensor = LinearWithFrozenWeight.apply(input, weight, bias, allreduce_dgrad, tp_group, None)
    return output


class LinearWithFrozenWeight(PlainFunction):
    """Computes y = x W^T (+ b) without a gradient of the weight, so that the input need not be saved."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        tp_group: ProcessGroup | None,
        output_dtype: torch.dtype | None,
    ) -> Tensor:
        """Computes input W^T + bias. input: [*, I]; weight: [O, I]; bias: [O] or None, one float dtype. Returns [*, O].

        output_dtype: must be None.
        """
        _require_plain_product(None, 0, 1, output_dtype)
        ctx.save_for_backward(weight)
        ctx.sum_group = tp_group if allreduce_dgrad else None
        return F.linear(input, weight, bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients of input and bias. grad_output: [*, O], the dtype of the weight."""
        (weight,) = ctx.saved_tensors
        needs_x, _, needs_bias, *others = ctx.needs_input_grad
        grad_x = all_reduce_sum(grad_output.matmul(weight), ctx.sum_group).wait() if needs_x else None
        grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(dim=0) if needs_bias else None
        return grad_x, None, grad_bias, *(None for _ in others)


def _require_plain_product(
    grad_output_buffer: list[Tensor] | None,
    wgrad_deferral_limit: int | None,
    gtp_remat_size: int,
    output_dtype: torch.dtype | None,
) -> None:
    require_defaults(
        "a linear layer",
        "results have the dtype of the operands, and weight gradients are computed immediately, for whole weights",
        grad_output_buffer=(grad_output_buffer, None),
        wgrad_deferral_limit=(wgrad_deferral_limit, 0),
        gtp_remat_size=(gtp_remat_size, 1),
        output_dtype=(output_dtype, None),
    )
