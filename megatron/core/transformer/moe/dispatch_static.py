"""Dispatch into buffers whose size the host knows beforehand: no shape depends on the routing, nothing is read back.

How many of the C rows are live stands on the device alone, as does whether C was too few. C = tokens x top-k x
moe_expert_rank_capacity_factor, at most what all tokens could bring. Tokens are gathered, as in dispatch_allgather.py,
or sent, as in dispatch_alltoall.py but with a limit for each pair of ranks; what travels is static_parts.py's, which on
the CPU, where no read waits, leaves out what is not filled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.device import default_device
from megatron.core.group_collectives import all_gather_rows
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_size, or_alone
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.dispatch import (
    Dispatched,
    DispatchedTokens,
    MoETokenDispatcher,
    RowDemand,
    own_experts,
)
from megatron.core.transformer.moe.dispatch_alltoall import to_every_shard
from megatron.core.transformer.moe.static_parts import PartLayout, Parts, PartSizes, part_layout
from megatron.core.transformer.moe.static_rows import (
    StaticOrder,
    aligned_rows,
    gather_live_rows,
    order_by_expert,
    sum_live_rows,
)
from megatron.core.transformer.moe.token_exchange import CollectiveTransport, RowExchange, RowTransport
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class StaticBudget:
    """Rows of the static buffers. factor: of the balanced case; alignment: each expert's rows are a multiple of it.

    num_experts: of a rank. num_ranks: of all experts; num_shards of them share each expert.
    """

    factor: float
    topk: int
    num_experts: int
    num_ranks: int
    num_shards: int
    alignment: int

    @property
    def largest_factor(self) -> float:
        """With which, without alignment, no routing loses rows: all tokens come to one rank."""
        return self.num_ranks * self._most(1) / self._balanced_rows(1)

    def rows_of_rank(self, num_tokens: int) -> int:
        """C, from all ranks to one; num_tokens: T, of each rank."""
        rows = min(math.ceil(self._balanced_rows(num_tokens) * self.factor), self._most_of_rank(num_tokens))
        return math.ceil(rows / self.alignment) * self.alignment

    def rows_of_pair(self, num_tokens: int) -> int:
        """Returns the most rows from one rank to another; num_tokens: T, of each rank."""
        balanced = self._balanced_rows(num_tokens) / self.num_ranks
        return min(math.ceil(balanced * self.factor), self._most(num_tokens))

    def demand_on_rank(self, rows_needed: Tensor, num_tokens: int) -> RowDemand:
        """rows_needed: [1], int64, of the rows_of_rank."""
        missing = (rows_needed - self.rows_of_rank(num_tokens)).clamp(min=0)
        can_lose = self.rows_of_rank(num_tokens) < self._most_of_rank(num_tokens)
        return RowDemand(missing, rows_needed.float() / max(1, self._balanced_rows(num_tokens)), can_lose)

    def demand_on_pair(self, rows_needed: Tensor, num_tokens: int) -> RowDemand:
        """rows_needed: [1], int64, of the rows_of_pair."""
        missing = (rows_needed - self.rows_of_pair(num_tokens)).clamp(min=0)
        balanced = self._balanced_rows(num_tokens) / self.num_ranks
        can_lose = self.rows_of_pair(num_tokens) < self._most(num_tokens)
        return RowDemand(missing, rows_needed.float() / (balanced or 1), can_lose)

    def _balanced_rows(self, num_tokens: int) -> int:
        """Rows of a rank where all ranks get as many."""
        return num_tokens * self.topk * self.num_shards

    def _most_of_rank(self, num_tokens: int) -> int:
        # Each expert's rows may end with padding.
        return self.num_ranks * self._most(num_tokens) + self.num_experts * (self.alignment - 1)

    def _most(self, num_tokens: int) -> int:
        """Rows that one rank's tokens can bring to another: a token comes to an expert once."""
        return num_tokens * min(self.topk, self.num_experts)


@dataclass(frozen=True)
class StaticRows:
    """Rows of a static buffer in the order of their experts or ranks, and the way back. C rows, N x K slots.

    num_rows: [1], int64, on the device: the first so many are read.
    """

    order: StaticOrder
    num_rows: Tensor

    def take(self, tokens: Tensor, probs: Tensor) -> DispatchedTokens:
        """tokens: [N, H], probs: [N, K], float -> [C, H] and [C]; rows beyond num_rows hold any bytes."""
        order = self.order
        rows = gather_live_rows(tokens, order.token_of_row, row_of_slot=order.row_of_slot, num_rows=self.num_rows)
        weights = gather_live_rows(
            probs.reshape(-1, 1),
            order.slot_of_row,
            row_of_slot=order.row_of_slot.view(-1, 1),
            num_rows=self.num_rows,
        )
        return DispatchedTokens(rows, weights.view(-1))

    def give_back(self, rows: Tensor) -> Tensor:
        """rows: [C, H], float -> [N, H], the sum of each token's rows."""
        order = self.order
        return sum_live_rows(rows, order.row_of_slot, source_of_row=order.token_of_row, num_rows=self.num_rows)


