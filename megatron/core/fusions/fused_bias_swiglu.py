"""SwiGLU under the names that Megatron users import; gated_sigmoid.py implements it."""

from torch import Tensor

from megatron.core.fusions.gated_sigmoid import GatedSigmoid

_SWIGLU = GatedSigmoid()


def bias_swiglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """Computes silu(gate) * up, where gate and up are the halves of input + bias.

    input: [*, 2F], gate before up, any float dtype; bias: [2F] or None. Returns [*, F], same dtype.
    """
    return _SWIGLU(input if bias is None else input + bias, None)


def weighted_bias_swiglu_impl(input: Tensor, bias: Tensor | None, weights: Tensor) -> Tensor:
    """Computes silu(gate) * up * weights, where gate and up are the halves of input + bias.

    input: [R, 2F], gate before up, any float dtype; bias: [2F] or None; weights: [R, 1], fp32 or the input's dtype.
    Returns [R, F], the input's dtype.
    """
    return _SWIGLU(input if bias is None else input + bias, weights)
