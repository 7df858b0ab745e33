"""Causal attention tile by tile as one autograd function, on one rank or over ranks that hold parts of the sequences.

The log-sum-exp of each row is computed explicitly, so that an attention sink can be added. KeyValueExchange is the
interface to the keys and values of other ranks. context_parallel_attention.py implements it for several ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.autograd import PlainFunction, first_order
from megatron.core.process_groups_config import ALONE, group_rank, group_size
from megatron.core.tensor_parallel.largest_logits import LargestLogits
from megatron.core.transformer.attention_tiles import (
    MergedSoftmax,
    SoftmaxResult,
    Stretch,
    Tile,
    TileInputs,
    TileKernel,
    largest_scores,
    tiles_of_batch,
)


@dataclass(frozen=True)
class KeysAndValues:
    """Keys and values of a block, or their gradients.

    key: [K, B, G, D]; value: [K, B, G, E], the same float dtype.
    """

    key: Tensor
    value: Tensor

    def zeros(self, dtype: torch.dtype) -> "KeysAndValues":
        """Returns zeros of the same shapes, [K, B, G, D] and [K, B, G, E], in `dtype`."""
        return KeysAndValues(torch.zeros_like(self.key, dtype=dtype), torch.zeros_like(self.value, dtype=dtype))


@dataclass(frozen=True)
class Block:
    """Keys and values, with their positions in the whole sequences."""

    places: list[Stretch]
    pair: KeysAndValues


class GradientReturn(ABC):
    """Base class: returns gradients of blocks to their owner ranks, in the order of KeyValueExchange.blocks."""

    @abstractmethod
    def share(self, block: Block, dtype: torch.dtype) -> KeysAndValues:
        """Returns zeros, in which the caller accumulates this rank's share of the block's gradient.

        dtype: fp32 or fp64.
        """

    @abstractmethod
    def hand_on(self) -> None:
        """Sends the most recent share, which must not be modified afterwards."""

    @abstractmethod
    def own(self) -> KeysAndValues:
        """Returns the gradient of this rank's block, summed over all ranks, in the dtype of the shares."""


class KeyValueExchange(ABC):
    """Base class of exchanges over `group`, for sequences of seq_length tokens. All ranks must make the same calls."""

    def __init__(self, group: dist.ProcessGroup, seq_length: int) -> None:
        self.group, self.seq_length = group, seq_length
        self.size, self.rank = group_size(group), group_rank(group)

    @abstractmethod
    def held_by(self, rank: int) -> list[Stretch]:
        """Returns the ranges of every sequence that a rank holds."""

    @abstractmethod
    def blocks(self, own: KeysAndValues) -> Iterator[Block]:
        """Yields the keys and values of all ranks, block by block. Collective.

        own: keys and values of this rank's S / size tokens.
        """

    @abstractmethod
    def gradients(self) -> GradientReturn:
        """Returns the GradientReturn of one backward pass. Collective."""


class Alone(KeyValueExchange):
    """Exchange for a single rank that holds whole sequences. The only block is its keys and values."""

    def __init__(self, seq_length: int) -> None:
        super().__init__(ALONE, seq_length)

    def held_by(self, rank: int) -> list[Stretch]:
        """Returns the whole sequence as one stretch."""
        return [Stretch(0, 0, self.seq_length)]

    def blocks(self, own: KeysAndValues) -> Iterator[Block]:
        yield Block(self.held_by(0), own)

    def gradients(self) -> GradientReturn:
        return _Kept()


class _Kept(GradientReturn):
    """GradientReturn for a single rank, which keeps the gradient of its only block."""

    def __init__(self) -> None:
        self._share: KeysAndValues | None = None

    def share(self, block: Block, dtype: torch.dtype) -> KeysAndValues:
        self._share = block.pair.zeros(dtype)
        return self._share

    def hand_on(self) -> None:
        assert self._share is not None, "share was not called"

    def own(self) -> KeysAndValues:
        assert self._share is not None, "share was not called"
        return self._share


@dataclass(frozen=True, kw_only=True)
class TilePlan:
    """Arguments of attend_in_tiles other than tensors.

    segments: result of attention_tiles.segments_of_samples. window: number of visible tokens before each token; None
    means no limit. largest: records the largest score of each head; None records nothing. first_head: index of the
    first query head in `largest`.
    """

    exchange: KeyValueExchange
    kernel: TileKernel
    segments: list[list[slice]]
    window: int | None
    largest: LargestLogits | None = None
    first_head: int = 0

    def tiles(self, block: Block) -> list[Tile]:
        """Returns the tiles between this rank's queries and a block of keys."""
        queries = self.exchange.held_by(self.exchange.rank)
        return tiles_of_batch(queries, block.places, segments=self.segments, window=self.window)


