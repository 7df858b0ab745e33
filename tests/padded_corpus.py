"""Writes packed documents with padding, and computes in plain Python what a sample contains. Contains no tests."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path


def write_tokens(prefix: Path | str, documents: Sequence[Sequence[int]], dtype: type = np.uint16) -> str:
    """Writes the pair at `prefix`, one sequence per document, and returns `prefix`."""
    with IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=dtype) as builder:
        for document in documents:
            builder.add_document(np.asarray(document, dtype=dtype), [len(document)])
        builder.finalize(get_idx_path(str(prefix)))
    return str(prefix)


def write_packed(
    prefix: Path,
    lengths: Sequence[Sequence[int]],
    *,
    length: int,
    eod: int,
    fill: int,
    mark: bool = True,
) -> str:
    """Writes documents of `length` tokens: chats of the given lengths, each ended by `eod`, then `fill`.

    Every token of a chat but its first half has a loss. mark: whether to write padding masks. Returns the prefix.
    """
    rng = np.random.default_rng(0)
    tokens, learned, padding = [], [], []
    for chats in lengths:
        text: list[int] = []
        mask: list[int] = []
        for chat in chats:
            text += [*rng.integers(1, min(eod, fill), chat - 1).tolist(), eod]
            mask += [0] * (chat // 2) + [1] * (chat - chat // 2)
        missing = length - len(text)
        tokens.append(text + [fill] * missing)
        learned.append(mask + [0] * missing)
        padding.append([0] * len(text) + [1] * missing)
    write_tokens(f"{prefix}_loss_mask", learned, np.uint8)
    if mark:
        write_tokens(f"{prefix}_padding_mask", padding, np.uint8)
    return write_tokens(prefix, tokens)
