"""Attention over sequences that are split over context-parallel ranks, around an attention core for whole sequences.

There are two methods. In the first, ranks exchange keys and values, around a ring or in one gather, and
tiled_attention.py computes attention block by block (ring attention, Liu et al. 2023). In the second, an all-to-all
gives each rank the whole sequences of some heads, which the core processes (DeepSpeed-Ulysses, Jacobs et al. 2023). Two
levels of ranks combine both methods.

[Note: two levels] With a2a+p2p (USP, Fang and Zhao 2024) a group of A x P ranks is divided into P groups of A
neighbors, which exchange heads, and A groups of P ranks, which form rings. Rank o * A + i is member i of the o-th
group of neighbors. A sequence has 2 A P chunks. The neighbors of group o hold chunks o * A to o * A + A - 1 from the
front, and the same number from the back. join_sequence puts these chunks in sequence order. Together they are chunk o
from the front and chunk o from the back of 2 P chunks of A times the width, which is the part that chunks_of_rank
assigns to rank o of a ring of P ranks. The ring therefore uses the same positions, segments and masks as p2p over P
ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.autograd import PlainFunction, first_order
from megatron.core.group_collectives import all_gather_rows, arriving
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import (
    ProcessGroupCollection,
    group_rank,
    group_size,
    levels_of_context,
    require_group_sizes,
)
from megatron.core.transformer.attention_tiles import Stretch, segments_of_samples, stretches, tile_kernel
from megatron.core.transformer.context_parallel import chunks_of_rank, join_sequence, split_sequence
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.tiled_attention import (
    Block,
    GradientReturn,
    KeysAndValues,
    KeyValueExchange,
    TilePlan,
    attend_in_tiles,
)
from megatron.core.transformer.transformer_config import TransformerConfig

# Blocks and gradients may overtake each other. The tags let gloo distinguish them.
_BLOCK_TAG, _GRADIENT_TAG = 0, 1
# Called with the core and then the arguments of the core.
AroundCore = Callable[..., Tensor]


def over_ranks(core: nn.Module, config: TransformerConfig, *, kind: str, groups: ProcessGroupCollection) -> AroundCore:
    """Returns a function that runs `core` on sequences split over groups.cp, or calls it directly on a single rank.

    kind: a cp_comm_type; a2a+p2p uses groups.hcp. An ExchangesSequences core is always called directly. The result is
    not a module, so that the parameters of the core have the same names in every layout. Raises ValueError if the
    groups' sizes differ from the config, or if `kind` merges softmax blocks and the core does not support that.
    """
    require_group_sizes(groups, {"cp": ("context_parallel_size", config.context_parallel_size)})
    direct: AroundCore = _run_core if isinstance(core, DotProductAttention) else _run_other_core
    if group_size(groups.cp) == 1 or isinstance(core, ExchangesSequences):
        return direct
    assert groups.cp is not None
    if kind == "a2a":
        sizes = f"context_parallel_size is {config.context_parallel_size}"
        return HeadExchangeAttention(groups.cp, attend=direct, setting=f"cp_comm_type is a2a, {sizes}")
    if not isinstance(core, DotProductAttention):
        raise ValueError(
            f"cp_comm_type is {kind} and the attention core is a {type(core).__name__}: the core must be a "
            "DotProductAttention, or cp_comm_type must be a2a"
        )
    if kind != "a2a+p2p":
        return ContextParallelAttention(config, exchange=_EXCHANGES[kind], group=groups.cp)
    # See [Note: two levels].
    sizes = f"hierarchical_context_parallel_sizes is {config.hierarchical_context_parallel_sizes}"
    neighbours, ring = levels_of_context(groups, config.hierarchical_context_parallel_sizes)
    inner = direct if group_size(ring) == 1 else ContextParallelAttention(config, exchange=Ring, group=ring)
    return HeadExchangeAttention(neighbours, attend=inner, setting=f"cp_comm_type is a2a+p2p, {sizes}")


@runtime_checkable
class ExchangesSequences(Protocol):
    """An attention core that receives this rank's part of each sequence and handles context parallelism itself.

    exchanges_sequences: marker attribute; its value is ignored.
    """

    exchanges_sequences: bool


def _run_core(core: nn.Module, *inputs: Any, **options: Any) -> Tensor:
    context: Tensor = core(*inputs, **options)
    return context


def _run_other_core(
    core: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    attn_mask_type: AttnMaskType | None = None,
    packed_seq_params: PackedSeqParams | None = None,
) -> Tensor:
    """Calls a core of another project with Megatron's calling convention. [S, B, N, D] -> [S, B, N * E].

    With packed_seq_params, the core receives one row per token, sample by sample: [B * S, N, D].
    """
    batch = query.shape[1]
    if packed_seq_params is not None:
        query, key, value = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
    context: Tensor = core(
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=attn_mask_type,
        attention_bias=None,
        packed_seq_params=packed_seq_params,
    )
    if packed_seq_params is None:
        return context
    # A core may return the heads as a separate dimension.
    return context.reshape(batch, -1, query.shape[1] * value.shape[2]).transpose(0, 1)


class ContextParallelAttention:
    """Computes causal attention of this rank's queries to the keys and values of all ranks, by attend_in_tiles."""

    def __init__(
        self, config: TransformerConfig, *, exchange: type[KeyValueExchange], group: dist.ProcessGroup
    ) -> None:
        self.exchange, self.group = exchange, group
        self.context_parallel_size = config.context_parallel_size
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
        first_head: int = 0,
    ) -> Tensor:
        """Computes attention with the core's settings. Collective.

        query: [S / size, B, N, D]; key: [S / size, B, G, D]; value: [S / size, B, G, E], any float dtype, where G
        divides N. packed_seq_params: segments of the whole sequences to which attention is restricted. first_head:
        index of the first query head among the heads of the core. Returns [S / size, B, N * E], the query's dtype.
        Raises ValueError for an explicit mask or a mask type other than causal.
        """
        mask_type = attn_mask_type or core.attn_mask_type
        if attention_mask is not None or mask_type is not AttnMaskType.causal:
            given = f"of type {mask_type.name}" if attention_mask is None else f"{list(attention_mask.shape)}"
            raise ValueError(
                f"the attention mask is {given} and context_parallel_size is {self.context_parallel_size}: must be "
                "causal, with document boundaries in packed_seq_params; otherwise set cp_comm_type to a2a"
            )
        seq_length = query.shape[0] * group_size(self.group)
        plan = TilePlan(
            exchange=self.exchange(self.group, seq_length),
            kernel=tile_kernel(
                query.device, scale=core.softmax_scale, plain=self.plain, widths=(key.shape[3], value.shape[3])
            ),
            segments=segments_of_samples(packed_seq_params, batch=query.shape[1], seq_length=seq_length),
            window=None if core.window is None else core.window[0],
            largest=core.record_of_forward(),
            first_head=first_head,
        )
        sink = core.sink(query, first_head=first_head)
        return attend_in_tiles(query, key=key, value=value, plan=plan, sink=sink).flatten(2)


