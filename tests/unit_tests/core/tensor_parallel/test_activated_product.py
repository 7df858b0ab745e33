"""Products of an activation's result: the bits of separate functions, without the result among the saved tensors."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron.core.activations import squared_relu
from megatron.core.fusions.gated_activation import GatedActivation
from megatron.core.tensor_parallel.activated_product import LinearProduct, activated_products
from megatron.core.tensor_parallel.weight_grads import GradOwner, WeightGrad, set_grad_owner
from megatron.core.transformer.moe.grouped_gemm import GroupedProduct, grouped_gemm

ACTIVATIONS = {
    "fused": GatedActivation(F.silu, True),
    "clamped": GatedActivation(F.silu, True, clamp=0.5, offset=1.0),
    "by autograd": GatedActivation(F.gelu, True),
    "plain": GatedActivation(squared_relu, False),
    "unnamed": GatedActivation(torch.tanh, True),
}
ROWS, FFN = 12, 16
ENDS = (5, 5, 12)  # the second expert has no rows


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


class Case:
    """Arguments of a product, and the same product by separate functions."""

    def __init__(self, activation: GatedActivation, *, is_grouped: bool, has_scale: bool, dtype: torch.dtype) -> None:
        self.activation = activation
        width = FFN * (2 if activation.is_gated else 1)
        self.x = normal(ROWS, width, dtype=dtype).requires_grad_()
        wide = torch.promote_types(dtype, torch.float32)
        self.scale = normal(ROWS, dtype=wide).requires_grad_() if has_scale else None
        shapes = [(3, FFN, 16), (3, FFN, 8)] if is_grouped else [(16, FFN), (8, FFN)]
        self.weights = [nn.Parameter(normal(*shape, dtype=dtype)) for shape in shapes]
        self.offsets = torch.tensor(ENDS, dtype=torch.int32) if is_grouped else None
        self.product = GroupedProduct() if is_grouped else LinearProduct()

    def together(self) -> tuple[Tensor, ...]:
        return activated_products(
            self.activation, self.x, self.scale, self.weights, product=self.product, offsets=self.offsets
        )

    def apart(self) -> tuple[Tensor, ...]:
        act = self.activation(self.x, self.scale)
        if self.offsets is None:
            return tuple(F.linear(act, weight) for weight in self.weights)
        return tuple(grouped_gemm(act, weight, offsets=self.offsets) for weight in self.weights)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, *([] if self.scale is None else [self.scale]), *self.weights]


def differentiated(products: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor]:
    grads = [normal(*one.shape, dtype=one.dtype) for one in products]
    return [*products, *torch.autograd.grad(products, leaves, grads)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("is_grouped", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("has_scale", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_results_and_gradients_have_the_bits_of_separate_functions(
    activation: str, is_grouped: bool, has_scale: bool, dtype: torch.dtype
) -> None:
    case = Case(ACTIVATIONS[activation], is_grouped=is_grouped, has_scale=has_scale, dtype=dtype)
    expected = differentiated(case.apart(), case.leaves)
    for one, same in zip(differentiated(case.together(), case.leaves), expected, strict=True):
        assert torch.equal(one, same)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("is_grouped", [False, True], ids=["dense", "experts"])
def test_the_result_of_the_activation_is_not_saved(activation: str, is_grouped: bool) -> None:
    case = Case(ACTIVATIONS[activation], is_grouped=is_grouped, has_scale=True, dtype=torch.float32)
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        case.together()
    expected = [*case.leaves, *([] if case.offsets is None else [case.offsets])]
    assert {one.data_ptr() for one in saved} == {one.data_ptr() for one in expected}


@pytest.mark.parametrize("frozen", [["x"], ["scale"], ["weights"], ["x", "scale"], ["second"]], ids=str)
@pytest.mark.parametrize("activation", ["fused", "by autograd"])
@pytest.mark.parametrize("is_grouped", [False, True], ids=["dense", "experts"])
def test_frozen_arguments_receive_no_gradient(frozen: list[str], activation: str, is_grouped: bool) -> None:
    case = Case(ACTIVATIONS[activation], is_grouped=is_grouped, has_scale=True, dtype=torch.float32)
    assert case.scale is not None
    named = {"x": [case.x], "scale": [case.scale], "weights": case.weights, "second": case.weights[1:]}
    for name in frozen:
        for tensor in named[name]:
            tensor.requires_grad_(False)
    wanted = [one for one in case.leaves if one.requires_grad]
    products = case.together()
    torch.autograd.backward(products, [normal(*one.shape) for one in products])
    assert [one.grad is None for one in case.leaves] == [not one.requires_grad for one in case.leaves]
    expected = differentiated(case.apart(), wanted)[len(products) :]
    for one, same in zip(wanted, expected, strict=True):
        assert one.grad is not None and torch.equal(one.grad, same)


@pytest.mark.parametrize("activation", ["by autograd", "plain", "unnamed"])
@pytest.mark.parametrize("is_grouped", [False, True], ids=["dense", "experts"])
def test_second_derivatives_are_those_of_separate_functions(activation: str, is_grouped: bool) -> None:
    case = Case(ACTIVATIONS[activation], is_grouped=is_grouped, has_scale=True, dtype=torch.float64)

    def twice(products: tuple[Tensor, ...]) -> list[Tensor]:
        first = torch.autograd.grad(sum(one.square().sum() for one in products), case.leaves, create_graph=True)
        return list(torch.autograd.grad(sum(one.square().sum() for one in first), case.leaves))

    for one, same in zip(twice(case.together()), twice(case.apart()), strict=True):
        torch.testing.assert_close(one, same, rtol=1e-12, atol=1e-12)


def test_second_derivatives_of_a_fused_activation_are_refused() -> None:
    case = Case(ACTIVATIONS["fused"], is_grouped=False, has_scale=False, dtype=torch.float32)
    product, _ = case.together()
    (grad,) = torch.autograd.grad(product.square().sum(), case.x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("is_grouped", [False, True], ids=["dense", "experts"])
def test_owners_receive_the_gradients_of_weights(is_grouped: bool) -> None:
    case = Case(ACTIVATIONS["fused"], is_grouped=is_grouped, has_scale=True, dtype=torch.float32)
    expected = differentiated(case.apart(), case.weights)[2:]
    taken: list[Any] = []

    def owner_of(weight: nn.Parameter) -> GradOwner:
        main_grad = torch.ones_like(weight)

        def take(grad: WeightGrad) -> None:
            grad.add_to(main_grad, scale=0.5, is_zero=False)
            taken.append(main_grad)

        return GradOwner(main_grad, take)

    for weight in case.weights:
        set_grad_owner(weight, owner_of(weight))
    products = case.together()
    torch.autograd.backward(products, [normal(*one.shape) for one in products])
    assert [weight.grad for weight in case.weights] == [None, None]
    for main_grad, grad in zip(taken, expected, strict=True):
        torch.testing.assert_close(main_grad, 1 + 0.5 * grad)


class Counting(LinearProduct):
    """Counts the products that it computes."""

    def __init__(self) -> None:
        self.count = 0

    def multiply(self, rows: Tensor, weight: Tensor, offsets: Tensor | None) -> Tensor:
        self.count += 1
        return super().multiply(rows, weight, offsets)


@pytest.mark.parametrize("frozen", [(), ("x",), ("x", "scale"), ("weights",)], ids=str)
@pytest.mark.parametrize("activation", ["fused", "by autograd"])
def test_a_recomputed_forward_ends_before_the_products(frozen: tuple[str, ...], activation: str) -> None:
    case = Case(ACTIVATIONS[activation], is_grouped=False, has_scale=True, dtype=torch.float32)
    assert case.scale is not None
    named = {"x": [case.x], "scale": [case.scale], "weights": case.weights}
    for name in frozen:
        for tensor in named[name]:
            tensor.requires_grad_(False)
    wanted = [one for one in case.leaves if one.requires_grad]
    expected = differentiated(case.together(), wanted)
    case.product = product = Counting()
    found = differentiated(checkpoint(case.together, use_reentrant=False), wanted)
    assert product.count == len(case.weights)
    for one, same in zip(found, expected, strict=True):
        assert torch.equal(one, same)


def test_a_recomputed_forward_with_later_tensors_has_the_same_gradients() -> None:
    case = Case(ACTIVATIONS["clamped"], is_grouped=True, has_scale=True, dtype=torch.float32)

    def further() -> tuple[Tensor, ...]:
        return tuple(one.sigmoid() for one in case.together())

    expected = differentiated(further(), case.leaves)
    for one, same in zip(differentiated(checkpoint(further, use_reentrant=False), case.leaves), expected, strict=True):
        assert torch.equal(one, same)
