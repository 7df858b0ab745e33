"""The way of a gradient from autograd to its bucket: hooks on parameters, accumulation, and the end of a backward.

GradIntake takes in persistent gradients, StreamingIntake gradients that are reduced in each backward; each belongs to a
wrapper. They pass a gradient to CollectiveScheduler.accumulate (scheduler.py), which accumulates it in its bucket
(bucket_storage.py), counts it, and launches the reductions that are then possible. In microbatches that only
accumulate, GradIntake accumulates it without the scheduler. Users' hooks on reduced gradients are in grad_hooks.py.

ParamHooks calls its owner with each parameter whose gradient is accumulated. BackwardEnd calls its owner at the end of
a backward. OutermostBackward distinguishes a backward from backwards that activation recomputation runs inside it.

Hooks on parameters do nothing while a WeightGradQueue holds products of the parameter, and the queue calls them later;
see [Note: held products] in weight_grads.py.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from megatron.core.autograd import end_backward
from megatron.core.device.torch_internals import current_backward_id, tree_leaves
from megatron.core.distributed.bucket_group import _ParamAndGradBucketGroup
from megatron.core.distributed.bucket_storage import PersistentGrads
from megatron.core.distributed.grad_hooks import GradHookRunner
from megatron.core.distributed.layout import ParamSlot
from megatron.core.distributed.scheduler import CollectiveScheduler
from megatron.core.distributed.turns import Turns
from megatron.core.tensor_parallel.param_attributes import clear_main_grad, mark_gradients_pass
from megatron.core.tensor_parallel.weight_grads import (
    DeferrableHook,
    GradOwner,
    WeightGrad,
    is_deferred,
    is_split,
    set_grad_owner,
)


@dataclass(slots=True)
class _Source:
    """A parameter whose gradients are taken in, and their destination.

    is_added: whether a kernel has added a gradient to main_grad since the last call of the parameter's hook.
    """

    group: _ParamAndGradBucketGroup
    grads: PersistentGrads
    slot: ParamSlot
    is_added: bool = False


class _IntakeHook(partial[None], DeferrableHook):
    """GradIntake._on_grad of one parameter."""


class GradIntake:
    """Takes in every gradient that autograd has accumulated, or that a kernel is about to add.

    In a backward whose gradients are reduced, the scheduler accumulates and counts them. Other backwards, such as those
    of all microbatches but the last, only accumulate, which is decided once for each backward
    (CollectiveScheduler.only_accumulates) and requires no other call per gradient.

    For persistent gradients; active until `release`. groups: the chunk's bucket groups. is_fused: whether kernels may
    add weight gradients directly to `param.main_grad`.
    """

    def __init__(
        self, groups: Sequence[_ParamAndGradBucketGroup], scheduler: CollectiveScheduler, *, is_fused: bool
    ) -> None:
        self._groups, self._scheduler = groups, scheduler
        # The graph task of the backward that produced the last gradient, and whether that backward only accumulates.
        self._task, self._only_accumulates = -1, False
        self._params = [slot.param for group in groups for slot in group.slots]
        self._handles: list[RemovableHandle] = []
        for group in groups:
            for bucket in group.buckets:
                assert isinstance(bucket.grads, PersistentGrads), "other gradients have a StreamingIntake"
                for slot in bucket.slots:
                    source = _Source(group, bucket.grads, slot)
                    owner = GradOwner(slot.main_grad, partial(self._add, source)) if is_fused else None
                    set_grad_owner(slot.param, owner)
                    # The hook keeps this object alive, because the parameter and its gradient may outlive the wrapper.
                    # Hooks on the tensor, unlike hooks on its autograd node, survive a move of the parameter.
                    hook = _IntakeHook(self._on_grad, source)
                    self._handles.append(slot.param.register_post_accumulate_grad_hook(hook))

    def release(self) -> None:
        """Removes the hooks, so that gradients remain in `param.grad`."""
        for handle in self._handles:
            handle.remove()
        _forget_owners(self._params)

    def _on_grad(self, source: _Source, param: torch.Tensor) -> None:
        if "grad_queue" in param.__dict__ and is_deferred(param):
            return
        is_added, source.is_added = source.is_added, False
        if current_backward_id() != self._task:
            self._begin_backward()
        if not self._only_accumulates:
            self._scheduler.accumulate(source.group, source.slot.param)
        elif param.grad is not None or not is_added:
            source.grads.accumulate_at(source.slot)

    def _add(self, source: _Source, new: WeightGrad) -> None:
        source.is_added = True
        if current_backward_id() != self._task:
            self._begin_backward()
        if self._only_accumulates:
            source.grads.add_at(source.slot, new)
        else:
            self._scheduler.add_gradient(source.group, source.slot.param, new=new)

    def _begin_backward(self) -> None:
        # Also called when a backward continues after activation recomputation has run another backward inside it.
        self._task = current_backward_id()
        self._only_accumulates = self._scheduler.only_accumulates(self._groups)


class StreamingIntake:
    """Passes every bucket-lifetime gradient, and the end of each backward pass, to the scheduler.

    releases: whether hooks and an optimizer receive buckets during backward.
    """

    def __init__(
        self,
        group_of: Mapping[nn.Parameter, _ParamAndGradBucketGroup],
        scheduler: CollectiveScheduler,
        *,
        hook_runner: GradHookRunner,
        releases: bool,
    ) -> None:
        self._group_of, self._scheduler, self._hook_runner = group_of, scheduler, hook_runner
        self._groups = list(dict.fromkeys(group_of.values()))
        self._releases = releases
        self._end, self._outermost = BackwardEnd(self._end_backward_pass, scheduler), OutermostBackward()
        for param in group_of:
            set_grad_owner(param, None)
            mark_gradients_pass(param)
        # The parameters keep this object alive, because they and their gradients may outlive the wrapper.
        self._hooks = ParamHooks(self._on_grad, on_deferred=self._note, kept=self)
        self._hooks.watch(group_of)

    def watch_backward_of(self, outputs: Any) -> None:
        """Registers hooks on the outputs of a forward, to tell their backward from backwards inside recomputation.

        outputs: tensors of any shape and dtype, in any structure.
        """
        if self._releases and not self._hook_runner.knows_counts:
            self._outermost.watch(outputs)

    def forget(self) -> None:
        """Drops the state of the backward pass in progress."""
        self._end.forget()

    def release(self) -> None:
        """Removes the hooks, so that gradients remain in `param.grad`."""
        self._hooks.release()
        _forget_owners(self._group_of)

    def _on_grad(self, param: nn.Parameter) -> None:
        group = self._group_of[param]
        if group.is_closed:
            # The next iteration then counts each parameter's gradients again, and releases nothing in backward.
            self._hook_runner.knows_counts = False
            raise RuntimeError(
                f"backward produced a gradient of {group.name_of(param)} after its bucket had been released to hooks "
                "and the optimizer (DistributedDataParallelConfig.release_gradients): wrap all backward passes of a "
                "step but the last in accumulate(). If a single backward pass produces several gradients of this "
                "parameter, call reset_iteration() and load a checkpoint, because parameters may have been updated "
                "already; the next iteration waits for all of them"
            )
        self._note(param)
        self._scheduler.accumulate(group, param)
        # The bucket stores a copy.
        param.grad = None

    def _note(self, param: nn.Parameter) -> None:
        """Records that the running backward has a gradient of a parameter, perhaps one that is computed later."""
        group = self._group_of[param]
        if group.is_last_microbatch:
            self._end.note()
            if self._releases and group.is_last_backward:
                self._hold_if_inside()

    def _hold_if_inside(self) -> None:
        # See [Note: several gradients].
        if not self._hook_runner.knows_counts and not self._outermost.is_here():
            for group in self._groups:
                group.hold()

    @torch.no_grad()
    def _end_backward_pass(self) -> None:
        self._scheduler.end_backward_pass(self._groups)
        self._hook_runner.end_backward()


def _forget_owners(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        clear_main_grad(param)
        set_grad_owner(param, None)


# Hooks on parameters.


class ParamHooks(DeferrableHook):
    """Calls `on_grad` with each watched parameter whose gradient is complete, until `release`.

    on_grad: a method, held by a weak reference; after its object is freed, the hooks do nothing. on_deferred: a method
    of the same object, called in the backward of a gradient that a WeightGradQueue completes before it ends. kept: an
    object that is kept alive as long as these hooks are registered.
    """

    def __init__(
        self,
        on_grad: Callable[[nn.Parameter], None],
        *,
        on_deferred: Callable[[nn.Parameter], None] | None = None,
        kept: object = None,
    ) -> None:
        self._on_grad, self._kept = weakref.WeakMethod(on_grad), kept
        self._on_deferred = None if on_deferred is None else weakref.WeakMethod(on_deferred)
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
        """Passes a parameter to `on_grad`; called by autograd, or by the queue that has completed the gradient."""
        method = self._on_grad
        if "grad_queue" in param.__dict__ and is_deferred(param):
            if self._on_deferred is None or is_split(param):
                return
            method = self._on_deferred
        call = method()
        if call is not None:
            assert isinstance(param, nn.Parameter)
            call(param)


def is_watched(param: nn.Parameter) -> bool:
    """Returns whether a parameter is watched by ParamHooks whose owner still exists."""
    hooks = (param._post_accumulate_grad_hooks or {}).values()
    return any(isinstance(hook, ParamHooks) and hook.is_in_use for hook in hooks)


# The end of a backward.


class BackwardEnd:
    """Calls `then` once after each outermost backward in which `note` was called, after earlier schedulers."""

    def __init__(self, then: Callable[[], None], scheduler: Turns) -> None:
        self._then, self._scheduler = then, scheduler
        scheduler.add_end(self.close)
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
            end_backward(self._at_end)

    def close(self) -> None:
        """Ends the recorded backward immediately, if there is one."""
        if self._is_open:
            self._is_open, self._task = False, None
            self._then()

    def forget(self) -> None:
        """Drops the recorded backward, so that `then` is not called for it."""
        self._is_open, self._task = False, None

    def _at_end(self) -> None:
        if self._is_open:
            self._scheduler.end_earlier()
        self.close()


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