class ExchangeOfChunks(KeyValueExchange):
    """Base class of exchanges in which each rank holds two chunks of every sequence."""

    def held_by(self, rank: int) -> list[Stretch]:
        return stretches(chunks_of_rank(self.seq_length, size=self.size, rank=rank))


class Ring(ExchangeOfChunks):
    """Passes blocks of keys and values around a ring of ranks. Each rank holds two blocks at a time.

    Gradients follow their blocks around the ring, so the order of summation does not depend on timing.
    """

    def blocks(self, own: KeysAndValues) -> Iterator[Block]:
        message = _message(own)
        for step in range(self.size):
            is_last = step == self.size - 1
            shift = None if is_last else start_shift(message, self.group, tag=_BLOCK_TAG)
            # The caller computes with this block while the next one is transferred.
            yield Block(self.held_by((self.rank - step) % self.size), _inside(message, like=own))
            if shift is not None:
                message = shift.wait()

    def gradients(self) -> GradientReturn:
        return _RingReturn(self.group)


class _RingReturn(GradientReturn):
    """Passes the gradient of each block around the ring back to its owner. Every rank adds its share on the way."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._arriving: Shift | None = None
        self._message: Tensor | None = None
        self._like: KeysAndValues | None = None

    def share(self, block: Block, dtype: torch.dtype) -> KeysAndValues:
        self._like = block.pair
        num_elements = block.pair.key.numel() + block.pair.value.numel()
        self._message = block.pair.key.new_zeros(num_elements, dtype=dtype)
        return _inside(self._message, like=self._like)

    def hand_on(self) -> None:
        assert self._message is not None, "share was not called"
        if self._arriving is not None:
            self._message += self._arriving.wait()
        self._arriving = start_shift(self._message, self._group, tag=_GRADIENT_TAG)
        self._message = None

    def own(self) -> KeysAndValues:
        assert self._arriving is not None and self._like is not None, "hand_on was not called"
        return _inside(self._arriving.wait(), like=self._like)


@dataclass(frozen=True)
class Shift:
    """A pending transfer: one tensor sent to the next rank, and one tensor received from the previous rank."""

    requests: list[dist.Work]
    received: Tensor
    # Kept alive until the transfer ends, because freed memory could be overwritten before it is sent.
    sent: Tensor

    def wait(self) -> Tensor:
        """Waits for the transfer and returns the received tensor: any shape and dtype."""
        for request in self.requests:
            request.wait()
        return self.received


def start_shift(tensor: Tensor, group: dist.ProcessGroup, *, tag: int) -> Shift:
    """Starts sending `tensor` to the next rank, and receiving from the previous rank.

    tensor: any shape and dtype, contiguous; must not be modified before `wait`.
    """
    size, rank = group_size(group), group_rank(group)
    received = torch.empty_like(tensor)
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % size, tag=tag),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size, tag=tag),
        ]
    )
    return Shift(requests, received, tensor)


class Gather(ExchangeOfChunks):
    """All-gathers the keys and values of all ranks into one block, and reduce-scatters the gradients in backward."""

    def blocks(self, own: KeysAndValues) -> Iterator[Block]:
        yield Block([Stretch(0, 0, self.seq_length)], self._gathered(own))

    def gradients(self) -> GradientReturn:
        return _ScatteredReturn(self.group)

    # A method, because local variables of the generator would keep the parts in memory while the caller computes.
    def _gathered(self, own: KeysAndValues) -> KeysAndValues:
        messages = all_gather_rows(_message(own), self.group).wait().chunk(self.size)
        parts = [_inside(message, like=own) for message in messages]
        return KeysAndValues(
            join_sequence([part.key for part in parts], 0), join_sequence([part.value for part in parts], 0)
        )


class _ScatteredReturn(GradientReturn):
    """Reduce-scatters in a fixed order of summation: an all-to-all, followed by a local sum in rank order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._share: KeysAndValues | None = None
        self._part: KeysAndValues | None = None
        self._received: Tensor | None = None

    def share(self, block: Block, dtype: torch.dtype) -> KeysAndValues:
        self._share = block.pair.zeros(dtype)
        return self._share

    def hand_on(self) -> None:
        assert self._share is not None, "share was not called"
        parts = [self._part_of(self._share, rank) for rank in range(group_size(self._group))]
        self._share, self._part = None, parts[0]
        sent = torch.stack([_message(part) for part in parts])
        self._received = arriving(sent.shape, self._group, dtype=sent.dtype, device=sent.device)
        dist.all_to_all_single(self._received, sent, group=self._group)

    def own(self) -> KeysAndValues:
        assert self._received is not None and self._part is not None, "hand_on was not called"
        first, *others = self._received
        for share in others:
            first += share
        return _inside(first, like=self._part)

    def _part_of(self, pair: KeysAndValues, rank: int) -> KeysAndValues:
        size = group_size(self._group)
        key, value = (split_sequence(tensor, 0, size=size, rank=rank) for tensor in (pair.key, pair.value))
        return KeysAndValues(key, value)


