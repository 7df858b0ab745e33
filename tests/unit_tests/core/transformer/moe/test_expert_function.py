"""Compares expert_outputs with separate functions: bits, saved tensors, and where they are saved.

Other tests run it with a stash: test_row_origins.py, and all tests that train with --moe-paged-stash.
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.fusions.gated_activation import GatedActivation
from megatron.core.tensor_parallel.weight_grads import GradOwner, WeightGrad, set_grad_owner
from megatron.core.transformer.module import LayerParts
from megatron.core.transformer.moe import expert_function
from megatron.core.transformer.moe.expert_function import ExpertLinear, ExpertMath, expert_outputs
from megatron.core.transformer.moe.paged_stash import (
    PagedStash,
    PagePool,
    PoolLayout,
    StashedRows,
    add_expert_bias,
    add_low_rank,
    grouped_gemm,
)
from megatron.core.transformer.moe.static_rows import gather_live_rows, order_by_expert, sum_live_rows
from megatron.core.transformer.moe_config import GPU_ROW_ALIGNMENT

ACTIVATIONS = {
    "fused": GatedActivation(F.silu, True),
    "clamped": GatedActivation(F.silu, True, clamp=0.5, offset=1.0),
    "by autograd": GatedActivation(F.gelu, True),
    "quick": GatedActivation(quick_gelu, True),
    "plain": GatedActivation(squared_relu, False),
}
UNNAMED = GatedActivation(torch.tanh, True)
EXPERTS, HIDDEN, FFN, RANK, TOKENS, CAPACITY = 3, 16, 8, 8, 7, 12
SHARE, FACTORS = 0.5, (2.0, 0.25)
BUFFERS = ("dynamic", "static", "ordered")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


class Case:
    """Arguments of the function, and the same computation by separate functions."""

    def __init__(
        self,
        activation: GatedActivation = ACTIVATIONS["fused"],
        *,
        buffer: str = "ordered",
        has_more: bool = False,
        dtype: torch.dtype = torch.float32,
        alignment: int = 1,
    ) -> None:
        """buffer: rows of all experts, rows in a larger buffer, or tokens with an order. has_more: biases, adapters."""
        width = FFN * (2 if activation.is_gated else 1)
        chosen = torch.tensor(
            [[0, 2], [2, 0], [0, 3], [2, 0], [0, 2], [3, 3], [2, 0]]
        )  # expert 1 has no rows; 3 is none
        self.order = order_by_expert(chosen, EXPERTS, capacity=CAPACITY * alignment, alignment=alignment)
        self.offsets = self.order.rows_per_group.cumsum(0, dtype=torch.int32)
        self.live = int(self.order.num_rows)
        self.is_ordered, self.is_static = buffer == "ordered", buffer != "dynamic"
        rows = {"dynamic": self.live, "static": CAPACITY, "ordered": TOKENS}[buffer]
        wide = torch.promote_types(dtype, torch.float32)
        self.x = normal(rows, HIDDEN, dtype=dtype).requires_grad_()
        self.probs = normal(*((rows, 2) if self.is_ordered else (rows,)), dtype=wide).requires_grad_()
        self.fcs = [self._linear(sizes, has_more, dtype) for sizes in ((HIDDEN, width), (FFN, HIDDEN))]
        self.math, self.parts = ExpertMath(activation, self.is_static, SHARE, FACTORS), LayerParts()

    @staticmethod
    def _linear(sizes: tuple[int, int], has_more: bool, dtype: torch.dtype) -> ExpertLinear:
        inner, outer = sizes
        shapes = [(EXPERTS, inner, outer), (EXPERTS, outer), (EXPERTS, inner, RANK), (EXPERTS, RANK, outer)]
        return ExpertLinear(*(nn.Parameter(normal(*one, dtype=dtype)) for one in shapes[: 4 if has_more else 1]))

    @property
    def named(self) -> dict[str, Tensor]:
        pairs = [
            (f"{name}{number}", one) for number, fc in enumerate(self.fcs, 1) for name, one in fc._asdict().items()
        ]
        return {"x": self.x, "probs": self.probs} | {name: one for name, one in pairs if one is not None}

    def together(self) -> Tensor:
        order = self.order if self.is_ordered else None
        output = expert_outputs(
            self.x, self.probs, *self.fcs, math=self.math, parts=self.parts, offsets=self.offsets, order=order
        )
        return output if self.is_ordered else output[: self.live]

    def apart(self) -> Tensor:
        rows, scale, num_rows = self.x, self.probs, self.order.num_rows if self.is_static else None
        if self.is_ordered:
            rows, scale = gather_live_rows(rows, scale, order=self.order, num_rows=self.order.num_rows)
        gate_up = self._product(self.fcs[0], rows, scale=None, share=1.0, factor=FACTORS[0])
        act = self.math.activation(gate_up, scale, num_rows)
        output = self._product(self.fcs[1], act, scale=scale, share=SHARE, factor=FACTORS[1])
        if self.is_ordered:
            return sum_live_rows(output, order=self.order, num_rows=self.order.num_rows)
        return output[: self.live]

    def _product(self, fc: ExpertLinear, rows: Tensor, *, scale: Tensor | None, share: float, factor: float) -> Tensor:
        output = grouped_gemm(rows, fc.weight, offsets=self.offsets)
        if fc.bias is not None:
            output = add_expert_bias(output, fc.bias, offsets=self.offsets, scale=scale, share=share)
        if fc.lora_a is not None and fc.lora_b is not None:
            low = grouped_gemm(rows, fc.lora_a, offsets=self.offsets)
            output = add_low_rank(output, low, weight=fc.lora_b, offsets=self.offsets, scale=factor)
        return output

    def live_grads(self, output: Tensor, *, wanted: list[str] | None = None, **options: Any) -> list[Tensor]:
        """Returns the gradients of the wanted arguments, of live rows only."""
        names = [name for name, one in self.named.items() if one.requires_grad] if wanted is None else wanted
        grad = normal(*output.shape, dtype=output.dtype)
        found = torch.autograd.grad(output, [self.named[name] for name in names], grad, **options)
        cut = self.live if self.is_static and not self.is_ordered else None
        return [one[:cut] if name in ("x", "probs") else one for name, one in zip(names, found)]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, same in zip(found, expected, strict=True):
        assert torch.equal(one, same)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("has_more", [False, True], ids=["", "biases and adapters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_results_and_gradients_have_the_bits_of_separate_functions(
    activation: str, buffer: str, has_more: bool, dtype: torch.dtype
) -> None:
    case = Case(ACTIVATIONS[activation], buffer=buffer, has_more=has_more, dtype=dtype)
    expected, output = case.apart(), case.together()
    assert_equal([output, *case.live_grads(output)], [expected, *case.live_grads(expected)])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_more", [False, True], ids=["", "biases and adapters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_padding_adds_only_zeros(activation: str, has_more: bool, dtype: torch.dtype) -> None:
    plain, padded = (
        Case(ACTIVATIONS[activation], has_more=has_more, dtype=dtype, alignment=alignment)
        for alignment in (1, GPU_ROW_ALIGNMENT)
    )
    assert padded.live == 2 * GPU_ROW_ALIGNMENT
    expected, output = plain.together(), padded.together()
    # The CPU's products and sums of a different number of rows may add the same terms in a different order.
    bound = 2 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    for found, same in zip([output, *padded.live_grads(output)], [expected, *plain.live_grads(expected)]):
        assert (found.double() - same.double()).norm() <= bound * same.double().norm()


@pytest.mark.parametrize(
    "frozen",
    [["x"], ["probs"], ["x", "probs"], ["weight1", "weight2"], ["lora_a1", "lora_a2"], ["lora_b1", "bias2"]]
    + [["weight1", "bias1", "lora_a1", "lora_b1", "x"], ["weight2", "bias2", "lora_a2", "lora_b2"]],
    ids=",".join,
)
@pytest.mark.parametrize("buffer", BUFFERS)
def test_frozen_arguments_receive_no_gradient(frozen: list[str], buffer: str) -> None:
    case = Case(buffer=buffer, has_more=True)
    for name in frozen:
        case.named[name].requires_grad_(False)
    expected = case.live_grads(case.apart())
    output = case.together()
    assert_equal(case.live_grads(output), expected)
    case.together().backward(normal(*output.shape))
    assert [name for name, one in case.named.items() if one.grad is None] == [n for n in case.named if n in frozen]


def test_nothing_is_saved_without_gradients() -> None:
    case = Case(has_more=True)
    with torch.no_grad():
        assert case.together().grad_fn is None
    for one in case.named.values():
        one.requires_grad_(False)
    assert case.together().grad_fn is None


@pytest.mark.parametrize("buffer", BUFFERS)
def test_saved_tensors_are_the_inputs_gate_up_and_low_products(buffer: str) -> None:
    case, saved = Case(buffer=buffer, has_more=True), list[Tensor]()
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        output = case.together()
    given = {one.data_ptr() for one in (*case.named.values(), case.offsets, *case.order[:-1])}
    rows = case.live if buffer == "dynamic" else CAPACITY
    own = sorted(tuple(one.shape) for one in saved if one.data_ptr() not in given and one.numel() > 1)
    copies = [(rows,), (rows, HIDDEN)] if buffer == "ordered" else []
    assert own == sorted([*copies, (rows, RANK), (rows, RANK), (rows, 2 * FFN)])
    assert_equal(case.live_grads(output), case.live_grads(case.apart()))


@pytest.mark.parametrize("hooked", [False, True])
def test_a_second_backward_needs_a_retained_graph(hooked: bool) -> None:
    case = Case(has_more=True)

    def output() -> Tensor:
        if not hooked:
            return case.together()
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return case.together()

    kept = output()
    assert_equal(case.live_grads(kept, retain_graph=True), case.live_grads(kept))
    with pytest.raises(RuntimeError, match="second time"):
        case.live_grads(kept)


def test_saved_rows_are_freed_by_backward() -> None:
    case = Case(has_more=True)
    output = case.together()
    saved = output.grad_fn.saved
    assert set(saved._held) == {"rows", "low1", "gate_up", "scale", "low2"}
    case.live_grads(output)
    assert not saved._held


@pytest.mark.parametrize("name", ["x", "probs", "weight1", "weight2"])
def test_an_argument_that_is_changed_before_backward_is_an_error(name: str) -> None:
    case = Case(buffer="dynamic")
    output = case.together()
    with torch.no_grad():
        case.named[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize(
    "activation", [ACTIVATIONS["by autograd"], ACTIVATIONS["plain"], UNNAMED], ids=["gelu", "plain", "unnamed"]
)
def test_second_derivatives_of_dynamic_rows_are_those_of_torch(activation: GatedActivation) -> None:
    case = Case(activation, buffer="dynamic", dtype=torch.float64)

    def plainly() -> Tensor:
        rows = zip(
            case.x.split(case.order.rows_per_group.tolist()), case.probs.split(case.order.rows_per_group.tolist())
        )
        parts = [activation(x @ w1, p) @ w2 for (x, p), w1, w2 in zip(rows, case.fcs[0].weight, case.fcs[1].weight)]
        return torch.cat(parts)

    def twice(output: Tensor) -> list[Tensor]:
        first = case.live_grads(output, create_graph=True)
        return list(torch.autograd.grad(sum(one.square().sum() for one in first), [*case.named.values()]))

    for one, same in zip(twice(case.together()), twice(plainly()), strict=True):
        torch.testing.assert_close(one, same, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("buffer, has_more", [("ordered", False), ("dynamic", True), ("dynamic", False)])
def test_other_second_derivatives_are_refused(buffer: str, has_more: bool) -> None:
    case = Case(buffer=buffer, has_more=has_more)
    (found,), (expected,) = (
        torch.autograd.grad(case.together().square().sum(), [case.x], create_graph=again) for again in (True, False)
    )
    assert torch.equal(found, expected)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.square().sum().backward()


@pytest.mark.parametrize("has_more", [False, True])
@pytest.mark.parametrize("buffer", BUFFERS)
def test_owners_receive_the_gradients_of_matrices(buffer: str, has_more: bool) -> None:
    case = Case(buffer=buffer, has_more=has_more)
    owned = [name for name in ("weight1", "lora_a1", "weight2", "lora_a2") if name in case.named]
    expected = dict(zip(owned, case.live_grads(case.apart(), wanted=owned)))
    taken: dict[str, Tensor] = {}

    def owner_of(name: str) -> GradOwner:
        main_grad = torch.ones_like(case.named[name])

        def take(grad: WeightGrad) -> None:
            grad.add_to(main_grad, scale=0.5, is_zero=False)
            taken[name] = main_grad

        return GradOwner(main_grad, take)

    for name in owned:
        set_grad_owner(case.named[name], owner_of(name))
    output = case.together()
    output.backward(normal(*output.shape))
    assert [name for name, one in case.named.items() if one.grad is None] == sorted(owned, key=[*case.named].index)
    for name, main_grad in taken.items():
        torch.testing.assert_close(main_grad, 1 + 0.5 * expected[name])
    # A gradient that is asked for is returned.
    assert_equal(case.live_grads(case.together(), wanted=owned), list(expected.values()))


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("has_more", [False, True])
def test_a_recomputed_forward_ends_before_fc2(buffer: str, has_more: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(buffer=buffer, has_more=has_more)
    expected, products = case.live_grads(case.together()), list[int]()

    def counted(rows: Tensor, weight: Tensor, **options: Any) -> Tensor:
        products.append(weight.shape[2])
        return expert_function_multiply(rows, weight, **options)

    expert_function_multiply = expert_function.multiply
    monkeypatch.setattr(expert_function, "multiply", counted)
    output = checkpoint(case.together, use_reentrant=False)
    forward, products[:] = list(products), []
    assert_equal(case.live_grads(output), expected)
    fc1 = [RANK, 2 * FFN, RANK] if has_more else [2 * FFN]
    assert products == fc1 and forward == [*fc1, HIDDEN]


@pytest.mark.parametrize("buffer", BUFFERS)
def test_parts_save_their_own_tensors(buffer: str) -> None:
    case = Case(buffer=buffer, has_more=True)
    seen: dict[str, list[tuple[int, ...]]] = {"expert_fc1": [], "moe_act": []}

    def part(name: str) -> Callable[..., Any]:
        def pack(tensor: Tensor) -> Tensor:
            seen[name].append(tuple(tensor.shape))
            return tensor.clone()

        def run(function: Callable[..., Any], *args: Any) -> Any:
            assert torch.is_grad_enabled()
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                return function(*args)

        return run

    case.parts = replace(LayerParts(), expert_fc1=part("expert_fc1"), moe_act=part("moe_act"))
    output, rows = case.together(), case.live if buffer == "dynamic" else CAPACITY
    assert seen == {
        "expert_fc1": [(rows, HIDDEN), (rows, RANK)],
        "moe_act": [(rows, 2 * FFN), (rows,), (rows, RANK)],
    }
    assert_equal(case.live_grads(output), case.live_grads(case.apart()))


def test_a_backward_with_create_graph_inside_of_hooks_has_first_derivatives() -> None:
    case = Case(buffer="dynamic")
    expected = case.live_grads(case.together())
    output = checkpoint(case.together, use_reentrant=False)
    assert_equal(case.live_grads(output, create_graph=True), expected)


def test_second_derivatives_with_a_frozen_fc1_are_refused() -> None:
    case = Case(UNNAMED, buffer="dynamic", dtype=torch.float64)
    case.named["weight1"].requires_grad_(False)
    with pytest.raises(RuntimeError, match="fc1 is frozen: their input is not saved"):
        case.live_grads(case.together(), create_graph=True)


@pytest.mark.parametrize("buffer", BUFFERS)
def test_nothing_is_passed_to_hooks_without_gradients(buffer: str) -> None:
    case, packed = Case(buffer=buffer, has_more=True), list[Tensor]()
    parts = {name: lambda function, *args: packed.extend(args) or function(*args) for name in ("expert_fc1", "moe_act")}
    case.parts = replace(LayerParts(), **parts)
    with torch.no_grad(), saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
        case.together()
    assert not packed


@pytest.mark.parametrize("buffer", BUFFERS)
def test_computed_weights_are_freed_by_backward(buffer: str) -> None:
    case = Case(buffer=buffer)
    weights = [fc.weight * 1.0 for fc in case.fcs]
    alive = [weakref.ref(weight) for weight in weights]
    case.fcs = [ExpertLinear(weight) for weight in weights]
    output = case.together()
    loss = output.sum()
    del weights, output
    case.fcs = []
    loss.backward()
    assert [one() for one in alive] == [None, None] and loss.grad_fn is not None


def test_arguments_of_static_buffers_are_refused_elsewhere() -> None:
    case = Case(buffer="dynamic")
    given: dict[str, Any] = {"math": case.math, "parts": case.parts, "offsets": case.offsets}
    with pytest.raises(ValueError, match="order is of a static buffer, but moe_expert_rank_capacity_factor is None"):
        expert_outputs(case.x, case.probs, *case.fcs, **given, order=case.order)
    stash = PagedStash(PagePool("cpu", PoolLayout(page_bytes=64, device_pages=9)))
    stashed = stash.begin("layer", case.order.num_rows, max_rows=CAPACITY)
    with pytest.raises(ValueError, match="stashed stores rows .* order is None: pass the order"):
        expert_outputs(case.x, case.probs, *case.fcs, **given, stashed=stashed)


def test_stashed_rows_refuse_other_tensors_and_other_calls() -> None:
    stash, num_rows = PagedStash(PagePool("cpu", PoolLayout(page_bytes=64, device_pages=99))), torch.tensor([3])

    def begun() -> StashedRows:
        stashed = stash.begin("layer", num_rows, max_rows=CAPACITY)
        assert stashed is not None
        return stashed

    rows, wide = torch.rand(CAPACITY, 4), torch.rand(CAPACITY + 1, 8)
    for wrong in (wide[1:], wide[:CAPACITY, :4], wide, rows.expand(2, *rows.shape)[0].t()):
        with pytest.raises(ValueError, match=r"must be contiguous, with offset 0 and max_rows \(12\) rows"):
            begun().save([wrong], rows.clone(), recompute=None, num_sources=0)
    for number in (0, 2):
        with pytest.raises(ValueError, match=rf"num_sources \({number}\) must be 1 to 1, the number of inputs"):
            begun().save([rows], rows.clone(), recompute=print, num_sources=number)
    with pytest.raises(ValueError, match=r"num_rows \(3\) must be a tensor, \[1\], int64, on cpu"):
        stash.begin("layer", 3, max_rows=CAPACITY)
    stashed = begun()
    with pytest.raises(RuntimeError, match="'layer': rows were not saved; call save in forward"):
        stashed.read(keep=False)
    stashed.save([rows], rows.clone(), recompute=None, num_sources=0)
    with pytest.raises(RuntimeError, match="'layer': rows were saved already"):
        stashed.save([rows], rows.clone(), recompute=None, num_sources=0)
    assert all(torch.equal(one[:3], rows[:3]) for one in stashed.read(keep=False))
    for max_rows in (-1, 2.5, True):
        with pytest.raises(ValueError, match="max_rows"):
            stash.begin("layer", num_rows, max_rows=max_rows)
