"""Rows in static buffers: orders compared with loops over slots, row movements and their gradients, CPU and Triton."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.core.transformer import moe
from megatron.core.transformer.moe import static_rows
from megatron.core.transformer.moe.dispatch_static import StaticBudget
from megatron.core.transformer.moe.static_rows import (
    expert_of_received_rows,
    gather_live_rows,
    order_by_expert,
    order_by_rank,
    sum_live_rows,
)

TOKENS, CHOICES, EXPERTS = 13, 3, 4
# Numbers of live rows and of buffer rows.
SIZES = [(0, 8), (21, 21), (21, 64)]


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Draws [T, K] indices, some of which refer to experts of other ranks, and the number of experts."""
    experts, choices = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    index = st.lists(st.integers(-2, experts + 2), min_size=choices, max_size=choices)
    chosen = draw(st.lists(index, max_size=20))
    return torch.tensor(chosen, dtype=torch.int64).view(-1, choices), experts


@given(routings(), st.integers(0, 8), st.sampled_from([1, 2, 16]))
def test_rows_by_expert(routing: tuple[Tensor, int], blocks: int, alignment: int) -> None:
    indices, experts = routing
    capacity = blocks * alignment
    order = order_by_expert(indices, experts, capacity=capacity, alignment=alignment)
    expected: list[int] = []
    for expert in range(experts):
        slots = [slot for slot, chosen in enumerate(indices.flatten().tolist()) if chosen == expert]
        expected += slots + [-1] * (-len(slots) % alignment)
    kept = expected[:capacity]
    assert order.slot_of_row.tolist() == kept + [-1] * (capacity - len(kept))
    assert order.rows_needed.tolist() == [len(expected)]
    assert order.rows_per_group.sum() == order.num_rows == len(kept) and len(order.rows_per_group) == experts
    assert order.token_of_row.tolist() == [-1 if slot < 0 else slot // indices.shape[1] for slot in order.slot_of_row]
    assert_inverse(order.slot_of_row, order.row_of_slot)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8).filter(any), st.sampled_from([1, 16, 64]))