_EXCHANGES: dict[str, type[KeyValueExchange]] = {"p2p": Ring, "all_gather": Gather}


def _message(pair: KeysAndValues) -> Tensor:
    """Concatenates key and value, whose widths may differ, into one message: [elements].

    Ring and Gather send keys and values in this form, and _ScatteredReturn sends their gradients.
    """
    return torch.cat((pair.key.flatten(), pair.value.flatten()))


def _inside(message: Tensor, *, like: KeysAndValues) -> KeysAndValues:
    """Inverts _message: returns views of a message as key and value with the shapes of `like`.

    Ring and Gather use it for blocks, _RingReturn and _ScatteredReturn for gradients.
    """
    border = like.key.numel()
    return KeysAndValues(message[:border].view(like.key.shape), message[border:].view(like.value.shape))


class HeadExchangeAttention:
    """Computes attention for 1 / size of the heads over the tokens of all ranks, between two all-to-alls.

    attend: runs the core on these heads. If the group holds whole sequences, `attend` calls the core directly, and all
    features of the core are supported, including dropout and masks over whole sequences. With a2a+p2p, `attend` is a
    ring around the core. setting: the responsible configuration fields and their values, for error messages.
    """

    def __init__(self, group: dist.ProcessGroup, *, attend: AroundCore, setting: str) -> None:
        self.group, self.attend, self.setting = group, attend, setting

    def __call__(
        self, core: nn.Module, query: Tensor, key: Tensor, value: Tensor, *masks: Any, **options: Any
    ) -> Tensor:
        """Computes attention with `core`. Collective.

        S is the number of tokens of each sequence on all ranks of the group. query: [S / size, B, N, D]; key:
        [S / size, B, G, D]; value: [S / size, B, G, E], any float dtype. masks, options: further arguments of `attend`.
        Returns [S / size, B, N * E], the query's dtype. Raises ValueError unless N and G are divisible by the number of
        ranks.
        """
        size = group_size(self.group)
        for name, heads in (("attention heads", query.shape[2]), ("key/value heads", key.shape[2])):
            if heads % size:
                raise ValueError(
                    f"{self.setting} and a rank has {heads} {name}: must be divisible by {size}, the number of "
                    "ranks that exchange heads; otherwise use p2p or all_gather"
                )
        whole: list[Tensor] = [_SequenceToHeads.apply(t, self.group) for t in (query, key, value)]
        if isinstance(core, DotProductAttention):
            # Other cores do not need the index.
            options["first_head"] = whole[0].shape[2] * group_rank(self.group)
        context = self.attend(core, *whole, *masks, **options)
        own: Tensor = _HeadsToSequence.apply(context.unflatten(2, (-1, value.shape[3])), self.group)
        return own.flatten(2)


class _SequenceToHeads(PlainFunction):
    """Gathers the sequence and splits the heads by an all-to-all: [S / size, B, N, D] -> [S, B, N / size, D]."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_heads(part, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_sequence(grad, ctx.group), None


class _HeadsToSequence(PlainFunction):
    """Inverts _SequenceToHeads: [S, B, N / size, D] -> [S / size, B, N, D]."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_sequence(heads, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_heads(grad, ctx.group), None


def _to_heads(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = group_size(group)
    # [size, S / size, B, N / size, D]: rank r receives its heads for this rank's tokens.
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
