"""Settings of multi-token prediction: the number of additional tokens to predict, and the weight of their losses."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields


@dataclass(kw_only=True)
class MTPConfig:
    """Settings of the layers that predict tokens beyond the next one, one token per layer (DeepSeek-V3)."""

    cli_group: ClassVar[str] = "multi-token prediction"

    mtp_num_layers: int | None = config_field(
        None,
        help="Number of tokens to predict beyond the next one, each by an additional layer; default: none.",
        at_least=0,
    )
    mtp_loss_scaling_factor: float = config_field(
        0.1,
        help="Weight of the mean loss of the additional tokens, relative to the loss of the next token.",
        at_least=0,
    )

    def __post_init__(self) -> None:
        validate_fields(self)


def with_mtp_layers(has_experts: list[int], mtp_num_layers: int | None) -> list[int]:
    """Returns has_experts extended by the multi-token prediction layers, which are of the last layer's kind.

    has_experts: for each layer, 1 if it has experts, 0 if it is dense.
    """
    return [*has_experts, *has_experts[-1:] * (mtp_num_layers or 0)]


def validate_mtp(config: MTPConfig, *, pipeline_layout: str | None, letters: int) -> None:
    """Raises ValueError if the layout does not contain mtp_num_layers MTP layers. letters: count of m in the layout."""
    if pipeline_layout is not None and letters != (config.mtp_num_layers or 0):
        raise ValueError(
            f"pipeline_model_parallel_layout is {pipeline_layout!r}, which contains {letters} times m "
            f"(multi-token prediction): must contain it mtp_num_layers ({config.mtp_num_layers or 0}) times, after the "
            "last t"
        )
