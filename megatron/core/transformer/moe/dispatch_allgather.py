"""Token dispatch by all-gather: each rank gathers all tokens and keeps the rows of its experts.

The way back is a reduce-scatter. Every token is sent to every rank, which is efficient for few ranks, or if tokens
choose many experts. dispatch_alltoall.py is the alternative.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron.core.group_collectives import all_gather_rows
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_size, or_alone
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.dispatch import Dispatched, DispatchedTokens, MoETokenDispatcher, own_experts
from megatron.core.transformer.moe.permutation import (
    PermutationMap,
    build_capacity_limit,
    order_kept_slots_sync,
    order_padded_slots,
    permute_probs,
    permute_tokens,
    sort_by_expert,
    unpermute_tokens,
)
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class GatheredTokens:
    """All ranks' tokens in rank order, N = ranks x T; tokens: [N, H], probs: [N, K].

    expert_indices: [N, K], int64, where 0 is this rank's first expert. Slots of other ranks' experts, and dropped
    slots, are outside the range of this rank's experts. capacity: slots of each rank that an expert keeps; None means
    all.
    """

    tokens: Tensor
    probs: Tensor
    expert_indices: Tensor
    capacity: int | None


class MoEAllGatherTokenDispatcher(MoETokenDispatcher):
    """Gathers tokens over the experts' ranks, then sorts the rows by expert; a single rank gathers nothing.

    Each rank has the same number of tokens. With a capacity, each rank selects the slots to drop among its own.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: TransformerConfig,
        *,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        groups = pg_collection or existing_process_groups()
        local = own_experts(num_local_experts, local_expert_indices, config=config, ep_group=groups.ep)
        assert config.num_moe_experts is not None
        self.group, self.experts, self.num_experts = or_alone(groups.tp_ep), local, config.num_moe_experts
        self.limit = build_capacity_limit(config, self.num_experts)
        if config.moe_pad_expert_input_to_capacity:
            self.order = partial(_order_padded, num_experts=len(local), num_ranks=group_size(self.group))
        elif config.moe_expert_capacity_factor is None and len(local) == self.num_experts:
            self.order = partial(_order_all, num_experts=len(local))
        else:
            self.order = partial(_order_own_sync, num_experts=len(local))

    def send(self, tokens: Tensor, preprocessed: tuple[Tensor, Tensor]) -> GatheredTokens:
        """Gathers all ranks' tokens and choices; tokens: [T, H], any float dtype.

        preprocessed: probs [T, K], float, and expert_indices [T, K], int64.
        """
        probs, expert_indices = preprocessed
        limited = self.limit(probs, expert_indices)
        if limited is not None:
            # One past the last expert, which no rank has.
            expert_indices = expert_indices.where(limited.kept, self.num_experts)
        return GatheredTokens(
            gather_from_sequence_parallel_region(tokens, group=self.group),
            gather_from_sequence_parallel_region(probs, group=self.group),
            all_gather_rows(expert_indices, self.group).wait() - self.experts.start,
            None if limited is None else limited.capacity,
        )

    def finish_dispatch(self, sent: GatheredTokens) -> Dispatched:
        """Returns the rows of this rank's experts [R, H], tokens_per_expert [e], int64, on the device, and metadata."""
        permutation, tokens_per_expert = self.order(sent)
        rows = DispatchedTokens(permute_tokens(sent.tokens, permutation), permute_probs(sent.probs, permutation))
        return Dispatched(rows, tokens_per_expert, permutation)

    def combine(self, rows: Tensor, metadata: PermutationMap) -> Tensor:
        """rows: [R, H], any float dtype, in expert order and weighted -> [T, H]: the sum of each token's rows."""
        return reduce_scatter_to_sequence_parallel_region(unpermute_tokens(rows, metadata), self.group)


def _order_all(gathered: GatheredTokens, *, num_experts: int) -> tuple[PermutationMap, Tensor]:
    return sort_by_expert(gathered.expert_indices, num_experts)


def _order_own_sync(gathered: GatheredTokens, *, num_experts: int) -> tuple[PermutationMap, Tensor]:
    """Gives the slots of this rank's experts a row each. NOTE: synchronizes, since the number of rows is a shape."""
    here = _is_local(gathered.expert_indices, num_experts)
    return order_kept_slots_sync(gathered.expert_indices, here, num_experts=num_experts)


def _order_padded(gathered: GatheredTokens, *, num_experts: int, num_ranks: int) -> tuple[PermutationMap, Tensor]:
    """Gives each expert `capacity` rows for every rank, so that the host knows the number of rows."""
    assert gathered.capacity is not None, "padding needs a capacity"
    indices, num_tokens = gathered.expert_indices, len(gathered.expert_indices)
    rank_of_token = torch.arange(num_ranks, device=indices.device).repeat_interleave(num_tokens // num_ranks)
    permutation, counts = order_padded_slots(
        indices * num_ranks + rank_of_token.unsqueeze(1),
        _is_local(indices, num_experts),
        num_experts=num_experts * num_ranks,
        capacity=gathered.capacity,
    )
    return permutation, counts.view(num_experts, num_ranks).sum(dim=1)


def _is_local(expert_indices: Tensor, num_experts: int) -> Tensor:
    return (expert_indices >= 0) & (expert_indices < num_experts)
