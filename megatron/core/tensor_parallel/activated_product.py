"""A linear function of an activation's result, act, which is not saved for backward.

Backward needs act only for the gradient of the weight, and recomputes it from the activation's input: a fused
activation writes act together with its gradient (gated_activation.py), and any other one is run once more. The result
is bit-identical to the forward's. A layer then saves 2F instead of 3F elements per row, F the width of act, or F
instead of 2F if the activation is not gated. Experts do the same in moe/expert_function.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.autograd import PlainFunction, first_order, may_differentiate, save_early, saved_early
from megatron.core.device.torch_internals import graph_is_kept
from megatron.core.fusions.gated_activation import GatedActivation
from megatron.core.tensor_parallel.weight_grads import LinearGrad, deliver


def activated_product(activation: GatedActivation, x: Tensor, scale: Tensor | None, weight: Tensor) -> Tensor:
    """Returns activation(x, scale) W^T: [*, O], x's dtype.

    x: [*, 2F], or [*, F] if the activation is not gated, float dtype; scale: [*], float dtype, or None; weight: W,
    [O, F], x's dtype. Saves x, scale and W for backward. The gradient of W goes to its owner, if it has one
    (weight_grads.py).
    """
    # A Function cannot see whether gradients are disabled around it.
    product: Tensor = _ActivatedProduct.apply(weight, x, scale, activation, torch.is_grad_enabled())
    return product


class _ActivatedProduct(PlainFunction):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, x: Tensor, scale: Tensor | None, activation: GatedActivation, is_recorded: bool
    ) -> Tensor:
        if is_recorded:
            save_early(ctx, x, scale, weight)
            # The leaf itself, because hooks on saved tensors may return a different tensor.
            ctx.activation, ctx.weight = activation, weight
        return F.linear(activation(x, scale), weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_gradients if may_differentiate(ctx) else _first_order_gradients)(ctx, grad)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, scale, weight = saved_early(ctx)
    needs_weight, needs_x, needs_scale, *_ = ctx.needs_input_grad
    found = ctx.activation.gradients(
        grad.matmul(weight) if needs_x or needs_scale else None,
        x,
        scale,
        None,
        needs=(needs_x, needs_scale),
        needs_act=needs_weight,
    )
    grad_weight = None
    if needs_weight:
        product = LinearGrad(grad.reshape(-1, grad.shape[-1]), found.act.reshape(-1, found.act.shape[-1]))
        grad_weight = deliver(ctx.weight, product, node=ctx.next_functions[0][0])
    if not graph_is_kept():
        ctx.weight = None  # a computed weight would live as long as the loss
    return grad_weight, found.gate_up, found.scale, None, None


_first_order_gradients = first_order(_gradients)
