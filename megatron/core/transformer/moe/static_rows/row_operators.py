"""Operators static_rows::* that move rows into a static buffer and back: schemas and CPU versions.

No row of the buffer beyond the live ones is read. CUDA runs triton_rows.py, which allocates nothing and reads nothing
from the device.
"""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.transformer.moe.paged_stash.operator_library import operator

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from megatron.core.transformer.moe.static_rows import triton_rows

# What callers use: ops.gather_rows and ops.sum_rows.
ops = torch.ops.static_rows

_NAMESPACE = "static_rows"
_CUDA = vars(triton_rows) if HAS_TRITON else {}


def _like_tokens(rows: Tensor, row_of_slot: Tensor) -> Tensor:
    return rows.new_empty(row_of_slot.shape[0], rows.shape[1])


@operator(_NAMESPACE, "(Tensor x, Tensor source_of_row, *, Tensor num_rows, Tensor(a!) out) -> ()", cuda=_CUDA)
def gather_rows(x: Tensor, source_of_row: Tensor, *, num_rows: Tensor, out: Tensor) -> None:
    """out[r] = x[source_of_row[r]], zeros for -1, of live rows alone.

    x: [T, W], any dtype; source_of_row: [C], int64; num_rows: [1], int64; out: [C, W], x's dtype.
    """
    live = source_of_row[: _live_rows_sync(num_rows, out)]
    rows = out[: len(live)]
    if len(x) == 0:
        rows.zero_()
        return
    padding = _padding_rows_sync(live)
    torch.index_select(x, 0, live.clamp(min=0) if len(padding) else live, out=rows)
    if len(padding):
        rows.index_fill_(0, padding, 0)


def _padding_rows_sync(live: Tensor) -> Tensor:
    # Their number is a shape. Only the CPU runs this: the kernel writes zeros row by row.
    return (live < 0).nonzero().view(-1)


@operator(_NAMESPACE, "(Tensor rows, Tensor row_of_slot) -> Tensor", cuda=_CUDA, fake=_like_tokens)
def sum_rows(rows: Tensor, row_of_slot: Tensor) -> Tensor:
    """The sum over k of rows[row_of_slot[t, k]], -1 left out; half precision is summed in fp32.

    rows: [C, W], any float dtype; row_of_slot: [T, K], int64. Returns [T, W], same dtype.
    """
    if row_of_slot.numel() == 0:
        return _like_tokens(rows, row_of_slot).zero_()
    there = row_of_slot >= 0
    if there.all():
        one_each = row_of_slot.shape[1] == 1
        return (
            rows.index_select(0, row_of_slot.view(-1)) if one_each else F.embedding_bag(row_of_slot, rows, mode="sum")
        )
    # One bag a token, of the rows that it has.
    ends = there.sum(dim=1).cumsum(0)
    return F.embedding_bag(row_of_slot[there], rows, F.pad(ends[:-1], (1, 0)), mode="sum")


def _live_rows_sync(num_rows: Tensor, rows: Tensor) -> int:
    """NOTE: reads memory of the CPU, where this implementation runs."""
    return max(0, min(int(num_rows.item()), rows.shape[0]))
