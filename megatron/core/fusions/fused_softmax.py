"""FusedScaleMaskSoftmax, for attention layers written for Megatron-LM.

It uses torch operators and fuses nothing.
"""

import enum
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.core.config_field import require_defaults

# Far below any score, but finite in fp16, so that a fully masked row has a softmax. A row of -inf would give NaN.
FORBIDDEN_SCORE = -10000.0


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Masks scores where attention is forbidden, in place, and returns them.

    attention_scores: [B, N, S, S], any float dtype; attention_mask: bool, broadcastable to it, True where forbidden.
    """
    return attention_scores.masked_fill_(attention_mask, FORBIDDEN_SCORE)


class FusedScaleMaskSoftmax(nn.Module):
    """Computes softmax(mask(scale * scores)) over the last dimension."""

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: enum.Enum,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
        window_size: tuple[int, int] | None = None,
    ) -> None:
        """Stores the mask function and the precision.

        attn_mask_type: AttnMaskType.causal masks later tokens if forward receives no mask. mask_func: maps scores and a
        mask, True where forbidden, to scores; None means attention_mask_func. softmax_in_fp32: computes in fp32, and
        rounds to the input's dtype afterwards. window_size: must be None. The other flags have no effect. Raises
        ValueError if both input dtypes are set, and for a scale without softmax_in_fp32, because scaled scores could
        overflow.
        """
        super().__init__()
        require_defaults("FusedScaleMaskSoftmax", "pass a mask instead", window_size=(window_size, None))
        if input_in_fp16 and input_in_bf16:
            raise ValueError("input_in_fp16 and input_in_bf16 are both True: set only one of them")
        if scale is not None and not softmax_in_fp32:
            raise ValueError(
                f"scale is {scale} and softmax_in_fp32 is False: must be True, so that scores do not overflow"
            )
        # Compared by name, because the package that defines AttnMaskType imports this package.
        self.is_causal, self.mask_func = attn_mask_type.name == "causal", mask_func or attention_mask_func
        self.softmax_in_fp32, self.scale = softmax_in_fp32, scale

    def forward(self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None) -> Tensor:
        """Computes the attention probabilities: [B, N, S, S], the input's dtype.

        input: the scores, [B, N, S, S], any float dtype. mask: bool, broadcastable to it, True where forbidden; or
        None. softmax_offset: the logits of an additional column that absorbs a share of the probability, [N], any float
        dtype; or None.
        """
        scores = input.float() if self.softmax_in_fp32 else input
        if self.scale is not None:
            scores = scores * self.scale
        if mask is None and self.is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        if mask is not None:
            # A copy, because functions such as attention_mask_func modify their input.
            scores = self.mask_func(scores.clone(), mask)
        if softmax_offset is not None:
            column = softmax_offset.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
            return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1].to(input.dtype)
        return scores.softmax(dim=-1).to(input.dtype)
