"""Token dispatch into fixed-size buffers. No shape depends on the routing, and the host never reads the device.

From top to bottom: the sizes of the buffers, rows in a buffer, the dispatcher that gathers tokens, the rows that a pair
of ranks exchanges, and the dispatcher that sends rows. Only the device knows how many rows are live.

T tokens of each rank, N tokens of all ranks, H hidden, K choices of a token, e experts of this rank, C rows of the
buffer of this rank's experts, P rows that one rank sends to another.

[Note: rows of a fixed size]
C is the balanced number of rows, tokens x top-k, times moe_expert_rank_capacity_factor, and at most the number that all
tokens could require, plus the largest possible padding. If more rows arrive, some are dropped (expert overflow). Every
dispatch records its demand on the device, and training/ discards a step that dropped rows and retries it with a larger
factor. The dispatcher that sends rows has a second limit, P rows for each pair of ranks. Its demand is the larger of
the two demands.

[Note: packed and padded rows]
On a GPU a pair of ranks always exchanges P rows, because the host does not know how many of them contain a token; the
others are padding. On the CPU the host can read that number without waiting, so only filled rows are sent. The buffers
of the experts are the same either way.

[Note: row alignment]
With row_alignment above 1, each expert's rows are padded to a multiple of it with rows whose token and weight are zero.
The gradient of the weights then sums whole tiles of one expert's rows, without a mask. On a GPU the alignment is
GPU_ROW_ALIGNMENT, for all static buffers, so that sums have the same order with and without a stash. On a CPU it is 1.
Padding is live: kernels compute it, and a stash has pages for it. Its output is not read, and its gradients are zeros,
which change no sum. An expert has at most alignment - 1 rows of padding, which C provides in addition to the rows of
the capacity factor. So padding never displaces a token's row. The factor that a routing requires is the smallest one
whose buffers hold its rows and its actual padding. It is at most the factor that its rows alone require, and negative
if all of them fit into the room for padding.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.block_scaled.format import BlockFormat
from megatron.core.block_scaled.operators import quantize_rows
from megatron.core.device import default_device
from megatron.core.group_collectives import all_gather_rows
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_size, or_alone
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.dispatch import (
    Dispatch,
    MoETokenDispatcher,
    RowDemand,
    own_experts,
)
from megatron.core.transformer.moe.dispatch_alltoall import (
    CollectiveTransport,
    RowExchange,
    RowTransport,
    exchange_counts,
    require_own_stream,
    to_every_shard,
)
from megatron.core.transformer.moe.permutation import Routing
from megatron.core.transformer.moe.static_rows import (
    StaticOrder,
    aligned_rows,
    expert_of_received_rows,
    gather_live_rows,
    gather_packed_rows,
    order_by_expert,
    order_by_rank,
    sum_live_rows,
)
from megatron.core.transformer.transformer_config import TransformerConfig

# fp32 or fp64.
_Rows = TypeVar("_Rows", Tensor, np.ndarray)


@dataclass(frozen=True)
class StaticBudget:
    """Sizes of the static buffers, and the demand of a routing on them. See [Note: rows of a fixed size].

    factor: size relative to the balanced number of rows, without padding. alignment: each expert's rows are padded to a
    multiple of this number; see [Note: row alignment]. num_experts: experts per rank. num_ranks: number of ranks that
    share the layer's experts. num_shards: number of ranks that share a single expert.
    """

    factor: float
    topk: int
    num_experts: int
    num_ranks: int
    num_shards: int
    alignment: int

    @property
    def largest_factor(self) -> float:
        """Smallest factor at which no routing drops rows, even if all tokens go to one rank."""
        return self.num_ranks * self._most(1) / self.balanced_rows(1)

    def rows_of_rank(self, num_tokens: int) -> int:
        """Returns C, the size of the buffer of one rank's experts, in rows; num_tokens: T, tokens per rank."""
        rows = min(math.ceil(self.balanced_rows(num_tokens) * self.factor), self._most_of_rank(num_tokens))
        # The sum of multiples is a multiple, so the last rows of the largest padding are never needed.
        return (rows + self._most_padding) // self.alignment * self.alignment

    def rows_of_pair(self, num_tokens: int) -> int:
        """Returns P, the number of rows that one rank sends to each rank; num_tokens: T, tokens per rank."""
        balanced = self.balanced_rows(num_tokens) / self.num_ranks
        return min(math.ceil(balanced * self.factor), self._most(num_tokens))

    def demand_on_rank(self, rows_needed: Tensor, num_tokens: int) -> RowDemand:
        """Returns the demand on a rank's buffer of a routing that requires rows_needed rows.

        rows_needed: [1], int64. num_tokens: T, tokens per rank.
        """
        missing = (rows_needed - self.rows_of_rank(num_tokens)).clamp(min=0)
        can_lose = math.ceil(self.balanced_rows(num_tokens) * self.factor) < self._most_of_rank(num_tokens)
        return RowDemand(missing, self.factor_for(rows_needed.float(), num_tokens), can_lose)

    def demand_on_pair(self, rows_needed: Tensor, num_tokens: int) -> RowDemand:
        """Returns the demand on the rows of a rank pair of a routing that requires rows_needed rows.

        rows_needed: [1], int64. num_tokens: T, tokens per rank.
        """
        capacity, balanced = self.rows_of_pair(num_tokens), self.balanced_rows(num_tokens) / self.num_ranks
        missing, can_lose = (rows_needed - capacity).clamp(min=0), capacity < self._most(num_tokens)
        return RowDemand(missing, rows_needed.float() / (balanced or 1), can_lose)

    def factor_for(self, rows_needed: _Rows, num_tokens: int) -> _Rows:
        """Returns the smallest factor of buffers with rows_needed rows, which may be below 1 or even negative.

        rows_needed: rows including padding, a multiple of alignment, fp32 or fp64. num_tokens: T, tokens per rank.
        """
        padding = self._most_padding
        # Without padding the subtraction is skipped, because on a GPU it is a launch.
        rows = rows_needed - padding if padding else rows_needed
        return rows / max(1, self.balanced_rows(num_tokens))

    def balanced_rows(self, num_tokens: int) -> int:
        """Returns the number of rows that a rank receives if all ranks receive the same number, without padding."""
        return num_tokens * self.topk * self.num_shards

    def balanced_live_rows(self, num_tokens: int) -> int:
        """Returns the number of live rows of a rank with the balanced number of rows: these and the mean padding."""
        rows = self.balanced_rows(num_tokens)
        padding = self.num_experts * float(mean_padding(rows / self.num_experts, self.alignment))
        return min(int(padded_sum(rows, padding, self.alignment)), self.rows_of_rank(num_tokens))

    @property
    def _most_padding(self) -> int:
        return self.num_experts * (self.alignment - 1)

    def _most_of_rank(self, num_tokens: int) -> int:
        return self.num_ranks * self._most(num_tokens)

    def _most(self, num_tokens: int) -> int:
        """Returns the maximum number of rows that one rank's tokens can require on a single rank."""
        # A token chooses an expert at most once.
        return num_tokens * min(self.topk, self.num_experts)


