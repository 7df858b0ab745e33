"""Settings of low-rank adapters: their rank, and the layers to which they are added."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields

# Layers with adapters by default. Adapters for the other projections of latent attention are requested by name.
ADAPTED_LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_LATENT_KEYS = ("linear_kv_down_proj", "linear_kv_up_proj")
_LATENT_QUERIES = ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj")


@dataclass(kw_only=True)
class LoRAConfig:
    """Settings for training low-rank adapters in addition to frozen weights (Hu et al., LoRA, 2021)."""

    cli_group: ClassVar[str] = "low-rank adapters"

    lora_rank: int | None = config_field(
        None,
        help="Rank of low-rank adapters. Only adapters are trained; all other parameters are frozen. Default: no "
        "adapters.",
        at_least=1,
    )
    lora_alpha: float = config_field(
        32.0, help="Adapter outputs are multiplied by this value divided by --lora-rank.", more_than=0
    )
    lora_target_modules: list[str] = config_field(
        default_factory=lambda: list(ADAPTED_LINEARS),
        help="Linear layers with adapters, in attention, feed-forward layers and experts.",
        choices=(*ADAPTED_LINEARS, *_LATENT_QUERIES, *_LATENT_KEYS),
    )

    @property
    def has_feed_forward_adapters(self) -> bool:
        """Whether feed-forward layers have adapters."""
        return self.lora_rank is not None and bool({"linear_fc1", "linear_fc2"} & set(self.lora_target_modules))

    def __post_init__(self) -> None:
        validate_fields(self)


def validate_lora(config: LoRAConfig, *, grouped_experts: bool, expert_parts: int, itemsize: int) -> None:
    """Raises ValueError if experts do not support the requested adapters.

    expert_parts: number of ranks over which the width of an expert is split. itemsize: bytes per element of a weight.
    """
    if config.lora_rank is None or not config.has_feed_forward_adapters:
        return
    require_whole_experts(expert_parts)
    words = max(1, 16 // itemsize)
    if grouped_experts and config.lora_rank % words:
        raise ValueError(
            f"lora_rank is {config.lora_rank}: must be a multiple of {words}, because the kernel of "
            "moe_grouped_gemm reads 16 bytes at a time; or remove linear_fc1 and linear_fc2 from lora_target_modules"
        )


def validate_lora_targets(config: LoRAConfig, *, multi_latent_attention: bool, q_lora_rank: int | None) -> None:
    """Raises ValueError if adapters are requested for linear layers that do not exist in the model."""
    if config.lora_rank is None or set(config.lora_target_modules) == set(ADAPTED_LINEARS):
        return
    queries = ("linear_qkv",)
    if multi_latent_attention:
        queries = (*(_LATENT_QUERIES[:1] if q_lora_rank is None else _LATENT_QUERIES[1:]), *_LATENT_KEYS)
    present = (*queries, "linear_proj", "linear_fc1", "linear_fc2")
    missing = [name for name in config.lora_target_modules if name not in present]
    if missing:
        raise ValueError(
            f"lora_target_modules contains {' '.join(missing)}, multi_latent_attention is {multi_latent_attention} and "
            f"q_lora_rank is {q_lora_rank}: the model has no such layer; choose from {' '.join(present)}"
        )


def require_whole_experts(num_parts: int) -> None:
    """Raises ValueError if experts with adapters are split over ranks."""
    if num_parts > 1:
        raise ValueError(
            f"expert_tensor_parallel_size is {num_parts} and lora_rank is set: experts with adapters "
            "cannot be split over ranks; use expert_tensor_parallel_size 1"
        )
