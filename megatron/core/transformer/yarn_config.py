"""Settings of YaRN, which extends rotary embeddings to longer contexts. rope.py computes the frequencies."""

from dataclasses import dataclass, fields
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields

# Defaults of unset fields, as in Megatron's MLATransformerConfig.
_ORIGINAL_LENGTH, _BETA_FAST, _BETA_SLOW = 4096, 32.0, 1.0


@dataclass(kw_only=True)
class YarnConfig:
    """Settings of the rotary position type and of YaRN."""

    cli_group: ClassVar[str] = "rotary positions"

    rope_type: str | None = config_field(
        None,
        help="Rotary frequencies: standard (rope), or rescaled for longer contexts (yarn). Default: yarn with "
        "--multi-latent-attention, else rope.",
        choices=("rope", "yarn"),
    )
    rotary_scaling_factor: float = config_field(
        1.0, help="With yarn: divisor of the low frequencies; 1 leaves all frequencies unchanged.", at_least=1
    )
    original_max_position_embeddings: int | None = config_field(
        None,
        flags=("--yarn-original-max-position-embeddings",),
        dest="yarn_original_max_position_embeddings",
        help="With yarn: context length in tokens before the extension; default: 4096.",
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
        help="With yarn: frequencies with fewer turns than this are divided by the full factor; default: 1.",
        more_than=0,
    )
    mscale: float = config_field(
        1.0,
        help="With yarn: rotated queries and keys are multiplied by m(mscale) / m(mscale_all_dim), where "
        "m(x) = 1 + 0.1 x ln(rotary_scaling_factor).",
        at_least=0,
    )
    mscale_all_dim: float = config_field(
        0.0,
        help="With yarn: latent attention multiplies all scores by m(mscale_all_dim)^2; see --mscale.",
        at_least=0,
    )
    yarn_correction_range_round_to_int: bool = config_field(
        True,
        flags=("--no-yarn-correction-range-round-to-int",),
        opposite=("--yarn-correction-range-round-to-int",),
        help="With yarn: do not round the bounds of the interpolated range of channels to integers.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)


def resolve_yarn(config: YarnConfig, *, multi_latent_attention: bool) -> None:
    """Fills in unset fields. Raises ValueError for contradictory settings, or YaRN settings without rope_type yarn."""
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
    # Reads the defaults of the configuration's class, because MLATransformerConfig overrides some of them.
    defaults = {field.name: field.default for field in fields(config)}
    for name in vars(YarnConfig()):
        if name != "rope_type" and vars(config)[name] != defaults[name]:
            raise ValueError(
                f"{name} is {vars(config)[name]} but rope_type is {config.rope_type}: requires rope_type yarn"
            )
