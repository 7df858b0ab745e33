"""Attention over sequences that are cut over ranks, around a core for whole ones.

How keys and values travel is key_value_exchange.py's, which rank computes what attention_tiles.py's.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection, group_size, require_group_sizes
from megatron.core.transformer.attention_tiles import Tile, segments_of_samples, tiles_of_batch
from megatron.core.transformer.context_parallel import join_sequence, split_sequence
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.key_value_exchange import Block, Gather, KeysAndValues, KeyValueExchange, Ring
from megatron.core.transformer.tile_kernels import MergedSoftmax, SoftmaxResult, TileInputs, TileKernel, tile_kernel
from megatron.core.transformer.transformer_config import TransformerConfig

_EXCHANGES: dict[str, type[KeyValueExchange]] = {"p2p": Ring, "all_gather": Gather}


def over_ranks(
    core: nn.Module, config: TransformerConfig, *, layer_number: int, cp_group: dist.ProcessGroup | None
) -> nn.Module:
    """`core`, or around it what makes it attend to whole sequences where cp_group has several ranks.

    Raises ValueError for heads that cannot change places, a core whose softmax cannot be put together from parts, or
    ranks that are not config's: what such attention lacks was refused by config's size.
    """
    size = ("context_parallel_size", config.context_parallel_size)
    require_group_sizes(ProcessGroupCollection(cp=cp_group), {"cp": size})
    if group_size(cp_group) == 1:
        return core
    assert cp_group is not None
    kind = config.cp_comm_type_of_layer(layer_number)
    if kind == "a2a":
        return HeadExchangeAttention(core, cp_group)
    if not isinstance(core, DotProductAttention):
        raise ValueError(
            f"cp_comm_type is {kind} and the attention core is a {type(core).__name__}: must be a DotProductAttention, "
            "or cp_comm_type a2a"
        )
    return ContextParallelAttention(core, config, exchange=_EXCHANGES[kind], group=cp_group)


class ContextParallelAttention(nn.Module):
    """Causal attention of this rank's queries to the keys and values of all ranks.

    1. Keys and values of other ranks arrive, block by block or at once.
    2. Of each block the tiles that this rank's queries see are computed, each with its log-sum-exp.
    3. Tiles are merged into one softmax in fp32, fp64 for fp64.
    Backward computes the tiles' shares again from the merged log-sum-exp, and sends gradients back to their owners.
    """

    def __init__(
        self,
        core: DotProductAttention,
        config: TransformerConfig,
        *,
        exchange: type[KeyValueExchange],
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__()
        self.core, self.exchange, self.group = core, exchange, group
        self.window = None if core.window is None else core.window[0]
        self.plain = config.attention_backend in (AttnBackend.unfused, AttnBackend.local)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query: [S / size, B, N, D]; key: [S / size, B, G, D]; value: [S / size, B, G, E], G divides N, any float
        dtype. packed_seq_params: segments of the whole sequences that attention does not leave.
        Returns [S / size, B, N * E], the query's dtype. Raises ValueError for a mask, or one that is not causal.
        """
        mask_type = attn_mask_type or self.core.attn_mask_type
        if attention_mask is not None or mask_type is not AttnMaskType.causal:
            given = f"of type {mask_type.name}" if attention_mask is None else f"{list(attention_mask.shape)}"
            raise ValueError(
                f"the attention mask is {given} and context_parallel_size is {group_size(self.group)}: "
                "must be causal, with borders in packed_seq_params, or cp_comm_type must be a2a"
            )
        seq_length = query.shape[0] * group_size(self.group)
        plan = _Plan(
            exchange=self.exchange(self.group, seq_length),
            kernel=tile_kernel(
                query.device, scale=self.core.softmax_scale, plain=self.plain, widths=(key.shape[3], value.shape[3])
            ),
            segments=segments_of_samples(packed_seq_params, batch=query.shape[1], seq_length=seq_length),
            window=self.window,
        )
        context: Tensor = _AttentionOverRanks.apply(query, key, value, plan)
        return context.flatten(2)


