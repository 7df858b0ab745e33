"""Hooks on the gradients that autograd accumulates on this rank, and detection of the end of a backward.

Users' hooks on reduced gradients are in grad_hooks.py.

ParamHooks calls its owner with each parameter whose gradient is accumulated; the owner processes the gradient.
BackwardEnd calls its owner at the end of a backward. OutermostBackward distinguishes a backward from backwards that
activation recomputation runs inside it. is_in_backward serves code that handles only forwards.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from megatron.core.device.torch_internals import (
    call_after_backward,
    current_autograd_node,
    current_backward_id,
    tree_leaves,
)


class ParamHooks:
    """Calls `on_grad` with each watched parameter whose gradient autograd has accumulated, until `release`.

    on_grad: a method, held by a weak reference; after its object is freed, the hooks do nothing. kept: an object that
    is kept alive as long as these hooks are registered.
    """

    def __init__(self, on_grad: Callable[[nn.Parameter], None], *, kept: object = None) -> None:
        self._on_grad, self._kept = weakref.WeakMethod(on_grad), kept
        self._handles: list[RemovableHandle] = []

    def watch(self, params: Iterable[nn.Parameter]) -> None:
        """Registers this object as a hook on each parameter."""
        # Hooks on the tensor, unlike hooks on its autograd node, survive a move of the parameter.
        self._handles += [param.register_post_accumulate_grad_hook(self) for param in params]

    def release(self) -> None:
        """Removes the hooks, so that gradients remain in `param.grad`."""
        for handle in self._handles:
            handle.remove()

    @property
    def is_in_use(self) -> bool:
        """Whether the object of `on_grad` still exists."""
        return self._on_grad() is not None

    def __call__(self, param: torch.Tensor) -> None:
        """Passes a parameter to `on_grad`; called by autograd."""
        on_grad = self._on_grad()
        if on_grad is not None:
            assert isinstance(param, nn.Parameter)
            on_grad(param)


def is_watched(param: nn.Parameter) -> bool:
    """Returns whether a parameter is watched by ParamHooks whose owner still exists."""
    hooks = (param._post_accumulate_grad_hooks or {}).values()
    return any(isinstance(hook, ParamHooks) and hook.is_in_use for hook in hooks)


# The end of a backward.


class BackwardEnd:
    """Calls `before` and then `then` once after each outermost backward in which `note` was called.

    [Note: inner backward] Activation recomputation runs a backward inside another, with its own callbacks. When these
    run, autograd is still evaluating a node of the outer backward. A hook on that node requeues the callback, so that
    it runs at the end of the outer backward.
    """

    def __init__(self, then: Callable[[], None], *, before: Callable[[], None]) -> None:
        self._then, self._before = then, before
        # Remains set after an error has ended a backward.
        self._is_open = False
        # The graph task that has a callback. A different task, nested or after an error, requires a separate callback.
        self._task: int | None = None

    def note(self) -> None:
        """Records that a backward is running; called in a hook of autograd."""
        self._is_open = True
        task = current_backward_id()
        if task != self._task:
            self._task = task
            self._call_back()

    def close(self) -> None:
        """Ends the recorded backward immediately, if there is one."""
        if self._is_open:
            self._is_open, self._task = False, None
            self._then()

    def forget(self) -> None:
        """Drops the recorded backward, so that `then` is not called for it."""
        self._is_open, self._task = False, None

    def _call_back(self, *unused: Any) -> None:
        call_after_backward(self._at_end)

    def _at_end(self) -> None:
        node = current_autograd_node()
        if node is None:
            if self._is_open:
                self._before()
            self.close()
        else:
            # See [Note: inner backward].
            node.register_hook(self._call_back)


class OutermostBackward:
    """Distinguishes the backward of a forward's outputs from backwards run by activation recomputation.

    Autograd identifies a backward only by a number, which a hook on the outputs records.
    """

    def __init__(self) -> None:
        self._task: int | None = None

    def watch(self, outputs: Any) -> None:
        """Registers hooks on the outputs of a forward: tensors of any shape and dtype, in any structure."""
        found = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if found:
            register_multi_grad_hook(found, self._note, mode="any")

    def is_here(self) -> bool:
        """Returns whether the running hook belongs to that backward; False if it has reached no watched output."""
        return current_backward_id() == self._task

    def _note(self, *unused: Any) -> None:
        self._task = current_backward_id()
