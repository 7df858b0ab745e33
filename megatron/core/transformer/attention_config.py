"""Settings of self-attention and multi-latent attention. The position embedding type is a setting of the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from megatron.core.config_field import config_field, run_checks, validate_fields
from megatron.core.transformer.enums import AttnBackend, parse_attn_backend
from megatron.core.transformer.layer_pattern import parse_layer_pattern


@dataclass(kw_only=True)
class AttentionConfig:
    """Settings of attention layers: heads, widths, rotation, windows and communication between ranks."""

    cli_group: ClassVar[str] = "attention"

    num_attention_heads: int = config_field(0, cli_default=None, help="Number of query heads per layer.", at_least=0)
    num_query_groups: int = config_field(
        None,
        filled_in=True,
        help="Key/value heads per layer with --group-query-attention; default: 1. Otherwise one per query head.",
        at_least=1,
    )
    kv_channels: int = config_field(
        None, filled_in=True, help="Width of one head; default: hidden size / attention heads.", at_least=1
    )
    attention_dropout: float = config_field(
        0.1, help="Dropout probability of attention probabilities.", at_least=0, less_than=1
    )
    attention_backend: AttnBackend = config_field(
        AttnBackend.auto,
        help="Attention kernel: auto lets torch choose; unfused and local use an fp32 reference implementation.",
        choices=tuple(AttnBackend),
        parse=parse_attn_backend,
    )
    attention_softmax_in_fp32: bool = config_field(
        True,
        cli_default=False,
        flags=("--attention-softmax-in-fp32",),
        help="Compute the softmax of attention in fp32. No effect, because every kernel here does so.",
    )
    softmax_scale: float | None = config_field(
        None, flags=(), more_than=0, help="Scale of the attention scores; default: 1 / sqrt(kv_channels)."
    )
    softmax_type: str = config_field(
        "vanilla",
        help="Term added to the denominator of attention's softmax: none (vanilla), exp(0) (off-by-one), or exp of a "
        "learned logit per head, a sink (learnable).",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    add_qkv_bias: bool = config_field(
        False, help="Add a bias to the query, key and value projection even if other layers have none."
    )
    qk_layernorm: bool = config_field(
        False, help="Normalize each query and key over its head width before rotary positions are applied."
    )
    qk_clip: bool = config_field(
        False,
        help="After each step, scale down the query and key projections of heads whose scores exceeded "
        "--qk-clip-threshold, as in MuonClip.",
    )
    qk_clip_alpha: float = config_field(
        0.5,
        help="Exponent of the --qk-clip factor that scales queries; keys are scaled with exponent 1 minus this.",
        at_least=0,
        at_most=1,
    )
    qk_clip_threshold: float = config_field(100, help="Maximum score that --qk-clip allows.", more_than=0)
    log_max_attention_logit: bool = config_field(
        False, help="Log the largest attention score of each step, over all layers and heads."
    )
    attention_output_gate: bool = config_field(
        False,
        help="Multiply attention's output by the sigmoid of a gate. The query, key and value projection computes one "
        "gate per query head and channel.",
    )
    rotary_interleaved: bool = config_field(
        False, help="Apply rotary positions to pairs of neighboring channels instead of the two halves of a head."
    )
    window_size: tuple[int, int] | list[int] | None = config_field(
        None,
        help="Sliding window LEFT,0: each token attends to itself and the LEFT tokens before it; -1 means no limit.",
        at_least=-1,
        parse=lambda word: parse_window_size(word),  # defined below
    )
    window_attn_skip_freq: int | list[int] | str | None = config_field(
        None,
        help="Layers without the window: N for every Nth layer, or a pattern such as [1]*3+[0] with 0 for them; "
        "default: none.",
        parse=partial(parse_layer_pattern, field="window_attn_skip_freq"),
    )

    cp_comm_type: list[str] | str | None = config_field(
        None,
        cli_default="p2p",
        help="Communication between context-parallel ranks, one value for all layers or one per layer: pass keys and "
        "values around a ring (p2p), gather them (all_gather), exchange heads by all-to-all (a2a), or exchange "
        "heads within groups of neighbors and pass keys and values between the groups (a2a+p2p).",
        choices=("p2p", "all_gather", "a2a", "a2a+p2p"),
    )

    def __post_init__(self) -> None:
        validate_fields(self)

    @property
    def watches_logits(self) -> bool:
        """Whether attention records the largest score of each head during training."""
        return self.qk_clip or self.log_max_attention_logit

    def cp_comm_type_of_layer(self, layer_number: int) -> str:
        """Returns the cp_comm_type of a layer. layer_number: starts at 1."""
        if self.cp_comm_type is None:
            return "p2p"
        kinds = [self.cp_comm_type] if isinstance(self.cp_comm_type, str) else self.cp_comm_type
        return kinds[0] if len(kinds) == 1 else kinds[layer_number - 1]

    def window_of_layer(self, layer_number: int) -> tuple[int, int] | None:
        """Returns the window of a layer, or None if it has no window. layer_number: starts at 1."""
        freq = self.window_attn_skip_freq
        if self.window_size is None or self.window_size[0] == -1:
            return None
        assert not isinstance(freq, str), "patterns are lists once a configuration is built"
        if isinstance(freq, int):
            has_window = layer_number % freq != 0
        else:
            has_window = freq is None or freq[layer_number - 1] == 1
        return (self.window_size[0], self.window_size[1]) if has_window else None


@dataclass(kw_only=True)
class MLAConfig:
    """Settings of latent attention, which has no key/value groups. They require multi_latent_attention."""

    cli_group: ClassVar[str] = "multi-latent attention"

    multi_latent_attention: bool = config_field(
        False,
        help="Compute the keys and values of all heads from one compressed vector per token, as in DeepSeek-V2 and V3.",
    )
    q_lora_rank: int | None = config_field(
        None,
        help="Width to which queries are compressed first; default: compute queries directly from the hidden state.",
        at_least=1,
    )
    kv_lora_rank: int = config_field(
        32, help="Width of the compressed vector from which keys and values are computed.", at_least=1
    )
    qk_head_dim: int = config_field(
        128, help="Number of channels per query and key head without rotary positions.", at_least=1
    )
    qk_pos_emb_head_dim: int = config_field(
        64,
        help="Number of additional, rotated channels per query and key head; all heads share one rotated key.",
        at_least=2,
    )
    v_head_dim: int = config_field(128, help="Width of each value head.", at_least=1)

    def __post_init__(self) -> None:
        validate_fields(self)

    @property
    def qk_width(self) -> int:
        """Width of each query and key head."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


