"""Grouped GEMM: multiplies rows, sorted by expert, by the weight matrix of their expert. Used by expert_function.py.

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
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.device import cpu_alone
from megatron.core.paged_rows import PagedRows, Rows, operand
from megatron.core.tensor_parallel.weight_grads import WeightGrad
from megatron.core.transformer.moe.paged_stash import RowsReader
from megatron.core.transformer.moe.paged_stash.expert_ops import HAS_TRITON, multiply_rows, ops


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


def multiply(rows: Tensor, weight: Tensor, *, offsets: Tensor, kernel: ProductKernel = ProductKernel.TORCH) -> Tensor:
    """Multiplies each row by the matrix of its expert.

    rows: [R, I], sorted by expert. weight: [e, I, O], or a shape that can be viewed as such, the rows' float dtype.
    offsets: [e], int32, on the device: end offset of each expert's rows. kernel: see product_kernel. Returns [R, O],
    same dtype, which autograd can differentiate with torch's kernel only. Rows beyond the last offset are not read; the
    result is undefined there. NOTE: on a GPU, all torch kernels except the bf16 one synchronize with the device, and so
    does fp64.
    """
    return _multiply(rows, _matrices(weight, rows, offsets=offsets), offsets=offsets, kernel=kernel)


def multiply_into(out: Rows, rows: Rows, weight: Tensor, *, offsets: Tensor) -> None:
    """Does the same with the stash's kernel, for rows or results in pages; out: [R, O], the rows' dtype.

    On a CPU, all kernels give the same bits.
    """
    multiply_rows(rows, _matrices(weight, rows, offsets=offsets), offsets=offsets, out=out)


def input_grad(grad: Tensor, weight: Tensor, *, offsets: Tensor) -> Tensor:
    """Returns the gradient of the rows of a product, [R, I]; grad: gradient of the product, [R, O], weight's dtype."""
    transposed = weight.view(offsets.shape[0], -1, grad.shape[1]).transpose(1, 2)
    # Gradients are never recomputed.
    kernel = product_kernel(grad.dtype, grad.device, widths=tuple(transposed.shape[1:]), is_static=True)
    return _multiply(grad, transposed, offsets=offsets, kernel=kernel)


