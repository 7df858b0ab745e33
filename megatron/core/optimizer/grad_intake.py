"""GradIntake: takes the gradients that autograd leaves in param.grad, and tells when a backward is over.

Which buckets they go to is sharded_params.py's, when these are sent the launch order's.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.launch_order import LaunchOrder
from megatron.core.optimizer.grad_stand_in import UNSEEN, GradStandIn, KeptGrad
from megatron.core.optimizer.shard_scaling import ShardScaling
from megatron.core.optimizer.sharded_params import ShardedParams
from megatron.core.tensor_parallel.param_attributes import is_wrapped


class GradMode(Enum):
    """How new gradients are treated. COPY: they go to their buckets, but nothing is sent; KEEP: they stay as
    they are.
    """

    SYNC = "sync"
    COPY = "copy"
    KEEP = "keep"


class _Sums(Enum):
    """Whether the shards hold the sums of all that has come. STEPPED: and an update has used them. BROKEN_OFF: another
    rank has ended the iteration.
    """

    GROWING = "growing"
    WHOLE = "whole"
    STEPPED = "stepped"
    BROKEN_OFF = "broken off"


class _AfterGrad:
    """A hook behind a gradient; weakly, as a parameter must not keep an optimizer alive that nobody uses any more."""

    def __init__(self, intake: "GradIntake") -> None:
        self.intake = weakref.ref(intake)

    def __call__(self, param: torch.Tensor) -> None:
        intake = self.intake()
        if intake is not None:
            assert isinstance(param, nn.Parameter)
            intake.gradient_came(param)


def _no_passes(num_backwards: int) -> None:
    """Launches nothing: the optimizer is gone."""


def check_free(name: str, param: nn.Parameter) -> None:
    """Raises ValueError for a parameter, any shape and dtype, whose gradients somebody else takes."""
    if is_wrapped(param):
        raise ValueError(f"{name} is in a DistributedDataParallel: call its release(), or leave out the wrapper")
    if _has_intake(param):
        # One that is out of use, and was not collected yet.
        gc.collect()
        if _has_intake(param):
            raise ValueError(f"{name} is in another DistributedFusedAdam: must be in one, so call release() of that")


def _has_own_grad(param: nn.Parameter) -> bool:
    return param.grad is not None and not isinstance(param.grad, GradStandIn)


def _has_intake(param: nn.Parameter) -> bool:
    hooks = (param._post_accumulate_grad_hooks or {}).values()
    return any(isinstance(hook, _AfterGrad) and hook.intake() is not None for hook in hooks)


class GradIntake:
    """Gradients of parameters that were not taken over wait in param.grad for the end of their backward; then these
    parameters are, whichever ranks have gradients of them.
    """

    def __init__(
        self,
        params: ShardedParams,
        order: LaunchOrder,
        *,
        scaling: ShardScaling,
        overlap: bool,
    ) -> None:
        self._params, self._order, self._scaling, self._overlap = params, order, scaling, overlap
        self._mode = GradMode.SYNC
        self._pass = order.backward_end(self._end_pass)
        make_up = weakref.WeakMethod(self._make_up)
        # Weakly, as the order is registered with others, which must not keep an optimizer alive.
        order.make_up = lambda num_backwards: (make_up() or _no_passes)(num_backwards)
        self._handles: list[Any] = []
        self._sums = _Sums.GROWING
        # Passes that have ended since sums were last whole, or forgotten.
        self._num_passes = 0
        # Whether somebody has asked, since zero_grad, if what is reduced is finite.
        self.is_checked = False
        # The parameter that has the stand-in, and whether it was put there and not taken away.
        self._holder: nn.Parameter | None = None
        self._stands = False

    def watch(self, param: nn.Parameter) -> None:
        """Registers a hook on the gradients of a parameter."""
        self._handles.append(param.register_post_accumulate_grad_hook(_AfterGrad(self)))
        # torch's scalers unscale no gradients of fp16.
        if self._holder is None or (self._holder.dtype == torch.float16 and param.dtype != torch.float16):
            self._holder = param

    def release(self) -> None:
        """Gradients stay where autograd leaves them."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def mode(self, mode: GradMode) -> Iterator[None]:
        """Sets how gradients are treated inside the block."""
        before = self._mode
        self._set_mode(mode)
        try:
            yield
        finally:
            self._set_mode(before)

    def gradient_came(self, param: nn.Parameter) -> None:
        """A hook: autograd has left a gradient."""
        if self._mode is GradMode.KEEP:
            return
        if self._mode is GradMode.SYNC:
            self._order.open()
            self._pass.note()
        self._notice_changes()
        if param in self._params.groups_of:
            self._take(param)
        else:
            self._params.note_arrival(param)

    def grad_added(self, param: nn.Parameter) -> None:
        """Records, inside a backward, that a kernel has written a gradient to its persistent memory."""
        self._go_on()
        for group in self._params.groups_of[param]:
            group.note_added(param)
            self._order.gradient_ready(group, param)
        if self._mode is GradMode.SYNC:
            self._pass.note()

    def unscale_reduced(self, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        """Unscales the reduced gradients for a GradScaler; found_inf, inv_scale: [], fp32."""
        self.check_none_left()
        self.unscale(found_inf, inv_scale)

    def unscale(self, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        """Multiplies all gradients by inv_scale, [] fp32; see ReducedGrads for found_inf, [] fp32. Collective."""
        self.finish()
        found_inf.copy_(torch.maximum(found_inf, self.any_not_finite()))
        self._scaling.divide(1.0 / inv_scale.to(found_inf.device).double())

    def any_not_finite(self) -> torch.Tensor:
        """Returns 1 if any reduced gradient of any rank is not finite, else 0: [], fp32. Collective."""
        self.is_checked = True
        return self._scaling.any_not_finite(self._params.sums)

    def reset(self, num_backwards: int) -> None:
        """Tells the other ranks that this one has aborted the iteration; see DistributedFusedAdam.reset_iteration."""
        self._pass.forget()
        self._order.num_backwards = num_backwards
        self._order.catch_up_earlier()
        if self._sums is _Sums.STEPPED:
            self._go_on()
        if self._sums is _Sums.GROWING:
            self._make_up(num_backwards)
            self._params.take_over_rest()
        self._order.reset()
        self.forget()

    def _make_up(self, num_backwards: int) -> None:
        """Launches what the other ranks launch before they hear of an error."""
        while self._sums is _Sums.GROWING and self._num_passes < num_backwards:
            self._end_pass()

    def forget(self) -> None:
        """All gradients are gone. Collective only after an error in a backward."""
        self._stands = False
        self._order.begin_iteration(self)
        self._pass.forget()
        self._params.forget_arrivals()
        self._sums, self._num_passes, self.is_checked = _Sums.GROWING, 0, False
        self._scaling.reset()
        for param in self._params.names:
            param.grad = None

    def finish(self) -> None:
        """Lets the shards hold the sums of all that there is. Collective."""
        self._notice_changes()
        # An error may have broken a backward off.
        self._pass.close()
        self._params.take_over_rest()
        # Ranks may have other ones: what they all launch is agreed on in the end.
        with self.mode(GradMode.COPY):
            self._take_left()
        # Unless it ends well.
        self._sums = _Sums.BROKEN_OFF
        self._order.finish()
        self._sums, self._num_passes = _Sums.WHOLE, 0
        self._put_stand_in()

    def note_step(self) -> None:
        """Records that an update has used the sums; another update or another iteration may follow."""
        self._sums = _Sums.STEPPED

    def _set_mode(self, mode: GradMode) -> None:
        self._mode = mode
        for group in self._params.groups:
            group.is_last_microbatch = mode is GradMode.SYNC

    def _take(self, param: nn.Parameter) -> None:
        self._go_on()
        if isinstance(param.grad, GradStandIn):
            # Autograd has left nothing: a kernel has added the gradient itself.
            param.grad = None
        for group in self._params.groups_of[param]:
            self._order.gradient_came(group, param)
        param.grad = None
        # At once: an error may break the backward off, and param.grad be cleared for it.
        self._put_stand_in()

    def _go_on(self) -> None:
        """Prepares complete sums for a gradient that adds to them."""
        if self._sums in (_Sums.WHOLE, _Sums.STEPPED):
            self._sums = _Sums.GROWING
            self._order.go_on()
            self._scaling.fold(self._params.sums)

    @torch.no_grad()
    def _end_pass(self) -> None:
        self._take_left()
        before = self._params.groups
        if self._overlap:
            self._order.end_pass(before)
        # By what all ranks know: on this one none of them may have a gradient.
        if self._params.waiting:
            self._params.take_over_rest()
            self._take_left()
            if self._overlap:
                self._order.end_pass([group for group in self._params.groups if group not in before])
        self._num_passes += 1
        self._put_stand_in()

    def check_none_left(self) -> None:
        """Raises RuntimeError where param.grad still has a gradient that is not reduced, which scalers would read."""
        if any(_has_own_grad(param) for param in self._params.names):
            raise RuntimeError(UNSEEN)

    def check_seen(self) -> None:
        """Raises RuntimeError where a scaler has searched for infinities, but not in the reduced gradients."""
        if not self.is_checked:
            raise RuntimeError(UNSEEN)

    def _take_left(self) -> None:
        """Moves gradients of no_sync, of the first backward, or set by hand, into their buckets."""
        # From the last place on, as buckets are launched: what is full is sent and freed before the next one fills.
        for param, groups in reversed(self._params.groups_of.items()):
            if _has_own_grad(param):
                for group in groups:
                    # Set by hand, it says nothing of what forward has read.
                    self._order.need(group, prefetch=False)
                self._take(param)

    # The stand-in of reduced gradients: scalers find it, and it shows what others have done to param.grad.

    def _put_stand_in(self) -> None:
        if self._holder is not None and self._holder.grad is None:
            self._holder.grad = GradStandIn(self._holder, self)
            self._stands = True

    def replace_stand_in(self, new: torch.Tensor) -> torch.Tensor:
        """Puts a new gradient, any shape and dtype, in place of the stand-in.

        A hook called earlier would also run for torch.autograd.grad.
        """
        assert self._holder is not None
        # Where it stays, other gradients may be the same memory.
        new = new.clone().as_subclass(KeptGrad) if self._mode is GradMode.KEEP else new
        self._holder.grad, self._stands = new, False
        return new

    def _notice_changes(self) -> None:
        """Forgets what was reduced if param.grad was cleared or replaced since: by a module's zero_grad, or by hand."""
        if self._stands and self._holder is not None and not isinstance(self._holder.grad, GradStandIn):
            by_hand = {param: param.grad for param in self._params.names if param.grad is not None}
            self.forget()
            for param, grad in by_hand.items():
                param.grad = grad
