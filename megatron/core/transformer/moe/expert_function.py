"""expert_outputs: the grouped experts of a rank as one autograd function, from received tokens to their sums.

N received tokens, K choices of a token, R rows, e experts, H hidden, F width of one expert, r width of adapters. In a
static buffer of C rows the first R are live, and only the device knows R:

    rows, scale = x, probs, copied in the order of the experts    [R, H], [R]     or given in this order
    gate_up = rows W1 + b1 + f1 (rows A1) B1                      [R, 2F]         fc1
    act = activation(gate_up) * scale                             [R, F]
    output = act W2 + scale b2 + f2 (act A2) B2                   [R, H]          fc2
    result = the sum of each token's rows of output               [N, H]          or the output itself

Backward reads rows, scale, gate_up and the low-rank products rows A1 and act A2. Nothing else of R rows is saved; act
is computed again, as in tensor_parallel/activated_product.py. It is one function, because on a GPU the host must launch
a layer's kernels faster than they run, and because a function that owns its tensors frees each after its last use, and
passes a stash exactly the tensors to store, without hooks on saved tensors.

[Note: rows in pages] A stash may have the function compute rows and gate_up in its pages, so that nothing is copied.
The gather writes rows there, fc1 reads rows and writes gate_up, and in backward the activation and the weight gradient
of fc1 read them. The pages are released after the last of these. The scale, a number for each row, is then held as
without a stash, and the low-rank products are computed again.

[Note: rows in 8 bits] Experts with weights in 8 bits quantize x before it is copied into rows, and the gradient of the
result before it is copied into the gradients of rows. rows, act and both gradients of products are then packed rows of
bytes; gate_up, output and the gradients of rows and of gate_up are as before. See quantized_experts.py.

[Note: dropped gate_up] If a stash runs out of pages, it drops gate_up, which backward then computes again from the
rows. The result is bit-identical, because the recomputation runs the same operations in the same order as the forward.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.autograd import (
    PlainFunction,
    first_order,
    may_differentiate,
    packed,
    require_kept,
    save_early,
    saved_early,
    unpacked,
)
from megatron.core.block_scaled.format import BlockFormat
from megatron.core.device.torch_internals import active_hooks, graph_is_kept
from megatron.core.fusions.gated_activation import GatedActivation
from megatron.core.paged_rows import PagedRows, Rows
from megatron.core.tensor_parallel.weight_grads import WeightGrad, deliver
from megatron.core.transformer.module import LayerParts, Run, run
from megatron.core.transformer.moe.grouped_gemm import (
    ExpertGrads,
    ProductKernel,
    input_grad,
    multiply,
    multiply_into,
    product_kernel,
)
from megatron.core.transformer.moe.paged_stash import Recompute, RowsReader, StashedRows, recompute_gate_up
from megatron.core.transformer.moe.paged_stash.expert_ops import add_bias_to, add_low_rank_to, ops
from megatron.core.transformer.moe.paged_stash.saved_tensors import say_rows_and_others
from megatron.core.transformer.moe.quantized_experts import QuantizedGrads, QuantizedLinear, activate, quantize
from megatron.core.transformer.moe.static_rows import StaticOrder, gather, gather_into, sum_slots


class ExpertLinear(NamedTuple):
    """The parameters of fc1 or fc2 of a rank's experts, of one float dtype: rows W + b + f (rows A) B.

    weight: W, [e, I, O], or a shape that can be viewed as such. bias: b, [e, O], or None. lora_a: A, [e, I, r], and
    lora_b: B, [e, r, O], or None without an adapter.
    """

    weight: Tensor
    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None

    @property
    def num_tensors(self) -> int:
        """Number of parameters."""
        return 1 + (self.bias is not None) + 2 * (self.lora_a is not None)


class ExpertMath(NamedTuple):
    """Activation and constants of a rank's experts.

    is_static: whether rows are in a static buffer. share: fraction of fc2's bias that this rank adds. factors: f of the
    adapters of fc1 and fc2. quantized: weights of fc1 and fc2 in 8 bits, if the experts compute in 8 bits, else (None,
    None); see [Note: rows in 8 bits].
    """

    activation: GatedActivation
    is_static: bool
    share: float
    factors: tuple[float, float]
    quantized: tuple[QuantizedLinear, QuantizedLinear] | tuple[None, None] = (None, None)


class _Call(NamedTuple):
    """The arguments of a call that are not differentiable, and the parameters themselves."""

    fcs: tuple[ExpertLinear, ExpertLinear]
    math: ExpertMath
    parts: LayerParts
    offsets: Tensor
    num_rows: Tensor | None
    order: StaticOrder | None
    stashed: StashedRows | None
    packed_x: Tensor | None
    is_recorded: bool


def expert_outputs(
    x: Tensor,
    probs: Tensor,
    fc1: ExpertLinear,
    fc2: ExpertLinear,
    *,
    math: ExpertMath,
    parts: LayerParts,
    offsets: Tensor,
    order: StaticOrder | None = None,
    stashed: StashedRows | None = None,
    packed_x: Tensor | None = None,
) -> Tensor:
    """Applies the experts and multiplies each row's output by its routing weight. Includes the biases.

    x: [N, H], parameter dtype, and probs: [N, K], float, with an order, which assigns rows of the buffer to them;
    without one, rows [R, H] sorted by expert, and their weights [R]. parts: runners of expert_fc1 and moe_act, within
    which their tensors are saved. offsets: [e], int32, on the device: end of each expert's rows. stashed: stores the
    live rows for backward; requires an order. packed_x: x in 8 bits, [N, row_bytes(H)], uint8, if the experts compute
    in 8 bits and x was sent as such; the content of x is then not read. Returns [N, H] with an order, else [R, H],
    parameter dtype; the result and gradients of rows that are not live are undefined. Gradients of weights and of
    adapters' A go to their owners, if they have any (weight_grads.py). Second derivatives exist only without a static
    buffer, biases and adapters, with trainable fc1 weights and torch's kernels, and outside of hooks on saved tensors.
    Raises ValueError for combinations that do not fit, also for an order that is not aligned to the blocks of 8 bits.
    """
    if order is not None and not math.is_static:
        raise ValueError("order is of a static buffer, but moe_expert_rank_capacity_factor is None: omit order")
    if stashed is not None and order is None:
        raise ValueError("stashed stores rows that this function copies, but order is None: pass the order of the rows")
    quantized, _ = math.quantized
    if quantized is not None:
        _check_quantized(quantized.form, fc1, fc2, x, packed_x, order=order)
    elif packed_x is not None:
        raise ValueError("packed_x is x in 8 bits, but the experts have no weights in 8 bits: omit it")
    num_rows = None
    if math.is_static:
        num_rows = offsets[-1:].long() if order is None else order.num_rows
    # A Function cannot see whether gradients are disabled around it.
    call = _Call((fc1, fc2), math, parts, offsets, num_rows, order, stashed, packed_x, torch.is_grad_enabled())
    result: Tensor = _Experts.apply(call, x, probs, *fc1, *fc2)
    return result


def _check_quantized(
    form: BlockFormat,
    fc1: ExpertLinear,
    fc2: ExpertLinear,
    x: Tensor,
    packed_x: Tensor | None,
    *,
    order: StaticOrder | None,
) -> None:
    """Raises ValueError for what experts in 8 bits do not support; x: [N, H], any dtype; packed_x: see expert_outputs.

    Operators in 8 bits are called without the checks of their functions. See [Note: direct calls].
    """
    if x.dtype != fc1.weight.dtype:
        raise ValueError(f"x has dtype {x.dtype}: experts in 8 bits have parameters in {fc1.weight.dtype}")
    if packed_x is not None:
        form.check("packed_x", packed_x, x.shape[1])
        if packed_x.shape[0] != x.shape[0]:
            raise ValueError(
                f"packed_x has {packed_x.shape[0]} rows: must have one for each of the {x.shape[0]} tokens"
            )
    if order is None or order.alignment % form.block:
        raise ValueError(
            f"experts in 8 bits need the rows of each expert at multiples of {form.block}, but the order is "
            f"{'missing' if order is None else f'aligned to {order.alignment}'}: use a static dispatcher with "
            f"row_alignment {form.block}"
        )
    if fc1.lora_a is not None or fc2.lora_a is not None:
        raise ValueError(
            "experts in 8 bits have low-rank adapters, whose products need rows in the adapters' precision"
        )


_NOTHING = (False,) * 11  # needs_input_grad without gradients


class _Needs(NamedTuple):
    """Which arguments need a gradient; bools in place of tensors."""

    x: bool
    probs: bool
    fc1: ExpertLinear
    fc2: ExpertLinear

    @staticmethod
    def of(flags: tuple[Any, ...]) -> "_Needs":
        return _Needs(flags[1], flags[2], ExpertLinear(*flags[3:7]), ExpertLinear(*flags[7:]))

    @property
    def gate_up(self) -> bool:
        """Whether anything that gate_up is computed from needs a gradient."""
        return self.x or any(self.fc1)


class _SavedRows:
    """The tensors of R rows that backward reads: held here, by hooks on saved tensors, or in the pages of a stash.

    rows, gate_up: pages to compute in, or None. See [Note: rows in pages].
    """

    def __init__(self, needs: _Needs, call: _Call, x: Tensor) -> None:
        is_needed = needs.probs or needs.gate_up or any(needs.fc2)
        self._stashed = call.stashed if is_needed else None
        self.may_drop = self._stashed is not None and self._stashed.may_recompute
        self.rows = self.gate_up = None
        if self._stashed is not None:
            hidden = x.shape[1]
            width = call.fcs[0].weight.numel() // (call.offsets.shape[0] * hidden)
            dtype, (quantized, _) = x.dtype, call.math.quantized
            if quantized is not None:
                hidden, dtype = quantized.form.row_bytes(hidden), torch.uint8
            self.rows, self.gate_up = self._stashed.place((hidden, width), (dtype, x.dtype)) or (None, None)
        self.is_in_pages = self.rows is not None
        # In the order of StashedRows.save: the sources of a recomputed gate_up come first.
        self._wanted = {
            "rows": needs.fc1.weight or needs.fc1.lora_a or self.may_drop or self.is_in_pages,
            "low1": (needs.fc1.lora_b or self.may_drop) and not self.is_in_pages,
            "low2": needs.fc2.lora_b and not self.is_in_pages,
            "scale": is_needed,
            "gate_up": is_needed,
        }
        self._held: dict[str, Any] = {}
        self._is_packed = False
        self._to_stash: dict[str, Any] = {}  # by name; only the names once they are in the stash

    def wants(self, name: str) -> bool:
        """Returns whether backward reads the tensor `name`."""
        return bool(self._wanted[name])

    def save(self, part: Run, **tensors: Rows | None) -> None:
        """Saves those of the tensors, [R, *] or [C, *], that backward reads, within a part of the layer."""
        chosen: dict[str, Any] = {
            name: tensor for name, tensor in tensors.items() if tensor is not None and self._wanted[name]
        }
        if self._stashed is not None:
            is_held = {"scale"} if self.is_in_pages else set()
            self._to_stash |= {name: tensor for name, tensor in chosen.items() if name not in is_held}
            chosen = {name: tensor for name, tensor in chosen.items() if name in is_held}
        if chosen and (part is not run or active_hooks() is not None):
            say_rows_and_others(list(chosen.values()), [])
            # A part installs its hooks only if gradients are enabled, which they are not inside of a Function.
            with torch.enable_grad():
                chosen = dict(zip(chosen, part(packed, *chosen.values())))
            self._is_packed = True
        self._held |= chosen

    def end(self, call: _Call) -> None:
        """Passes the tensors to the stash, if there is one."""
        if self._stashed is None:
            return
        gate_up = self._to_stash.pop("gate_up")
        inputs = {name: self._to_stash[name] for name in self._wanted if name in self._to_stash}
        again = None
        if self.may_drop:
            again = _recompute_of(call, rows=inputs["rows"], recomputes_low=self.is_in_pages)
        num_sources = ("rows" in inputs) + ("low1" in inputs)
        self._stashed.save(list(inputs.values()), gate_up, recompute=again, num_sources=num_sources)
        self._to_stash = dict.fromkeys((*inputs, "gate_up"))
        self.rows = self.gate_up = None

    def take(self) -> dict[str, Any]:
        """Returns the saved tensors by name, and frees them unless this backward retains the graph."""
        is_kept = graph_is_kept()
        stashed: dict[str, Any] = {}
        if self._stashed is not None:
            stashed = dict(zip(self._to_stash, self._stashed.read(keep=is_kept)))
            if not self.is_in_pages:
                return stashed
        require_kept(self._held)
        held = self._held
        if not is_kept:
            self._held = {}
        return stashed | (dict(zip(held, unpacked([*held.values()]))) if self._is_packed else held)

    def new_reader(self) -> RowsReader | None:
        """Returns what a product informs of reading the rows; None if they are in no pages."""
        return None if self._stashed is None else self._stashed.add_reader()

    def done(self, *, has_failed: bool = False) -> None:
        """Says that backward reads no row any more, except for the products of new_reader."""
        if self._stashed is not None:
            self._stashed.done(has_failed=has_failed)


def _recompute_of(call: _Call, *, rows: Rows, recomputes_low: bool) -> Recompute:
    """Returns a function that computes a dropped gate_up again. See [Note: dropped gate_up]."""
    fc1, _ = call.fcs
    quantized, _ = call.math.quantized
    if quantized is not None:
        return partial(_multiply_again, quantized, fc1.bias, offsets=call.offsets)
    matrices = fc1.weight.view(call.offsets.shape[0], rows.shape[1], -1)
    low_rank = None if fc1.lora_b is None else (fc1.lora_b, call.math.factors[0])
    low_weight = fc1.lora_a if recomputes_low else None
    return recompute_gate_up(matrices, call.offsets, bias=fc1.bias, low_rank=low_rank, low_weight=low_weight)


def _multiply_again(
    linear: QuantizedLinear, bias: Tensor | None, out: Rows, needed: Tensor, rows: Rows, *, offsets: Tensor
) -> None:
    """Computes a dropped gate_up again, [C, 2F], from rows in 8 bits."""
    linear.multiply_into(out, rows, offsets=offsets, needed=needed)
    if bias is not None:
        add_bias_to(out, bias.detach(), scale=None, offsets=offsets, share=1.0, needed=needed)


def _kernel_of(
    rows: Rows, weight: Tensor, *, offsets: Tensor, is_static: bool, is_recomputed: bool = False
) -> ProductKernel:
    inner = rows.shape[1]
    widths = (inner, weight.numel() // (offsets.shape[0] * inner))
    return product_kernel(rows.dtype, rows.device, widths=widths, is_static=is_static, is_recomputed=is_recomputed)


class _Experts(PlainFunction):
    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, probs: Tensor, *tensors: Any) -> Tensor:
        (fc1, fc2), math, parts, offsets, num_rows, order, _, packed_x, is_recorded = call
        # The parameters themselves, because hooks on saved tensors may return different tensors. But not `call`: a
        # runner of its parts may hold a graph that was captured with this node, and a cycle through a node stays alive.
        ctx.fcs, ctx.math = call.fcs, math
        ctx.probs_shape, ctx.is_ordered = probs.shape, order is not None
        ctx.row_alignment = 1 if order is None else order.alignment
        ctx.needs = _Needs.of(ctx.needs_input_grad if is_recorded else _NOTHING)
        ctx.saved = saved = _SavedRows(ctx.needs, call, x)
        # Arguments are not this function's own. Without hooks autograd saves them, and notices if they are changed.
        is_argument = order is None and parts.expert_fc1 is run and parts.moe_act is run
        maps = (None, None) if order is None else (order.token_of_row, order.row_of_slot)
        others = (offsets, num_rows, *maps, *tensors)
        if is_recorded:
            if active_hooks() is not None:
                say_rows_and_others([x, probs] if is_argument else [], others)
            save_early(ctx, x if is_argument and saved.wants("rows") else None, probs if is_argument else None, *others)

        rows: Rows = x
        gate_up: Rows
        scale = probs
        (quantized1, quantized2), static = math.quantized, math.is_static
        if order is not None:
            tokens = x if packed_x is None else packed_x
            if quantized1 is not None and packed_x is None:
                tokens = quantize(x.contiguous(), quantized1.form)
            rows, scale = _dispatched(tokens, probs, order, into=saved.rows)
        kernel1 = kernel2 = ProductKernel.STASH
        low1 = low2 = None
        if quantized1 is None:
            kernel1 = _kernel_of(rows, fc1.weight, offsets=offsets, is_static=static, is_recomputed=saved.may_drop)
            low1 = _low_product(fc1, rows, offsets=offsets, is_static=static)
        if saved.gate_up is not None:
            gate_up = saved.gate_up
            if quantized1 is None:
                multiply_into(gate_up, rows, fc1.weight, offsets=offsets)
            else:
                quantized1.multiply_into(gate_up, rows, offsets=offsets)
        elif quantized1 is not None:
            gate_up = quantized1.multiply(rows, offsets=offsets, dtype=x.dtype)
        else:
            assert isinstance(rows, Tensor), "pages for both, or for none"
            gate_up = multiply(rows, fc1.weight, offsets=offsets, kernel=kernel1)
        _add_to(gate_up, fc1, low1, offsets=offsets, scale=None, share=1.0, factor=math.factors[0])
        saved.save(parts.expert_fc1, rows=None if is_argument else rows, low1=low1)
        saved.save(parts.moe_act, gate_up=gate_up, scale=None if is_argument else scale)
        if quantized2 is not None:
            form, activation = quantized2.form, math.activation.form
            assert activation is not None, "static experts have an activation with a name"
            act = activate(gate_up, scale, form, activation=activation, num_rows=num_rows)
            output = quantized2.multiply(act, offsets=offsets, dtype=x.dtype)
        else:
            act = math.activation(gate_up, scale, num_rows)
            kernel2 = _kernel_of(act, fc2.weight, offsets=offsets, is_static=static)
            low2 = _low_product(fc2, act, offsets=offsets, is_static=static)
            if low2 is not None:
                saved.save(parts.moe_act, low2=low2)
            output = multiply(act, fc2.weight, offsets=offsets, kernel=kernel2)
        _add_to(output, fc2, low2, offsets=offsets, scale=scale, share=math.share, factor=math.factors[1])
        saved.end(call)
        ctx.kernels = kernel1, kernel2
        return output if order is None else _combined(output, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if may_differentiate(ctx) and _is_differentiable(ctx):
            return _second_order(ctx, grad)
        has_failed = True
        try:
            found = _first_order(ctx, grad)
            has_failed = False
        finally:
            if has_failed:
                ctx.saved.done(has_failed=True)
        return found


def _dispatched(x: Tensor, probs: Tensor, order: StaticOrder, *, into: PagedRows | None) -> tuple[Rows, Tensor]:
    """Copies tokens, [N, H], and their weights, [N, K], into the rows of a buffer or of pages: [C, H] and [C]."""
    rows: Rows
    if into is None:
        rows = gather(x, order.token_of_row, num_rows=order.num_rows)
    else:
        gather_into(rows := into, x, order.token_of_row, num_rows=order.num_rows)
    return rows, gather(probs.reshape(-1, 1), order.slot_of_row, num_rows=order.num_rows).view(-1)


def _dispatched_grads(
    rows: Tensor | None, scale: Tensor | None, row_of_slot: Tensor, *, shape: torch.Size
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of tokens and weights, [N, H] and `shape`, from those of rows and scale, [C, H] and [C]."""
    grad_x = None if rows is None else sum_slots(rows, row_of_slot)
    if scale is None:
        return grad_x, None
    return grad_x, sum_slots(scale.view(-1, 1), row_of_slot.view(-1, 1)).view(shape)