def test_a_buffer_has_room_for_the_padding_of_any_routing(counts: list[int], alignment: int) -> None:
    tokens, padded = sum(counts), sum(-(-count // alignment) * alignment for count in counts)
    budget = StaticBudget(1.0, 1, num_experts=len(counts), num_ranks=4, num_shards=1, alignment=alignment)
    assert padded <= budget.rows_of_rank(tokens) <= tokens + len(counts) * (alignment - 1)
    # The factor that the routing requires is the smallest one with enough rows.
    needed = float(budget.factor_for(np.asarray(float(padded)), tokens))
    for missing in (0, 1):
        rows = replace(budget, factor=needed - 1.5 * missing / tokens).rows_of_rank(tokens)
        assert (rows >= padded) == (missing == 0)


@pytest.mark.parametrize(("experts", "tokens"), [(1, 1024), (16, 4096), (64, 1024), (64, 128)])
def test_balanced_rows_include_the_mean_padding(experts: int, tokens: int) -> None:
    budget = StaticBudget(2.0, 1, num_experts=experts, num_ranks=4, num_shards=1, alignment=64)
    counts = np.random.default_rng(1).multinomial(4 * tokens, np.full(4 * experts, 0.25 / experts), size=200)
    mean = (-(-counts // 64) * 64).sum(axis=1).mean() / 4
    assert budget.balanced_live_rows(tokens) == pytest.approx(mean, rel=0.05)
    assert replace(budget, alignment=1).balanced_live_rows(tokens) == tokens


@given(routings(), st.integers(1, 4), st.integers(0, 12))
def test_rows_by_rank_and_what_they_are_at_the_other_end(
    routing: tuple[Tensor, int], ranks: int, rows_per_rank: int
) -> None:
    indices, local = routing
    order = order_by_rank(indices, ranks * local, num_ranks=ranks, rows_per_rank=rows_per_rank)
    needed, flat = 0, indices.flatten().tolist()
    experts = expert_of_received_rows(order.rows_per_group.view(ranks, local), rows_per_rank=rows_per_rank).flatten()
    for rank in range(ranks):
        here = range(rank * local, (rank + 1) * local)
        slots = [slot for expert in here for slot, chosen in enumerate(flat) if chosen == expert]
        kept = slots[:rows_per_rank]
        part = slice(rank * rows_per_rank, (rank + 1) * rows_per_rank)
        assert order.slot_of_row[part].tolist() == kept + [-1] * (rows_per_rank - len(kept))
        of_rows = [flat[slot] - rank * local for slot in kept]
        assert experts[part].tolist() == of_rows + [local] * (rows_per_rank - len(kept))
        needed = max(needed, len(slots))
    assert order.rows_needed.tolist() == [needed]
    assert_inverse(order.slot_of_row, order.row_of_slot)


def assert_inverse(slot_of_row: Tensor, row_of_slot: Tensor) -> None:
    flat = row_of_slot.flatten()
    for row, slot in enumerate(slot_of_row.tolist()):
        assert slot == -1 or flat[slot] == row
    assert (flat >= 0).sum() == (slot_of_row >= 0).sum()


@pytest.fixture(params=["cpu", "triton"])
def kernels(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """Yields the operators' CPU functions, or their Triton kernels on CPU tensors."""
    is_cpu = request.param == "cpu"
    yield static_rows if is_cpu else request.getfixturevalue("interpreted")("triton_rows", of=moe.__name__)


# Tokens, choices, first expert, experts, parts, rows per part, alignment. Cases: empty, one expert, parts that drop
# rows, alignment, several programs with a shorter last run, more programs than slots per tile, and many experts.
ORDERS = [
    (0, 2, 0, 4, 1, 8, 1),
    (0, 2, 0, 4, 2, 0, 1),
    (1, 1, 0, 1, 1, 3, 1),
    (40, 1, 0, 1, 1, 30, 1),
    (70, 3, 2, 4, 1, 96, 16),
    (70, 3, 2, 4, 1, 32, 16),
    (90, 2, 0, 6, 3, 25, 1),
    (90, 2, 0, 6, 2, 200, 1),
    (700, 2, 5, 7, 1, 1408, 128),
    (1300, 2, 0, 12, 4, 300, 1),
    (430, 3, 0, 31, 1, 1290, 1),
    (250, 8, 3, 512, 1, 1600, 1),
]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("sizes", ORDERS, ids=str)
def test_kernels_order_slots_as_the_cpu_does(
    interpreted: Callable[..., ModuleType], sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    tokens, choices, first, experts, parts, rows, alignment = sizes
    generator = torch.Generator().manual_seed(tokens)
    # Some experts belong to other ranks, and one expert of this rank is chosen by many tokens.
    indices = torch.randint(first - 1, first + experts + 2, (tokens, choices), generator=generator, dtype=dtype)
    indices[::3] = first
    options = {"first_expert": first, "num_experts": experts, "num_parts": parts, "rows_per_part": rows}
    kernels = interpreted("triton_rows", of=moe.__name__)
    found = kernels.order_slots(indices, alignment=alignment, **options)
    expected = static_rows.order_slots(indices, alignment=alignment, **options)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype and one.shape == other.shape


@pytest.mark.parametrize(("ranks", "experts", "rows"), [(1, 1, 5), (3, 4, 30), (2, 33, 300), (2, 5, 0), (2, 512, 700)])
def test_kernels_find_the_experts_of_rows_as_the_cpu_does(
    interpreted: Callable[..., ModuleType], ranks: int, experts: int, rows: int
) -> None:
    generator = torch.Generator().manual_seed(ranks)
    counts = torch.randint(0, 2 * rows // experts + 1, (ranks, experts), generator=generator)
    found = interpreted("triton_rows", of=moe.__name__).experts_of_rows(counts, rows_per_rank=rows)
    expected = static_rows.experts_of_rows(counts, rows_per_rank=rows)
    assert torch.equal(found, expected) and found.dtype == expected.dtype


@pytest.mark.parametrize(("live", "capacity"), SIZES)
@pytest.mark.parametrize(
    ("width", "dtype"), [(1, torch.float32), (40, torch.float32), (1100, torch.float16), (8, torch.bfloat16)]
)
def test_kernels_keep_to_live_rows(
    kernels: ModuleType, live: int, capacity: int, width: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(live)
    x = torch.randn(TOKENS, width, generator=generator).to(dtype)
    source = torch.randint(-1, TOKENS, (capacity,), generator=generator, dtype=torch.int32)
    out = torch.full((capacity, width), 7, dtype=dtype)
    kernels.gather_rows(x, source, num_rows=torch.tensor([live]), out=out)
    assert torch.equal(out[:live], x[source[:live]] * (source[:live] >= 0).unsqueeze(1)) and (out[live:] == 7).all()
    out[live:] = math.nan
    row_of_slot = torch.randint(-1, live, (TOKENS, CHOICES), generator=generator, dtype=torch.int32)
    found = kernels.sum_rows(out, row_of_slot)
    for token, rows in enumerate(row_of_slot.tolist()):
        expected = sum((out[row].double() for row in rows if row >= 0), torch.zeros(width, dtype=torch.float64))
        assert torch.allclose(found[token].double(), expected, rtol=0, atol=torch.finfo(dtype).eps * 8)


@pytest.mark.parametrize("alignment", [1, 16])
def test_both_directions_are_each_others_gradient(alignment: int) -> None:
    generator = torch.Generator().manual_seed(1)
    indices = torch.rand(TOKENS, EXPERTS + 2, generator=generator).topk(CHOICES).indices
    order = order_by_expert(indices, EXPERTS, capacity=EXPERTS * 16, alignment=alignment)

    def there_and_back(x: Tensor, probs: Tensor) -> Tensor:
        rows, weights = gather_live_rows(x, probs, order=order, num_rows=order.num_rows)
        dead = torch.arange(len(rows)) >= order.num_rows
        rows = (rows * weights.unsqueeze(1)).masked_fill(dead.unsqueeze(1), math.nan)
        return sum_live_rows(rows, order=order, num_rows=order.num_rows)

    x, probs = (
        torch.randn(TOKENS, width, dtype=torch.float64, generator=generator, requires_grad=True)
        for width in (5, CHOICES)
    )
    used = (indices >= 0) & (indices < EXPERTS)
    torch.testing.assert_close(there_and_back(x, probs), (used * probs).sum(dim=1, keepdim=True) * x)
    assert torch.autograd.gradcheck(there_and_back, (x, probs))


def test_a_gradient_that_nobody_needs_is_not_computed() -> None:
    order = order_by_expert(torch.tensor([[0, 1], [1, 0]]), 2, capacity=4)
    x, probs = torch.randn(2, 3, requires_grad=True), torch.randn(2, 2, requires_grad=True)
    rows, weights = gather_live_rows(x, probs, order=order, num_rows=order.num_rows)
    assert torch.autograd.grad(rows.sum(), (x, probs), allow_unused=True, retain_graph=True)[1] is None
    assert torch.autograd.grad(weights.sum(), (x, probs), allow_unused=True)[0] is None


def test_operators_fit_what_torch_asks_of_them() -> None:
    x, rows = torch.randn(4, 3), torch.randn(6, 3)
    torch.library.opcheck(
        torch.ops.static_rows.gather_rows.default,
        (x, torch.tensor([0, 3, -1, 1], dtype=torch.int32)),
        {"num_rows": torch.tensor([3]), "out": torch.zeros(4, 3)},
    )
    slots = torch.tensor([[0, 5], [-1, 2]], dtype=torch.int32)
    torch.library.opcheck(torch.ops.static_rows.sum_rows.default, (rows, slots))
    options = {"first_expert": 1, "num_experts": 4, "num_parts": 2, "rows_per_part": 3, "alignment": 1}
    torch.library.opcheck(torch.ops.static_rows.order_slots.default, (slots.long(),), options)
    counts = torch.tensor([[2, 1], [0, 4]])
    torch.library.opcheck(torch.ops.static_rows.experts_of_rows.default, (counts,), {"rows_per_rank": 3})
