"""The attention core, softmax(q k^T / sqrt(D)) v, computed by torch's kernels or by a reference implementation.

It supports packed segments, sliding windows and attention sinks. Projections are in attention.py.

[Note: attention sinks] A sink is an additional column of the softmax whose value is 0. Its logit, one per head, only
increases the denominator. torch's scaled-dot-product attention does not support sinks, and appending a column of zeros
would require a mask as large as the scores. With a kernel that returns the log-sum-exp (lse) of each row, the result is
exact: scale the output by exp(lse - lse'), where lse' = log(exp(lse) + exp(sink)). The backward of the kernel computes
the gradients of query, key and value if it receives the scaled output and lse' instead of its results. The gradient of
the sink is -exp(sink - lse') (grad . output).

[Note: packed segments] On a GPU one call of torch's variable-length kernel computes all segments. Where that kernel is
not available, each segment is computed by a separate call. On the CPU this is the fastest alternative: it beats
attention over the whole sequence even for segments of 8 tokens, a mask is slower, and nested tensors have no causal
kernel (torch 2.13).

[Note: window blocks] Blocks compute only the scores inside the window. With a mask, all scores are computed and most of
them discarded. With 4,096 tokens and a window of 128, forward and backward take 0.1 s in blocks, 0.5 s without a window
and 1.2 s with a mask (8 heads, one core).
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from megatron.core.autograd import PlainFunction, first_order
from megatron.core.config_field import require_defaults
from megatron.core.device import default_device
from megatron.core.logical_tensors import LogicalPiece
from megatron.core.model_parallel_config import InitMethod
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, or_alone
from megatron.core.tensor_parallel.copies import CopiedWithGroups
from megatron.core.tensor_parallel.largest_logits import LargestLogits
from megatron.core.tensor_parallel.layers import empty_parameter, initialize_weight, split_piece, split_size
from megatron.core.tensor_parallel.param_attributes import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import is_recomputing
from megatron.core.transformer.attention_tiles import (
    MIN_ROWS,
    Tile,
    largest_scores,
    segments_of_samples,
    tile_kernel,
    widened,
)
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.recompute import Drawing
from megatron.core.transformer.tiled_attention import Alone, TilePlan, attend_in_tiles, sink_gradient
from megatron.core.transformer.transformer_config import TransformerConfig

# The first torch versions with this kernel (2.11) lack the argument. Keys and values are then repeated instead.
_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


class DotProductAttention(CopiedWithGroups, Drawing):
    """Attention with grouped key/value heads. The constructor chooses the kernel.

    layer_number: starts at 1; determines whether the layer uses a window. softmax_offset: [N], logits of learned sinks
    for this rank's heads; None unless softmax_type is learnable. largest_logits: the largest score of each head in
    training; None unless qk_clip or log_max_attention_logit requires them.
    """

    softmax_offset: nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Chooses the kernel.

        attention_type: must be "self". attention_dropout: None means the configured value. softmax_scale: None means
        the configured value, or else 1 / sqrt(kv_channels). cp_comm_type: ignored, because the attention layer handles
        context parallelism around the core.
        """
        super().__init__()
        why = "only decoders are supported, without cross-attention"
        require_defaults("DotProductAttention", why, attention_type=(attention_type, "self"))
        assert config.unscaled_init_method is not None
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        validate_backend(config.attention_backend, dropout=self.dropout)
        self.softmax_scale = softmax_scale or config.softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.kernels = sdp_backends(config.attention_backend)
        # Backends are chosen here, so that forward does not read the config.
        plain = config.attention_backend in (AttnBackend.unfused, AttnBackend.local)
        self.has_sink = config.softmax_type != "vanilla"
        self.attend: Callable[..., Tensor] = reference_attention if plain or self.has_sink else self._torch_attention
        # Sinks use tiles where possible. With dropout or a mask, the reference computes them.
        self.may_use_tiles = self.has_sink and not plain
        # Flash kernels need keys and values of equal width. The other kernels do not.
        self.needs_one_width = not plain and (not self.kernels or SDPBackend.FLASH_ATTENTION in self.kernels)
        self.window = config.window_of_layer(layer_number)
        if self.window is not None:
            # The reference uses one mask instead of blocks.
            windowed = attend_in_window if plain else attend_in_blocks
            self.attend = partial(windowed, attend=self.attend, window=self.window)
        self.samples: dict[tuple[int, int], PackedSeqParams] = {}
        self.may_use_varlen = config.attention_backend in (AttnBackend.auto, AttnBackend.flash)
        self.tp_group = or_alone((pg_collection or existing_process_groups()).tp)
        # Sinks are not scaled with the width, because they do not sum over it.
        self.init_method = config.unscaled_init_method
        self.largest_logits: LargestLogits | None = None
        if config.watches_logits:
            own_heads = split_size(config.num_attention_heads, self.tp_group, name="num_attention_heads")
            self.largest_logits = LargestLogits(own_heads)
        self.register_parameter("softmax_offset", None)
        if config.softmax_type == "learnable":
            heads = split_size(config.num_attention_heads, self.tp_group, name="num_attention_heads")
            self.softmax_offset = empty_parameter(heads, config=config)
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
            initialize_weight(self.softmax_offset, self.init_method, config=config, tp_group=self.tp_group)

    @property
    def draws_numbers(self) -> bool:
        """Whether forward draws random numbers in training, for dropout of attention probabilities."""
        return self.dropout > 0

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        *,
        first_head: int = 0,
    ) -> Tensor:
        """Computes attention of `query` over `key` and `value`.

        query: [S, B, N, D]; key: [S, B, G, D]; value: [S, B, G, E], any float dtype, where G divides N.
        attention_mask: bool, broadcastable to [B, 1, S, S], True where attention is forbidden; None selects the mask of
        attn_mask_type. attention_bias: must be None. packed_seq_params: segments to which attention is restricted;
        cannot be combined with attention_mask. first_head: index in softmax_offset of the first query head. Returns
        [S, B, N * E], the query's dtype.
        """
        if attention_bias is not None:
            raise ValueError(
                "attention_bias must be None, because DotProductAttention does not support a bias on scores"
            )
        options: dict[str, Any] = {"mask": attention_mask, "mask_type": attn_mask_type or self.attn_mask_type}
        if self.largest_logits is not None and (record := self.record_of_forward()) is not None:
            self._note_logits(record, query, key=key, **options, packed=packed_seq_params, first_head=first_head)
        options |= {"packed": packed_seq_params, "sink": self.sink(query, first_head=first_head)}
        key_width, value_width = key.shape[-1], value.shape[-1]
        if not self.needs_one_width or key_width == value_width:
            return self._context(query, key=key, value=value, **options).flatten(2)
        # Padding with zeros changes no score. The padded channels of the output are dropped.
        query, key, value = (widened(t, max(key_width, value_width)) for t in (query, key, value))
        return self._context(query, key=key, value=value, **options)[..., :value_width].flatten(2)

    def _context(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        mask_type: AttnMaskType,
        packed: PackedSeqParams | None,
        sink: Tensor | None,
    ) -> Tensor:
        """Computes attention with the selected kernel; returns [S, B, N, E]."""
        parts: dict[str, Any] = {"key": key, "value": value, "sink": sink}
        if packed is not None:
            if mask is not None:
                raise ValueError("attention_mask and packed_seq_params are both given: pass only one of them")
            return self._packed(query, **parts, packed=packed, mask_type=mask_type)
        needs_varlen = self.window is not None or self.has_sink
        if needs_varlen and mask is None and self._has_varlen_kernel(query):
            # This kernel skips scores outside the window, whereas torch's other kernels would compute all scores under
            # a mask. It also returns the log-sum-exp, which a sink requires.
            return self._packed(query, **parts, packed=self._whole_samples(query), mask_type=mask_type)
        if mask is None and self._has_tiles(mask_type):
            return self._in_tiles(query, **parts, packed=None)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [B, N or G, S, D]
        context = self.attend(
            q,
            key=k,
            value=v,
            allowed=None if mask is None else ~mask,
            is_causal=mask is None and mask_type is AttnMaskType.causal,
            dropout=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
            sink=sink,
        )
        # A view, which flattens without a copy if the kernel keeps the memory order of the query, as on CPUs.
        return context.permute(2, 0, 1, 3)

    def record_of_forward(self) -> LargestLogits | None:
        """Returns the record of largest scores for a forward that starts now.

        None if nothing is recorded: in evaluation, without gradients, and if an earlier run of the forward recorded
        them.
        """
        is_recorded = self.training and torch.is_grad_enabled() and not is_recomputing()
        return self.largest_logits if is_recorded else None

    def _note_logits(
        self,
        record: LargestLogits,
        query: Tensor,
        *,
        key: Tensor,
        mask: Tensor | None,
        mask_type: AttnMaskType,
        packed: PackedSeqParams | None,
        first_head: int,
    ) -> None:
        """Records the largest score of each head.

        Recomputes scores block by block, because the kernels do not return them.
        """
        (seq_length, batch), is_causal = query.shape[:2], mask is None and mask_type is AttnMaskType.causal
        first, last = None, 0 if is_causal else None
        if self.window is not None:
            left, right = self.window
            first, last = -left, None if right == -1 and not is_causal else 0
        segments = segments_of_samples(packed, batch=batch, seq_length=seq_length)
        q, k = (t.detach().permute(1, 2, 0, 3) for t in (query, key))  # [B, N or G, S, D]
        for sample, of_sample in enumerate(segments):
            # A single entry applies to all samples.
            samples = slice(None) if packed is None else slice(sample, sample + 1)
            for segment in of_sample:
                scores = largest_scores(
                    q[samples, :, segment],
                    key=k[samples, :, segment],
                    tile=Tile(segment, segment, first, last),
                    allowed=None if mask is None else ~mask,
                )
                record.note(scores, scale=self.softmax_scale, first_head=first_head)

    def sink(self, query: Tensor, *, first_head: int = 0) -> Tensor | None:
        """Returns the sink logits for the heads of query: [S, B, N, D], any float dtype.

        Returns [N]: learned logits in the parameter's dtype, or zeros in the query's dtype; None without sinks.
        first_head: index in softmax_offset of the first query head.
        """
        if not self.has_sink:
            return None
        if self.softmax_offset is None:
            return query.new_zeros(query.shape[2])
        return self.softmax_offset[first_head : first_head + query.shape[2]]

    def init_methods(self) -> dict[str, InitMethod]:
        """Returns the init method of each parameter, by name."""
        return {} if self.softmax_offset is None else {"softmax_offset": self.init_method}

    def logical_pieces(self, prefix: str) -> dict[str, list[LogicalPiece]]:
        """Describes the sinks as one stored tensor that covers the heads of all tensor-parallel ranks."""
        if self.softmax_offset is None:
            return {}
        key = prefix + "softmax_offset"
        return {"softmax_offset": [split_piece(key, self.softmax_offset, group=self.tp_group, dim=0)]}

    def _packed(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        packed: PackedSeqParams,
        mask_type: AttnMaskType,
        sink: Tensor | None,
    ) -> Tensor:
        is_causal, dropout = mask_type is AttnMaskType.causal, self.dropout if self.training else 0.0
        parts: dict[str, Any] = {"key": key, "value": value, "packed": packed}
        if self._has_varlen_kernel(query):
            left, right = self.window or (-1, -1)
            window = (left, 0 if is_causal else right)
            return attend_varlen(query, **parts, scale=self.softmax_scale, window=window, sink=sink)
        if self._has_tiles(mask_type):
            return self._in_tiles(query, **parts, sink=sink)
        options = {"is_causal": is_causal, "dropout": dropout, "scale": self.softmax_scale, "sink": sink}
        return attend_by_segment(query, **parts, attend=partial(self.attend, allowed=None, **options))

    def _in_tiles(
        self, query: Tensor, *, key: Tensor, value: Tensor, packed: PackedSeqParams | None, sink: Tensor | None
    ) -> Tensor:
        seq_length, batch = query.shape[:2]
        widths = key.shape[3], value.shape[3]
        plan = TilePlan(
            exchange=Alone(seq_length),
            kernel=tile_kernel(query.device, scale=self.softmax_scale, plain=False, widths=widths),
            segments=segments_of_samples(packed, batch=batch, seq_length=seq_length),
            window=None if self.window is None else self.window[0],
        )
        return attend_in_tiles(query, key=key, value=value, plan=plan, sink=sink)

    def _has_tiles(self, mask_type: AttnMaskType) -> bool:
        drops = self.training and self.dropout > 0
        return self.may_use_tiles and mask_type is AttnMaskType.causal and not drops

    def _whole_samples(self, query: Tensor) -> PackedSeqParams:
        """Returns parameters with each sample as one segment. Cached by shape, to copy the boundaries to a GPU once."""
        seq_length, batch = query.shape[:2]
        if (batch, seq_length) not in self.samples:
            borders = torch.arange(0, (batch + 1) * seq_length, seq_length, dtype=torch.int32)
            self.samples[batch, seq_length] = PackedSeqParams(cu_seqlens_q=borders)
        return self.samples[batch, seq_length]

    def _has_varlen_kernel(self, query: Tensor) -> bool:
        return self.may_use_varlen and has_varlen_kernel(query, dropout=self.dropout if self.training else 0.0)

    def _torch_attention(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        allowed: Tensor | None,
        is_causal: bool,
        dropout: float,
        scale: float,
        sink: Tensor | None,
    ) -> Tensor:
        assert sink is None, "the constructor chooses the reference for sinks"
        attend = partial(
            F.scaled_dot_product_attention,
            query,
            key,
            value,
            attn_mask=allowed,
            dropout_p=dropout,
            is_causal=is_causal,
            scale=scale,
            # The kernel shares keys and values inside a group, so that they are not copied per query head.
            enable_gqa=query.shape[1] != key.shape[1],
        )
        if not self.kernels:
            return attend()
        with sdpa_kernel(self.kernels):
            return attend()


