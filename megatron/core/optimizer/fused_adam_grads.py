"""The gradients of a DistributedFusedAdam, from param.grad to the buckets and to the division of an update.

GradAccumulator takes what autograd leaves and knows when a backward is over; a GradProxy in param.grad lets loss
scalers find the reduced gradients; ShardScaling has their factors and norm. The buckets of a parameter are in
fused_adam_params.py, the order of their messages is in megatron/core/distributed.
"""

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.param_hooks import ParamHooks, is_in_backward, is_watched
from megatron.core.distributed.scheduler import CollectiveScheduler
from megatron.core.optimizer.adam import GradScale
from megatron.core.optimizer.clip_grads import clip_coefficient_on_device, total_norm
from megatron.core.optimizer.fused_adam_params import ShardedParams
from megatron.core.process_groups_config import group_size
from megatron.core.tensor_parallel.param_attributes import is_wrapped

# Each rank has looked at its own, and some may skip.
_UNSEEN = (
    "GradScaler has not seen the reduced gradients, only those of no_sync or set by hand, or none: call grad_sync() "
    "before scaler.unscale_ and scaler.step"
)
# In place, and with create_graph.
_ADDS = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)
# Methods that read or move a tensor's memory without an operator: torch would answer them for memory at address 0.
# Not untyped_storage: modes ask any tensor for it, to know whether two share memory.
_OF_MEMORY = {
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.data_ptr,
    torch.Tensor.numpy,
    torch.Tensor.share_memory_,
    torch.Tensor.tolist,
}


