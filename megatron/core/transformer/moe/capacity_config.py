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
