"""Token dispatch into buffers of a fixed size: no shape depends on the routing, and the host reads nothing back.

From top to bottom: the sizes of the buffers, rows in a buffer, the dispatcher that gathers tokens, the rows that a pair
of ranks exchanges, and the dispatcher that sends rows. Only the device knows how many rows are live.

T tokens of each rank, N tokens of all ranks, H hidden, K choices of a token, e experts of this rank, C rows of the
buffer of this rank's experts, P rows that one rank sends to another.

[Note: rows of a fixed size]
C is the balanced number of rows, tokens x top-k, times moe_expert_rank_capacity_factor, and at most the number that all
tokens could need. If more rows arrive, some are dropped (expert overflow). Every dispatch returns its demand on the
device, and training/ discards a step that dropped rows and retries it with a larger factor. The dispatcher that sends
rows has a second limit, P rows for each pair of ranks; its demand is the larger of the two.

[Note: packed and padded rows]
On a GPU a pair of ranks always exchanges P rows, because the host does not know how many of them hold a token; the
others are padding. On the CPU the host can read that number without waiting, so only filled rows are sent. The buffers
of the experts are the same either way.

[Note: row alignment]
Some grouped products, such as fp8 ones, require that the rows of each expert start at a multiple of a number of rows.
With a row_alignment above 1 each expert's rows in the buffer end with zero rows up to such a multiple, and these count
as live. The products of this framework have no such requirement: build_token_dispatcher leaves the alignment at 1, and
only a caller that builds a dispatcher itself sets another one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
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
from megatron.core.transformer.moe.dispatch_alltoall import (
    CollectiveTransport,
    RowExchange,
    RowTransport,
    exchange_counts,
    to_every_shard,
)
from megatron.core.transformer.moe.static_rows import (
    StaticOrder,
    aligned_rows,
    expert_of_received_rows,
    gather_live_rows,
    order_by_expert,
    order_by_rank,
    sum_live_rows,
)
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class StaticBudget:
    """Sizes of the static buffers, and the demand of a routing on them. See [Note: rows of a fixed size].

    factor: multiple of the balanced number of rows. alignment: each expert's rows are padded to a multiple of this;
    see [Note: row alignment]. num_experts: experts of one rank. num_ranks: ranks of all experts, of which num_shards
    share each expert.
    """

    factor: float
    topk: int
    num_experts: int
    num_ranks: int
    num_shards: int
    alignment: int

    @property
    def largest_factor(self) -> float:
        """The factor with which no routing drops rows, even if all tokens go to one rank. Ignores alignment."""
        return self.num_ranks * self._most(1) / self._balanced_rows(1)

    def rows_of_rank(self, num_tokens: int) -> int:
        """Returns C, the rows of one rank's experts; num_tokens: T, of each rank."""
        rows = min(math.ceil(self._balanced_rows(num_tokens) * self.factor), self._most_of_rank(num_tokens))
        return math.ceil(rows / self.alignment) * self.alignment

    def rows_of_pair(self, num_tokens: int) -> int:
        """Returns P, the rows from one rank to another; num_tokens: T, of each rank."""
        balanced = self._balanced_rows(num_tokens) / self.num_ranks
        return min(math.ceil(balanced * self.factor), self._most(num_tokens))

    def demand_on_rank(self, rows_needed: Tensor, num_tokens: int) -> RowDemand:
        """Compares rows_needed: [1], int64, with rows_of_rank."""
        missing = (rows_needed - self.rows_of_rank(num_tokens)).clamp(min=0)
        can_lose = self.rows_of_rank(num_tokens) < self._most_of_rank(num_tokens)
        return RowDemand(missing, rows_needed.float() / max(1, self._balanced_rows(num_tokens)), can_lose)

    def demand_on_pair(self, rows_needed: Tensor, num_tokens: int) -> RowDemand:
        """Compares rows_needed: [1], int64, with rows_of_pair."""
        missing = (rows_needed - self.rows_of_pair(num_tokens)).clamp(min=0)
        balanced = self._balanced_rows(num_tokens) / self.num_ranks
        can_lose = self.rows_of_pair(num_tokens) < self._most(num_tokens)
        return RowDemand(missing, rows_needed.float() / (balanced or 1), can_lose)

    def _balanced_rows(self, num_tokens: int) -> int:
        """Returns the rows of a rank if all ranks receive the same number."""
        return num_tokens * self.topk * self.num_shards

    def _most_of_rank(self, num_tokens: int) -> int:
        # Each expert may need up to alignment - 1 rows of padding.
        return self.num_ranks * self._most(num_tokens) + self.num_experts * (self.alignment - 1)

    def _most(self, num_tokens: int) -> int:
        """Returns the most rows that one rank's tokens can need on another; a token chooses an expert at most once."""
        return num_tokens * min(self.topk, self.num_experts)