class GradMode(Enum):
    """Treatment of new gradients. COPY: they go to their buckets, but nothing is sent; KEEP: they stay as
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


def check_free(name: str, param: nn.Parameter) -> None:
    """Raises ValueError for a parameter, any shape and dtype, whose gradients somebody else takes."""
    if is_wrapped(param):
        raise ValueError(f"{name} is in a DistributedDataParallel: call its release(), or leave out the wrapper")
    if is_watched(param):
        # One that is out of use, and was not collected yet.
        gc.collect()
        if is_watched(param):
            raise ValueError(f"{name} is in another DistributedFusedAdam: must be in one, so call release() of that")


class GradAccumulator:
    """Moves gradients from param.grad to their buckets.

    Gradients of parameters that were not taken over stay in param.grad until the end of their backward. Then these
    parameters are taken over, whichever ranks have gradients of them.
    """

    def __init__(
        self,
        params: ShardedParams,
        order: CollectiveScheduler,
        *,
        scaling: "ShardScaling",
        overlap: bool,
    ) -> None:
        self._params, self._order, self._scaling, self._overlap = params, order, scaling, overlap
        self._mode = GradMode.SYNC
        self._pass = order.backward_end(self._end_backward_pass)
        make_up = weakref.WeakMethod(self._make_up)
        # Weakly, as the order is registered with others, which must not keep an optimizer alive.
        order.make_up = lambda num_backwards: (make_up() or _no_passes)(num_backwards)
        # A parameter must not keep an optimizer alive that is not used any more.
        self._hooks = ParamHooks(self.mark_grad_ready)
        self._sums = _Sums.GROWING
        # Backward passes that have ended since sums were last whole, or forgotten.
        self._num_passes = 0
        # Whether somebody has asked, since zero_grad, if what is reduced is finite.
        self.is_checked = False
        # The parameter that has the proxy, and whether it was put there and not taken away.
        self._holder: nn.Parameter | None = None
        self._stands = False

    def watch(self, param: nn.Parameter) -> None:
        """Registers a hook on the gradients of a parameter."""
        self._hooks.watch([param])
        # torch's scalers unscale no gradients of fp16.
        if self._holder is None or (self._holder.dtype == torch.float16 and param.dtype != torch.float16):
            self._holder = param

    def release(self) -> None:
        """Gradients stay where autograd leaves them."""
        self._hooks.release()

    @contextmanager
    def mode(self, mode: GradMode) -> Iterator[None]:
        """Sets how gradients are treated inside the block."""
        before = self._mode
        self._set_mode(mode)
        try:
            yield
        finally:
            self._set_mode(before)

    def mark_grad_ready(self, param: nn.Parameter) -> None:
        """Takes the gradient that autograd has left; a hook."""
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
        self._resume_accumulation()
        for group in self._params.groups_of[param]:
            group.mark_added(param)
            self._order.mark_grad_ready(group, param)
        if self._mode is GradMode.SYNC:
            self._pass.note()

    def unscale_reduced(self, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        """Unscales the reduced gradients for a GradScaler; found_inf, inv_scale: [], fp32, as in `unscale`.

        Raises RuntimeError where some are not reduced, which the scaler would unscale in param.grad.
        """
        self.check_none_left()
        self.unscale(found_inf, inv_scale)

    def unscale(self, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        """Multiplies all gradients by inv_scale, [] fp32; sets found_inf, [] fp32, above 0 where one is not finite.

        Collective.
        """
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
            self._resume_accumulation()
        if self._sums is _Sums.GROWING:
            self._make_up(num_backwards)
            self._params.take_over_rest()
        self._order.reset()
        self.forget()

    def _make_up(self, num_backwards: int) -> None:
        """Launches what the other ranks launch before they hear of an error."""
        while self._sums is _Sums.GROWING and self._num_passes < num_backwards:
            self._end_backward_pass()

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
        self._put_proxy()

    def note_step(self) -> None:
        """Records that an update has used the sums; another update or another iteration may follow."""
        self._sums = _Sums.STEPPED

    def _set_mode(self, mode: GradMode) -> None:
        self._mode = mode
        for group in self._params.groups:
            group.is_last_microbatch = mode is GradMode.SYNC

    def _take(self, param: nn.Parameter) -> None:
        self._resume_accumulation()
        if isinstance(param.grad, GradProxy):
            # Autograd has left nothing: a kernel has added the gradient itself.
            param.grad = None
        for group in self._params.groups_of[param]:
            self._order.accumulate(group, param)
        param.grad = None
        # At once: an error may break the backward off, and param.grad be cleared for it.
        self._put_proxy()

    def _resume_accumulation(self) -> None:
        """Prepares complete sums for a gradient that adds to them."""
        if self._sums in (_Sums.WHOLE, _Sums.STEPPED):
            self._sums = _Sums.GROWING
            self._order.resume_accumulation()
            self._scaling.fold(self._params.sums)

    @torch.no_grad()
    def _end_backward_pass(self) -> None:
        self._take_left()
        before = self._params.groups
        if self._overlap:
            self._order.end_backward_pass(before)
        # By what all ranks know: on this one none of them may have a gradient.
        if self._params.waiting:
            self._params.take_over_rest()
            self._take_left()
            if self._overlap:
                self._order.end_backward_pass([group for group in self._params.groups if group not in before])
        self._num_passes += 1
        self._put_proxy()

    def check_none_left(self) -> None:
        """Raises RuntimeError where param.grad still has a gradient that is not reduced, which scalers would read."""
        if any(_has_own_grad(param) for param in self._params.names):
            raise RuntimeError(_UNSEEN)

    def check_seen(self) -> None:
        """Raises RuntimeError where a scaler has searched for infinities, but not in the reduced gradients."""
        if not self.is_checked:
            raise RuntimeError(_UNSEEN)

    def _take_left(self) -> None:
        """Moves gradients of no_sync, of the first backward, or set by hand, into their buckets."""
        # From the last place on, as buckets are launched: what is full is sent and freed before the next one fills.
        for param, groups in reversed(self._params.groups_of.items()):
            if _has_own_grad(param):
                for group in groups:
                    # Set by hand, it says nothing of what forward has read.
                    self._order.need(group, prefetch=False)
                self._take(param)

    # The proxy of reduced gradients: scalers find it, and it shows what others have done to param.grad.

    def _put_proxy(self) -> None:
        if self._holder is not None and self._holder.grad is None:
            self._holder.grad = GradProxy(self._holder, self)
            self._stands = True

    def replace_proxy(self, new: torch.Tensor) -> torch.Tensor:
        """Puts a new gradient, any shape and dtype, in place of the proxy; returns param.grad then.

        A hook called earlier would also run for torch.autograd.grad.
        """
        assert self._holder is not None
        # Where it stays, other gradients may be the same memory.
        new = new.clone().as_subclass(KeptGrad) if self._mode is GradMode.KEEP else new
        self._holder.grad, self._stands = new, False
        return new

    def _notice_changes(self) -> None:
        """Forgets what was reduced if param.grad was cleared or replaced since: by a module's zero_grad, or by hand."""
        if self._stands and self._holder is not None and not isinstance(self._holder.grad, GradProxy):
            by_hand = {param: param.grad for param in self._params.names if param.grad is not None}
            self.forget()
            for param, grad in by_hand.items():
                param.grad = grad


