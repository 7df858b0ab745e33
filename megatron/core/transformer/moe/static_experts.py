"""Grouped experts over a buffer of fixed size: what they compute stops at the live rows, which the device counts."""

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


def static_experts(
    rows: Tensor,
    weights: Tensor,
    *,
    fc1: Tensor,
    fc2: Tensor,
    offsets: Tensor,
    activation: ActivationForm,
    parts: LayerParts,
    group: StashGroup | None = None,
) -> Tensor:
    """fc2(activation(fc1(rows)) * weights) of the live rows.

    rows: [C, H], weights: [C], sorted by expert; fc1, fc2: any shapes whose memory is that of [e, H, 2F] and [e, F, H],
    the rows' dtype; offsets: [e], int32, on the device: where each expert's rows end, the last one is the number of
    live rows. group: where rows wait for backward; in a pool that is too small act is given up first, then gate_up.
    Returns [C, H]; rows that are not live hold any bytes, as do their gradients.
    """
    num_rows = offsets[-1:].long()
    form: dict[str, Any] = {"activation": activation.name, "clamp": activation.clamp, "offset": activation.offset}
    act_function = partial(gated_activation, num_rows=num_rows, **form)
    gate_up = parts.expert_fc1(_multiply, rows, fc1, offsets=offsets)
    act, release = parts.moe_act(act_function, gate_up, weights)
    if group is not None:
        again = recompute_gate_up(_matrices(fc1, rows, offsets=offsets), offsets)
        group.mark(gate_up, priority=Priority.GATE_UP, recompute=again, sources=(rows,))
        if parts.moe_act is run_and_keep:
            again = recompute_act(num_rows, **form)
            group.mark(act, priority=Priority.ACT, recompute=again, sources=(gate_up, weights))
        else:
            # Whoever runs it frees it, or moves it, and brings it back.
            group.keep(act)
    output = _multiply(act, fc2, offsets=offsets)
    release(output)
    return output


def _multiply(rows: Tensor, weight: Tensor, *, offsets: Tensor) -> Tensor:
    """By the kernel that would compute the rows again; on the CPU that is torch's, and a weight's gradient can go
    where its owner adds it up.
    """
    if rows.device.type == "cpu":
        return grouped_gemm(rows, weight, offsets=offsets)
    return stashed_grouped_gemm(rows, _matrices(weight, rows, offsets=offsets), offsets=offsets)


def _matrices(weight: Tensor, rows: Tensor, *, offsets: Tensor) -> Tensor:
    return weight.view(len(offsets), rows.shape[1], -1)
