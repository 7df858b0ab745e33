"""Block-scaled rows in pages give the bits of contiguous rows, and weight gradients are scaled and added with one
rounding: on the CPU, and with interpreted kernels in place of its operators.
"""

import math
import random
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.block_scaled import operators, reference
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
from megatron.core.fusions.gated_activation import ActivationForm
from megatron.core.paged_rows import PagedRows, operand
from megatron.core.transformer.moe.static_rows import gather_into

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
Interpreted = Callable[..., ModuleType]
PACKAGE, MOE = "megatron.core.block_scaled", "megatron.core.transformer.moe"
BF16, FP32 = torch.bfloat16, torch.float32
FORMS = [BlockFormat(block) for block in BLOCKS]
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: f"blocks of {form.block}")
SPARE = 21  # rows of the buffers beyond the live ones
# Rows per expert: empty experts first, between and last, and tiles that begin and end within a page.
RAGGED, ONE, EMPTY = [0, 5, 0, 131, 64, 1, 0], [3], [0, 0]
# Pages smaller than a tile, as long as one, and longer without a power of 2. Widths with and without masked loads.
PAGES = [
    (16, False, RAGGED, 40, 20),
    (16, True, ONE, 128, 48),
    (128, False, RAGGED, 128, 48),
    (144, False, [0, 140, 0], 40, 20),
    (128, True, [7, 140], 40, 20),
    (128, False, EMPTY, 128, 48),
]
SET, CLEAR = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


def use_kernels(monkeypatch: pytest.MonkeyPatch, interpreted: Interpreted, kind: str) -> None:
    """Replaces operators that accept pages, and weight gradients, by interpreted launchers.

    kind: arithmetic of products.
    """
    quantizing, products = (interpreted(name, of=PACKAGE) for name in ("triton_quantize", "triton_products"))
    arithmetic = products.Arithmetic[kind]
    ops = operators.ops
    launchers = SimpleNamespace(
        quantize=ops.quantize,
        dequantize=ops.dequantize,
        quantize_squares=ops.quantize_squares,
        quantize_columns=quantizing.quantize_columns,
        gated_activation_quantize=quantizing.gated_activation_quantize,
        scaled_product=partial(products.scaled_product, arithmetic=arithmetic),
        scaled_weight_grad=partial(products.scaled_weight_grad, arithmetic=arithmetic),
    )
    monkeypatch.setattr(operators, "ops", launchers)


@pytest.fixture(params=["CPU", "PROMOTED", "DEQUANTIZED"])
def _each_arithmetic(request: Any, monkeypatch: pytest.MonkeyPatch, interpreted: Interpreted) -> None:
    if request.param != "CPU":
        use_kernels(monkeypatch, interpreted, request.param)


@pytest.fixture(params=["CPU", "kernels"])
def _each_device(request: Any, monkeypatch: pytest.MonkeyPatch, interpreted: Interpreted) -> None:
    if request.param != "CPU":
        use_kernels(monkeypatch, interpreted, "DEQUANTIZED")


on_each_arithmetic = pytest.mark.usefixtures("_each_arithmetic")
on_each_device = pytest.mark.usefixtures("_each_device")


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0, dtype=torch.int32)


def unread(*shape: int, dtype: torch.dtype) -> Tensor:
    """Returns memory whose content decodes to NaN, or is NaN."""
    return torch.full(shape, 0xFF if dtype is torch.uint8 else math.nan, dtype=dtype)


def with_spare(live: Tensor) -> Tensor:
    return torch.cat([live, unread(SPARE, live.shape[1], dtype=live.dtype)])


