"""attention_mask_func, under the import path that attention layers for Megatron-LM use."""

from torch import Tensor

__all__ = ["attention_mask_func"]


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Masks scores where attention is forbidden, in place, and returns them.

    attention_scores: [B, N, S, S], any float dtype; attention_mask: bool, broadcastable to it, True where forbidden.
    """
    # Far below any score, but finite in fp16, so that a fully masked row has a softmax. A row of -inf would give NaN.
    return attention_scores.masked_fill_(attention_mask, -10000.0)
