"""Interpreted kernels write the bytes of the reference, and products are within the bound of exact sums."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megatron.core.block_scaled import operators
from megatron.core.block_scaled.format import BLOCKS, BlockFormat
from megatron.core.fusions.gated_activation import ActivationForm
from tests.unit_tests.core.block_scaled.codes import rows_of_codes

# Interpreted kernels compute with infinities in blocks that are not finite, and replace the results.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
PACKAGE = "megatron.core.block_scaled"
FORMS = [BlockFormat(block) for block in BLOCKS]
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: f"blocks of {form.block}")


@pytest.fixture
def quantizing(interpreted: Callable[..., ModuleType]) -> ModuleType:
    return interpreted("triton_quantize", of=PACKAGE)


@pytest.fixture
def products(interpreted: Callable[..., ModuleType]) -> ModuleType:
    return interpreted("triton_products", of=PACKAGE)


def filled(form: BlockFormat, *shape: int) -> Tensor:
    """Returns packed rows for elements of a shape, which are not written yet."""
    return form.empty_rows(*shape).fill_(0xAA)


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.logspace(-4, 4, shape[-1])


@each_form
def test_every_bf16_number_has_the_bytes_of_the_reference(quantizing: ModuleType, form: BlockFormat) -> None:
    rows = rows_of_codes(form.block)
    expected, found = operators.quantize_rows(rows, form), filled(form, *rows.shape)
    quantizing.quantize(rows, block=form.block, num_rows=None, out=found)
    assert torch.equal(found, expected)
    for dtype in (torch.bfloat16, torch.float32):
        back = torch.zeros(rows.shape, dtype=dtype)
        quantizing.dequantize(found, block=form.block, num_rows=None, out=back)
        whole = operators.dequantize_rows(expected, form, out=torch.zeros(rows.shape, dtype=dtype))
        assert torch.equal(back.isnan(), whole.isnan())
        bits = torch.int16 if dtype is torch.bfloat16 else torch.int32
        assert torch.equal(back.view(bits)[~back.isnan()], whole.view(bits)[~back.isnan()])


@each_form
def test_every_byte_decodes_to_what_torch_gives_under_every_scale(quantizing: ModuleType, form: BlockFormat) -> None:
    packed = torch.zeros(256, form.row_bytes(256), dtype=torch.uint8)
    packed[:, :256] = torch.arange(256)
    packed[:, 256 : 256 + form.num_scales(256)] = torch.arange(256)[:, None]
    back, expected = torch.zeros(256, 256), torch.zeros(256, 256)
    quantizing.dequantize(packed, block=form.block, num_rows=None, out=back)
    operators.dequantize_rows(packed, form, out=expected)
    torch.testing.assert_close(back, expected, rtol=0, atol=0, equal_nan=True)
    scales = 2.0 ** (torch.arange(256).double() - 127)
    scales[255] = torch.nan
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).double()
    torch.testing.assert_close(
        expected.double(), (codes * scales[:, None]).float().double(), rtol=0, atol=0, equal_nan=True
    )


@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "width", "live"), [(7, 1, 5), (5, 45, None), (3, 600, 2), (4, 1024, 9), (3, 96, 0)])
def test_rows_have_the_bytes_of_the_reference(
    quantizing: ModuleType, form: BlockFormat, dtype: torch.dtype, rows: int, width: int, live: int | None
) -> None:
    x, num_rows = random(rows, width).to(dtype), None if live is None else torch.tensor([live])
    found, expected = filled(form, rows, width), filled(form, rows, width)
    quantizing.quantize(x, block=form.block, num_rows=num_rows, out=found)
    operators.quantize_rows(x, form, num_rows=num_rows, out=expected)
    assert torch.equal(found, expected)
    back, expected_back = torch.full((2, rows, width), -1.0, dtype=dtype)
    quantizing.dequantize(found, block=form.block, num_rows=num_rows, out=back)
    operators.dequantize_rows(found, form, num_rows=num_rows, out=expected_back)
    assert torch.equal(back, expected_back)


@each_form
@pytest.mark.parametrize(("rows", "width", "live"), [(256, 96, 200), (100, 33, None), (31, 130, 0)])
def test_columns_have_the_bytes_of_the_reference(
    quantizing: ModuleType, form: BlockFormat, rows: int, width: int, live: int | None
) -> None:
    x, num_rows = random(rows, width), None if live is None else torch.tensor([live])
    x[1, 2] = torch.inf
    packed = operators.quantize_rows(x, form)
    found, expected = filled(form, width, rows), filled(form, width, rows)
    quantizing.quantize_columns(packed, block=form.block, num_rows=num_rows, out=found)
    operators.quantize_columns(packed, form, width=width, num_rows=num_rows, out=expected)
    assert torch.equal(found, expected)


@each_form
@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "transposed"])
def test_weights_have_the_bytes_of_the_reference(quantizing: ModuleType, form: BlockFormat, is_stored: bool) -> None:
    weight = random(2, 150, 100)
    weight = weight if is_stored else weight.transpose(1, 2)
    found = filled(form, *weight.shape)
    quantizing.quantize_squares(weight, block=form.block, out=found)
    assert torch.equal(found, operators.quantize_weight(weight, form))


@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", [ActivationForm(), ActivationForm("swiglu", 1.5, 1.0), ActivationForm("gelu")])
def test_an_activation_has_the_bytes_of_its_kernel_and_a_quantization(
    quantizing: ModuleType,
    interpreted: Callable[..., ModuleType],
    form: BlockFormat,
    dtype: torch.dtype,
    activation: ActivationForm,
) -> None:
    activations = interpreted("triton_activations", of="megatron.core.fusions")
    gate_up, scale, num_rows = (random(5, 208) % 3).to(dtype), torch.rand(5), torch.tensor([4])
    act = torch.zeros(5, activation.width(gate_up), dtype=dtype)
    found, expected = filled(form, *act.shape), filled(form, *act.shape)
    activations.gated_activation(gate_up, scale, num_rows=num_rows, out=act, **activation.arguments)
    quantizing.quantize(act, block=form.block, num_rows=num_rows, out=expected)
    quantizing.gated_activation_quantize(
        gate_up, scale, block=form.block, num_rows=num_rows, out=found, **activation.arguments
    )
    assert torch.equal(found, expected) and found[4].eq(0xAA).all()


def exact(packed: Tensor, form: BlockFormat, width: int) -> Tensor:
    return operators.dequantize_rows(packed, form, out=torch.empty(packed.shape[0], width)).double()


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


KINDS = [("PROMOTED", 128), ("PROMOTED", 32), ("DEQUANTIZED", 32), ("DEQUANTIZED", 128)]


@pytest.mark.parametrize(("kind", "block"), KINDS)
@pytest.mark.parametrize("is_transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize(("height", "width"), [(128, 256), (200, 136)])
def test_products_are_within_the_bound_of_exact_sums(
    products: ModuleType, kind: str, block: int, is_transposed: bool, height: int, width: int
) -> None:
    form, offsets = BlockFormat(block), torch.tensor([70, 70, 131], dtype=torch.int32)
    inner, outer = (width, height) if is_transposed else (height, width)
    rows = normal(140, inner, seed=1)
    rows[3, 1] = torch.nan
    x, weight = operators.quantize_rows(rows, form), operators.quantize_weight(normal(3, height, width, seed=2), form)
    out = torch.full((140, outer), -1.0)
    products.scaled_product(
        x,
        weight,
        block=block,
        offsets=offsets,
        width=width,
        is_transposed=is_transposed,
        out=out,
        arithmetic=products.Arithmetic[kind],
    )
    assert out[3].isnan().all() and out[131:].eq(-1).all()
    left = exact(x, form, inner)
    left[3], out[3] = 0, 0
    for expert, live in ((0, slice(0, 70)), (2, slice(70, 131))):
        right = exact(weight[expert], form, width)
        right = right.t() if is_transposed else right
        error = (out[live].double() - left[live] @ right).abs()
        assert (error <= 2 * inner * 2.0**-24 * (left[live].abs() @ right.abs())).all()


@pytest.mark.parametrize(("kind", "block"), KINDS)
def test_weight_gradients_are_within_the_bound_of_exact_sums(products: ModuleType, kind: str, block: int) -> None:
    form, offsets = BlockFormat(block), torch.tensor([128, 128, 384], dtype=torch.int32)
    x, grad = (operators.quantize_rows(normal(512, width, seed=width), form) for width in (72, 136))
    columns = [operators.quantize_columns(one, form, width=width) for one, width in ((x, 72), (grad, 136))]
    out = torch.full((3, 72, 136), -1.0)
    arithmetic = products.Arithmetic[kind]
    products.scaled_weight_grad(*columns, block=block, offsets=offsets, rows=512, out=out, arithmetic=arithmetic)
    left, right = (exact(one, form, 512) for one in columns)
    for expert, rows in enumerate((slice(0, 128), slice(0, 0), slice(128, 384))):
        error = (out[expert].double() - left[:, rows] @ right[:, rows].t()).abs()
        assert (error <= 2 * 256 * 2.0**-24 * (left[:, rows].abs() @ right[:, rows].abs().t())).all()


def test_the_launchers_refuse_what_kernels_cannot_read(quantizing: ModuleType) -> None:
    out = BlockFormat(32).empty_rows(2, 64)
    with pytest.raises(ValueError, match="only bf16 and fp32"):
        quantizing.quantize(torch.zeros(2, 64, dtype=torch.float16), block=32, num_rows=None, out=out)
    with pytest.raises(ValueError, match=r"block \(16\)"):
        quantizing.quantize(torch.zeros(2, 64), block=16, num_rows=None, out=out)
    with pytest.raises(AssertionError, match="adjacent"):
        quantizing.quantize(torch.zeros(64, 2).t(), block=32, num_rows=None, out=out)