class MoEStaticTokenDispatcher(MoETokenDispatcher):
    """Base class of the static dispatchers: the budget, and rows by expert in the buffer of C rows."""

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        *,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        row_alignment: int = 1,
    ) -> None:
        """row_alignment: rows of zeros fill up each expert's to a multiple of this."""
        groups = pg_collection or existing_process_groups()
        local = own_experts(num_local_experts, local_expert_indices, config=config, ep_group=groups.ep)
        assert config.moe_expert_rank_capacity_factor is not None, "the layer chooses this dispatcher by it"
        self.group, self.experts = or_alone(groups.tp_ep), local
        self.budget = StaticBudget(
            factor=config.moe_expert_rank_capacity_factor,
            topk=config.moe_router_topk,
            num_experts=len(local),
            num_ranks=group_size(groups.tp_ep),
            num_shards=group_size(groups.expt_tp),
            alignment=row_alignment,
        )

    def set_capacity_factor(self, factor: float) -> None:
        """Replaces moe_expert_rank_capacity_factor for the following dispatches."""
        self.budget = replace(self.budget, factor=factor)

    def by_expert(self, expert_indices: Tensor, *, num_tokens: int) -> StaticRows:
        """expert_indices: [N, K], int64, from this rank's first expert; num_tokens: T, of each rank."""
        capacity = self.budget.rows_of_rank(num_tokens)
        order = order_by_expert(expert_indices, len(self.experts), capacity=capacity, alignment=self.budget.alignment)
        return StaticRows(order, order.rows_per_group.sum(0, keepdim=True))


@dataclass(frozen=True)
class StaticGathered:
    """All ranks' tokens [N, H] and weights [N, K], and their rows in this rank's buffer. num_tokens: T, of each."""

    tokens: Tensor
    probs: Tensor
    rows: StaticRows
    num_tokens: int


class MoEStaticAllGatherTokenDispatcher(MoEStaticTokenDispatcher):
    """Every rank gathers all tokens and keeps the rows of its experts."""

    def begin_dispatch(self, tokens: Tensor, *, probs: Tensor, expert_indices: Tensor) -> StaticGathered:
        """tokens: [T, H], any float dtype; probs: [T, K], float; expert_indices: [T, K], int64."""
        return self.send(tokens, self.preprocess(tokens, probs=probs, expert_indices=expert_indices))

    def preprocess(self, tokens: Tensor, *, probs: Tensor, expert_indices: Tensor) -> tuple[Tensor, StaticRows]:
        """tokens: [T, H], any float dtype; probs: [T, K], float; expert_indices: [T, K], int64.

        Gathers what the routers of all ranks chose. Returns probs, and where rows are to be.
        """
        indices = all_gather_rows(expert_indices, self.group).wait() - self.experts.start
        return probs, self.by_expert(indices, num_tokens=len(tokens))

    def send(self, tokens: Tensor, preprocessed: tuple[Tensor, StaticRows]) -> StaticGathered:
        """tokens: [T, H], any float dtype."""
        probs, rows = preprocessed
        return StaticGathered(
            gather_from_sequence_parallel_region(tokens, group=self.group),
            gather_from_sequence_parallel_region(probs, group=self.group),
            rows,
            len(tokens),
        )

    def finish_dispatch(self, begun: StaticGathered) -> Dispatched:
        """The rows of this rank's experts [C, H], rows of each expert [e], int64, on the device, and metadata."""
        order = begun.rows.order
        rows = begun.rows.take(begun.tokens, begun.probs)
        demand = self.budget.demand_on_rank(order.rows_needed, begun.num_tokens)
        return Dispatched(rows, order.rows_per_group, begun.rows, demand)

    def combine(self, rows: Tensor, metadata: StaticRows) -> Tensor:
        """rows: [C, H], any float dtype, in expert order and weighted -> [T, H]: the sum of each token's rows."""
        return reduce_scatter_to_sequence_parallel_region(metadata.give_back(rows), self.group)


@dataclass(frozen=True)
class StaticSent:
    """Rows on their way, [S, H], and their weights [S, 1]. sent: this rank's, as `parts` has them. num_tokens: T."""

    tokens: Tensor
    probs: Tensor
    exchanges: tuple[RowExchange, RowExchange]
    parts: Parts
    sent: StaticRows
    num_tokens: int


