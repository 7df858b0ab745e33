"""Experts in 8 bits: their bits against plain operations on decoded rows, the stash, and when weights are quantized.

Several cases are bugs that users of other systems met: one group, a buffer with padding, 44 rows of an expert,
uninitialised bytes of scales, stale copies of weights, frozen experts.
"""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.block_scaled import operators
from megatron.core.block_scaled.format import BlockFormat
from megatron.core.fusions.gated_activation import GatedActivation
from megatron.core.tensor_parallel.weight_grads import GradOwner, WeightGrad, WeightGradQueue, set_grad_owner
from megatron.core.transformer.module import LayerParts
from megatron.core.transformer.moe import quantized_experts
from megatron.core.transformer.moe.expert_function import ExpertLinear, ExpertMath, expert_outputs
from megatron.core.transformer.moe.paged_stash import Counter, PagedStash, PagePool, PoolLayout, StashedRows
from megatron.core.transformer.moe.quantized_experts import QuantizedLinear, QuantizedWeights
from megatron.core.transformer.moe.static_rows import StaticOrder, order_by_expert

ACTIVATIONS = {
    "swiglu": GatedActivation(F.silu, True),
    "clamped": GatedActivation(quick_gelu, True, clamp=0.5, offset=1.0),
    "plain": GatedActivation(squared_relu, False),
}
HIDDEN, FFN, SPARE = 48, 40, 3


