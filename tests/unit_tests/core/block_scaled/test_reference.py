"""The reference of block-scaled rows gives what a model with exact fractions gives, and refuses what it cannot do."""

import math
import re
from bisect import bisect_left
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.core.block_scaled.format import BLOCKS, BlockFormat
from megatron.core.block_scaled.operators import (
    activate_and_quantize,
    dequantize_rows,
    multiply,
    quantize_columns,
    quantize_rows,
    quantize_weight,
    weight_gradient,
)
from megatron.core.fusions.gated_activation import ActivationForm, activate_plainly
from megatron.core.paged_rows import PagedRows
from tests.structure.measure import ROOT
from tests.unit_tests.core.block_scaled.codes import all_bf16, rows_of_codes

FORMS = [BlockFormat(block) for block in BLOCKS]
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: f"blocks of {form.block}")
FIXED = settings(max_examples=80, deadline=None, derandomize=True, database=None, phases=[Phase.generate, Phase.shrink])
# Floats of every magnitude, among them subnormal ones, both zeros, infinities and NaN.
BITS = st.one_of(st.integers(0, 2**16 - 1), st.sampled_from([0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0x7F7F]))


@cache
def e4m3_numbers() -> list[float]:
    """Returns the magnitudes of codes 0 to 0x7E, from the definition of the format."""
    numbers = [m * 2.0**-9 for m in range(8)]
    return numbers + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]


def model_code(x: float) -> int:
    """Returns the code of the e4m3 number that is nearest to x, with ties to even codes. abs(x) is at most 448."""
    numbers, magnitude = e4m3_numbers(), abs(x)
    above = bisect_left(numbers, magnitude)
    if above and numbers[above] != magnitude:
        below, rest = magnitude - numbers[above - 1], numbers[above] - magnitude
        above -= below < rest or (below == rest and above % 2 == 1)
    return above | (0x80 if math.copysign(1.0, x) < 0 else 0)


def model_row(row: list[float], block: int) -> tuple[list[int], list[int]]:
    """Returns the codes and the scale bytes of a row, in fp64, which is exact for these numbers."""
    codes: list[int] = []
    scale_bytes = []
    for start in range(0, len(row), block):
        elements = row[start : start + block]
        if not all(map(math.isfinite, elements)):
            scale_bytes.append(255)
            codes += [0x7F] * len(elements)
            continue
        exponent = -127
        while max(map(abs, elements)) > 448 * 2.0**exponent:
            exponent += 1
        scale_bytes.append(exponent + 127)
        codes += [model_code(math.ldexp(x, -exponent)) for x in elements]
    return codes, scale_bytes


def decoded(packed: Tensor, form: BlockFormat, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return dequantize_rows(packed, form, out=torch.empty(packed.shape[0], width, dtype=dtype))


def check_row(row: list[float], packed: Tensor, form: BlockFormat) -> None:
    codes, scale_bytes = model_row(row, form.block)
    padding = form.row_bytes(len(row)) - len(row) - len(scale_bytes)
    assert packed.tolist() == codes + scale_bytes + [0] * padding


@each_form
def test_every_bf16_number_becomes_the_nearest_code_of_the_smallest_scale(form: BlockFormat) -> None:
    rows = rows_of_codes(form.block)
    packed = quantize_rows(rows, form)
    assert rows.numel() >= all_bf16().numel() == 65536
    # Rows of neighbours, and rows in which every number meets other magnitudes.
    for row, found in zip(rows.double().tolist(), packed, strict=True):
        check_row(row, found, form)


@each_form
def test_alone_in_a_block_every_bf16_number_keeps_three_bits(form: BlockFormat) -> None:
    numbers = all_bf16()
    alone = torch.zeros(65536, 1, dtype=torch.bfloat16)
    alone[:, 0] = numbers
    found = decoded(quantize_rows(alone, form), form, 1, torch.bfloat16)[:, 0]
    is_finite = numbers.isfinite()
    # The largest numbers round to 2**128.
    is_large = is_finite & (numbers.abs() >= 1.9375 * 2.0**127)
    assert found[~is_finite].isnan().all() and found[is_large].isinf().all()
    is_finite &= ~is_large
    x, y = numbers[is_finite].double(), found[is_finite].double()
    # Half of the last of four bits; one half of the smallest step below the smallest scale's normal numbers.
    assert ((x - y).abs() <= (x.abs() * 2.0**-4).clamp(min=2.0**-137 + 2.0**-134)).all()
    assert torch.equal(torch.signbit(x), torch.signbit(y))


@FIXED
@given(data=st.data(), block=st.sampled_from(BLOCKS), width=st.integers(1, 150))
def test_rows_of_any_width_have_the_bytes_of_the_model(data: st.DataObject, block: int, width: int) -> None:
    bits = data.draw(st.lists(BITS, min_size=width, max_size=width))
    row = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)[None]
    check_row(row[0].double().tolist(), quantize_rows(row, BlockFormat(block))[0], BlockFormat(block))