@dataclass(frozen=True)
class StaticRows:
    """Moves tokens into a static buffer, ordered by expert or by rank, and sums them back. C rows, N x K slots.

    num_rows: [1], int64, on the device: the number of live rows, which are the first ones.
    """

    order: StaticOrder
    num_rows: Tensor

    def take(self, tokens: Tensor, probs: Tensor) -> DispatchedTokens:
        """Fills the buffer; tokens: [N, H], probs: [N, K], float -> [C, H] and [C].

        Rows beyond num_rows hold any bytes.
        """
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
        """Sums each token's rows; rows: [C, H], float -> [N, H]."""
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
        """row_alignment: see [Note: row alignment]."""
        groups = pg_collection or existing_process_groups()
        local = own_experts(num_local_experts, local_expert_indices, config=config, ep_group=groups.ep)
        assert config.moe_expert_rank_capacity_factor is not None, "this factor selects static dispatchers"
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

    def reserve(self, num_tokens: int, *, row_bytes: int) -> None:
        """Allocates memory that dispatches keep, before a CUDA graph holds one of them. Collective; here it needs none.

        num_tokens: T, of each rank. row_bytes: of one token's H elements. No graph may use the memory of a smaller
        factor or T any more.
        """

    def by_expert(self, expert_indices: Tensor, *, num_tokens: int, first_expert: int = 0) -> StaticRows:
        """Orders rows in the buffer of C rows; expert_indices: [N, K], int64 or int32.

        num_tokens: T, of each rank. first_expert: the index of this rank's first expert.
        """
        order = order_by_expert(
            expert_indices,
            len(self.experts),
            capacity=self.budget.rows_of_rank(num_tokens),
            alignment=self.budget.alignment,
            first_expert=first_expert,
        )
        return StaticRows(order, order.num_rows)


# --- Gathering tokens ---


@dataclass(frozen=True)
class StaticGathered:
    """Tokens [N, H] and weights [N, K] of all ranks, and their rows in this rank's buffer. num_tokens: T."""

    tokens: Tensor
    probs: Tensor
    rows: StaticRows
    num_tokens: int


class MoEStaticAllGatherTokenDispatcher(MoEStaticTokenDispatcher):
    """Gathers all tokens on every rank, which keeps the rows of its experts; a single rank gathers nothing."""

    def preprocess(self, tokens: Tensor, *, probs: Tensor, expert_indices: Tensor) -> tuple[Tensor, StaticRows]:
        """Gathers the choices of all ranks' routers and orders the rows of this rank's experts.

        tokens: [T, H], any float dtype; probs: [T, K], float; expert_indices: [T, K], int64. Returns probs and the
        rows.
        """
        indices = all_gather_rows(expert_indices, self.group).wait()
        return probs, self.by_expert(indices, num_tokens=len(tokens), first_expert=self.experts.start)

    def send(self, tokens: Tensor, preprocessed: tuple[Tensor, StaticRows]) -> StaticGathered:
        """Gathers tokens: [T, H], any float dtype, and their weights."""
        probs, rows = preprocessed
        return StaticGathered(
            gather_from_sequence_parallel_region(tokens, group=self.group),
            gather_from_sequence_parallel_region(probs, group=self.group),
            rows,
            len(tokens),
        )

    def finish_dispatch(self, sent: StaticGathered) -> Dispatched:
        """Returns the rows of this rank's experts [C, H], their numbers [e], int64, on the device, and metadata."""
        order = sent.rows.order
        rows = sent.rows.take(sent.tokens, sent.probs)
        demand = self.budget.demand_on_rank(order.rows_needed, sent.num_tokens)
        return Dispatched(rows, order.rows_per_group, sent.rows, demand)

    def combine(self, rows: Tensor, metadata: StaticRows) -> Tensor:
        """rows: [C, H], any float dtype, in expert order and weighted -> [T, H]: the sum of each token's rows."""
        return reduce_scatter_to_sequence_parallel_region(metadata.give_back(rows), self.group)