def attend_in_tiles(query: Tensor, *, key: Tensor, value: Tensor, plan: TilePlan, sink: Tensor | None) -> Tensor:
    """Computes attention of this rank's queries to the keys and values of all ranks of the plan's exchange.

    1. Receives the keys and values of other ranks, in blocks or in one gather.
    2. Computes, for each block, the tiles visible to this rank's queries with their log-sum-exp.
    3. Merges the tiles and the sink into one softmax in fp32 (fp64 for fp64 inputs).

    Backward recomputes each tile from the merged log-sum-exp and sends gradients to the owners of the keys and values.

    query: [S / size, B, N, D]; key: [S / size, B, G, D]; value: [S / size, B, G, E], any float dtype, where G divides
    N. sink: [N], any float dtype, or None. Returns [S / size, B, N, E], the query's dtype. The gradient of the sink
    covers only this rank's rows.
    """
    context: Tensor = _AttentionInTiles.apply(query, key, value, sink, plan)
    return context


class _AttentionInTiles(PlainFunction):
    """Autograd function of attend_in_tiles.

    query [S / size, B, N, D], key [S / size, B, G, D], value [S / size, B, G, E], sink [N] -> [S / size, B, N, E].
    Backward exchanges keys and values a second time, so that each rank saves only its part.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, plan: TilePlan) -> Tensor:
        queries = _heads_first(query)
        merged = MergedSoftmax(queries, value_width=value.shape[3], sink=sink)
        for block in plan.exchange.blocks(KeysAndValues(key, value)):
            for tile in plan.tiles(block):
                inputs = _inputs_of(tile, queries=queries, pair=block.pair)
                if plan.largest is not None:
                    scores = largest_scores(inputs.query, key=inputs.key, tile=tile)
                    plan.largest.note(scores, scale=plan.kernel.scale, first_head=plan.first_head)
                merged.add(plan.kernel.forward(inputs, tile), tile)
        result = merged.result()
        ctx.save_for_backward(query, key, value, sink, result.output, result.log_sum)
        ctx.plan = plan
        return result.output.permute(2, 0, 1, 3)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        query, key, value, sink, output, log_sum = ctx.saved_tensors
        plan: TilePlan = ctx.plan
        queries, grads = _heads_first(query), _heads_first(grad)
        # Shares are accumulated in the precision of the merged softmax.
        grad_queries = torch.zeros_like(queries, dtype=log_sum.dtype)
        going_home = plan.exchange.gradients()
        for block in plan.exchange.blocks(KeysAndValues(key, value)):
            grad_block = going_home.share(block, log_sum.dtype)
            for tile in plan.tiles(block):
                rows = (tile.batch, slice(None), tile.queries)
                result = SoftmaxResult(output[rows], log_sum[rows])
                inputs = _inputs_of(tile, queries=queries, pair=block.pair)
                shares = plan.kernel.backward(grads[rows], inputs, result=result, tile=tile)
                of_tile = _inputs_of(tile, queries=grad_queries, pair=grad_block)
                of_tile.query.add_(shares.query)
                of_tile.key.add_(shares.key)
                of_tile.value.add_(shares.value)
            going_home.hand_on()
        own = going_home.own()
        grad_query = grad_queries.permute(2, 0, 1, 3).to(query.dtype)
        grad_sink = None
        if sink is not None and ctx.needs_input_grad[3]:
            grad_sink = sink_gradient(grads, output, log_sum=log_sum, sink=sink)
        return grad_query, own.key.to(key.dtype), own.value.to(value.dtype), grad_sink, None


def sink_gradient(grad: Tensor, output: Tensor, *, log_sum: Tensor, sink: Tensor) -> Tensor:
    """Computes the gradient of the sink logits from the output of attention with the sink.

    grad, output: [B, N, S, E], any float dtype. log_sum: [B, N, S], fp32 or fp64, including the sink. sink: [N], any
    float dtype. Returns [N], the sink's dtype.
    """
    # The value of the sink's column is 0, so only the subtracted term of the softmax derivative remains.
    share = torch.exp(sink.to(log_sum.dtype).view(-1, 1) - log_sum)
    taken = (grad.to(log_sum.dtype) * output.to(log_sum.dtype)).sum(-1)
    return -(share * taken).sum((0, 2)).to(sink.dtype)


def _heads_first(tensor: Tensor) -> Tensor:
    """Returns a permuted view: [S, B, N, D] -> [B, N, S, D]."""
    return tensor.permute(1, 2, 0, 3)


def _inputs_of(tile: Tile, *, queries: Tensor, pair: KeysAndValues) -> TileInputs:
    """Returns views of the queries, keys and values of a tile. queries: [B, N, S, D]."""
    key, value = (_heads_first(t)[tile.batch, :, tile.keys] for t in (pair.key, pair.value))
    return TileInputs(queries[tile.batch, :, tile.queries], key, value)