def validate_backend(backend: AttnBackend, *, dropout: float) -> None:
    """Raises ValueError if the kernel of the backend does not support dropout on this device."""
    fused = backend in (AttnBackend.flash, AttnBackend.fused)
    if fused and dropout > 0 and default_device().type == "cpu":
        raise ValueError(
            f"attention_dropout is {dropout} and attention_backend is {backend.name}: "
            "this kernel does not support dropout on the CPU; set attention_dropout to 0 or attention_backend to auto"
        )


def sdp_backends(backend: AttnBackend) -> list[SDPBackend]:
    """Returns the torch kernels allowed for a backend; empty if torch may choose any or is not used."""
    if backend is AttnBackend.flash:
        return [SDPBackend.FLASH_ATTENTION]
    if backend is AttnBackend.fused:
        # The only fused kernel of the CPU is registered as flash attention.
        on_gpu = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        return on_gpu if default_device().type == "cuda" else [SDPBackend.FLASH_ATTENTION]
    return []


def reference_attention(
    query: Tensor,
    *,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    is_causal: bool,
    dropout: float,
    scale: float,
    sink: Tensor | None = None,
) -> Tensor:
    """Computes attention with plain tensor operations, and the softmax in fp32 (fp64 for fp64 inputs).

    query: [B, N, S, D]; key: [B, G, S, D]; value: [B, G, S, E], any float dtype; allowed: bool, broadcastable to
    [B, 1, S, S]; sink: [N], any float dtype, logits of an additional column whose value is 0.
    Returns [B, N, S, E], the query's dtype.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    # [B, N, S, S]
    scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scale
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if allowed is not None:
        # The lowest finite value instead of -inf: a row without allowed columns would become NaN.
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    probs = F.dropout(_softmax(scores, sink), p=dropout, training=dropout > 0)
    context = probs.to(query.dtype) @ value
    # Rows without allowed columns are 0, as in torch's kernels.
    return context if allowed is None or is_causal else context.masked_fill(~allowed.any(-1, keepdim=True), 0)


def _softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Computes the softmax over the columns and the sink, without the sink's column.

    scores: [B, N, S, S]; sink: [N].
    """
    if sink is None:
        return scores.softmax(dim=-1)
    column = sink.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]


