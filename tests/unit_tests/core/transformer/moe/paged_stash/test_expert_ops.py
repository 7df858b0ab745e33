"""Recomputation is bit-identical to forward and leaves rows beyond the live ones unchanged; gradients are exact."""

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.fusions.gated_activation import ActivationForm, activate
from megatron.core.fusions.gated_activation import ops as activation_ops
from megatron.core.transformer.moe.paged_stash.expert_ops import (
    add_low_rank,
    gated_activation,
    grouped_gemm,
    ops,
    recompute_act,
    recompute_gate_up,
)

# Rows per expert, and rows of the buffer: empty, all rows in one expert, a full buffer, a buffer with spare capacity.
ROUTINGS = [([3, 0, 9, 5], 40), ([0, 33, 0], 33), ([0, 0], 4), ([1, 70, 0, 2], 73)]
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_geglu": lambda x: x * torch.sigmoid(1.702 * x),
    "squared_relu": lambda x: F.relu(x).square(),
}
PLAIN |= {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": PLAIN["geglu_tanh"], "quick_gelu": PLAIN["quick_geglu"]}
# Options of gpt-oss, with a limit that many values exceed.
CLAMPED = {"clamp": 1.5, "offset": 1.0}
# Relative error of one rounding to the dtype.
TOLERANCE = {torch.float32: 0, torch.bfloat16: 2**-8, torch.float16: 2**-11}
SET, CLEAR = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


@pytest.fixture(params=["cpu", "triton"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yields the CPU operators, or the Triton launchers of the same names on CPU tensors."""
    if request.param == "cpu":
        activations: Any = activation_ops
        products: Any = ops
    else:
        load = request.getfixturevalue("interpreted")
        activations = load("triton_activations", of="megatron.core.fusions")
        products = load("triton_grouped_gemm")
    names = ("grouped_gemm", "grouped_gemm_weight_grad", "gate_up_from_x", "add_low_rank")
    named = {name: getattr(products, name) for name in names}
    for name in ("gated_activation", "gated_activation_backward"):
        named[name] = getattr(activations, name)
    yield SimpleNamespace(**named)


def poisoned(rows: int, capacity: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns random values in the first rows and NaN in the others."""
    values = torch.randn(capacity, *shape, generator=torch.Generator().manual_seed(rows + capacity)) * 2
    values[rows:] = math.nan
    return values.to(dtype)


def weights(experts: int, inner: int, outer: int, *, dtype: torch.dtype, transposed: bool = False) -> Tensor:
    values = torch.randn(experts, outer, inner, generator=torch.Generator().manual_seed(1)).to(dtype)
    return values.transpose(1, 2) if transposed else values.transpose(1, 2).contiguous()


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0, dtype=torch.int32)


def by_expert(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """Multiplies each expert's live rows by its weight, in fp64."""
    parts = x[: sum(counts)].double().split(counts)
    return torch.cat([part @ one.double() for part, one in zip(parts, weight)])


def limited(gate: Tensor, up: Tensor, *, clamp: float = math.inf, offset: float = 0) -> tuple[Tensor, Tensor]:
    return gate.clamp(max=clamp), up.clamp(min=-clamp, max=clamp) + offset


def near(found: Tensor, expected: Tensor, *, inner: int = 1) -> bool:
    """Returns whether errors are within one rounding of the dtype plus the rounding of sums over `inner` terms."""
    bound = TOLERANCE[found.dtype] * expected.abs() + 2e-6 * math.sqrt(inner) * (1 + expected.abs())
    return bool(((found.double() - expected.double()).abs() <= bound).all())


@pytest.mark.slow
@pytest.mark.parametrize(("counts", "capacity"), ROUTINGS)
@pytest.mark.parametrize(
    ("inner", "outer", "dtype", "transposed"),
    [
        (16, 24, torch.float32, False),
        (200, 136, torch.float16, True),
        (7, 5, torch.float16, False),
        (70, 66, torch.float32, True),
        (48, 80, torch.float32, True),  # both widths are divisible by 16, so loads are unmasked
        (64, 272, torch.float16, False),
    ],
)
def test_gate_up_again_is_the_forwards(
    kernels: Any,
    counts: list[int],
    capacity: int,
    inner: int,
    outer: int,
    dtype: torch.dtype,
    transposed: bool,
) -> None:
    rows, offsets = sum(counts), ends_of(counts)
    x = poisoned(rows, capacity, inner, dtype=dtype)
    weight = weights(len(counts), inner, outer, dtype=dtype, transposed=transposed)
    forward = torch.full((capacity, outer), math.nan, dtype=dtype)
    again = torch.full((capacity, outer), 7, dtype=dtype)
    kernels.grouped_gemm(x, weight, offsets=offsets, out=forward)
    assert near(forward[:rows], by_expert(x, weight, counts), inner=inner) and forward[rows:].isnan().all()
    kernels.gate_up_from_x(x, weight, offsets=offsets, needed=CLEAR, out=again)
    assert (again == 7).all()
    kernels.gate_up_from_x(x, weight, offsets=offsets, needed=SET, out=again)
    assert torch.equal(again[:rows], forward[:rows]) and (again[rows:] == 7).all()
    bias = poisoned(len(counts), len(counts), outer, dtype=dtype)
    ops.add_expert_bias(forward, bias, scale=None, offsets=offsets, share=1.0)
    kernels.gate_up_from_x(x, weight, offsets=offsets, needed=SET, out=again, bias=bias)
    assert torch.equal(again[:rows], forward[:rows]) and (again[rows:] == 7).all()
    grad = poisoned(rows, capacity, outer, dtype=dtype)
    found = torch.full_like(weight, math.nan)
    kernels.grouped_gemm_weight_grad(x, grad, offsets=offsets, out=found)
    for one, a, b in zip(found, x[:rows].split(counts), grad[:rows].split(counts)):
        assert near(one, a.double().T @ b.double(), inner=capacity)


@pytest.mark.parametrize(("counts", "capacity"), ROUTINGS)
@pytest.mark.parametrize("widths", [(48, 80), (7, 5)], ids=str)
@pytest.mark.parametrize(("dtype", "out_dtype"), [(torch.float16, torch.float32), (torch.float32, torch.float32)])
def test_a_gradient_is_scaled_and_added_with_one_rounding(
    kernels: Any,
    counts: list[int],
    capacity: int,
    widths: tuple[int, int],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> None:
    rows, offsets, experts = sum(counts), ends_of(counts), len(counts)
    x, grad = (poisoned(rows, capacity, width, dtype=dtype) for width in widths)
    before = weights(experts, *widths, dtype=out_dtype)
    pairs = zip(x[:rows].double().split(counts), grad[:rows].double().split(counts))
    product = torch.stack([a.T @ b for a, b in pairs])
    for one in (kernels, ops):
        for scale, is_added in ((1.0, True), (0.3, True), (0.3, False)):
            found = before.clone() if is_added else torch.full_like(before, math.nan)
            one.grouped_gemm_weight_grad(x, grad, offsets=offsets, out=found, scale=scale, is_added=is_added)
            assert near(found, scale * product + before.double() * is_added, inner=capacity)


@pytest.mark.parametrize(("counts", "capacity"), ROUTINGS)
@pytest.mark.parametrize(("rank", "dtype"), [(2, torch.float32), (80, torch.float32), (8, torch.float16)])
def test_what_adapters_add_again_is_the_forwards(
    kernels: Any, counts: list[int], capacity: int, rank: int, dtype: torch.dtype
) -> None:
    rows, offsets, scale, outer = sum(counts), ends_of(counts), 0.75, 70
    low = poisoned(rows, capacity, rank, dtype=dtype)
    product = poisoned(rows, capacity, outer, dtype=dtype) * 3
    weight = weights(len(counts), rank, outer, dtype=dtype)
    forward, again = product.clone(), product.clone()
    kernels.add_low_rank(forward, low, weight=weight, offsets=offsets, scale=scale)
    expected = product[:rows].double() + scale * by_expert(low, weight, counts)
    assert near(forward[:rows], expected, inner=rank) and forward[rows:].isnan().all()
    kernels.add_low_rank(again, low, weight=weight, offsets=offsets, scale=scale, needed=CLEAR)
    assert torch.equal(again[:rows], product[:rows])
    kernels.add_low_rank(again, low, weight=weight, offsets=offsets, scale=scale, needed=SET)
    assert torch.equal(again[:rows], forward[:rows]) and again[rows:].isnan().all()


def test_gradients_of_what_adapters_add_are_those_of_autograd() -> None:
    counts, offsets = [2, 0, 3], ends_of([2, 0, 3])
    rows, low, weight = (
        value.double().requires_grad_()
        for value in (poisoned(5, 5, 4), poisoned(5, 5, 2), weights(3, 2, 4, dtype=torch.float32))
    )

    def summed(rows: Tensor, low: Tensor, weight: Tensor) -> Tensor:
        return add_low_rank(rows * 1, low, weight=weight, offsets=offsets, scale=0.5)

    assert torch.autograd.gradcheck(summed, (rows, low, weight))
    torch.testing.assert_close(summed(rows, low, weight), rows + 0.5 * by_expert(low, weight, counts))
    for wrong, words in ((torch.zeros(3, 2, 5).double(), r"weight \[3, 2, 5\]"), (weight.float(), "float32")):
        with pytest.raises(ValueError, match=words):
            add_low_rank(rows * 1, low, weight=wrong, offsets=offsets, scale=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "dtype", "ffn", "limits"),
    [
        *((name, torch.float32, 40, {}) for name in PLAIN),
        *((name, torch.bfloat16, 33, {}) for name in ("swiglu", "gelu")),
        *((name, torch.float16, 4100, {}) for name in ("swiglu", "squared_relu")),
        ("quick_geglu", torch.float32, 40, CLAMPED),
        ("quick_geglu", torch.bfloat16, 33, CLAMPED),
        ("swiglu", torch.float32, 40, {"clamp": 1.5}),
        ("geglu", torch.float32, 40, {"offset": -0.5}),
    ],
)
def test_act_again_is_the_forwards(
    kernels: Any, activation: str, dtype: torch.dtype, ffn: int, limits: dict[str, float]
) -> None:
    is_gated, capacity = "glu" in activation, 9
    form: dict[str, Any] = {"activation": activation, **limits}
    for rows in (0, 5, 9):
        num_rows = torch.tensor([rows])
        gate_up = poisoned(rows, capacity, ffn * (1 + is_gated), dtype=dtype)
        scale = poisoned(rows, capacity)
        forward = torch.full((capacity, ffn), math.nan, dtype=dtype)
        again = torch.full((capacity, ffn), 7, dtype=dtype)
        kernels.gated_activation(gate_up, scale, num_rows=num_rows, out=forward, **form)
        kernels.gated_activation(gate_up, scale, num_rows=num_rows, needed=CLEAR, out=again, **form)
        assert (again == 7).all()
        kernels.gated_activation(gate_up, scale, num_rows=num_rows, needed=SET, out=again, **form)
        assert torch.equal(again[:rows], forward[:rows]) and (again[rows:] == 7).all()
        wide, weight = (value[:rows].double().requires_grad_() for value in (gate_up, scale))
        gate, up = limited(wide[:, :ffn], wide[:, ffn:], **limits) if is_gated else (wide, 1)
        act = PLAIN[activation](gate) * up * weight[:, None]
        assert near(forward[:rows], act.detach()) and forward[rows:].isnan().all()
        grad = poisoned(rows, capacity, ffn, dtype=dtype)
        found = torch.full_like(gate_up, math.nan), torch.full_like(scale, math.nan)
        kernels.gated_activation_backward(
            grad,
            gate_up,
            scale=scale,
            num_rows=num_rows,
            grad_gate_up=found[0],
            grad_scale=found[1],
            **form,
        )
        for one, expected in zip(found, torch.autograd.grad(act, (wide, weight), grad[:rows].double())):
            assert near(one[:rows], expected, inner=8 * ffn) and one[rows:].isnan().all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("counts", "capacity"), ROUTINGS)
def test_grouped_gemm_has_the_bits_of_torchs(
    counts: list[int], capacity: int, dtype: torch.dtype, transposed: bool
) -> None:
    rows, offsets = sum(counts), ends_of(counts)
    x = poisoned(rows, capacity, 64, dtype=dtype).requires_grad_()
    weight = weights(len(counts), 64, 48, dtype=dtype, transposed=transposed).requires_grad_()
    ours, theirs = grouped_gemm(x, weight, offsets=offsets), F.grouped_mm(x[:rows], weight, offs=offsets)
    grad = poisoned(rows, capacity, 48, dtype=dtype)
    found = torch.autograd.grad(ours, (x, weight), grad)
    expected = torch.autograd.grad(theirs, (x, weight), grad[:rows])
    assert torch.equal(ours[:rows], theirs) and torch.equal(found[1], expected[1])
    assert torch.equal(found[0][:rows], expected[0][:rows])
    assert found[1].stride() == weight.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_swiglu_has_the_bits_of_the_trainers(dtype: torch.dtype) -> None:
    gate_up, scale = poisoned(700, 700, 2 * 403, dtype=dtype), poisoned(700, 700)
    ours = gated_activation(gate_up, scale, num_rows=torch.tensor([700]))
    assert torch.equal(ours, weighted_bias_swiglu_impl(gate_up, None, scale[:, None]))
    ours = gated_activation(gate_up, scale, num_rows=torch.tensor([700]), clamp=1.5, offset=1.0)
    torch.testing.assert_close(ours, activate(gate_up, scale, form=ActivationForm("swiglu", **CLAMPED)))


@pytest.mark.parametrize(("activation", "limits"), [*((name, {}) for name in PLAIN), ("quick_geglu", CLAMPED)])
def test_gradients_are_exact(activation: str, limits: dict[str, float]) -> None:
    counts, ffn = [2, 0, 3], 3
    x = poisoned(5, 5, 4, dtype=torch.float64).requires_grad_()
    scale = poisoned(5, 5, dtype=torch.float64).requires_grad_()
    fc1 = weights(3, 4, ffn * (1 + ("glu" in activation)), dtype=torch.float64).requires_grad_()
    fc2 = weights(3, ffn, 4, dtype=torch.float64, transposed=True).requires_grad_()
    assert torch.autograd.gradcheck(lambda *inputs: mlp(inputs, counts, activation, **limits), (x, scale, fc1, fc2))


@pytest.mark.parametrize("activation", ["geglu", "geglu_tanh", "swiglu", "quick_geglu"])
def test_gradients_of_clamped_rows_are_near_those_of_fp64(activation: str) -> None:
    """In fp32, gradients are computed in place, in halves of the rows of their buffer."""
    gate_up, grad, num_rows = poisoned(9, 9, 80), poisoned(9, 9, 40), torch.tensor([9])
    grads = []
    for dtype in (torch.float32, torch.float64):
        leaf = gate_up.to(dtype).requires_grad_()
        act = gated_activation(leaf, None, num_rows=num_rows, activation=activation, **CLAMPED)
        grads += torch.autograd.grad(act, leaf, grad.to(dtype))
    torch.testing.assert_close(grads[0].double(), grads[1], rtol=1e-4, atol=1e-5)


def mlp(inputs: tuple[Tensor, ...], counts: list[int], activation: str = "swiglu", **limits: Any) -> Tensor:
    x, scale, fc1, fc2 = inputs
    offsets, num_rows = ends_of(counts), torch.tensor([sum(counts)])
    gate_up = grouped_gemm(x, fc1, offsets=offsets)
    act = gated_activation(gate_up, scale, num_rows=num_rows, activation=activation, **limits)
    return grouped_gemm(act, fc2, offsets=offsets)


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_else_is_kept_for_backward(frozen: bool) -> None:
    counts = [4, 2]
    x, scale = poisoned(6, 6, 8).requires_grad_(), poisoned(6, 6).requires_grad_()
    fc1, fc2 = (weights(2, 8, width, dtype=torch.float32).requires_grad_(not frozen) for width in (16, 8))
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.extend([tensor]), lambda nothing: x):
        mlp((x, scale, fc1, fc2), counts)
    rows = sorted(tuple(one.shape) for one in kept if one.shape[0] == 6)
    assert rows == ([(6,), (6, 16)] if frozen else [(6,), (6, 8), (6, 8), (6, 16)])  # scale, x, act, gate_up
    assert sorted(one.numel() for one in kept if one.shape[0] != 6) == [1, 2, 2, 128, 256]


def test_marks_write_what_forward_gave() -> None:
    counts, capacity = [3, 0, 2], 8
    offsets, num_rows = ends_of(counts), torch.tensor([5])
    x, scale, weight = poisoned(5, capacity, 6), poisoned(5, capacity), weights(3, 6, 8, dtype=torch.float32)
    gate_up = grouped_gemm(x, weight.requires_grad_(), offsets=offsets)
    again, act = torch.zeros_like(gate_up), torch.zeros(capacity, 4)
    recompute_gate_up(weight, offsets)(again, SET, x)
    assert torch.equal(again[:5], gate_up[:5])
    for rest in ([scale], []):
        recompute_act(num_rows, "geglu", clamp=1.5, offset=1.0)(act, SET, again, *rest)
        scales = rest[0] if rest else None
        forward = gated_activation(gate_up, scales, num_rows=num_rows, activation="geglu", **CLAMPED)
        assert torch.equal(act[:5], forward[:5])


def test_mistakes_are_named() -> None:
    x, weight, offsets = torch.zeros(4, 6), torch.zeros(2, 6, 8), torch.zeros(2, dtype=torch.int32)
    num_rows = torch.tensor([4])
    for wrong, words in (
        (lambda: grouped_gemm(x, weight.mT, offsets=offsets), r"x \[4, 6\], weight \[2, 8, 6\]"),
        (lambda: grouped_gemm(x, weight, offsets=offsets[:1]), r"offsets \[1\]"),
        (lambda: grouped_gemm(x, weight.bfloat16(), offsets=offsets), "weight torch.bfloat16"),
        (lambda: grouped_gemm(x, weight, offsets=offsets.long()), "offsets must be torch.int32"),
        (lambda: gated_activation(x, None, num_rows=num_rows, activation="swish"), "'swish'.* swiglu, geglu"),
        (lambda: gated_activation(x[:, :5], None, num_rows=num_rows), r"\[4, 5\].*even"),
        (lambda: gated_activation(x, x[:, :1], num_rows=num_rows), "one value for each row"),
        (lambda: recompute_act(num_rows, "relu6"), "'relu6'"),
        (lambda: recompute_act(num_rows, "gelu", clamp=7.0), "clamp is 7.0 .* gelu is not gated"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong()


@pytest.mark.slow
def test_operators_keep_torchs_rules() -> None:
    x, weight, offsets, num_rows = poisoned(4, 5, 6), weights(2, 6, 8, dtype=torch.float32), ends_of([1, 3]), SET * 4
    gate_up, scale, act = torch.zeros(5, 8), torch.ones(5), torch.zeros(5, 4)
    rows = {"num_rows": num_rows, "activation": "swiglu"}
    grads = {"grad_gate_up": torch.zeros(5, 8), "grad_scale": torch.zeros(5)}
    added = {"weight": weights(2, 6, 8, dtype=torch.float32), "offsets": offsets, "scale": 0.5, "needed": SET}
    for operator, sources, named in (
        (ops.add_low_rank, (gate_up, x), added),
        (ops.gate_up_from_x, (x, weight), {"offsets": offsets, "needed": SET, "out": gate_up}),
        (ops.grouped_gemm, (x, weight), {"offsets": offsets, "out": gate_up}),
        (ops.grouped_gemm_weight_grad, (x, gate_up), {"offsets": offsets, "out": torch.zeros(2, 6, 8)}),
        (activation_ops.gated_activation, (gate_up, scale), {**rows, "needed": SET, "out": act}),
        (activation_ops.gated_activation, (gate_up, None), {**rows, "out": act}),
        (activation_ops.gated_activation, (gate_up, None), {**rows, "num_rows": None, "out": act}),
        (activation_ops.gated_activation_backward, (act, gate_up), {**rows, "scale": scale, **grads}),
    ):
        torch.library.opcheck(operator.default, sources, named)


def test_second_derivatives_of_recomputable_functions_are_refused() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(1, 8, 16, requires_grad=True)
    offsets = torch.tensor([4], dtype=torch.int32)
    gate_up = grouped_gemm(x, weight, offsets=offsets)
    for y in (gate_up, gated_activation(gate_up, None, num_rows=offsets.long())):
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()
