"""Functions with little host time behave like torch's, and refuse what they do not support."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.autograd import PlainFunction, first_order


class Cube(PlainFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x**3

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 3 * ctx.scale * x.square() * grad, None


def leaf() -> Tensor:
    return torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)


def test_gradients_are_those_of_the_function():
    assert torch.autograd.gradcheck(Cube.apply, (leaf(), 2.0))


def test_a_result_without_a_gradient_needs_no_backward():
    with torch.no_grad():
        assert not Cube.apply(leaf(), 2.0).requires_grad


def test_a_second_derivative_is_refused_and_not_zero():
    x = leaf()
    # A later function's gradient depends on x too.
    (grad,) = torch.autograd.grad(Cube.apply(x, 2.0).square().sum(), x, create_graph=True)
    assert torch.equal(grad, 24.0 * x**5)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap], ids=lambda f: f.__name__)
def test_transforms_of_torch_func_are_refused(transform):
    with pytest.raises(RuntimeError, match="functorch"):
        transform(lambda x: Cube.apply(x, 2.0).sum())(torch.ones(2))


def test_a_use_enters_no_python_code_of_torch_before_forward():
    called = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_qualname)

    x = leaf()
    sys.setprofile(note)
    Cube.apply(x, 2.0)
    sys.setprofile(None)
    assert called[0] == "Cube.forward"
