"""Dispatch by sending each row to the rank of its expert and back: all-to-all over the experts' ranks.

Sends each token once per expert and shard of it. The other way is dispatch_allgather.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_size, or_alone
from megatron.core.transformer.moe.dispatch import Dispatched, DispatchedTokens, MoETokenDispatcher, own_experts
from megatron.core.transformer.moe.permutation import (
    PermutationMap,
    build_row_order,
    permute_probs,
    permute_tokens,
    sort_by_expert,
    unpermute_tokens,
)
from megatron.core.transformer.moe.token_exchange import CollectiveTransport, RowExchange, exchange_counts
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class RowSplits:
    """How many rows go to and come from each rank; None: as many for each.

    counts: [ranks, e], int64, on the device: rows from each rank for each local expert. num_received: all of them.
    """

    counts: Tensor
    num_received: int
    send: list[int] | None = None
    receive: list[int] | None = None


@dataclass(frozen=True)
class SentTokens:
    """Rows on their way, what was launched to send them, and how they were sorted."""

    hidden_states: Tensor
    probs: Tensor
    exchanges: tuple[RowExchange, RowExchange] | None
    permutation: PermutationMap
    splits: RowSplits


@dataclass(frozen=True)
class AllToAllMetadata:
    """permutation: this rank's tokens in the order they are sent. by_expert: received rows in expert order; None: they
    came so. splits: as the rows came, for the way back.
    """

    permutation: PermutationMap
    by_expert: PermutationMap | None
    splits: RowSplits


class MoEAlltoAllTokenDispatcher(MoETokenDispatcher):
    """Sorts by expert, sends, sorts what came by expert; with one rank there is nothing to send.

    An expert that is split over expert-tensor ranks gets its rows on each of them, as an expert of its own there; the
    parts of the result are summed where each token's experts are.
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
        own_experts(num_local_experts, local_expert_indices, config=config, ep_group=groups.ep)
        self.transport, self.num_ranks = CollectiveTransport(or_alone(groups.tp_ep)), group_size(groups.tp_ep)
        self.num_shards, self.num_local_experts = group_size(groups.expt_tp), num_local_experts
        self.is_padded = config.moe_pad_expert_input_to_capacity
        # Megatron's scripts pass the settings to every dispatcher: how many tokens an expert takes is one of them.
        self.row_order = build_row_order(config, self.num_ranks * num_local_experts)

    def begin_dispatch(self, tokens: Tensor, *, probs: Tensor, expert_indices: Tensor) -> SentTokens:
        """tokens: [T, H], any float dtype; probs: [T, K], float; expert_indices: [T, K], int64.

        The rows of a rank are sent as soon as it is known how many there are.
        """
        probs, expert_indices = to_every_shard(
            probs, expert_indices, num_local_experts=self.num_local_experts, num_shards=self.num_shards
        )
        permutation, counts = self.row_order(probs, expert_indices)
        rows, weights = permute_tokens(tokens, permutation), permute_probs(probs, permutation)
        counts = counts.view(self.num_ranks, self.num_local_experts)
        if self.num_ranks == 1:
            return SentTokens(rows, weights, None, permutation, RowSplits(counts, len(rows)))
        # Padded rows are the same number for every expert and rank: nobody has to be asked.
        splits = RowSplits(counts, len(rows)) if self.is_padded else _splits_sync(counts, self.transport.group)
        exchanges = tuple(RowExchange(self.transport, splits.send, splits.receive) for _ in range(2))
        return SentTokens(
            exchanges[0].start(rows), exchanges[1].start(weights), (exchanges[0], exchanges[1]), permutation, splits
        )

    def finish_dispatch(self, begun: SentTokens) -> Dispatched:
        """The rows of this rank's experts [R, H], tokens_per_expert [e], int64, on the device, and metadata."""
        rows, weights = begun.hidden_states, begun.probs
        if begun.exchanges is not None:
            rows, weights = begun.exchanges[0].wait(rows), begun.exchanges[1].wait(weights)
        by_expert = None
        if self.num_ranks > 1 and self.num_local_experts > 1:
            by_expert = _expert_order(begun.splits)
            rows, weights = permute_tokens(rows, by_expert), permute_probs(weights.unsqueeze(1), by_expert)
        metadata = AllToAllMetadata(begun.permutation, by_expert, begun.splits)
        return Dispatched(DispatchedTokens(rows, weights), begun.splits.counts.sum(dim=0), metadata)

    def combine(self, rows: Tensor, metadata: AllToAllMetadata) -> Tensor:
        """rows: [R, H], any float dtype, in expert order and weighted -> [T, H]: the sum of each token's rows."""
        if metadata.by_expert is not None:
            rows = unpermute_tokens(rows, metadata.by_expert)
        if self.num_ranks > 1:
            back = RowExchange(self.transport, metadata.splits.receive, metadata.splits.send)
            rows = back.wait(back.start(rows))
        return unpermute_tokens(rows, metadata.permutation)


def to_every_shard(
    probs: Tensor, expert_indices: Tensor, *, num_local_experts: int, num_shards: int
) -> tuple[Tensor, Tensor]:
    """probs: [T, K], float; expert_indices: [T, K], int64 -> [T, K * shards] each.

    The numbers of experts are then in the order of the ranks, of which shards are neighbours.
    """
    if num_shards == 1:
        return probs, expert_indices
    rank, within = expert_indices // num_local_experts, expert_indices % num_local_experts
    ranks = rank.unsqueeze(-1) * num_shards + torch.arange(num_shards, device=expert_indices.device)  # [T, K, shards]
    copies = ranks * num_local_experts + within.unsqueeze(-1)
    return probs.unsqueeze(-1).expand_as(copies).flatten(1), copies.flatten(1)


def _splits_sync(counts: Tensor, group: torch.distributed.ProcessGroup) -> RowSplits:
    """Tells the ranks how many rows they get; counts: [ranks, e], int64, of the rows that this rank sends.

    NOTE: waits for the device, as the numbers of rows are shapes: the one wait of a layer, and one exchange of counts.
    """
    received = exchange_counts(counts, group)
    send, receive = torch.stack([counts.sum(dim=1), received.sum(dim=1)]).tolist()
    return RowSplits(received, sum(receive), send, receive)


def _expert_order(splits: RowSplits) -> PermutationMap:
    """From rows by sender, each sender's by expert, to rows by expert, each expert's by sender."""
    num_ranks, num_experts = splits.counts.shape
    experts = torch.arange(num_experts, device=splits.counts.device).repeat(num_ranks)
    # With the size given, the host does not wait for the sum.
    expert_of_row = experts.repeat_interleave(splits.counts.flatten(), output_size=splits.num_received)
    return sort_by_expert(expert_of_row.unsqueeze(1), num_experts)[0]
