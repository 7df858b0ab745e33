"""Rows of bf16 that a stash stores in 8 bits: encoded on their way into pages, and decoded on their way back.

[Note: compressed stash] With the dtype mxfp8 a stash stores rows of bf16 as e4m3 values in blocks of 32 with a common
power of two as scale (MXFP8; see format.py of block_scaled), about half as many bytes. Forward computes with the
original rows, so that losses of one step do not change, and backward with the decoded ones. Kimi K2 stores the inputs
of its experts like this (arXiv 2507.20534, section 2.4.3: e4m3 in blocks of 128 with fp32 scales).

Every group is encoded, so that results depend on neither the size of the pool nor the order of groups: a group whose
backward directly follows needs no pages, and keeps decoded rows. For the same reason nothing is dropped and recomputed:
a recomputed gate_up would be computed from decoded rows of x, and differ from the decoded gate_up.

A block of values with an infinity or NaN decodes to NaN, so that the step's gradients show it.
"""

import torch
from torch import Tensor

from megatron.core.block_scaled.format import BlockFormat
from megatron.core.block_scaled.operators import dequantize_rows, quantize_rows
from megatron.core.transformer.moe.paged_stash.page_layout import STASH_DTYPES

_FORMAT = BlockFormat(32)


def check_stash_dtype(dtype: str | None) -> None:
    """Raises ValueError unless a stash can store bf16 rows as this dtype; None stores all rows as they are."""
    if dtype is not None and dtype not in STASH_DTYPES:
        raise ValueError(f"dtype ({dtype!r}) must be None or one of {', '.join(map(repr, STASH_DTYPES))}")


def encoded_width(row_bytes: int, dtype: torch.dtype) -> int:
    """Returns the number of elements of a row that is encoded, or 0 if its encoding would not save bytes.

    row_bytes: bytes of the row as it is. Rows of other dtypes than bf16 are stored as they are.
    """
    width = row_bytes // 2
    return width if dtype is torch.bfloat16 and encoded_bytes(width) < row_bytes else 0


def encoded_bytes(width: int) -> int:
    """Returns the bytes of an encoded row of `width` elements, a multiple of 16."""
    return _FORMAT.row_bytes(width)


def encode(rows: Tensor, num_rows: Tensor) -> Tensor:
    """Encodes the live rows into new memory: [C * encoded_bytes(W)], uint8.

    rows: [C, W], bf16, adjacent columns. num_rows: [1], int64, on the same device.
    """
    return quantize_rows(rows, _FORMAT, num_rows=num_rows).view(-1)


def decode(encoded: Tensor, num_rows: Tensor, *, out: Tensor) -> None:
    """Writes the live rows. encoded: [C * encoded_bytes(W)], uint8; num_rows: [1], int64; out: [C, W], bf16."""
    dequantize_rows(encoded.view(out.shape[0], -1), _FORMAT, num_rows=num_rows, out=out)
