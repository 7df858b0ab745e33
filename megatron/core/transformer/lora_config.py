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
        help="Linear layers that have adapters, of attention, feed-forward layers and experts.",
        choices=ADAPTED_LINEARS,
    )

    @property
    def has_feed_forward_adapters(self) -> bool:
        """Whether feed-forward layers have some."""
        return self.lora_rank is not None and bool({"linear_fc1", "linear_fc2"} & set(self.lora_target_modules))

    def __post_init__(self) -> None:
        validate_fields(self)


def validate_lora(config: LoRAConfig, *, grouped_experts: bool, expert_parts: int, itemsize: int) -> None:
    """Raises ValueError where experts are to have adapters that they cannot; expert_parts: ranks that share the width
    of each; itemsize: bytes of a weight.
    """
    if config.lora_rank is None or not config.has_feed_forward_adapters:
        return
    require_whole_experts(expert_parts)
    words = max(1, 16 // itemsize)
    if grouped_experts and config.lora_rank % words:
        raise ValueError(
            f"lora_rank is {config.lora_rank}: must be a multiple of {words} with moe_grouped_gemm in this precision, "
            "whose kernel reads 16 bytes at a time, or lora_target_modules without linear_fc1 and linear_fc2"
        )


def require_whole_experts(num_parts: int) -> None:
    """Raises ValueError for adapters of experts in more than one part."""
    if num_parts > 1:
        raise ValueError(
            f"expert_tensor_parallel_size is {num_parts} and lora_rank is set: experts with adapters must be "
            "whole on their ranks, use expert_tensor_parallel_size 1"
        )
