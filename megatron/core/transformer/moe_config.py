"""Settings of mixture-of-experts layers: experts, dispatch, capacity. Routers and the stash have separate files.

The settings of dense layers are in ../transformer_config.py.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from megatron.core.config_field import config_field, run_checks, validate_fields
from megatron.core.transformer.layer_pattern import parse_layer_pattern
from megatron.core.transformer.paged_stash_config import PagedStashConfig
from megatron.core.transformer.router_config import RouterConfig, validate_router


@dataclass(kw_only=True)
class CapacityConfig:
    """Limits on the tokens of an expert, or of the experts of a rank."""

    cli_group: ClassVar[str] = "moe"

    moe_expert_capacity_factor: float | None = config_field(
        None,
        help="Each expert processes at most ceil(tokens x top-k / experts x this) tokens of a micro-batch and drops "
        "the others; unset or negative: no token is dropped.",
    )
    moe_token_drop_policy: str = config_field(
        "probs",
        help="Tokens that a full expert drops: the ones with the smallest weights, or the last ones.",
        choices=("probs", "position"),
    )
    moe_pad_expert_input_to_capacity: bool = config_field(
        False, help="Pad each expert's rows to its capacity, so that shapes do not depend on the routing."
    )
    moe_expert_rank_capacity_factor: float | None = config_field(
        None,
        help="Give the experts of a rank buffers of tokens x top-k x this rows, so that no shape depends on the "
        "routing; a step with more rows is discarded and retried with larger buffers. Unset: buffers fit the "
        "received rows.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(kw_only=True)
class MoEConfig(RouterConfig, CapacityConfig, PagedStashConfig):
    """The number of experts, the layers that have them, and the dispatch of tokens."""

    cli_group: ClassVar[str] = "moe"

    num_moe_experts: int | None = config_field(
        None,
        flags=("--num-experts",),
        dest="num_experts",
        help="Number of experts of each mixture-of-experts layer; unset: the model is dense.",
        at_least=1,
    )
    moe_layer_freq: int | list[int] | str = config_field(
        1,
        help="Layers that have experts: N for every Nth from the first, or a pattern such as ([0]+[1]*3)*2.",
        parse=partial(parse_layer_pattern, field="moe_layer_freq"),
    )
    moe_ffn_hidden_size: int | None = config_field(
        None, help="Inner width of one expert; default: the width of the dense layers.", at_least=1
    )
    moe_shared_expert_intermediate_size: int | None = config_field(
        None,
        help="Total inner width of the shared experts, which every token uses; unset: there are none.",
        at_least=1,
    )
    moe_shared_expert_gate: bool = config_field(
        False, help="Multiply the shared expert's result for each token by a learned sigmoid gate."
    )
    moe_grouped_gemm: bool = config_field(
        False, help="Compute all experts of a rank in one grouped matrix product instead of one after the other."
    )
    moe_token_dispatcher_type: str = config_field(
        "allgather",
        help="Token dispatch: every rank gathers all tokens (allgather), each row is sent to the rank of its expert "
        "(alltoall), or the library of --moe-flex-dispatcher-backend is used (flex).",
        choices=("allgather", "alltoall", "flex"),
    )
    moe_flex_dispatcher_backend: str = config_field(
        "deepep",
        help="Library that sends rows with --moe-token-dispatcher-type flex: the package deep_ep, or torch's symmetric "
        "memory; no effect with other types. hybridep and ncclep are not supported.",
        choices=("deepep", "hybridep", "ncclep", "symm_mem"),
    )
    moe_permute_fusion: bool = config_field(
        False, help="Move rows into expert order in one pass. No effect, because this is always done."
    )
    moe_shared_expert_overlap: bool = config_field(
        False, help="Compute the shared expert while rows are sent to the ranks of their experts."
    )

    def __post_init__(self) -> None:
        validate_fields(self)


def layers_with_experts(
    num_experts: int | None, moe_layer_freq: int | list[int] | str, *, num_layers: int
) -> list[int]:
    """Returns 1 for each layer with experts and 0 for each dense one: a list of num_layers."""
    if num_experts is None:
        return [0] * num_layers
    if isinstance(moe_layer_freq, str):
        moe_layer_freq = parse_layer_pattern(moe_layer_freq, field="moe_layer_freq")
    if isinstance(moe_layer_freq, int):
        return [int(layer % moe_layer_freq == 0) for layer in range(num_layers)]
    return list(moe_layer_freq)


def validate_moe(config: MoEConfig) -> None:
    """Raises ValueError if fields of the expert layers contradict each other."""
    # Without experts the other fields have no effect.
    if config.num_moe_experts is None:
        if config.moe_grouped_gemm:
            raise ValueError("moe_grouped_gemm is set but num_moe_experts is not: give --num-experts or drop the flag")
        if config.moe_expert_rank_capacity_factor is not None:
            raise ValueError(
                f"moe_expert_rank_capacity_factor is {config.moe_expert_rank_capacity_factor} but num_moe_experts is "
                "not set: give --num-experts or drop the factor"
            )
        return
    run_checks(
        partial(validate_expert_parts, config),
        partial(validate_dispatcher, config),
        partial(validate_router, config, num_experts=config.num_moe_experts),
        partial(validate_capacity, config),
    )


def validate_expert_parts(config: MoEConfig) -> None:
    """Raises ValueError for options of expert layers whose prerequisites are missing."""
    if config.moe_shared_expert_gate and config.moe_shared_expert_intermediate_size is None:
        raise ValueError("moe_shared_expert_gate is True: requires moe_shared_expert_intermediate_size")
    if config.moe_expert_rank_capacity_factor is not None and not config.moe_grouped_gemm:
        raise ValueError(
            "moe_expert_rank_capacity_factor is set but moe_grouped_gemm is not: experts that run one after the "
            "other must wait for their number of rows, so give --moe-grouped-gemm"
        )


def validate_dispatcher(config: MoEConfig) -> None:
    """Raises ValueError for flex without static buffers, and for an overlap that the dispatcher does not support."""
    kind = config.moe_token_dispatcher_type
    if kind == "flex" and config.moe_expert_rank_capacity_factor is None:
        raise ValueError(
            "moe_token_dispatcher_type is flex but moe_expert_rank_capacity_factor is not set: its backends fill "
            "fixed-size buffers, so give that factor or --moe-token-dispatcher-type alltoall"
        )
    if not config.moe_shared_expert_overlap:
        return
    if config.moe_shared_expert_intermediate_size is None:
        raise ValueError("moe_shared_expert_overlap is True: requires moe_shared_expert_intermediate_size")
    if kind != "alltoall":
        raise ValueError(f"moe_shared_expert_overlap is True but moe_token_dispatcher_type is {kind}: must be alltoall")


def validate_capacity(config: CapacityConfig) -> None:
    """Raises ValueError if fields contradict each other; replaces a negative factor by None, as in Megatron."""
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
    """Raises ValueError for a factor below 1, or together with a capacity of each expert."""
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
            f"{config.moe_expert_capacity_factor}: give either a capacity per rank, which drops nothing, or a "
            "capacity per expert"
        )


def validate_grouped_gemm(config: MoEConfig, *, hidden_size: int, itemsize: int, expert_tensor_size: int) -> None:
    """Raises ValueError if widths of the grouped product are not a multiple of 16 bytes.

    itemsize: bytes of a weight. expert_tensor_size: number of ranks over which an expert's width is split.
    """
    if config.num_moe_experts is None or not config.moe_grouped_gemm:
        return
    assert config.moe_ffn_hidden_size is not None, "set by TransformerConfig"
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
    """Raises ValueError if the layer pattern is inconsistent with the number of layers."""
    freq = config.moe_layer_freq
    if config.num_moe_experts is None:
        return
    if isinstance(freq, int) and freq < 1:
        raise ValueError(f"moe_layer_freq is {freq}: must be at least 1")
    # One entry per layer, even if the user gave a single number.
    pattern = layers_with_experts(config.num_moe_experts, freq, num_layers=num_layers)
    if len(pattern) != num_layers:
        raise ValueError(
            f"moe_layer_freq has {len(pattern)} entries: must have one per layer (num_layers is {num_layers})"
        )
    if set(pattern) - {0, 1}:
        raise ValueError(f"moe_layer_freq is {freq!r}: entries must be 0 (dense) or 1 (experts)")