def _no_passes(num_backwards: int) -> None:
    """Launches nothing: the optimizer is gone."""


def _has_own_grad(param: nn.Parameter) -> bool:
    return param.grad is not None and not isinstance(param.grad, GradProxy)


# Gradients that are reduced to shards, in param.grad.


class GradProxy(torch.Tensor):
    """A tensor of a parameter's shape, dtype and device, without memory, in the place of its gradient.

    torch.amp.GradScaler unscales gradients in place and records whether any is not finite. That, a module's zero_grad,
    and what autograd adds to it, is forwarded to `grads`. Anything else raises RuntimeError.
    """

    _grads: "weakref.ref[GradAccumulator]"

    @staticmethod
    def __new__(cls, param: torch.Tensor, grads: GradAccumulator) -> "GradProxy":
        """Makes the proxy of one parameter's gradient, any shape and dtype."""
        proxy = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        assert isinstance(proxy, GradProxy)
        # Weakly: param.grad belongs to torch, whose references the garbage collector does not follow. Parameters and
        # process groups would live to the end of the process, and gloo then aborts it.
        proxy._grads = weakref.ref(grads)
        return proxy

    def __init__(self, param: torch.Tensor, grads: GradAccumulator) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "GradProxy(gradients are reduced to shards of a DistributedFusedAdam)"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _OF_MEMORY:
            raise RuntimeError(_refusal(f"Tensor.{func.__name__}"))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch's own subclasses have it
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.zero_.default:
            args[0]._owner().forget()
            return args[0]
        if func in _ADDS and isinstance(args[0], cls) and is_in_backward():
            # Autograd leaves a gradient where it finds another.
            new = args[0]._owner().replace_proxy(args[1])
            return args[0] if func is _ADDS[0] else new
        if func is not torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            raise RuntimeError(_refusal(func))
        grads, found_inf, inv_scale = args
        for grad in grads:
            if isinstance(grad, cls):
                grad._owner().unscale_reduced(found_inf, inv_scale)
        others = [grad for grad in grads if not isinstance(grad, cls)]
        if others:
            # Of parameters that another optimizer has.
            torch._amp_foreach_non_finite_check_and_unscale_(others, found_inf, inv_scale)
        return None

    def _owner(self) -> GradAccumulator:
        grads = self._grads()
        if grads is None:
            raise RuntimeError("the DistributedFusedAdam that reduced this gradient is gone: set .grad to None")
        return grads


def _refusal(func: object) -> str:
    return (
        f"{func} was given a parameter's .grad, which DistributedFusedAdam has reduced to the shards of ranks. "
        "Use its clip_grad_norm, grad_norm, unscale_grads, or zero_grad; no_sync for gradients of this rank; "
        "and leave out torch's DistributedDataParallel, and other optimizers of the same parameters"
    )


