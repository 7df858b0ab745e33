"""Grouped GEMM: multiplies rows, sorted by expert, by the weight matrix of their expert. Used by experts.py.

Shapes: R rows, e experts, I and O the widths of input and output rows.

[Note: choice of kernel] torch's grouped_mm is faster where it has a kernel: for bf16 on GPUs of compute capability 9
and 10, with widths divisible by 8. Elsewhere it reads the offsets on the host, which makes each layer wait for the
device and cannot be captured. The Triton kernel of the stash (triton_grouped_gemm.py) handles fp32, fp16 and bf16
there. It also runs every GEMM that a stash may recompute, because the recomputed result must be bit-identical. On a GPU
it accumulates weight gradients directly into the buffer of the weight's gradient owner, whichever kernel ran the
forward. torch's kernel would first write a temporary of the weights' size. fp64 on a GPU synchronizes with the device.
"""

import enum
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.autograd import PlainFunction
from megatron.core.device import cpu_alone
from megatron.core.tensor_parallel.weight_grads import WeightGrad, hand_over, has_grad_owner
from megatron.core.transformer.moe.paged_stash.expert_ops import HAS_TRITON, ops


class ProductKernel(enum.Enum):
    """Kernel that computes a grouped GEMM. See [Note: choice of kernel]."""

    TORCH = "torch"
    STASH = "stash"


@functools.cache
def product_kernel(
    dtype: torch.dtype,
    device: torch.device,
    *,
    widths: tuple[int, ...],
    is_static: bool = False,
    is_recomputed: bool = False,
) -> ProductKernel:
    """Chooses the kernel for a grouped GEMM of rows and weights.

    widths: numbers of elements in an input row and in an output row. is_static: whether the rows are in a static
    buffer. is_recomputed: whether a stash may recompute the result, which must then be bit-identical.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return ProductKernel.TORCH
    if device.type == "meta" and is_static:
        return ProductKernel.STASH  # torch's kernel supports only bf16 there
    if device.type != "cuda" or not HAS_TRITON:
        return ProductKernel.TORCH
    is_fast = dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)
    if is_fast and not is_recomputed and all(width % 8 == 0 for width in widths):
        return ProductKernel.TORCH
    return ProductKernel.STASH


def row_offsets(tokens_per_expert: Tensor) -> Tensor:
    """Computes the end offset of each expert's rows: [e], int32. tokens_per_expert: [e], int64, on the same device."""
    return tokens_per_expert.cumsum(0, dtype=torch.int32)


def grouped_gemm(
    rows: Tensor, weight: Tensor, *, offsets: Tensor, kernel: ProductKernel = ProductKernel.TORCH
) -> Tensor:
    """Multiplies each row by the matrix of its expert.

    rows: [R, I], sorted by expert. weight: [e, I, O], or a shape that can be viewed as such, the rows' float dtype.
    offsets: [e], int32, on the device: end offset of each expert's rows. kernel: see product_kernel. Returns [R, O],
    same dtype. Rows beyond the last offset are not read; the result and the gradient are undefined there. NOTE: on a
    GPU, all torch kernels except the bf16 one synchronize with the device, and so does fp64.
    """
    if kernel is ProductKernel.STASH or has_grad_owner(weight):
        output: Tensor = _GroupedGemm.apply(rows, weight, offsets, kernel)
        return output
    return _multiply(rows, _matrices(weight, rows, offsets=offsets), offsets=offsets)


@dataclass(frozen=True)
class GroupedProduct:
    """The Product of activated_product.py whose weights are [e, F, O], or a shape that can be viewed as such.

    is_static: whether the rows are in a static buffer. As in grouped_gemm, rows beyond the last offset are undefined.
    """

    is_static: bool = False

    def multiply(self, rows: Tensor, weight: Tensor, offsets: Tensor | None) -> Tensor:
        """Multiplies rows, [R, F], by the matrix of their expert: [R, O], same dtype."""
        assert offsets is not None, "experts have offsets"
        matrices = _matrices(weight, rows, offsets=offsets)
        return _multiply(rows, matrices, offsets=offsets, kernel=self._kernel(rows, matrices))

    def input_grad(self, grad: Tensor, weight: Tensor, offsets: Tensor | None) -> Tensor:
        """Returns the gradient of rows, [R, F], from that of the products, [R, O], same dtype."""
        assert offsets is not None, "experts have offsets"
        matrices = weight.view(offsets.shape[0], -1, grad.shape[1])
        _refuse_second_derivative(self._kernel(grad, matrices))
        return _input_grad(grad, matrices, offsets=offsets)

    def weight_grad(self, rows: Tensor, grad: Tensor, offsets: Tensor | None, *, weight: Tensor) -> WeightGrad:
        """Returns the gradient of a weight, to be computed on demand; rows: [R, F]; grad: [R, O], same dtype."""
        assert offsets is not None, "experts have offsets"
        kernel = self._kernel(rows, _matrices(weight, rows, offsets=offsets))
        return _ExpertGrads(rows, grad, offsets, weight.shape, kernel)

    def _kernel(self, rows: Tensor, matrices: Tensor) -> ProductKernel:
        return product_kernel(rows.dtype, rows.device, widths=tuple(matrices.shape[1:]), is_static=self.is_static)


