"""Functions of mixture-of-experts layers under Megatron's names, for scripts; no layer here calls them.

Three have their code here and work on dense tables [T, E], where the layers work on indices [T, K]. The others are
defined in the files that use them.
"""

import torch
from torch import Tensor

from megatron.core.transformer.moe.aux_losses import (
    get_updated_expert_bias,
    switch_load_balancing_loss_func,
    z_loss_func,
)
from megatron.core.transformer.moe.permutation import get_capacity
from megatron.core.transformer.moe.router import build_route, sinkhorn
from megatron.core.transformer.router_config import RouterConfig, validate_router

__all__ = [
    "get_capacity",
    "get_updated_expert_bias",
    "permute",
    "sinkhorn",
    "switch_load_balancing_loss_func",
    "topk_routing_with_score_function",
    "unpermute",
    "z_loss_func",
]


def topk_routing_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Routes every token; returns weights and choice as tables.

    logits: [T, E], any float dtype; expert_bias: [E], fp32, only with sigmoid and sqrtsoftplus. Returns weights
    [T, E], the logits' dtype, zero where not chosen, and the map of the chosen [T, E], bool. Raises ValueError where
    the configuration of a router with these settings would.
    """
    settings = RouterConfig(
        moe_router_topk=topk,
        moe_router_num_groups=num_groups,
        moe_router_group_topk=group_topk,
        moe_router_topk_scaling_factor=scaling_factor,
        moe_router_score_function=score_function,
        moe_router_enable_expert_bias=expert_bias is not None,
    )
    validate_router(settings, num_experts=logits.shape[-1])
    route = build_route(
        topk,
        pre_softmax=use_pre_softmax,
        num_groups=num_groups,
        group_topk=group_topk,
        scaling_factor=scaling_factor,
        score_function=score_function,
    )
    weights, indices, _ = route(logits.to(torch.promote_types(logits.dtype, torch.float32)), expert_bias)
    table = torch.zeros_like(logits).scatter(1, indices, weights.to(logits.dtype))
    return table, torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)


def permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None = None, num_out_tokens: int | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Copies each token once per expert that it is routed to; the rows are sorted by expert.

    tokens: [T, H], any float dtype; routing_map: [T, E], bool; probs: [T, E], float, or None. Returns rows [R, H],
    their weights [R] or None, and the token of each row [R], int64, all on the device.
    num_out_tokens: R, where the caller knows it. NOTE: without it the host synchronizes with the device to count.
    """
    by_expert = routing_map.t().reshape(-1)  # [E * T]
    if num_out_tokens is None:
        slots = _true_positions_sync(by_expert)
    else:
        slots = by_expert.to(torch.uint8).sort(descending=True, stable=True).indices[:num_out_tokens]
    sorted_indices = slots % tokens.shape[0]
    weights = None if probs is None else probs.t().reshape(-1).index_select(0, slots)
    return tokens.index_select(0, sorted_indices), weights, sorted_indices


def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: torch.Size,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
) -> Tensor:
    """Sums each token's rows, each times its weight if `probs` are given.

    permuted_tokens: [R, H], any float dtype; sorted_indices: [R], int64; restore_shape: (T, H); probs: [T, E], float,
    and with it routing_map: [T, E], bool. Returns [T, H], the rows' dtype.
    """
    if probs is not None:
        if routing_map is None:
            raise ValueError("probs is given but routing_map is not: the map selects the weights of the rows")
        _, weights, _ = permute(permuted_tokens.new_empty(probs.shape[0], 0), routing_map, probs, len(sorted_indices))
        assert weights is not None
        # fp32 weights would promote half-precision rows, but the sum must be in the rows' dtype, as without weights.
        permuted_tokens = (permuted_tokens * weights.unsqueeze(-1)).to(permuted_tokens.dtype)
    restored = permuted_tokens.new_zeros(restore_shape)
    return restored.index_add(0, sorted_indices, permuted_tokens)


def _true_positions_sync(by_expert: Tensor) -> Tensor:
    # The number of positions is a shape, so the host waits for the device.
    return by_expert.nonzero().view(-1)