def parse_window_size(word: str) -> tuple[int, int]:
    """Parses LEFT,RIGHT, with or without parentheses, as two integers. Raises ValueError for other text."""
    parts = word.strip().strip("()[]").split(",")
    try:
        left, right = (int(part) for part in parts)
    except ValueError:
        raise ValueError(f"window_size is {word!r}: must be two integers LEFT,RIGHT such as 128,0") from None
    return left, right


def validate_attention(config: AttentionConfig, *, hidden_size: int, num_layers: int) -> None:
    """Raises ValueError if heads or groups do not divide the sizes, or if the window is invalid."""
    run_checks(
        partial(validate_head_sizes, config, hidden_size=hidden_size),
        partial(validate_query_groups, config),
        partial(validate_window, config, num_layers=num_layers),
    )


def validate_head_sizes(config: AttentionConfig, *, hidden_size: int) -> None:
    """Raises ValueError if no head width is set and the heads do not divide the hidden size."""
    heads = config.num_attention_heads
    if config.kv_channels is None and heads and hidden_size % heads:
        raise ValueError(
            f"hidden_size is {hidden_size}: must be divisible by num_attention_heads ({heads}), or give kv_channels"
        )


def validate_query_groups(config: AttentionConfig) -> None:
    """Raises ValueError if the query groups do not divide the heads."""
    heads, groups = config.num_attention_heads, config.num_query_groups
    if groups and heads % groups:
        raise ValueError(f"num_attention_heads is {heads}: must be divisible by num_query_groups ({groups})")


def validate_qk_clip(config: AttentionConfig, *, multi_latent_attention: bool) -> None:
    """Raises ValueError for qk_clip settings without qk_clip, and for norms that would undo the clipping."""
    if not config.qk_clip:
        for name, value, default in (
            ("alpha", config.qk_clip_alpha, 0.5),
            ("threshold", config.qk_clip_threshold, 100),
        ):
            if value != default:
                raise ValueError(f"qk_clip_{name} is {value}: requires qk_clip")
    elif config.qk_layernorm and not multi_latent_attention:
        raise ValueError(
            "qk_clip and qk_layernorm are both True: norms of queries and keys undo the scaling of the "
            "projections, so set only one of them"
        )


