"""Experts chosen by each rank's tokens, balanced or not. Holds no tests."""

import torch
from torch import Tensor

EXPERTS, TOKENS, TOPK = 12, 40, 2
ROUTINGS = ("even", "one_expert", "one_rank")


def chosen_experts(rank: int, routing: str) -> Tensor:
    """Returns distinct experts for each token of a rank: [T, K], int64."""
    scores = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(rank))
    scores[:, : {"even": 0, "one_expert": 1, "one_rank": 2}[routing]] += 2
    return scores.topk(TOPK).indices
