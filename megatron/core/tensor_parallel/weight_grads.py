"""Gradient accumulation fusion: GEMMs for weight gradients add directly to the accumulation buffer.

Layers pass the operands of the GEMM to `hand_over`. They do not depend on the wrapper that accumulates gradients.

[Note: gradient accumulation fusion] A wrapper that accumulates gradients in separate memory (main_grad) registers as
the owner of a weight's gradients. The backward of a layer then passes the owner a WeightGrad, the operands of a GEMM
that is still to be computed, and passes nothing to autograd. This avoids allocating, writing and reading a tensor of
the weight's size. The autograd hook of the weight still runs after all uses of the weight in this backward, with the
gradient of its remaining uses.

On a GPU the result of a half-precision GEMM is added to an fp32 main_grad in fp32, whereas autograd would first round
it to half precision. main_grad therefore receives up to 16 more correct bits. If the dtypes are equal, only the order
of scaling and adding differs, which affects the last digits. Deterministic mode uses no owner.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.core.autograd import PlainFunction


class WeightGrad(Protocol):
    """The gradient of one use of a weight, computed on demand."""

    def compute(self) -> Tensor:
        """Returns the gradient: [*weight shape], the weight's dtype."""
        ...

    def fits(self, out: Tensor) -> bool:
        """Returns whether add_to supports the dtype and device of `out`: [*weight shape], any float dtype."""
        ...

    def add_to(self, out: Tensor, *, scale: float, is_zero: bool) -> None:
        """Adds scale times the gradient to `out`: [*weight shape], a float dtype for which `fits` is True.

        is_zero: whether `out` contains only zeros, so that it may be overwritten.
        """
        ...


class GradOwner:
    """Accumulates the gradients of one weight.

    main_grad: accumulation buffer, [*weight shape]. take: called with each gradient; must add it before it returns.
    """

    def __init__(self, main_grad: Tensor, take: Callable[[WeightGrad], None]) -> None:
        self.main_grad, self.take = main_grad, take


def set_grad_owner(param: nn.Parameter, owner: GradOwner | None) -> None:
    """Sets the owner that accumulates a parameter's gradients. None leaves them to autograd."""
    vars(param).update(grad_owner=owner)


def has_grad_owner(weight: Tensor) -> bool:
    """Returns whether an owner accumulates the gradient of the current use of a weight: any shape and dtype."""
    return weight.requires_grad and _owner_of(weight) is not None and torch.is_grad_enabled()


def hand_over(weight: Tensor, grad: WeightGrad, *, node: Any) -> Tensor | None:
    """Passes a gradient to the weight's owner, or returns it for autograd. Called in backward.

    weight: the leaf itself, any shape and dtype. node: the autograd node that accumulates its gradient. The gradient is
    computed and returned if the weight has no owner or has a hook, if the dtypes are incompatible, or if
    torch.autograd.grad or create_graph requests it. Otherwise returns None.
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
    owner.take(grad)
    return None


@dataclass(frozen=True)
class LinearGrad:
    """WeightGrad of y = x W^T, where W is [O, I].

    rows: [N, O], gradient of y; x: [N, I], the same dtype.
    """

    rows: Tensor
    x: Tensor

    def compute(self) -> Tensor:
        """Returns the weight's gradient: [O, I], the dtype of rows and x."""
        return self.rows.t().matmul(self.x)

    def fits(self, out: Tensor) -> bool:
        """Returns whether `out`, [O, I], has the dtype of x, or is fp32 on a GPU with x in half precision."""
        return out.dtype == self.x.dtype or (out.dtype == torch.float32 and is_half_on_gpu(self.x))

    def add_to(self, out: Tensor, *, scale: float, is_zero: bool) -> None:
        """Adds scale times the gradient to `out`: [O, I], a supported dtype. is_zero: overwrite `out`."""
        # With beta 0, `out` is not read.
        beta = 0 if is_zero else 1
        if out.dtype == self.x.dtype:
            torch.addmm(out, self.rows.t(), self.x, beta=beta, alpha=scale, out=out)
        else:
            torch.ops.aten.addmm.dtype_out(out, self.rows.t(), self.x, out.dtype, beta=beta, alpha=scale, out=out)


def is_half_on_gpu(tensor: Tensor) -> bool:
    """Returns whether GEMMs of a tensor, any shape and dtype, can add to fp32 without rounding to half precision."""
    return tensor.device.type == "cuda" and tensor.dtype in (torch.bfloat16, torch.float16)


def look_up(ids: Tensor, weight: Tensor) -> Tensor:
    """Looks up embeddings. ids: [*], int64; weight: [V, H], any float dtype -> [*, H], same dtype."""
    if weight.device.type == "cpu" and has_grad_owner(weight):
        rows: Tensor = _LookUp.apply(ids, weight)
        return rows
    return nn.functional.embedding(ids, weight)


class _LookUp(PlainFunction):
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
    """WeightGrad of an embedding table, [V, H].

    grad: [*, H], gradient of the looked-up rows; ids: [*], their indices.
    """

    grad: Tensor
    ids: Tensor
    num_rows: int

    def compute(self) -> Tensor:
        return torch.ops.aten.embedding_dense_backward(self.grad, self.ids, self.num_rows, -1, False)

    def fits(self, out: Tensor) -> bool:
        # Rows are added token by token, which would round a narrow dtype each time.
        return out.dtype.itemsize >= 4

    def add_to(self, out: Tensor, *, scale: float, is_zero: bool) -> None:
        rows = self.grad.reshape(-1, out.shape[1]).to(out.dtype)
        out.index_add_(0, self.ids.reshape(-1), rows, alpha=scale)


def _owner_of(weight: Tensor) -> GradOwner | None:
    owner: GradOwner | None = weight.__dict__.get("grad_owner")
    return owner


def _adds_up(node: Any) -> bool:
    """Returns whether this backward accumulates into `.grad` of the leaf with that node.

    torch.autograd.grad does not, nor does backward with `inputs` that exclude the leaf.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # raised by torch for a leaf whose gradient torch.autograd.grad returns
        return False