def validate_context_parallel(
    config: AttentionConfig, *, num_layers: int, context_parallel_size: int, levels: Sequence[int] | None
) -> set[str]:
    """Returns the set of cp_comm_type values that the layers use. levels: hierarchical_context_parallel_sizes.

    Raises ValueError unless there is one value in total or one per layer. Over several ranks, also raises for dropout
    with a value that does not support it, and for a2a+p2p without two levels. Levels require a2a+p2p.
    """
    if isinstance(config.cp_comm_type, list) and len(config.cp_comm_type) not in (1, num_layers):
        raise ValueError(
            f"cp_comm_type has {len(config.cp_comm_type)} values: must have 1, or one for each of the {num_layers} "
            "layers"
        )
    used = {config.cp_comm_type_of_layer(number) for number in range(1, num_layers + 1)}
    without_dropout = used - {"a2a"}
    if context_parallel_size > 1 and without_dropout and config.attention_dropout > 0:
        raise ValueError(
            f"attention_dropout is {config.attention_dropout}, context_parallel_size is {context_parallel_size} and "
            f"cp_comm_type is {min(without_dropout)}, which does not support dropout: set attention_dropout to 0, "
            "or cp_comm_type to a2a if the number of ranks divides the number of heads"
        )
    if "a2a+p2p" not in used and levels is not None:
        raise ValueError(
            f"hierarchical_context_parallel_sizes is {list(levels)} and cp_comm_type is {', '.join(sorted(used))}: "
            "only a2a+p2p has levels, so use a2a+p2p or do not set the sizes"
        )
    if "a2a+p2p" in used and (levels is not None or context_parallel_size > 1) and len(levels or ()) != 2:
        raise ValueError(
            f"cp_comm_type is a2a+p2p, context_parallel_size is {context_parallel_size} and "
            f"hierarchical_context_parallel_sizes is {levels}: must be two sizes whose product is "
            "context_parallel_size, the number of ranks that exchange heads and of ranks in a ring"
        )
    return used


def validate_window(config: AttentionConfig, *, num_layers: int) -> None:
    """Raises ValueError for a window that looks ahead, or a window_attn_skip_freq that does not fit the model."""
    size, freq = config.window_size, config.window_attn_skip_freq
    if size is not None and (len(size) != 2 or size[1] > 0 or {type(number) for number in size} != {int}):
        raise ValueError(f"window_size is {size}: must be (left, 0) in tokens, because layers do not look ahead")
    if freq is None:
        return
    if size is None:
        raise ValueError(f"window_attn_skip_freq is {freq}, but window_size is not given: give both or neither")
    if isinstance(freq, int) and freq < 1:
        raise ValueError(f"window_attn_skip_freq is {freq}: must be at least 1")
    if isinstance(freq, list) and (len(freq) != num_layers or not set(freq) <= {0, 1}):
        raise ValueError(
            f"window_attn_skip_freq is {freq}: must have a 1 (window) or 0 (none) for each of the {num_layers} layers"
        )


def validate_mla(
    config: MLAConfig,
    *,
    num_attention_heads: int,
    num_query_groups: int | None,
    add_qkv_bias: bool,
    attention_output_gate: bool,
    rotary_interleaved: bool,
) -> None:
    """Raises ValueError for latent-attention widths without latent attention, and for settings it does not support."""
    if not config.multi_latent_attention:
        for name, default in vars(MLAConfig()).items():
            if vars(config)[name] != default:
                raise ValueError(f"{name} is {vars(config)[name]}: requires multi_latent_attention")
        return
    if config.qk_pos_emb_head_dim % 2:
        raise ValueError(
            f"qk_pos_emb_head_dim is {config.qk_pos_emb_head_dim}: must be even, because channels rotate in pairs"
        )
    if num_query_groups not in (None, num_attention_heads):
        raise ValueError(
            f"num_query_groups is {num_query_groups} and multi_latent_attention is True: each of the "
            f"{num_attention_heads} heads has separate keys, so num_query_groups must not be set"
        )
    if add_qkv_bias:
        raise ValueError("add_qkv_bias is True and multi_latent_attention is True: latent attention has no biases")
    if attention_output_gate:
        raise ValueError(
            "attention_output_gate is True and multi_latent_attention is True: latent attention has no gate, so "
            "attention_output_gate must be False"
        )
    if rotary_interleaved:
        raise ValueError(
            "rotary_interleaved is True and multi_latent_attention is True: latent attention always rotates "
            "neighboring channels, so rotary_interleaved must be False"
        )