# --- The rows that a pair of ranks exchanges ---


@dataclass(frozen=True)
class RankRows:
    """Rows by the rank that they are sent to, and by the rank that they arrive from.

    sent: this rank's slots in the rows that it sends. experts: [received rows, 1], int32, on the device: the local
    expert of each received row, e for padding. counts: [ranks, e], int64, on the device: slots of each rank for each
    local expert, including slots beyond P rows. send, receive: rows to and from each rank; None means P.
    """

    sent: StaticOrder
    experts: Tensor
    counts: Tensor
    send: list[int] | None = None
    receive: list[int] | None = None


@dataclass(frozen=True)
class RankRowSizes:
    """The ranks of `group`, the experts of each, and the rows of a pair of ranks, P."""

    group: dist.ProcessGroup
    num_ranks: int
    num_experts: int
    rows_per_pair: int

    def order(self, expert_indices: Tensor) -> StaticOrder:
        """Gives each rank P rows; expert_indices: [T, K], int64."""
        return order_by_rank(
            expert_indices,
            self.num_ranks * self.num_experts,
            num_ranks=self.num_ranks,
            rows_per_rank=self.rows_per_pair,
        )

    def exchange_counts(self, sent: StaticOrder) -> Tensor:
        """Returns the slots of each rank for each local expert: [ranks, e], int64. Collective."""
        return exchange_counts(sent.rows_per_group.view(self.num_ranks, self.num_experts), self.group)


# (expert indices [T, K], int64, over all ranks' experts; sizes) -> the rows to exchange.
RankRowLayout = Callable[[Tensor, RankRowSizes], RankRows]


def rank_row_layout(device: torch.device) -> RankRowLayout:
    """Chooses the layout for tensors on this device. See [Note: packed and padded rows]."""
    return packed_rank_rows_sync if device.type == "cpu" else padded_rank_rows


def padded_rank_rows(expert_indices: Tensor, sizes: RankRowSizes) -> RankRows:
    """Lays out P rows for each rank, filled or not: [ranks * P, H] travels. Collective.

    expert_indices: [T, K], int64, over all ranks' experts.
    """
    sent = sizes.order(expert_indices)
    counts = sizes.exchange_counts(sent)
    return RankRows(sent, expert_of_received_rows(counts, rows_per_rank=sizes.rows_per_pair), counts)


def packed_rank_rows_sync(expert_indices: Tensor, sizes: RankRowSizes) -> RankRows:
    """Lays out the filled rows alone, at most P for each rank. Collective.

    expert_indices: [T, K], int64, over all ranks' experts. NOTE: reads counts on the host. They are on the CPU, so
    nothing waits.
    """
    padded = padded_rank_rows(expert_indices, sizes)
    is_sent, is_received = padded.sent.slot_of_row >= 0, padded.experts < sizes.num_experts
    # One more entry, -1, to which the slots without a row point.
    rows = torch.cat([is_sent.cumsum(0, dtype=torch.int32) - 1, padded.experts.new_full((1,), -1)])
    order = replace(
        padded.sent,
        slot_of_row=padded.sent.slot_of_row[is_sent],
        token_of_row=padded.sent.token_of_row[is_sent],
        row_of_slot=rows[padded.sent.row_of_slot],
    )
    send, receive = torch.stack([flags.view(sizes.num_ranks, -1).sum(1) for flags in (is_sent, is_received)]).tolist()
    return RankRows(order, padded.experts[is_received].unsqueeze(1), padded.counts, send, receive)


# --- Sending rows ---


@dataclass(frozen=True)
class StaticSent:
    """Rows that are being sent and their weights, the running exchange of each, and their order.

    sent: this rank's tokens in the order of rank_rows.sent. num_tokens: T.
    """

    tokens: Tensor
    probs: Tensor
    exchanges: tuple[RowExchange, RowExchange]
    rank_rows: RankRows
    sent: StaticRows
    num_tokens: int


@dataclass(frozen=True)
class StaticExchanged:
    """The orders that `combine` undoes.

    sent: this rank's tokens by receiving rank. received: the received rows by expert.
    """

    rank_rows: RankRows
    sent: StaticRows
    received: StaticRows