def _combined(output: Tensor, order: StaticOrder) -> Tensor:
    """Sums the rows of each token; output: [C, H]. Returns [N, H]."""
    return sum_slots(output, order.row_of_slot)


def _combined_grad(grad: Tensor, token_of_row: Tensor, *, num_rows: Tensor) -> Tensor:
    """Returns the gradient of the summed rows, [C, H]; grad: that of the sums, [N, H]."""
    return gather(grad, token_of_row, num_rows=num_rows)


def _low_product(fc: ExpertLinear, rows: Rows, *, offsets: Tensor, is_static: bool) -> Tensor | None:
    """Returns rows A, [R, r], or None without an adapter; rows: [R, I]."""
    if fc.lora_a is None:
        return None
    if type(rows) is PagedRows:
        low = fc.lora_a.new_empty(rows.max_rows, fc.lora_a.shape[2])
        multiply_into(low, rows, fc.lora_a, offsets=offsets)
        return low
    kernel = _kernel_of(rows, fc.lora_a, offsets=offsets, is_static=is_static)
    return multiply(rows, fc.lora_a, offsets=offsets, kernel=kernel)


def _add_to(
    product: Rows,
    fc: ExpertLinear,
    low: Tensor | None,
    *,
    offsets: Tensor,
    scale: Tensor | None,
    share: float,
    factor: float,
) -> None:
    """Adds a bias and an adapter's output to rows W, [R, O], in place. low: [R, r] or None."""
    if fc.bias is not None:
        add_bias_to(product, fc.bias, scale=scale, offsets=offsets, share=share)
    if low is not None and fc.lora_b is not None:
        add_low_rank_to(product, low, weight=fc.lora_b, offsets=offsets, scale=factor)


