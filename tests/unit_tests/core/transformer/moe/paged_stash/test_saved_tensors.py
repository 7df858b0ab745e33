"""Which saved tensors have rows and which share memory, and that tensors of all kinds are restored unchanged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.transformer.moe import paged_stash
from megatron.core.transformer.moe.paged_stash import Counter, PagePool, PoolLayout
from megatron.core.transformer.moe.paged_stash.saved_tensors import Origin, origin_of, row_view
from tests.unit_tests.core.transformer.moe.paged_stash.expert_models import LIVE, C, is_empty_sync, make_stash

VIEWS: list[tuple[Callable[[], Tensor], tuple[int, int, int] | None]] = [
    (lambda: torch.empty(C, 6), (0, 24, 24)),
    (lambda: torch.empty(C), (0, 4, 4)),
    (lambda: torch.empty(1, C, 2, 3), (0, 24, 24)),
    (lambda: torch.empty(C, 6)[:, 2:4], (8, 24, 8)),
    (lambda: torch.empty(C, 6).t(), (0, 24, 24)),
    (lambda: torch.empty(C + 9, 6, dtype=torch.bfloat16)[9:], (108, 12, 12)),
    (lambda: torch.empty(C, C), (0, 4 * C, 4 * C)),
    (lambda: torch.empty(C)[:, None].expand(C, 6), (0, 4, 4)),
    (lambda: torch.empty(6).expand(C, 6), None),
    (lambda: torch.empty(6, C), None),
    (lambda: torch.empty(C + 1, 6), None),
    (lambda: torch.empty(C + 1).unfold(0, 2, 1), None),
    (lambda: torch.empty(0, C), None),
]


@pytest.mark.parametrize(("make", "expected"), VIEWS)
def test_rows_are_the_outermost_dimension_in_memory(
    make: Callable[[], Tensor], expected: tuple[int, int, int] | None
) -> None:
    view = row_view(make(), C)
    assert (None if view is None else (view.start, view.pitch, view.extent)) == expected


def test_what_is_made_of_parameters_alone_is_a_weight() -> None:
    weight, x = nn.Parameter(torch.randn(C, C)), torch.randn(C, C)
    frozen = nn.Parameter(torch.randn(C, C), requires_grad=False)
    weights = [weight, weight.t(), weight[:, :3], weight.bfloat16().t(), torch.stack([weight, weight * weight])]
    for one in (*weights, frozen, frozen.t()):
        assert origin_of(one, C) is Origin.NOT_ROWS
    activations = [x, x @ weight, (x @ weight).exp(), F.embedding(torch.arange(C), weight), weight[torch.arange(C)]]
    for one in (*activations, x.requires_grad_() * 1.0):
        assert origin_of(one, C) is not Origin.NOT_ROWS


class Keep(torch.autograd.Function):
    """Saves tensors for backward, and appends the tensors that backward receives to a list."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, got: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.got = got
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.got.extend(ctx.saved_tensors)
        return (grad, *[None] * (1 + len(ctx.saved_tensors)))


def random_bytes(*size: int) -> Tensor:
    return torch.randint(0, 256, size, dtype=torch.uint8)


def test_views_of_one_memory_are_stashed_once_and_come_back_with_dtype_and_strides() -> None:
    stash, got = make_stash(), []
    gate_up, wide = torch.randn(C, 20), random_bytes(C, 64)
    halves = (gate_up[:, :10], gate_up[:, 10:], gate_up, gate_up.view(C, 4, 5), gate_up.t(), gate_up)
    narrow = (
        wide.view(torch.float8_e4m3fn)[:, 16:20],
        wide.view(torch.bool)[:, 17:18],
        wide.view(torch.int16)[:, 9:10],
    )
    saved = (*halves, *narrow, torch.randn(C, dtype=torch.float64), torch.randn(3))
    x = torch.randn(3, requires_grad=True)
    with stash.context("one", LIVE, max_rows=C):
        y = Keep.apply(x, got, *saved)
    expected = [tensor.clone() for tensor in saved]
    assert stash.pool.occupancy_sync().counters[Counter.LIVE_BYTES] == LIVE * (80 + 4 + 8), "gaps are not copied"
    stash.join()
    gate_up.zero_(), wide.zero_()  # as the next layer overwrites the buffers of a static dispatch
    y.sum().backward()
    for one, other, original in zip(got, expected, saved):
        assert (one.dtype, one.shape, one.stride()) == (original.dtype, original.shape, original.stride())
        rows = one.movedim(one.shape.index(C), 0)[:LIVE] if C in one.shape else one
        others = other.movedim(other.shape.index(C), 0)[:LIVE] if C in other.shape else other
        assert rows.contiguous().view(torch.uint8).equal(others.contiguous().view(torch.uint8))
    assert is_empty_sync(stash)


