"""Which slot goes to which row of a buffer of fixed size: index maps alone, without a read of the device.

A slot is one choice of one token: slot t * K + k. Shapes: T tokens, K choices, e experts, C rows of the buffer, of
which the first R are live.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.transformer.moe.permutation import count_sorted


@dataclass(frozen=True)
class StaticOrder:
    """Slots in the rows of a buffer, all on one device.

    slot_of_row, token_of_row: [C], int64, -1 for a row of padding. row_of_slot: [T, K], int64, -1 for a slot without a
    row.
    rows_per_group: [G], int64: rows of each expert, padding among them; or those for each expert of each rank, whether
    they fit or not.
    rows_needed: [1], int64: of the buffer, or of each rank's part of it; with fewer, slots are lost.
    """

    slot_of_row: Tensor
    token_of_row: Tensor
    row_of_slot: Tensor
    rows_per_group: Tensor
    rows_needed: Tensor


def order_by_expert(expert_indices: Tensor, num_experts: int, *, capacity: int, alignment: int = 1) -> StaticOrder:
    """Rows by expert, one expert behind the other, each a multiple of `alignment` rows.

    expert_indices: [T, K], int64; what is outside 0 to num_experts - 1 gets no row. capacity: C, a multiple of
    alignment. Of equal experts the first slots come first.
    """
    experts, slots = _sorted_slots(expert_indices, num_experts)
    wanted = aligned_rows(count_sorted(experts, num_experts), alignment)
    ends = wanted.cumsum(0)
    # One entry more, for slots of no expert: where the others end.
    starts = torch.cat([ends - wanted, ends[-1:]])
    rows = starts[experts] + _place_in_group(experts)
    rows = rows.where((experts < num_experts) & (rows < capacity), capacity)
    kept = ends.clamp(max=capacity).diff(prepend=ends.new_zeros(1))
    return _order(
        slots, rows, shape=expert_indices.shape, num_rows=capacity, rows_per_group=kept, rows_needed=ends[-1:]
    )


def order_by_rank(expert_indices: Tensor, num_experts: int, *, num_ranks: int, rows_per_rank: int) -> StaticOrder:
    """Rows by rank, rows_per_rank for each; within a rank by expert, those without a slot last.

    expert_indices: [T, K], int64, from 0 to num_experts - 1, of which each rank has as many, neighbours. What is
    outside gets no row.
    """
    experts, slots = _sorted_slots(expert_indices, num_experts)
    per_rank = num_experts // num_ranks
    ranks = experts // per_rank
    place = _place_in_group(ranks)
    num_rows = num_ranks * rows_per_rank
    rows = (ranks * rows_per_rank + place).where((experts < num_experts) & (place < rows_per_rank), num_rows)
    wanted = count_sorted(experts, num_experts)
    return _order(
        slots,
        rows,
        shape=expert_indices.shape,
        num_rows=num_rows,
        rows_per_group=wanted,
        rows_needed=wanted.view(num_ranks, per_rank).sum(1).amax(0, keepdim=True),
    )


def expert_of_received_rows(rows_per_group: Tensor, *, rows_per_rank: int) -> Tensor:
    """The expert of each row that came from the ranks; e for those that stand for no slot.

    rows_per_group: [ranks, e], int64: what each rank has for each expert, of which rows_per_rank were sent. Returns
    [ranks * rows_per_rank, 1], int64.
    """
    num_ranks, num_experts = rows_per_group.shape
    place = torch.arange(rows_per_rank, device=rows_per_group.device).expand(num_ranks, -1).contiguous()
    return torch.searchsorted(rows_per_group.cumsum(1), place, right=True).view(-1, 1)


def aligned_rows(counts: Tensor, alignment: int) -> Tensor:
    """Rows of experts, each rounded up to a multiple of `alignment`: [e], int64, on the device -> the same."""
    return (counts + (alignment - 1)).div(alignment, rounding_mode="floor") * alignment


def _sorted_slots(expert_indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Experts ascending, those of other ranks as num_experts, and the slots that they belong to: [T * K] each."""
    flat = expert_indices.reshape(-1)
    sorted_experts, slots = flat.where((flat >= 0) & (flat < num_experts), num_experts).sort(stable=True)
    return sorted_experts, slots


def _place_in_group(sorted_groups: Tensor) -> Tensor:
    """0, 1, ... within each run of equal values; [N], ascending -> [N]."""
    place = torch.arange(sorted_groups.numel(), device=sorted_groups.device)
    return place - torch.searchsorted(sorted_groups, sorted_groups)


def _order(
    slots: Tensor, rows: Tensor, *, shape: torch.Size, num_rows: int, rows_per_group: Tensor, rows_needed: Tensor
) -> StaticOrder:
    """rows: [T * K]: the row of each of `slots`, num_rows for none; shape: [T, K]."""
    # One row more takes whatever has none.
    slot_of_row = slots.new_full((num_rows + 1,), -1)
    slot_of_row[rows] = slots
    row_of_slot = torch.empty_like(slots)
    row_of_slot[slots] = rows.where(rows < num_rows, -1)
    slot_of_row = slot_of_row[:num_rows]
    token_of_row = slot_of_row.div(shape[1], rounding_mode="floor")
    return StaticOrder(slot_of_row, token_of_row, row_of_slot.view(shape), rows_per_group, rows_needed)