def mean_padding(mean_rows: float | np.ndarray, alignment: int) -> np.ndarray:
    """Estimates the mean padding of experts from their mean numbers of rows, [*], fp64.

    The last tile of an expert with many rows is half full on average. An expert with few rows has a tile of its own,
    unless it has no row, which has the probability of a Poisson distribution.
    """
    has_rows = 1 - np.exp(-np.asarray(mean_rows, dtype=np.float64))
    padded: np.ndarray = np.maximum(alignment * has_rows, mean_rows + (alignment - 1) / 2 * has_rows)
    return padded - mean_rows


def padded_sum(rows: float | np.ndarray, padding: float | np.ndarray, alignment: int) -> np.ndarray:
    """Returns the multiple of alignment, on average rows + padding, that the padded rows of experts sum to.

    rows: rows of a rank. padding: mean padding of all experts of the rank. Both are [*].
    """
    padded: np.ndarray = np.ceil((rows + padding - (alignment - 1) / 2) / alignment) * alignment
    return padded


class SentRows(NamedTuple):
    """Rows to send, [*, H], and their weights, [*].

    packed: the rows in 8 bits, [*, bytes], uint8, which are sent instead of the rows; these are then a placeholder, see
    [Note: placeholders] in static_rows.py. None means that the rows are sent.
    """

    rows: Tensor
    probs: Tensor
    packed: Tensor | None = None