@FIXED
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70), block=st.sampled_from(BLOCKS))
def test_rows_of_fp32_have_the_bytes_of_the_model(bits: list[int], block: int) -> None:
    row = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)[None]
    form = BlockFormat(block)
    if row.isfinite().all():
        check_row(row[0].double().tolist(), quantize_rows(row, form)[0], form)
    else:
        assert decoded(quantize_rows(row, form), form, len(bits)).isnan().any()


@pytest.mark.parametrize("exponent", [-140, -119, 0, 118])
def test_a_scale_is_the_smallest_up_to_the_last_bit_of_fp32(exponent: int) -> None:
    limit = torch.tensor(448.0 * 2.0**exponent)
    x = torch.stack([torch.nextafter(limit, torch.tensor(0.0)), limit, torch.nextafter(limit, torch.tensor(math.inf))])
    for row, packed in zip(x[:, None], quantize_rows(x[:, None], BlockFormat(32)), strict=True):
        check_row(row.double().tolist(), packed, BlockFormat(32))
    assert exponent < -127 or BlockFormat(32).scales(quantize_rows(x[:, None], BlockFormat(32)), 1)[:, 0].tolist() == [
        *(exponent + 127, exponent + 127, exponent + 128)
    ]


@FIXED
@given(
    seed=st.integers(0, 2**31),
    block=st.sampled_from(BLOCKS),
    width=st.integers(1, 300),
    exponent=st.integers(-140, 120),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_round_trips_are_close_and_the_second_changes_nothing(
    seed: int, block: int, width: int, exponent: int, dtype: torch.dtype
) -> None:
    form, generator = BlockFormat(block), torch.Generator().manual_seed(seed)
    x = (torch.randn(3, width, generator=generator).double() * 2.0**exponent).to(dtype)
    packed = quantize_rows(x, form)
    once = decoded(packed, form, width, dtype)
    assert torch.equal(decoded(quantize_rows(once, form), form, width, dtype), once)
    scales = 2.0 ** (form.scales(packed, width).double() - 127)
    amax = torch.nn.functional.pad(x.double().abs(), (0, -width % block)).unflatten(1, (-1, block)).amax(2)
    assert (amax <= 448 * scales).all() and ((amax > 224 * scales) | (form.scales(packed, width) == 0)).all()
    step = scales.repeat_interleave(block, 1)[:, :width] * 2.0**-9
    rounding = 2.0**-134 if dtype is torch.bfloat16 else 0.0
    error = (x.double() - once.double()).abs()
    assert (error <= torch.maximum(x.double().abs() * 2.0**-4, step / 2) + rounding).all()


@each_form
def test_zeros_keep_their_signs_and_have_the_smallest_scale(form: BlockFormat) -> None:
    x = torch.zeros(2, 200)
    x[1] = -0.0
    packed = quantize_rows(x, form)
    assert form.scales(packed, 200).eq(0).all()
    assert form.values(packed, 200).view(torch.uint8).tolist() == [[0] * 200, [0x80] * 200]
    assert torch.signbit(decoded(packed, form, 200)).tolist() == [[False] * 200, [True] * 200]


@each_form
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_block_nan_and_no_other(form: BlockFormat, bad: float) -> None:
    x = torch.ones(2, 2 * form.block + 5, dtype=torch.bfloat16)
    x[1, form.block + 1] = bad
    packed = quantize_rows(x, form)
    assert form.scales(packed, x.shape[1]).eq(255).tolist() == [[False] * 3, [False, True, False]]
    is_nan = decoded(packed, form, x.shape[1]).isnan()
    assert is_nan.sum() == form.block and is_nan[1, form.block : 2 * form.block].all()
    columns = quantize_columns(packed, form, width=x.shape[1])
    assert decoded(columns, form, 2).isnan().sum() == 2 * form.block  # all rows of the block of columns
    gradient = torch.empty(1, 3, 1)
    weights = quantize_weight(torch.ones(1, x.shape[1], 1), form)
    out = multiply(
        packed,
        weights,
        form,
        offsets=torch.tensor([2], dtype=torch.int32),
        width=1,
        is_transposed=False,
        out=gradient.new_empty(2, 1),
    )
    assert out.isnan().tolist() == [[False], [True]]


@each_form
@pytest.mark.parametrize(("rows", "width", "live"), [(256, 96, None), (256, 33, 128), (100, 40, 37), (5, 7, 0)])
def test_columns_are_those_of_the_decoded_rows(form: BlockFormat, rows: int, width: int, live: int | None) -> None:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).exp()
    packed, given_rows = quantize_rows(x, form), rows if live is None else live
    num_rows = None if live is None else torch.tensor([live])
    packed[given_rows:] = 0x7F
    out = torch.full((width, form.row_bytes(rows)), 0xAA, dtype=torch.uint8)
    quantize_columns(packed, form, width=width, num_rows=num_rows, out=out)
    expected = torch.zeros(rows, width)
    expected[:given_rows] = decoded(packed[:given_rows], form, width)
    ready = min(form.num_scales(given_rows) * form.block, rows)
    whole = quantize_rows(expected.t().contiguous(), form)
    assert torch.equal(form.values(out, rows)[:, :ready].float(), form.values(whole, rows)[:, :ready].float())
    blocks = form.num_scales(given_rows)
    assert torch.equal(form.scales(out, rows)[:, :blocks], form.scales(whole, rows)[:, :blocks])
    assert form.scales(out, rows)[:, blocks:].eq(0xAA).all() and out[:, ready:rows].eq(0xAA).all()
    assert out[:, rows + form.num_scales(rows) :].eq(0 if given_rows else 0xAA).all()


