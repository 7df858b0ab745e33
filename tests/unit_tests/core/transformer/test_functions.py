"""Autograd functions of norms, rotary embeddings and SwiGLU: gradients, dtypes, strided and frozen inputs."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron.core.fusions import gated_activation
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, weighted_bias_swiglu_impl
from megatron.core.fusions.gated_activation import ActivationForm, activate
from megatron.core.transformer.dot_product_attention import validate_backend
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.norms import LayerNorm, Norm, RMSNorm, rms_norm
from megatron.core.transformer.rope import RotaryEmbedding, apply_rotary_pos_emb, scaled_frequencies, split_and_rotate
from tests.unit_tests.core.models.small_models import small_config

HALF = [torch.bfloat16, torch.float16]
CLAMPED_UNIT = ActivationForm("quick_geglu", clamp=0.8, offset=1.0)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_activation, "_CPU_ELEMENTS", 32)


def table(width: int, percent: float = 1.0, dtype: torch.dtype = torch.float64) -> RotaryEmbedding:
    return RotaryEmbedding(width, 8, rotary_percent=percent, dtype=dtype)


def swiglu(x: Tensor, weights: Tensor) -> Tensor:
    return weighted_bias_swiglu_impl(x, None, weights)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, eps=1e-5, dtype=x.dtype)


def interleaved(x: Tensor) -> Tensor:
    return apply_rotary_pos_emb(x, RotaryEmbedding(6, 8, rotary_interleaved=True, dtype=torch.float64)(4))


def rotated(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return split_and_rotate(x, table(6, dtype=torch.promote_types(x.dtype, torch.float32))(4))


FUNCTIONS: dict[str, tuple[Callable[..., object], list[tuple[int, ...]]]] = {
    "rms_norm": (norm, [(3, 5, 8), (8,)]),
    "swiglu": (lambda x: bias_swiglu_impl(x, None), [(5, 2, 8)]),
    "biased swiglu": (bias_swiglu_impl, [(5, 8), (8,)]),
    "weighted swiglu": (swiglu, [(9, 8), (9, 1)]),
    "clamped unit": (partial(activate, form=CLAMPED_UNIT), [(9, 8), (9,)]),
    "split and rotate": (rotated, [(4, 2, 2, 4, 6)]),
    "split and rotate a third": (lambda x: split_and_rotate(x, table(6, 0.34)(4)), [(4, 2, 2, 4, 6)]),
    "rotate interleaved": (interleaved, [(4, 2, 3, 6)]),
    "rotate": (lambda x: apply_rotary_pos_emb(x, table(6)(4)), [(4, 2, 3, 6)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_right_for_all_and_for_single_inputs(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    torch.manual_seed(3)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(function, inputs)
    for wanted in range(len(inputs)):
        frozen = [value.detach().requires_grad_(index == wanted) for index, value in enumerate(inputs)]
        assert torch.autograd.gradcheck(function, frozen)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_strided_inputs_and_second_backwards_give_the_same(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    torch.manual_seed(3)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    # The same values in memory with gaps.
    strided = [value.detach().unsqueeze(-1).repeat_interleave(2, -1)[..., 0].requires_grad_() for value in inputs]
    flat = [torch.cat([part.flatten() for part in _parts(function(*values))]) for values in (inputs, strided)]
    torch.testing.assert_close(flat[0], flat[1])
    upstream = torch.linspace(-1, 1, flat[0].numel(), dtype=torch.float64)
    once = torch.autograd.grad(flat[0], inputs, upstream, retain_graph=True)
    twice = torch.autograd.grad(flat[0], inputs, upstream)
    other = torch.autograd.grad(flat[1], strided, upstream)
    for first, second, third in zip(once, twice, other, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        torch.testing.assert_close(first, third)


@pytest.mark.parametrize("name", ["rms_norm", "biased swiglu", "weighted swiglu", "clamped unit", "split and rotate"])
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    function, shapes = FUNCTIONS[name]
    torch.manual_seed(3)
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    exact = [value.detach().double().requires_grad_() for value in inputs]
    outputs, expected = _parts(function(*inputs)), _parts(function(*exact))
    rounding = {"atol": 2 * torch.finfo(dtype).eps, "rtol": 2 * torch.finfo(dtype).eps}
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), wanted, **rounding)
    found = torch.autograd.grad([part.float().square().sum() for part in outputs], inputs)
    wanted_grads = torch.autograd.grad([part.square().sum() for part in expected], exact)
    for grad, wanted in zip(found, wanted_grads, strict=True):
        assert grad.dtype == dtype
        assert (grad.double() - wanted).norm() < 8 * torch.finfo(dtype).eps * wanted.norm()


def _parts(outputs: object) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]  # type: ignore[list-item]


def test_norms_agree_with_torch_and_follow_the_configuration() -> None:
    x = torch.randn(3, 2, 32)
    rms = Norm(small_config(normalization="RMSNorm"), 32, eps=1e-3)
    layer = Norm(small_config(normalization="LayerNorm"), 32, eps=1e-3)
    assert isinstance(rms, RMSNorm) and isinstance(layer, LayerNorm)
    for module in (rms, layer):
        module.weight.data.normal_()
    torch.testing.assert_close(rms(x), F.rms_norm(x, (32,), rms.weight, 1e-3))
    torch.testing.assert_close(layer(x), F.layer_norm(x, (32,), layer.weight, layer.bias, 1e-3))


def test_rotation_turns_each_pair_by_its_angle() -> None:
    x = torch.randn(8, 1, 1, 6, dtype=torch.float64)
    pairs = torch.complex(x[..., :3], x[..., 3:])
    frequencies = 10000.0 ** -(torch.arange(3, dtype=torch.float64) / 3)
    angles = torch.arange(8, dtype=torch.float64)[:, None] * frequencies
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None, None, :]
    found = apply_rotary_pos_emb(x, table(6)(8))
    torch.testing.assert_close(found, torch.cat((turned.real, turned.imag), dim=-1))


@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("factor", [1.0, 8.0, 32.0])
def test_scaled_frequencies_are_those_of_llama_3(base: float, factor: float) -> None:
    parameters = {"rope_theta": base, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters |= {"original_max_position_embeddings": 8192, "rope_type": "llama3"}
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](
        LlamaConfig(head_dim=128, rope_parameters=parameters), torch.device("cpu")
    )
    plain = base ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    torch.testing.assert_close(scaled_frequencies(plain, factor=factor), theirs.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("width", "arguments", "words"),
    [
        (5, {}, "kv_channels 5 x rotary_percent 1.0 is 5: must be even, from 2 to 5"),
        (4, {"rotary_percent": 2.0}, "rotary_percent 2.0 is 8: must be even, from 2 to 4"),
        (4, {"seq_len_interpolation_factor": 0}, "seq_len_interpolation_factor is 0: must be above 0"),
    ],
)
def test_impossible_rotations_are_refused(width: int, arguments: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RotaryEmbedding(width, 8, **arguments)


@pytest.mark.parametrize("backend", [AttnBackend.flash, AttnBackend.fused])
def test_a_kernel_without_dropout_refuses_it(backend: AttnBackend) -> None:
    if torch.cuda.is_available():
        validate_backend(backend, dropout=0.1)
    else:
        with pytest.raises(ValueError, match=f"attention_dropout is 0.1 and attention_backend is {backend.name}"):
            validate_backend(backend, dropout=0.1)
    validate_backend(backend, dropout=0.0)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_stored_minus_one_are_torch_norms_of_one_more(kind: str, dtype: torch.dtype) -> None:
    norm = Norm(small_config(normalization=kind, layernorm_zero_centered_gamma=True, params_dtype=dtype), 32, eps=1e-3)
    assert not norm.weight.any()
    torch.manual_seed(0)
    norm.weight.data.normal_(std=1e-3)
    x, upstream = torch.randn(2, 3, 32).to(dtype).requires_grad_(), torch.randn(2, 3, 32).to(dtype)
    wide, scale = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    if kind == "RMSNorm":
        wanted = F.rms_norm(wide, (32,), scale + 1, 1e-3)
    else:
        wanted = F.layer_norm(wide, (32,), scale + 1, norm.bias.detach().double(), 1e-3)
    found = norm(x)
    assert found.dtype == dtype
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(found, wanted.to(dtype), **tolerance)
    found.backward(upstream)
    wanted.backward(upstream.double())
    torch.testing.assert_close(norm.weight.grad, scale.grad.to(dtype), rtol=8 * torch.finfo(dtype).eps, atol=1e-5)
    torch.testing.assert_close(
        x.grad, wide.grad.to(dtype), rtol=8 * torch.finfo(dtype).eps, atol=1e-5 + torch.finfo(dtype).eps
    )


def test_one_is_added_in_fp32() -> None:
    norm = Norm(
        small_config(normalization="RMSNorm", layernorm_zero_centered_gamma=True, params_dtype=torch.bfloat16), 4, eps=0
    )
    norm.weight.data.fill_(2.0**-9)
    # 1 + 2^-9 rounds to 1 in bf16, but as an exact factor it changes the rounded product.
    x = torch.tensor([255.0, 255, 255, 255], dtype=torch.bfloat16)
    wide = x.double() / x.double().square().mean().sqrt() * (1 + 2.0**-9)
    assert torch.equal(norm(x), wide.to(torch.bfloat16))
