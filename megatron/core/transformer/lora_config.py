"""Settings of low-rank adapters: how wide they are, and which layers have them."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields

ADAPTED_LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(kw_only=True)
class LoRAConfig:
    """Training of small matrices beside frozen weights (Hu et al., LoRA, 2021)."""

    cli_group: ClassVar[str] = "low-rank adapters"

    lora_rank: int | None = config_field(
        None, help="Width of low-rank adapters: they alone are trained, all else is frozen; unset: none.", at_least=1
    )
    lora_alpha: float = config_field(32.0, help="What adapters add is multiplied by this over their rank.", more_than=0)
    lora_target_modules: list[str] = config_field(
        default_factory=lambda: list(ADAPTED_LINEARS),
        help="Linear layers that have adapters, of attention and of dense and shared feed-forward layers.",
        choices=ADAPTED_LINEARS,
    )

    @property
    def has_feed_forward_adapters(self) -> bool:
        """Whether feed-forward layers have some."""
        return self.lora_rank is not None and bool({"linear_fc1", "linear_fc2"} & set(self.lora_target_modules))

    def __post_init__(self) -> None:
        validate_fields(self)


def validate_lora(config: LoRAConfig, *, grouped_experts: bool) -> None:
    """Raises ValueError where layers are to have adapters that cannot."""
    if grouped_experts and config.has_feed_forward_adapters:
        raise ValueError(
            f"lora_target_modules is {' '.join(config.lora_target_modules)} and moe_grouped_gemm is True: grouped "
            "experts have no adapters, choose linear_qkv linear_proj"
        )