@dataclass(frozen=True)
class StaticRows:
    """Copies this rank's tokens into the rows to send, ordered by receiving rank, and sums each token's returned rows.

    order: assigns rows to T x K slots. num_rows: [1], int64, on the device: number of live rows, which come first.
    """

    order: StaticOrder
    num_rows: Tensor

    def take(self, tokens: Tensor, probs: Tensor, form: BlockFormat | None = None) -> SentRows:
        """Copies tokens and their weights into the rows to send.

        tokens: [T, H], float. probs: [T, K], float. form: format of the rows in 8 bits, or None. The result is
        undefined beyond num_rows.
        """
        if form is None:
            return SentRows(*gather_live_rows(tokens, probs, order=self.order, num_rows=self.num_rows))
        packed = quantize_rows(tokens.detach().contiguous(), form)
        rows, packed, weights = gather_packed_rows(tokens, packed, probs, order=self.order, num_rows=self.num_rows)
        return SentRows(rows, weights, packed)

    def give_back(self, rows: Tensor) -> Tensor:
        """Sums each token's rows; rows: [*, H], float. Returns [T, H]."""
        return sum_live_rows(rows, order=self.order, num_rows=self.num_rows)


class MoEStaticTokenDispatcher(MoETokenDispatcher):
    """Base class of the static dispatchers. Stores the budget, and orders rows by expert in the buffer of C rows.

    GroupedMLP copies and sums the rows itself: MoELayer then calls order_received instead of steps 3 and 4.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        row_alignment: int = 1,
    ) -> None:
        """Computes the budget from the configuration.

        row_alignment: see [Note: row alignment].
        """
        super().__init__(config, pg_collection)
        groups = pg_collection or existing_process_groups()
        local = own_experts(num_local_experts, local_expert_indices, config=config, ep_group=groups.ep)
        assert config.moe_expert_rank_capacity_factor is not None, "this factor selects static dispatchers"
        self.group, self.experts = or_alone(groups.tp_ep), local
        self.num_local_experts, self.local_expert_indices = len(local), list(local)
        # Format in which rows are sent to the ranks of their experts; None sends them as they are.
        self.sent_format: BlockFormat | None = None
        self.budget = StaticBudget(
            factor=config.moe_expert_rank_capacity_factor,
            topk=config.moe_router_topk,
            num_experts=len(local),
            num_ranks=group_size(groups.tp_ep),
            num_shards=group_size(groups.expt_tp),
            alignment=row_alignment,
        )

    def set_capacity_factor(self, factor: float) -> None:
        """Replaces moe_expert_rank_capacity_factor for later dispatches."""
        self.budget = replace(self.budget, factor=factor)

    def reserve(self, num_tokens: int, *, row_bytes: int) -> None:
        """Allocates the persistent memory that dispatches use, before a CUDA graph captures a dispatch. Collective.

        num_tokens: T, tokens per rank. row_bytes: size of one token's H elements. Graphs that use the memory of a
        smaller factor or T must not be replayed afterwards. The base class allocates nothing.
        """

    def by_expert(self, expert_indices: Tensor, *, num_tokens: int, first_expert: int = 0) -> StaticOrder:
        """Assigns the rows of this rank's buffer to slots; expert_indices: [N, K], int64 or int32.

        num_tokens: T, tokens per rank. first_expert: index of this rank's first expert.
        """
        return order_by_expert(
            expert_indices,
            len(self.experts),
            capacity=self.budget.rows_of_rank(num_tokens),
            alignment=self.budget.alignment,
            first_expert=first_expert,
        )

    @abstractmethod
    def order_received(self, hidden_states: Tensor) -> StaticOrder:
        """Assigns the rows of this rank's buffer to the received tokens' choices, and records the demand on the buffer.

        hidden_states: the result of token_dispatch, [*, H], any float dtype.
        """

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Fills the buffer of this rank's experts; hidden_states, probs: the results of token_dispatch, float.

        Returns rows [C, H], tokens_per_expert [e], int64, on the device, and the weight of each row [C].
        """
        order = self._current.state.order = self.order_received(hidden_states)
        rows, weights = gather_live_rows(hidden_states, probs, order=order, num_rows=order.num_rows)
        return rows, order.rows_per_group, weights

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Sums the rows of each received token; hidden_states: [C, H], any float dtype, multiplied by the weights."""
        state = self._current.state
        order, state.order = state.order, None
        assert order is not None, "dispatch_postprocess comes first"
        return sum_live_rows(hidden_states, order=order, num_rows=order.num_rows)


# --- Gathering tokens ---


class MoEStaticAllGatherTokenDispatcher(MoEStaticTokenDispatcher):
    """Gathers all tokens on every rank, which keeps the rows of its experts. A single rank gathers nothing."""

    def order_rows(self, tokens: Tensor, routing: Routing) -> tuple[Tensor, StaticOrder]:
        """Gathers the choices of all ranks' routers and orders the rows of this rank's experts.

        tokens: [T, H], any float dtype. Returns the weights [T, K] of this rank's tokens, and the order of the rows.
        """
        indices = all_gather_rows(routing.indices, self.group).wait()
        return routing.weights, self.by_expert(indices, num_tokens=len(tokens), first_expert=self.experts.start)

    def _begin(self, tokens: Tensor, ordered: tuple[Tensor, StaticOrder], state: Dispatch) -> tuple[Tensor, Tensor]:
        probs, state.rows = ordered
        return tokens, probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Gathers the tokens and weights of all ranks. Collective.

        hidden_states: [T, H], any float dtype. probs: [T, K]. Returns [N, H] and [N, K].
        """
        tokens = gather_from_sequence_parallel_region(hidden_states, group=self.group)
        probs = gather_from_sequence_parallel_region(probs, group=self.group)
        self._run_shared_experts(self._current.state)
        return tokens, probs

    def order_received(self, hidden_states: Tensor) -> StaticOrder:
        """Returns the order that order_rows computed; hidden_states: [N, H], any float dtype."""
        state = self._current.state
        order: StaticOrder = state.rows
        num_tokens = hidden_states.shape[0] // self.budget.num_ranks
        state.demand = self.budget.demand_on_rank(order.rows_needed, num_tokens)
        return order

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Sums each token over the ranks; hidden_states: [N, H], any float dtype. Returns [T, H]. Collective."""
        return reduce_scatter_to_sequence_parallel_region(hidden_states, self.group)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Reshapes the tokens to their original shape; hidden_states: [T, H], any float dtype. Returns [*, H]."""
        return self._end(hidden_states, self._current.state)


