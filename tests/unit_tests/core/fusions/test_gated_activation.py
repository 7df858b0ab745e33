"""Activations of layers: the kernel gives what torch gives, for all rows of any shape, and saves only its input."""

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.fusions import gated_activation
from megatron.core.fusions.gated_activation import GatedActivation
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import GroupedMLP
from tests.unit_tests.core.models.small_models import small_config, small_model

# Those of a layer that have a kernel.
LAYERS: dict[str, GatedActivation] = {
    "swiglu": GatedActivation(F.silu, True),
    "swiglu clamped": GatedActivation(F.silu, True, clamp=1.5, offset=1.0),
    "quick_geglu": GatedActivation(quick_gelu, True, clamp=1.5),
    "geglu": GatedActivation(F.gelu, True),
    "silu": GatedActivation(F.silu, False),
    "gelu": GatedActivation(F.gelu, False),
    "quick_gelu": GatedActivation(quick_gelu, False),
    "squared_relu": GatedActivation(squared_relu, False),
}
# Relative error of one rounding to the dtype, in gradients also that of sums of 2F numbers.
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


@pytest.fixture
def launched(interpreted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Makes activations of CPU tensors run their interpreted kernels. Yields the names of launched operators."""
    kernels = interpreted("triton_activations", of="megatron.core.fusions")
    names: list[str] = []

    def noted(name: str) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            names.append(name)
            getattr(kernels, name)(*args, **named)

        return launch

    ours = SimpleNamespace(**{name: noted(name) for name in ("gated_activation", "gated_activation_backward")})
    monkeypatch.setattr(gated_activation, "ops", ours)
    monkeypatch.setattr(gated_activation, "has_kernel", lambda x: x.dtype in gated_activation._KERNEL_DTYPES)
    yield names


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 2).to(dtype)


def results(layer: GatedActivation, x: Tensor, scale: Tensor | None) -> list[Tensor]:
    """Returns act and the gradients of x and, if it is given, of scale."""
    inputs = [one.detach().requires_grad_() for one in (x, scale) if one is not None]
    act = layer(inputs[0], inputs[1] if scale is not None else None)
    grad = random(*act.shape, dtype=torch.bfloat16).to(act.dtype)
    return [act.detach(), *torch.autograd.grad(act, inputs, grad)]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("dtype", "shape", "scale_dtype"),
    [
        (torch.float32, (3, 2, 40), None),
        (torch.float32, (5, 34), torch.float32),
        (torch.bfloat16, (9, 66), torch.float32),
        (torch.bfloat16, (2, 3, 32), torch.bfloat16),
        (torch.float16, (3, 4200), torch.float32),
        (torch.float32, (0, 32), torch.float32),
    ],
    ids=str,
)
def test_a_kernel_gives_what_exact_arithmetic_gives(
    launched: list[str], name: str, dtype: torch.dtype, shape: tuple[int, ...], scale_dtype: torch.dtype | None
) -> None:
    layer, x = LAYERS[name], random(*shape, dtype=dtype)
    scale = None if scale_dtype is None else random(*shape[:-1], dtype=scale_dtype)
    found = results(layer, x, scale)
    assert launched == ["gated_activation", "gated_activation_backward"]
    exact = results(layer, x.double(), None if scale is None else scale.double())
    assert len(launched) == 2, "fp64 has no kernel"
    for one, expected, given in zip(found, exact, (found[0], x, scale), strict=False):
        assert given is not None and (one.shape, one.dtype) == (given.shape, given.dtype)
        torch.testing.assert_close(one.double(), expected, rtol=TOLERANCES[one.dtype], atol=2e-5)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("is_static", [False, True], ids=["all rows", "live rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("has_scale", [False, True], ids=["", "scaled"])
def test_gradients_can_give_act_with_the_bits_of_the_forward(
    name: str, is_static: bool, dtype: torch.dtype, has_scale: bool
) -> None:
    # Widths that are no multiple of a vector, and more rows than the CPU processes at a time.
    check_emitted_act(LAYERS[name], (1200, 902), dtype, has_scale=has_scale, is_static=is_static)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("is_static", [False, True], ids=["all rows", "live rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_of_gradients_give_act_with_the_bits_of_the_forward(
    launched: list[str], name: str, is_static: bool, dtype: torch.dtype
) -> None:
    check_emitted_act(LAYERS[name], (30, 90), dtype, has_scale=True, is_static=is_static)
    assert launched == ["gated_activation", "gated_activation_backward", "gated_activation_backward"]


def check_emitted_act(
    layer: GatedActivation, shape: tuple[int, int], dtype: torch.dtype, *, has_scale: bool, is_static: bool
) -> None:
    """Compares act of activation_gradients with that of the forward, and the gradients with those without act."""
    x, rows = random(*shape, dtype=dtype), shape[0] - 7
    wide = torch.promote_types(torch.float32, dtype)
    scale = random(shape[0], dtype=torch.float32).to(wide) if has_scale else None
    num_rows = torch.tensor([rows]) if is_static else None
    form = layer.form
    assert form is not None
    act = gated_activation.activate_plainly(x, scale, form=form, num_rows=num_rows)
    arguments: dict[str, Any] = {"scale": scale, "num_rows": num_rows, "form": form, "needs_scale": has_scale}
    grad = random(*act.shape, dtype=dtype)
    plain, found = (
        gated_activation.activation_gradients(grad, x, **arguments, needs_act=needs) for needs in (False, True)
    )
    assert plain.act is None and found.act is not None
    live = slice(rows) if is_static else slice(None)
    assert torch.equal(found.act[live], act[live])
    assert torch.equal(found.gate_up[live], plain.gate_up[live])
    assert (found.scale is None) == (not has_scale)
    if found.scale is not None and plain.scale is not None:
        assert torch.equal(found.scale[live], plain.scale[live])


@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_strides_do_not_matter_to_a_kernel(launched: list[str], name: str) -> None:
    x, scale = random(6, 4, 48, dtype=torch.float32), random(6, 4, dtype=torch.float32)
    expected = results(LAYERS[name], x, scale)
    gaps = torch.zeros(6, 4, 60)
    gaps[..., :48] = x
    for other in (gaps[..., :48], x.transpose(0, 2).contiguous().transpose(0, 2)):
        assert not other.is_contiguous() and torch.equal(other, x)
        for one, same in zip(
            results(LAYERS[name], other, scale[..., None].repeat(1, 1, 3)[..., 1]), expected, strict=True
        ):
            assert torch.equal(one, same)
    # The gradient of a sum has stride 0.
    leaf = x.clone().requires_grad_()
    LAYERS[name](leaf, scale).sum().backward()
    flat = x.clone().requires_grad_()
    LAYERS[name](flat, scale).backward(torch.ones(6, 4, expected[0].shape[-1]))
    torch.testing.assert_close(leaf.grad, flat.grad, rtol=0, atol=0)


@pytest.mark.parametrize("name", LAYERS)
def test_a_kernel_saves_only_the_input_and_the_scale(launched: list[str], name: str) -> None:
    x, scale = random(6, 48, dtype=torch.bfloat16).requires_grad_(), torch.rand(6).requires_grad_()
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.extend([tensor]), lambda nothing: x):
        LAYERS[name](x, scale)
    assert [one.data_ptr() for one in kept] == [x.data_ptr(), scale.data_ptr()]


def test_the_meta_device_counts_the_kernels_of_a_gpu() -> None:
    x = torch.empty(6, 48, device="meta", dtype=torch.bfloat16, requires_grad=True)
    for layer in LAYERS.values():
        act = layer(x, None)
        (grad,) = torch.autograd.grad(act, x, torch.empty_like(act))
        assert type(act.grad_fn).__name__ == "_GatedActivationBackward" and grad.shape == x.shape


def test_functions_without_a_kernel_are_differentiated_by_autograd(launched: list[str]) -> None:
    x, scale = random(3, 8, dtype=torch.float64), random(3, dtype=torch.float64)
    for layer in (GatedActivation(torch.tanh, True, clamp=1.5, offset=1.0), GatedActivation(torch.tanh, False)):
        inputs = x.requires_grad_(), scale.requires_grad_()
        assert torch.autograd.gradcheck(layer, inputs) and torch.autograd.gradgradcheck(layer, inputs)
    assert layer.form is None and launched == []


def test_second_derivatives_of_a_fused_activation_are_refused() -> None:
    x = random(3, 8, dtype=torch.float32).requires_grad_()
    (grad,) = torch.autograd.grad(LAYERS["swiglu"](x, None).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("shape", "scale", "message"),
    [((5, 34), (6,), "scale has shape (6,)"), ((2, 34), (1,), "must be (2,)"), ((2, 5), None, "width of 5")],
)
def test_scales_of_another_shape_and_odd_widths_are_refused(
    shape: tuple[int, int], scale: tuple[int] | None, message: str
) -> None:
    x = random(*shape, dtype=torch.float32)
    with pytest.raises(ValueError, match=re.escape(message)):
        LAYERS["swiglu"](x, None if scale is None else random(*scale, dtype=torch.float32))


@pytest.mark.parametrize("name", ["swiglu", "geglu", "squared_relu"])
def test_autocast_changes_no_dtype(launched: list[str], name: str) -> None:
    x, scale = random(6, 48, dtype=torch.bfloat16), random(6, dtype=torch.float32)
    expected = results(LAYERS[name], x, scale)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(LAYERS[name], x, scale)
    for one, same in zip(found, expected, strict=True):
        assert one.dtype == same.dtype and torch.equal(one, same)


@pytest.mark.slow
def test_dense_layers_and_dynamic_experts_launch_the_kernel(launched: list[str]) -> None:
    config = small_config(
        num_moe_experts=4, moe_router_topk=2, moe_layer_freq=[0, 1], moe_grouped_gemm=True, num_layers=2
    )
    model = small_model(config)
    kinds = [type(part) for part in model.modules() if isinstance(part, MLP | GroupedMLP)]
    assert kinds == [MLP, GroupedMLP]
    tokens = torch.arange(16).view(1, 16)
    model(tokens, tokens, None, labels=tokens).sum().backward()
    assert sorted(launched) == ["gated_activation"] * 2 + ["gated_activation_backward"] * 2
