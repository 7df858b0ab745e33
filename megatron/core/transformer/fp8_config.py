"""Settings of experts that compute in 8 bits, their validation, and the layers that they apply to.

block_scaled/ defines the bytes and the arithmetic. The format of stored rows is a setting of the stash.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar

import torch

from megatron.core.block_scaled.format import BlockFormat
from megatron.core.config_field import config_field, run_checks, validate_fields

# Number of elements with a common scale, by recipe.
_BLOCKS = {"blockwise": 128, "mxfp8": 32}
_RECIPES = "blockwise (128 elements per scale, for Hopper) or mxfp8 (32 elements per scale, for Blackwell)"


@dataclass(kw_only=True)
class FP8Config:
    """Settings of experts that compute in 8 bits. All other parts of a model compute in the parameters' precision."""

    cli_group: ClassVar[str] = "8-bit experts"

    fp8: str | None = config_field(
        None,
        flags=("--fp8-format",),
        help="Compute the experts' GEMMs with operands of 8 bits in this format, with a scale for each block of "
        "elements. Everything else computes in bf16: dense layers, shared experts, attention, routers, embeddings and "
        "the output layer. Requires --moe-grouped-gemm and --moe-expert-rank-capacity-factor. hybrid is not supported. "
        "Unset: experts compute in bf16, too.",
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str = config_field(
        "delayed",
        help="Elements with a common scale, required with --fp8-format: 128 (blockwise, for Hopper) or 32 (mxfp8, for "
        "Blackwell). The other recipes are not supported.",
        choices=("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
    )
    first_last_layers_bf16: bool = config_field(
        False, help="With --fp8-format, compute the experts of the first and last layers in bf16."
    )
    num_layers_at_start_in_bf16: int = config_field(
        1,
        help="Number of layers at the start whose experts --first-last-layers-bf16 computes in bf16. Counts dense "
        "layers, too.",
        at_least=0,
    )
    num_layers_at_end_in_bf16: int = config_field(
        1,
        help="Number of layers at the end whose experts --first-last-layers-bf16 computes in bf16. Counts dense "
        "layers, too, but not those of multi-token prediction.",
        at_least=0,
    )
    moe_router_padding_for_quantization: bool = config_field(
        False,
        flags=("--moe-router-padding-for-quantization", "--moe-router-padding-for-fp8"),
        help="Pad the rows of each expert to whole blocks. No effect, because --fp8-format always does this.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)

    @property
    def block_format(self) -> BlockFormat | None:
        """Format of the operands of experts that compute in 8 bits; None if all experts compute in bf16."""
        return None if self.fp8 is None else BlockFormat(_BLOCKS[self.fp8_recipe])

    def is_first_or_last_in_bf16(self, layer_number: int | None, *, num_layers: int) -> bool:
        """Returns whether first_last_layers_bf16 keeps a layer in bf16.

        layer_number: starts at 1. False for None and for numbers above num_layers, which denote multi-token prediction.
        """
        if not self.first_last_layers_bf16 or layer_number is None or layer_number > num_layers:
            return False
        end = num_layers - self.num_layers_at_end_in_bf16
        return layer_number <= self.num_layers_at_start_in_bf16 or layer_number > end


def validate_fp8(
    config: FP8Config,
    *,
    params_dtype: torch.dtype,
    lora_rank: int | None,
    moe_grouped_gemm: bool,
    moe_expert_rank_capacity_factor: float | None,
    num_layers: int,
    has_experts: Sequence[int],
) -> None:
    """Raises ValueError for settings of 8-bit experts that are not supported, or that would have no effect.

    has_experts: for each layer, including those of multi-token prediction, 1 if it has experts, else 0.
    """
    if config.fp8 is None:
        _refuse_settings_without_fp8(config)
        return
    run_checks(
        partial(_check_format, config),
        partial(_check_recipe, config),
        partial(_check_precision, config, params_dtype=params_dtype, lora_rank=lora_rank),
        partial(
            _check_experts,
            config,
            has_experts=1 in has_experts,
            moe_grouped_gemm=moe_grouped_gemm,
            moe_expert_rank_capacity_factor=moe_expert_rank_capacity_factor,
        ),
        partial(_check_layers_in_bf16, config, num_layers=num_layers, has_experts=has_experts),
    )


def _refuse_settings_without_fp8(config: FP8Config) -> None:
    unused = FP8Config()
    for name, default in vars(unused).items():
        if vars(config)[name] != default:
            raise ValueError(
                f"{name} is {vars(config)[name]!r} but nothing computes in 8 bits: set fp8 to 'e4m3' (--fp8-format), "
                f"or keep the default {default!r}"
            )


def _check_format(config: FP8Config) -> None:
    if config.fp8 == "hybrid":
        raise ValueError(
            "fp8 is 'hybrid': must be 'e4m3'. Gradients in e5m2, as in hybrid, keep 2 bits of mantissa and can harm "
            "training (NeMo Megatron-Bridge, issue 638). With a scale for each block, the range of e4m3 suffices for "
            "all tensors, as in DeepSeek-V3 (arXiv 2412.19437)"
        )


def _check_recipe(config: FP8Config) -> None:
    if config.fp8_recipe not in _BLOCKS:
        raise ValueError(f"fp8_recipe is {config.fp8_recipe!r}: for experts in 8 bits, must be {_RECIPES}")


def _check_precision(config: FP8Config, *, params_dtype: torch.dtype, lora_rank: int | None) -> None:
    if params_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"fp8 is {config.fp8!r} and params_dtype is {params_dtype}: parameters must be bf16 (--bf16) or fp32, "
            "because fp16 and fp64 are not quantized"
        )
    if lora_rank is not None:
        raise ValueError(
            f"fp8 is {config.fp8!r} and lora_rank is {lora_rank}: low-rank adapters are trained only with experts "
            "that compute in bf16, so omit one of the two"
        )


def _check_experts(
    config: FP8Config, *, has_experts: bool, moe_grouped_gemm: bool, moe_expert_rank_capacity_factor: float | None
) -> None:
    if not has_experts:
        raise ValueError(
            f"fp8 is {config.fp8!r} but no layer has experts: only experts compute in 8 bits, and dense layers, "
            "attention, embeddings and the output layer in bf16; set num_moe_experts, or omit --fp8-format"
        )
    if not moe_grouped_gemm:
        raise ValueError(
            f"fp8 is {config.fp8!r} but moe_grouped_gemm is not set: only grouped GEMMs compute in 8 bits, so set it"
        )
    if moe_expert_rank_capacity_factor is None:
        raise ValueError(
            f"fp8 is {config.fp8!r} but moe_expert_rank_capacity_factor is not set: in buffers that are sized to the "
            "received rows, an expert's rows do not begin at whole blocks; set a factor such as 2"
        )


def _check_layers_in_bf16(config: FP8Config, *, num_layers: int, has_experts: Sequence[int]) -> None:
    start, end = config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16
    if not config.first_last_layers_bf16:
        unused = FP8Config()
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if vars(config)[name] != vars(unused)[name]:
                raise ValueError(f"{name} is {vars(config)[name]}: requires first_last_layers_bf16")
        return
    numbers = [number for number, experts in enumerate(has_experts, start=1) if experts]
    if numbers and all(config.is_first_or_last_in_bf16(number, num_layers=num_layers) for number in numbers):
        raise ValueError(
            f"first_last_layers_bf16 is True, num_layers_at_start_in_bf16 is {start} and num_layers_at_end_in_bf16 is "
            f"{end}: no layer would compute in 8 bits, because these are all layers with experts "
            f"({_layers_text(numbers, num_layers=num_layers)} of {num_layers}); reduce them, or omit --fp8-format"
        )


def _layers_text(numbers: Sequence[int], *, num_layers: int) -> str:
    """Formats ascending layer numbers: `layers 1, 3 to 5 and 8`. Numbers above num_layers: multi-token prediction."""
    inside = [number for number in numbers if number <= num_layers]
    parts = ["multi-token prediction"] if len(inside) < len(numbers) else []
    if inside:
        gaps = [(before, after) for before, after in pairwise(inside) if after != before + 1]
        starts, ends = [inside[0], *(after for _, after in gaps)], [*(before for before, _ in gaps), inside[-1]]
        *spans, last = [
            word
            for start, end in zip(starts, ends)
            for word in ([f"{start} to {end}"] if end > start + 1 else [str(one) for one in range(start, end + 1)])
        ]
        text = f"{', '.join(spans)} and {last}" if spans else last
        parts.insert(0, f"layer{'s' * (len(inside) > 1)} {text}")
    return " and ".join(parts)


def precision_words(
    config: FP8Config, *, params_dtype: torch.dtype, num_layers: int, has_experts: Sequence[int]
) -> tuple[str, ...]:
    """Returns a clause about the layers whose experts compute in 8 bits, or nothing without such layers.

    has_experts: for each layer, including those of multi-token prediction, 1 if it has experts, else 0.
    """
    form = config.block_format
    if form is None:
        return ()
    numbers = [number for number, experts in enumerate(has_experts, start=1) if experts]
    in_bf16 = [number for number in numbers if config.is_first_or_last_in_bf16(number, num_layers=num_layers)]
    in_8_bits = [number for number in numbers if number not in in_bf16]
    others = "everything else"
    if in_bf16:
        others = f"the experts of {_layers_text(in_bf16, num_layers=num_layers)} and {others}"
    precision = "bf16" if params_dtype is torch.bfloat16 else "fp32"
    return (
        f"experts of {_layers_text(in_8_bits, num_layers=num_layers)} compute in 8 bits (fp8 {config.fp8}, "
        f"{config.fp8_recipe}: {form.block} elements per scale); {others} in {precision}",
    )
