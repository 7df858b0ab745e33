"""Interpreted kernels on rows in pages give the bits that they give on contiguous rows, and touch no other element."""

import itertools
import math
import random
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.fusions.gated_activation import ActivationForm
from megatron.core.paged_rows import PagedRows, memory_of, operand
from megatron.core.transformer.moe.paged_stash.page_layout import (
    Counter,
    Held,
    PlacedTensor,
    PoolLayout,
    Priority,
    TensorSpec,
    encode_tensors,
)
from megatron.core.transformer.moe_config import GPU_ROW_ALIGNMENT

Interpreted = Callable[..., ModuleType]
Launch = Callable[..., None]

FUSIONS, MOE = "megatron.core.fusions", "megatron.core.transformer.moe"
BF16, FP32 = torch.bfloat16, torch.float32
# Rows per expert: empty experts first, between and last, and tiles that start and end within a page.
RAGGED, EMPTY, SHORT = [0, 5, 0, 131, 64, 1, 0], [0, 0, 0], [17, 0, 30]
# The last row of a tile is the first one of a page.
ACROSS = [1, 128]
# (dtype, rows of a page, rows per expert): tiles of GEMMs have 128 rows in bf16 and 64 in fp32, so that both modes of
# lookups occur, pages as long as a tile, and pages whose rows are no power of 2.
PAGES = [
    (BF16, 16, RAGGED),
    (BF16, 64, SHORT),
    (BF16, 128, RAGGED),
    (BF16, 144, RAGGED),
    (BF16, 128, ACROSS),
    (BF16, 128, EMPTY),
    (FP32, 16, SHORT),
    (FP32, 64, RAGGED),
    (FP32, 128, RAGGED),
]
FORMS = [ActivationForm(), ActivationForm("quick_geglu", 1.0, 1.0), ActivationForm("squared_relu")]
# GELU's act is recomputed by its own kernel, not by the gradient's.
EXACT_GELU = ActivationForm("geglu")
SET, CLEAR = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
SPARE = 21  # rows of the buffers beyond the live ones


def places_of(name: str, rows: Any) -> dict[str, Any]:
    return operand(name, rows)[1]


def rand(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def nans(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0, dtype=torch.int32)


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int16 if values.itemsize == 2 else torch.int32)


