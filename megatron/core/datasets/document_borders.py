"""Where documents begin inside a sample, and what --reset-position-ids and --reset-attention-mask make of it.

The batch-wise version for scripts that get tokens alone is megatron.training.utils'.
"""

from collections.abc import Sequence

import numpy as np


def document_starts(tokens: np.ndarray, eod: int) -> np.ndarray:
    """[n] int64: 0, and each place behind an eod, in rising order. tokens: [S] int64; an eod ends its document."""
    return np.concatenate([[0], np.flatnonzero(tokens[:-1] == eod) + 1])


def restarted_positions(starts: np.ndarray, *, num_tokens: int) -> np.ndarray:
    """[num_tokens] int64: each token's place in its document. starts: [n] int64, as of document_starts."""
    return np.arange(num_tokens) - np.repeat(starts, np.diff(starts, append=num_tokens))


def cumulative_lengths(starts: np.ndarray, *, num_tokens: int) -> np.ndarray:
    """[n + 1] int32: `starts` ([n] int64) and the end, as attention over variable lengths takes them."""
    return np.append(starts, num_tokens).astype(np.int32)


def join_cumulative_lengths(parts: Sequence[np.ndarray]) -> np.ndarray:
    """[n + 1] int32: those of samples laid one behind the other. parts: [n_i + 1] int32 each, from 0 to S."""
    ends = np.cumsum([part[-1] for part in parts], dtype=np.int32)
    return np.concatenate([parts[0][:1], *(part[1:] + end - part[-1] for part, end in zip(parts, ends))])


def document_masks(cu_seqlens: np.ndarray, *, seq_length: int) -> np.ndarray:
    """[B, 1, S, S] bool, True where attention is forbidden: to later tokens and to other documents.

    cu_seqlens: [n + 1] int32, the borders in B samples of S = seq_length tokens, those between samples among them.
    """
    masks = np.ones((int(cu_seqlens[-1]) // seq_length, 1, seq_length, seq_length), dtype=bool)
    places = np.arange(seq_length, dtype=np.int32)
    # Block by block, not by one formula: most of the S x S bytes are then written once and never read.
    for begin, length in zip(cu_seqlens[:-1].tolist(), np.diff(cu_seqlens).tolist()):
        row, start = divmod(begin, seq_length)
        block = masks[row, 0, start : start + length, start : start + length]
        np.greater(places[None, :length], places[:length, None], out=block)
    return masks
