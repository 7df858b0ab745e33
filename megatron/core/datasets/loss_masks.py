"""Loss masks that come with the data: PREFIX_loss_mask.bin/.idx beside the tokens PREFIX.bin/.idx.

One uint8 per token, in documents of the same lengths: 1 where the token is learned when it is the target, else 0.
"""

import os

import numpy as np

from megatron.core.datasets.data_error import DataError
from megatron.core.datasets.indexed_dataset import IndexedDataset, get_bin_path, get_idx_path


def loss_mask_prefix(path_prefix: str) -> str:
    """The prefix of the loss masks of the tokens at `path_prefix`."""
    return path_prefix + "_loss_mask"


def open_loss_mask(path_prefix: str | None, lengths: np.ndarray, *, mmap: bool) -> IndexedDataset | None:
    """The loss masks beside the tokens at `path_prefix`, whose documents have `lengths` ([N] int32); None if none are.

    Raises DataError where they do not fit the tokens, FileNotFoundError where half of the pair is missing.
    """
    if path_prefix is None:
        return None
    prefix = loss_mask_prefix(path_prefix)
    if not (os.path.exists(get_bin_path(prefix)) or os.path.exists(get_idx_path(prefix))):
        return None
    masks = IndexedDataset(prefix, mmap=mmap)
    if masks.index.dtype is not np.uint8:
        raise DataError(f"{prefix}.idx holds {np.dtype(masks.index.dtype).name}: loss masks must be uint8, 0 or 1")
    if len(masks) != len(lengths):
        raise DataError(f"{prefix}.idx has {len(masks)} documents: must have {len(lengths)} as {path_prefix}.idx has")
    different = np.flatnonzero(masks.sequence_lengths != lengths)
    if len(different):
        document = int(different[0])
        raise DataError(
            f"{prefix}.idx: document {document} has {masks.sequence_lengths[document]} values for "
            f"{lengths[document]} tokens of {path_prefix}.idx; the masks belong to other data, make them anew"
        )
    return masks


def check_loss_mask(mask: np.ndarray, where: str) -> None:
    """Raises DataError for values other than 0 and 1. mask: [S] float32, read as uint8."""
    if mask.max(initial=0) > 1:
        raise DataError(f"the loss mask of {where} holds {int(mask.max())}: must be 0 or 1")