def has_varlen_kernel(query: Tensor, *, dropout: float) -> bool:
    """Returns whether torch's variable-length kernel supports the query. query: [*, D], any dtype and device."""
    half, width = query.dtype in (torch.bfloat16, torch.float16), query.shape[-1]
    return query.device.type == "cuda" and half and width % 8 == 0 and width <= 256 and dropout == 0


def attend_varlen(
    query: Tensor,
    *,
    key: Tensor,
    value: Tensor,
    packed: PackedSeqParams,
    scale: float,
    window: tuple[int, int],
    sink: Tensor | None,
) -> Tensor:
    """Computes attention of all segments with one kernel.

    query: [S, B, N, D]; key, value: [S, B, G, D], bf16 or fp16, on a GPU. window: number of visible tokens to the left
    and to the right, -1 for no limit. sink: [N], any float dtype, or None. Returns [S, B, N, D], the query's dtype.
    """
    seq_length, batch, num_heads, _ = query.shape
    query, key, value = (t.transpose(0, 1).flatten(0, 1) for t in (query, key, value))  # [B * S, N or G, D]
    options: dict[str, Any] = {}
    if key.shape[1] != num_heads:
        if _TAKES_GROUPS:
            options["enable_gqa"] = True
        else:
            key, value = (t.repeat_interleave(num_heads // t.shape[1], dim=1) for t in (key, value))
    borders, longest = packed.borders_on(query.device), packed.longest
    if sink is None:
        context = varlen_attn(
            query, key, value, borders, borders, longest, longest, scale=scale, window_size=window, **options
        )
    else:
        context = _VarlenWithSink.apply(query, key, value, sink, _Segments(borders, longest, scale, window))
    assert isinstance(context, Tensor)
    return context.unflatten(0, (batch, seq_length)).transpose(0, 1)


@dataclass(frozen=True)
class _Segments:
    """Arguments of the variable-length kernel.

    borders: [n + 1], int32, on the device, cumulative segment lengths. longest: number of tokens of the longest
    segment. scale, window: as in attend_varlen.
    """

    borders: Tensor
    longest: int
    scale: float
    window: tuple[int, int]

    def options(self) -> dict[str, Any]:
        """Returns the keyword arguments common to the forward and the backward of the kernel."""
        return {
            "cum_seq_q": self.borders,
            "cum_seq_k": self.borders,
            "max_q": self.longest,
            "max_k": self.longest,
            "dropout_p": 0.0,
            "is_causal": self.window == (-1, 0),
            "scale": self.scale,
            "window_size_left": self.window[0],
            "window_size_right": self.window[1],
        }


class _VarlenWithSink(PlainFunction):
    """Variable-length attention with a sink. See [Note: attention sinks].

    query [T, N, D], key and value [T, G, D], sink [N] -> [T, N, D].
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor, segments: _Segments) -> Tensor:
        # The same operator as in varlen_attn, whose backward does not accept a modified log-sum-exp.
        output, log_sum, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, return_debug_mask=False, **segments.options()
        )
        with_sink = torch.logaddexp(log_sum, sink.float().unsqueeze(1))  # [N, T]
        share = torch.exp(log_sum - with_sink).t().unsqueeze(-1)
        output = (output * share).to(output.dtype)
        ctx.save_for_backward(query, key, value, sink, output, with_sink)
        ctx.segments = segments
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        query, key, value, sink, output, log_sum = ctx.saved_tensors
        segments: _Segments = ctx.segments
        grads = torch.ops.aten._flash_attention_backward(
            grad.contiguous(),
            query,
            key,
            value,
            output,
            log_sum,
            # The kernel does not read it without dropout.
            rng_state=torch.zeros(2, dtype=torch.uint64, device=query.device),
            unused=torch.empty(0, dtype=torch.float32, device=query.device),
            **segments.options(),
        )
        grad_sink = None
        if ctx.needs_input_grad[3]:
            heads_first = (t.transpose(0, 1).unsqueeze(0) for t in (grad, output))
            grad_sink = sink_gradient(*heads_first, log_sum=log_sum.unsqueeze(0), sink=sink)
        return *grads, grad_sink, None


def attend_by_segment(
    query: Tensor, *, key: Tensor, value: Tensor, packed: PackedSeqParams, attend: Callable[..., Tensor]
) -> Tensor:
    """Calls `attend` once per segment. See [Note: packed segments].

    query: [S, B, N, D]; key, value: [S, B, G, D], any float dtype; attend: (query [1, N, L, D], key=[1, G, L, D],
    value=...) -> [1, N, L, D]. Returns [S, B, N, D], the query's dtype.
    """
    seq_length, batch = query.shape[:2]
    # Split instead of sliced: backward of split concatenates the gradients once, whereas backward of slices pads and
    # sums them.
    queries, keys, values = (t.transpose(0, 1).flatten(0, 1).split(packed.segment_lengths) for t in (query, key, value))
    contexts = []
    for parts in zip(queries, keys, values, strict=True):
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        contexts.append(attend(q, key=k, value=v).squeeze(0).transpose(0, 1))
    return torch.cat(contexts).unflatten(0, (batch, seq_length)).transpose(0, 1)


def attend_in_blocks(
    query: Tensor,
    *,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    is_causal: bool,
    attend: Callable[..., Tensor],
    window: tuple[int, int],
    **options: Any,
) -> Tensor:
    """Computes the same result as attend_in_window in blocks of rows. See [Note: window blocks].

    Each block attends to its tokens and to the `left` tokens before it. Falls back to attend_in_window for explicit
    masks, non-causal windows and short sequences.

    query: [B, N, S, D]; key, value: [B, G, S, D], any float dtype; allowed: bool, broadcastable to [B, 1, S, S];
    options: dropout, scale and sink, passed to `attend`. Returns [B, N, S, D], the query's dtype.
    """
    (batch, _, seq_length, _), left = query.shape, window[0]
    rows = max(left + 1, MIN_ROWS)
    masked: Callable[..., Tensor] = partial(
        attend_in_window, attend=attend, window=window, is_causal=is_causal, **options
    )
    # With at most two blocks, nearly all scores would be computed anyway.
    if allowed is not None or not is_causal or seq_length <= 2 * rows:
        return masked(query, key=key, value=value, allowed=allowed)
    rest = seq_length - rows
    num_blocks = -(-rest // rows)
    padding = (0, 0, 0, num_blocks * rows - rest)
    # The first block has fewer keys than the others, because no tokens precede it.
    first, others = query.split([rows, rest], dim=2)
    first = masked(first, key=key[:, :, :rows], value=value[:, :, :rows], allowed=None)
    blocks = F.pad(others, padding).unflatten(2, (num_blocks, rows)).transpose(1, 2).flatten(0, 1)
    keys, values = (
        F.pad(t[:, :, rows - left :], padding).unfold(2, rows + left, rows).permute(0, 2, 1, 4, 3).flatten(0, 1)
        for t in (key, value)
    )  # [B * blocks, G, rows + left, D]
    context = attend(
        blocks, key=keys, value=values, allowed=_block_band(rows, left, device=query.device), is_causal=False, **options
    )
    context = context.unflatten(0, (batch, num_blocks)).transpose(1, 2).flatten(2, 3)
    return torch.cat((first, context[:, :, :rest]), dim=2)


def attend_in_window(
    query: Tensor,
    *,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    is_causal: bool,
    attend: Callable[..., Tensor],
    window: tuple[int, int],
    **options: Any,
) -> Tensor:
    """Calls `attend` with a mask for the window, combined with `allowed`. Short sequences need no window mask.

    query: [B, N, S, D]; key, value: [B, G, S, D], any float dtype; allowed: bool, broadcastable to [B, 1, S, S];
    options: dropout, scale and sink, passed to `attend`. Returns [B, N, S, D], the query's dtype.
    """
    seq_length, (left, right) = query.shape[2], window
    looks_ahead = right == -1 and not is_causal
    if left + 1 < seq_length or not (is_causal or looks_ahead):
        band = band_mask(seq_length, left=left, looks_ahead=looks_ahead, device=query.device)
        allowed, is_causal = band if allowed is None else allowed & band, False
    return attend(query, key=key, value=value, allowed=allowed, is_causal=is_causal, **options)


def band_mask(seq_length: int, *, left: int, looks_ahead: bool, device: torch.device) -> Tensor:
    """Returns a mask, [S, S], bool, on `device`: row i allows columns i - left to i, or to the end if looks_ahead."""
    band = torch.ones(seq_length, seq_length, dtype=torch.bool, device=device).triu_(-left)
    return band if looks_ahead else band.tril_()


def _block_band(rows: int, left: int, *, device: torch.device) -> Tensor:
    # Column 0 is the earliest token that the first row sees.
    return torch.ones(rows, rows + left, dtype=torch.bool, device=device).triu_().tril_(left)
