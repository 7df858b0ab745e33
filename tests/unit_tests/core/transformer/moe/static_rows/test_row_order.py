"""Rows of static buffers against loops over slots, for any routing: too many rows, none, and padded experts."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.core.transformer.moe.static_rows import expert_of_received_rows, order_by_expert, order_by_rank


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, int]:
    """[T, K] indices of which some are of other ranks' experts, and the number of experts."""
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
    assert order.rows_per_group.sum() == len(kept) and len(order.rows_per_group) == experts
    assert_inverse(order.slot_of_row, order.row_of_slot)


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
