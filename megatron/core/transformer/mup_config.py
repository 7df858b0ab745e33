"""Settings of maximal update parametrisation (muP, Tensor Programs V), which keeps training stable across widths.

optimizer/param_groups.py scales the learning rates of matrices by the widths that GPTModel stores on parameters.
"""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields

# [Note: what follows the width]
# m is mup_width_mult, hidden_size / mup_base_hidden_size. For layers that sum over the width, the initial standard
# deviation is divided by sqrt(m) and the learning rate of Adam by m, because an update changes their output through m
# times as many terms. Embeddings, biases and norms do not sum over a width, and are initialized and trained
# as in the base model. The output layer is initialized and trained like an embedding, because the two may share a
# weight, and the logits are divided by m instead.


@dataclass(kw_only=True)
class MuPConfig:
    """Settings of muP, with which a learning rate tuned on a narrow model also suits a wide one."""

    cli_group: ClassVar[str] = "maximal update parametrisation"

    use_mup: bool = config_field(
        False,
        help="Scale initialization, learning rates and logits with the width (muP), so that hyperparameters tuned on a "
        "narrow model transfer to a wide one.",
    )
    mup_width_mult: float = config_field(
        1.0,
        more_than=0,
        help="Ratio of the hidden size to the hidden size of the base model, on which hyperparameters were tuned.",
    )
    mup_base_hidden_size: int | None = config_field(
        None, at_least=1, help="Hidden size of the base model, an alternative to --mup-width-mult."
    )
    mup_embedding_mult: float = config_field(1.0, more_than=0, help="Scale applied to the output of the embedding.")
    mup_output_mult: float = config_field(
        1.0, more_than=0, help="Scale applied to the logits, in addition to 1 / --mup-width-mult."
    )
    mup_base_head_dim: float | None = config_field(
        None,
        more_than=0,
        help="Head width of the base model; default: the head width of this model. At this width, scores are divided "
        "by the square root of the head width, as usual.",
    )
    mup_attn_scale_power: float = config_field(
        1.0,
        at_least=0,
        help="Exponent p of the score scale (base / head width)^p / sqrt(base), where base is --mup-base-head-dim.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)

    @property
    def embedding_factor(self) -> float:
        """Scale of the embedding's output."""
        return self.mup_embedding_mult if self.use_mup else 1.0

    @property
    def logits_factor(self) -> float:
        """Scale of the logits."""
        return self.mup_output_mult / self.mup_width_mult if self.use_mup else 1.0

    def score_factor(self, head_width: int) -> float:
        """Returns the scale of attention scores, to be applied in addition to 1 / sqrt(head_width)."""
        if not self.use_mup or self.mup_base_head_dim is None:
            return 1.0
        # base ** (power - 1/2) / width ** power, over 1 / sqrt(width).
        return float((self.mup_base_head_dim / head_width) ** (self.mup_attn_scale_power - 0.5))


def resolve_mup(config: MuPConfig, *, hidden_size: int, has_adapters: bool) -> None:
    """Computes mup_width_mult from mup_base_hidden_size.

    Raises ValueError if muP is configured but use_mup is False, if settings contradict each other or have no effect, or
    if the model has adapters.
    """
    if not config.use_mup:
        for name, default in vars(MuPConfig()).items():
            if vars(config)[name] != default:
                raise ValueError(
                    f"{name} is {vars(config)[name]}, but use_mup is False: set use_mup, or leave {name} at its "
                    f"default {default}"
                )
        return
    if config.mup_attn_scale_power != 1 and config.mup_base_head_dim is None:
        raise ValueError(
            f"mup_attn_scale_power is {config.mup_attn_scale_power} and mup_base_head_dim is None, so the exponent "
            "has no effect: set mup_base_head_dim"
        )
    if has_adapters:
        raise ValueError(
            "use_mup is True and lora_rank is set: adapters are trained on a pretrained model, whose "
            "width is fixed; set only one of them"
        )
    if config.mup_base_hidden_size is not None:
        relative = hidden_size / config.mup_base_hidden_size
        if config.mup_width_mult not in (1.0, relative):
            raise ValueError(
                f"mup_width_mult is {config.mup_width_mult}, but hidden_size {hidden_size} / mup_base_hidden_size "
                f"{config.mup_base_hidden_size} is {relative}: set only one of them"
            )
        # The hidden size of an incomplete configuration is 0.
        config.mup_width_mult = relative or 1.0
