"""Gradients of DistributedFusedAdam: their path from param.grad to buckets, and the divisor that an update applies.

GradAccumulator processes autograd's gradients and detects the end of a backward pass. A GradProxy in `.grad` of one
parameter lets loss scalers find the reduced gradients of all. ShardScaling stores their divisor (loss scale and
clipping) and computes their norm. Buckets, and the factor that turns sums over ranks into means, are defined in
fused_adam_params.py. megatron/core/distributed orders the collectives.
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

from megatron.core.device.torch_internals import DisableTorchFunctionSubclass, is_in_backward
from megatron.core.distributed.grad_intake import BackwardEnd, ParamHooks, is_watched
from megatron.core.distributed.scheduler import CollectiveScheduler
from megatron.core.optimizer.adam import GradScale
from megatron.core.optimizer.clip_grads import clip_coefficient_on_device, total_norm
from megatron.core.optimizer.fused_adam_params import ShardedParams
from megatron.core.process_groups_config import group_size
from megatron.core.tensor_parallel.param_attributes import is_wrapped

# Raised if a scaler has checked unreduced gradients for infinities. Such gradients differ between ranks, so only some
# ranks would skip the step.
_UNSEEN = (
    "GradScaler has not seen the reduced gradients, only gradients from no_sync, manually set gradients, or none: "
    "call grad_sync() before scaler.unscale_ and scaler.step"
)
# Operators of autograd's accumulation: in place, and out of place with create_graph.
_ADDS = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)
# Methods that access a tensor's memory without dispatching an operator. On the proxy they would dereference address 0.
# Excludes untyped_storage, which dispatch modes call on any tensor to detect shared memory.
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
    """Treatment of new gradients.

    SYNC: moved to their buckets and reduced. COPY: moved to their buckets, but not reduced. KEEP: left in param.grad.
    """

    SYNC = "sync"
    COPY = "copy"
    KEEP = "keep"


class _Sums(Enum):
    """State of the gradient sums in the shards, which a registration of parameters does not change.

    GROWING: gradients may be missing. WHOLE: all gradients are included. STEPPED: all gradients are included, and an
    update has used them. ABORTED: another rank has aborted the iteration.
    """

    GROWING = "growing"
    WHOLE = "whole"
    STEPPED = "stepped"
    ABORTED = "aborted"


def check_free(name: str, param: nn.Parameter) -> None:
    """Raises ValueError if a parameter already belongs to a wrapper or to another DistributedFusedAdam."""
    if is_wrapped(param):
        raise ValueError(
            f"{name} is wrapped by DistributedDataParallel: call release() on the wrapper, or do not wrap the model"
        )
    if is_watched(param):
        # The other optimizer may be unreachable, but not garbage-collected yet.
        gc.collect()
        if is_watched(param):
            raise ValueError(f"{name} belongs to another DistributedFusedAdam: call release() on that optimizer first")


class GradAccumulator:
    """Moves gradients from param.grad to their buckets.

    Gradients of unregistered parameters remain in param.grad until the end of the backward pass. All ranks then
    register these parameters, whether or not they have gradients; see [Note: registered parameters].
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
        self._pass = BackwardEnd(self._end_backward_pass, order)
        make_up = weakref.WeakMethod(self._make_up)
        # A weak reference, because the globally registered scheduler must not keep an optimizer alive.
        order.make_up_passes = lambda num_backwards: (make_up() or _no_passes)(num_backwards)
        # ParamHooks refers to this object weakly, so that parameters do not keep an unused optimizer alive.
        self._hooks = ParamHooks(self.mark_grad_ready)
        self._sums = _Sums.GROWING
        # Unregistered parameters with a gradient, in the order in which their gradients became ready.
        self._early: dict[nn.Parameter, None] = {}
        # Number of backward passes that have ended since the sums were last completed or dropped.
        self._num_passes = 0
        # Whether reduced gradients were checked for infinities since zero_grad.
        self.is_checked = False
        # The parameter whose .grad is the proxy, and whether the proxy was set and not removed by this class.
        self._holder: nn.Parameter | None = None
        self._is_proxy_set = False

    def watch(self, param: nn.Parameter) -> None:
        """Registers a hook on the gradients of a parameter."""
        self._hooks.watch([param])
        # torch's scalers reject fp16 gradients.
        if self._holder is None or (self._holder.dtype == torch.float16 and param.dtype != torch.float16):
            self._holder = param

    def release(self) -> None:
        """Removes the hooks, so that gradients remain in param.grad."""
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
        """Moves a parameter's accumulated gradient from param.grad to its buckets; registered as a hook."""
        if self._mode is GradMode.KEEP:
            return
        if self._mode is GradMode.SYNC:
            self._order.open()
            self._pass.note()
        self._notice_changes()
        if param in self._params.groups_of:
            self._accumulate(param)
        else:
            self._early[param] = None

    def grad_added(self, param: nn.Parameter) -> None:
        """Records, during backward, that a kernel has added a gradient directly to persistent gradient memory."""
        self._resume_accumulation()
        for group in self._params.groups_of[param]:
            group.mark_added(param)
            self._order.mark_grad_ready(group, param)
        if self._mode is GradMode.SYNC:
            self._pass.note()

    def unscale_reduced(self, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        """Unscales the reduced gradients for a GradScaler. Collective.

        found_inf, inv_scale: [], fp32, as in `unscale`. Raises RuntimeError if a param.grad contains an unreduced
        gradient, because the scaler would unscale it as well.
        """
        self.check_none_left()
        self.unscale(found_inf, inv_scale)

    def unscale(self, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        """Multiplies all gradients by inv_scale, and sets found_inf above 0 if any gradient is not finite. Collective.

        found_inf, inv_scale: [], fp32.
        """
        self.finish()
        found_inf.copy_(torch.maximum(found_inf, self.any_not_finite()))
        self._scaling.divide(1.0 / inv_scale.to(found_inf.device).double())

    def any_not_finite(self) -> torch.Tensor:
        """Returns 1 if any reduced gradient of any rank is not finite, else 0: [], fp32. Collective."""
        self.is_checked = True
        return self._scaling.any_not_finite(self._params.sums)

    def reset(self, num_backwards: int) -> None:
        """Aborts the iteration on all ranks; see DistributedFusedAdam.reset_iteration. Collective."""
        self._pass.forget()
        self._order.num_backwards = num_backwards
        self._order.catch_up_earlier()
        if self._sums is _Sums.STEPPED:
            self._resume_accumulation()
        if self._sums is _Sums.GROWING:
            self._make_up(num_backwards)
            self.register_rest()
        self._order.reset()
        self.forget()

    def _make_up(self, num_backwards: int) -> None:
        """Launches the collectives that other ranks launch before they learn of this rank's error."""
        while self._sums is _Sums.GROWING and self._num_passes < num_backwards:
            self._end_backward_pass()

    def forget(self) -> None:
        """Drops all gradients and begins a new iteration. Collective only after an error in a backward pass."""
        self._is_proxy_set = False
        self._order.begin_iteration(self)
        self._pass.forget()
        self._early.clear()
        self._sums, self._num_passes, self.is_checked = _Sums.GROWING, 0, False
        self._scaling.reset()
        for param in self._params.names:
            param.grad = None

    def finish(self) -> None:
        """Reduces all remaining gradients, which completes the sums in the shards. Collective."""
        self._notice_changes()
        # An error may have ended a backward pass early.
        self._pass.close()
        self.register_rest()
        # COPY launches nothing, because the remaining gradients may differ between ranks. order.finish launches on all
        # ranks.
        with self.mode(GradMode.COPY):
            self._accumulate_rest()
        is_stepped = self._sums is _Sums.STEPPED
        # Replaced below unless finish raises.
        self._sums = _Sums.ABORTED
        self._order.finish()
        self._sums, self._num_passes = _Sums.STEPPED if is_stepped else _Sums.WHOLE, 0
        self._put_proxy()

    def note_step(self) -> None:
        """Records that an update has used the sums; another update or another iteration may follow."""
        self._sums = _Sums.STEPPED

    def register_rest(self) -> None:
        """Registers the remaining trained parameters, in the order of their first gradients. Collective."""
        waiting = self._params.waiting
        if waiting:
            in_order = self._params.agreed_order([*self._early])
            self._early.clear()
            found = set(in_order)
            # Reversed, because buffers place the last parameter first.
            self._params.register(
                [*(param for param in waiting if param not in found), *reversed(in_order)], self._params.memory
            )

    def _set_mode(self, mode: GradMode) -> None:
        self._mode = mode
        for group in self._params.groups:
            group.is_last_microbatch = mode is GradMode.SYNC

    def _accumulate(self, param: nn.Parameter) -> None:
        self._resume_accumulation()
        if isinstance(param.grad, GradProxy):
            # Autograd has accumulated nothing, because a kernel has added the gradient itself.
            param.grad = None
        for group in self._params.groups_of[param]:
            self._order.accumulate(group, param)
        param.grad = None
        # Checked immediately, because an error may end the backward, after which a caller may clear param.grad.
        self._put_proxy()

    def _resume_accumulation(self) -> None:
        """Reopens completed sums, so that further gradients can be added."""
        if self._sums in (_Sums.WHOLE, _Sums.STEPPED):
            self._sums = _Sums.GROWING
            self._order.resume_accumulation()
            self._scaling.fold(self._params.sums)

    @torch.no_grad()
    def _end_backward_pass(self) -> None:
        self._accumulate_rest()
        before = self._params.groups
        if self._overlap:
            self._order.end_backward_pass(before)
        # The condition is the same on all ranks, even on a rank without gradients for these parameters.
        if self._params.waiting:
            self.register_rest()
            self._accumulate_rest()
            if self._overlap:
                self._order.end_backward_pass([group for group in self._params.groups if group not in before])
        self._num_passes += 1
        self._put_proxy()

    def check_none_left(self) -> None:
        """Raises RuntimeError if any param.grad contains an unreduced gradient, which scalers would read."""
        if any(_has_own_grad(param) for param in self._params.names):
            raise RuntimeError(_UNSEEN)

    def check_seen(self) -> None:
        """Raises RuntimeError if no scaler has checked the reduced gradients for infinities."""
        if not self.is_checked:
            raise RuntimeError(_UNSEEN)

    def _accumulate_rest(self) -> None:
        """Moves remaining gradients (left by no_sync or the first backward pass, or set manually) to their buckets."""
        # In launch order, from the last parameter, so that a full bucket is sent and freed before the next one fills.
        for param, groups in reversed(self._params.groups_of.items()):
            if _has_own_grad(param):
                for group in groups:
                    # A manually set gradient does not imply that forward has waited for the parameter.
                    self._order.need(group, prefetch=False)
                self._accumulate(param)

    # The proxy lets scalers find the reduced gradients. Its absence shows that other code changed param.grad.

    def _put_proxy(self) -> None:
        if self._holder is not None and self._holder.grad is None:
            self._holder.grad = GradProxy(self._holder, self)
            self._is_proxy_set = True

    def replace_proxy(self, new: torch.Tensor) -> torch.Tensor:
        """Replaces the proxy with a new gradient and returns the new param.grad.

        new: [*parameter's shape], the parameter's dtype. Called when autograd accumulates, because a hook that runs
        earlier would also run for torch.autograd.grad.
        """
        assert self._holder is not None
        # Cloned if it is kept in param.grad, because other gradients may share its memory.
        new = new.clone().as_subclass(KeptGrad) if self._mode is GradMode.KEEP else new
        self._holder.grad, self._is_proxy_set = new, False
        return new

    def _notice_changes(self) -> None:
        """Drops the sums if other code has cleared or replaced param.grad, such as a module's zero_grad."""
        if self._is_proxy_set and self._holder is not None and not isinstance(self._holder.grad, GradProxy):
            own_grads = {param: param.grad for param in self._params.names if param.grad is not None}
            self.forget()
            for param, grad in own_grads.items():
                param.grad = grad


def _no_passes(num_backwards: int) -> None:
    """Replaces _make_up after the optimizer was freed. Launches no collectives."""


def _has_own_grad(param: nn.Parameter) -> bool:
    return param.grad is not None and not isinstance(param.grad, GradProxy)


# Placeholders in param.grad for gradients that were reduced to shards.


class GradProxy(torch.Tensor):
    """A tensor without memory, in `.grad` of one parameter, that stands for the reduced gradients of all parameters.

    It has the parameter's shape, dtype and device. The other parameters have no `.grad`.
    Forwards three operations to `grads`: in-place unscaling by torch.amp.GradScaler, which also checks for infinities,
    a module's zero_grad, and autograd's accumulation. Any other use raises RuntimeError.
    """

    _grads: "weakref.ref[GradAccumulator]"

    @staticmethod
    def __new__(cls, param: torch.Tensor, grads: GradAccumulator) -> "GradProxy":
        """Builds the proxy of one parameter's gradient."""
        proxy = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        assert isinstance(proxy, GradProxy)
        # A weak reference, because the garbage collector does not follow torch's reference to param.grad. Parameters
        # and process groups would live until the process exits, and gloo would then abort it.
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
    def __torch_dispatch__(  # type: ignore[override]  # same as in torch's subclasses
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.zero_.default:
            args[0]._owner().forget()
            return args[0]
        if func in _ADDS and isinstance(args[0], cls) and is_in_backward():
            # Autograd adds a new gradient to an existing one.
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
            # Gradients of parameters in other optimizers.
            torch._amp_foreach_non_finite_check_and_unscale_(others, found_inf, inv_scale)
        return None

    def _owner(self) -> GradAccumulator:
        grads = self._grads()
        if grads is None:
            raise RuntimeError("the DistributedFusedAdam that reduced this gradient was freed: set .grad to None")
        return grads


def _refusal(func: object) -> str:
    return (
        f"{func} was called on a parameter's .grad, which DistributedFusedAdam has reduced to shards over ranks. "
        "Use the optimizer's clip_grad_norm, grad_norm, unscale_grads or zero_grad, or read this rank's unreduced "
        "gradients under no_sync. Do not use torch's DistributedDataParallel or another optimizer for these parameters"
    )


class KeptGrad(torch.Tensor):
    """A gradient that replaced the proxy in `param.grad` after other gradients were reduced.

    Raises RuntimeError when a scaler unscales it, because the scaler would miss the reduced gradients.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            raise RuntimeError(_UNSEEN)
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


# Factors of unscaling and clipping, which an update applies.


class ShardScaling:
    """Divisor, norm and finiteness of reduced gradients, all computed on the device.

    shards: the ranks over which gradients are sharded; None means this rank alone. device: the gradients' device.
    is_captured: whether a CUDA graph may replay divisions and updates.
    """

    def __init__(self, shards: dist.ProcessGroup | None, device: torch.device, *, is_captured: bool = False) -> None:
        self._shards, self._is_captured = shards, is_captured
        # The product of all recorded divisors, [], in fp64, because each multiplication rounds. Gradients are the
        # values in the shards divided by this product.
        self._divisor = torch.ones((), dtype=torch.float64, device=device)
        # Whether a divisor was recorded. It is kept on the host, so that updates without a divisor need neither a
        # division nor a wait.
        self._is_scaled = False

    def reset(self) -> None:
        """Sets the divisor to 1."""
        # The host does not see divisions in a replayed graph. A skipped update leaves its divisor in place for a step
        # that reuses the gradients, but the next iteration must not inherit it.
        if self._is_scaled or self._is_captured:
            self._divisor.fill_(1.0)
            self._is_scaled = False

    def divide(self, by: torch.Tensor) -> None:
        """Records a divisor of the gradients, which `fold` or an update applies.

        by: [], any float dtype, on the gradients' device.
        """
        self._divisor.mul_(by)
        self._is_scaled = True

    def clip(self, max_norm: float, norm: torch.Tensor, *, some: Sequence[torch.Tensor] | None) -> None:
        """Clips gradients to max_norm. norm: their current norm, [], any float dtype.

        some: gradients to scale immediately, [n] each, any float dtype; None records a divisor for all gradients
        instead.
        """
        coefficient = clip_coefficient_on_device(max_norm, norm.double())
        if some is None:
            self.divide(torch.ones_like(coefficient) / coefficient)
        elif some:
            torch._foreach_mul_(list(some), coefficient)

    def fold(self, grads: Sequence[torch.Tensor]) -> None:
        """Applies the divisor to the gradients, [n] each, any float dtype, so that new gradients can be added."""
        if self._is_scaled or self._is_captured:
            for grad in grads:
                grad.div_(self._divisor)
            self.reset()

    def norm(self, grads: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Returns the norm over all ranks: [], fp32. Collective.

        grads: this rank's gradients, [n] each, any float dtype. norm_type: order of the norm, above 0, possibly
        infinity; other values raise ValueError.
        """
        if isinstance(norm_type, bool) or not norm_type > 0:
            raise ValueError(f"norm_type is {norm_type!r}: must be a number above 0, or infinity")
        # A rank without gradients joins the reductions with a tensor on the same device as the other ranks.
        owned = [*grads] or [self._divisor.new_empty(0)]
        total = total_norm(owned, norm_type, groups=[self._shards], accumulate_in=torch.float32)
        return (total / self._divisor).float()

    def any_not_finite(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns 1 if a gradient of any rank is NaN or infinite, else 0: [], fp32. Collective.

        grads: this rank's gradients, [n] each, any float dtype.
        """
        # If any element is not finite, the minimum or the maximum is not finite either. This avoids a tensor of flags.
        ends = [end for grad in grads if grad.numel() for end in torch.aminmax(grad)]
        found = torch.zeros((), dtype=torch.float32, device=self._divisor.device)
        if ends:
            found = torch.stack([end.double() for end in ends]).isfinite().all().logical_not().float()
        if group_size(self._shards) > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._shards)
        return found

    def scale(self, amp_scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> GradScale:
        """Returns the divisor of an update, and the flag that skips it.

        amp_scale: loss scale that the gradients still contain, or None. found_inf: above 0 to skip the update, or None
        to always update. Both: [], any float dtype and device.
        """
        device = self._divisor.device
        if amp_scale is not None:
            self.divide(amp_scale.to(device))
        skip = None if found_inf is None else (found_inf.to(device) > 0).float()
        is_scaled = self._is_scaled or self._is_captured
        return GradScale(self._divisor.float() if is_scaled else 1.0, skip)

    def note_divided(self, skip: torch.Tensor | None) -> None:
        """Resets the divisor after an update has divided the gradients in place, unless the update was skipped.

        skip: [], fp32, as in GradScale.
        """
        if skip is None:
            self.reset()
        else:
            self._divisor.copy_(torch.where(skip == 0, 1.0, self._divisor))
