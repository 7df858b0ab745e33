"""Weights of a rank's experts in 8 bits, and their products with rows in 8 bits. Used by expert_function.py.

Shapes: R rows, e experts, I and O the widths of input and output rows. Packed rows are described in format.py of
block_scaled, which also has the kernels.

[Note: 8 bits] DeepSeek-V3 (arXiv 2412.19437, section 3.3) trains experts in 8 bits with a scale for each block. Here
rows are quantized once, before they are copied into the buffer of the experts, so that dispatch, stash and both
products with them read the same bytes:

    forward    rows = quantized x     gate_up = rows W1    act = quantized activation(gate_up)    output = act W2
    backward   grad = quantized gradient of the output     gradient of act = grad W2^T            likewise for fc1
               gradient of W2 = act^T grad, from columns of both that are quantized again from their rows

All scales are powers of two, so that decoding is exact, and columns of decoded rows lose only elements that a larger
scale makes subnormal. gate_up, outputs and gradients of rows are in the precision of the parameters, and gradients of
weights have one rounding, to the dtype of main_grad. Weights have scales for squares, so that products with the
transposed weights read the same copy. The padding of an expert's rows up to a multiple of the block consists of zeros.

[Note: when weights are quantized] Parameters remain in their precision, and optimizers and checkpoints do not read the
copy. The first forward of a step renews it, after the parameters have been gathered, and so does that of a repeated
step or of an evaluation. Every update and load happens between steps or at the end of one, so the copy is current.
Backward reads the same memory, and raises an error if it was renewed in between. A CUDA graph of one layer finds the
copy renewed by `prepare`; a graph of a whole step contains the renewal. Without steps, each forward has a copy of its
own.

[Note: direct calls] Experts call operators directly. The functions of block_scaled/operators.py would check operands
that are made here and in expert_function.py, in a dozen calls per layer, which costs the host as much as the calls.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.block_scaled.format import BlockFormat
from megatron.core.block_scaled.operators import ops, quantize_weight
from megatron.core.fusions.gated_activation import ActivationForm
from megatron.core.paged_rows import Rows, operand
from megatron.core.tensor_parallel.weight_grads import WeightGrad
from megatron.core.transformer.moe.grouped_gemm import ReadAgain, without_rows
from megatron.core.transformer.moe.paged_stash import RowsReader


@dataclass(eq=False, slots=True)
class QuantizedLinear:
    """The weights of fc1 or fc2 in 8 bits. packed: [e, I, row_bytes(O)], uint8, in square blocks. width: O.

    is_overwritten: whether the memory contains other weights by now.
    """

    packed: Tensor
    form: BlockFormat
    width: int
    is_overwritten: bool = False

    def multiply(self, rows: Rows, *, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiplies each row by the matrix of its expert; rows: [R, row_bytes(I)], uint8, possibly in pages.

        offsets: [e], int32. Returns [R, O], dtype, which is bf16 or fp32.
        """
        out = torch.empty(rows.shape[0], self.width, dtype=dtype, device=self.packed.device)
        self.multiply_into(out, rows, offsets=offsets)
        return out

    def multiply_into(self, out: Rows, rows: Rows, *, offsets: Tensor, needed: Tensor | None = None) -> None:
        """Does the same with the memory of `out`: [R, O], bf16 or fp32, possibly in pages.

        needed: [1], int64: 0 computes nothing; None means 1. Raises RuntimeError as input_grad does.
        """
        (memory, of_rows), (out_memory, of_out) = operand("x", rows), operand("out", out)
        if self.is_overwritten:
            raise _overwritten()
        block, width, places = self.form.block, self.width, {**of_rows, **of_out}
        ops.scaled_product(
            memory,
            self.packed,
            block=block,
            offsets=offsets,
            width=width,
            is_transposed=False,
            out=out_memory,
            needed=needed,
            **places,
        )

    def input_grad(self, grad: Tensor, *, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the gradient of the rows, [R, I]; grad: gradient of the product, [R, row_bytes(O)], uint8.

        Raises RuntimeError if the weights have been overwritten since the forward.
        """
        if self.is_overwritten:
            raise _overwritten()
        out = torch.empty(grad.shape[0], self.packed.shape[1], dtype=dtype, device=grad.device)
        block, width = self.form.block, self.width
        ops.scaled_product(grad, self.packed, block=block, offsets=offsets, width=width, is_transposed=True, out=out)
        return out


def _overwritten() -> RuntimeError:
    return RuntimeError(
        "cannot run backward of experts in 8 bits: their weights were quantized again after the forward, because a new "
        "step has begun or the weights have changed; run each backward before that"
    )


def quantize(x: Tensor, form: BlockFormat, *, num_rows: Tensor | None = None) -> Tensor:
    """Quantizes rows, [C, W], bf16 or fp32; returns [C, row_bytes(W)], uint8. See [Note: direct calls].

    num_rows: [1], int64: live rows; None means all.
    """
    packed = form.empty_rows(*x.shape, device=x.device)
    ops.quantize(x, block=form.block, num_rows=num_rows, out=packed)
    return packed


def activate(
    gate_up: Rows, scale: Tensor, form: BlockFormat, *, activation: ActivationForm, num_rows: Tensor | None
) -> Tensor:
    """Returns the quantized activation of gate_up times the scale of each row: [C, row_bytes(F)], uint8.

    gate_up: [C, 2F], or [C, F] for a plain activation, bf16 or fp32, possibly in pages. scale: [C], float. num_rows:
    [1], int64: live rows.
    """
    packed = form.empty_rows(gate_up.shape[0], activation.width(gate_up), device=gate_up.device)
    memory, places = operand("gate_up", gate_up)
    options = {**places, **activation.arguments}
    ops.gated_activation_quantize(memory, scale, block=form.block, num_rows=num_rows, out=packed, **options)
    return packed


@dataclass(frozen=True)
class QuantizedGrads:
    """WeightGrad of a product in 8 bits, computed from its input rows and the gradient of its output.

    rows: [R, row_bytes(I)], uint8, possibly in pages; grad: [R, row_bytes(O)], uint8. widths: I and O. num_rows: [1],
    int64: live rows. offsets: [e], int32, multiples of the block. shape, dtype: of the weight. reader: is informed
    before and after the rows are read.
    """

    rows: Rows
    grad: Tensor
    form: BlockFormat
    widths: tuple[int, int]
    num_rows: Tensor
    offsets: Tensor
    shape: torch.Size
    dtype: torch.dtype
    reader: RowsReader | None = None

    def compute(self) -> Tensor:
        """Returns the gradient: [*weight shape], the weight's dtype."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.grad.device)
        self.add_to(out, scale=1.0, is_zero=True)
        return out

    def fits(self, out: Tensor) -> bool:
        """Returns whether add_to supports the dtype of `out`: [*weight shape], any float dtype."""
        return out.dtype in (torch.bfloat16, torch.float32)

    def add_to(self, out: Tensor, *, scale: float, is_zero: bool) -> None:
        """Adds scale times the gradient to `out`: [*weight shape], bf16 or fp32. is_zero: overwrite `out`."""
        if self.reader is not None:
            self.reader.begin()
        (inner, outer), num_rows, block = self.widths, self.rows.shape[0], self.form.block
        x = self._columns(self.rows, inner)
        if self.reader is not None:
            self.reader.end()
        grad, matrices, offsets = self._columns(self.grad, outer), out.view(-1, inner, outer), self.offsets
        ops.scaled_weight_grad(
            x, grad, block=block, offsets=offsets, rows=num_rows, out=matrices, scale=scale, is_added=not is_zero
        )

    def detached(self) -> "QuantizedGrads | None":
        """Returns the product itself: bytes have no graph. None if the rows are in memory that others will reuse."""
        return self if self.reader is None or self.reader.can_be_deferred else None

    def kept(self) -> WeightGrad:
        """Returns the product for use in a later backward, with rows that remain where they are, or a copy."""
        if self.reader is None:
            return self
        if self.reader.reads_again:
            return ReadAgain(replace(self, rows=without_rows(self.rows), reader=None), self.reader)
        rows, reader = self.reader.kept(self.rows)
        return replace(self, rows=rows, reader=reader)

    def with_rows(self, rows: Rows) -> "QuantizedGrads":
        """Returns the product of other rows: [R, row_bytes(I)], uint8."""
        return replace(self, rows=rows)

    def _columns(self, packed: Rows, width: int) -> Tensor:
        columns = self.form.empty_rows(width, packed.shape[0], device=packed.device)
        memory, places = operand("packed", packed)
        ops.quantize_columns(memory, block=self.form.block, num_rows=self.num_rows, out=columns, **places)
        return columns


class QuantizedWeights:
    """The weights of a rank's experts in 8 bits. See [Note: when weights are quantized].

    step: number of the current step, which a layer sets before each forward; None outside of steps. Copies, also in
    files, are empty.
    """

    def __init__(self, form: BlockFormat) -> None:
        self.form = form
        self.step: int | None = None
        self._linears: tuple[QuantizedLinear, QuantizedLinear] | None = None
        self._quantized_for: tuple[int, ...] | None = None

    def __reduce__(self) -> Any:
        return QuantizedWeights, (self.form,)

    def of_step(
        self, step: int | None, weight1: Tensor, weight2: Tensor, *, params: tuple[Tensor, Tensor]
    ) -> tuple[QuantizedLinear, QuantizedLinear]:
        """Returns the weights of fc1 and fc2 in 8 bits, and quantizes them unless this was done in this step.

        step: number of the step; None: outside of steps, quantize in each call, into new memory. weight1, weight2: [e,
        I, O] each, bf16 or fp32, of the same shapes in all calls, views of params. Those of other parameters, and
        weights that an operation of torch has changed in place, are quantized again in any case.
        """
        if step is None:
            return self._quantized(weight1), self._quantized(weight2)
        # Not their addresses, which FSDP2 changes with each gather of the same weights.
        state = (step, id(params[0]), weight1._version, id(params[1]), weight2._version)
        old = self._linears
        if old is not None and state == self._quantized_for and old[0].packed.device == weight1.device:
            return old
        # In the same memory, from which CUDA graphs read the weights.
        into1, into2 = (None, None) if old is None else old
        self._linears, self._quantized_for = (self._quantized(weight1, into1), self._quantized(weight2, into2)), state
        return self._linears

    # A copy that is made in inference mode could not be changed outside of it.
    @torch.inference_mode(False)
    def _quantized(self, weight: Tensor, into: QuantizedLinear | None = None) -> QuantizedLinear:
        if into is None or into.packed.device != weight.device:
            packed = self.form.empty_rows(*weight.shape, device=weight.device)
        else:
            packed, into.is_overwritten = into.packed, True
        quantize_weight(weight, self.form, out=packed)
        return QuantizedLinear(packed, self.form, width=weight.shape[2])
