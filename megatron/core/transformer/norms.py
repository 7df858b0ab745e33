"""LayerNorm and RMSNorm with statistics in fp32. The configuration selects one of them.

If the input has a wider dtype than the weight, as with fp32_residual_connection, the result is rounded once to the
dtype of the weight.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.autograd import PlainFunction, first_order
from megatron.core.model_parallel_config import ConstantInit, InitMethod
from megatron.core.tensor_parallel.copies import CopiedWithGroups
from megatron.core.tensor_parallel.layers import empty_values, new_parameter, zero_parameter
from megatron.core.tensor_parallel.param_attributes import mark_partial_gradient
from megatron.core.transformer.transformer_config import TransformerConfig


class Norm:
    """Factory for the configured norm: Norm(config, hidden_size) returns a LayerNorm or an RMSNorm."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, *, eps: float = 1e-5) -> Any:
        kind = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
        return kind(config, hidden_size, eps=eps)


class LayerNorm(CopiedWithGroups):
    """Computes (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension."""

    def __init__(self, config: TransformerConfig, hidden_size: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = scale_parameter(hidden_size, config)
        self.bias = zero_parameter(hidden_size, config=config)
        mark_partial_gradient(self.bias, partial=config.sequence_parallel)

    def init_methods(self) -> dict[str, InitMethod]:
        """Returns the init method of each parameter, by name."""
        return {"weight": ConstantInit(0 if self.zero_centered else 1), "bias": ConstantInit(0)}

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes x: [*, hidden_size], any float dtype. The result has the narrower dtype of x and weight."""
        weight = self.weight
        dtype = narrower(x.dtype, weight.dtype)
        if not self.zero_centered and x.dtype == dtype:
            return F.layer_norm(x, weight.shape, weight, self.bias, self.eps)
        # Not in half precision, in which 1 + weight would lose the digits that weight has near 0.
        scale = one_plus(weight) if self.zero_centered else weight
        wide = torch.promote_types(x.dtype, scale.dtype)
        normed = F.layer_norm(x.to(wide), scale.shape, scale.to(wide), self.bias.to(wide), self.eps)
        return normed.to(dtype)


class RMSNorm(CopiedWithGroups):
    """Computes x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, config: TransformerConfig, hidden_size: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = scale_parameter(hidden_size, config)

    def init_methods(self) -> dict[str, InitMethod]:
        """Returns the init method of the weight."""
        return {"weight": ConstantInit(0 if self.zero_centered else 1)}

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes x: [*, hidden_size], any float dtype. The result has the narrower dtype of x and weight."""
        weight = self.weight
        scale = one_plus(weight) if self.zero_centered else weight
        return rms_norm(x, scale, eps=self.eps, dtype=narrower(x.dtype, weight.dtype))


def scale_parameter(size: int, config: TransformerConfig) -> nn.Parameter:
    """Creates the weight of a norm: [size], config.params_dtype, on this process's device.

    The initial value is 1, or 0 with layernorm_zero_centered_gamma.
    """
    start = 0 if config.layernorm_zero_centered_gamma else 1
    weight = new_parameter(empty_values(size, config=config).fill_(start))
    # Under sequence parallelism, the gradient covers only this rank's tokens.
    mark_partial_gradient(weight, partial=config.sequence_parallel)
    return weight


def one_plus(weight: Tensor) -> Tensor:
    """Returns 1 + weight for a zero-centered weight: [H] -> [H], fp32 (fp64 for an fp64 weight)."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + 1


def narrower(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """Returns the dtype with fewer bytes, or `first` if both have the same size."""
    return second if second.itemsize < first.itemsize else first


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, dtype: torch.dtype) -> Tensor:
    """Computes x / sqrt(mean(x^2) + eps) * weight. x: [*, H]; weight: [H], any float dtypes -> [*, H], `dtype`."""
    if x.device.type == "cpu":
        return _RMSNormCPU.apply(x, weight, eps, dtype)
    if x.dtype == weight.dtype == dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    # torch's kernel requires one dtype for both.
    wide = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(dtype)


class _RMSNormCPU(PlainFunction):
    """RMSNorm on the CPU in five passes.

    torch's RMSNorm is one kernel on a GPU but ten passes on the CPU (torch 2.13).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        normed, inverse = plain_rms_norm(x, weight, eps=eps, dtype=dtype)
        ctx.save_for_backward(x, weight, inverse)
        return normed

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        return *plain_rms_norm_grads(grad, x, weight, inverse_rms=inverse), None, None


def plain_rms_norm(x: Tensor, weight: Tensor, *, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Computes RMSNorm from elementwise operators. x: [*, H]; weight: [H], any float dtypes.

    Returns the norm of x, [*, H], `dtype`, and the inverse root mean square of each row, [N, 1], fp32 or fp64.
    """
    rows = _rows(x)
    inverse = inverse_rms(rows, eps)
    return (rows * inverse).mul_(weight).to(dtype).view(x.shape), inverse


def plain_rms_norm_grads(grad: Tensor, x: Tensor, weight: Tensor, *, inverse_rms: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the gradients of x and of the weight, in their shapes and dtypes.

    grad, x: [*, H]; weight: [H], any float dtypes; inverse_rms: [N, 1], fp32 or fp64, of plain_rms_norm.
    """
    rows, grads = _rows(x), _rows(grad)
    scale = weight.to(rows.dtype)
    product = grads * rows  # [N, H]
    grad_weight = (inverse_rms.T @ product).view(-1).to(weight.dtype)
    # d x = r * (w g) - x * r^3 * mean(w g x)
    pull = (product @ scale).unsqueeze(-1).mul_(inverse_rms.pow(3)).div_(-rows.shape[-1])
    grad_x = (grads * scale).mul_(inverse_rms).addcmul_(rows, pull).to(x.dtype).view(x.shape)
    return grad_x, grad_weight


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Returns 1 / sqrt(mean(x^2) + eps) of each row; x: [*, H], any float dtype -> [N, 1], fp32 (fp64 for fp64)."""
    norm = torch.linalg.vector_norm(_rows(x), dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _rows(x: Tensor) -> Tensor:
    """Reshapes [*, H] to [N, H], in fp32 if x is in half precision."""
    return x.reshape(-1, x.shape[-1]).to(torch.promote_types(x.dtype, torch.float32))
