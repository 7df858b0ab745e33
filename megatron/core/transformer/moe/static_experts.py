"""Grouped experts over a buffer of fixed size: what they compute stops at the live rows, which the device counts."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer.layer_parts import LayerParts, run_and_keep
from megatron.core.transformer.moe.grouped_gemm import grouped_gemm
from megatron.core.transformer.moe.paged_stash import (
    ActivationForm,
    Priority,
    StashGroup,
    add_expert_bias,
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
class ExpertParameters:
    """fc1, fc2: any shapes whose memory is that of [e, H, 2F] and [e, F, H]; bias1: [e, 2F] and bias2: [e, H], or None;
    one dtype. bias2_share: what this rank adds of bias2, which all ranks of an expert have whole.
    """

    fc1: Tensor
    fc2: Tensor
    bias1: Tensor | None = None
    bias2: Tensor | None = None
    bias2_share: float = 1.0


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
    fc1, bias1, bias2 = parameters.fc1, parameters.bias1, parameters.bias2
    gate_up = parts.expert_fc1(_multiply, rows, fc1, offsets=offsets, bias=bias1)
    act, release = parts.moe_act(act_function, gate_up, weights)
    if group is not None:
        again = recompute_gate_up(_matrices(fc1, rows, offsets=offsets), offsets, bias=bias1)
        group.mark(gate_up, priority=Priority.GATE_UP, recompute=again, sources=(rows,))
        if parts.moe_act is run_and_keep:
            again = recompute_act(num_rows, **form)
            group.mark(act, priority=Priority.ACT, recompute=again, sources=(gate_up, weights))
        else:
            # Whoever runs it frees it, or moves it, and brings it back.
            group.keep(act)
    output = _multiply(act, parameters.fc2, offsets=offsets)
    if bias2 is not None:
        output = add_expert_bias(output, bias2, offsets=offsets, scale=weights, share=parameters.bias2_share)
    release(output)
    return output


def _multiply(rows: Tensor, weight: Tensor, *, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """By the kernels that would compute the rows again; on the CPU the product is torch's, and a weight's gradient can
    go where its owner adds it up.
    """
    if rows.device.type == "cpu":
        product = grouped_gemm(rows, weight, offsets=offsets)
    else:
        product = stashed_grouped_gemm(rows, _matrices(weight, rows, offsets=offsets), offsets=offsets)
    return product if bias is None else add_expert_bias(product, bias, offsets=offsets)


def _matrices(weight: Tensor, rows: Tensor, *, offsets: Tensor) -> Tensor:
    return weight.view(len(offsets), rows.shape[1], -1)