@dataclass(frozen=True)
class ExpertGrads:
    """WeightGrad of a grouped GEMM, computed from its input rows and the gradient of its output.

    rows: [R, I], possibly in pages. grad: [R, O], same dtype. shape: shape of the weight. kernel: the product's kernel.
    row_alignment: a divisor of all offsets and of R. reader: is informed before and after the rows are read.
    """

    rows: Rows
    grad: Tensor
    offsets: Tensor
    shape: torch.Size
    kernel: ProductKernel
    row_alignment: int = 1
    reader: RowsReader | None = None

    def compute(self) -> Tensor:
        """Returns the gradient: [*weight shape], the rows' dtype."""
        if self.reader is None:
            return self._computed()
        self.reader.begin()
        found = self._computed()
        self.reader.end()
        return found

    def _computed(self) -> Tensor:
        if self.rows.shape[0] == 0:
            return self.grad.new_zeros(self.shape)
        if self.kernel is ProductKernel.STASH or type(self.rows) is PagedRows:
            out = self.grad.new_empty(self.shape)
            self._write_by_kernel(out)
            return out
        if self.rows.dtype == torch.float64:
            return torch.stack([rows.t() @ grad for rows, grad in self._pairs_sync()]).view(self.shape)
        return F.grouped_mm(self.rows.t(), self.grad, offs=self.offsets).view(self.shape)

    def _write_by_kernel(self, out: Tensor, **options: float) -> None:
        matrices = _matrices(out, self.rows, offsets=self.offsets)
        memory, places = operand("x", self.rows)
        more = {**options, "row_alignment": self.row_alignment, **places}
        ops.grouped_gemm_weight_grad(memory, self.grad, offsets=self.offsets, out=matrices, **more)

    def fits(self, out: Tensor) -> bool:
        """Returns whether add_to supports the dtype and device of `out`: [*weight shape], any float dtype."""
        if _adds_in_kernel(self.rows):
            return torch.float64 not in (out.dtype, self.rows.dtype)
        return self.rows.device.type == "cpu" and out.dtype == self.rows.dtype

    def add_to(self, out: Tensor, *, scale: float, is_zero: bool) -> None:
        """Adds scale times the gradient to `out`: [*weight shape], a dtype that fits. is_zero: overwrite `out`."""
        if self.reader is not None:
            self.reader.begin()
        if _adds_in_kernel(self.rows) or type(self.rows) is PagedRows:
            self._write_by_kernel(out, scale=scale, is_added=not is_zero)
        else:
            beta, matrices = 0 if is_zero else 1, _matrices(out, self.rows, offsets=self.offsets)
            for matrix, (rows, grad) in zip(matrices, self._pairs_sync()):
                if rows.shape[0] > 0:
                    torch.addmm(matrix, rows.t(), grad, beta=beta, alpha=scale, out=matrix)
        if self.reader is not None:
            self.reader.end()

    def detached(self) -> "ExpertGrads | None":
        """Returns the product with detached operands, or None if the rows are in memory that others will reuse."""
        if self.reader is not None and not self.reader.can_be_deferred:
            return None
        return replace(self, rows=self._detached_rows(), grad=self.grad.detach())

    def kept(self) -> "WeightGrad":
        """Returns the product for use in a later backward, with rows that remain where they are, or a copy."""
        grad = self.grad.detach()
        if self.reader is None:
            return replace(self, rows=self._detached_rows(), grad=grad)
        if self.reader.reads_again:
            return ReadAgain(replace(self, rows=without_rows(self.rows), grad=grad, reader=None), self.reader)
        rows, reader = self.reader.kept(self.rows)
        return replace(self, rows=rows, grad=grad, reader=reader)

    def with_rows(self, rows: Rows) -> "ExpertGrads":
        """Returns the product of other rows: [R, I], the same dtype."""
        return replace(self, rows=rows)

    def _detached_rows(self) -> Rows:
        return self.rows if type(self.rows) is PagedRows else self.rows.detach()

    @cpu_alone
    def _pairs_sync(self) -> list[tuple[Tensor, Tensor]]:
        """Splits rows and gradients by expert. NOTE: reads the offsets on the host."""
        assert isinstance(self.rows, Tensor), "rows in pages are read by an operator"
        return list(zip(_split_sync(self.rows, self.offsets), _split_sync(self.grad, self.offsets)))


class RowsProduct(WeightGrad, Protocol):
    """A product of input rows, which may be replaced."""

    def with_rows(self, rows: Rows) -> "RowsProduct":
        """Returns the product of other rows: [R, W], the same dtype."""
        ...


@dataclass(frozen=True)
class ReadAgain:
    """WeightGrad whose input rows a stash copies back from its pages when it is computed.

    product: without rows. reader: of the rows.
    """

    product: RowsProduct
    reader: RowsReader

    def compute(self) -> Tensor:
        """Returns the gradient: [*weight shape], the dtype of the rows."""
        found = self._with_rows().compute()
        self.reader.end()
        return found

    def fits(self, out: Tensor) -> bool:
        """Returns whether add_to supports the dtype and device of `out`: [*weight shape], any float dtype."""
        return self.product.fits(out)

    def add_to(self, out: Tensor, *, scale: float, is_zero: bool) -> None:
        """Adds scale times the gradient to `out`: [*weight shape], a dtype that fits. is_zero: overwrite `out`."""
        self._with_rows().add_to(out, scale=scale, is_zero=is_zero)
        self.reader.end()

    def detached(self) -> "ReadAgain":
        """Returns the product itself, which holds no graph."""
        return self

    def kept(self) -> "ReadAgain":
        """Returns the product itself, whose rows are in pages until it reads them."""
        return self

    def _with_rows(self) -> WeightGrad:
        self.reader.begin()
        return self.product.with_rows(self.reader.restored())


def without_rows(rows: Rows) -> Tensor:
    """Returns a tensor like rows, [R, W], any dtype, without a row and without their memory."""
    return torch.empty(0, rows.shape[1], dtype=rows.dtype, device=rows.device)


def _adds_in_kernel(rows: Rows) -> bool:
    return rows.device.type == "cuda" and HAS_TRITON


def _matrices(weight: Tensor, rows: Rows, *, offsets: Tensor) -> Tensor:
    return weight.view(offsets.shape[0], rows.shape[1], -1)


def _multiply(rows: Tensor, matrices: Tensor, *, offsets: Tensor, kernel: ProductKernel) -> Tensor:
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
