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
from megatron.core.group_collectives import arriving
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_size, or_alone
from megatron.core.transformer.moe.aux_losses import count_tokens
from megatron.core.transformer.moe.dispatch import MoETokenDispatcher, own_experts
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

    counts: [ranks, e], int64, on the device: rows from each rank for each local expert. num_received: sum of counts.
    send, receive: rows to and from each rank; None means the same number for every rank.
    """

    counts: Tensor
    num_received: int
    send: list[int] | None = None
    receive: list[int] | None = None


@dataclass(frozen=True)
class AllToAllPassage:
    """Row orders of one forward, which combine reverses.

    permutation: order in which this rank's tokens are sent. splits: row counts of the dispatch; combine swaps send and
    receive. by_expert: order of the received rows; None before they are received, or if they arrive sorted by expert.
    """

    permutation: PermutationMap
    splits: RowSplits
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
        self.row_splits_sync: Callable[[Tensor, dist.ProcessGroup], RowSplits] = row_splits_sync
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
        received = counts if self.num_ranks == 1 else exchange_counts(counts, self.transport.group)
        return received.sum(dim=0)

    def _counts(self, routing: Routing) -> Tensor:
        num_experts = self.num_ranks * self.num_local_experts
        _, indices = to_every_shard(
            routing.weights, routing.indices, num_local_experts=self.num_local_experts, num_shards=self.num_shards
        )
        # One extra entry for slots without an expert.
        counts = count_tokens(indices.clamp(max=num_experts), num_experts + 1)[:num_experts]
        return counts.view(self.num_ranks, self.num_local_experts)

    def _begin(self, tokens: Tensor, ordered: tuple[Tensor, Tensor, bool]) -> tuple[Tensor, Tensor]:
        probs, expert_indices, has_absent = ordered
        probs, expert_indices = to_every_shard(
            probs, expert_indices, num_local_experts=self.num_local_experts, num_shards=self.num_shards
        )
        present = expert_indices < self.num_ranks * self.num_local_experts if has_absent else None
        permutation, counts = self.row_order(probs, expert_indices, present)
        rows, weights = permute_tokens(tokens, probs, permutation)
        counts = counts.view(self.num_ranks, self.num_local_experts)
        self._passage = AllToAllPassage(permutation, RowSplits(counts, len(rows)))
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
        rows, weights, passage = permutated_local_input_tokens, permuted_probs, self._passage
        if self.num_ranks == 1:
            self._run_shared_experts()
            return rows, weights
        if not self.is_padded:
            # With padding every expert has the same number of rows, so counts are only exchanged without it.
            passage = replace(passage, splits=self.row_splits_sync(passage.splits.counts, self.transport.group))
            self._passage = passage
        first, second = (RowExchange(self.transport, passage.splits.send, passage.splits.receive) for _ in range(2))
        rows, weights = first.start(rows), second.start(weights)
        # Overlaps with the exchange of rows, in backward too.
        self._run_shared_experts()
        return first.wait(rows), second.wait(weights)

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sorts received rows by expert; global_input_tokens: [R, H], any float dtype; global_probs: [R].

        Returns rows [R, H], tokens_per_expert [e], int64, on the device, and the weight of each row [R].
        """
        rows, weights, passage = global_input_tokens, global_probs, self._passage
        if self.num_ranks > 1 and self.num_local_experts > 1:
            by_expert = _expert_order(passage.splits)
            rows, weights = permute_tokens(rows, weights, by_expert)
            self._passage = replace(passage, by_expert=by_expert)
        return rows, passage.splits.counts.sum(dim=0), weights

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Puts results into the order in which their rows arrived; hidden_states: [R, H], any float dtype."""
        by_expert = self._passage.by_expert
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
        splits = self._passage.splits
        back = RowExchange(self.transport, splits.receive, splits.send)
        return back.wait(back.start(hidden_states))

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Sums each token's rows and returns the tokens in their original shape, [*, H].

        permutated_local_input_tokens: the rows returned by token_combine, any float dtype.
        """
        return self._end(unpermute_tokens(permutated_local_input_tokens, self._passage.permutation))


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


