"""Adds a layer's output to the residual stream: bias, dropout, sum."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

BiasDropoutAdd = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def get_bias_dropout_add(training: bool, fused: bool = False) -> BiasDropoutAdd:
    """Returns the function for training or for evaluation; `fused` is accepted without effect."""
    return bias_dropout_add_train if training else bias_dropout_add_inference


def bias_dropout_add_train(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
    """Computes residual + dropout(x + bias); x, residual: [S, B, H], any float dtype; bias: [H] or None
    -> [S, B, H].
    """
    x, bias = x_with_bias
    if bias is not None:
        x = x + bias
    return residual + (F.dropout(x, p=prob) if prob > 0 else x)


def bias_dropout_add_inference(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
    """Computes residual + x + bias; x, residual: [S, B, H], any float dtype; bias: [H] or None -> [S, B, H]."""
    x, bias = x_with_bias
    return residual + (x if bias is None else x + bias)