class Paged:
    """Rows in random pages of an arena whose other elements are NaN. Entries of dead pages are out of range."""

    def __init__(self, live: Tensor, *, page_rows: int, max_rows: int) -> None:
        num_live, width = live.shape
        pages, self.live_pages = -(-max_rows // page_rows), -(-num_live // page_rows)
        ids = random.Random(num_live + width).sample(range(pages + 7), pages)
        table = torch.tensor(ids, dtype=torch.int64)
        table[self.live_pages :] = 2**20
        self.places = torch.arange(num_live) % page_rows + table[torch.arange(num_live) // page_rows] * page_rows
        arena = nans((pages + 7) * page_rows * width, dtype=live.dtype)
        arena.view(-1, width)[self.places] = live
        self.rows = PagedRows(arena, table, page_rows * width * live.itemsize, max_rows, width)

    def same(self, expected: Tensor) -> bool:
        """Returns whether the rows have the bits of `expected`, [live rows, W], and all others are still NaN."""
        found = self.rows.arena.clone().view(-1, self.rows.width)
        is_same = torch.equal(bits(found[self.places]), bits(expected))
        found[self.places] = math.nan
        return is_same and bool(found.isnan().all())


def both(launch: Launch, values: dict[str, Tensor], written: set[str], *, counts: list[int], page_rows: int) -> None:
    """Compares a launch on contiguous operands with one where all of `values` are in pages.

    values: live rows, [R, W], by operand. written: operands that the launch writes.
    """
    num_live = sum(counts)
    plain, paged = {}, {}
    for name, live in values.items():
        plain[name] = torch.cat([live, nans(SPARE, live.shape[1], dtype=live.dtype)])
        paged[name] = Paged(live, page_rows=page_rows, max_rows=num_live + SPARE)
    launch(**plain)
    tables = [places_of(name, one.rows) for name, one in paged.items()]
    launch(
        **{name: memory_of(one.rows) for name, one in paged.items()},
        **{key: value for table in tables for key, value in table.items()},
    )
    assert all(paged[name].same(plain[name][:num_live]) for name in values)
    assert all(plain[name][num_live:].isnan().all() for name in values)
    assert num_live == 0 or all(not torch.equal(plain[name][:num_live], values[name]) for name in written)


def weights(dtype: torch.dtype, experts: int, inner: int, outer: int) -> Tensor:
    return rand(experts, outer, inner, dtype=dtype).transpose(1, 2)


@pytest.mark.parametrize(("dtype", "page_rows", "counts"), PAGES)
@pytest.mark.parametrize(("inner", "outer"), [(32, 48), (7, 20)], ids=["even", "odd"])
def test_products(
    interpreted: Interpreted, dtype: torch.dtype, page_rows: int, counts: list[int], inner: int, outer: int
) -> None:
    kernels, offsets, live = interpreted("triton_grouped_gemm"), ends_of(counts), sum(counts)
    weight, bias = weights(dtype, len(counts), inner, outer), rand(len(counts), outer, dtype=dtype)
    compare = partial(both, counts=counts, page_rows=page_rows)
    values = {"x": rand(live, inner, dtype=dtype), "out": nans(live, outer, dtype=dtype)}
    compare(partial(kernels.grouped_gemm, weight=weight, offsets=offsets), values, {"out"})
    again = partial(kernels.gate_up_from_x, weight=weight, offsets=offsets, bias=bias)
    compare(partial(again, needed=SET), values, {"out"})
    compare(partial(again, needed=CLEAR), values, set())
    low, rows = nans(live + SPARE, inner, dtype=dtype), {"rows": rand(live, outer, dtype=dtype)}
    low[:live] = rand(live, inner, dtype=dtype)
    compare(partial(kernels.add_low_rank, low=low, weight=weight, offsets=offsets, scale=0.5), rows, {"rows"})


@pytest.mark.parametrize(("dtype", "page_rows", "counts"), PAGES)
def test_one_operand_of_a_product(
    interpreted: Interpreted, dtype: torch.dtype, page_rows: int, counts: list[int]
) -> None:
    kernels, offsets, live = interpreted("triton_grouped_gemm"), ends_of(counts), sum(counts)
    weight = weights(dtype, len(counts), 32, 48)
    x = torch.cat([rand(live, 32, dtype=dtype), nans(SPARE, 32, dtype=dtype)])
    out = nans(live + SPARE, 48, dtype=dtype)

    def with_x(x: Tensor, **more: Any) -> None:
        found = torch.full_like(out, math.nan)
        kernels.grouped_gemm(x, weight, offsets=offsets, out=found, **more)
        results.append(found)

    results: list[Tensor] = []
    both(with_x, {"x": x[:live]}, set(), counts=counts, page_rows=page_rows)
    assert torch.equal(bits(results[0][:live]), bits(results[1][:live])) and results[1][live:].isnan().all()
    launch = partial(kernels.grouped_gemm, x, weight, offsets=offsets)
    both(launch, {"out": out[:live]}, {"out"}, counts=counts, page_rows=page_rows)


# Pages of whole tiles. The last one has a tile in which three experts have rows.
WHOLE_TILES = [
    (BF16, 128, RAGGED),
    (BF16, 384, ACROSS),
    (BF16, 128, EMPTY),
    (FP32, 64, RAGGED),
    (FP32, 128, [9, 8, 90]),
]


@pytest.mark.parametrize(("dtype", "page_rows", "counts"), WHOLE_TILES)
@pytest.mark.parametrize(("inner", "outer"), [(32, 48), (80, 272)])
def test_products_by_descriptors(
    interpreted: Interpreted, dtype: torch.dtype, page_rows: int, counts: list[int], inner: int, outer: int
) -> None:
    # Rows have other places in tiles than with pointers. The interpreter multiplies with the CPU's BLAS, whose rounding
    # depends on the place, unlike a GPU's. Sums of small integers are exact.
    weight, live = rand(len(counts), inner, outer).mul(8).round().to(dtype), sum(counts)
    launch = by_descriptors(interpreted("triton_grouped_gemm"), weight, counts)
    values = {"x": rand(live, inner).mul(8).round().to(dtype), "out": nans(live, outer, dtype=dtype)}
    both(launch, values, {"out"}, counts=counts, page_rows=page_rows)


def by_descriptors(kernels: ModuleType, weight: Tensor, counts: list[int]) -> Launch:
    """Returns a product that reads rows in pages by descriptors, and other rows by pointers."""

    def launch(x: Tensor, out: Tensor, **pages: Any) -> None:
        loads = kernels.Loads.DESCRIPTORS if pages else kernels.Loads.POINTERS
        kernels.grouped_gemm(x, weight, offsets=ends_of(counts), out=out, **pages, loads=loads)

    return launch


WRONG_BOXES: list[tuple[str, dict[str, Any]]] = [
    ("pages of 16 rows, but boxes of descriptors need pages of a multiple of 128 rows", {"page_rows": 16}),
    ("pages of 144 rows", {"page_rows": 144}),
    (r"weight has \[32, 40\] for an expert, but boxes need multiples of 16", {"outer": 40}),
    ("weight must be contiguous", {"is_stored": False}),
    ("must start at a multiple of 16 bytes", {"offset": 1}),
]


@pytest.mark.parametrize(("words", "change"), WRONG_BOXES, ids=[words for words, _ in WRONG_BOXES])
def test_operands_that_descriptors_cannot_read_are_refused(
    interpreted: Interpreted, words: str, change: dict[str, Any]
) -> None:
    page_rows, outer = change.get("page_rows", 128), change.get("outer", 48)
    weight = weights(BF16, 2, 32, outer) if "is_stored" in change else rand(2, 32, outer, dtype=BF16)
    launch = by_descriptors(interpreted("triton_grouped_gemm"), weight, [9, 8])
    x = Paged(rand(17, 32, dtype=BF16), page_rows=page_rows, max_rows=20).rows
    arena = torch.cat([x.arena.new_zeros(8), x.arena])[change.get("offset", 8) :]
    out = nans(20, outer, dtype=BF16)
    with pytest.raises(ValueError, match=words):
        launch(x=arena, out=out, x_table=x.table, x_sizes=x.sizes)
    assert out.isnan().all()


def test_rows_without_pages_have_no_descriptor(interpreted: Interpreted) -> None:
    kernels = interpreted("triton_grouped_gemm")
    x, weight, out = rand(9, 32), rand(1, 32, 48), rand(9, 48)
    with pytest.raises(ValueError, match="x has pages of 0 rows"):
        kernels.grouped_gemm(x, weight, offsets=ends_of([9]), out=out, loads=kernels.Loads.DESCRIPTORS)


def test_boxes_across_pages_would_be_wrong(interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = interpreted("triton_grouped_gemm")
    checked = kernels._boxes
    monkeypatch.setattr(kernels, "_boxes", lambda x, weight, *, page: checked(x, weight, page=128))
    launch = by_descriptors(kernels, rand(1, 32, 48, dtype=BF16), [140])
    values = {"x": rand(140, 32, dtype=BF16), "out": nans(140, 48, dtype=BF16)}
    # The first tile of 128 rows ends in the second page.
    with pytest.raises(AssertionError):
        both(launch, values, {"out"}, counts=[140], page_rows=96)


@pytest.mark.parametrize(("dtype", "page_rows", "counts"), PAGES)
@pytest.mark.parametrize(("inner", "outer"), [(32, 48), (7, 20)], ids=["even", "odd"])
@pytest.mark.parametrize("is_added", [False, True], ids=["written", "added"])
def test_weight_gradients(
    interpreted: Interpreted,
    dtype: torch.dtype,
    page_rows: int,
    counts: list[int],
    inner: int,
    outer: int,
    is_added: bool,
) -> None:
    kernels, offsets, live = interpreted("triton_grouped_gemm"), ends_of(counts), sum(counts)
    grad = torch.cat([rand(live, outer, dtype=dtype), nans(SPARE, outer, dtype=dtype)])
    more = {"scale": 0.5, "is_added": True} if is_added else {}
    results: list[Tensor] = []

    def launch(x: Tensor, **pages: Any) -> None:
        out = rand(len(counts), inner, outer, dtype=FP32 if is_added else dtype)
        kernels.grouped_gemm_weight_grad(x, grad, offsets=offsets, out=out, **more, **pages)
        results.append(out)

    both(launch, {"x": rand(live, inner, dtype=dtype)}, set(), counts=counts, page_rows=page_rows)
    assert torch.equal(bits(results[0]), bits(results[1])) and not results[0].isnan().any()


# Pages that hold whole tiles of an aligned gradient, and pages that do not.
@pytest.mark.parametrize(("dtype", "page_rows"), [(BF16, 128), (BF16, 144), (BF16, 16), (FP32, 64)])
@pytest.mark.parametrize(("inner", "outer"), [(32, 48), (7, 20)], ids=["even", "odd"])
@pytest.mark.parametrize("is_added", [False, True], ids=["written", "added"])
def test_padded_experts_have_the_same_weight_gradients(
    interpreted: Interpreted, dtype: torch.dtype, page_rows: int, inner: int, outer: int, is_added: bool
) -> None:
    kernels, counts, more = interpreted("triton_grouped_gemm"), [70, 0, 64, 3], {}
    if is_added:
        more = {"scale": 0.5, "is_added": True}
    x, grad = rand(sum(counts), inner, dtype=dtype), rand(sum(counts), outer, dtype=dtype)
    aligned = [-(-count // GPU_ROW_ALIGNMENT) * GPU_ROW_ALIGNMENT for count in counts]
    padded_x, padded_grad = (
        torch.cat([F.pad(part, (0, 0, 0, -len(part) % GPU_ROW_ALIGNMENT)) for part in rows.split(counts)])
        for rows in (x, grad)
    )
    spare = nans(GPU_ROW_ALIGNMENT, outer, dtype=dtype)  # beyond the live rows

    def gradient(x: Tensor, grad: Tensor, ends: Tensor, **options: Any) -> Tensor:
        out = rand(len(counts), inner, outer, dtype=FP32 if is_added else dtype)
        kernels.grouped_gemm_weight_grad(x, grad, offsets=ends, out=out, **more, **options)
        return bits(out)

    expected, padded_grad = gradient(x, grad, ends_of(counts)), torch.cat([padded_grad, spare])
    paged = Paged(padded_x, page_rows=page_rows, max_rows=len(padded_grad)).rows
    options = {"row_alignment": GPU_ROW_ALIGNMENT}
    in_pages = gradient(memory_of(paged), padded_grad, ends_of(aligned), **options, **places_of("x", paged))
    padded_x = torch.cat([padded_x, nans(len(spare), inner, dtype=dtype)])
    assert torch.equal(gradient(padded_x, padded_grad, ends_of(aligned), **options), expected)
    assert torch.equal(in_pages, expected)
    with pytest.raises(ValueError, match=r"grad has 255 rows: must be a multiple of row_alignment \(64\)"):
        gradient(padded_x[:255], padded_grad[:255], ends_of(aligned), **options)


def test_the_alignment_on_gpus_is_a_multiple_of_every_weight_gradients_tile() -> None:
    from megatron.core.transformer.moe.paged_stash.triton_grouped_gemm import weight_grad_tile

    for dtype, is_even, is_added in itertools.product((BF16, FP32), (False, True), (False, True)):
        assert GPU_ROW_ALIGNMENT % weight_grad_tile(dtype, is_even=is_even, is_added=is_added)["TERMS"] == 0


@pytest.mark.parametrize(("dtype", "page_rows", "counts"), PAGES)
@pytest.mark.parametrize("is_scaled", [False, True], ids=["plain", "scaled"])
def test_biases(
    interpreted: Interpreted, dtype: torch.dtype, page_rows: int, counts: list[int], is_scaled: bool
) -> None:
    kernels, live = interpreted("triton_biases"), sum(counts)
    scale = torch.cat([rand(live), nans(SPARE, dtype=FP32)]) if is_scaled else None
    bias = rand(len(counts), 24, dtype=dtype)
    launch = partial(kernels.add_expert_bias, bias=bias, scale=scale, offsets=ends_of(counts), share=0.5)
    both(launch, {"rows": rand(live, 24, dtype=dtype)}, {"rows"}, counts=counts, page_rows=page_rows)


@pytest.mark.parametrize(("dtype", "page_rows", "counts"), PAGES)
@pytest.mark.parametrize("form", [*FORMS, EXACT_GELU], ids=lambda form: form.name)
def test_activations(
    interpreted: Interpreted, dtype: torch.dtype, page_rows: int, counts: list[int], form: ActivationForm
) -> None:
    kernels, live, ffn = interpreted("triton_activations", of=FUSIONS), sum(counts), 24
    capacity, num_rows = live + SPARE, torch.tensor([live])
    scale = torch.cat([rand(live).abs(), nans(SPARE, dtype=FP32)])
    grad = torch.cat([rand(live, ffn, dtype=dtype), nans(SPARE, ffn, dtype=dtype)])
    width = ffn * (2 if form.activation.is_gated else 1)
    results: list[list[Tensor]] = []

    def launch(gate_up: Tensor, **pages: Any) -> None:
        act, again = (nans(capacity, ffn, dtype=dtype) for _ in range(2))
        grads, grad_scale = nans(capacity, width, dtype=dtype), nans(capacity, dtype=FP32)
        form_and_pages = {**form.arguments, **pages}
        kernels.gated_activation(gate_up, scale, num_rows=num_rows, out=act, **form_and_pages)
        kernels.gated_activation_backward(
            grad,
            gate_up,
            scale=scale,
            num_rows=num_rows,
            grad_gate_up=grads,
            grad_scale=grad_scale,
            act=again,
            **form_and_pages,
        )
        assert torch.equal(bits(act[:live]), bits(again[:live]))
        results.append([act, again, grads, grad_scale])

    both(launch, {"gate_up": rand(live, width, dtype=dtype)}, set(), counts=counts, page_rows=page_rows)
    for plain, paged in zip(*results, strict=True):
        assert torch.equal(bits(plain[:live]), bits(paged[:live]))
        assert not paged[:live].isnan().any() and paged[live:].isnan().all()


@pytest.mark.parametrize(("dtype", "page_rows", "counts"), PAGES)
@pytest.mark.parametrize("width", [1, 24])
def test_gathers(interpreted: Interpreted, dtype: torch.dtype, page_rows: int, counts: list[int], width: int) -> None:
    kernels, live = interpreted("triton_rows", of=MOE), sum(counts)
    source = torch.full((live + SPARE,), 2**30, dtype=torch.int32)
    source[:live] = torch.randint(-1, 40, (live,), generator=torch.Generator().manual_seed(1))
    launch = partial(kernels.gather_rows, rand(40, width, dtype=dtype), source, num_rows=torch.tensor([live]))
    both(launch, {"out": nans(live, width, dtype=dtype)}, {"out"}, counts=counts, page_rows=page_rows)


# --- Tables and sizes that kernels would read or write wrongly with ---

MAX_ROWS, WIDTH, PAGE_ROWS = 40, 16, 16
PAGE_BYTES = PAGE_ROWS * WIDTH * 4
NUM_ROWS = torch.tensor([MAX_ROWS])
ONE_END = torch.tensor([MAX_ROWS], dtype=torch.int32)
SQUARE = torch.zeros(1, WIDTH, WIDTH)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


def launches(interpreted: Interpreted) -> dict[str, tuple[str, Launch]]:
    """Returns launches with one missing operand of [MAX_ROWS, WIDTH], fp32, and its name."""
    products, biases = interpreted("triton_grouped_gemm"), interpreted("triton_biases")
    activations, rows = interpreted("triton_activations", of=FUSIONS), interpreted("triton_rows", of=MOE)
    data, half, bias = zeros(MAX_ROWS, WIDTH), zeros(MAX_ROWS, WIDTH // 2), zeros(1, WIDTH)
    ends, scaled = {"offsets": ONE_END}, {"scale": data[:, 0].clone(), "offsets": ONE_END, "share": 1.0}
    source, form = torch.zeros(MAX_ROWS, dtype=torch.int32), {"activation": "swiglu", "num_rows": NUM_ROWS}
    again, grads = partial(products.gate_up_from_x, weight=SQUARE, needed=SET, **ends), (data, None)
    back = partial(activations.gated_activation_backward, half, grad_gate_up=grads[0], grad_scale=grads[1], scale=None)
    return {
        "grouped_gemm's x": ("x", partial(products.grouped_gemm, weight=SQUARE, out=data, **ends)),
        "grouped_gemm's out": ("out", partial(products.grouped_gemm, x=data, weight=SQUARE, **ends)),
        "gate_up_from_x's x": ("x", partial(again, out=data)),
        "gate_up_from_x's out": ("out", partial(again, x=data, bias=bias)),
        "add_low_rank": ("rows", partial(products.add_low_rank, low=data, weight=SQUARE, scale=1.0, **ends)),
        "weight gradient": ("x", partial(products.grouped_gemm_weight_grad, grad=data, out=SQUARE.clone(), **ends)),
        "bias": ("rows", partial(biases.add_expert_bias, bias=bias, **scaled)),
        "activation": ("gate_up", partial(activations.gated_activation, scale=None, out=half.clone(), **form)),
        "activation backward": ("gate_up", partial(back, **form)),
        "gather": ("out", partial(rows.gather_rows, data, source, num_rows=NUM_ROWS)),
    }


def wrong(**changes: Any) -> dict[str, Any]:
    """Returns an arena, its table and sizes, with changes."""
    right = {"arena": zeros(9 * PAGE_ROWS * WIDTH), "table": torch.tensor([4, 0, 2])}
    return {**right, "page_bytes": PAGE_BYTES, "max_rows": MAX_ROWS, "width": WIDTH, **changes}


WRONG: list[tuple[str, dict[str, Any]]] = [
    (r"_sizes: page_bytes \(1000\) must be a multiple of 64 bytes", wrong(page_bytes=1000)),
    (r"_sizes: page_bytes \(32\) must be a multiple of 64 bytes", wrong(page_bytes=32)),
    (r"_sizes: page_bytes \(0\) must be a multiple of 64 bytes", wrong(page_bytes=0)),
    (r"has 39 rows( of 16 elements, but the other operands require 40 rows of 16)?", wrong(max_rows=39)),
    (r"has 40 rows of 8 elements, but the other operands require 40 rows of 16", wrong(width=8)),
    (r"width must be at least 1, max_rows between 0 and 2\*\*30", wrong(width=0)),
    (r"width must be at least 1, max_rows between 0 and 2\*\*30", wrong(max_rows=-1)),
    (r"width must be at least 1, max_rows between 0 and 2\*\*30", wrong(max_rows=2**31)),
    (r"_table \(\[3\], torch.int32, cpu\) must be contiguous int64 on cpu", wrong(table=torch.zeros(3).int())),
    (r"_table \(\[3\], torch.int64, meta\) must be contiguous", wrong(table=torch.zeros(3).long().to("meta"))),
    (r"_table \(\[3, 1\], torch.int64, cpu\) must be contiguous", wrong(table=torch.zeros(3, 1).long())),
    (r"_table \(\[3\], torch.int64, cpu\) must be contiguous", wrong(table=torch.zeros(6).long()[::2])),
    (r"_table has 2 entries, but 40 rows need 3 pages of 16 rows", wrong(table=torch.zeros(2).long())),
    (r"\(\[144, 16\], torch.float32, cpu\) must be an arena", wrong(arena=zeros(144, 16))),
    (r"_table \(None\) and \w+_sizes \(\[1024, 40, 16\]\) must be given together", wrong(table=None)),
    (r"_sizes \(\[\]\) must be given together", wrong(page_bytes=None)),
]


@pytest.mark.parametrize(("words", "given"), WRONG, ids=[words for words, _ in WRONG])
def test_operands_that_do_not_fit_are_refused(interpreted: Interpreted, words: str, given: dict[str, Any]) -> None:
    sizes = [given["page_bytes"], given["max_rows"], given["width"]]
    more = {"table": given["table"], "sizes": [] if None in sizes else sizes}
    before = given["arena"].clone()
    for name, launch in launches(interpreted).values():
        with pytest.raises(ValueError, match=words) as refusal:
            launch(**{name: given["arena"]}, **{f"{name}_{key}": value for key, value in more.items()})
        assert name in str(refusal.value)
        assert torch.equal(before, given["arena"])


def test_arenas_of_too_many_rows_are_refused(interpreted: Interpreted) -> None:
    table, sizes = torch.empty(3, dtype=torch.int64, device="meta"), [PAGE_BYTES, MAX_ROWS, WIDTH]
    checks = interpreted("triton_rows", of=MOE)
    assert checks.row_layout("x", torch.empty(2**35 - 1, device="meta"), (table, sizes)).page == PAGE_ROWS
    with pytest.raises(ValueError, match=r"x has 2147483648 rows of 16, but kernels number at most 2\*\*31 - 1"):
        checks.row_layout("x", torch.empty(2**35, device="meta"), (table, sizes))


def test_launches_that_were_refused_are_right_otherwise(interpreted: Interpreted) -> None:
    given = wrong()
    sizes = [given["page_bytes"], given["max_rows"], given["width"]]
    for name, launch in launches(interpreted).values():
        launch(**{name: given["arena"], f"{name}_table": given["table"], f"{name}_sizes": sizes})


def test_a_gather_into_another_dtype_is_refused(interpreted: Interpreted) -> None:
    name, launch = launches(interpreted)["gather"]
    given = wrong(arena=zeros(9 * PAGE_ROWS * WIDTH).to(BF16))
    sizes = [given["page_bytes"], given["max_rows"], given["width"]]
    with pytest.raises(ValueError, match=r"out \(torch.bfloat16\) must have x's dtype, torch.float32"):
        launch(**{name: given["arena"], f"{name}_table": given["table"], f"{name}_sizes": sizes})


# --- plan's places, and copies of the host tier ---


class Pool:
    """Operands of plan, stash and restore for a random group. Rings are shuffled and have wrapped around."""

    def __init__(self, seed: int, *, tensors: int, device_pages: int, host_pages: int, free: tuple[int, int]) -> None:
        draw = random.Random(seed)
        self.layout = PoolLayout(48, device_pages, host_pages)
        device, host = list(range(device_pages)), list(range(device_pages, device_pages + host_pages))
        draw.shuffle(device)
        draw.shuffle(host)
        self.ring = torch.tensor([*device, *host], dtype=torch.int32)
        heads = [draw.randint(0, 3 * size) for size in (device_pages, host_pages)]
        self.heads = torch.tensor(heads)
        self.tails = self.heads + torch.tensor(free)
        self.free = free
        self.specs = [
            TensorSpec(draw.choice((7, 16, 96)), 100, 9, draw.choice(list(Priority)), draw.choice((1, 1, 4)))
            for _ in range(tensors)
        ]
        starts = [0]
        for spec in self.specs:
            starts.append(starts[-1] + self.layout.pages_for(spec.max_bytes) + draw.randint(0, 2))
        self.placed = [PlacedTensor(spec, starts[slot], slot) for slot, spec in enumerate(self.specs)]
        self.table = torch.full((starts[-1] + 1,), -7)
        self.held = torch.zeros(tensors, len(Held), dtype=torch.int64)
        self.counters = torch.zeros(len(Counter), dtype=torch.int64)
        self.scratch = [draw.choice((-1, 1000 * (slot + 1))) for slot in range(tensors)]

    @property
    def records(self) -> dict[str, Any]:
        numbers = {"layout": self.layout.numbers, "tensors": encode_tensors(self.placed)}
        return {"table": self.table, "held": self.held, **numbers}

    def plan(self, kernels: ModuleType, tokens: int, **more: Any) -> None:
        ends = {"heads": self.heads, "tails": self.tails, "ring": self.ring, "counters": self.counters}
        kernels.plan(torch.tensor([tokens]), torch.zeros(3, dtype=torch.int64), **ends, **self.records, **more)

    def expected_places(self) -> list[int]:
        """Returns the places of a plan, from the table that it wrote."""
        places = [-5] * len(self.table)
        for one, first in zip(self.placed, self.scratch):
            got = int(self.held[one.slot, Held.PAGES])
            for index in range(-(-one.spec.max_bytes // self.layout.page_bytes) if first >= 0 else 0):
                page = int(self.table[one.table_start + index]) if index < got else self.layout.num_pages
                places[one.table_start + index] = page if page < self.layout.device_pages else first + index
        return places


@pytest.mark.parametrize(
    ("tensors", "tiers", "free"),
    [
        (1, (40, 0), (40, 0)),  # all on the device
        (3, (9, 40), (9, 40)),  # some on each
        (3, (9, 9), (2, 3)),  # some dropped
        (5, (0, 30), (0, 30)),  # all on the host
        (16, (60, 60), (30, 30)),
    ],
)
@pytest.mark.parametrize("tokens", [-1, 0, 1, 8, 9, 1000])
def test_places_are_pages_on_the_device_or_scratch(
    interpreted: Interpreted, tensors: int, tiers: tuple[int, int], free: tuple[int, int], tokens: int
) -> None:
    kernels = interpreted("triton_kernels")
    for seed in range(2):
        kinds = {"tensors": tensors, "device_pages": tiers[0], "host_pages": tiers[1], "free": free}
        plain, placed = Pool(seed, **kinds), Pool(seed, **kinds)
        places = torch.full_like(placed.table, -5)
        plain.plan(kernels, tokens)
        placed.plan(kernels, tokens, places=places, scratch=placed.scratch)
        for name in ("table", "held", "counters", "heads", "tails", "ring"):
            assert torch.equal(getattr(plain, name), getattr(placed, name)), name
        assert places.tolist() == placed.expected_places()


def test_more_places_than_lanes(interpreted: Interpreted) -> None:
    kernels = interpreted("triton_kernels")
    pool = Pool(3, tensors=1, device_pages=301, host_pages=400, free=(300, 300))
    pool.placed = [PlacedTensor(TensorSpec(48, 48, 520), 1, 0)]
    pool.specs, pool.scratch, pool.table = [pool.placed[0].spec], [2**40], torch.full((530,), -7)
    places = torch.full_like(pool.table, -5)
    pool.plan(kernels, 520, places=places, scratch=pool.scratch)
    assert pool.held[0].tolist() == [520, 520, 0, 220]
    assert places.tolist() == pool.expected_places() and places[521:].eq(-5).all()


WRONG_PLACES: list[tuple[str, Callable[[Pool], dict[str, Any]]]] = [
    (r"places \(None\)", lambda pool: {"scratch": [0, 0]}),
    (r"scratch \(\[0\]\) must have one number for each of the 2", lambda pool: {"places": pool.table, "scratch": [0]}),
    (r"scratch \(\[\]\)", lambda pool: {"places": pool.table}),
    (r"scratch \(\[0, -2\]\)", lambda pool: {"places": pool.table, "scratch": [0, -2]}),
    (r"places \(\[\d+\], torch.int32", lambda pool: {"places": pool.table.int(), "scratch": [0, 0]}),
    (r"places \(\[1\], torch.int64", lambda pool: {"places": pool.table[:1], "scratch": [0, 0]}),
    (r"places \(\[\d+\], torch.int64, meta", lambda pool: {"places": pool.table.to("meta"), "scratch": [0, 0]}),
]


@pytest.mark.parametrize(("words", "more"), WRONG_PLACES, ids=[words for words, _ in WRONG_PLACES])
def test_places_that_do_not_fit_are_refused(
    interpreted: Interpreted, words: str, more: Callable[[Pool], dict[str, Any]]
) -> None:
    pool = Pool(1, tensors=2, device_pages=9, host_pages=9, free=(9, 9))
    before = pool.heads.clone()
    with pytest.raises(ValueError, match=words):
        pool.plan(interpreted("triton_kernels"), 3, **more(pool))
    assert torch.equal(before, pool.heads)


@pytest.mark.parametrize("tiers", [(40, 0), (5, 40), (0, 40)], ids=str)
def test_copies_of_the_host_tier_alone(interpreted: Interpreted, tiers: tuple[int, int]) -> None:
    kernels = interpreted("triton_kernels")
    pool = Pool(2, tensors=2, device_pages=tiers[0], host_pages=tiers[1], free=tiers)
    pool.plan(kernels, 8)
    memory = [torch.randint(1, 255, (900,), dtype=torch.uint8) for _ in pool.specs]
    pages = [torch.zeros(size * 48, dtype=torch.uint8) for size in tiers]
    copied = [tier.clone() for tier in pages]
    more = {"num_programs": 0, **pool.records}
    kernels.stash(memory, pages[0], host_pages=pages[1], **more)
    kernels.stash(memory, copied[0], host_pages=copied[1], host_only=True, **more)
    assert not copied[0].any() and torch.equal(copied[1], pages[1]) and bool(pages[1].any()) == (tiers[1] > 0)
    whole, part = ([torch.zeros_like(one) for one in memory] for _ in range(2))
    kernels.restore(*pages, targets=whole, **more)
    kernels.restore(*pages, targets=part, host_only=True, **more)
    for one, found, all_rows in zip(pool.placed, part, whole):
        pages_held, rows, _, on_host = pool.held[one.slot].tolist()
        first = (pages_held - on_host) * 48
        live = found.as_strided((rows, one.spec.row_bytes), (100, 1)).reshape(-1)
        expected = all_rows.as_strided((rows, one.spec.row_bytes), (100, 1)).reshape(-1)
        assert not live[:first].any() and torch.equal(live[first:], expected[first:])
