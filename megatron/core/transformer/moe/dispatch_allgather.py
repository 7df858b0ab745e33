"""Token dispatch by all-gather: each rank gathers all tokens and keeps the rows of its experts.

Combining uses a reduce-scatter. Every token is sent to every rank, which is efficient for few ranks, or if each token
chooses many experts. dispatch_alltoall.py is the alternative.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from megatron.core.transformer.moe.dispatch import Dispatch, MoETokenDispatcher, own_experts
from megatron.core.transformer.moe.permutation import (
    PermutationMap,
    build_capacity_limit,
    order_kept_slots_sync,
    order_padded_slots,
    permute_tokens,
    sort_by_expert,
    unpermute_tokens,
)
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Choices:
    """Expert choices of this rank's tokens or, after the gather, of all ranks' tokens in rank order.

    expert_indices: [N, K], int64. Before the gather, indices start at the layer's first expert; after it, at this
    rank's first expert, and the indices of other ranks' experts and of slots without an expert are out of range.
    capacity: number of slots from each rank that an expert keeps; None means all. has_absent: whether some slots have
    no expert.
    """

    expert_indices: Tensor
    capacity: int | None
    has_absent: bool


class MoEAllGatherTokenDispatcher(MoETokenDispatcher):
    """Gathers tokens over the expert ranks, then sorts the rows by expert; a single rank gathers nothing.

    All ranks must have the same number of tokens. With a capacity, each rank selects the slots of its tokens to drop.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config, pg_collection)
        groups = pg_collection or existing_process_groups()
        local = own_experts(num_local_experts, local_expert_indices, config=config, ep_group=groups.ep)
        assert config.num_moe_experts is not None
        self.group, self.experts, self.num_experts = or_alone(groups.tp_ep), local, config.num_moe_experts
        self.num_local_experts, self.local_expert_indices = len(local), list(local)
        self.limit = build_capacity_limit(config, self.num_experts)
        if config.moe_pad_expert_input_to_capacity:
            self.order = partial(_order_padded, num_experts=len(local), num_ranks=group_size(self.group))
        elif config.moe_expert_capacity_factor is None and len(local) == self.num_experts:
            self.order = partial(_order_all, num_experts=len(local))
        else:
            self.order = partial(_order_own_sync, num_experts=len(local))

    def _begin(self, tokens: Tensor, ordered: tuple[Tensor, Tensor, bool], state: Dispatch) -> tuple[Tensor, Tensor]:
        probs, expert_indices, has_absent = ordered
        limited = self.limit(probs, expert_indices, expert_indices < self.num_experts if has_absent else None)
        if limited is not None:
            # One past the last expert, an index that belongs to no rank, as for slots without an expert.
            expert_indices = expert_indices.where(limited.kept, self.num_experts)
        state.rows = Choices(expert_indices, None if limited is None else limited.capacity, has_absent)
        return tokens, probs

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Selects the choices to keep; hidden_states: [*, H], float. Returns tokens [T, H] and weights [T, K].

        routing_map, probs: see MoETokenDispatcher.
        """
        return super().dispatch_preprocess(hidden_states, routing_map, probs)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Gathers all ranks' tokens, weights and choices; hidden_states: [T, H], any float dtype; probs: [T, K].

        Returns [N, H] and [N, K], N = ranks x T.
        """
        state = self._current.state
        own: Choices = state.rows
        tokens = gather_from_sequence_parallel_region(hidden_states, group=self.group)
        probs = gather_from_sequence_parallel_region(probs, group=self.group)
        indices = all_gather_rows(own.expert_indices, self.group).wait() - self.experts.start
        state.rows = replace(own, expert_indices=indices)
        self._run_shared_experts(state)
        return tokens, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Selects the rows of this rank's experts; hidden_states: [N, H], any float dtype; probs: [N, K].

        Returns rows [R, H], tokens_per_expert [e], int64, on the device, and the weight of each row [R].
        """
        state = self._current.state
        permutation, tokens_per_expert = self.order(state.rows)
        state.rows = permutation
        rows, weights = permute_tokens(hidden_states, probs, permutation)
        return rows, tokens_per_expert, weights

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Sums each token's rows on this rank. Returns [N, H].

        hidden_states: [R, H], any float dtype, already multiplied by the weights.
        """
        return unpermute_tokens(hidden_states, self._current.state.rows)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Sums each token over the ranks; hidden_states: [N, H], any float dtype. Returns [T, H]. Collective."""
        return reduce_scatter_to_sequence_parallel_region(hidden_states, self.group)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Reshapes the tokens to their original shape; hidden_states: [T, H], any float dtype. Returns [*, H]."""
        return self._end(hidden_states, self._current.state)


def _order_all(gathered: Choices, *, num_experts: int) -> tuple[PermutationMap, Tensor]:
    if gathered.has_absent:
        return _order_own_sync(gathered, num_experts=num_experts)
    return sort_by_expert(gathered.expert_indices, num_experts)


def _order_own_sync(gathered: Choices, *, num_experts: int) -> tuple[PermutationMap, Tensor]:
    """Assigns a row to each slot of this rank's experts. NOTE: synchronizes, because the number of rows is a shape."""
    here = _is_local(gathered.expert_indices, num_experts)
    return order_kept_slots_sync(gathered.expert_indices, here, num_experts=num_experts)


def _order_padded(gathered: Choices, *, num_experts: int, num_ranks: int) -> tuple[PermutationMap, Tensor]:
    """Assigns `capacity` rows per rank to each expert, so that the host knows the number of rows."""
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
