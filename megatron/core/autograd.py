"""PlainFunction and first_order: torch's autograd Function and once_differentiable with fewer Python calls a use.

save_early saves the tensors of a Function before the Function's work. complete_backward and end_backward call functions
at the end of a backward.

A layer calls about a dozen Functions in each micro-batch. On a GPU the host must launch them faster than they run.

[Note: early saving] A Function's save_for_backward saves when the Function returns. A recomputed forward of
torch.utils.checkpoint only provides saved tensors, and torch ends it once the last one is saved: after all of the
Function's work. A long Function therefore passes its tensors to the active hooks on saved tensors itself, as soon as
they exist (`packed`), and the rest of its forward is skipped. Without hooks it saves them as usual. A hook returns
tensors without history, so the gradients of such a Function cannot be differentiated inside of hooks (first_order).

[Note: inner backward] Activation recomputation runs a backward inside another, with its own callbacks. When these run,
autograd is still evaluating a node of the outer backward. A hook on that node requeues the callback, so that it runs at
the end of the outer backward.
"""

from collections.abc import Callable, Collection
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.device.torch_internals import (
    active_hooks,
    call_after_backward,
    current_autograd_node,
    graph_is_kept,
)

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


class Packed(NamedTuple):
    """A tensor that hooks have saved. content: result of the pack hook. unpack: hook that turns it into the tensor."""

    content: Any
    unpack: Callable[[Any], Tensor]


def packed(*tensors: Tensor | None) -> list[Any]:
    """Passes tensors, any shape and dtype, to the active hooks; without hooks, returns the tensors themselves.

    See [Note: early saving]. The result is an argument of `unpacked`.
    """
    hooks = active_hooks()
    if hooks is None:
        return list(tensors)
    pack, unpack = hooks
    return [None if tensor is None else Packed(pack(tensor), unpack) for tensor in tensors]


def unpacked(saved: list[Any]) -> list[Any]:
    """Returns the tensors that were passed to `packed`, any shape and dtype, and None for None."""
    return [one.unpack(one.content) if type(one) is Packed else one for one in saved]


def save_early(ctx: Any, *tensors: Tensor | None) -> None:
    """Saves tensors, any shape and dtype, for the backward of a Function, immediately if hooks are active.

    Call it once, in forward, before the Function's work. See [Note: early saving].
    """
    ctx.packed = None  # None: saved by autograd; a list: by hooks; an empty list: freed
    if active_hooks() is None:
        ctx.save_for_backward(*tensors)
    else:
        ctx.packed = packed(*tensors)


def saved_early(ctx: Any) -> list[Any]:
    """Returns the tensors that save_early saved. Call it once in each backward.

    Raises RuntimeError in a second backward if the first did not retain the graph.
    """
    if ctx.packed is None:
        return list(ctx.saved_tensors)
    require_kept(ctx.packed)
    tensors = unpacked(ctx.packed)
    if not graph_is_kept():
        # torch frees what save_for_backward saved, but not attributes, which live as long as the loss.
        ctx.packed = []
    return tensors


def may_differentiate(ctx: Any) -> bool:
    """Returns whether a backward with create_graph can differentiate what save_early saved: not if hooks saved it."""
    return torch.is_grad_enabled() and ctx.packed is None


def require_kept(saved: Collection[Any]) -> None:
    """Raises RuntimeError if `saved`, at least one tensor of any shape and dtype, was freed by an earlier backward."""
    if not saved:
        raise RuntimeError(
            "backward of a function ran a second time, after the first freed its saved tensors: call the first "
            "backward with retain_graph=True"
        )


def complete_backward(then: Callable[[], None]) -> None:
    """Calls `then`, which may produce further gradients, at the end of the outermost running backward.

    Called in a backward, or by such a function. See [Note: inner backward].
    """

    def at_end() -> None:
        node = current_autograd_node()
        if node is None:
            then()
        else:
            node.register_hook(lambda *unused: call_after_backward(at_end))

    call_after_backward(at_end)


def end_backward(then: Callable[[], None]) -> None:
    """Calls `then` after all functions of complete_backward, when the outermost running backward has all gradients."""
    complete_backward(partial(call_after_backward, then))
