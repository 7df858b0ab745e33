"""Attention over sequences that are cut over ranks, around a core for whole ones.

How keys and values travel is key_value_exchange.py's, which rank computes what attention_tiles.py's.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.group_collectives import arriving
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size, require_group_sizes
from megatron.core.transformer.attention_tiles import segments_of_samples
from megatron.core.transformer.context_parallel import join_sequence, split_sequence
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.key_value_exchange import Gather, KeyValueExchange, Ring
from megatron.core.transformer.tile_kernels import tile_kernel
from megatron.core.transformer.tiled_attention import TilePlan, attend_in_tiles
from megatron.core.transformer.transformer_config import TransformerConfig

_EXCHANGES: dict[str, type[KeyValueExchange]] = {"p2p": Ring, "all_gather": Gather}
# Called with the core, then what the core is called with.
AroundCore = Callable[..., Tensor]


def over_ranks(
    core: nn.Module, config: TransformerConfig, *, layer_number: int, cp_group: dist.ProcessGroup | None
) -> AroundCore:
    """What runs `core`: as it is, or so that it attends to whole sequences where cp_group has several ranks.

    It is no module: the core's parameters have the same names in every layout. Raises ValueError for heads that cannot
    change places, a core whose softmax cannot be put together from parts, or ranks that are not config's: what such
    attention lacks was refused by config's size.
    """
    size = ("context_parallel_size", config.context_parallel_size)
    require_group_sizes(ProcessGroupCollection(cp=cp_group), {"cp": size})
    if group_size(cp_group) == 1:
        return _run_core
    assert cp_group is not None
    kind = config.cp_comm_type_of_layer(layer_number)
    if kind == "a2a":
        return HeadExchangeAttention(cp_group)
    if not isinstance(core, DotProductAttention):
        raise ValueError(
            f"cp_comm_type is {kind} and the attention core is a {type(core).__name__}: must be a DotProductAttention, "
            "or cp_comm_type a2a"
        )
    return ContextParallelAttention(config, exchange=_EXCHANGES[kind], group=cp_group)


def _run_core(core: nn.Module, *inputs: Any, **options: Any) -> Tensor:
    context: Tensor = core(*inputs, **options)
    return context


class ContextParallelAttention:
    """Causal attention of this rank's queries to the keys and values of all ranks, see tiled_attention.py."""

    def __init__(
        self, config: TransformerConfig, *, exchange: type[KeyValueExchange], group: dist.ProcessGroup
    ) -> None:
        self.exchange, self.group = exchange, group
        self.plain = config.attention_backend in (AttnBackend.unfused, AttnBackend.local)

    def __call__(
        self,
        core: DotProductAttention,
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
        mask_type = attn_mask_type or core.attn_mask_type
        if attention_mask is not None or mask_type is not AttnMaskType.causal:
            given = f"of type {mask_type.name}" if attention_mask is None else f"{list(attention_mask.shape)}"
            raise ValueError(
                f"the attention mask is {given} and context_parallel_size is {group_size(self.group)}: "
                "must be causal, with borders in packed_seq_params, or cp_comm_type must be a2a"
            )
        seq_length = query.shape[0] * group_size(self.group)
        plan = TilePlan(
            exchange=self.exchange(self.group, seq_length),
            kernel=tile_kernel(
                query.device, scale=core.softmax_scale, plain=self.plain, widths=(key.shape[3], value.shape[3])
            ),
            segments=segments_of_samples(packed_seq_params, batch=query.shape[1], seq_length=seq_length),
            window=None if core.window is None else core.window[0],
        )
        return attend_in_tiles(query, key=key, value=value, plan=plan, sink=core.sink(query)).flatten(2)


class HeadExchangeAttention:
    """Before attention ranks change parts of sequences for heads, and back behind it; the core sees whole sequences.

    All that the core can do works, masks over whole sequences and dropout included; heads must divide by the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(
        self, core: nn.Module, query: Tensor, key: Tensor, value: Tensor, *masks: Any, **options: Any
    ) -> Tensor:
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
        if isinstance(core, DotProductAttention):
            # A core of another class knows no heads apart.
            options["first_head"] = whole[0].shape[2] * group_rank(self.group)
        context = core(*whole, *masks, **options)
        own: Tensor = _HeadsToSequence.apply(context.unflatten(2, (-1, value.shape[3])), self.group)
        return own.flatten(2)


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
    received = arriving(sent.shape, group, dtype=sent.dtype, device=sent.device)
    dist.all_to_all_single(received, sent, group=group)
    return join_sequence(list(received), 0)


def _to_sequence(heads: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = group_size(group)
    sent = torch.stack([split_sequence(heads, 0, size=size, rank=rank) for rank in range(size)])
    received = arriving(sent.shape, group, dtype=sent.dtype, device=sent.device)
    dist.all_to_all_single(received, sent, group=group)
    return received.movedim(0, 2).flatten(2, 3)
