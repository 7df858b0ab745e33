"""Writes the corpora of a case: documents of ascending tokens, each ended by token 126, the eod of bases.yaml.

corpora:
  a: {}                                         # {tmp}/a.bin and {tmp}/a.idx; defaults: 60, 20, uint16, no masks
  b: {documents: 60, longest: 20, dtype: int32, learned: half}
learned: no loss masks (none), or masks that select all tokens (all), no tokens (nothing), or every other document
(half).
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets.indexed_dataset import loss_mask_prefix

EOD = 126
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}
LEARNED = {"all": (1, 1), "nothing": (0, 0), "half": (0, 1)}


def write_corpora(folder: Path, corpora: dict[str, dict[str, Any]]) -> None:
    """Writes each corpus under its name. Equal descriptions yield equal files."""
    for name, facts in corpora.items():
        _write_corpus(folder / name, **facts)


def _write_corpus(
    prefix: Path, *, documents: int = 60, longest: int = 20, dtype: str = "uint16", learned: str | None = None
) -> None:
    rng = np.random.default_rng(longest)
    lengths = rng.integers(1, longest + 1, documents)
    tokens = [np.append((start + np.arange(length - 1)) % EOD, EOD) for start, length in enumerate(lengths.tolist())]
    _write_pair(str(prefix), tokens, dtype)
    if learned is not None:
        masks = [np.full(length, LEARNED[learned][number % 2]) for number, length in enumerate(lengths)]
        _write_pair(loss_mask_prefix(str(prefix)), masks, "uint8")


def _write_pair(prefix: str, documents: list[np.ndarray], dtype: str) -> None:
    """Writes the published file format byte by byte, independently of the project's writer."""
    values = np.concatenate(documents).astype(np.dtype(dtype).newbyteorder("<"))
    ends = np.cumsum([len(document) for document in documents])
    starts = [0, *ends[:-1].tolist()]
    count = len(documents)
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], count, count + 1)
    index += struct.pack(f"<{count}i", *(end - start for start, end in zip(starts, ends)))
    index += struct.pack(f"<{count}q", *(start * values.itemsize for start in starts))
    index += struct.pack(f"<{count + 1}q", *range(count + 1))
    Path(f"{prefix}.bin").write_bytes(values.tobytes())
    Path(f"{prefix}.idx").write_bytes(index)