@dataclass(frozen=True)
class StaticExchanged:
    """sent: this rank's tokens in the order of `parts`. received: what came, by expert."""

    parts: Parts
    sent: StaticRows
    received: StaticRows


@dataclass(frozen=True)
class Wire:
    """The transport of rows, and the layout of its parts in the communication buffers."""

    transport: RowTransport
    layout: PartLayout


class MoEStaticAlltoAllTokenDispatcher(MoEStaticTokenDispatcher):
    """Every rank sends its rows to the ranks of their experts, at most as many to each as a part has room for."""

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        *,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        row_alignment: int = 1,
        wire: Wire | None = None,
    ) -> None:
        """row_alignment: rows of zeros fill up each expert's to a multiple of this. wire: torch's collectives, and
        the device's way to lay out parts, unless given.
        """
        super().__init__(
            num_local_experts,
            local_expert_indices,
            config=config,
            pg_collection=pg_collection,
            row_alignment=row_alignment,
        )
        self.wire = wire or Wire(CollectiveTransport(self.group), part_layout(default_device()))

    def begin_dispatch(self, tokens: Tensor, *, probs: Tensor, expert_indices: Tensor) -> StaticSent:
        """tokens: [T, H], any float dtype; probs: [T, K], float; expert_indices: [T, K], int64."""
        return self.send(tokens, self.preprocess(tokens, probs=probs, expert_indices=expert_indices))

    def preprocess(
        self, tokens: Tensor, *, probs: Tensor, expert_indices: Tensor
    ) -> tuple[DispatchedTokens, tuple[Parts, StaticRows]]:
        """tokens: [T, H], any float dtype; probs: [T, K], float; expert_indices: [T, K], int64.

        Ranks tell each other their numbers of rows. Returns the rows to send, and how they lie.
        """
        budget, num_experts = self.budget, len(self.experts)
        probs, expert_indices = to_every_shard(
            probs, expert_indices, num_local_experts=num_experts, num_shards=budget.num_shards
        )
        sizes = PartSizes(self.group, budget.num_ranks, num_experts, budget.rows_of_pair(len(tokens)))
        parts = self.wire.layout(expert_indices, sizes)
        # What a part has no row for travels as zeros, which nobody reads.
        sent = StaticRows(parts.sent, expert_indices.new_full((1,), len(parts.sent.slot_of_row)))
        return sent.take(tokens, probs), (parts, sent)

    def send(self, tokens: Tensor, preprocessed: tuple[DispatchedTokens, tuple[Parts, StaticRows]]) -> StaticSent:
        """tokens: [T, H], any float dtype."""
        rows, (parts, sent) = preprocessed
        exchanges = self._exchange(parts), self._exchange(parts)
        return StaticSent(
            exchanges[0].start(rows.hidden_states),
            exchanges[1].start(rows.probs.unsqueeze(1)),
            exchanges,
            parts,
            sent,
            len(tokens),
        )

    def finish_dispatch(self, begun: StaticSent) -> Dispatched:
        """The rows of this rank's experts [C, H], rows of each expert [e], int64, on the device, and metadata."""
        tokens, probs = begun.exchanges[0].wait(begun.tokens), begun.exchanges[1].wait(begun.probs)
        received = self.by_expert(begun.parts.experts, num_tokens=begun.num_tokens)
        metadata = StaticExchanged(begun.parts, begun.sent, received)
        return Dispatched(
            received.take(tokens, probs), received.order.rows_per_group, metadata, self._demand_of_both(begun)
        )

    def _demand_of_both(self, begun: StaticSent) -> RowDemand:
        """Returns the larger demand of the sending pairs and of the receiving rank.

        The receiving rank also counts rows for which no pair had room.
        """
        budget = self.budget
        on_rank = aligned_rows(begun.parts.counts.sum(0), budget.alignment).sum(0, keepdim=True)
        pair = budget.demand_on_pair(begun.parts.sent.rows_needed, begun.num_tokens)
        rank = budget.demand_on_rank(on_rank, begun.num_tokens)
        return RowDemand(
            torch.maximum(pair.rows_missing, rank.rows_missing),
            torch.maximum(pair.factor_needed, rank.factor_needed),
            pair.can_lose or rank.can_lose,
        )

    def combine(self, rows: Tensor, metadata: StaticExchanged) -> Tensor:
        """rows: [C, H], any float dtype, in expert order and weighted -> [T, H]: the sum of each token's rows."""
        back = RowExchange(self.wire.transport, metadata.parts.receive, metadata.parts.send)
        return metadata.sent.give_back(back.wait(back.start(metadata.received.give_back(rows))))

    def _exchange(self, parts: Parts) -> RowExchange:
        return RowExchange(self.wire.transport, parts.send, parts.receive)