# --- Rows that a pair of ranks exchanges ---


class ReceivedRows(NamedTuple):
    """Rows received from all ranks, grouped by sending rank.

    experts: [received rows, 1], int32, on the device: the local expert of each row, e for padding. counts: [ranks, e],
    int64, on the device: slots of each rank for each local expert, including slots beyond P rows.
    """

    experts: Tensor
    counts: Tensor


@dataclass(frozen=True)
class RankRowSizes:
    """Sizes of an exchange over `group`. num_experts: experts per rank. rows_per_pair: P."""

    group: dist.ProcessGroup
    num_ranks: int
    num_experts: int
    rows_per_pair: int

    def order(self, expert_indices: Tensor) -> StaticOrder:
        """Assigns P rows to each rank; expert_indices: [T, K], int64."""
        return order_by_rank(
            expert_indices,
            self.num_ranks * self.num_experts,
            num_ranks=self.num_ranks,
            rows_per_rank=self.rows_per_pair,
        )

    def sent_counts(self, sent: StaticOrder) -> Tensor:
        """Returns the number of this rank's slots for each expert of each rank: [ranks, e], int64."""
        return sent.rows_per_group.view(self.num_ranks, self.num_experts)

    def received(self, counts: Tensor) -> ReceivedRows:
        """Describes the P rows from each rank; counts: [ranks, e], int64, sent_counts of each rank for this rank."""
        return ReceivedRows(expert_of_received_rows(counts, rows_per_rank=self.rows_per_pair), counts)


@dataclass(frozen=True)
class RankRows:
    """Rows that this rank exchanges.

    sizes: of the exchange. sent: assigns the rows to send, grouped by receiving rank, to this rank's slots. received:
    None until the exchange if it also sends the counts. send, receive: rows to and from each rank; None means P.
    """

    sizes: RankRowSizes
    sent: StaticOrder
    received: ReceivedRows | None = None
    send: list[int] | None = None
    receive: list[int] | None = None


# (expert indices [T, K], int64, over all ranks' experts; sizes) -> the rows to exchange.
RankRowLayout = Callable[[Tensor, RankRowSizes], RankRows]


