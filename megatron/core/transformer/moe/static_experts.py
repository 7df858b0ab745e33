"""Grouped experts over a buffer of fixed size: what they compute stops at the live rows, which the device counts."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer.module import LayerParts, run_and_keep
from megatron.core.transformer.moe.grouped_gemm import grouped_gemm
from megatron.core.transformer.moe.paged_stash import (
    ActivationForm,
    Priority,
    Recompute,
    StashGroup,
    add_expert_bias,
    add_low_rank,
    gated_activation,
    recompute_act,
    recompute_gate_up,
)
from megatron.core.transformer.moe.paged_stash import grouped_gemm as stashed_grouped_gemm
from megatron.core.transformer.transformer_config import TransformerConfig

# activation_func and gated_linear_unit to what the kernels call both together.
_ACTIVATIONS = {
    (F.silu, True): "swiglu",
    (F.gelu, True): "geglu",
    (quick_gelu, True): "quick_geglu",
    (F.silu, False): "silu",
    (F.gelu, False): "gelu",
    (quick_gelu, False): "quick_gelu",
    (squared_relu, False): "squared_relu",
}


def static_activation(config: TransformerConfig) -> ActivationForm:
    """The configuration's activation as the kernels know it; raises ValueError for one that they do not have."""
    chosen = config.activation_func, config.gated_linear_unit
    if chosen not in _ACTIVATIONS:
        raise ValueError(
            f"activation_func is {config.activation_func} with gated_linear_unit {config.gated_linear_unit}: with "
            f"moe_expert_rank_capacity_factor it must be one of {', '.join(_ACTIVATIONS.values())}"
        )
    return ActivationForm(_ACTIVATIONS[chosen], config.activation_func_clamp_value, config.glu_linear_offset)


@dataclass(frozen=True)
class LowRank:
    """Adapters of a product: a: [e, I, r] and b: [e, r, O], one dtype; scale: of what they add."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class ExpertParameters:
    """fc1, fc2: any shapes whose memory is that of [e, H, 2F] and [e, F, H]; bias1: [e, 2F] and bias2: [e, H], or None;
    one dtype. bias2_share: what this rank adds of bias2, which all ranks of an expert have whole. low_rank1, low_rank2:
    of fc1 and fc2.
    """

    fc1: Tensor
    fc2: Tensor
    bias1: Tensor | None = None
    bias2: Tensor | None = None
    bias2_share: float = 1.0
    low_rank1: LowRank | None = None
    low_rank2: LowRank | None = None


def static_experts(
    rows: Tensor,
    weights: Tensor,
    *,
    parameters: ExpertParameters,
    offsets: Tensor,
    activation: ActivationForm,
    parts: LayerParts,
    group: StashGroup | None = None,
) -> Tensor:
    """fc2(activation(fc1(rows)) * weights) of the live rows; fc2's bias is weighted too.

    rows: [C, H], weights: [C], sorted by expert; parameters: of the rows' dtype; offsets: [e], int32, on the device:
    where each expert's rows end, the last one is the number of live rows. group: where rows wait for backward; in a
    pool that is too small act is given up first, then gate_up.
    Returns [C, H]; rows that are not live hold any bytes, as do their gradients.
    """
    num_rows = offsets[-1:].long()
    form: dict[str, Any] = {"activation": activation.name, "clamp": activation.clamp, "offset": activation.offset}
    act_function = partial(gated_activation, num_rows=num_rows, **form)
    if group is not None:
        group.rows(rows, weights)
    gate_up, *low = parts.expert_fc1(_fc1, rows, parameters, offsets=offsets)
    if group is not None:
        group.rows(gate_up, *low)
    act, release = parts.moe_act(act_function, gate_up, weights)
    if group is not None:
        again = _gate_up_again(rows, parameters, offsets=offsets)
        group.mark(gate_up, priority=Priority.GATE_UP, recompute=again, sources=(rows, *low))
        if parts.moe_act is run_and_keep:
            again = recompute_act(num_rows, **form)
            group.mark(act, priority=Priority.ACT, recompute=again, sources=(gate_up, weights))
        else:
            # Whoever runs it frees it, or moves it, and brings it back.
            group.keep(act)
    output = _fc2(act, parameters, weights=weights, offsets=offsets)
    release(output)
    return output


def _fc1(rows: Tensor, parameters: ExpertParameters, *, offsets: Tensor) -> tuple[Tensor, ...]:
    """gate_up [C, 2F] and, with adapters, the rows times their narrow half, [C, r]."""
    product = _multiply(rows, parameters.fc1, offsets=offsets)
    if parameters.bias1 is not None:
        product = add_expert_bias(product, parameters.bias1, offsets=offsets)
    return _adapted(product, rows, low_rank=parameters.low_rank1, offsets=offsets)


def _gate_up_again(rows: Tensor, parameters: ExpertParameters, *, offsets: Tensor) -> Recompute:
    """As _fc1 in the same order: the same bits."""
    low = parameters.low_rank1
    return recompute_gate_up(
        _matrices(parameters.fc1, rows, offsets=offsets),
        offsets,
        bias=parameters.bias1,
        low_rank=None if low is None else (low.b, low.scale),
    )


def _fc2(act: Tensor, parameters: ExpertParameters, *, weights: Tensor, offsets: Tensor) -> Tensor:
    output, share = _multiply(act, parameters.fc2, offsets=offsets), parameters.bias2_share
    if parameters.bias2 is not None:
        output = add_expert_bias(output, parameters.bias2, offsets=offsets, scale=weights, share=share)
    return _adapted(output, act, low_rank=parameters.low_rank2, offsets=offsets)[0]


def _adapted(product: Tensor, rows: Tensor, *, low_rank: LowRank | None, offsets: Tensor) -> tuple[Tensor, ...]:
    if low_rank is None:
        return (product,)
    low = _multiply(rows, low_rank.a, offsets=offsets)
    return add_low_rank(product, low, weight=low_rank.b, offsets=offsets, scale=low_rank.scale), low


def _multiply(rows: Tensor, weight: Tensor, *, offsets: Tensor) -> Tensor:
    """By the kernels that would compute the rows again; on the CPU the product is torch's, and a weight's gradient can
    go where its owner adds it up.
    """
    if rows.device.type == "cpu":
        return grouped_gemm(rows, weight, offsets=offsets)
    return stashed_grouped_gemm(rows, _matrices(weight, rows, offsets=offsets), offsets=offsets)


def _matrices(weight: Tensor, rows: Tensor, *, offsets: Tensor) -> Tensor:
    return weight.view(len(offsets), rows.shape[1], -1)