@each_form
def test_columns_of_rows_lose_little_more_than_columns_of_the_original(form: BlockFormat) -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 3, 256)[:, None]
    rows = decoded(quantize_rows(x, form), form, 256)
    columns = decoded(quantize_columns(quantize_rows(x, form), form, width=256), form, 256).t()
    # Nothing but what a larger scale makes subnormal.
    amax = x.unflatten(0, (-1, form.block)).abs().amax(1).repeat_interleave(form.block, 0)
    assert ((columns - rows).abs() <= amax * 2.0**-16).all()


@each_form
def test_weights_have_one_scale_for_each_square_so_that_the_transpose_has_the_same_values(form: BlockFormat) -> None:
    weight = torch.randn(2, 160, 200, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 2, 200)
    packed, across = quantize_weight(weight, form), quantize_weight(weight.transpose(1, 2), form)
    scales = form.scales(packed, 200)
    for start in range(0, 160, form.block):
        square = scales[:, start : start + form.block]
        assert torch.equal(square, square[:, :1].expand_as(square))
    ours = torch.stack([decoded(one, form, 200) for one in packed])
    theirs = torch.stack([decoded(one, form, 160) for one in across])
    assert torch.equal(ours, theirs.transpose(1, 2))
    assert (ours - weight).abs().max() <= weight.abs().max() * 2.0**-4


@each_form
def test_only_live_rows_are_read_and_written(form: BlockFormat) -> None:
    x = torch.full((6, 70), math.nan)
    x[:4] = 1.5
    out = torch.full((6, 2 * form.row_bytes(70)), 0xAA, dtype=torch.uint8)[:, : form.row_bytes(70)]
    assert quantize_rows(x, form, num_rows=torch.tensor([4]), out=out) is out
    assert out[4:].eq(0xAA).all() and not out[:4].eq(0xAA).all(1).any()
    found = dequantize_rows(out, form, num_rows=torch.tensor([4]), out=torch.full((6, 70), -1.0))
    assert found[:4].eq(1.5).all() and found[4:].eq(-1).all()
    assert quantize_rows(x, form, num_rows=torch.tensor([0]), out=out)[:4].eq(out[:4]).all()


@each_form
@pytest.mark.parametrize("name", ["swiglu", "squared_relu"])
def test_an_activation_has_the_bytes_of_its_rounded_result(form: BlockFormat, name: str) -> None:
    activation = ActivationForm(name)
    gate_up = torch.randn(9, 132, generator=torch.Generator().manual_seed(2)).bfloat16()
    scale = torch.rand(9, generator=torch.Generator().manual_seed(3))
    num_rows = torch.tensor([7])
    act = activate_plainly(gate_up, scale, form=activation, num_rows=num_rows)
    found = activate_and_quantize(gate_up, scale, form, activation=activation, num_rows=num_rows)
    assert torch.equal(found[:7], quantize_rows(act, form, num_rows=num_rows)[:7])


