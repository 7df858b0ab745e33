"""Experts with room for so many tokens: who is dropped, and rows padded to one size per expert.

The choice of slots (GShard, arXiv 2006.16668) and the order of rows that follows. What moves rows is permutation.py.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.transformer.moe.capacity_config import CapacityConfig
from megatron.core.transformer.moe.permutation import PermutationMap, count_sorted, sort_by_expert


class KeptSlots(NamedTuple):
    """kept: [T, K], bool, on the device: slots that an expert has room for. capacity: slots that each may keep."""

    kept: Tensor
    capacity: int


# (probs [T, K], expert_indices [T, K]) -> what is kept, or None for everything.
CapacityLimit = Callable[[Tensor, Tensor], KeptSlots | None]
# (probs [T, K], expert_indices [T, K]) -> the map, and the rows of each expert [E], int64.
RowOrder = Callable[[Tensor, Tensor], tuple[PermutationMap, Tensor]]


def get_capacity(num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None) -> int:
    """Tokens that one of `num_experts` takes; num_tokens: assignments, that is tokens x K."""
    capacity = math.ceil(num_tokens / num_experts * capacity_factor)
    return capacity if min_capacity is None else max(capacity, min_capacity)


def build_capacity_limit(config: CapacityConfig, num_experts: int) -> CapacityLimit:
    """What experts have room for, chosen once; None where no token is dropped."""
    factor = config.moe_expert_capacity_factor
    if factor is None:
        return lambda probs, expert_indices: None
    # With equal weights the first tokens stay.
    rank = torch.Tensor.detach if config.moe_token_drop_policy == "probs" else torch.zeros_like

    def within_capacity(probs: Tensor, expert_indices: Tensor) -> KeptSlots:
        num_tokens = expert_indices.shape[0]
        # An expert gets a token once: room beyond that is never used, however large the factor.
        capacity = min(get_capacity(expert_indices.numel(), num_experts, min(factor, num_experts)), num_tokens)
        return KeptSlots(kept_slots(rank(probs), expert_indices, capacity=capacity), capacity)

    return within_capacity


def build_row_order(config: CapacityConfig, num_experts: int) -> RowOrder:
    """How slots become rows: one row each, or as many as the experts have room for; chosen once."""
    limit = build_capacity_limit(config, num_experts)

    def order(probs: Tensor, expert_indices: Tensor) -> tuple[PermutationMap, Tensor]:
        limited = limit(probs, expert_indices)
        if limited is None:
            return sort_by_expert(expert_indices, num_experts)
        if config.moe_pad_expert_input_to_capacity:
            return order_padded_slots(expert_indices, limited.kept, num_experts=num_experts, capacity=limited.capacity)
        return order_kept_slots_sync(expert_indices, limited.kept, num_experts=num_experts)

    return order


def kept_slots(weights: Tensor, expert_indices: Tensor, *, capacity: int) -> Tensor:
    """The `capacity` slots with the largest weights of each expert; of equal ones, the first tokens.

    weights: [T, K], float; expert_indices: [T, K], int64. Returns [T, K], bool, on the device, without a sync.
    """
    by_weight = weights.reshape(-1).sort(descending=True, stable=True).indices
    sorted_experts, within = expert_indices.reshape(-1)[by_weight].sort(stable=True)
    slots = by_weight[within]  # by expert, then by weight
    kept = torch.empty_like(slots, dtype=torch.bool)
    kept[slots] = _place_in_expert(sorted_experts) < capacity
    return kept.view(expert_indices.shape)


def _place_in_expert(sorted_experts: Tensor) -> Tensor:
    """[R], ascending -> [R]: 0, 1, ... within each run of equal values."""
    place = torch.arange(sorted_experts.numel(), device=sorted_experts.device)
    return place - torch.searchsorted(sorted_experts, sorted_experts)


def order_kept_slots_sync(expert_indices: Tensor, kept: Tensor, *, num_experts: int) -> tuple[PermutationMap, Tensor]:
    """Rows for the kept slots alone, by expert. NOTE: waits for the device, as their number is a shape.

    expert_indices: [T, K], int64; kept: [T, K], bool. Returns the map and tokens_per_expert [E], int64, on the device.
    """
    slots = kept.reshape(-1).nonzero().squeeze(1)  # [R]
    sorted_experts, order = expert_indices.reshape(-1)[slots].sort(stable=True)
    slot_of_row = slots[order]
    row_of_slot = torch.zeros_like(expert_indices).view(-1)
    row_of_slot[slot_of_row] = torch.arange(slot_of_row.numel(), device=slot_of_row.device)
    permutation = PermutationMap(slot_of_row // kept.shape[1], slot_of_row, row_of_slot.view(kept.shape), kept=kept)
    return permutation, count_sorted(sorted_experts, num_experts)


def order_padded_slots(
    expert_indices: Tensor, kept: Tensor, *, num_experts: int, capacity: int
) -> tuple[PermutationMap, Tensor]:
    """`capacity` rows for each expert, whatever the routing: every shape is known on the host.

    expert_indices: [T, K], int64; kept: [T, K], bool, at most `capacity` an expert. Returns as order_kept_slots_sync.
    """
    # Dropped slots sort behind all experts, into one row more than there are.
    experts = expert_indices.reshape(-1).where(kept.reshape(-1), num_experts)
    sorted_experts, slots = experts.sort(stable=True)
    num_rows = num_experts * capacity
    rows = (sorted_experts * capacity + _place_in_expert(sorted_experts)).clamp(max=num_rows)
    slot_of_row = torch.zeros(num_rows + 1, dtype=torch.int64, device=slots.device)
    slot_of_row[rows] = slots
    filled = torch.zeros_like(slot_of_row, dtype=torch.bool)
    filled[rows] = True
    row_of_slot = torch.empty_like(slots)
    # Row 0 is there for any routing; that a dropped slot does not count is said by `kept`.
    row_of_slot[slots] = rows.where(rows < num_rows, 0)
    slot_of_row, filled = slot_of_row[:num_rows].where(filled[:num_rows], 0), filled[:num_rows]
    permutation = PermutationMap(
        slot_of_row // kept.shape[1],
        slot_of_row,
        row_of_slot.view(kept.shape),
        kept=kept,
        filled=filled,
    )
    return permutation, torch.full((num_experts,), capacity, dtype=torch.int64, device=slots.device)