@first_order
def _first_order(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs, math = ctx.needs, ctx.math
    x, probs, offsets, num_rows, token_of_row, row_of_slot, *tensors = saved_early(ctx)
    fc1, fc2 = ExpertLinear(*tensors[:4]), ExpertLinear(*tensors[4:])
    kept = ctx.saved.take()
    rows, scale, low1, low2 = kept.get("rows", x), kept.get("scale", probs), kept.get("low1"), kept.get("low2")
    quantized1, quantized2 = math.quantized
    form = None if quantized1 is None else quantized1.form
    dtype, packed_grad = grad.dtype, None if form is None else quantize(grad.contiguous(), form)
    # The gradients of fc2's bias need the rows as they are.
    if ctx.is_ordered and (packed_grad is None or fc2.bias is not None):
        grad = _combined_grad(grad, token_of_row, num_rows=num_rows)

    grad_scale = None
    if fc2.bias is not None and needs.probs:
        grad_scale = torch.empty_like(scale)
        ops.expert_bias_scale_grad(grad, fc2.bias, offsets=offsets, share=math.share, out=grad_scale)
    needs_gate_up = needs.gate_up
    needs_act = needs_gate_up or needs.probs
    factor1, factor2 = math.factors
    bias2 = _bias_grad(ctx.fcs[1].bias, grad, scale=scale, offsets=offsets) if needs.fc2.bias else None
    if packed_grad is not None:
        grad, packed_grad = _combined_grad(packed_grad, token_of_row, num_rows=num_rows), None
    back = _back_through(
        fc2, needs.fc2, grad, quantized2, dtype=dtype, needs_rows=needs_act, offsets=offsets, factor=factor2
    )
    activated = math.activation.gradients(
        back.rows,
        kept["gate_up"],
        scale,
        num_rows,
        needs=(needs_gate_up, needs.probs),
        needs_act=bool(needs.fc2.weight or needs.fc2.lora_a or (needs.fc2.lora_b and low2 is None)),
    )
    grad_gate_up, act = activated.gate_up, activated.act
    if needs.probs:
        grad_scale = activated.scale if grad_scale is None else activated.scale + grad_scale
    # Each tensor is freed after its last use, because the gradients of weights may be as large.
    back.rows = None
    del activated, kept
    b2 = _b_grad(fc2, needs.fc2, low2, act, grad, offsets=offsets, factor=factor2, alignment=ctx.row_alignment)
    if form is not None and needs.fc2.weight:
        act = quantize(act, form, num_rows=num_rows)
    weight2, a2 = _weight_grads(ctx, 1, needs.fc2, act, grad, back.low, offsets=offsets, num_rows=num_rows)
    fc2_grads = (weight2, bias2, a2, b2)
    del act, low2, grad, back

    bias1 = _bias_grad(ctx.fcs[0].bias, grad_gate_up, scale=None, offsets=offsets) if needs.fc1.bias else None
    if form is not None and (needs.x or needs.fc1.weight):
        grad_gate_up = quantize(grad_gate_up, form, num_rows=num_rows)
    back = _back_through(
        fc1, needs.fc1, grad_gate_up, quantized1, dtype=dtype, needs_rows=needs.x, offsets=offsets, factor=factor1
    )
    b1 = _b_grad(fc1, needs.fc1, low1, rows, grad_gate_up, offsets=offsets, factor=factor1, alignment=ctx.row_alignment)
    weight1, a1 = _weight_grads(ctx, 0, needs.fc1, rows, grad_gate_up, back.low, offsets=offsets, num_rows=num_rows)
    ctx.saved.done()
    grad_weights = (weight1, bias1, a1, b1, *fc2_grads)
    grad_rows = back.rows
    del rows, grad_gate_up, low1, back
    if not graph_is_kept():
        ctx.fcs = None  # computed parameters would live as long as the loss
    if not ctx.is_ordered:
        return None, grad_rows, grad_scale, *grad_weights
    return None, *_dispatched_grads(grad_rows, grad_scale, row_of_slot, shape=ctx.probs_shape), *grad_weights


@dataclass(slots=True)
class _LinearGrads:
    """Gradients of the input rows of fc1 or fc2, [R, I], and of the low-rank product rows A, [R, r], if needed."""

    rows: Tensor | None = None
    low: Tensor | None = None


def _back_through(
    fc: ExpertLinear,
    needs: ExpertLinear,
    grad: Tensor,
    quantized: QuantizedLinear | None,
    *,
    dtype: torch.dtype,
    needs_rows: bool,
    offsets: Tensor,
    factor: float,
) -> _LinearGrads:
    """Computes the gradients of fc1 or fc2, in `dtype`, that do not depend on its input rows.

    grad: [R, O], packed if the weights are quantized.
    """
    grads = _LinearGrads()
    if fc.lora_b is not None and (needs_rows or needs.lora_a):
        grads.low = grad.new_empty(grad.shape[0], fc.lora_b.shape[1])
        ops.grouped_gemm(grad, fc.lora_b.transpose(1, 2), offsets=offsets, out=grads.low)
        # This also scales the undefined contents of rows that are not live.
        grads.low.mul_(factor)
    if needs_rows and quantized is not None:
        grads.rows = quantized.input_grad(grad, offsets=offsets, dtype=dtype)
    elif needs_rows:
        grads.rows = input_grad(grad, fc.weight, offsets=offsets)
        if fc.lora_a is not None and grads.low is not None:
            grads.rows += input_grad(grads.low, fc.lora_a, offsets=offsets)
    return grads


def _b_grad(
    fc: ExpertLinear,
    needs: ExpertLinear,
    low: Tensor | None,
    rows: Rows | None,
    grad: Tensor,
    *,
    offsets: Tensor,
    factor: float,
    alignment: int,
) -> Tensor | None:
    """Returns the gradient of an adapter's B, [e, r, O], or None if not needed.

    low: rows A, [R, r]; None if it was not saved and must be computed from the rows, [R, I].
    """
    if not needs.lora_b or fc.lora_b is None:
        return None
    if low is None:
        assert rows is not None
        low = _low_product(fc, rows, offsets=offsets, is_static=True)
    grad_b = torch.empty_like(fc.lora_b)
    ops.grouped_gemm_weight_grad(low, grad, offsets=offsets, out=grad_b, row_alignment=alignment)
    return grad_b.mul_(factor)


def _weight_grads(
    ctx: Any,
    number: int,
    needs: ExpertLinear,
    rows: Rows,
    grad: Tensor,
    grad_low: Tensor | None,
    *,
    offsets: Tensor,
    num_rows: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """Passes the gradients of W and A to their owners, or returns them. number: 0 for fc1; rows: [R, I]; grad: [R, O].

    Rows and grad are packed if the weights are quantized. grad_low: of rows A, [R, r].
    """
    fc = ctx.fcs[number]
    # next_functions lists tensors only: x, probs, and the parameters that experts have.
    place = 2 + ctx.fcs[0].num_tensors if number else 2
    weight = a = None
    if needs.weight:
        reader = None if number else ctx.saved.new_reader()
        quantized, shape = ctx.math.quantized[number], fc.weight.shape
        product: WeightGrad
        if quantized is None:
            product = ExpertGrads(rows, grad, offsets, shape, ctx.kernels[number], ctx.row_alignment, reader)
        else:
            widths = quantized.packed.shape[1], quantized.width
            dtype = fc.weight.dtype
            product = QuantizedGrads(rows, grad, quantized.form, widths, num_rows, offsets, shape, dtype, reader)
        weight = deliver(fc.weight, product, node=ctx.next_functions[place][0])
    if needs.lora_a and grad_low is not None:
        kernel = _kernel_of(rows, fc.lora_a, offsets=offsets, is_static=ctx.math.is_static)
        reader = None if number else ctx.saved.new_reader()
        product = ExpertGrads(rows, grad_low, offsets, fc.lora_a.shape, kernel, ctx.row_alignment, reader)
        place += 1 if fc.bias is None else 2
        a = deliver(fc.lora_a, product, node=ctx.next_functions[place][0])
    return weight, a


def _bias_grad(bias: Tensor, grad: Tensor, *, scale: Tensor | None, offsets: Tensor) -> Tensor:
    out = torch.empty_like(bias)
    ops.expert_bias_grad(grad, scale=scale, offsets=offsets, out=out)
    return out


def _is_differentiable(ctx: Any) -> bool:
    """Returns whether gradients can be differentiated. Raises RuntimeError if that requires rows that are not saved."""
    fc1, fc2 = ctx.fcs
    is_plain = not ctx.math.is_static and fc1.num_tensors == fc2.num_tensors == 1
    if not is_plain or ctx.kernels != (ProductKernel.TORCH, ProductKernel.TORCH):
        return False
    if not ctx.saved.wants("rows"):
        raise RuntimeError(
            "backward with create_graph=True of experts whose fc1 is frozen: their input is not saved for backward, so "
            "their gradients cannot be differentiated; call backward without create_graph, or let weight1 require grad"
        )
    return True


def _second_order(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Differentiates the same computation by functions of torch, whose gradients can be differentiated further."""
    x, probs, offsets, _, _, _, *tensors = saved_early(ctx)
    kept = ctx.saved.take()
    x, probs = kept.get("rows", x), kept.get("scale", probs)
    weight1, weight2 = tensors[0], tensors[4]
    act = ctx.math.activation(multiply(x, weight1, offsets=offsets), probs)
    output = multiply(act, weight2, offsets=offsets)
    inputs = (x, probs, weight1, None, None, None, weight2, None, None, None)
    needs = ctx.needs_input_grad[1:]
    needed = [one for one, is_needed in zip(inputs, needs) if is_needed]
    found = iter(torch.autograd.grad(output, needed, grad, create_graph=True))
    return None, *(next(found) if is_needed else None for is_needed in needs)
