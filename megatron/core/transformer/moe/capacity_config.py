"""Settings of how many tokens an expert takes; what becomes of them is capacity.py's."""

import math
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields


@dataclass(kw_only=True)
class CapacityConfig:
    """How many tokens an expert takes."""

    cli_group: ClassVar[str] = "moe"

    moe_expert_capacity_factor: float | None = config_field(
        None,
        help="Each expert takes at most ceil(tokens x top-k / experts x this) tokens of a micro-batch, the others are "
        "dropped; unset or negative: none is dropped.",
    )
    moe_token_drop_policy: str = config_field(
        "probs",
        help="Which tokens a full expert drops: those with the smallest weights, or those that come last.",
        choices=("probs", "position"),
    )
    moe_pad_expert_input_to_capacity: bool = config_field(
        False, help="Pad each expert's rows to its capacity, so that shapes do not depend on the routing."
    )
    moe_expert_rank_capacity_factor: float | None = config_field(
        None,
        help="Give the experts of a rank buffers of tokens x top-k x this rows, whatever the routing, so that no shape "
        "depends on it; a step in which more rows came runs again with more room. Unset: as many rows as come.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)


def validate_capacity(config: CapacityConfig) -> None:
    """Raises ValueError where the fields make no sense together; a negative factor becomes None, as in Megatron."""
    factor = config.moe_expert_capacity_factor
    if factor is not None and (factor == 0 or not math.isfinite(factor)):
        raise ValueError(
            f"moe_expert_capacity_factor is {factor}: must be a number above 0, or negative to drop no token"
        )
    if factor is not None and factor < 0:
        config.moe_expert_capacity_factor = factor = None
    if factor is None and config.moe_pad_expert_input_to_capacity:
        raise ValueError("moe_pad_expert_input_to_capacity is True: needs a moe_expert_capacity_factor above 0")
    validate_rank_capacity(config)


def validate_rank_capacity(config: CapacityConfig) -> None:
    """Raises ValueError for a factor that no routing fits, and beside the other kind of capacity."""
    factor = config.moe_expert_rank_capacity_factor
    if factor is None:
        return
    if isinstance(factor, bool) or not math.isfinite(factor) or factor < 1:
        raise ValueError(
            f"moe_expert_rank_capacity_factor is {factor}: must be a number of at least 1, the balanced case"
        )
    if config.moe_expert_capacity_factor is not None:
        raise ValueError(
            f"moe_expert_rank_capacity_factor is {factor} and moe_expert_capacity_factor is "
            f"{config.moe_expert_capacity_factor}: choose room for a rank, which drops nothing, or for each expert"
        )
