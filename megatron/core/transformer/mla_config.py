"""Settings of multi-latent attention: the ranks of its low-rank projections and the widths of its heads."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields


@dataclass(kw_only=True)
class MLAConfig:
    """Settings of latent attention, which replace key/value groups. Refused without multi_latent_attention."""

    cli_group: ClassVar[str] = "multi-latent attention"

    multi_latent_attention: bool = config_field(
        False, help="Keys and values of all heads come from one narrow vector a token, as in DeepSeek's models."
    )
    q_lora_rank: int | None = config_field(
        None, help="Width that queries are projected down to first; unset: they come from the hidden state.", at_least=1
    )
    kv_lora_rank: int = config_field(32, help="Width of the vector that keys and values come from.", at_least=1)
    qk_head_dim: int = config_field(128, help="Channels of each query and key head that do not rotate.", at_least=1)
    qk_pos_emb_head_dim: int = config_field(
        64, help="Channels of each query head that rotate, beside those; all heads share one such key.", at_least=2
    )
    v_head_dim: int = config_field(128, help="Width of each value head.", at_least=1)

    def __post_init__(self) -> None:
        validate_fields(self)

    @property
    def qk_width(self) -> int:
        """Returns the width of each query and key head."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


def validate_mla(
    config: MLAConfig,
    *,
    num_attention_heads: int,
    num_query_groups: int | None,
    add_qkv_bias: bool,
    rotary_interleaved: bool,
) -> None:
    """Raises ValueError for widths without latent attention, and for settings that it does not support."""
    if not config.multi_latent_attention:
        for name, default in vars(MLAConfig()).items():
            if vars(config)[name] != default:
                raise ValueError(f"{name} is {vars(config)[name]}: needs multi_latent_attention")
        return
    if config.qk_pos_emb_head_dim % 2:
        raise ValueError(f"qk_pos_emb_head_dim is {config.qk_pos_emb_head_dim}: must be even, channels rotate in pairs")
    if num_query_groups not in (None, num_attention_heads):
        raise ValueError(
            f"num_query_groups is {num_query_groups} and multi_latent_attention is True: each of the "
            f"{num_attention_heads} heads has keys of its own, must be unset"
        )
    if add_qkv_bias:
        raise ValueError("add_qkv_bias is True and multi_latent_attention is True: its projections have no biases")
    if rotary_interleaved:
        raise ValueError(
            "rotary_interleaved is True and multi_latent_attention is True: its neighbouring channels rotate against "
            "each other anyway, must be False"
        )