def row_splits_sync(counts: Tensor, group: dist.ProcessGroup) -> RowSplits:
    """Exchanges row counts with all ranks and reads them on the host. Collective.

    counts: [ranks, e], int64, number of rows that this rank sends to each expert. NOTE: synchronizes with the device,
    because row counts determine shapes. A layer does not synchronize anywhere else.
    """
    received = exchange_counts(counts, group)
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

    sent: [R, *], received: [R', *], any dtype. works: must complete before the current stream reads `received`.
    """

    sent: Tensor
    received: Tensor
    works: tuple[dist.Work, ...] = ()


class RowTransport(Protocol):
    """Interface for exchanging rows between the ranks of a group."""

    def launch(self, rows: Tensor, *, send: list[int] | None, receive: list[int] | None) -> RowsUnderWay:
        """Starts an exchange of rows. Collective.

        rows: [R, *], any dtype, contiguous, sorted by receiver. send, receive: numbers of rows to and from each rank;
        None means the same number for every rank.
        """

    def reserve(self, num_bytes: int) -> None:
        """Allocates memory for exchanges of num_bytes on each rank. Collective.

        CUDA graphs that use the previous memory must not be replayed afterwards.
        """


@dataclass(frozen=True)
class CollectiveTransport:
    """Sends rows with torch's all-to-all over `group`."""

    group: dist.ProcessGroup

    def launch(self, rows: Tensor, *, send: list[int] | None, receive: list[int] | None) -> RowsUnderWay:
        """Starts an asynchronous all-to-all of rows: [R, *], any dtype."""
        shape = len(rows) if receive is None else sum(receive), *rows.shape[1:]
        received = arriving(shape, self.group, dtype=rows.dtype, device=rows.device)
        work = dist.all_to_all_single(received, rows, receive, send, group=self.group, async_op=True)
        assert work is not None, "an asynchronous collective returns its work"
        return RowsUnderWay(rows, received, (work,))

    def reserve(self, num_bytes: int) -> None:
        """Does nothing, because each exchange allocates its own memory."""


@dataclass
class RowExchange:
    """Differentiable all-to-all of rows. `start` launches it, `wait` completes it; backward exchanges the gradients.

    send, receive: numbers of rows to and from each rank; None means the same number for every rank. See [Note:
    overlapped exchanges].
    """

    transport: RowTransport
    send: list[int] | None = None
    receive: list[int] | None = None
    # Also keeps a reference to the sent rows. Without it, their memory could be reused while it is still being read.
    _running: RowsUnderWay | None = field(init=False, default=None)
    _packed: Tensor | None = field(init=False, default=None)

    def start(self, rows: Tensor, packed: Tensor | None = None) -> Tensor:
        """Launches the exchange; rows: [R, *], float, sorted by receiver. Returns the input of `wait`. Collective.

        packed: [R, bytes], uint8, sent instead of the rows, which are then a placeholder, like the result of `wait`.
        See [Note: placeholders] in static_rows.py.
        """
        return _Start.apply(rows, self, packed)

    def wait(self, started: Tensor) -> Tensor:
        """Returns the received rows, or a placeholder, sorted by sender: [R', *], the rows' dtype."""
        return _Wait.apply(started, self)

    def take_packed(self) -> Tensor | None:
        """Returns the packed rows that were received, [R', bytes], uint8, after `wait`, and lets go of them."""
        # Autograd keeps the exchange until backward.
        received, self._packed = self._packed, None
        return received

    def launch(self, rows: Tensor, *, send: list[int] | None, receive: list[int] | None) -> Tensor:
        """Starts the exchange in one direction; rows: [R, *], any dtype.

        Returns the buffer, [R', *], that contains the received rows after `finish`.
        """
        assert self._running is None, "an exchange was started twice"
        self._running = self.transport.launch(rows.contiguous(), send=send, receive=receive)
        return self._running.received

    def finish(self) -> Tensor:
        """Waits for the exchange that `launch` started; returns the received rows: [R', *], any dtype."""
        assert self._running is not None, "an exchange was not started"
        running, self._running = self._running, None
        for work in running.works:
            work.wait()
        return running.received


class _Start(PlainFunction):
    """Launches the exchange in forward; backward completes the exchange that _Wait's backward launched."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: RowExchange, packed: Tensor | None) -> Tensor:
        ctx.exchange = exchange
        received = exchange.launch(rows if packed is None else packed, send=exchange.send, receive=exchange.receive)
        if packed is None:
            return received
        exchange._packed = received
        return placeholder(rows, received.shape[0])

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.finish(), None, None


class _Wait(PlainFunction):
    """Completes the exchange in forward; backward launches the gradient exchange, which _Start's backward completes."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.finish()
        return started.view_as(started)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange.launch(grad, send=exchange.receive, receive=exchange.send)
        # A placeholder of the right shape: _Start's backward returns the received gradient.
        return grad, None


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sends row i of `counts` to rank i, and returns the rows received from all ranks. Collective.

    counts: [ranks, e], int64. Returns the same shape and dtype; row i is from rank i.
    """
    received = arriving(counts.shape, group, dtype=counts.dtype, device=counts.device)
    dist.all_to_all_single(received, counts, group=group)
    return received