class HeadExchangeAttention(nn.Module):
    """Before attention ranks change parts of sequences for heads, and back behind it; the core sees whole sequences.

    All that the core can do works, masks over whole sequences and dropout included; heads must divide by the ranks.
    """

    def __init__(self, core: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.core, self.group = core, group

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *masks: Any, **options: Any) -> Tensor:
        """query: [S / size, B, N, D]; key: [S / size, B, G, D]; value: [S / size, B, G, E], any float dtype; masks,
        options: the core's. Returns [S / size, B, N * E], the query's dtype. Raises ValueError unless the ranks divide
        N and G.
        """
        for name, heads in (("attention heads", query.shape[2]), ("key/value heads", key.shape[2])):
            if heads % group_size(self.group):
                raise ValueError(
                    f"cp_comm_type is a2a, context_parallel_size is {group_size(self.group)} and a rank has {heads} "
                    f"{name}: they must divide by it, or use p2p or all_gather"
                )
        whole: list[Tensor] = [_SequenceToHeads.apply(t, self.group) for t in (query, key, value)]
        context = self.core(*whole, *masks, **options)
        own: Tensor = _HeadsToSequence.apply(context.unflatten(2, (-1, value.shape[3])), self.group)
        return own.flatten(2)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What one call needs besides its tensors."""

    exchange: KeyValueExchange
    kernel: TileKernel
    segments: list[list[slice]]
    window: int | None

    def tiles(self, block: Block) -> list[Tile]:
        queries = self.exchange.held_by(self.exchange.rank)
        return tiles_of_batch(queries, block.places, segments=self.segments, window=self.window)


class _AttentionOverRanks(torch.autograd.Function):
    """query [S / size, B, N, D], key [S / size, B, G, D], value [S / size, B, G, E] -> [S / size, B, N, E].

    Backward gets others' keys and values anew, so that no rank holds more than its part between the passes.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Plan) -> Tensor:
        queries = _heads_first(query)
        merged = MergedSoftmax(queries, value_width=value.shape[3])
        for block in plan.exchange.blocks(KeysAndValues(key, value)):
            for tile in plan.tiles(block):
                merged.add(plan.kernel.forward(_inputs_of(tile, queries=queries, pair=block.pair), tile), tile)
        result = merged.result()
        ctx.save_for_backward(query, key, value, result.output, result.log_sum)
        ctx.plan = plan
        return result.output.permute(2, 0, 1, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, output, log_sum = ctx.saved_tensors
        plan: _Plan = ctx.plan
        queries, grads = _heads_first(query), _heads_first(grad)
        # Shares are added up in the precision that the softmax was merged in.
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
        return grad_query, own.key.to(key.dtype), own.value.to(value.dtype), None


class _SequenceToHeads(torch.autograd.Function):
    """[S / size, B, N, D] -> [S, B, N / size, D]: a part of the sequences with all heads to all with a part of them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_heads(part, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_sequence(grad, ctx.group), None


class _HeadsToSequence(torch.autograd.Function):
    """[S, B, N / size, D] -> [S / size, B, N, D]."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_sequence(heads, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_heads(grad, ctx.group), None


def _to_heads(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = group_size(group)
    # [size, S / size, B, N / size, D]: to rank r its heads of this part; from rank r its part of these heads.
    sent = part.unflatten(2, (size, -1)).movedim(2, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return join_sequence(list(received), 0)


def _to_sequence(heads: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = group_size(group)
    sent = torch.stack([split_sequence(heads, 0, size=size, rank=rank) for rank in range(size)])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.movedim(0, 2).flatten(2, 3)


def _heads_first(tensor: Tensor) -> Tensor:
    """[S, B, N, D] -> [B, N, S, D], a view."""
    return tensor.permute(1, 2, 0, 3)


def _inputs_of(tile: Tile, *, queries: Tensor, pair: KeysAndValues) -> TileInputs:
    """Views of a tile's rows and columns; queries: [B, N, S, D]."""
    key, value = (_heads_first(t)[tile.batch, :, tile.keys] for t in (pair.key, pair.value))
    return TileInputs(queries[tile.batch, :, tile.queries], key, value)
