"""A stash of 8 bits: forward is exact, and backward has the bits of decoded rows, for any pool and order of groups."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.block_scaled.format import BlockFormat
from megatron.core.block_scaled.reference import dequantize_rows, quantize_rows
from megatron.core.transformer.moe.paged_stash import (
    Counter,
    PagedStash,
    PagePool,
    PoolLayout,
    RowTensors,
    group_memory,
)
from megatron.core.transformer.moe.paged_stash.stash_order import EventKind, StashEvent
from tests.unit_tests.core.transformer.moe import test_expert_function
from tests.unit_tests.core.transformer.moe.paged_stash import expert_models
from tests.unit_tests.core.transformer.moe.paged_stash.test_rows_in_pages import run
from tests.unit_tests.core.transformer.moe.test_expert_function import ACTIVATIONS, CAPACITY, Case

FORM = BlockFormat(32)
BF16 = torch.bfloat16
POOLS = {"device": (400, 0), "host": (0, 400), "both": (7, 400)}


def round_trip(tensor: Tensor) -> Tensor:
    """Returns what backward reads in place of a tensor of rows, any dtype; only bf16 rows of two dimensions change."""
    if tensor.dtype is not BF16 or tensor.dim() != 2 or FORM.row_bytes(tensor.shape[1]) >= 2 * tensor.shape[1]:
        return tensor
    packed = FORM.empty_rows(*tensor.shape)
    quantize_rows(tensor.detach(), FORM, out=packed)
    decoded = torch.empty_like(tensor)
    dequantize_rows(packed, FORM, out=decoded)
    return decoded


def on_decoded_rows(num_rows: int) -> Any:
    """Context manager in which autograd saves decoded rows of the tensors with num_rows rows."""

    def pack(tensor: Tensor) -> Tensor:
        return round_trip(tensor) if tensor.shape[:1] == (num_rows,) else tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def make_stash(device_pages: int = 400, host_pages: int = 0, **options: Any) -> PagedStash:
    return PagedStash(PagePool("cpu", PoolLayout(192, device_pages, host_pages)), dtype="mxfp8", **options)


def events_of(order: str) -> list[StashEvent]:
    kinds = {"F": EventKind.FORWARD, "B": EventKind.BACKWARD}
    return [StashEvent(kinds[one[0]], f"layer {one[1:]}", 0) for one in order.split()]


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes rows of all tensors wide enough for their encoding to save bytes, and no multiple of a block."""
    for module in (test_expert_function, expert_models):
        monkeypatch.setattr(module, "HIDDEN", 40)
        monkeypatch.setattr(module, "FFN", 24)


