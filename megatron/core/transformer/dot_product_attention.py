"""The attention core: softmax(q k^T / sqrt(D)) v by torch's kernels or a plain reference; no projections here."""

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
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.packed_attention import attend_by_segment, attend_varlen, has_varlen_kernel
from megatron.core.transformer.recompute import Drawing
from megatron.core.transformer.tile_kernels import widened
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.window_attention import attend_in_blocks, attend_in_window


class DotProductAttention(nn.Module, Drawing):
    """Attention of query heads over shared key/value heads; the kernel is chosen at construction.

    layer_number: counts from 1; layers may differ in whether they have a window.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        *,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        assert config.kv_channels is not None
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        validate_backend(config.attention_backend, dropout=self.dropout)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.kernels = sdp_backends(config.attention_backend)
        # Chosen here, once: forward has no switches.
        plain = config.attention_backend in (AttnBackend.unfused, AttnBackend.local)
        self.attend: Callable[..., Tensor] = reference_attention if plain else self._torch_attention
        # Flash kernels do not take values of another width than keys; where they are not allowed, others do.
        self.needs_one_width = not plain and (not self.kernels or SDPBackend.FLASH_ATTENTION in self.kernels)
        self.window = config.window_of_layer(layer_number)
        if self.window is not None:
            # The reference stays plain: one mask, no blocks.
            windowed = attend_in_window if plain else attend_in_blocks
            self.attend = partial(windowed, attend=self.attend, window=self.window)
        self.samples: dict[tuple[int, int], PackedSeqParams] = {}
        self.may_use_varlen = config.attention_backend in (AttnBackend.auto, AttnBackend.flash)

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
    ) -> Tensor:
        """query: [S, B, N, D]; key: [S, B, G, D]; value: [S, B, G, E], G divides N, any float dtype;
        attention_mask: bool, broadcastable to [B, 1, S, S], True where attention is forbidden, or None for what the
        mask type says. packed_seq_params: segments that attention does not leave; instead of a mask.
        Returns [S, B, N * E], the query's dtype.
        """
        options: dict[str, Any] = {"mask": attention_mask, "mask_type": attn_mask_type or self.attn_mask_type}
        options["packed"] = packed_seq_params
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
    ) -> Tensor:
        """[S, B, N, E]."""
        if packed is not None:
            if mask is not None:
                raise ValueError("attention_mask and packed_seq_params are both given: one of them must be None")
            return self._packed(query, key=key, value=value, packed=packed, mask_type=mask_type)
        if self.window is not None and mask is None and self._has_varlen_kernel(query):
            # It skips what lies outside the window; torch's other kernels would need a mask, and compute all.
            return self._packed(query, key=key, value=value, packed=self._whole_samples(query), mask_type=mask_type)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [B, N or G, S, D]
        context = self.attend(
            q,
            key=k,
            value=v,
            allowed=None if mask is None else ~mask,
            is_causal=mask is None and mask_type is AttnMaskType.causal,
            dropout=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
        )
        # No copy where the kernel keeps the query's memory order, [S, B, N, D], as torch's on the CPU does.
        return context.permute(2, 0, 1, 3)

    def _packed(
        self, query: Tensor, *, key: Tensor, value: Tensor, packed: PackedSeqParams, mask_type: AttnMaskType
    ) -> Tensor:
        is_causal, dropout = mask_type is AttnMaskType.causal, self.dropout if self.training else 0.0
        parts: dict[str, Any] = {"key": key, "value": value, "packed": packed}
        if self._has_varlen_kernel(query):
            left, right = self.window or (-1, -1)
            window = (left, 0 if is_causal else right)
            return attend_varlen(query, **parts, scale=self.softmax_scale, window=window)
        attend = partial(self.attend, allowed=None, is_causal=is_causal, dropout=dropout, scale=self.softmax_scale)
        return attend_by_segment(query, **parts, attend=attend)

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
    ) -> Tensor:
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
) -> Tensor:
    """Attention step by step, softmax in fp32 or more.

    query: [B, N, S, D]; key: [B, G, S, D]; value: [B, G, S, E], any float dtype; allowed: bool, broadcastable to
    [B, 1, S, S]. Returns [B, N, S, E], the query's dtype.
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
    probs = F.dropout(scores.softmax(dim=-1), p=dropout, training=dropout > 0)
    context = probs.to(query.dtype) @ value
    # Such a row becomes 0, as torch's kernels have it.
    return context if allowed is None or is_causal else context.masked_fill(~allowed.any(-1, keepdim=True), 0)
