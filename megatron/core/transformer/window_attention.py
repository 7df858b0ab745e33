"""Sliding-window attention around any attention function: the band of a window as a mask, built once."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams


def attend_in_window(
    query: Tensor,
    *,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    is_causal: bool,
    attend: Callable[..., Tensor],
    window: tuple[int, int],
    dropout: float,
    scale: float,
) -> Tensor:
    """`attend` with what lies outside the window forbidden too; sequences that fit into it need no mask.

    query: [B, N, S, D]; key, value: [B, G, S, D], any float dtype; allowed: bool, broadcastable to [B, 1, S, S].
    Returns [B, N, S, D], the query's dtype.
    """
    seq_length, (left, right) = query.shape[2], window
    looks_ahead = right == -1 and not is_causal
    if left + 1 < seq_length or not (is_causal or looks_ahead):
        band = band_mask(seq_length, left=left, looks_ahead=looks_ahead, device=query.device)
        allowed, is_causal = band if allowed is None else allowed & band, False
    return attend(query, key=key, value=value, allowed=allowed, is_causal=is_causal, dropout=dropout, scale=scale)


def band_mask(seq_length: int, *, left: int, looks_ahead: bool, device: torch.device) -> Tensor:
    """[S, S], bool, on `device`: row i allows columns i - left to i, and all after i where it looks ahead.

    A corner of a standing mask, which is the same for all layers, micro-batches and segments.
    """
    # Powers of two: segments of a hundred lengths share few masks.
    size = 1 << (seq_length - 1).bit_length()
    return _standing_band(size, left, looks_ahead=looks_ahead, device=device)[:seq_length, :seq_length]


@functools.lru_cache(maxsize=16)
def _standing_band(size: int, left: int, *, looks_ahead: bool, device: torch.device) -> Tensor:
    band = torch.ones(size, size, dtype=torch.bool, device=device).triu_(-left)
    return band if looks_ahead else band.tril_()


@functools.lru_cache(maxsize=16)
def whole_samples(batch: int, seq_length: int) -> PackedSeqParams:
    """Samples as segments of one length each, for kernels that take segments."""
    return PackedSeqParams(cu_seqlens_q=torch.arange(0, (batch + 1) * seq_length, seq_length, dtype=torch.int32))
