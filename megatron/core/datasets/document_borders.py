"""Document borders within a sample, with the positions and masks for --reset-position-ids and --reset-attention-mask.

A version for whole batches is in megatron/training/utils.py, for scripts that only have tokens.
"""

from collections.abc import Sequence

import numpy as np

from megatron.core.datasets.indexed_dataset import DataError, IndexedDataset, open_token_mask


def document_starts_prefix(path_prefix: str) -> str:
    """Returns the prefix of the files that mark the first token of each document within `path_prefix`."""
    return path_prefix + "_document_starts"


def open_document_starts(path_prefix: str | None, lengths: np.ndarray, *, mmap: bool) -> IndexedDataset | None:
    """Opens the marks of documents within the tokens at `path_prefix`, or returns None if there are none.

    They have one uint8 per token: 1 for the first token of a document, otherwise 0. Packed data has them if the
    end-of-document token also occurs inside documents. Arguments and errors as for open_loss_mask.
    """
    if path_prefix is None:
        return None
    prefix = document_starts_prefix(path_prefix)
    return open_token_mask(prefix, path_prefix, lengths, mmap=mmap, kind="document starts")


def marked_starts(marks: np.ndarray, where: str) -> np.ndarray:
    """Returns the start position of each document in a sample: [n], int64, ascending.

    marks: [S], uint8, as open_document_starts describes. Raises DataError for other values than 0 and 1.
    """
    if marks.max(initial=0) > 1:
        raise DataError(f"the document starts of {where} contain {int(marks.max())}: must be 0 or 1")
    return np.concatenate([[0], np.flatnonzero(marks[1:]) + 1])


def document_starts(tokens: np.ndarray, eod: int) -> np.ndarray:
    """Returns the start position of each document in a sample: [n], int64, ascending.

    tokens: [S], int64. A document starts at position 0 and after each eod.
    """
    return np.concatenate([[0], np.flatnonzero(tokens[:-1] == eod) + 1])


def restarted_positions(starts: np.ndarray, *, num_tokens: int) -> np.ndarray:
    """Returns the position of each token within its document: [num_tokens], int64. starts: [n], int64."""
    return np.arange(num_tokens) - np.repeat(starts, np.diff(starts, append=num_tokens))


def cumulative_lengths(starts: np.ndarray, *, num_tokens: int) -> np.ndarray:
    """Appends the end to `starts`, which yields the cu_seqlens of variable-length attention: [n + 1], int32.

    starts: [n], int64.
    """
    return np.append(starts, num_tokens).astype(np.int32)


def join_cumulative_lengths(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Joins the cumulative lengths of several samples: [n + 1], int32. parts: [n_i + 1], int32, each from 0 to S."""
    ends = np.cumsum([part[-1] for part in parts], dtype=np.int32)
    return np.concatenate([parts[0][:1], *(part[1:] + end - part[-1] for part, end in zip(parts, ends))])


def document_masks(cu_seqlens: np.ndarray, *, seq_length: int) -> np.ndarray:
    """Returns attention masks, which are True for later tokens and for other documents: [B, 1, S, S], bool.

    cu_seqlens: [n + 1], int32, the borders within B samples of S = seq_length tokens, including sample borders.
    """
    masks = np.ones((int(cu_seqlens[-1]) // seq_length, 1, seq_length, seq_length), dtype=bool)
    places = np.arange(seq_length, dtype=np.int32)
    # Writes only the block of each document, so most of the S x S bytes are written once and never read.
    for begin, length in zip(cu_seqlens[:-1].tolist(), np.diff(cu_seqlens).tolist()):
        row, start = divmod(begin, seq_length)
        block = masks[row, 0, start : start + length, start : start + length]
        np.greater(places[None, :length], places[:length, None], out=block)
    return masks
