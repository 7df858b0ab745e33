"""AwaitedParameter: what a parameter is between an update and the gather of its new values. Reading it raises.

Its memory holds old values until then, and no kernel could tell. So its class says it, as torch's own
UninitializedParameter does of a parameter without memory; object, hooks and names stay.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

# Attributes that are made of a tensor's values; all others tell what it is.
_VALUE_ATTRIBUTES = {"data", "T", "mT", "H", "mH", "real", "imag"}
# What tells the form alone, or makes other tensors of that form.
_FORM_METHODS = {
    torch.empty_like,
    torch.full_like,
    torch.is_complex,
    torch.is_floating_point,
    torch.numel,
    torch.ones_like,
    torch.rand_like,
    torch.randn_like,
    torch.zeros_like,
    torch.Tensor.is_complex,
    torch.Tensor.is_shared,
    torch.Tensor.new_empty,
    torch.Tensor.new_full,
    torch.Tensor.new_ones,
    torch.Tensor.new_zeros,
    torch.Tensor.retain_grad,
    torch.Tensor.type,
    torch.Tensor.dim,
    torch.Tensor.element_size,
    torch.Tensor.get_device,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.requires_grad_,
    torch.Tensor.size,
    torch.Tensor.storage_offset,
    torch.Tensor.stride,
    torch.Tensor.__len__,
}


class AwaitedParameter(nn.Parameter):
    """A parameter of any shape and dtype whose values are on their way; shape, gradient and hooks may be used."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__repr__:
            return f"AwaitedParameter of shape {tuple(args[0].shape)}, {args[0].dtype}: call wait_params to see values"
        is_accessor = func.__name__ in ("__get__", "__set__", "__delete__")
        # type() with an argument converts.
        is_conversion = func is torch.Tensor.type and len(args) + len(kwargs or {}) > 1
        if is_conversion or (
            func not in _FORM_METHODS and not (is_accessor and func.__self__.__name__ not in _VALUE_ATTRIBUTES)
        ):
            shape = next(tuple(leaf.shape) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
            raise RuntimeError(
                f"a parameter of shape {shape} is accessed (by {func.__name__}) after "
                "DistributedFusedAdam.step and before the gather of its new values, which overlap_param_sync puts off "
                "to the forward of its module: call wait_params([parameter]) or param_sync() first"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def mark_awaited(params: Iterable[nn.Parameter]) -> None:
    """Lets reads of these parameters, any shapes and dtypes, raise RuntimeError.

    Not of those of a class of the user's own, which must stay theirs.
    """
    for param in params:
        if type(param) is nn.Parameter:
            param.__class__ = AwaitedParameter


def mark_arrived(params: Iterable[nn.Parameter]) -> None:
    """Lets these parameters, any shapes and dtypes, be read again."""
    for param in params:
        if type(param) is AwaitedParameter:
            param.__class__ = nn.Parameter  # type: ignore[assignment]  # of one layout: torch's own classes do this too
