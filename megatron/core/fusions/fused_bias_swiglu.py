"""SwiGLU under the names that Megatron users import; gated_activation.py implements it."""

from torch import Tensor

from megatron.core.fusions.gated_activation import ActivationForm, activate

_SWIGLU = ActivationForm("swiglu")


def bias_swiglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """Computes silu(gate) * up, where gate and up are the halves of input + bias.

    input: [*, 2F], gate before up, any float dtype; bias: [2F] or None. Returns [*, F], same dtype.
    """
    return activate(input if bias is None else input + bias, None, form=_SWIGLU)


def weighted_bias_swiglu_impl(input: Tensor, bias: Tensor | None, weights: Tensor) -> Tensor:
    """Computes silu(gate) * up * weights, where gate and up are the halves of input + bias.

    input: [R, 2F], gate before up, any float dtype; bias: [2F] or None; weights: [R, 1], fp32 or the input's dtype.
    Returns [R, F], the input's dtype.
    """
    return activate(input if bias is None else input + bias, weights.squeeze(-1), form=_SWIGLU)
