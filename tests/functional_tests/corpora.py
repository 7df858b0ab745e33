"""Corpora that a case asks for: documents that count upwards, each ended by token 126, the eod of bases.yaml.

corpora:
  a: {}                                         # {tmp}/a.bin and {tmp}/a.idx, by default as below
  b: {documents: 60, longest: 20, dtype: int32, learned: half}
learned: no loss masks (none), masks that learn all tokens (all) or none of them (nothing), or every other document.
"""

from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.loss_masks import loss_mask_prefix

EOD = 126
LEARNED = {"all": (1, 1), "nothing": (0, 0), "half": (0, 1)}


def write_corpora(folder: Path, corpora: dict[str, dict[str, Any]]) -> None:
    """Writes each corpus under its name; equal descriptions give equal files."""
    for name, facts in corpora.items():
        _write_corpus(folder / name, **facts)


def _write_corpus(
    prefix: Path, *, documents: int = 60, longest: int = 20, dtype: str = "uint16", learned: str | None = None
) -> None:
    rng = np.random.default_rng(longest)
    lengths = rng.integers(1, longest + 1, documents)
    tokens = [np.append((start + np.arange(length - 1)) % EOD, EOD) for start, length in enumerate(lengths.tolist())]
    _write_pair(str(prefix), tokens, np.dtype(dtype).type)
    if learned is not None:
        masks = [np.full(length, LEARNED[learned][number % 2]) for number, length in enumerate(lengths)]
        _write_pair(loss_mask_prefix(str(prefix)), masks, np.uint8)


def _write_pair(prefix: str, documents: list[np.ndarray], dtype: type[np.number]) -> None:
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype) as builder:
        builder.add_documents(np.concatenate(documents), [len(document) for document in documents])
        builder.finalize(f"{prefix}.idx")
