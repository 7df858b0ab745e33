"""PlainFunction and first_order: torch's autograd Function and once_differentiable with fewer Python calls a use.

A layer calls about a dozen Functions in each micro-batch. On a GPU the host must launch them faster than they run.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable

_Backward = Callable[..., Any]


class PlainFunction(torch.autograd.Function):
    """A Function whose `apply` is implemented in C, without the Python code for setup_context and for torch.func.

    A subclass defines forward(ctx, *args) and backward(ctx, *grads). Under the transforms of torch.func (vmap, grad),
    torch refuses it with an error. Arguments are passed by position.
    """

    # torch.autograd.Function.apply calls this method of its C base class after about ten calls of its own.
    apply = torch._C._FunctionBase.__dict__["apply"]


def first_order(backward: _Backward) -> _Backward:
    """Decorates a backward whose result cannot be differentiated again.

    In a backward with create_graph=True, the results are torch's once_differentiable results, which raise an error when
    they are differentiated. In all other backwards autograd records nothing, so `backward` is called directly, without
    torch.no_grad.
    """
    refusing = once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        return refusing(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return run
