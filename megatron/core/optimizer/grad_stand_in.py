"""A tensor that stands in `param.grad` for gradients that lie reduced in shards, so that loss scalers find them.

What is done with it is the optimizer's.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from megatron.core.distributed.backward_end import is_in_backward

# Each rank has looked at its own, and some may skip.
UNSEEN = (
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


class ReducedGrads(Protocol):
    """The owner of reduced gradients, to which a GradStandIn forwards."""

    def unscale_reduced(self, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        """Multiplies gradients by inv_scale, [] fp32; sets found_inf, [] fp32, above 0 where one is not finite.

        Raises RuntimeError where some are not reduced, which a scaler would unscale in param.grad.
        """
        ...

    def forget(self) -> None:
        """Sets the gradients to zero."""
        ...

    def replace_stand_in(self, new: torch.Tensor) -> torch.Tensor:
        """Makes a new gradient, [*parameter shape], its dtype, the param.grad; returns what param.grad is then."""
        ...


class GradStandIn(torch.Tensor):
    """A tensor of a parameter's shape, dtype and device, without memory, in the place of its gradient.

    torch.amp.GradScaler unscales gradients in place and records whether any is not finite. That, a module's zero_grad,
    and what autograd adds to it, is forwarded to `grads`. Anything else raises RuntimeError.
    """

    _grads: "weakref.ref[ReducedGrads]"

    @staticmethod
    def __new__(cls, param: torch.Tensor, grads: ReducedGrads) -> "GradStandIn":
        """Makes the stand-in of one parameter, any shape and dtype."""
        stand_in = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        assert isinstance(stand_in, GradStandIn)
        # Weakly: param.grad belongs to torch, whose references the garbage collector does not follow. Parameters and
        # process groups would live to the end of the process, and gloo then aborts it.
        stand_in._grads = weakref.ref(grads)
        return stand_in

    def __init__(self, param: torch.Tensor, grads: ReducedGrads) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "GradStandIn(gradients are reduced to shards of a DistributedFusedAdam)"

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
            new = args[0]._owner().replace_stand_in(args[1])
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

    def _owner(self) -> ReducedGrads:
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
    """A gradient that stays in `param.grad`, any shape and dtype, where others are reduced already: of the stand-in's
    parameter, so that a scaler which looks for gradients finds that. It would unscale a part of them alone.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            raise RuntimeError(UNSEEN)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