class _GroupedGemm(PlainFunction):
    """Grouped GEMM whose backward passes the weight gradient to the weight's gradient owner, if it has one.

    Double backward is supported with torch's kernel only.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offsets: Tensor, kernel: ProductKernel) -> Tensor:
        needs_rows, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(rows if needs_weight else None, weight if needs_rows else None, offsets)
        ctx.weight, ctx.kernel = weight, kernel
        return _multiply(rows, _matrices(weight, rows, offsets=offsets), offsets=offsets, kernel=kernel)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        _refuse_second_derivative(ctx.kernel)
        rows, weight, offsets = ctx.saved_tensors
        grad_rows = grad_weight = None
        if weight is not None:
            grad_rows = _input_grad(grad, weight.view(offsets.shape[0], -1, grad.shape[1]), offsets=offsets)
        if rows is not None:
            product = _ExpertGrads(rows, grad, offsets, ctx.weight.shape, ctx.kernel)
            grad_weight = hand_over(ctx.weight, product, node=ctx.next_functions[1][0])
        return grad_rows, grad_weight, None, None


def _refuse_second_derivative(kernel: ProductKernel) -> None:
    if kernel is ProductKernel.STASH and torch.is_grad_enabled():
        raise RuntimeError(
            "the stash's grouped GEMM kernel has no second derivative: call backward without create_graph"
        )


def _input_grad(grad: Tensor, matrices: Tensor, *, offsets: Tensor) -> Tensor:
    """Returns the gradient of the rows, [R, I]; grad: [R, O]; matrices: [e, I, O]."""
    transposed = matrices.transpose(1, 2)
    # Gradients are never recomputed.
    kernel = product_kernel(grad.dtype, grad.device, widths=tuple(transposed.shape[1:]), is_static=True)
    return _multiply(grad, transposed, offsets=offsets, kernel=kernel)


@dataclass(frozen=True)
class _ExpertGrads:
    """WeightGrad of a grouped GEMM, computed from its input rows and the gradient of its output.

    rows: [R, I]. grad: [R, O]. shape: shape of the weight.
    """

    rows: Tensor
    grad: Tensor
    offsets: Tensor
    shape: torch.Size
    kernel: ProductKernel

    def compute(self) -> Tensor:
        if self.rows.shape[0] == 0:
            return self.rows.new_zeros(self.shape)
        if self.kernel is ProductKernel.STASH:
            out = self.rows.new_empty(self.shape)
            matrices = _matrices(out, self.rows, offsets=self.offsets)
            ops.grouped_gemm_weight_grad(self.rows, self.grad, offsets=self.offsets, out=matrices)
            return out
        if self.rows.dtype == torch.float64:
            return torch.stack([rows.t() @ grad for rows, grad in self._pairs_sync()]).view(self.shape)
        return F.grouped_mm(self.rows.t(), self.grad, offs=self.offsets).view(self.shape)

    def fits(self, out: Tensor) -> bool:
        if _adds_in_kernel(self.rows):
            return torch.float64 not in (out.dtype, self.rows.dtype)
        return self.rows.device.type == "cpu" and out.dtype == self.rows.dtype

    def add_to(self, out: Tensor, *, scale: float, is_zero: bool) -> None:
        matrices = _matrices(out, self.rows, offsets=self.offsets)
        if _adds_in_kernel(self.rows):
            ops.grouped_gemm_weight_grad(
                self.rows, self.grad, offsets=self.offsets, out=matrices, scale=scale, is_added=not is_zero
            )
            return
        beta = 0 if is_zero else 1
        for matrix, (rows, grad) in zip(matrices, self._pairs_sync()):
            if rows.shape[0] > 0:
                torch.addmm(matrix, rows.t(), grad, beta=beta, alpha=scale, out=matrix)

    @cpu_alone
    def _pairs_sync(self) -> list[tuple[Tensor, Tensor]]:
        """Splits rows and gradients by expert. NOTE: reads the offsets on the host."""
        return list(zip(_split_sync(self.rows, self.offsets), _split_sync(self.grad, self.offsets)))


def _adds_in_kernel(rows: Tensor) -> bool:
    return rows.device.type == "cuda" and HAS_TRITON


def _matrices(weight: Tensor, rows: Tensor, *, offsets: Tensor) -> Tensor:
    return weight.view(offsets.shape[0], rows.shape[1], -1)


def _multiply(
    rows: Tensor, matrices: Tensor, *, offsets: Tensor, kernel: ProductKernel = ProductKernel.TORCH
) -> Tensor:
    if rows.shape[0] == 0:
        # No expert of this rank has a row. All gradients must be zero, but torch's grouped_mm fails without rows
        # (2.13).
        return rows @ matrices[0]
    if kernel is ProductKernel.STASH:
        out = rows.new_empty(rows.shape[0], matrices.shape[2])
        ops.grouped_gemm(rows, matrices, offsets=offsets, out=out)
        return out
    if rows.dtype == torch.float64:
        # torch's grouped_mm does not support fp64 (2.13), which is only used as a reference.
        products = [part @ matrix for part, matrix in zip(_split_sync(rows, offsets), matrices)]
        return F.pad(torch.cat(products), (0, 0, 0, len(rows) - sum(map(len, products))))
    if rows.shape[1] * rows.itemsize % 16 or matrices.shape[2] * rows.itemsize % 16:
        # The configuration checks the widths in its own precision. A model may be cast afterwards.
        raise ValueError(
            f"a grouped GEMM multiplies rows of {rows.shape[1]} elements of {rows.dtype} to rows of "
            f"{matrices.shape[2]}, and its kernel reads 16 bytes at a time: hidden_size, moe_ffn_hidden_size / "
            f"expert_tensor_parallel_size and lora_rank must be multiples of {16 // rows.itemsize} in this precision, "
            "or moe_grouped_gemm False"
        )
    return F.grouped_mm(rows, matrices, offs=offsets)


def _split_sync(rows: Tensor, offsets: Tensor) -> list[Tensor]:
    """Splits rows by expert. NOTE: reads the offsets on the host."""
    ends = offsets.tolist()
    return [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]
