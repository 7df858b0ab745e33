"""The attention core: softmax(q k^T / sqrt(D)) v by torch's kernels or a plain reference; no projections here.

[Note: attention sinks] A sink is one more column of the softmax whose value is 0: its logit, one for each head, makes
the sum larger and nothing else. torch's scaled-dot-product attention has none, and as a column of zeros it would need a
mask as large as the scores. Kernels that return each row's log-sum-exp give it exactly: the output is scaled by
exp(lse - lse'), lse' = log(exp(lse) + exp(sink)), and the kernel's own backward gives all gradients when it is handed
the scaled output and lse' in the place of its own; what remains is the sink's, -exp(sink - lse') (grad . output).
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.device import default_device
from megatron.core.dist_checkpointing.logical import LogicalPiece
from megatron.core.model_parallel_config import InitMethod
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, or_alone
from megatron.core.tensor_parallel.copies import CopiedWithGroups
from megatron.core.tensor_parallel.layers import empty_parameter, initialize_weight, split_piece, split_size
from megatron.core.tensor_parallel.param_attributes import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention_tiles import segments_of_samples
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.key_value_exchange import Alone
from megatron.core.transformer.packed_attention import attend_by_segment, attend_varlen, has_varlen_kernel
from megatron.core.transformer.recompute import Drawing
from megatron.core.transformer.tile_kernels import tile_kernel, widened
from megatron.core.transformer.tiled_attention import TilePlan, attend_in_tiles
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.window_attention import attend_in_blocks, attend_in_window


class DotProductAttention(CopiedWithGroups, Drawing):
    """Attention of query heads over shared key/value heads; the kernel is chosen at construction.

    layer_number: counts from 1; layers may differ in whether they have a window.
    softmax_offset: [N] of this rank's heads, the logits of learned sinks; None without them.
    """

    softmax_offset: nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        *,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        assert config.kv_channels is not None and config.init_method is not None
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        validate_backend(config.attention_backend, dropout=self.dropout)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.kernels = sdp_backends(config.attention_backend)
        # Chosen here, once: forward has no switches.
        plain = config.attention_backend in (AttnBackend.unfused, AttnBackend.local)
        self.has_sink = config.softmax_type != "vanilla"
        self.attend: Callable[..., Tensor] = reference_attention if plain or self.has_sink else self._torch_attention
        # The reference has sinks itself, and gives what is asked of it beside them: dropout, a mask.
        self.may_use_tiles = self.has_sink and not plain
        # Flash kernels do not take values of another width than keys; where they are not allowed, others do.
        self.needs_one_width = not plain and (not self.kernels or SDPBackend.FLASH_ATTENTION in self.kernels)
        self.window = config.window_of_layer(layer_number)
        if self.window is not None:
            # The reference stays plain: one mask, no blocks.
            windowed = attend_in_window if plain else attend_in_blocks
            self.attend = partial(windowed, attend=self.attend, window=self.window)
        self.samples: dict[tuple[int, int], PackedSeqParams] = {}
        self.may_use_varlen = config.attention_backend in (AttnBackend.auto, AttnBackend.flash)
        self.tp_group = or_alone((pg_collection or existing_process_groups()).tp)
        self.init_method = config.init_method
        self.register_parameter("softmax_offset", None)
        if config.softmax_type == "learnable":
            heads = split_size(config.num_attention_heads, self.tp_group, name="num_attention_heads")
            self.softmax_offset = empty_parameter(heads, config=config)
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
            initialize_weight(self.softmax_offset, self.init_method, config=config, tp_group=self.tp_group)

    @property
    def draws_numbers(self) -> bool:
        """Whether probabilities have dropout."""
        return self.dropout > 0

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        first_head: int = 0,
    ) -> Tensor:
        """query: [S, B, N, D]; key: [S, B, G, D]; value: [S, B, G, E], G divides N, any float dtype;
        attention_mask: bool, broadcastable to [B, 1, S, S], True where attention is forbidden, or None for what the
        mask type says. packed_seq_params: segments that attention does not leave; instead of a mask. first_head: the
        first query head's place in softmax_offset. Returns [S, B, N * E], the query's dtype.
        """
        options: dict[str, Any] = {"mask": attention_mask, "mask_type": attn_mask_type or self.attn_mask_type}
        options |= {"packed": packed_seq_params, "sink": self.sink(query, first_head=first_head)}
        key_width, value_width = key.shape[-1], value.shape[-1]
        if not self.needs_one_width or key_width == value_width:
            return self._context(query, key=key, value=value, **options).flatten(2)
        # Zeros change no score, and what they give is cut off.
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
        """[S, B, N, E]."""
        parts: dict[str, Any] = {"key": key, "value": value, "sink": sink}
        if packed is not None:
            if mask is not None:
                raise ValueError("attention_mask and packed_seq_params are both given: one of them must be None")
            return self._packed(query, **parts, packed=packed, mask_type=mask_type)
        needs_varlen = self.window is not None or self.has_sink
        if needs_varlen and mask is None and self._has_varlen_kernel(query):
            # It skips what lies outside the window, where torch's other kernels would need a mask and compute all, and
            # gives the log-sum-exp that a sink needs.
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
        # No copy where the kernel keeps the query's memory order, [S, B, N, D], as torch's on the CPU does.
        return context.permute(2, 0, 1, 3)

    def sink(self, query: Tensor, *, first_head: int = 0) -> Tensor | None:
        """The sinks' logits of the query's heads; query: [S, B, N, D], any float dtype.

        Returns [N], the parameter's dtype, or zeros of the query's where they are not learned; None without sinks.
        """
        if not self.has_sink:
            return None
        if self.softmax_offset is None:
            return query.new_zeros(query.shape[2])
        return self.softmax_offset[first_head : first_head + query.shape[2]]

    def init_methods(self) -> dict[str, InitMethod]:
        """How the parameters start, by name."""
        return {} if self.softmax_offset is None else {"softmax_offset": self.init_method}

    def logical_pieces(self, prefix: str) -> dict[str, list[LogicalPiece]]:
        """The sinks are stored for all heads, [N of all ranks]."""
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
        """Samples as segments of one length each; made once for a shape, so that a GPU gets their borders once."""
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
        assert sink is None, "the reference is chosen where there are sinks"
        with self._kernel_choice():
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=allowed,
                dropout_p=dropout,
                is_causal=is_causal,
                scale=scale,
                # Groups are shared inside the kernel: keys and values are not copied per query head.
                enable_gqa=query.shape[1] != key.shape[1],
            )

    def _kernel_choice(self) -> AbstractContextManager[None]:
        return sdpa_kernel(self.kernels) if self.kernels else nullcontext()


def validate_backend(backend: AttnBackend, *, dropout: float) -> None:
    """Raises ValueError for a kernel that this device does not have."""
    fused = backend in (AttnBackend.flash, AttnBackend.fused)
    if fused and dropout > 0 and default_device().type == "cpu":
        raise ValueError(
            f"attention_dropout is {dropout} and attention_backend is {backend.name}: "
            "that kernel has no dropout on the CPU, set attention_dropout to 0 or attention_backend to auto"
        )


def sdp_backends(backend: AttnBackend) -> list[SDPBackend]:
    """The kernels that torch may use for a backend; empty where torch chooses freely, or is not asked."""
    if backend is AttnBackend.flash:
        return [SDPBackend.FLASH_ATTENTION]
    if backend is AttnBackend.fused:
        # The CPU has one fused kernel, which goes by flash's name.
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
    """Attention step by step, softmax in fp32 or more.

    query: [B, N, S, D]; key: [B, G, S, D]; value: [B, G, S, E], any float dtype; allowed: bool, broadcastable to
    [B, 1, S, S]; sink: [N], any float dtype, the logit of a column whose value is 0.
    Returns [B, N, S, E], the query's dtype.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    # [B, N, S, S]
    scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scale
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if allowed is not None:
        # The lowest finite value: a row with nothing allowed stays free of NaN.
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    probs = F.dropout(_softmax(scores, sink), p=dropout, training=dropout > 0)
    context = probs.to(query.dtype) @ value
    # Such a row becomes 0, as torch's kernels have it.
    return context if allowed is None or is_causal else context.masked_fill(~allowed.any(-1, keepdim=True), 0)


def _softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Over the columns and, where there is one, the sink [N], whose share is left out; scores: [B, N, S, S]."""
    if sink is None:
        return scores.softmax(dim=-1)
    column = sink.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
