"""Settings of multi-token prediction: how many further tokens are predicted, and what their losses weigh."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields


@dataclass(kw_only=True)
class MTPConfig:
    """Layers after the last that predict tokens further ahead, one token each (DeepSeek-V3)."""

    cli_group: ClassVar[str] = "multi-token prediction"

    mtp_num_layers: int | None = config_field(
        None,
        help="Tokens that are predicted beyond the next one, each by a layer of its own after the last; unset: none.",
        at_least=0,
    )
    mtp_loss_scaling_factor: float = config_field(
        0.1, help="Weight of the mean of the losses of --mtp-num-layers beside the loss of the next token.", at_least=0
    )

    def __post_init__(self) -> None:
        validate_fields(self)


def with_mtp_layers(has_experts: list[int], mtp_num_layers: int | None) -> list[int]:
    """has_experts: 1 for each layer with experts, 0 for each dense one -> the same of all layers, those of multi-token
    prediction at the end, which are of the last layer's kind.
    """
    return [*has_experts, *has_experts[-1:] * (mtp_num_layers or 0)]


def validate_mtp(config: MTPConfig, *, pipeline_layout: str | None, letters: int) -> None:
    """Raises ValueError where a layout string places other layers than there are; letters: those called m in it."""
    if pipeline_layout is not None and letters != (config.mtp_num_layers or 0):
        raise ValueError(
            f"pipeline_model_parallel_layout is {pipeline_layout!r} with {letters} layers of multi-token prediction "
            f"(m): must be mtp_num_layers ({config.mtp_num_layers or 0}), after the last t"
        )
