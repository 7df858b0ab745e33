"""Fusion of weight gradients with their accumulation: a product is added to the accumulation buffer as it is computed.

Layers give the factors of the product to `hand_over`. The wrapper that accumulates is not known here.

[Note: gradient accumulation fusion] A wrapper that keeps gradients in memory of its own makes itself their owner. A
layer's backward then gives the owner a WeightGrad, the factors of a product that is still to be computed, and autograd
nothing: no tensor of the weight's size is allocated, written and read again. Autograd's hook of the weight runs all the
same, once every use of it in this backward is done, with whatever gradient its other uses left.

On a GPU a product of half-precision factors is added to an fp32 main_grad in fp32, where autograd would round it to
half precision first: main_grad then has up to 16 more correct bits of each product. Where dtypes are equal, only the
order of scaling and adding differs, and with it last digits. Deterministic mode uses no owner.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class WeightGrad(Protocol):
    """The gradient of one use of a weight, not computed yet."""

    def compute(self) -> Tensor:
        """The gradient: [*weight shape], the weight's dtype."""
        ...

    def fits(self, out: Tensor) -> bool:
        """Whether add_to can add to such a tensor: [*weight shape], any float dtype."""
        ...

    def add_to(self, out: Tensor, *, scale: float, is_zero: bool) -> None:
        """Adds scale times the gradient to `out`, [*weight shape], any float dtype that fits; is_zero: it holds zeros,
        and may be overwritten.
        """
        ...


class GradOwner:
    """Adds up the gradients of one weight.

    main_grad: where, [*weight shape]. take: is given the weight and each gradient, which it takes at once.
    """

    def __init__(self, main_grad: Tensor, take: Callable[[nn.Parameter, WeightGrad], None]) -> None:
        self.main_grad, self.take = main_grad, take


def set_grad_owner(param: nn.Parameter, owner: GradOwner | None) -> None:
    """Sets the object that accumulates a parameter's gradients, any shape and dtype; None: autograd alone."""
    vars(param).update(grad_owner=owner)


def has_grad_owner(weight: Tensor) -> bool:
    """Whether an owner accumulates the gradient of this use of a weight, any shape and dtype."""
    return torch.is_grad_enabled() and weight.requires_grad and _owner_of(weight) is not None


def hand_over(weight: Tensor, grad: WeightGrad, *, node: Any) -> Tensor | None:
    """Gives a gradient to the weight's owner in a backward and returns None, or computes it for autograd.

    weight: the leaf itself, any shape and dtype. node: where autograd would add its gradient up. Returns the gradient
    where nobody owns it, where it does not fit, and where someone asked autograd for it or has a hook on it.
    """
    owner = _owner_of(weight)
    if (
        owner is None
        or torch.is_grad_enabled()  # create_graph=True: the gradient itself must be differentiable
        or weight._backward_hooks
        or not grad.fits(owner.main_grad)
        or not _adds_up(node)
    ):
        return grad.compute()
    assert isinstance(weight, nn.Parameter)
    owner.take(weight, grad)
    return None


@dataclass(frozen=True)
class LinearGrad:
    """The WeightGrad of y = x W^T: rows, y's gradient [N, O], and x [N, I], one dtype; W is [O, I]."""

    rows: Tensor
    x: Tensor

    def compute(self) -> Tensor:
        """Returns the weight's gradient, [O, I], the dtype of both factors."""
        return self.rows.t().matmul(self.x)

    def fits(self, out: Tensor) -> bool:
        """Whether `out`, [O, I], has the dtype of both factors, or on a GPU fp32 where they are half precision."""
        return out.dtype == self.x.dtype or (out.dtype == torch.float32 and is_half_on_gpu(self.x))

    def add_to(self, out: Tensor, *, scale: float, is_zero: bool) -> None:
        """Adds scale times the gradient to `out`, [O, I], a dtype that fits; is_zero: overwrites it."""
        # beta is 0 for zeros, which are then not read.
        beta = 0 if is_zero else 1
        if out.dtype == self.x.dtype:
            torch.addmm(out, self.rows.t(), self.x, beta=beta, alpha=scale, out=out)
        else:
            torch.ops.aten.addmm.dtype_out(out, self.rows.t(), self.x, out.dtype, beta=beta, alpha=scale, out=out)


def is_half_on_gpu(tensor: Tensor) -> bool:
    """Whether products of a tensor, any shape and dtype, can be added to fp32 without a rounding to half precision."""
    return tensor.device.type == "cuda" and tensor.dtype in (torch.bfloat16, torch.float16)


def look_up(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of a table: ids [*], int64; weight [V, H], any float dtype -> [*, H], same dtype."""
    if weight.device.type == "cpu" and has_grad_owner(weight):
        rows: Tensor = _LookUp.apply(ids, weight)
        return rows
    return nn.functional.embedding(ids, weight)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        (ids,) = ctx.saved_tensors
        return None, hand_over(ctx.weight, _LookUpGrad(grad, ids, ctx.weight.shape[0]), node=ctx.next_functions[1][0])


@dataclass(frozen=True)
class _LookUpGrad:
    """The WeightGrad of an embedding table [V, H] of which rows `ids`, [*], were read: grad [*, H]."""

    grad: Tensor
    ids: Tensor
    num_rows: int

    def compute(self) -> Tensor:
        return torch.ops.aten.embedding_dense_backward(self.grad, self.ids, self.num_rows, -1, False)

    def fits(self, out: Tensor) -> bool:
        # Token by token: narrow types would round each time.
        return out.dtype.itemsize >= 4

    def add_to(self, out: Tensor, *, scale: float, is_zero: bool) -> None:
        rows = self.grad.reshape(-1, out.shape[1]).to(out.dtype)
        out.index_add_(0, self.ids.reshape(-1), rows, alpha=scale)


def _owner_of(weight: Tensor) -> GradOwner | None:
    owner: GradOwner | None = vars(weight).get("grad_owner")
    return owner


def _adds_up(node: Any) -> bool:
    """Whether this backward adds to `.grad` of the leaf with that node: torch.autograd.grad, and backward with other
    inputs, do not.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch's answer for a leaf whose gradient torch.autograd.grad returns
        return False
