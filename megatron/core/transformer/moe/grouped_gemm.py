"""One matrix product per expert over rows sorted by expert; which experts and why is experts.py's matter."""

import torch
import torch.nn.functional as F
from torch import Tensor


def row_offsets(tokens_per_expert: Tensor) -> Tensor:
    """Where each expert's rows end; tokens_per_expert: [e], int64, on the device -> [e], int32, same device."""
    return tokens_per_expert.cumsum(0, dtype=torch.int32)


def grouped_gemm(rows: Tensor, weights: Tensor, *, offsets: Tensor) -> Tensor:
    """rows of expert i times weights[i].

    rows: [R, I], sorted by expert; weights: [e, I, O], same float dtype; offsets: [e], int32, on the device: the end
    of each expert's rows. Returns [R, O], same dtype. No host read, except for fp64.
    """
    if rows.shape[0] == 0:
        # No expert of this rank has a row: zero gradients for all, which torch's product fails to give (2.13).
        return rows @ weights[0]
    if rows.dtype == torch.float64:
        # torch's grouped product has no fp64 (2.13); fp64 serves as a reference only.
        return _gemm_per_expert_sync(rows, weights, offsets=offsets)
    return F.grouped_mm(rows, weights, offs=offsets)


def _gemm_per_expert_sync(rows: Tensor, weights: Tensor, *, offsets: Tensor) -> Tensor:
    """grouped_gemm as a loop. NOTE: reads the offsets on the host."""
    ends = offsets.tolist()
    pieces = [rows[start:end] @ weights[i] for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat(pieces)
