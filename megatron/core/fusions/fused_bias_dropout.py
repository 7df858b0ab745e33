"""Addition of a layer's output to the residual stream, with bias and dropout."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

BiasDropoutAdd = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def get_bias_dropout_add(training: bool, fused: bool = False) -> BiasDropoutAdd:
    """Returns the bias-dropout-add function for training or for evaluation; fused: has no effect."""
    return bias_dropout_add_train if training else bias_dropout_add_inference


def bias_dropout_add_train(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
    """Computes residual + dropout(x + bias): [S, B, H].

    x_with_bias: x, [S, B, H], any float dtype, and bias, [H] or None. residual: [S, B, H]. prob: dropout probability.
    """
    x, bias = x_with_bias
    if bias is not None:
        x = x + bias
    return residual + (F.dropout(x, p=prob) if prob > 0 else x)


def bias_dropout_add_inference(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
    """Computes residual + x + bias: [S, B, H].

    x_with_bias: x, [S, B, H], any float dtype, and bias, [H] or None. residual: [S, B, H]. prob: ignored.
    """
    x, bias = x_with_bias
    return residual + (x if bias is None else x + bias)