class MoEStaticAlltoAllTokenDispatcher(MoEStaticTokenDispatcher):
    """Sends each row to the rank of its expert, at most P rows from one rank to another."""

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        *,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        row_alignment: int = 1,
        transport: RowTransport | None = None,
        layout: RankRowLayout | None = None,
    ) -> None:
        """row_alignment: see [Note: row alignment].

        transport: None means torch's collectives. layout: None means the device's, see rank_row_layout.
        """
        super().__init__(
            num_local_experts,
            local_expert_indices,
            config=config,
            pg_collection=pg_collection,
            row_alignment=row_alignment,
        )
        self.transport = transport or CollectiveTransport(self.group)
        self.layout = layout or rank_row_layout(default_device())

    def reserve(self, num_tokens: int, *, row_bytes: int) -> None:
        self.transport.reserve(self.budget.num_ranks * self.budget.rows_of_pair(num_tokens) * row_bytes)

    def preprocess(
        self, tokens: Tensor, *, probs: Tensor, expert_indices: Tensor
    ) -> tuple[DispatchedTokens, tuple[RankRows, StaticRows]]:
        """Exchanges numbers of rows and copies tokens into the rows to send; returns those rows and their order.

        tokens: [T, H], any float dtype; probs: [T, K], float; expert_indices: [T, K], int64.
        """
        budget, num_experts = self.budget, len(self.experts)
        probs, expert_indices = to_every_shard(
            probs, expert_indices, num_local_experts=num_experts, num_shards=budget.num_shards
        )
        sizes = RankRowSizes(self.group, budget.num_ranks, num_experts, budget.rows_of_pair(len(tokens)))
        rank_rows = self.layout(expert_indices, sizes)
        # Every row counts as live. Padding is sent as zeros, and the receiving rank ignores it.
        sent = StaticRows(rank_rows.sent, expert_indices.new_full((1,), len(rank_rows.sent.slot_of_row)))
        return sent.take(tokens, probs), (rank_rows, sent)

    def send(self, tokens: Tensor, preprocessed: tuple[DispatchedTokens, tuple[RankRows, StaticRows]]) -> StaticSent:
        """Starts to send the rows that `preprocess` copied from tokens: [T, H], any float dtype."""
        rows, (rank_rows, sent) = preprocessed
        exchanges = self._exchange(rank_rows), self._exchange(rank_rows)
        return StaticSent(
            exchanges[0].start(rows.hidden_states),
            exchanges[1].start(rows.probs.unsqueeze(1)),
            exchanges,
            rank_rows,
            sent,
            len(tokens),
        )

    def finish_dispatch(self, sent: StaticSent) -> Dispatched:
        """Returns the rows of this rank's experts [C, H], their numbers [e], int64, on the device, and metadata."""
        tokens, probs = sent.exchanges[0].wait(sent.tokens), sent.exchanges[1].wait(sent.probs)
        received = self.by_expert(sent.rank_rows.experts, num_tokens=sent.num_tokens)
        metadata = StaticExchanged(sent.rank_rows, sent.sent, received)
        return Dispatched(
            received.take(tokens, probs), received.order.rows_per_group, metadata, self._demand_of_both(sent)
        )

    def _demand_of_both(self, sent: StaticSent) -> RowDemand:
        """Returns the larger of the demands on the rows of a pair and on the buffer of this rank.

        This rank's demand includes slots that were not sent because they exceeded P rows.
        """
        budget = self.budget
        on_rank = aligned_rows(sent.rank_rows.counts.sum(0), budget.alignment).sum(0, keepdim=True)
        pair = budget.demand_on_pair(sent.rank_rows.sent.rows_needed, sent.num_tokens)
        rank = budget.demand_on_rank(on_rank, sent.num_tokens)
        return RowDemand(
            torch.maximum(pair.rows_missing, rank.rows_missing),
            torch.maximum(pair.factor_needed, rank.factor_needed),
            pair.can_lose or rank.can_lose,
        )

    def combine(self, rows: Tensor, metadata: StaticExchanged) -> Tensor:
        """rows: [C, H], any float dtype, in expert order and weighted -> [T, H]: the sum of each token's rows."""
        back = RowExchange(self.transport, metadata.rank_rows.receive, metadata.rank_rows.send)
        return metadata.sent.give_back(back.wait(back.start(metadata.received.give_back(rows))))

    def _exchange(self, rank_rows: RankRows) -> RowExchange:
        return RowExchange(self.transport, rank_rows.send, rank_rows.receive)
