"""Grouped matrix products: rows that are sorted by expert, times the matrix of their expert. experts.py uses them.

Shapes: R rows, e experts, I and O the widths of input and output rows.

[Note: host reads] On a GPU torch.nn.functional.grouped_mm (2.13) reads the offsets on the device for bf16 alone. For
fp32 and fp16 it copies them to the host, waits for them, and launches one product per expert, in forward and in both
gradients; on GPUs below compute capability 9.0 it may do so for bf16 too. fp64 does the same here. So no CUDA graph can
hold these, and a step with them waits for the GPU in each layer. graph_checks.py in training/command_line refuses the
dtypes; a capture on such a GPU fails with torch's error. Experts with static buffers use the kernels of paged_stash/ in
fp32 and fp16, which never read on the host.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.device import cpu_alone
from megatron.core.tensor_parallel.weight_grads import hand_over, has_grad_owner


def row_offsets(tokens_per_expert: Tensor) -> Tensor:
    """Returns the end of each expert's rows; tokens_per_expert: [e], int64, on device -> [e], int32, same device."""
    return tokens_per_expert.cumsum(0, dtype=torch.int32)


def grouped_gemm(rows: Tensor, weight: Tensor, *, offsets: Tensor) -> Tensor:
    """Multiplies each row by the matrix of its expert.

    rows: [R, I], sorted by expert; weight: any shape with the memory of [e, I, O], same float dtype; offsets: [e],
    int32, on the device: the end of each expert's rows. Returns [R, O], same dtype. Rows after the last expert's are
    not read; the result and the gradient hold any bytes there. NOTE: on a GPU, all dtypes except bf16 wait for the
    device; see [Note: host reads].
    """
    if rows.device.type == "cpu" and has_grad_owner(weight):
        output: Tensor = _GroupedGemm.apply(rows, weight, offsets)
        return output
    return _multiply(rows, _matrices(weight, rows, offsets=offsets), offsets=offsets)


class _GroupedGemm(torch.autograd.Function):
    """Grouped product for weights with a gradient owner; backward passes the weight's gradient to that owner.

    Supports double backward, as its operators do.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, offsets)
        ctx.weight = weight
        return _multiply(rows, _matrices(weight, rows, offsets=offsets), offsets=offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight, offsets = ctx.saved_tensors
        grad_rows = None
        if ctx.needs_input_grad[0]:
            matrices = _matrices(weight, rows, offsets=offsets)
            grad_rows = _multiply(grad, matrices.transpose(1, 2), offsets=offsets)
        product = _ExpertGrads(rows, grad, offsets, weight.shape)
        return grad_rows, hand_over(ctx.weight, product, node=ctx.next_functions[1][0]), None


@dataclass(frozen=True)
class _ExpertGrads:
    """WeightGrad on the CPU, computed from rows: [R, I], and the output's gradient: [R, O]. shape: the weight's."""

    rows: Tensor
    grad: Tensor
    offsets: Tensor
    shape: torch.Size

    def compute(self) -> Tensor:
        if self.rows.shape[0] == 0:
            return self.rows.new_zeros(self.shape)
        if self.rows.dtype == torch.float64:
            return torch.stack([rows.t() @ grad for rows, grad in self._pairs_sync()]).view(self.shape)
        return F.grouped_mm(self.rows.t(), self.grad, offs=self.offsets).view(self.shape)

    def fits(self, out: Tensor) -> bool:
        return out.dtype == self.rows.dtype

    def add_to(self, out: Tensor, *, scale: float, is_zero: bool) -> None:
        beta = 0 if is_zero else 1
        for matrix, (rows, grad) in zip(_matrices(out, self.rows, offsets=self.offsets), self._pairs_sync()):
            if rows.shape[0] > 0:
                torch.addmm(matrix, rows.t(), grad, beta=beta, alpha=scale, out=matrix)

    @cpu_alone
    def _pairs_sync(self) -> list[tuple[Tensor, Tensor]]:
        """Splits rows and gradients by expert. NOTE: reads the offsets on the host."""
        return list(zip(_split_sync(self.rows, self.offsets), _split_sync(self.grad, self.offsets)))


def _matrices(weight: Tensor, rows: Tensor, *, offsets: Tensor) -> Tensor:
    return weight.view(offsets.shape[0], rows.shape[1], -1)


def _multiply(rows: Tensor, matrices: Tensor, *, offsets: Tensor) -> Tensor:
    if rows.shape[0] == 0:
        # No expert of this rank has a row. All gradients must be zeros; torch's grouped product fails here (2.13).
        return rows @ matrices[0]
    if rows.dtype == torch.float64:
        # torch's grouped product does not support fp64 (2.13), which is used as a reference only.
        products = [part @ matrix for part, matrix in zip(_split_sync(rows, offsets), matrices)]
        return F.pad(torch.cat(products), (0, 0, 0, len(rows) - sum(map(len, products))))
    return F.grouped_mm(rows, matrices, offs=offsets)


def _split_sync(rows: Tensor, offsets: Tensor) -> list[Tensor]:
    """Splits rows by expert. NOTE: reads the offsets on the host."""
    ends = offsets.tolist()
    return [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]
