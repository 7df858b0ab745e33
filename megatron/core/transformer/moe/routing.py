"""From router logits to experts and weights: scores, the choice among all or some experts, Sinkhorn's choice.

Pure functions; the router that owns weights, bias and losses is in router.py. T tokens, E experts, K top-k, G groups.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

# (logits [T, E], expert bias [E] or None) to weights [T, K] and expert indices [T, K].
Route = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
# What torch.topk gives: (scores [T, E]) to the K highest and their indices.
_Choose = Callable[[Tensor], tuple[Tensor, Tensor]]
# Keeps a token whose scores are all zero from being divided by zero.
_EPSILON = 1e-20


def build_route(
    topk: int,
    *,
    pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    group_score: str = "sum",
    scaling_factor: float | None = None,
    score_function: str = "softmax",
) -> Route:
    """The routing that the options describe, as one function; which parts it has is decided here and not per token."""
    choose: _Choose = partial(torch.topk, k=topk, dim=-1)
    if num_groups is not None and group_topk is not None:
        counted = 1 if group_score == "max" else topk // group_topk
        choose = partial(
            group_limited_topk, topk=topk, num_groups=num_groups, group_topk=group_topk, scores_per_group=counted
        )
    if score_function == "softmax" and not pre_softmax:
        route: Route = partial(_softmax_of_chosen, choose=choose)
    else:
        # A softmax is a share of all experts already; the others become shares of the chosen.
        share = score_function != "softmax" and topk > 1
        route = partial(
            _scores_of_chosen,
            score=_SCORES[score_function],
            choose=choose,
            finish=_normalised if share else _unchanged,
        )
    return route if scaling_factor is None else partial(_scaled, route=route, factor=scaling_factor)


def build_sinkhorn_routes(topk: int) -> tuple[Route, Route]:
    """Routing that balances each micro-batch in training, and the one for evaluation, where nothing is balanced."""
    score = _SCORES["sigmoid" if topk == 1 else "softmax"]
    plain: _Choose = partial(torch.topk, k=topk, dim=-1)
    evaluation = partial(_scores_of_chosen, score=score, choose=plain, finish=_unchanged)
    return partial(_sinkhorn_route, score=score, choose=plain), evaluation


def group_limited_topk(
    scores: Tensor, *, topk: int, num_groups: int, group_topk: int, scores_per_group: int
) -> tuple[Tensor, Tensor]:
    """The K best experts of the best groups; a group is as good as the sum of its scores_per_group best scores.

    scores: [T, E], fp32 or fp64, neighbours in a group -> their scores [T, K], same dtype, and indices [T, K], int64.
    """
    by_group = scores.unflatten(-1, (num_groups, -1))  # [T, G, E / G]
    group_scores = by_group.topk(scores_per_group, dim=-1).values.sum(dim=-1)  # [T, G]
    allowed = torch.zeros_like(group_scores, dtype=torch.bool)
    allowed.scatter_(1, group_scores.topk(group_topk, dim=-1).indices, True)
    return torch.topk(by_group.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(1), k=topk, dim=-1)


def normalised_scores(logits: Tensor, score_function: str) -> Tensor:
    """Scores of all experts that sum to one per token; logits: [T, E], fp32 or fp64 -> [T, E], same dtype."""
    scores = _SCORES[score_function](logits)
    return scores if score_function == "softmax" else _normalised(scores)


def sinkhorn(cost: Tensor, tol: float = 1e-4, *, max_iterations: int = 50) -> Tensor:
    """exp(cost) with rows and columns scaled in turn until the experts share the tokens evenly.

    cost: [T, E], fp32 or fp64. Returns [T, E], same dtype: rows sum to 1 / T, columns to about 1 / E. Columns stay as
    they are once they change by less than `tol` on average, without the host looking.
    """
    num_tokens, num_experts = cost.shape
    # A factor per row changes nothing that follows, and keeps exp from overflowing.
    matrix = (cost - cost.amax(dim=1, keepdim=True)).exp()
    columns = cost.new_ones(num_experts)
    rows, done = cost.new_zeros(num_tokens), torch.zeros((), dtype=torch.bool, device=cost.device)
    for _ in range(max_iterations):
        new_rows = _inverse(matrix @ columns, num_tokens)
        new_columns = _inverse(new_rows @ matrix, num_experts)
        error = (new_columns - columns).abs().mean()
        rows, columns = torch.where(done, rows, new_rows), torch.where(done, columns, new_columns)
        done = done | (error <= tol)
    return columns * matrix * rows.unsqueeze(1)


def count_tokens(expert_indices: Tensor, num_experts: int) -> Tensor:
    """Assignments of each expert; expert_indices: [T, K], int64 -> [E], int64, on the same device, without a sync."""
    slots = expert_indices.reshape(-1)
    # Not bincount, which reads the largest index on the host. Whole numbers: the same sum in any order.
    return slots.new_zeros(num_experts).scatter_add_(0, slots, torch.ones_like(slots))


def _softmax_of_chosen(logits: Tensor, expert_bias: Tensor | None, *, choose: _Choose) -> tuple[Tensor, Tensor]:
    assert expert_bias is None, "RouterConfig refuses a bias for softmax scores"
    # Softmax after the choice: the K weights of a token sum to one.
    chosen, indices = choose(logits)
    return chosen.softmax(dim=-1), indices


def _scores_of_chosen(
    logits: Tensor,
    expert_bias: Tensor | None,
    *,
    score: Callable[[Tensor], Tensor],
    choose: _Choose,
    finish: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    scores = score(logits)
    # The bias decides who is chosen, never with which weight.
    _, indices = choose(scores if expert_bias is None else scores + expert_bias)
    return finish(scores.gather(1, indices)), indices


def _sinkhorn_route(
    logits: Tensor, expert_bias: Tensor | None, *, score: Callable[[Tensor], Tensor], choose: _Choose
) -> tuple[Tensor, Tensor]:
    assert expert_bias is None, "RouterConfig refuses a bias for softmax scores"
    with torch.no_grad():
        _, indices = choose(sinkhorn(logits))
    return score(logits).gather(1, indices), indices


def _scaled(logits: Tensor, expert_bias: Tensor | None, *, route: Route, factor: float) -> tuple[Tensor, Tensor]:
    weights, indices = route(logits, expert_bias)
    return weights * factor, indices


def _sqrt_softplus(logits: Tensor) -> Tensor:
    # Where softplus is zero the root's slope is infinite, and the gradient would be NaN.
    return F.softplus(logits).clamp_min(torch.finfo(logits.dtype).tiny).sqrt()


def _normalised(scores: Tensor) -> Tensor:
    return scores / (scores.sum(dim=-1, keepdim=True) + _EPSILON)


def _unchanged(scores: Tensor) -> Tensor:
    return scores


def _inverse(sums: Tensor, count: int) -> Tensor:
    return 1 / (count * (sums + 1e-8))


_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _sqrt_softplus,
}