class Paged:
    """Live rows in pages of an arena that is otherwise unread. Table entries of dead pages are out of range."""

    def __init__(self, live: Tensor, page_rows: int, *, is_adjacent: bool, spare: int = SPARE) -> None:
        (num_live, width), max_rows = live.shape, live.shape[0] + spare
        pages, live_pages = -(-max_rows // page_rows), -(-num_live // page_rows)
        drawn = random.Random(num_live).sample(range(pages + 7), pages)
        table = torch.tensor(list(range(2, 2 + pages)) if is_adjacent else drawn)
        table[live_pages:] = 2**20
        row = torch.arange(num_live)
        self.places = row % page_rows + table[row // page_rows] * page_rows
        arena = unread((pages + 7) * page_rows * width, dtype=live.dtype)
        arena.view(-1, width)[self.places] = live
        self.rows = PagedRows(arena, table, page_rows * width * live.itemsize, max_rows, width)

    def same(self, expected: Tensor) -> bool:
        """Returns whether the rows are equal to `expected`, and all others are still unread."""
        found = self.rows.arena.clone().view(-1, self.rows.width)
        is_same = torch.equal(found[self.places], expected)
        found[self.places] = unread(1, dtype=found.dtype)[0]
        return is_same and bool((found.eq(0xFF) if found.dtype is torch.uint8 else found.isnan()).all())


@on_each_arithmetic
@each_form
@pytest.mark.parametrize(("page_rows", "is_adjacent", "counts", "height", "width"), PAGES)
def test_products_have_the_same_bits_in_pages_unless_they_are_not_needed(
    form: BlockFormat, page_rows: int, is_adjacent: bool, counts: list[int], height: int, width: int
) -> None:
    is_transposed, dtype = form.block == 32 and page_rows == 128, BF16 if page_rows == 16 else FP32
    inner, outer = (width, height) if is_transposed else (height, width)
    offsets, live = ends_of(counts), sum(counts)
    x, weight = quantize_rows(rand(live, inner), form), quantize_weight(rand(len(counts), height, width), form)
    product = partial(multiply, weight=weight, form=form, offsets=offsets, width=width, is_transposed=is_transposed)
    place = partial(Paged, page_rows=page_rows, is_adjacent=is_adjacent)
    nothing = unread(live, outer, dtype=dtype)
    plain = with_spare(nothing)
    assert product(with_spare(x), out=plain) is plain
    assert not plain[:live].isnan().any() and plain[live:].isnan().all()
    for needed in (None, SET):
        found = place(nothing)
        assert product(place(x).rows, out=found.rows, needed=needed) is found.rows
        assert found.same(plain[:live])
    # Without pages, and with one operand in pages.
    for source in (with_spare(x), place(x).rows):
        again = with_spare(nothing)
        product(source, out=again, needed=SET)
        assert torch.equal(again[:live], plain[:live]) and again[live:].isnan().all()
    found, again = place(nothing), with_spare(nothing)
    product(with_spare(x), out=found.rows, needed=CLEAR)
    product(with_spare(x), out=again, needed=CLEAR)
    assert found.rows.arena.isnan().all() and again.isnan().all()
    product(with_spare(x), out=found.rows)
    assert found.same(plain[:live])


@on_each_device
@each_form
@pytest.mark.parametrize(("page_rows", "is_adjacent", "live"), [(16, False, 131), (128, True, 128), (96, False, 131)])
def test_columns_of_rows_in_pages_have_the_same_bytes(
    form: BlockFormat, page_rows: int, is_adjacent: bool, live: int
) -> None:
    rows, num_rows = quantize_rows(rand(live, 70), form), torch.tensor([live])
    columns = partial(quantize_columns, form=form, width=70, num_rows=num_rows)
    plain, found = (form.empty_rows(70, live + SPARE).fill_(0xAA) for _ in range(2))
    columns(with_spare(rows), out=plain)
    assert columns(Paged(rows, page_rows, is_adjacent=is_adjacent).rows, out=found) is found
    assert torch.equal(found, plain)
    assert not dequantize_rows(plain, form, out=torch.empty(70, live + SPARE))[:, :live].isnan().any()
    assert columns(Paged(rows, page_rows, is_adjacent=is_adjacent).rows).shape == plain.shape
    columns = partial(columns, num_rows=torch.tensor([0]), out=plain.fill_(0xAA))
    columns(Paged(rows[:0], page_rows, is_adjacent=is_adjacent, spare=live + SPARE).rows)
    assert plain.eq(0xAA).all()


@on_each_device
@each_form
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("page_rows", "is_adjacent", "live"), [(16, False, 37), (64, True, 37), (16, False, 0)])
def test_activations_of_rows_in_pages_have_the_same_bytes(
    form: BlockFormat, dtype: torch.dtype, page_rows: int, is_adjacent: bool, live: int
) -> None:
    gate_up, scale, num_rows = rand(live, 208, dtype=dtype), rand(live + SPARE), torch.tensor([live])
    for activation in (ActivationForm("swiglu", 1.5, 1.0), ActivationForm("squared_relu")):
        act = partial(activate_and_quantize, scale=scale, form=form, activation=activation, num_rows=num_rows)
        plain, found = (form.empty_rows(live + SPARE, activation.width(gate_up)).fill_(0xAA) for _ in range(2))
        act(with_spare(gate_up), out=plain)
        assert act(Paged(gate_up, page_rows, is_adjacent=is_adjacent).rows, out=found) is found
        assert torch.equal(found, plain) and plain[live:].eq(0xAA).all()


@pytest.mark.parametrize("device", ["CPU", "kernels"])
@each_form
def test_packed_rows_are_gathered_into_pages_and_padding_is_zero(
    device: str, form: BlockFormat, interpreted: Interpreted
) -> None:
    x, num_rows = quantize_rows(rand(11, 70), form), torch.tensor([45])
    source = torch.randint(-1, 11, (45 + SPARE,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    source[:3] = -1
    expected = torch.where((source < 0)[:, None], torch.zeros((), dtype=torch.uint8), x[source.clamp(min=0)])[:45]
    plain = unread(45 + SPARE, x.shape[1], dtype=torch.uint8)
    paged = Paged(plain[:45], 16, is_adjacent=False)
    if device == "CPU":
        gather_into(plain, x, source, num_rows=num_rows)
        gather_into(paged.rows, x, source, num_rows=num_rows)
    else:
        kernels = interpreted("triton_rows", of=MOE)
        kernels.gather_rows(x, source, num_rows=num_rows, out=plain)
        memory, places = operand("out", paged.rows)
        kernels.gather_rows(x, source, num_rows=num_rows, out=memory, **places)
    assert torch.equal(plain[:45], expected) and plain[45:].eq(0xFF).all() and paged.same(expected)
    values = dequantize_rows(plain[:45], form, out=torch.empty(45, 70))
    assert values[:3].eq(0).all() and torch.signbit(values[:3]).eq(0).all()
    # Zeros raise no scale of a block of columns.
    columns = quantize_columns(paged.rows, form, width=70, num_rows=num_rows)
    whole = quantize_rows(values.t().contiguous(), form)
    blocks = form.num_scales(45)
    assert torch.equal(form.scales(columns, 45 + SPARE)[:, :blocks], form.scales(whole, 45))


@on_each_arithmetic
@each_form
@pytest.mark.parametrize("counts", [[0, 1, 0, 2], [0]], ids=str)
@pytest.mark.parametrize(
    ("dtype", "scale", "is_added"),
    [(FP32, 1.0, True), (FP32, 0.3, True), (BF16, 0.3, True), (BF16, 1.0, False), (BF16, 0.3, False)],
)
def test_weight_gradients_are_scaled_and_added_with_one_rounding(
    form: BlockFormat, counts: list[int], dtype: torch.dtype, scale: float, is_added: bool
) -> None:
    offsets, capacity = ends_of([128 * count for count in counts]), 128 * sum(counts) + 128
    live = int(offsets[-1])
    x, grad = (unread(width, form.row_bytes(capacity), dtype=torch.uint8) for width in (24, 40))
    for one, width in ((x, 24), (grad, 40)):
        packed = with_spare(quantize_rows(rand(live, width), form))
        packed = torch.cat([packed, packed[:0].new_full((128 - SPARE, packed.shape[1]), 0xFF)])
        reference.quantize_columns(packed, form, rows=live, capacity=capacity, out=one)
    # Any strides, as those of transposed weights.
    before = rand(len(counts), 40, 24).to(dtype).transpose(1, 2)
    out = before.clone() if is_added else torch.full_like(before, math.nan)
    arguments: dict[str, Any] = {"offsets": offsets, "rows": capacity}
    assert weight_gradient(x, grad, form, out=out, scale=scale, is_added=is_added, **arguments) is out
    left, right = (dequantize_rows(one, form, out=torch.empty(len(one), capacity)).double() for one in (x, grad))
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        left_rows, right_rows = left[:, start:end], right[:, start:end]
        exact, size = scale * (left_rows @ right_rows.t()), scale * (left_rows.abs() @ right_rows.abs().t())
        exact = exact + before[expert].double() if is_added else exact
        # Two roundings in fp32, and one to bf16.
        rounding = exact.abs() * (2.0**-8 if dtype is BF16 else 0) + (exact.abs() + size) * 2.0**-22
        error = (out[expert].double() - exact).abs()
        assert (error <= 2 * (end - start) * 2.0**-24 * size + rounding).all()
        assert end > start or torch.equal(out[expert], before[expert] if is_added else torch.zeros_like(out[expert]))
        start = end


@each_form
def test_on_a_cpu_sums_of_bf16_and_fp32_have_the_bits_of_a_separate_addition(form: BlockFormat) -> None:
    offsets = torch.tensor([128, 256], dtype=torch.int32)
    columns = [quantize_columns(quantize_rows(rand(256, width), form), form, width=width) for width in (24, 40)]
    gradient = weight_gradient(*columns, form, offsets=offsets, rows=256, out=torch.empty(2, 24, 40))
    for dtype in (BF16, FP32):
        before = rand(2, 24, 40, dtype=dtype)
        out = before.clone()
        weight_gradient(*columns, form, offsets=offsets, rows=256, out=out, scale=0.25, is_added=True)
        assert torch.equal(out, (before.float() + 0.25 * gradient).to(dtype))


@each_form
def test_on_a_cpu_bits_do_not_depend_on_the_capacity_and_only_what_is_needed_is_decoded(
    form: BlockFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, decoded, sizes = [0, 128, 0, 256], reference._decoded, []

    def spy(packed: Tensor, form: BlockFormat, **named: Any) -> Tensor:
        found = decoded(packed, form, **named)
        sizes.append(tuple(found.shape))
        return found

    monkeypatch.setattr(reference, "_decoded", spy)
    offsets, weight = ends_of(counts), quantize_weight(rand(4, 72, 40), form)
    found = []
    for capacity in (384, 640):
        rows, grads = (quantize_rows(rand(384, width), form) for width in (72, 40))
        x, grad = (torch.cat([one, unread(capacity - 384, one.shape[1], dtype=one.dtype)]) for one in (rows, grads))
        product = torch.empty(capacity, 40)
        multiply(x, weight, form, offsets=offsets, width=40, is_transposed=False, out=product)
        columns = [
            quantize_columns(one, form, width=width, num_rows=torch.tensor([384]))
            for one, width in ((x, 72), (grad, 40))
        ]
        gradient = weight_gradient(*columns, form, offsets=offsets, rows=capacity, out=torch.empty(4, 72, 40))
        found.append((product[:384], gradient))
    assert all(map(torch.equal, *found))
    of_products, of_gradients = [(128, 72), (72, 40), (256, 72), (72, 40)], [(72, 128), (40, 128), (72, 256), (40, 256)]
    assert sizes == 2 * [*of_products, *of_gradients]


F32 = BlockFormat(32)
PACKED = Paged(quantize_rows(rand(4, 64), F32), 4, is_adjacent=True, spare=0).rows
WEIGHT = F32.empty_rows(1, 64, 32).zero_()
OFFSETS = torch.tensor([4], dtype=torch.int32)


def product(**changed: Any) -> None:
    arguments = {"x": PACKED, "weight": WEIGHT, "offsets": OFFSETS, "width": 32, "out": torch.zeros(4, 32)}
    multiply(form=F32, is_transposed=False, **{**arguments, **changed})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            lambda: product(x=Paged(rand(4, 64), 4, is_adjacent=True).rows),
            "x has pages of torch.float32 with rows of 64",
        ),
        (lambda: product(x=Paged(F32.empty_rows(4, 96), 4, is_adjacent=True).rows), "x .* must have 80 bytes"),
        (lambda: product(out=torch.zeros(5, 32)), "x has shape .* must have 5 packed rows"),
        (lambda: product(out=PACKED), "out has dtype torch.uint8: must be bf16 or fp32"),
        (lambda: product(out=Paged(rand(4, 48), 4, is_adjacent=True, spare=0).rows), "out has a width of 48"),
        (lambda: product(needed=torch.ones(1)), r"needed .* must be \[1\], torch.int64, on cpu"),
        (lambda: product(needed=torch.ones(2, dtype=torch.int64)), r"needed .* must be \[1\]"),
        (lambda: quantize_columns(PACKED, F32, width=64), "num_rows is None: rows in pages require it"),
        (lambda: quantize_columns(PACKED, F32, width=96, num_rows=SET), "packed has pages of .* must have 112 bytes"),
        (
            lambda: activate_and_quantize(
                Paged(rand(4, 64), 4, is_adjacent=True).rows, None, F32, activation=ActivationForm()
            ),
            "num_rows is None: rows in pages",
        ),
        (
            lambda: activate_and_quantize(PACKED, None, F32, activation=ActivationForm(), num_rows=SET),
            "gate_up has dtype torch.uint8",
        ),
        (
            lambda: weight_gradient(
                F32.empty_rows(4, 64),
                F32.empty_rows(4, 64),
                F32,
                offsets=torch.tensor([31, 64], dtype=torch.int32),
                rows=64,
                out=torch.empty(2, 4, 4),
            ),
            "offsets: rows 0 to 31 of expert 0 must begin and end at multiples of 32",
        ),
    ],
)
def test_bad_arguments_are_refused(wrong: Callable[[], None], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wrong()


def test_launchers_refuse_pages_that_kernels_cannot_read(
    interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernels(monkeypatch, interpreted, "DEQUANTIZED")
    split = PagedRows(PACKED.arena, PACKED.table, 48, *PACKED.shape)
    with pytest.raises(ValueError, match=r"x_sizes: page_bytes \(48\) must be a multiple of 80 bytes"):
        product(x=split)
    with pytest.raises(ValueError, match="packed_sizes: page_bytes"):
        quantize_columns(split, F32, width=64, num_rows=SET)
    gate_up = Paged(rand(4, 64), 4, is_adjacent=True, spare=0).rows
    gate_up = PagedRows(gate_up.arena, gate_up.table[:0], gate_up.page_bytes, *gate_up.shape)
    with pytest.raises(ValueError, match="gate_up_table has 0 entries"):
        activate_and_quantize(gate_up, None, F32, activation=ActivationForm(), num_rows=SET)
