"""Settings of mixture-of-experts layers: experts, token dispatch and capacity.

The settings of routers, of the stash and of dense layers are in separate files.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from megatron.core.config_field import config_field, run_checks, validate_fields
from megatron.core.transformer.fp8_config import FP8Config
from megatron.core.transformer.layer_pattern import parse_layer_pattern
from megatron.core.transformer.paged_stash_config import PagedStashConfig
from megatron.core.transformer.router_config import RouterConfig, validate_router

# Rows of an expert's last tile in a weight gradient, the largest TERMS of weight_grad_tile in triton_grouped_gemm.py.
GPU_ROW_ALIGNMENT = 64


@dataclass(kw_only=True)
class CapacityConfig:
    """Settings that limit the tokens per expert, or per rank."""

    cli_group: ClassVar[str] = "moe"

    moe_expert_capacity_factor: float | None = config_field(
        None,
        help="Limit each expert to ceil(tokens x top-k / experts x this) tokens of a micro-batch, and drop the others. "
        "Unset or negative: no token is dropped.",
    )
    moe_token_drop_policy: str = config_field(
        "probs",
        help="Tokens to drop when an expert is full: the tokens with the smallest weights (probs) or the last tokens "
        "(position).",
        choices=("probs", "position"),
    )
    moe_pad_expert_input_to_capacity: bool = config_field(
        False, help="Pad the rows of each expert to its capacity, so that shapes do not depend on the routing."
    )
    moe_expert_rank_capacity_factor: float | None = config_field(
        None,
        help="Allocate buffers of tokens x top-k x this rows for the experts of a rank, so that no shape depends on "
        "the routing. A step that receives more rows is discarded and retried with larger buffers. Unset: size "
        "buffers to the received rows.",
    )
    moe_expert_row_alignment: int | None = config_field(
        None,
        flags=(),
        help="In buffers of a rank's experts, pad the rows of each expert to a multiple of this number; unset: 64 on a "
        "GPU, whose weight gradients then need no masks, 1 on a CPU. A plan sets the value of its device. With fp8, "
        "rows are padded to the least common multiple of this number and the block.",
        at_least=1,
    )

    def __post_init__(self) -> None:
        validate_fields(self)

    @property
    def row_alignment(self) -> int:
        """Number of rows of which each expert has a multiple in static buffers."""
        if self.moe_expert_row_alignment is not None:
            return self.moe_expert_row_alignment
        return GPU_ROW_ALIGNMENT if torch.cuda.is_available() else 1


@dataclass(kw_only=True)
class MoEConfig(RouterConfig, CapacityConfig, FP8Config, PagedStashConfig):
    """Settings of the experts, the layers that contain them, and token dispatch."""

    cli_group: ClassVar[str] = "moe"

    num_moe_experts: int | None = config_field(
        None,
        flags=("--num-experts",),
        dest="num_experts",
        help="Number of experts in each mixture-of-experts layer; unset: the model is dense.",
        at_least=1,
    )
    moe_layer_freq: int | list[int] | str = config_field(
        1,
        help="Layers with experts: N for every Nth layer, starting with the first, or a pattern such as ([0]+[1]*3)*2.",
        parse=partial(parse_layer_pattern, field="moe_layer_freq"),
    )
    moe_ffn_hidden_size: int = config_field(
        None,
        filled_in=True,
        help="Inner width of each expert; default: the inner width of dense feed-forward layers.",
        at_least=1,
    )
    moe_shared_expert_intermediate_size: int | None = config_field(
        None,
        help="Total inner width of the shared experts, which process every token; unset: no shared experts.",
        at_least=1,
    )
    moe_shared_expert_gate: bool = config_field(
        False, help="Multiply the output of the shared experts for each token by a learned sigmoid gate."
    )
    moe_grouped_gemm: bool = config_field(
        False, help="Compute all experts of a rank in one grouped GEMM instead of one after the other."
    )
    moe_token_dispatcher_type: str = config_field(
        "allgather",
        help="Token dispatch: gather all tokens on every rank (allgather), send each row to the rank of its expert "
        "(alltoall), or use the library selected by --moe-flex-dispatcher-backend (flex).",
        choices=("allgather", "alltoall", "flex"),
    )
    moe_flex_dispatcher_backend: str = config_field(
        "deepep",
        help="Library for --moe-token-dispatcher-type flex: the package deep_ep (deepep) or torch's symmetric memory "
        "(symm_mem). No effect with other types. hybridep and ncclep are not supported.",
        choices=("deepep", "hybridep", "ncclep", "symm_mem"),
    )
    moe_dispatch_fwd_dtype: str = config_field(
        "bf16",
        help="Format in which rows are sent to the ranks of their experts: as they are (bf16), or in the 8 bits of "
        "--fp8-recipe (mxfp8 or blockwise), quantized by the sender. Results are the same. Gradients and results are "
        "sent as they are, and so are rows of layers that do not compute in 8 bits. Requires "
        "--moe-token-dispatcher-type alltoall, or flex with symm_mem. No effect if a rank has all experts.",
        choices=("bf16", "mxfp8", "blockwise"),
    )
    moe_permute_fusion: bool = config_field(
        False, help="Permute rows into expert order in one pass. No effect, because this is always done."
    )
    moe_shared_expert_overlap: bool = config_field(
        False, help="Compute the shared experts while rows are sent to the ranks of their experts."
    )

    def __post_init__(self) -> None:
        validate_fields(self)

    @property
    def row_alignment(self) -> int:
        """Number of rows of which each expert has a multiple in static buffers: also of whole blocks in 8 bits."""
        form = self.block_format
        # Of all layers, so that they share the sizes of their buffers.
        return math.lcm(super().row_alignment, 1 if form is None else form.block)


def layers_with_experts(
    num_experts: int | None, moe_layer_freq: int | list[int] | str, *, num_layers: int
) -> list[int]:
    """Returns a list with an entry per layer: 1 if it has experts, 0 if it is dense."""
    if num_experts is None:
        return [0] * num_layers
    if isinstance(moe_layer_freq, str):
        moe_layer_freq = parse_layer_pattern(moe_layer_freq, field="moe_layer_freq")
    if isinstance(moe_layer_freq, int):
        return [int(layer % moe_layer_freq == 0) for layer in range(num_layers)]
    return list(moe_layer_freq)


def validate_moe(config: MoEConfig) -> None:
    """Raises ValueError if settings of the expert layers contradict each other."""
    # Without experts the other fields have no effect.
    if config.num_moe_experts is None:
        if config.moe_grouped_gemm:
            raise ValueError("moe_grouped_gemm is set but num_moe_experts is not: set --num-experts or remove the flag")
        if config.moe_expert_rank_capacity_factor is not None:
            raise ValueError(
                f"moe_expert_rank_capacity_factor is {config.moe_expert_rank_capacity_factor} but num_moe_experts is "
                "not set: set --num-experts or remove the factor"
            )
        return
    run_checks(
        partial(validate_expert_parts, config),
        partial(validate_dispatcher, config),
        partial(validate_router, config, num_experts=config.num_moe_experts),
        partial(validate_capacity, config),
    )


def validate_expert_parts(config: MoEConfig) -> None:
    """Raises ValueError for a shared-expert gate without shared experts, or static buffers without grouped GEMM."""
    if config.moe_shared_expert_gate and config.moe_shared_expert_intermediate_size is None:
        raise ValueError("moe_shared_expert_gate is True: requires moe_shared_expert_intermediate_size")
    if config.moe_expert_rank_capacity_factor is not None and not config.moe_grouped_gemm:
        raise ValueError(
            "moe_expert_rank_capacity_factor is set but moe_grouped_gemm is not: experts that run one after the "
            "other require row counts on the host, so set --moe-grouped-gemm"
        )


def validate_dispatcher(config: MoEConfig) -> None:
    """Raises ValueError for flex without static buffers, and for unsupported shared-expert overlap."""
    kind = config.moe_token_dispatcher_type
    if kind == "flex" and config.moe_expert_rank_capacity_factor is None:
        raise ValueError(
            "moe_token_dispatcher_type is flex but moe_expert_rank_capacity_factor is not set: its backends fill "
            "fixed-size buffers, so set the factor, or use --moe-token-dispatcher-type alltoall"
        )
    _check_sent_rows(config)
    if not config.moe_shared_expert_overlap:
        return
    if config.moe_shared_expert_intermediate_size is None:
        raise ValueError("moe_shared_expert_overlap is True: requires moe_shared_expert_intermediate_size")
    if kind != "alltoall":
        raise ValueError(f"moe_shared_expert_overlap is True but moe_token_dispatcher_type is {kind}: must be alltoall")


def _check_sent_rows(config: MoEConfig) -> None:
    dtype, kind = config.moe_dispatch_fwd_dtype, config.moe_token_dispatcher_type
    if dtype == "bf16":
        return
    if config.fp8 is None or config.fp8_recipe != dtype:
        compute = "bf16" if config.fp8 is None else f"8 bits with fp8_recipe {config.fp8_recipe!r}"
        raise ValueError(
            f"moe_dispatch_fwd_dtype is {dtype!r}, but experts compute in {compute}: rows are sent in the 8 bits in "
            "which experts compute, so set --fp8-format e4m3 and the same --fp8-recipe, or omit it"
        )
    if kind == "allgather" or (kind == "flex" and config.moe_flex_dispatcher_backend != "symm_mem"):
        raise ValueError(
            f"moe_dispatch_fwd_dtype is {dtype!r} and moe_token_dispatcher_type is {kind}"
            f"{f' with {config.moe_flex_dispatcher_backend}' if kind == 'flex' else ''}: only alltoall, and flex with "
            "symm_mem, send rows in 8 bits"
        )


def validate_capacity(config: CapacityConfig) -> None:
    """Raises ValueError for inconsistent capacity settings. Replaces a negative factor by None, as in Megatron."""
    factor = config.moe_expert_capacity_factor
    if factor is not None and (factor == 0 or not math.isfinite(factor)):
        raise ValueError(
            f"moe_expert_capacity_factor is {factor}: must be a number above 0, or negative to drop no tokens"
        )
    if factor is not None and factor < 0:
        config.moe_expert_capacity_factor = factor = None
    if factor is None and config.moe_pad_expert_input_to_capacity:
        raise ValueError("moe_pad_expert_input_to_capacity is True: requires a moe_expert_capacity_factor above 0")
    validate_rank_capacity(config)


def validate_rank_capacity(config: CapacityConfig) -> None:
    """Raises ValueError for a rank capacity factor below 1, or one combined with a capacity per expert."""
    factor = config.moe_expert_rank_capacity_factor
    if factor is None:
        return
    if isinstance(factor, bool) or not math.isfinite(factor) or factor < 1:
        raise ValueError(
            f"moe_expert_rank_capacity_factor is {factor}: must be at least 1, the value for balanced routing"
        )
    if config.moe_expert_capacity_factor is not None:
        raise ValueError(
            f"moe_expert_rank_capacity_factor is {factor} and moe_expert_capacity_factor is "
            f"{config.moe_expert_capacity_factor}: set either a capacity per rank, which drops no tokens, or "
            "a capacity per expert"
        )


def validate_grouped_gemm(config: MoEConfig, *, hidden_size: int, itemsize: int, expert_tensor_size: int) -> None:
    """Raises ValueError if a width of the grouped GEMM is not a multiple of 16 bytes.

    itemsize: bytes per element of a weight. expert_tensor_size: number of ranks over which an expert's width is split.
    """
    if config.num_moe_experts is None or not config.moe_grouped_gemm:
        return
    words = max(1, 16 // itemsize)
    shared = "" if expert_tensor_size == 1 else f" and expert_tensor_parallel_size {expert_tensor_size}"
    ffn = ("moe_ffn_hidden_size", config.moe_ffn_hidden_size, words * expert_tensor_size, shared)
    for name, width, multiple, also in (ffn, ("hidden_size", hidden_size, words, "")):
        if width % multiple:
            raise ValueError(
                f"{name} is {width}: must be a multiple of {multiple} with moe_grouped_gemm{also} in this precision, "
                "whose kernel reads 16 bytes at a time"
            )


def validate_moe_layer_freq(config: MoEConfig, num_layers: int) -> None:
    """Raises ValueError if moe_layer_freq is invalid or does not have one entry per layer."""
    freq = config.moe_layer_freq
    if config.num_moe_experts is None:
        return
    if isinstance(freq, int) and freq < 1:
        raise ValueError(f"moe_layer_freq is {freq}: must be at least 1")
    # One entry per layer, even for a single number.
    pattern = layers_with_experts(config.num_moe_experts, freq, num_layers=num_layers)
    if len(pattern) != num_layers:
        raise ValueError(
            f"moe_layer_freq has {len(pattern)} entries: must have one per layer (num_layers is {num_layers})"
        )
    if set(pattern) - {0, 1}:
        raise ValueError(f"moe_layer_freq is {freq!r}: entries must be 0 (dense) or 1 (experts)")
