"""What keeps the loads of experts even: the losses of a router, the step of its bias, and noise for benchmarks.

The losses' formulas and records are in aux_losses.py. T tokens, E experts, K top-k, S positions, B sequences.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.process_groups_config import group_size
from megatron.core.transformer.moe.aux_losses import (
    GLOBAL_LOAD_BALANCING_LOSS,
    LOAD_BALANCING_LOSS,
    SEQ_LOAD_BALANCING_LOSS,
    summed_counts,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.routing import count_tokens, normalised_scores
from megatron.core.transformer.transformer_config import TransformerConfig


class BalancingLoss(NamedTuple):
    """A load-balancing loss, a scalar with its coefficient in it, and the name that it is logged under."""

    name: str
    value: Tensor
    coefficient: float


@dataclass(frozen=True)
class Routed:
    """What a router did with its T = S x B tokens of a micro-batch, position before sequence.

    logits: [T, E], fp32 or fp64. indices: [T, K], int64. group: the ranks that have the micro-batch's other positions.
    average_counts: from this rank's counts [E] to the mean over the micro-batches of all ranks in the step so far.
    """

    logits: Tensor
    indices: Tensor
    num_sequences: int
    group: ProcessGroup | None
    average_counts: Callable[[Tensor], Tensor]

    @functools.cached_property
    def tokens_per_expert(self) -> Tensor:
        """Assignments of each expert: [E], int64; counted once for all that ask."""
        return count_tokens(self.indices, self.logits.shape[-1])


class LoadBalancing:
    """The load-balancing losses that a configuration asks for."""

    def __init__(self, config: TransformerConfig) -> None:
        assert config.num_moe_experts is not None
        self.num_experts, self.topk = config.num_moe_experts, config.moe_router_topk
        self.score_function = config.moe_router_score_function
        # What bias and groups decide is not the scores' doing: the losses count the choice of the scores alone.
        self.counts_actual_choice = not config.moe_router_enable_expert_bias and config.moe_router_num_groups is None
        kinds = (
            ("aux_loss", LOAD_BALANCING_LOSS, self._of_microbatch),
            ("seq_aux_loss", SEQ_LOAD_BALANCING_LOSS, self._of_sequences),
            ("global_aux_loss", GLOBAL_LOAD_BALANCING_LOSS, self._of_global_batch),
        )
        coefficients = [(name, config.aux_loss_coefficient(kind), loss) for kind, name, loss in kinds]
        self.wanted = [(name, coefficient, loss) for name, coefficient, loss in coefficients if coefficient > 0]

    def losses(self, routed: Routed) -> list[BalancingLoss]:
        """Each loss of one micro-batch, of which this rank has a share; none where no coefficient is above 0.

        Collective over the ranks that have shares.
        """
        if not self.wanted:
            return []
        # Over all experts, unlike the weights: an expert that is not chosen must feel the loss too.
        scores = normalised_scores(routed.logits, self.score_function)
        if not self.counts_actual_choice:
            routed = replace(routed, indices=scores.topk(self.topk, dim=-1).indices)
        return [
            BalancingLoss(name, loss(scores, routed, coefficient=coefficient), coefficient)
            for name, coefficient, loss in self.wanted
        ]

    def _of_microbatch(self, scores: Tensor, routed: Routed, *, coefficient: float) -> Tensor:
        counts = summed_counts(routed.tokens_per_expert, routed.group)
        return self._switch_loss(scores, counts, group=routed.group, coefficient=coefficient)

    def _of_sequences(self, scores: Tensor, routed: Routed, *, coefficient: float) -> Tensor:
        """The mean over sequences of each one's own loss: every column is an expert as one sequence sees it."""
        num_sequences = routed.num_sequences
        sequence = torch.arange(len(scores), device=scores.device).remainder(num_sequences).unsqueeze(1)  # [T, 1]
        counts = count_tokens(sequence * self.num_experts + routed.indices, num_sequences * self.num_experts)  # [B * E]
        by_sequence = scores.view(-1, len(counts))  # [S, B * E]
        counts = summed_counts(counts, routed.group)
        return self._switch_loss(by_sequence, counts, group=routed.group, coefficient=coefficient) / num_sequences

    def _of_global_batch(self, scores: Tensor, routed: Routed, *, coefficient: float) -> Tensor:
        counts = routed.average_counts(routed.tokens_per_expert)
        return self._switch_loss(scores, counts.to(scores.dtype), group=routed.group, coefficient=coefficient)

    def _switch_loss(self, scores: Tensor, counts: Tensor, *, group: ProcessGroup | None, coefficient: float) -> Tensor:
        return switch_load_balancing_loss_func(
            scores,
            counts,
            total_num_tokens=len(scores) * group_size(group),
            topk=self.topk,
            num_experts=self.num_experts,
            moe_aux_loss_coeff=coefficient,
        )


def get_updated_expert_bias(tokens_per_expert: Tensor, expert_bias: Tensor, expert_bias_update_rate: float) -> Tensor:
    """The bias after a step: `expert_bias_update_rate` more for experts with fewer tokens than the mean, less for more.

    tokens_per_expert: [*, E], integer or float, summed over the global batch; expert_bias: [*, E], fp32.
    Returns [*, E], fp32.
    """
    with torch.no_grad():
        # E times both sides: whole numbers, so that an expert with exactly the mean stays.
        missing = tokens_per_expert.sum(dim=-1, keepdim=True) - tokens_per_expert.shape[-1] * tokens_per_expert
        return expert_bias + missing.sign() * expert_bias_update_rate


def with_even_loads(logits: Tensor, *, seed: int) -> Tensor:
    """Uniform noise in place of the logits, which still get the gradient; logits: [T, E], fp32 or fp64, same shape out.

    The noise depends on `seed` and the place alone: no generator moves, and each step and device routes alike.
    """
    mask = 0xFFFFFFFF
    numbers = torch.arange(logits.numel(), device=logits.device) + (seed * 0x9E3779B9 & mask)
    for _ in range(2):
        # An integer hash: neighbours become numbers that have nothing to do with each other.
        numbers = ((numbers ^ (numbers >> 16)) * 0x45D9F3B) & mask
    noise = ((numbers ^ (numbers >> 16)).double() / mask).view_as(logits).to(logits.dtype)
    return _StraightThrough.apply(logits, noise)


class _StraightThrough(torch.autograd.Function):
    """The second tensor, with the gradient going to the first."""

    @staticmethod
    def forward(ctx: object, logits: Tensor, noise: Tensor) -> Tensor:
        return noise.view_as(noise)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