OFFSETS = torch.tensor([0, 128, 256], dtype=torch.int32)


@each_form
@pytest.mark.parametrize("is_transposed", [False, True], ids=["forward", "transposed"])
def test_products_are_within_the_bound_of_exact_sums(form: BlockFormat, is_transposed: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    height, width = 200, 136
    inner, outer = (width, height) if is_transposed else (height, width)
    x = quantize_rows(torch.randn(256, inner, generator=generator), form)
    weight = quantize_weight(torch.randn(3, height, width, generator=generator), form)
    left = decoded(x, form, inner).double()
    right = torch.stack([decoded(one, form, width) for one in weight]).double()
    right = right.transpose(1, 2) if is_transposed else right
    out = torch.empty(256, outer)
    multiply(x, weight, form, offsets=OFFSETS, width=width, is_transposed=is_transposed, out=out)
    experts = [1] * 128 + [2] * 128
    for row, expert in enumerate(experts):
        exact, size = left[row] @ right[expert], left[row].abs() @ right[expert].abs()
        assert ((out[row].double() - exact).abs() <= 2 * inner * 2.0**-24 * size).all()


@each_form
def test_weight_gradients_are_within_the_bound_of_exact_sums(form: BlockFormat) -> None:
    generator = torch.Generator().manual_seed(6)
    x, grad = (quantize_rows(torch.randn(256, width, generator=generator), form) for width in (40, 24))
    columns = [quantize_columns(one, form, width=width) for one, width in ((x, 40), (grad, 24))]
    out = torch.empty(3, 40, 24)
    weight_gradient(*columns, form, offsets=OFFSETS, rows=256, out=out)
    left, right = (decoded(one, form, 256).double() for one in columns)
    for expert, rows in enumerate((slice(0, 0), slice(0, 128), slice(128, 256))):
        exact, size = left[:, rows] @ right[:, rows].t(), left[:, rows].abs() @ right[:, rows].abs().t()
        assert ((out[expert].double() - exact).abs() <= 2 * 128 * 2.0**-24 * size).all()


def test_bytes_of_a_row() -> None:
    assert [BlockFormat(block).row_bytes(width) for block in BLOCKS for width in (2048, 1536, 33, 1)] == [
        *(2112, 1584, 48, 16),
        *(2064, 1552, 48, 16),
    ]


def results_on(device: str) -> list[object]:
    """Returns shapes, strides and dtypes of all functions' results."""
    form = BlockFormat(32)
    x = torch.ones(64, 96, device=device)
    offsets = torch.full((1,), 64, dtype=torch.int32, device=device)
    packed = quantize_rows(x, form)
    weight = quantize_weight(torch.ones(1, 96, 64, device=device), form)
    columns = quantize_columns(packed, form, width=96)
    act = activate_and_quantize(x, None, form, activation=ActivationForm())
    product = torch.empty(64, 64, dtype=torch.bfloat16, device=device)
    multiply(packed, weight, form, offsets=offsets, width=64, is_transposed=False, out=product)
    gradient = torch.empty(1, 96, 96, device=device)
    weight_gradient(columns, columns, form, offsets=offsets, rows=64, out=gradient)
    weight_gradient(columns, columns, form, offsets=offsets, rows=64, out=gradient, scale=0.5, is_added=True)
    decoded_rows = dequantize_rows(packed, form, out=torch.empty(64, 96, device=device))
    views = form.values(packed, 96), form.scales(packed, 96)
    table, live = torch.arange(2, device=device), torch.full((1,), 64, device=device)
    pages, product_pages, act_pages = (
        PagedRows(rows.view(-1), table, 32 * rows.shape[1] * rows.itemsize, *rows.shape)
        for rows in (packed, product, x)
    )
    multiply(pages, weight, form, offsets=offsets, width=64, is_transposed=False, out=product_pages, needed=live)
    of_pages = [
        quantize_columns(pages, form, width=96, num_rows=live),
        activate_and_quantize(act_pages, None, form, activation=ActivationForm(), num_rows=live),
    ]
    found = [packed, weight, columns, act, product, gradient, decoded_rows, *views, *of_pages]
    assert all(one.device.type == device for one in found)
    return [(one.shape, one.stride(), one.dtype) for one in found]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_have_the_shapes_and_strides_of_real_ones(device: str) -> None:
    with FakeTensorMode():
        fake = results_on(device)
    assert fake == results_on("cpu")


def test_the_example_of_the_page_adds_a_gradient() -> None:
    page = (ROOT / "docs" / "block_scaled.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(example, "docs/block_scaled.md", "exec"), names)
    sums = decoded(names["x"], names["form"], 64).view(2, 128, 64).sum(1) * 0.5
    # Columns round what a larger scale makes subnormal.
    torch.testing.assert_close(names["main_grad"], sums[:, :, None].expand(2, 64, 96), rtol=1e-5, atol=1e-2)


F32 = BlockFormat(32)
ROWS = F32.empty_rows(4, 64)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: BlockFormat(64), r"block \(64\) must be 32"),
        (lambda: quantize_rows(torch.zeros(4, 64, dtype=torch.float16), F32), "x has dtype torch.float16"),
        (lambda: quantize_rows(torch.zeros(64, 4).t(), F32), "x has shape .* adjacent columns"),
        (lambda: quantize_rows(torch.zeros(64), F32), "must have 2 dimensions"),
        (
            lambda: quantize_rows(torch.zeros(3, 64), F32, num_rows=torch.tensor([3, 4])),
            "num_rows .* must be .1., torch",
        ),
        (
            lambda: dequantize_rows(ROWS, F32, num_rows=torch.tensor([2.0]), out=torch.zeros(4, 64)),
            "num_rows .* must be",
        ),
        (lambda: quantize_columns(ROWS, F32, width=64, num_rows=torch.tensor(2)), "num_rows .* must be"),
        (lambda: quantize_rows(torch.zeros(3, 64), F32, out=ROWS[:3].to("meta")), "out is on meta: must be on cpu"),
        (lambda: BlockFormat(32.0), "block .32.0. must be 32"),  # type: ignore[arg-type]
        (lambda: quantize_rows(torch.zeros(4, 65), F32, out=ROWS[:, :64]), "packed rows of 65 elements .* 80 bytes"),
        (lambda: quantize_rows(torch.zeros(3, 64), F32, out=ROWS), r"out has shape \[4, 80\]: must be \[3, 80\]"),
        (lambda: quantize_rows(torch.zeros(4, 64), F32, out=ROWS.int()), "out has dtype torch.int32"),
        (lambda: quantize_rows(torch.zeros(4, 64), F32, out=ROWS.repeat(1, 2)[:, ::2]), "bytes 2 apart"),
        (lambda: dequantize_rows(ROWS, F32, out=torch.zeros(3, 64)), "must have 3 packed rows"),
        (lambda: dequantize_rows(ROWS, F32, out=torch.zeros(4, 64).half()), "out has dtype"),
        (lambda: quantize_columns(ROWS, F32, width=80), "packed rows of 80 elements"),
        (lambda: quantize_weight(torch.zeros(4, 64), F32), "weight has shape"),
        (lambda: activate_and_quantize(torch.zeros(4, 63), None, F32, activation=ActivationForm()), "must be even"),
        (
            lambda: activate_and_quantize(torch.zeros(4, 64), torch.zeros(3), F32, activation=ActivationForm()),
            "scale has shape",
        ),
        (
            lambda: multiply(
                ROWS,
                F32.empty_rows(1, 64, 32),
                F32,
                offsets=torch.zeros(1, dtype=torch.int64),
                width=32,
                is_transposed=False,
                out=torch.zeros(4, 32),
            ),
            "offsets has shape .* int32",
        ),
        (
            lambda: multiply(
                ROWS,
                F32.empty_rows(1, 64, 32),
                F32,
                offsets=torch.zeros(1, dtype=torch.int32),
                width=32,
                is_transposed=False,
                out=torch.zeros(4, 48),
            ),
            "out has a width of 48: the weights require 32",
        ),
        (
            lambda: weight_gradient(
                ROWS,
                ROWS,
                F32,
                offsets=torch.zeros(1, dtype=torch.int32),
                rows=64,
                out=torch.zeros(1, 4, 5),
            ),
            "grad has shape .* must have 5 packed rows",
        ),
    ],
)
def test_bad_arguments_are_refused(wrong: object, words: str) -> None:
    assert callable(wrong)
    with pytest.raises(ValueError, match=words):
        wrong()