def test_tensors_without_strides_are_left_as_they_are() -> None:
    stash, got, sparse = make_stash(), [], torch.eye(C).to_sparse_csr()
    with stash.context("one", LIVE, max_rows=C):
        y = Keep.apply(torch.randn(3, requires_grad=True), got, sparse, torch.randn(C, 2))
    y.sum().backward()
    assert torch.equal(got[0].to_dense(), sparse.to_dense()) and is_empty_sync(stash)


@pytest.mark.parametrize("marked_first", [True, False])
def test_scales_of_32_tokens_each_are_stashed_once_they_are_marked(marked_first: bool) -> None:
    stash, got = make_stash(), []
    data, scales = random_bytes(C, 32).view(torch.float8_e4m3fn), random_bytes(2, 8)
    expected = scales.clone()
    with stash.context("one", LIVE, max_rows=C) as group:
        if marked_first:
            group.mark(scales, tokens_per_row=32)
        y = Keep.apply(torch.randn(3, requires_grad=True), got, data, scales)
        if not marked_first:
            group.mark(scales, tokens_per_row=32)
    assert stash.pool.occupancy_sync().counters[Counter.LIVE_BYTES] == LIVE * 32 + 2 * 8
    stash.join()
    scales.zero_()
    y.sum().backward()
    assert torch.equal(got[1], expected) and is_empty_sync(stash)


def test_restored_memory_on_the_cpu_is_used_again_once_nobody_holds_it() -> None:
    stash, addresses, held = make_stash(), [], []
    for step in range(4):
        got: list[Tensor] = []
        with stash.context(f"step {step}", LIVE, max_rows=C):
            y = Keep.apply(torch.randn(3, requires_grad=True), got, torch.randn(C, 16))
        y.sum().backward()
        addresses.append(got[0].data_ptr())
        if step == 0:
            held += got
        stash.reset()
    assert addresses[0] not in addresses[1:] and len(set(addresses[1:])) == 1


def test_megatrons_names_do_what_they_do_there() -> None:
    manager = paged_stash.PagedStashManager(PagePool("cpu", PoolLayout(256, 100)))
    paged_stash.paged_stash_reset(enabled=True, manager=manager)
    x = paged_stash.paged_stash_group_start(torch.randn(C, 16, requires_grad=True), manager=manager)
    count = torch.tensor([LIVE])
    with paged_stash.get_paged_stash_context("experts", C, num_tokens_tensor=count, manager=manager):
        y = paged_stash.paged_stash_group_commit(x.exp(), "experts")
    y.sum().backward()
    assert int(paged_stash.check_paged_stash_overflow(manager=manager)) == 0 and is_empty_sync(manager)
    with pytest.raises(ValueError, match="max_num_tokens"):
        paged_stash.get_paged_stash_context(num_tokens_tensor=count, manager=manager)


def test_a_tensor_without_history_may_be_a_weight_if_a_weight_has_its_size() -> None:
    """Such as a mask, from outside or of dropout itself: the context cannot tell, and says how to declare it."""
    x, mask = torch.randn(C, C, requires_grad=True), torch.rand(C, C)
    for name, result in (("dropout", lambda y: F.dropout(y, 0.5)), ("mask", lambda y: y * mask)):
        stash, weight = make_stash(), nn.Parameter(torch.randn(C, C))
        with pytest.raises(ValueError, match=r"call group\.keep\(tensor\)"), stash.context(name, LIVE, max_rows=C):
            result(x @ weight)
    stash, weight = make_stash(), nn.Parameter(torch.randn(8, 8))
    with stash.context("other sizes", LIVE, max_rows=C):
        y = F.dropout(x[:, :8] @ weight, 0.5)
    y[:LIVE].sum().backward()
