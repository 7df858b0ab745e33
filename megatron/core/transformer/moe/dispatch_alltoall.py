"""Token dispatch by all-to-all: each row is sent to the rank of its expert, and its result is sent back.

A token is sent once for each chosen expert, and to each rank that holds a part of that expert. The dispatcher is
defined first, then the row exchange that it uses. dispatch_allgather.py is the alternative.

[Note: overlapped exchanges]
A row exchange consists of two autograd functions, `start` and `wait`. Work between them, such as a shared expert,
overlaps with the exchange, which torch's process group runs on a separate stream. In backward autograd visits them in
reverse order: the backward of `wait` starts to send the gradients, the backward of `start` waits for them, and the
backward of the overlapped work runs in between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.autograd import PlainFunction, first_order
from megatron.core.config_field import require_defaults
from megatron.core.group_collectives import Pending, arriving
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_size, or_alone
from megatron.core.transformer.moe.aux_losses import count_tokens
from megatron.core.transformer.moe.dispatch import Dispatch, ExchangeCover, MoETokenDispatcher, own_experts
from megatron.core.transformer.moe.permutation import (
    PermutationMap,
    Routing,
    build_row_order,
    permute_tokens,
    sort_by_expert,
    unpermute_tokens,
)
from megatron.core.transformer.moe.static_rows import placeholder
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class RowSplits:
    """Numbers of rows that this rank exchanges with each rank.

    counts: [ranks, e], int64, on the device: rows from each rank for each local expert, or until these have arrived,
    rows to each rank for each of its experts. num_received: sum of counts. send, receive: rows to and from each rank;
    None means the same number for every rank.
    """

    counts: Tensor
    num_received: int
    send: list[int] | None = None
    receive: list[int] | None = None


@dataclass(frozen=True)
class AllToAllPassage:
    """Row orders of one forward, which combine reverses.

    permutation: order in which this rank's tokens are sent. splits: row counts of the dispatch; combine swaps send and
    receive. arriving_counts: of the rows from each rank, until the host has read them; None if all ranks send the same
    number. by_expert: order of the received rows; None before they are received, or if they arrive sorted by expert.
    """

    permutation: PermutationMap
    splits: RowSplits
    arriving_counts: Pending | None = None
    by_expert: PermutationMap | None = None


class MoEAlltoAllTokenDispatcher(MoETokenDispatcher):
    """Sorts rows by expert, sends them, and sorts the received rows by expert; a single rank sends nothing.

    If experts are split over expert-tensor ranks, each rank's part is treated as a separate expert that receives all
    rows of the expert. `combine_postprocess` sums the outputs of the parts as it sums the outputs of different experts.
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
        self.transport, self.num_ranks = CollectiveTransport(or_alone(groups.tp_ep)), group_size(groups.tp_ep)
        self.num_shards, self.num_local_experts = group_size(groups.expt_tp), num_local_experts
        self.num_experts, self.local_expert_indices = config.num_moe_experts, list(local)
        self.is_padded = config.moe_pad_expert_input_to_capacity
        # Replaced in plans, whose counts have no values to read.
        self.row_splits_sync: Callable[[Tensor, Pending], RowSplits] = row_splits_sync
        # Counts experts of all ranks, because a rank sorts its tokens before it sends them.
        self.row_order = build_row_order(config, self.num_ranks * num_local_experts)

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Returns the number of rows that each expert of this rank will receive: [e], int64, on the device. Collective.

        routing_map: this rank's choices, as a table [T, E], bool, or as indices [T, K], int64. Ignores capacities,
        which would also require the weights.
        """
        counts = self._counts(
            Routing.of(torch.zeros_like(routing_map, dtype=torch.float32), routing_map, num_experts=self.num_experts)
        )
        received = counts if self.num_ranks == 1 else exchange_counts(counts, self.transport.group).wait()
        return received.sum(dim=0)

    def _counts(self, routing: Routing) -> Tensor:
        num_experts = self.num_ranks * self.num_local_experts
        _, indices = to_every_shard(
            routing.weights, routing.indices, num_local_experts=self.num_local_experts, num_shards=self.num_shards
        )
        # One extra entry for slots without an expert.
        counts = count_tokens(indices.clamp(max=num_experts), num_experts + 1)[:num_experts]
        return counts.view(self.num_ranks, self.num_local_experts)

    def _begin(self, tokens: Tensor, ordered: tuple[Tensor, Tensor, bool], state: Dispatch) -> tuple[Tensor, Tensor]:
        probs, expert_indices, has_absent = ordered
        probs, expert_indices = to_every_shard(
            probs, expert_indices, num_local_experts=self.num_local_experts, num_shards=self.num_shards
        )
        present = expert_indices < self.num_ranks * self.num_local_experts if has_absent else None
        permutation, counts = self.row_order(probs, expert_indices, present)
        counts = counts.view(self.num_ranks, self.num_local_experts)
        # With padding every expert has the same number of rows, so counts are only exchanged without it.
        has_splits = self.num_ranks > 1 and not self.is_padded
        # Overlaps with the copies of tokens.
        received = exchange_counts(counts, self.transport.group) if has_splits else None
        rows, weights = permute_tokens(tokens, probs, permutation)
        state.rows = AllToAllPassage(permutation, RowSplits(counts, len(rows)), received)
        return rows, weights

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Copies each token into one row per choice, sorted by expert. Returns the rows to send and their weights.

        hidden_states: [*, H], any float dtype. routing_map, probs: see MoETokenDispatcher.
        """
        return super().dispatch_preprocess(hidden_states, routing_map, probs)

    def token_dispatch(self, permutated_local_input_tokens: Tensor, permuted_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sends rows and their weights to the ranks of their experts; returns the rows and weights received.

        permutated_local_input_tokens: [*, H], any float dtype; permuted_probs: [*]. Collective.
        """
        rows, weights, state = permutated_local_input_tokens, permuted_probs, self._current.state
        if self.num_ranks == 1:
            self._run_shared_experts(state)
            return rows, weights
        passage: AllToAllPassage = state.rows
        if passage.arriving_counts is not None:
            if self.cover is not None:
                self.cover.before_counts()
            splits = self.row_splits_sync(passage.splits.counts, passage.arriving_counts)
            state.rows = passage = replace(passage, splits=splits, arriving_counts=None)
        exchange = RowExchange(self.transport, passage.splits.send, passage.splits.receive, cover=self.cover)
        rows, weights = exchange.start(rows, weights)
        # Overlaps with the exchange of rows, in backward too.
        self._run_shared_experts(state)
        rows, weights = exchange.wait(rows, weights)
        return rows, weights

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sorts received rows by expert; global_input_tokens: [R, H], any float dtype; global_probs: [R].

        Returns rows [R, H], tokens_per_expert [e], int64, on the device, and the weight of each row [R].
        """
        rows, weights, state = global_input_tokens, global_probs, self._current.state
        passage: AllToAllPassage = state.rows
        if self.num_ranks > 1 and self.num_local_experts > 1:
            by_expert = _expert_order(passage.splits)
            rows, weights = permute_tokens(rows, weights, by_expert)
            state.rows = replace(passage, by_expert=by_expert)
        return rows, passage.splits.counts.sum(dim=0), weights

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Puts results into the order in which their rows arrived; hidden_states: [R, H], any float dtype."""
        by_expert = self._current.state.rows.by_expert
        return hidden_states if by_expert is None else unpermute_tokens(hidden_states, by_expert)

    def token_combine(
        self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> Tensor:
        """Sends the results back; hidden_states: [R, H], any float dtype. Returns the results of this rank's rows.

        Collective. async_finish, allocate_on_comm_stream: must be True, because the process group determines the stream
        and the memory.
        """
        require_own_stream("MoEAlltoAllTokenDispatcher.token_combine", async_finish, allocate_on_comm_stream)
        if self.num_ranks == 1:
            return hidden_states
        splits: RowSplits = self._current.state.rows.splits
        back = RowExchange(
            self.transport,
            splits.receive,
            splits.send,
            cover=self.cover,
            # None if no counts were exchanged.
            follows_counts=splits.send is not None,
        )
        (combined,) = back.wait(*back.start(hidden_states))
        return combined

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Sums each token's rows and returns the tokens in their original shape, [*, H].

        permutated_local_input_tokens: the rows returned by token_combine, any float dtype.
        """
        state = self._current.state
        return self._end(unpermute_tokens(permutated_local_input_tokens, state.rows.permutation), state)


def require_own_stream(call: str, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    """Raises ValueError unless both arguments are True. torch's process group does not support other settings.

    call: name of the function, for the message.
    """
    if not (async_finish and allocate_on_comm_stream):
        require_defaults(
            call,
            "rows are exchanged on the process group's stream, and the process group waits for them",
            async_finish=(async_finish, True),
            allocate_on_comm_stream=(allocate_on_comm_stream, True),
        )


def to_every_shard(
    probs: Tensor, expert_indices: Tensor, *, num_local_experts: int, num_shards: int
) -> tuple[Tensor, Tensor]:
    """Repeats each choice for every shard of its expert.

    probs: [T, K], float; expert_indices: [T, K], int64. Returns both as [T, K * shards]. A returned index is rank * e +
    the local index of the expert; the ranks that store the shards of an expert are consecutive.
    """
    if num_shards == 1:
        return probs, expert_indices
    rank, within = expert_indices // num_local_experts, expert_indices % num_local_experts
    ranks = rank.unsqueeze(-1) * num_shards + torch.arange(num_shards, device=expert_indices.device)  # [T, K, shards]
    copies = ranks * num_local_experts + within.unsqueeze(-1)
    return probs.unsqueeze(-1).expand_as(copies).flatten(1), copies.flatten(1)


def row_splits_sync(counts: Tensor, arriving_counts: Pending) -> RowSplits:
    """Waits for the row counts of all ranks and reads them on the host.

    counts: [ranks, e], int64, number of rows that this rank sends to each expert. arriving_counts: the result of
    exchange_counts. NOTE: synchronizes with the device, because row counts determine shapes. A layer does not
    synchronize anywhere else.
    """
    received = arriving_counts.wait()
    send, receive = torch.stack([counts.sum(dim=1), received.sum(dim=1)]).tolist()
    return RowSplits(received, sum(receive), send, receive)


def _expert_order(splits: RowSplits) -> PermutationMap:
    """Returns the map that sorts received rows by expert, then sender. They arrive sorted by sender, then expert."""
    num_ranks, num_experts = splits.counts.shape
    experts = torch.arange(num_experts, device=splits.counts.device).repeat(num_ranks)
    # Without output_size, the host would wait for the sum of the counts.
    expert_of_row = experts.repeat_interleave(splits.counts.flatten(), output_size=splits.num_received)
    return sort_by_expert(expert_of_row.unsqueeze(1), num_experts)[0]


# --- Row exchange ---


@dataclass(frozen=True)
class RowsUnderWay:
    """Exchange in progress.

    sent: [R, *] each, received: [R', *] each, any dtype. works: must complete before the current stream reads
    `received`.
    """

    sent: Sequence[Tensor]
    received: list[Tensor]
    works: tuple[dist.Work, ...] = ()


class RowTransport(Protocol):
    """Interface for exchanging rows between the ranks of a group."""

    def launch(self, tensors: Sequence[Tensor], *, send: list[int] | None, receive: list[int] | None) -> RowsUnderWay:
        """Starts an exchange of the rows of several tensors. Collective.

        tensors: [R, *], any dtype, contiguous, sorted by receiver. send, receive: numbers of rows of each tensor to and
        from each rank; None means that a tensor has the same number of rows for every rank, which may differ between
        tensors.
        """

    def reserve(self, num_bytes: int) -> None:
        """Allocates memory for exchanges of num_bytes on each rank. Collective.

        CUDA graphs that use the previous memory must not be replayed afterwards.
        """


@dataclass(frozen=True)
class CollectiveTransport:
    """Sends rows with torch's all-to-all over `group`."""

    group: dist.ProcessGroup

    def launch(self, tensors: Sequence[Tensor], *, send: list[int] | None, receive: list[int] | None) -> RowsUnderWay:
        """Starts an asynchronous all-to-all of each tensor: [R, *], any dtype."""
        received, works = [], []
        for rows in tensors:
            shape = len(rows) if receive is None else sum(receive), *rows.shape[1:]
            arrived = arriving(shape, self.group, dtype=rows.dtype, device=rows.device)
            work = dist.all_to_all_single(arrived, rows, receive, send, group=self.group, async_op=True)
            assert work is not None, "an asynchronous collective returns its work"
            received.append(arrived)
            works.append(work)
        return RowsUnderWay(tensors, received, tuple(works))

    def reserve(self, num_bytes: int) -> None:
        """Does nothing, because each exchange allocates its own memory."""


@dataclass
class RowExchange:
    """Differentiable all-to-all of the rows of several tensors, which are launched and awaited together.

    `start` launches the exchange, `wait` completes it; backward exchanges the gradients. send, receive: numbers of rows
    to and from each rank; None means the same number for every rank. cover: runs before each wait. follows_counts: of a
    combine, whether cover also ran before the numbers of rows were read. See [Note: overlapped exchanges].
    """

    transport: RowTransport
    send: list[int] | None = None
    receive: list[int] | None = None
    cover: ExchangeCover | None = None
    follows_counts: bool = False
    # Also keeps references to the sent rows. Without them, their memory could be reused while it is still being read.
    _running: RowsUnderWay | None = field(init=False, default=None)
    _packed: Tensor | None = field(init=False, default=None)
    _counts: Tensor | None = field(init=False, default=None)
    # Whether each tensor has a gradient, which is the same on all ranks.
    _has_gradient: Sequence[bool] = field(init=False, default=())

    def start(self, *tensors: Tensor, packed: Tensor | None = None, counts: Tensor | None = None) -> tuple[Tensor, ...]:
        """Launches the exchange and returns the inputs of `wait`. Collective.

        tensors: [R, *], float, sorted by receiver. packed: [R, bytes], uint8, sent instead of the first tensor, which
        is then a placeholder, like the first result of `wait`; see [Note: placeholders] in static_rows.py. counts:
        [ranks, *], int64, of which each rank receives a row; only if all ranks receive the same number of rows.
        """
        return _Start.apply(self, packed, counts, *tensors)

    def wait(self, *started: Tensor) -> tuple[Tensor, ...]:
        """Returns the received tensors, sorted by sender: [R', *], float. started: the result of `start`."""
        # Not in _Wait's forward, where autograd disables gradients: see redraws_numbers.
        if self.cover is not None:
            self.cover.before_rows()
        return _Wait.apply(self, *started)

    def take_packed(self) -> Tensor | None:
        """Returns the packed rows that were received, [R', bytes], uint8, after `wait`, and releases them."""
        # Autograd keeps the exchange until backward.
        received, self._packed = self._packed, None
        return received

    def take_counts(self) -> Tensor:
        """Returns the counts that were received, [ranks, *], int64, after `wait`, and releases them."""
        received, self._counts = self._counts, None
        assert received is not None, "no counts were sent"
        return received

    def launch(self, tensors: Sequence[Tensor], *, send: list[int] | None, receive: list[int] | None) -> list[Tensor]:
        """Starts the exchange in one direction; tensors: [R, *], any dtype.

        Returns the buffers, [R', *], that contain the received rows after `finish`.
        """
        assert self._running is None, "an exchange was started twice"
        self._running = self.transport.launch([one.contiguous() for one in tensors], send=send, receive=receive)
        return self._running.received

    def finish(self) -> list[Tensor]:
        """Waits for the exchange that `launch` started; returns the received tensors: [R', *], any dtype."""
        assert self._running is not None, "an exchange was not started"
        running, self._running = self._running, None
        for work in running.works:
            work.wait()
        return running.received


class _Start(PlainFunction):
    """Launches the exchange in forward; backward completes the exchange that _Wait's backward launched."""

    @staticmethod
    def forward(
        ctx: Any, exchange: RowExchange, packed: Tensor | None, counts: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange, exchange._has_gradient = exchange, ctx.needs_input_grad[3:]
        sent = list(tensors)
        if packed is not None:
            sent[0] = packed
        if counts is not None:
            sent.append(counts)
        received = exchange.launch(sent, send=exchange.send, receive=exchange.receive)
        if counts is not None:
            *received, exchange._counts = received
        if packed is not None:
            exchange._packed = received[0]
            received[0] = placeholder(tensors[0], len(received[0]))
        return tuple(received)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange: RowExchange = ctx.exchange
        if exchange.cover is not None:
            exchange.cover.before_row_gradients(follows_counts=exchange.follows_counts)
        received: Sequence[Tensor | None] = exchange.finish()
        if False in exchange._has_gradient:
            arrived = iter(received)
            received = [next(arrived) if has_gradient else None for has_gradient in exchange._has_gradient]
        return None, None, None, *received


class _Wait(PlainFunction):
    """Completes the exchange in forward; backward launches the gradient exchange, which _Start's backward completes."""

    @staticmethod
    def forward(ctx: Any, exchange: RowExchange, *started: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        exchange.finish()
        return tuple([one.view_as(one) for one in started])

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange: RowExchange = ctx.exchange
        sent: Sequence[Tensor] = grads
        if False in exchange._has_gradient:
            sent = [grad for grad, has_gradient in zip(grads, exchange._has_gradient) if has_gradient]
        exchange.launch(sent, send=exchange.receive, receive=exchange.send)
        # Placeholders of the right shapes: _Start's backward returns the received gradients.
        return None, *grads


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Pending:
    """Starts to send row i of `counts` to rank i, and to receive a row from each rank. Collective.

    counts: [ranks, e], int64. The result has the same shape and dtype; row i is from rank i.
    """
    received = arriving(counts.shape, group, dtype=counts.dtype, device=counts.device)
    return Pending(received, dist.all_to_all_single(received, counts, group=group, async_op=True), kept=counts)