def made_cases(**options: Any) -> list[Case]:
    cases = [Case(dtype=BF16, **options) for _ in range(3)]
    for number, case in enumerate(cases):
        case.x.data.mul_(number + 1)
    return cases


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("has_more", [False, True], ids=["", "biases and adapters"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("pool", POOLS)
def test_experts_have_exact_results_and_gradients_from_decoded_rows(pool: str, activation: str, has_more: bool) -> None:
    cases = made_cases(activation=ACTIVATIONS[activation], has_more=has_more)
    exact = [run(case, None, "") for case in cases]
    with on_decoded_rows(CAPACITY):
        expected = [case.live_grads(run(case, None, "")) for case in cases]
    assert not all(map(torch.equal, expected[0], cases[0].live_grads(exact[0], retain_graph=True))), "it is lossy"
    # In its second step each stash knows the order, and the backward of "layer 2" then follows directly.
    stash = make_stash(*POOLS[pool])
    for _ in range(2):
        outputs = [run(case, stash, f"layer {number}") for number, case in enumerate(cases)]
        assert all(map(torch.equal, outputs, exact))
        for number in reversed(range(3)):
            found = cases[number].live_grads(outputs[number])
            assert all(map(torch.equal, found, expected[number])), number
        stash.reset()
    assert not stash.is_void_sync()


@pytest.mark.usefixtures("wide")
def test_pages_hold_the_encoded_bytes() -> None:
    # x has 40 + 2 bytes and gate_up 48 + 2, both up to a multiple of 16, and the fp32 scale 4.
    (case, other, _), stash = made_cases(), make_stash()
    outputs = [run(one, stash, f"layer {number}") for number, one in enumerate((case, other))]
    assert stash.pool.occupancy_sync().counters[Counter.LIVE_BYTES] == 2 * case.live * (48 + 64 + 4)
    stash.reset()
    del outputs
    assert FORM.row_bytes(2048) + FORM.row_bytes(2 * 768) == 3696, "Qwen3-30B-A3B: 8,704 in bf16 with act"


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("pool", POOLS)
def test_contexts_of_other_modules_encode_what_they_save(pool: str) -> None:
    def model(context: Callable[..., Any] | None) -> torch.nn.Module:
        return expert_models.Model(context, kind=expert_models.MarkedExperts, dtype=BF16)

    with on_decoded_rows(expert_models.C):
        expected = expert_models.gradients(model(None), BF16)
    exact = expert_models.gradients(model(None), BF16)
    stash = make_stash(*POOLS[pool])
    for _ in range(2):
        expert_models.assert_same(expert_models.gradients(model(stash.context), BF16), expected)
        stash.reset()
    assert not all(map(torch.equal, exact, expected)), "it is lossy"


def test_a_context_stores_undeclared_rows_as_they_are() -> None:
    # The backward of a maximum looks for elements that equal it, and that of a logarithm divides.
    rows = torch.randn(12, 96).mul(50).to(BF16).requires_grad_()

    def loss(context: Any) -> Tensor:
        whole = rows * 1
        with context:
            return (whole * whole.amax(1, keepdim=True) + whole.abs().add(1e-3).log()).float().sum()

    exact = torch.autograd.grad(loss(nullcontext()), rows)[0]
    stash = make_stash()
    (found,) = torch.autograd.grad(loss(stash.context("layer", 12, max_rows=12)), rows)
    assert torch.equal(found, exact)


@pytest.mark.parametrize("first_row, columns", [(0, slice(0, 96)), (3, slice(0, 96)), (2, slice(24, 90))])
def test_rows_anywhere_in_their_storage_are_encoded_and_replaced(first_row: int, columns: slice) -> None:
    # Neighbouring blocks of 32 differ so much that a common scale would lose the smaller one. NaN follows the last row.
    powers = torch.arange(96).div(32, rounding_mode="floor").mul(-15.0).exp2()
    memory = torch.randn(20, 96).mul(powers).to(BF16)
    memory[first_row + 9 :] = torch.nan
    part = memory[first_row : first_row + 12, columns]
    expected = round_trip(part[:9].contiguous())
    weight = torch.ones((), requires_grad=True)
    stash = make_stash()
    with stash.context("layer", 9, max_rows=12) as group:
        group.rows(memory)
        product = weight * part
    occupied = stash.pool.occupancy_sync().counters[Counter.LIVE_BYTES]
    assert occupied == 9 * FORM.row_bytes(part.shape[1])
    memory.zero_()  # rows are encoded when the context ends
    grad = torch.ones_like(product)
    grad[9:] = 0
    saved = next(node for node in [product.grad_fn] if node is not None)._saved_other  # type: ignore[attr-defined]
    assert torch.equal(saved[:9], expected) and saved.stride() == part.stride()
    whole = stash.footprint()
    stash.reset()
    assert stash.footprint().static_bytes == 12 * part.shape[1] * 2 and whole.static_bytes == 0


def test_other_dtypes_in_the_same_memory_and_rows_of_several_tokens_are_stored_as_they_are() -> None:
    weight, stash = torch.ones((), requires_grad=True), make_stash()
    halves = torch.randn(12, 96).to(BF16)
    memory = halves.view(torch.float32)
    scales = torch.randn(3, 96).to(BF16)
    with stash.context("layer", 12, max_rows=12) as group:
        group.rows(memory)
        group.mark(scales, tokens_per_row=4)
        outputs = weight * memory[:, :24], weight.to(BF16) * halves[:, 48:], weight.to(BF16) * scales
    assert stash.pool.occupancy_sync().counters[Counter.LIVE_BYTES] == 12 * 192 + 3 * 192
    exact = memory[:, :24].clone(), halves[:, 48:].clone(), scales.clone()
    for output, rows in zip(outputs, exact, strict=True):
        (found,) = torch.autograd.grad(output.sum(), weight)
        (expected,) = torch.autograd.grad((weight.to(rows.dtype) * rows).sum(), weight)
        assert torch.equal(found, expected)
    stash.reset()


@pytest.mark.usefixtures("wide")
def test_a_footprint_counts_buffers_of_whole_rows_and_those_of_encoded_ones() -> None:
    cases, stash = made_cases(), make_stash()
    outputs = [run(case, stash, f"layer {number}") for number, case in enumerate(cases)]
    for number in reversed(range(3)):
        cases[number].live_grads(outputs[number])
    stash.reset()
    whole, encoded = CAPACITY * (80 + 96 + 4), CAPACITY * (48 + 64)
    found = stash.footprint()
    assert (found.static_bytes, found.working_set_bytes) == (3 * whole, 2 * (whole + encoded))


@pytest.mark.parametrize("columns, stored", [
    ([slice(0, 40), slice(40, 96)], 112),  # adjacent: 96 + 3 bytes, up to a multiple of 16
    ([slice(0, 96), slice(3, 50)], 112),
    ([slice(0, 40), slice(41, 96)], 192),  # the column between them is not saved
    ([slice(0, 96, 2)], 190),
])  # fmt: skip
def test_memory_that_was_not_saved_does_not_share_a_scale(columns: list[slice], stored: int) -> None:
    rows = torch.randn(12, 96, dtype=BF16).requires_grad_()
    whole = rows * 1
    parts = [whole[:, one] for one in columns]
    unsaved = torch.ones(96, dtype=torch.bool)
    for one in columns:
        unsaved[one] = False
    with torch.no_grad():
        whole.data[:, unsaved] = torch.nan

    def loss() -> Tensor:
        return sum((part.square().float().sum() for part in parts), torch.zeros(()))

    stash = make_stash()
    with stash.context("layer", 12, max_rows=12, takes=RowTensors.GUESSED) as group:
        group.rows(whole)
        total = loss()
    assert stash.pool.occupancy_sync().counters[Counter.LIVE_BYTES] == 12 * stored
    total.backward()
    assert rows.grad is not None
    if stored > 112:  # stored as they are
        expected = sum(torch.zeros_like(rows).index_add(1, torch.arange(96)[one], 2 * rows[:, one]) for one in columns)
        assert torch.equal(rows.grad, expected)
    assert rows.grad[:, ~unsaved].isfinite().all()


def test_rows_of_other_dtypes_and_narrow_rows_are_stored_as_they_are() -> None:
    for options in ({}, {"dtype": BF16}):
        case, stash = Case(**options), make_stash()
        expected = case.live_grads(run(case, None, ""))
        output = run(case, stash, "layer 0")
        row = case.x.element_size() * 32 + 4  # x has 16 elements, gate_up 16
        assert stash.pool.occupancy_sync().counters[Counter.LIVE_BYTES] == case.live * row
        assert all(map(torch.equal, case.live_grads(output), expected))
        stash.reset()


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("is_next", [False, True])
def test_what_is_not_finite_reaches_the_gradients(wrong: float, is_next: bool) -> None:
    (case, *_), events = made_cases(), events_of("F0 B0" if is_next else "F0 F1 B1 B0")
    case.x.data[0, 3] = wrong
    stash = make_stash(events=events)
    output = run(case, stash, "layer 0")
    weight = case.live_grads(output, wanted=["weight1"])[0]
    assert weight[0].isnan().any()


@pytest.mark.usefixtures("wide")
def test_without_pages_for_gate_up_the_step_is_discarded() -> None:
    (case, *_), stash = made_cases(), make_stash(4)
    output = run(case, stash, "layer 0")
    counters = stash.pool.occupancy_sync().counters
    assert stash.is_void_sync() and not counters[Counter.DROPPED_GATE_UP], "nothing is recomputed from decoded rows"
    case.live_grads(output)


@pytest.mark.usefixtures("wide")
def test_prefetched_rows_are_decoded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    cases, stash, decoded = made_cases(), make_stash(prefetch_groups=1), list[int]()
    decode = group_memory.decode

    def counted(*arguments: Any, **options: Any) -> None:
        decoded.append(1)
        decode(*arguments, **options)

    monkeypatch.setattr(group_memory, "decode", counted)
    outputs = [run(case, stash, f"layer {number}") for number, case in enumerate(cases)]
    cases[2].live_grads(outputs[2])
    assert len(decoded) == 4, "x and gate_up of this group and of the next"


@pytest.mark.usefixtures("wide")
def test_copies_of_a_stash_encode_too_and_other_values_are_refused() -> None:
    stash = make_stash()
    (case, *_), copied = made_cases(), copy.deepcopy(stash)
    run(case, copied, "layer 0")
    assert copied.dtype == "mxfp8" and not copied.has_rungs
    with pytest.raises(ValueError, match="dtype \\('fp4'\\) must be None or one of 'mxfp8'"):
        PagedStash(stash.pool, dtype="fp4")
    pool = PagePool("cpu", PoolLayout(192, 9), scratch_pages=9)
    with pytest.raises(ValueError, match="dtype is 'mxfp8', and computes_in_pages is True: rows are encoded when"):
        PagedStash(pool, dtype="mxfp8", computes_in_pages=True)
