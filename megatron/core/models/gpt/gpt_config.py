"""Settings of GPT models beyond their transformer block: vocabulary, positions, tying; not the block's own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F

from megatron.core.config_field import config_field, validate_fields

POSITION_EMBEDDINGS = ("learned_absolute", "rope", "none")


@dataclass(kw_only=True)
class GPTModelConfig:
    """What GPTModel needs beside a TransformerConfig, as command-line users give it."""

    cli_group: ClassVar[str] = "network size"

    group_query_attention: bool = config_field(
        False, help="Share key/value heads among query heads: --num-query-groups of them."
    )
    max_position_embeddings: int | None = config_field(
        None, help="Longest sequence the model can take; unset: the training sequence length.", at_least=1
    )
    position_embedding_type: str = config_field(
        "learned_absolute", help="How positions enter the model.", choices=POSITION_EMBEDDINGS
    )
    rotary_base: int = config_field(10000, help="Base of rotary frequencies.", at_least=1)
    make_vocab_size_divisible_by: int = config_field(
        128, help="The vocabulary is padded with unused rows to a multiple of this.", at_least=1
    )
    swiglu: bool = config_field(False, help="Gated feed-forward layers with SiLU instead of GELU.")
    untie_embeddings_and_output_weights: bool = config_field(
        False, help="The output layer has weights of its own instead of the word embeddings'."
    )

    def __post_init__(self) -> None:
        validate_fields(self)

    def transformer_fields(
        self, *, hidden_size: int, ffn_hidden_size: int | None, num_query_groups: int | None
    ) -> dict[str, Any]:
        """Fields of TransformerConfig that follow from these settings and the given command-line values."""
        activation: Callable[..., Any] = F.silu if self.swiglu else F.gelu
        # Not `or`: a width of 0 is refused, not replaced.
        if ffn_hidden_size is None:
            ffn_hidden_size = default_ffn_hidden_size(hidden_size, swiglu=self.swiglu)
        return {
            "activation_func": activation,
            "gated_linear_unit": self.swiglu,
            "ffn_hidden_size": ffn_hidden_size,
            # --num-query-groups alone does nothing, as users of the flag know it.
            "num_query_groups": (num_query_groups or 1) if self.group_query_attention else None,
        }


def default_ffn_hidden_size(hidden_size: int, *, swiglu: bool) -> int:
    """4 x hidden size; gated layers have a third matrix, so 2/3 of that, rounded down to a multiple of 64."""
    # Two thirds of 4 x hidden, in whole multiples of 64, keep the number of weights of an ungated layer.
    if not swiglu:
        return 4 * hidden_size
    return max(64, 8 * hidden_size // 3 // 64 * 64)
