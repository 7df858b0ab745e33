"""Linear functions of an activation's result, act, which is not saved for backward.

Backward needs act only for the gradients of the weights. It computes act again, from tensors that the gradient of the
activation reads anyway: a fused activation writes act beside this gradient (gated_activation.py), and any other one
runs again. Both have the bits of the forward. Of 2F + F numbers per row, F the width of act, a layer then saves 2F, or
F of F + F if the activation is not gated.

A Product is the linear function: that of a dense layer, LinearProduct, or of experts, in moe/grouped_gemm.py.

[Note: early stop] A recomputed forward only provides saved tensors, and torch ends it once the last one is saved. A
function saves its tensors when it returns, which would be after the products. In a recomputed forward, another function
therefore saves them first.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.autograd import PlainFunction
from megatron.core.fusions.gated_activation import GatedActivation, activation_gradients
from megatron.core.tensor_parallel.random import is_recomputing
from megatron.core.tensor_parallel.weight_grads import LinearGrad, WeightGrad, hand_over


class Product(Protocol):
    """A linear function of rows, for any weight. offsets: [e], int32: end of each expert's rows; None if dense."""

    def multiply(self, rows: Tensor, weight: Tensor, offsets: Tensor | None) -> Tensor:
        """Returns the product of rows, [*, F], and a weight: [*, O]. All have the same float dtype."""
        ...

    def input_grad(self, grad: Tensor, weight: Tensor, offsets: Tensor | None) -> Tensor:
        """Returns the gradient of rows, [*, F]. grad: that of the product, [*, O], same dtype."""
        ...

    def weight_grad(self, rows: Tensor, grad: Tensor, offsets: Tensor | None, *, weight: Tensor) -> WeightGrad:
        """Returns the gradient of a weight. rows: [*, F], and grad: [*, O], same float dtype."""
        ...


class LinearProduct:
    """The Product rows W^T, with W of shape [O, F]."""

    def multiply(self, rows: Tensor, weight: Tensor, offsets: Tensor | None) -> Tensor:
        """Returns rows W^T: [*, O]. rows: [*, F], float dtype."""
        return F.linear(rows, weight)

    def input_grad(self, grad: Tensor, weight: Tensor, offsets: Tensor | None) -> Tensor:
        """Returns grad W: [*, F]. grad: [*, O], float dtype."""
        return grad.matmul(weight)

    def weight_grad(self, rows: Tensor, grad: Tensor, offsets: Tensor | None, *, weight: Tensor) -> WeightGrad:
        """Returns the gradient of W, to be computed on demand. rows: [*, F]; grad: [*, O], same float dtype."""
        return LinearGrad(grad.reshape(-1, grad.shape[-1]), rows.reshape(-1, rows.shape[-1]))


@dataclass(frozen=True, slots=True)
class _Settings:
    activation: GatedActivation
    product: Product


def activated_products(
    activation: GatedActivation,
    x: Tensor,
    scale: Tensor | None,
    weights: Sequence[Tensor],
    *,
    product: Product,
    offsets: Tensor | None = None,
    num_rows: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Multiplies act = activation(x, scale) with each of the weights. Returns the products, [*, O] each, x's dtype.

    x: [*, 2F] or [*, F], float dtype; scale: [*], float dtype, or None; weights: x's dtype. offsets: see Product.
    num_rows: [1], int64, see `activate`; requires an activation with a name. Saves x, scale and the weights for
    backward. Weight gradients go to the weights' owners, if they have any (weight_grads.py).
    """
    others = (*weights, scale, num_rows, offsets)
    saved = None
    if is_recomputing() and torch.is_grad_enabled():
        # See [Note: early stop].
        x = _SavedFirst.apply(x, *others)
        saved = x.grad_fn
    products: tuple[Tensor, ...] = _ActivatedProducts.apply(_Settings(activation, product), saved, x, *others)
    return products


class _SavedFirst(PlainFunction):
    """Saves the arguments of _ActivatedProducts and returns x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *others)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        return grad, *(None for _ in ctx.needs_input_grad[1:])


class _ActivatedProducts(PlainFunction):
    """saved: the autograd node of _SavedFirst, or None. The weights follow x, since `next_functions` lists tensors."""

    @staticmethod
    def forward(ctx: Any, settings: _Settings, saved: Any, x: Tensor, *others: Any) -> tuple[Tensor, ...]:
        *weights, scale, num_rows, offsets = others
        if saved is None:
            ctx.save_for_backward(x, *others)
        # The leaves themselves, because hooks on saved tensors may return different tensors.
        ctx.settings, ctx.saved, ctx.weights = settings, saved, weights
        act = settings.activation(x, scale, num_rows)
        return tuple(settings.product.multiply(act, weight, offsets) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights, scale, num_rows, offsets = (ctx if ctx.saved is None else ctx.saved).saved_tensors
        activation, product = ctx.settings.activation, ctx.settings.product
        needs = ctx.needs_input_grad[2:] if ctx.saved is None else ctx.saved.needs_input_grad
        needs_x, *needs_weights, needs_scale, _, _ = needs
        grad_act = None
        if needs_x or needs_scale:
            grad_act = _sum(product.input_grad(grad, weight, offsets) for grad, weight in zip(grads, weights))
        form = activation.fused_form(x, num_rows)
        if grad_act is None or form is None or torch.is_grad_enabled():
            act, grad_x, grad_scale = _run_again(activation, x, scale, num_rows, grad_act, needs=(needs_x, needs_scale))
        else:
            found = activation_gradients(
                grad_act,
                x,
                scale=scale,
                num_rows=num_rows,
                form=form,
                needs_scale=needs_scale,
                needs_act=any(needs_weights),
            )
            grad_x, grad_scale, act = found.gate_up, found.scale, found.act
        # Freed before the weight gradients are allocated.
        del grad_act
        grad_weights: list[Tensor | None] = []
        for weight, grad, needed, (node, _) in zip(ctx.weights, grads, needs_weights, ctx.next_functions[1:]):
            if needed:
                product_grad = product.weight_grad(act, grad, offsets, weight=weight)
            grad_weights.append(hand_over(weight, product_grad, node=node) if needed else None)
        return None, None, grad_x, *grad_weights, grad_scale, None, None


def _run_again(
    activation: GatedActivation,
    x: Tensor,
    scale: Tensor | None,
    num_rows: Tensor | None,
    grad: Tensor | None,
    *,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Runs an activation again; returns its result, and the gradients of x and scale as far as `needs` requests them.

    With grad mode, which is a backward with create_graph, all results can be differentiated further.
    """
    is_differentiable = torch.is_grad_enabled()
    if not is_differentiable:
        x = x.detach().requires_grad_(needs[0])
        scale = None if scale is None else scale.detach().requires_grad_(needs[1])
    with torch.enable_grad():
        act = activation(x, scale, num_rows)
    inputs = [one for one, needed in zip((x, scale), needs) if needed]
    found = iter(torch.autograd.grad(act, inputs, grad, create_graph=is_differentiable) if inputs else ())
    grad_x, grad_scale = (next(found) if needed else None for needed in needs)
    return act if is_differentiable else act.detach(), grad_x, grad_scale


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    first, *others = tensors
    return functools.reduce(torch.add, others, first)