def rank_row_layout(device: torch.device) -> RankRowLayout:
    """Chooses the layout for tensors on this device. See [Note: packed and padded rows]."""
    return packed_rank_rows_sync if device.type == "cpu" else padded_rank_rows


def padded_rank_rows(expert_indices: Tensor, sizes: RankRowSizes) -> RankRows:
    """Lays out P rows for each rank, including padding rows, so that [ranks * P, H] is sent.

    expert_indices: [T, K], int64, over all ranks' experts.
    """
    return RankRows(sizes, sizes.order(expert_indices))


def packed_rank_rows_sync(expert_indices: Tensor, sizes: RankRowSizes) -> RankRows:
    """Lays out the filled rows only, at most P for each rank. Collective.

    expert_indices: [T, K], int64, over all ranks' experts. NOTE: reads counts on the host. They are in CPU memory, so
    the host waits for no device.
    """
    sent = sizes.order(expert_indices)
    received = sizes.received(exchange_counts(sizes.sent_counts(sent), sizes.group).wait())
    is_sent, is_received = sent.slot_of_row >= 0, received.experts < sizes.num_experts
    # One extra entry, -1, for the slots without a row.
    rows = torch.cat([is_sent.cumsum(0, dtype=torch.int32) - 1, received.experts.new_full((1,), -1)])
    order = sent._replace(
        slot_of_row=sent.slot_of_row[is_sent],
        token_of_row=sent.token_of_row[is_sent],
        row_of_slot=rows[sent.row_of_slot],
    )
    send, receive = torch.stack([flags.view(sizes.num_ranks, -1).sum(1) for flags in (is_sent, is_received)]).tolist()
    filled = received._replace(experts=received.experts[is_received].unsqueeze(1))
    return RankRows(sizes, order, filled, send, receive)


# --- Sending rows ---


@dataclass(frozen=True)
class StaticExchange:
    """Row orders of one forward, which combine reverses.

    rank_rows: `received` is set once rows are received. sent: this rank's rows, ordered by receiving rank. num_tokens:
    T. packed: rows in 8 bits, if rows are sent as such: those to send, then those received.
    """

    rank_rows: RankRows
    sent: StaticRows
    num_tokens: int
    packed: Tensor | None = None


