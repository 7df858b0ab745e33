"""Routing computed token by token, for comparison with the router. Imports only torch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Choice = tuple[list[Tensor], list[int]]  # the weights and the indices of a token's experts


def scores_of(logits: Tensor, kind: str) -> Tensor:
    """Returns one token's scores. logits: [E], fp64."""
    if kind == "softmax":
        return logits.exp() / logits.exp().sum()
    return 1 / (1 + (-logits).exp()) if kind == "sigmoid" else (1 + logits.exp()).log().sqrt()


def route_token(logits: Tensor, config: Any, bias: Tensor | None) -> Choice:
    """Routes one token. logits: [E], fp64; bias: [E]."""
    kind, topk = config.moe_router_score_function, config.moe_router_topk
    late_softmax = kind == "softmax" and not config.moe_router_pre_softmax
    scores = logits if late_softmax else scores_of(logits, kind)
    rank = (scores if bias is None else scores + bias).tolist()
    experts = list(range(len(rank)))
    if config.moe_router_num_groups is not None:
        size = len(rank) // config.moe_router_num_groups
        members = {"sum": topk // config.moe_router_group_topk, "max": 1}[config.moe_router_group_score]
        groups = [experts[start : start + size] for start in range(0, len(rank), size)]
        groups.sort(key=lambda group: -sum(sorted((rank[e] for e in group), reverse=True)[:members]))
        experts = sum(groups[: config.moe_router_group_topk], [])
    chosen = best(rank, topk, experts)
    weights = [scores[e].exp() if late_softmax else scores[e] for e in chosen]
    if late_softmax or (kind != "softmax" and topk > 1):
        weights = [weight / sum(weights) for weight in weights]
    return [weight * (config.moe_router_topk_scaling_factor or 1) for weight in weights], chosen


def route_sinkhorn(logits: Tensor, topk: int) -> list[Choice]:
    """Routes all tokens of a microbatch, with Sinkhorn iterations until convergence. logits: [T, E], fp64."""
    cost, columns, error = logits.detach().exp(), torch.ones(logits.shape[1], dtype=torch.float64), 1.0
    while error > 1e-4:
        rows = 1 / (cost * columns).sum(1) / len(cost)
        new = 1 / (cost * rows[:, None]).sum(0) / len(columns)
        columns, error = new, float((new - columns).abs().mean())
    choices = [best(row.tolist(), topk, range(len(columns))) for row in columns * cost * rows[:, None]]
    kind = "sigmoid" if topk == 1 else "softmax"
    return [([scores_of(row, kind)[e] for e in chosen], chosen) for row, chosen in zip(logits, choices, strict=True)]


def best(rank: Sequence[float], topk: int, experts: Sequence[int]) -> list[int]:
    """Returns the `topk` experts with the highest rank."""
    return sorted(experts, key=lambda expert: -rank[expert])[:topk]


def shares(logits: Tensor, config: Any) -> tuple[list[Tensor], list[int]]:
    """Returns the inputs of balancing losses: each token's normalized scores, and how often each expert was chosen."""
    probs = [scores_of(row, config.moe_router_score_function) for row in logits]
    probs = [row / row.sum() for row in probs]
    counts = [0] * logits.shape[1]
    for row in probs:
        for expert in best(row.tolist(), config.moe_router_topk, range(len(counts))):
            counts[expert] += 1
    return probs, counts


def balancing_loss(probs: list[Tensor], counts: Sequence[float], config: Any) -> Tensor:
    """Returns E x sum of (share of the choices) x (mean probability), without coefficient."""
    share = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    return len(counts) * (share * sum(probs) / len(probs)).sum()
