"""Settings of YaRN, which extends rotary positions to longer contexts. rope.py computes the frequencies."""

from dataclasses import dataclass, fields
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields

# Defaults of unset fields, as in Megatron's MLATransformerConfig.
_ORIGINAL_LENGTH, _BETA_FAST, _BETA_SLOW = 4096, 32.0, 1.0


@dataclass(kw_only=True)
class YarnConfig:
    """The type of rotary positions, and the settings of YaRN."""

    cli_group: ClassVar[str] = "rotary positions"

    rope_type: str | None = config_field(
        None,
        help="Type of rotary frequencies: unchanged (rope), or stretched for longer contexts (yarn); default: yarn "
        "with --multi-latent-attention, else rope.",
        choices=("rope", "yarn"),
    )
    rotary_scaling_factor: float = config_field(
        1.0, help="With yarn: factor by which low frequencies are reduced; 1 leaves all unchanged.", at_least=1
    )
    original_max_position_embeddings: int | None = config_field(
        None,
        flags=("--yarn-original-max-position-embeddings",),
        dest="yarn_original_max_position_embeddings",
        help="With yarn: the context length for which the frequencies were designed; default: 4096.",
        at_least=1,
    )
    beta_fast: float | None = config_field(
        None,
        flags=("--yarn-beta-fast",),
        dest="yarn_beta_fast",
        help="With yarn: frequencies with more turns than this in the original context are unchanged; default: 32.",
        more_than=0,
    )
    beta_slow: float | None = config_field(
        None,
        flags=("--yarn-beta-slow",),
        dest="yarn_beta_slow",
        help="With yarn: frequencies with fewer turns than this are reduced by the whole factor; default: 1.",
        more_than=0,
    )
    mscale: float = config_field(
        1.0, help="With yarn: weight of the factor's logarithm in the length of rotated queries and keys.", at_least=0
    )
    mscale_all_dim: float = config_field(
        0.0,
        help="With yarn: the corresponding weight for the scores of latent attention, divided out of the rotated "
        "channels.",
        at_least=0,
    )
    yarn_correction_range_round_to_int: bool = config_field(
        True,
        flags=("--no-yarn-correction-range-round-to-int",),
        help="With yarn: do not round the channels between which frequencies are interpolated to integers.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)


def resolve_yarn(config: YarnConfig, *, multi_latent_attention: bool) -> None:
    """Sets unset fields to their defaults. Raises ValueError for contradictory settings, and for any without yarn."""
    if config.rope_type is None:
        config.rope_type = "yarn" if multi_latent_attention else "rope"
    if config.rope_type != "yarn":
        _require_defaults(config)
        return
    if config.original_max_position_embeddings is None:
        config.original_max_position_embeddings = _ORIGINAL_LENGTH
    if config.beta_fast is None:
        config.beta_fast = _BETA_FAST
    if config.beta_slow is None:
        config.beta_slow = _BETA_SLOW
    if config.beta_fast <= config.beta_slow:
        raise ValueError(f"beta_fast is {config.beta_fast}: must be more than beta_slow ({config.beta_slow})")


def _require_defaults(config: YarnConfig) -> None:
    # The defaults of the configuration's own class, because MLATransformerConfig has Megatron's defaults for yarn.
    defaults = {field.name: field.default for field in fields(config)}
    for name in vars(YarnConfig()):
        if name != "rope_type" and vars(config)[name] != defaults[name]:
            raise ValueError(f"{name} is {vars(config)[name]} and rope_type is {config.rope_type}: must be yarn")