def normal(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@dataclass(frozen=True)
class Shape:
    """Rows of each expert, from which tokens with one choice each are made, and what their experts have."""

    rows: tuple[int, ...] = (44, 0, 7)
    block: int = 32
    dtype: torch.dtype = torch.bfloat16
    activation: str = "swiglu"
    has_bias: bool = False


class Case:
    """Tokens, experts, and an order of the tokens' rows in a buffer that is larger than needed."""

    def __init__(self, shape: Shape) -> None:
        self.form, dtype = BlockFormat(shape.block), shape.dtype
        activation = ACTIVATIONS[shape.activation]
        width, num_experts = FFN * (2 if activation.is_gated else 1), len(shape.rows)
        # Every token has a second choice, and two tokens have both, among the experts of another rank.
        chosen = torch.repeat_interleave(torch.arange(num_experts + 1), torch.tensor([*shape.rows, 2]))
        chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(1))]
        indices = torch.stack([chosen, torch.full_like(chosen, num_experts)], dim=1)
        capacity = (sum(-(-rows // shape.block) for rows in shape.rows) + SPARE) * shape.block
        self.order = order_by_expert(indices, num_experts, capacity=capacity, alignment=shape.block)
        self.offsets = self.order.rows_per_group.cumsum(0, dtype=torch.int32)
        self.x = normal(len(chosen), HIDDEN, seed=2, dtype=dtype).requires_grad_()
        self.probs = normal(len(chosen), 2, seed=3, dtype=torch.float32).abs().requires_grad_()
        self.fcs = tuple(
            ExpertLinear(
                nn.Parameter(normal(num_experts, *sizes, seed=sizes[0], scale=0.2, dtype=dtype)),
                nn.Parameter(normal(num_experts, sizes[1], seed=sizes[1], dtype=dtype)) if shape.has_bias else None,
            )
            for sizes in ((HIDDEN, width), (FFN, HIDDEN))
        )
        self.weights = QuantizedWeights(self.form)
        self.math = ExpertMath(activation, is_static=True, share=0.5, factors=(1.0, 1.0))
        self.grad = normal(len(chosen), HIDDEN, seed=4, dtype=dtype)

    @property
    def inputs(self) -> list[Tensor]:
        return [self.x, self.probs, *(one for fc in self.fcs for one in fc if one is not None)]

    def quantized(self, step: int | None) -> tuple[QuantizedLinear, QuantizedLinear]:
        one, other = (fc.weight for fc in self.fcs)
        return self.weights.of_step(step, one.detach(), other.detach(), params=(one, other))

    def forward(
        self, stashed: StashedRows | None = None, order: StaticOrder | None = None, quantized: Any = None
    ) -> Tensor:
        if quantized is None:
            quantized = self.quantized(None)
        return expert_outputs(
            self.x,
            self.probs,
            *self.fcs,
            math=self.math._replace(quantized=quantized),
            parts=LayerParts(),
            offsets=self.offsets,
            order=order or self.order,
            stashed=stashed,
        )

    def results(self, stashed: StashedRows | None = None) -> list[Tensor]:
        """Returns the output and the gradients of `inputs`."""
        output = self.forward(stashed)
        return [output.detach(), *torch.autograd.grad(output, self.inputs, self.grad)]

    # The same computation by plain operations on decoded rows.

    def expected(self) -> list[Tensor]:
        live = int(self.order.num_rows)
        source, slots = self.order.token_of_row[:live].long(), self.order.slot_of_row[:live].long()
        is_padding = (source < 0)[:, None]

        def to_rows(tokens: Tensor) -> Tensor:
            return tokens[source.clamp(min=0)].masked_fill(is_padding, 0)

        (fc1, fc2), dtype = self.fcs, self.x.dtype
        w1, w2 = (self._decoded_weight(fc.weight.detach()) for fc in self.fcs)
        rows = to_rows(self._decoded(self.x.detach()))
        scale = self.probs.detach().reshape(-1, 1)[slots.clamp(min=0)].masked_fill(is_padding, 0)
        gate_up = self._with_bias(self._product(rows, w1).to(dtype), fc1.bias, factor=1.0)
        leaf, weights = gate_up.detach().requires_grad_(), scale[:, 0].detach().requires_grad_()
        act = self.math.activation(leaf, weights, self.order.num_rows)
        output = self._product(self._decoded(act.detach()), w2).to(dtype)
        output = self._with_bias(output, fc2.bias, factor=self.math.share * scale)
        found = torch.zeros_like(self.x).index_add_(0, source[source >= 0], output.detach()[source >= 0])
        grad = to_rows(self._decoded(self.grad))
        grad_act = self._product(grad, w2.transpose(1, 2)).to(dtype)
        grad_gate_up, grad_scale = torch.autograd.grad(act, (leaf, weights), grad_act)
        coded = self._decoded(grad_gate_up)
        grad_x = torch.zeros_like(self.x)
        grad_rows = self._product(coded, w1.transpose(1, 2)).to(dtype)
        grad_x.index_add_(0, source[source >= 0], grad_rows[source >= 0])
        if fc2.bias is not None:
            plain = to_rows(self.grad)
            of_bias = [plain[part].float() @ bias.float() for part, bias in zip(self._parts(), fc2.bias.detach())]
            grad_scale = torch.cat(of_bias).mul(self.math.share) + grad_scale
        grad_probs = torch.zeros(self.probs.numel())
        grad_probs[slots[slots >= 0]] = grad_scale[slots >= 0]
        results = [found, grad_x, grad_probs.view_as(self.probs), self._weight_grad(rows, coded).to(dtype)]
        if fc1.bias is not None:
            results.append(self._sums(grad_gate_up.float()).to(dtype))
        results.append(self._weight_grad(self._decoded(act.detach()), grad).to(dtype))
        if fc2.bias is not None:
            results.append(self._sums(plain.float() * scale).to(dtype))
        return results

    def _parts(self) -> list[slice]:
        ends = self.offsets.tolist()
        return [slice(start, end) for start, end in zip([0, *ends], ends)]

    def _decoded(self, rows: Tensor) -> Tensor:
        packed = operators.quantize_rows(rows, self.form)
        return operators.dequantize_rows(packed, self.form, out=torch.empty(rows.shape))

    def _decoded_weight(self, weight: Tensor) -> Tensor:
        packed = operators.quantize_weight(weight, self.form)
        out = [operators.dequantize_rows(one, self.form, out=torch.empty(weight.shape[1:])) for one in packed]
        return torch.stack(out)

    def _product(self, rows: Tensor, weights: Tensor) -> Tensor:
        return torch.cat([rows[part] @ weight for part, weight in zip(self._parts(), weights)])

    def _with_bias(self, rows: Tensor, bias: Tensor | None, *, factor: Any) -> Tensor:
        if bias is None:
            return rows
        each = torch.cat(
            [one.detach().float().expand(part.stop - part.start, -1) for part, one in zip(self._parts(), bias)]
        )
        return (rows.float() + each * factor).to(rows.dtype)

    def _weight_grad(self, rows: Tensor, grad: Tensor) -> Tensor:
        """Sums over rows whose columns are quantized again."""
        products = []
        for part in self._parts():
            left, right = (self._decoded(one[part].t().contiguous()) for one in (rows, grad))
            products.append(left @ right.t())
        return torch.stack(products)

    def _sums(self, grad: Tensor) -> Tensor:
        return torch.stack([grad[part].sum(0) for part in self._parts()])


SHAPES = {
    "44 rows of an expert, none of another": Shape(),
    "one group in a padded buffer": Shape(rows=(50,)),
    "no rows": Shape(rows=(0, 0)),
    "blocks of 128": Shape(block=128, rows=(130, 3)),
    "fp32": Shape(dtype=torch.float32),
    "biases": Shape(has_bias=True),
    "clamped": Shape(activation="clamped", has_bias=True),
    "plain": Shape(activation="plain"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_results_are_those_of_plain_operations_on_decoded_rows(name: str) -> None:
    case = Case(SHAPES[name])
    for found, expected in zip(case.results(), case.expected(), strict=True):
        # Only the order of sums may differ, which can change the last bit of a result and thereby a rounding to 8 bits.
        torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
        assert (found != expected).float().mean() < 0.02


@pytest.mark.parametrize("name", SHAPES)
def test_uninitialised_memory_is_never_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Case(SHAPES[name]).results()
    empty, new_empty = torch.empty, Tensor.new_empty

    def poisoned(made: Tensor) -> Tensor:
        if made.is_meta:
            return made
        return made.fill_(255 if made.dtype is torch.uint8 else float("nan") if made.is_floating_point() else 10**6)

    case = Case(SHAPES[name])
    monkeypatch.setattr(torch, "empty", lambda *args, **named: poisoned(empty(*args, **named)))
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **named: poisoned(new_empty(*args, **named)))
    for found, wanted in zip(case.results(), expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_rank_without_tokens_has_gradients_of_zero() -> None:
    case = Case(Shape())
    case.order = order_by_expert(torch.zeros(0, 2, dtype=torch.int64), 3, capacity=0, alignment=32)
    case.offsets = case.order.rows_per_group.cumsum(0, dtype=torch.int32)
    case.x, case.probs = case.x.detach()[:0].requires_grad_(), case.probs.detach()[:0].requires_grad_()
    case.forward().sum().backward()
    for fc in case.fcs:
        assert fc.weight.grad is not None and not fc.weight.grad.any()


# --- Stash ---

# Device and host pages.
POOLS = {"device": (400, 0), "host": (0, 400), "spill": (2, 400), "x alone": (9, 0)}


def made_stash(pool: str, *, in_pages: bool, **options: Any) -> PagedStash:
    scratch = {"scratch_pages": 40, "scratch_sets": 1} if in_pages else {}
    return PagedStash(PagePool("cpu", PoolLayout(2048, *POOLS[pool]), **scratch), computes_in_pages=in_pages, **options)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize("pool", POOLS)
def test_a_stash_changes_no_bit(pool: str, in_pages: bool, has_bias: bool) -> None:
    cases = [Case(Shape(has_bias=has_bias, rows=rows)) for rows in ((44, 0, 7), (5, 31, 64))]
    expected = [case.results() for case in cases]
    stash = made_stash(pool, in_pages=in_pages)
    # Two groups in flight; the first step records the order, and later ones keep the second group's rows.
    for _ in range(3):
        stash.reset()
        outputs = []
        for number, case in enumerate(cases):
            max_rows = case.order.slot_of_row.shape[0]
            with stash.begin(f"layer {number}", case.order.num_rows, max_rows=max_rows) as stashed:
                outputs.append(case.forward(stashed))
        for case, output, wanted in reversed(list(zip(cases, outputs, expected, strict=True))):
            found = [output.detach(), *torch.autograd.grad(output, case.inputs, case.grad)]
            assert all(map(torch.equal, found, wanted))
        assert stash.void.item() == 0
    if pool == "x alone":
        assert stash.pool.counters[Counter.DROPPED_GATE_UP] > 0, "gate_up was computed again"


@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize("pool", POOLS)
def test_products_that_a_queue_holds_have_the_same_bits(pool: str, in_pages: bool) -> None:
    cases = [Case(Shape(rows=rows)) for rows in ((44, 0, 7), (5, 31, 64))]
    weights = [fc.weight for case in cases for fc in case.fcs]
    expected = [grad for case in cases for grad in case.results()[3:]]
    stash, queue, pending = made_stash(pool, in_pages=in_pages), WeightGradQueue("--delay-wgrad-compute"), list[int]()
    queue.serve((str(number), weight) for number, weight in enumerate(weights))
    for case in cases:
        case.x.register_hook(lambda _: pending.append(queue.num_pending))
    for _ in range(3):
        stash.reset()
        outputs = []
        for number, case in enumerate(cases):
            max_rows = case.order.slot_of_row.shape[0]
            with stash.begin(f"layer {number}", case.order.num_rows, max_rows=max_rows) as stashed:
                outputs.append(case.forward(stashed))
        with queue.holding():
            torch.autograd.backward(outputs, [case.grad for case in cases])
        assert all(map(torch.equal, (weight.grad for weight in weights), expected))
        assert stash.void.item() == 0 and max(pending) >= 2
        for weight in weights:
            weight.grad = None
    # Rows from the host are in memory of the next group, so that fc1 does not wait.
    assert (max(pending) == 4) == (not in_pages or not POOLS[pool][1])


def test_a_saved_row_of_x_has_about_half_of_its_bytes() -> None:
    case = Case(Shape())
    stash = made_stash("device", in_pages=False, has_rungs=False)
    stash.reset()
    with stash.begin("layer", case.order.num_rows, max_rows=case.order.slot_of_row.shape[0]) as stashed:
        case.forward(stashed).sum().backward()
    live = int(case.order.num_rows)
    assert stash.pool.counters[Counter.LIVE_BYTES] == live * (case.form.row_bytes(HIDDEN) + 2 * 2 * FFN + 4)


# --- Weights ---


@pytest.fixture
def quantizations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of rows of weights that were quantized."""
    calls: list[int] = []
    quantize = quantized_experts.quantize_weight

    def counted(weight: Tensor, form: BlockFormat, *, out: Tensor) -> Tensor:
        calls.append(weight.shape[1])
        return quantize(weight, form, out=out)

    monkeypatch.setattr(quantized_experts, "quantize_weight", counted)
    yield calls


class Copies:
    """The weights of two layers, which are their own parameters."""

    def __init__(self) -> None:
        self.weights = QuantizedWeights(BlockFormat(32))

    def of(self, step: int | None, *given: Tensor) -> tuple[QuantizedLinear, QuantizedLinear]:
        one, other = given
        return self.weights.of_step(step, one, other, params=(one, other))


def test_weights_are_quantized_once_a_step_and_after_each_change(quantizations: list[int]) -> None:
    weights, copies = (normal(2, 8, 16, seed=1), normal(2, 16, 8, seed=2)), Copies()
    first = copies.of(1, *weights)
    assert [tuple(one.packed.shape) for one in first] == [(2, 8, 32), (2, 16, 16)]
    assert copies.of(1, *weights) is first and quantizations == [8, 16]
    copies.of(2, *weights)
    assert quantizations == [8, 16] * 2, "a gather writes without torch's notice, so each step quantizes"
    weights[1].mul_(2)
    changed = copies.of(2, *weights)[1].packed
    assert quantizations == [8, 16] * 3
    assert torch.equal(changed, operators.quantize_weight(weights[1], BlockFormat(32)))
    others = weights[0].clone(), weights[1].clone()
    doubled = weights[0] * 2
    of_others = copies.of(2, doubled, weights[1])[0].packed
    assert torch.equal(of_others, operators.quantize_weight(doubled, BlockFormat(32)))
    assert quantizations == [8, 16] * 4, "other weights"
    one, other = copies.of(None, *others), copies.of(None, *others)
    assert quantizations == [8, 16] * 6 and one[0].packed is not other[0].packed, "outside of steps, each forward"
    copied = pickle.loads(pickle.dumps(copies.weights))
    restored = copied.of_step(2, *others, params=others)[1].packed
    assert torch.equal(restored, operators.quantize_weight(others[1], copies.weights.form))
    assert quantizations == [8, 16] * 7, "a copy is empty"


def test_a_backward_never_reads_the_weights_of_another_forward() -> None:
    case = Case(Shape())
    expected = case.results()
    output = case.forward()
    changed = case.fcs[0].weight.detach() * 2, case.fcs[1].weight.detach() * 2
    case.weights.of_step(None, *changed, params=changed)
    assert torch.equal(torch.autograd.grad(output, case.x, case.grad)[0], expected[1])
    output = case.forward(quantized=case.quantized(1))
    assert torch.equal(torch.autograd.grad(output, case.x, case.grad)[0], expected[1])
    output = case.forward(quantized=case.quantized(2))
    case.weights.of_step(3, *changed, params=changed)
    with pytest.raises(RuntimeError, match="their weights were quantized again after the forward, because a new step"):
        torch.autograd.grad(output, case.x, case.grad)


def test_weights_that_were_quantized_in_inference_mode_are_renewed_outside_of_it() -> None:
    weights, copies = (normal(2, 8, 16, seed=1), normal(2, 16, 8, seed=2)), Copies()
    with torch.inference_mode():
        copies.of(1, *weights)
    copies.of(2, *weights)


def test_gradients_are_added_to_fp32_with_one_rounding() -> None:
    case = Case(Shape())
    owners = []
    for fc in case.fcs:
        main_grad = torch.ones(fc.weight.shape)

        def take(grad: WeightGrad, main_grad: Tensor = main_grad) -> None:
            assert grad.fits(main_grad)
            grad.add_to(main_grad, scale=0.5, is_zero=False)

        set_grad_owner(fc.weight, GradOwner(main_grad, take))
        owners.append(main_grad)
    case.forward().backward(case.grad)
    assert all(fc.weight.grad is None for fc in case.fcs)
    rounded = Case(Shape())
    rounded.forward().backward(rounded.grad)
    for main_grad, fc in zip(owners, rounded.fcs, strict=True):
        exact = (main_grad - 1) / 0.5
        assert fc.weight.grad is not None
        assert not torch.equal(exact, exact.bfloat16().float()), "more bits than bf16 has"
        torch.testing.assert_close(exact, fc.weight.grad.float(), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_experts_receive_no_gradients_and_change_no_others(frozen: int) -> None:
    expected = Case(Shape()).results()
    case = Case(Shape())
    case.fcs[frozen].weight.requires_grad_(False)
    output = case.forward()
    inputs = [case.x, case.probs, case.fcs[1 - frozen].weight]
    found = torch.autograd.grad(output, inputs, case.grad)
    for one, wanted in zip(found, (expected[1], expected[2], expected[4 - frozen]), strict=True):
        assert torch.equal(one, wanted)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_reach_the_result(value: float) -> None:
    case = Case(Shape())
    with torch.no_grad():
        case.x[3, 5] = value
    output, grad_x, *_ = case.results()
    row = int(case.order.row_of_slot[3, 0])
    assert row >= 0 and output[3].isnan().all() and grad_x[3].isnan().all()
    assert not output[:3].isnan().any() and not output[4:].isnan().any()


def test_what_experts_in_8_bits_do_not_support_is_refused() -> None:
    case = Case(Shape())
    with pytest.raises(ValueError, match="rows of each expert at multiples of 32, but the order is aligned to 1: use"):
        case.forward(order=case.order._replace(alignment=1))
    quantized = case.quantized(None)
    options = {"parts": LayerParts(), "offsets": case.offsets, "math": case.math._replace(quantized=quantized)}
    with pytest.raises(ValueError, match="but the order is missing"):
        expert_outputs(case.x, case.probs[:, 0], *case.fcs, **options)
    adapted = case.fcs[0]._replace(lora_a=normal(3, HIDDEN, 8, seed=1), lora_b=normal(3, 8, 2 * FFN, seed=1))
    with pytest.raises(ValueError, match="experts in 8 bits have low-rank adapters"):
        expert_outputs(case.x, case.probs, adapted, case.fcs[1], order=case.order, **options)
