"""A tensor that stands in `param.grad` for gradients that lie reduced in shards, so that loss scalers find them.

What is done with it is the optimizer's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_Unscale = Callable[[torch.Tensor, torch.Tensor], None]


class GradStandIn(torch.Tensor):
    """Of a parameter's shape, dtype and device, without memory. torch.amp.GradScaler unscales gradients in place, and
    notes whether any is not finite: that is handed to `unscale`. A module's zero_grad calls `zero`. Anything else
    raises RuntimeError.

    unscale: is given found_inf, [] fp32, to be set above 0 where a gradient is not finite, and the factor, [] fp32.
    """

    _unscale: _Unscale
    _zero: Callable[[], None]

    @staticmethod
    def __new__(cls, param: nn.Parameter, *, unscale: _Unscale, zero: Callable[[], None]) -> "GradStandIn":
        """See the class; param: any shape and dtype."""
        stand_in = torch.Tensor._make_wrapper_subclass(cls, param.shape, dtype=param.dtype, device=param.device)
        assert isinstance(stand_in, GradStandIn)
        stand_in._unscale, stand_in._zero = unscale, zero
        return stand_in

    def __init__(self, param: nn.Parameter, *, unscale: _Unscale, zero: Callable[[], None]) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "GradStandIn(gradients are reduced to shards of a DistributedFusedAdam)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch's own subclasses have it
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> None:
        if func is torch.ops.aten.zero_.default:
            args[0]._zero()
            return
        if func is not torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            raise RuntimeError(
                f"{func} was given a parameter's .grad, which DistributedFusedAdam has reduced to the shards of ranks. "
                "Use its clip_grad_norm, grad_norm, unscale_grads, or zero_grad; or no_sync for gradients of this rank"
            )
        grads, found_inf, inv_scale = args
        others = [grad for grad in grads if not isinstance(grad, cls)]
        if others:
            # Of parameters that another optimizer has.
            torch._amp_foreach_non_finite_check_and_unscale_(others, found_inf, inv_scale)
        for grad in grads:
            if isinstance(grad, cls):
                grad._unscale(found_inf, inv_scale)
