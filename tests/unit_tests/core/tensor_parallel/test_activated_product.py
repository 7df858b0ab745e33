"""A product of an activation's result: the bits of separate functions, without the result among the saved tensors."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron.core.activations import squared_relu
from megatron.core.fusions.gated_activation import GatedActivation
from megatron.core.tensor_parallel.activated_product import activated_product
from megatron.core.tensor_parallel.weight_grads import GradOwner, WeightGrad, set_grad_owner

ACTIVATIONS = {
    "fused": GatedActivation(F.silu, True),
    "clamped": GatedActivation(F.silu, True, clamp=0.5, offset=1.0),
    "by autograd": GatedActivation(F.gelu, True),
    "plain": GatedActivation(squared_relu, False),
    "unnamed": GatedActivation(torch.tanh, True),
}
ROWS, FFN, OUT = 12, 16, 8


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


class Case:
    """Arguments of a product, and the same product by separate functions."""

    def __init__(
        self, activation: GatedActivation, *, has_scale: bool = True, dtype: torch.dtype = torch.float32
    ) -> None:
        self.activation = activation
        width = FFN * (2 if activation.is_gated else 1)
        self.x = normal(ROWS, width, dtype=dtype).requires_grad_()
        wide = torch.promote_types(dtype, torch.float32)
        self.scale = normal(ROWS, dtype=wide).requires_grad_() if has_scale else None
        self.weight = nn.Parameter(normal(OUT, FFN, dtype=dtype))

    def together(self) -> Tensor:
        return activated_product(self.activation, self.x, self.scale, self.weight)

    def apart(self) -> Tensor:
        return F.linear(self.activation(self.x, self.scale), self.weight)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, *([] if self.scale is None else [self.scale]), self.weight]


def differentiated(product: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [product, *torch.autograd.grad(product, leaves, normal(*product.shape, dtype=product.dtype))]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_scale", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_results_and_gradients_have_the_bits_of_separate_functions(
    activation: str, has_scale: bool, dtype: torch.dtype
) -> None:
    case = Case(ACTIVATIONS[activation], has_scale=has_scale, dtype=dtype)
    expected = differentiated(case.apart(), case.leaves)
    for one, same in zip(differentiated(case.together(), case.leaves), expected, strict=True):
        assert torch.equal(one, same)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_result_of_the_activation_is_not_saved(activation: str) -> None:
    case, saved = Case(ACTIVATIONS[activation]), list[Tensor]()
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        case.together()
    assert {one.data_ptr() for one in saved} == {one.data_ptr() for one in case.leaves}


@pytest.mark.parametrize("frozen", [["x"], ["scale"], ["weight"], ["x", "scale"]], ids=str)
@pytest.mark.parametrize("activation", ["fused", "by autograd"])
def test_frozen_arguments_receive_no_gradient(frozen: list[str], activation: str) -> None:
    case = Case(ACTIVATIONS[activation])
    for name in frozen:
        getattr(case, name).requires_grad_(False)
    wanted = [one for one in case.leaves if one.requires_grad]
    product = case.together()
    product.backward(normal(*product.shape))
    assert [one.grad is None for one in case.leaves] == [not one.requires_grad for one in case.leaves]
    for one, same in zip(wanted, differentiated(case.apart(), wanted)[1:], strict=True):
        assert one.grad is not None and torch.equal(one.grad, same)


@pytest.mark.parametrize("activation", ["by autograd", "plain", "unnamed"])
def test_second_derivatives_are_those_of_separate_functions(activation: str) -> None:
    case = Case(ACTIVATIONS[activation], dtype=torch.float64)

    def twice(product: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(product.square().sum(), case.leaves, create_graph=True)
        return list(torch.autograd.grad(sum(one.square().sum() for one in first), case.leaves))

    for one, same in zip(twice(case.together()), twice(case.apart()), strict=True):
        torch.testing.assert_close(one, same, rtol=1e-12, atol=1e-12)


def test_second_derivatives_of_a_fused_activation_are_refused() -> None:
    case = Case(ACTIVATIONS["fused"], has_scale=False)
    (grad,) = torch.autograd.grad(case.together().square().sum(), case.x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_the_owner_receives_the_gradient_of_the_weight() -> None:
    case = Case(ACTIVATIONS["fused"])
    expected = differentiated(case.apart(), case.leaves)[-1]
    main_grad = torch.ones_like(case.weight)

    def take(grad: WeightGrad) -> None:
        grad.add_to(main_grad, scale=0.5, is_zero=False)

    set_grad_owner(case.weight, GradOwner(main_grad, take))
    product = case.together()
    product.backward(normal(*product.shape))
    assert case.weight.grad is None
    torch.testing.assert_close(main_grad, 1 + 0.5 * expected)


@pytest.mark.parametrize("frozen", [(), ("x",), ("x", "scale"), ("weight",)], ids=str)
@pytest.mark.parametrize("activation", ["fused", "by autograd"])
def test_a_recomputed_forward_ends_before_the_product(
    frozen: tuple[str, ...], activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, products = Case(ACTIVATIONS[activation]), list[Tensor]()
    for name in frozen:
        getattr(case, name).requires_grad_(False)
    wanted = [one for one in case.leaves if one.requires_grad]
    expected, linear = differentiated(case.together(), wanted), F.linear
    monkeypatch.setattr(F, "linear", lambda *args: products.append(args[0]) or linear(*args))
    found = differentiated(checkpoint(case.together, use_reentrant=False), wanted)
    assert len(products) == 1
    for one, same in zip(found, expected, strict=True):
        assert torch.equal(one, same)


def test_a_recomputed_forward_with_later_tensors_has_the_same_gradients() -> None:
    case = Case(ACTIVATIONS["clamped"])

    def further() -> Tensor:
        return case.together().sigmoid()

    expected = differentiated(further(), case.leaves)
    for one, same in zip(differentiated(checkpoint(further, use_reentrant=False), case.leaves), expected, strict=True):
        assert torch.equal(one, same)


def test_a_second_backward_needs_a_retained_graph() -> None:
    case = Case(ACTIVATIONS["fused"])
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        product = case.together()
    torch.autograd.grad(product.sum(), case.x, retain_graph=True)
    torch.autograd.grad(product.sum(), case.x)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(product.sum(), case.x)