class KeptGrad(torch.Tensor):
    """A gradient that stays in `param.grad`, any shape and dtype, where others are reduced already: of the proxy's
    parameter, so that a scaler which looks for gradients finds that. It would unscale a part of them alone.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            raise RuntimeError(_UNSEEN)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


# Factors of unscaling and clipping, which the pass of an update applies.


class ShardScaling:
    """Divisor, norm and finiteness of reduced gradients, all on the device.

    shards: the ranks that own other elements; None is this rank alone. device: of the gradients.
    """

    def __init__(self, shards: dist.ProcessGroup | None, device: torch.device) -> None:
        self._shards = shards
        # Gradients count as what lies in the shards over this: [], fp64 for factors that are multiplied one by one.
        self._divisor = torch.ones((), dtype=torch.float64, device=device)
        # Known to the host, so that gradients which nobody scales go through no division.
        self._is_scaled = False

    def reset(self) -> None:
        """Gradients count as they are."""
        if self._is_scaled:
            self._divisor.fill_(1.0)
            self._is_scaled = False

    def divide(self, by: torch.Tensor) -> None:
        """Divides all gradients; by: [], any float dtype, on the device."""
        self._divisor.mul_(by)
        self._is_scaled = True

    def clip(self, max_norm: float, norm: torch.Tensor, *, some: Sequence[torch.Tensor] | None) -> None:
        """Scales gradients of `norm`, [], to one of at most max_norm. some: [n] each, any float dtype, these alone and
        at once; None: all.
        """
        coefficient = clip_coefficient_on_device(max_norm, norm.double())
        if some is None:
            self.divide(torch.ones_like(coefficient) / coefficient)
        elif some:
            torch._foreach_mul_(list(some), coefficient)

    def fold(self, grads: Sequence[torch.Tensor]) -> None:
        """Divides the gradients themselves, [n] each, any float dtype, for others to be added as they are."""
        if self._is_scaled:
            for grad in grads:
                grad.div_(self._divisor)
            self.reset()

    def norm(self, grads: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Norm over all ranks: [], fp32; grads: [n] each, any float dtype, what this rank owns. Collective."""
        if isinstance(norm_type, bool) or not norm_type > 0:
            raise ValueError(f"norm_type is {norm_type!r}: must be a number above 0, or infinity")
        # A rank that owns nothing joins the sums on the device that the others' are on.
        owned = [*grads] or [self._divisor.new_empty(0)]
        total = total_norm(owned, norm_type, groups=[self._shards], accumulate_in=torch.float32)
        return (total / self._divisor).float()

    def any_not_finite(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """1 where a gradient of any rank is NaN or infinite, else 0: [], fp32. Collective.

        grads: [n] each, any float dtype, what this rank owns.
        """
        # The ends of a range are not finite if anything in it is not; no tensor of flags is made.
        ends = [end for grad in grads if grad.numel() for end in torch.aminmax(grad)]
        found = torch.zeros((), dtype=torch.float32, device=self._divisor.device)
        if ends:
            found = torch.stack([end.double() for end in ends]).isfinite().all().logical_not().float()
        if group_size(self._shards) > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._shards)
        return found

    def scale(self, amp_scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> GradScale:
        """Returns the divisor of an update, and whether it is skipped; gradients count as divided by it from now on.

        amp_scale: [], a loss scale that is still in the gradients. found_inf: [], above 0 to skip. Any float dtypes and
        devices; None: nothing of the kind.
        """
        device = self._divisor.device
        if amp_scale is not None:
            self.divide(amp_scale.to(device))
        skip = None if found_inf is None else (found_inf.to(device) > 0).float()
        return GradScale(self._divisor.float() if self._is_scaled else 1.0, skip)

    def note_divided(self, skip: torch.Tensor | None) -> None:
        """Records that an update has divided the gradients themselves, unless it was skipped; skip: [], fp32, or None,
        see GradScale.
        """
        if skip is None:
            self.reset()
        else:
            self._divisor.copy_(torch.where(skip == 0, 1.0, self._divisor))