class MoEStaticAlltoAllTokenDispatcher(MoEStaticTokenDispatcher):
    """Sends each row to the rank of its expert, at most P rows from one rank to another."""

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        row_alignment: int = 1,
        transport: RowTransport | None = None,
        layout: RankRowLayout | None = None,
    ) -> None:
        """Selects the transport and the layout of rows between ranks.

        row_alignment: see [Note: row alignment]. transport: None means torch's collectives. layout: None means the
        device's default, see rank_row_layout.
        """
        super().__init__(num_local_experts, local_expert_indices, config, pg_collection, row_alignment=row_alignment)
        self.transport = transport or CollectiveTransport(self.group)
        self.layout = layout or rank_row_layout(default_device())

    def reserve(self, num_tokens: int, *, row_bytes: int) -> None:
        self.transport.reserve(self.budget.num_ranks * self.budget.rows_of_pair(num_tokens) * row_bytes)

    def order_rows(self, tokens: Tensor, routing: Routing) -> tuple[SentRows, tuple[RankRows, StaticRows]]:
        """Copies tokens into the rows to send; returns these rows and their order.

        tokens: [T, H], any float dtype.
        """
        probs, expert_indices = to_every_shard(
            routing.weights,
            routing.indices,
            num_local_experts=len(self.experts),
            num_shards=self.budget.num_shards,
        )
        budget = self.budget
        sizes = RankRowSizes(self.group, budget.num_ranks, len(self.experts), budget.rows_of_pair(len(tokens)))
        rank_rows = self.layout(expert_indices, sizes)
        # Every row counts as live. Padding is sent as zeros, and the receiving rank ignores it.
        sent = StaticRows(rank_rows.sent, expert_indices.new_full((1,), len(rank_rows.sent.slot_of_row)))
        return sent.take(tokens, probs, self.sent_format), (rank_rows, sent)

    def _begin(
        self, tokens: Tensor, ordered: tuple[SentRows, tuple[RankRows, StaticRows]], state: Dispatch
    ) -> tuple[Tensor, Tensor]:
        rows, (rank_rows, sent) = ordered
        state.rows = StaticExchange(rank_rows, sent, len(tokens), rows.packed)
        return rows.rows, rows.probs

    def token_dispatch(
        self,
        hidden_states: Tensor,
        probs: Tensor | None = None,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Sends rows and their weights to the ranks of their experts. Collective.

        hidden_states: [*, H], any float dtype. probs: [*]. async_finish, allocate_on_comm_stream: must be True. Returns
        the rows that this rank receives and their weights.
        """
        require_own_stream(f"{type(self).__name__}.token_dispatch", async_finish, allocate_on_comm_stream)
        probs, state = require_probs(probs), self._current.state
        passage: StaticExchange = state.rows
        rank_rows = passage.rank_rows
        exchange = RowExchange(self.transport, rank_rows.send, rank_rows.receive, cover=self.cover)
        sends_counts = rank_rows.received is None
        counts = rank_rows.sizes.sent_counts(rank_rows.sent) if sends_counts else None
        started = exchange.start(hidden_states, probs, packed=passage.packed, counts=counts)
        # Overlaps with the exchange of rows, in backward too.
        self._run_shared_experts(state)
        rows, weights = exchange.wait(*started)
        if sends_counts:
            rank_rows = replace(rank_rows, received=rank_rows.sizes.received(exchange.take_counts()))
        packed = None if passage.packed is None else exchange.take_packed()
        state.rows = replace(passage, rank_rows=rank_rows, packed=packed)
        return rows, weights

    def take_packed(self) -> Tensor | None:
        """Returns the rows that token_dispatch received in 8 bits, [*, bytes], uint8, and lets go of them.

        Returns None if they were not sent in 8 bits. Otherwise token_dispatch has returned a placeholder for them, see
        [Note: placeholders] in static_rows.py.
        """
        state = self._current.state
        passage: StaticExchange = state.rows
        if passage.packed is not None:
            state.rows = replace(passage, packed=None)
        return passage.packed

    def order_received(self, hidden_states: Tensor) -> StaticOrder:
        """Sorts received rows by expert; hidden_states: [*, H], any float dtype."""
        state = self._current.state
        passage: StaticExchange = state.rows
        received = passage.rank_rows.received
        assert received is not None, "token_dispatch comes first"
        state.demand = self._demand_of_both(passage, received.counts)
        return self.by_expert(received.experts, num_tokens=passage.num_tokens)

    def _demand_of_both(self, sent: StaticExchange, counts: Tensor) -> RowDemand:
        """Returns the maximum of the demand on the rows of a pair and the demand on this rank's buffer.

        The demand on the buffer includes slots that were not sent because they exceeded P rows.
        """
        budget = self.budget
        on_rank = aligned_rows(counts.sum(0), budget.alignment).sum(0, keepdim=True)
        pair = budget.demand_on_pair(sent.rank_rows.sent.rows_needed, sent.num_tokens)
        rank = budget.demand_on_rank(on_rank, sent.num_tokens)
        return RowDemand(
            torch.maximum(pair.rows_missing, rank.rows_missing),
            torch.maximum(pair.factor_needed, rank.factor_needed),
            pair.can_lose or rank.can_lose,
        )

    def token_combine(
        self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> Tensor:
        """Sends results back to the ranks of their tokens; returns the received rows. Collective.

        hidden_states: [*, H], any float dtype, the result of combine_preprocess. async_finish, allocate_on_comm_stream:
        must be True, because the process group determines the stream and the memory.
        """
        require_own_stream(f"{type(self).__name__}.token_combine", async_finish, allocate_on_comm_stream)
        rows: RankRows = self._current.state.rows.rank_rows
        back = RowExchange(self.transport, rows.receive, rows.send, cover=self.cover)
        (combined,) = back.wait(*back.start(hidden_states))
        return combined

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Sums each token's rows and returns the tokens in their original shape: [*, H], any float dtype."""
        state = self._current.state
        sent: StaticRows = state.rows.sent
        return self._end(sent.give_back(hidden_states), state)


def require_probs(probs: Tensor | None) -> Tensor:
    """Returns probs unless it is None; raises ValueError for None. probs: [*], float."""
    if probs is None:
        raise ValueError(
            "probs is None: pass the weights returned by dispatch_preprocess, which are sent with the rows"
        )
    return probs
