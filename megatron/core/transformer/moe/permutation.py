"""Permutation of tokens by expert: assigns a row to each choice of a token, and copies tokens into rows and back.

The orders are index maps, computed on the device. There are three kinds: a row for every choice, a row for each choice
that an expert with a capacity keeps, and a fixed number of rows for each expert. Movement consists of two autograd
functions, each the gradient of the other. Rows of fixed-size buffers are in static_rows.py. This file contains no
communication and no GEMMs.

T tokens, H hidden, E experts, K choices of a token, R rows. A slot is one choice of one token: slot t * K + k.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.autograd import PlainFunction, first_order
from megatron.core.transformer.moe_config import CapacityConfig


@dataclass(frozen=True, eq=False)
class Routing(Sequence[Tensor]):
    """Chosen experts of each token and their weights. Unpacks as Megatron's tables: probs, routing_map = routing.

    weights: [T, K], float. indices: [T, K], int64, distinct for a token. has_absent: whether some slots have no expert;
    their index is num_experts and their weight 0. Tables are built on access: probs [T, E], the weights' dtype, 0 where
    not chosen, and routing_map [T, E], bool.
    """

    weights: Tensor
    indices: Tensor
    num_experts: int
    has_absent: bool = False

    @classmethod
    def of(cls, probs: Tensor, routing_map: Tensor, *, num_experts: int | None) -> "Routing":
        """Builds a routing from Megatron's tables, or from the weights and indices of the chosen experts.

        probs, routing_map: tables [T, E], float and bool, or weights and indices [T, K], float and int64. Raises
        ValueError for other shapes or dtypes.
        """
        if num_experts is None or probs.shape != routing_map.shape or probs.dim() != 2:
            raise ValueError(
                f"probs has shape {list(probs.shape)} and routing_map {list(routing_map.shape)}: both must be "
                f"tables of tokens and experts [T, {num_experts}], or both [T, K], where routing_map contains the "
                "indices of experts"
            )
        if routing_map.dtype is torch.int64:
            return cls(probs, routing_map, num_experts)
        if routing_map.dtype is not torch.bool or routing_map.shape[1] != num_experts:
            raise ValueError(
                f"routing_map has shape {list(routing_map.shape)} and dtype {routing_map.dtype}: must be bool [T, "
                f"{num_experts}], or int64 [T, K] with the indices of experts"
            )
        return cls._of_tables_sync(probs, routing_map)

    @classmethod
    def _of_tables_sync(cls, probs: Tensor, routing_map: Tensor) -> "Routing":
        # The largest number of experts per token is a shape, so the host synchronizes with the device.
        num_experts, counts = routing_map.shape[1], routing_map.sum(dim=1)
        if not len(counts):
            return cls(probs, torch.empty_like(routing_map, dtype=torch.int64), num_experts)
        fewest, most = torch.stack([counts.min(), counts.max()]).tolist()
        present, indices = routing_map.to(torch.uint8).sort(dim=1, descending=True, stable=True)
        present, indices = present[:, :most].bool(), indices[:, :most].contiguous()
        weights = probs.gather(1, indices)
        if fewest == most:
            return cls(weights, indices, num_experts)
        return cls(weights * present, indices.masked_fill(~present, num_experts), num_experts, has_absent=True)

    def without(self, tokens: Tensor) -> "Routing":
        """Returns the routing in which some tokens have no experts; tokens: [T], bool, True for these tokens."""
        absent = tokens.unsqueeze(1)
        weights, indices = self.weights.masked_fill(absent, 0), self.indices.masked_fill(absent, self.num_experts)
        return Routing(weights, indices, self.num_experts, has_absent=True)

    @property
    def probs(self) -> Tensor:
        """Table of the weights: [T, E], float, 0 where an expert is not chosen."""
        # One extra column for slots without an expert.
        width = self.num_experts + int(self.has_absent)
        table = self.weights.new_zeros(len(self.weights), width).scatter(1, self.indices, self.weights)
        return table[:, : self.num_experts]

    @property
    def routing_map(self) -> Tensor:
        """Table of the chosen experts: [T, E], bool."""
        width = self.num_experts + int(self.has_absent)
        table = torch.zeros(len(self.indices), width, dtype=torch.bool, device=self.indices.device)
        return table.scatter_(1, self.indices, True)[:, : self.num_experts]

    def __len__(self) -> int:
        return 2

    @overload
    def __getitem__(self, place: int) -> Tensor: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, place: int | slice) -> Tensor | Sequence[Tensor]:
        """Returns `probs` for index 0 and `routing_map` for index 1; a slice returns a tuple of tables."""
        if isinstance(place, slice):
            return (self.probs, self.routing_map)[place]
        return (lambda: self.probs, lambda: self.routing_map)[place]()


@dataclass(frozen=True)
class PermutationMap:
    """Maps between slots and rows, which are sorted by expert. R is T * K if every slot has a row.

    token_of_row, slot_of_row: [R], int64. row_of_slot: [T, K], int64, the inverse. All on the tokens' device. kept: [T,
    K], bool: slots that have a row; the others point to row 0 and are excluded from sums. None if every slot has a row.
    filled: [R], bool: rows that belong to a slot; the others copy token 0 with weight 0. None if every row belongs to a
    slot.
    """

    token_of_row: Tensor
    slot_of_row: Tensor
    row_of_slot: Tensor
    kept: Tensor | None = None
    filled: Tensor | None = None


# --- Orders ---

# (probs [T, K], expert_indices [T, K], the slots with an expert [T, K] or None for all) -> the map, and the rows of
# each expert [E], int64.
RowOrder = Callable[[Tensor, Tensor, Tensor | None], tuple[PermutationMap, Tensor]]


def build_row_order(config: CapacityConfig, num_experts: int) -> RowOrder:
    """Builds the row order that the configuration selects. Options are checked here, not in each call."""
    limit = build_capacity_limit(config, num_experts)

    def order(probs: Tensor, expert_indices: Tensor, present: Tensor | None = None) -> tuple[PermutationMap, Tensor]:
        limited = limit(probs, expert_indices, present)
        if limited is None and present is None:
            return sort_by_expert(expert_indices, num_experts)
        kept = present if limited is None else limited.kept if present is None else limited.kept & present
        assert kept is not None
        if limited is not None and config.moe_pad_expert_input_to_capacity:
            return order_padded_slots(expert_indices, kept, num_experts=num_experts, capacity=limited.capacity)
        return order_kept_slots_sync(expert_indices, kept, num_experts=num_experts)

    return order


def sort_by_expert(expert_indices: Tensor, num_experts: int) -> tuple[PermutationMap, Tensor]:
    """Assigns a row to every slot, by a stable sort.

    expert_indices: [T, K], int64. Returns the map and tokens_per_expert: [E], int64, on the same device.
    """
    sorted_experts, slot_of_row = torch.sort(expert_indices.reshape(-1), stable=True)
    # Computes the inverse permutation with one scatter.
    row_of_slot = torch.empty_like(slot_of_row)
    row_of_slot[slot_of_row] = torch.arange(slot_of_row.numel(), device=slot_of_row.device)
    token_of_row = slot_of_row // expert_indices.shape[1]
    permutation = PermutationMap(token_of_row, slot_of_row, row_of_slot.view(expert_indices.shape))
    return permutation, count_sorted(sorted_experts, num_experts)


def order_kept_slots_sync(expert_indices: Tensor, kept: Tensor, *, num_experts: int) -> tuple[PermutationMap, Tensor]:
    """Assigns a row to each kept slot. NOTE: synchronizes with the device, because the number of rows is a shape.

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
    """Assigns `capacity` rows to each expert, independent of the routing, so that the host knows every shape.

    expert_indices: [T, K], int64; kept: [T, K], bool, with at most `capacity` kept slots per expert. Returns the map
    and tokens_per_expert [E], int64, on the device.
    """
    # Dropped slots sort after all experts. They are written to one extra row, which is removed below.
    experts = expert_indices.reshape(-1).where(kept.reshape(-1), num_experts)
    sorted_experts, slots = experts.sort(stable=True)
    num_rows = num_experts * capacity
    rows = (sorted_experts * capacity + place_in_group(sorted_experts)).clamp(max=num_rows)
    slot_of_row = torch.zeros(num_rows + 1, dtype=torch.int64, device=slots.device)
    slot_of_row[rows] = slots
    filled = torch.zeros_like(slot_of_row, dtype=torch.bool)
    filled[rows] = True
    row_of_slot = torch.empty_like(slots)
    # Dropped slots point to row 0, which always exists. `kept` excludes them from sums.
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


def count_sorted(sorted_experts: Tensor, num_experts: int) -> Tensor:
    """Counts the rows of each expert, without a host sync.

    sorted_experts: [R], int64, ascending. Returns [E], int64, on the same device.
    """
    experts = torch.arange(num_experts, device=sorted_experts.device)
    # An expert without rows ends where the previous expert ends.
    row_ends = torch.searchsorted(sorted_experts, experts, right=True)
    return row_ends.diff(prepend=row_ends.new_zeros(1))


def place_in_group(sorted_groups: Tensor) -> Tensor:
    """Computes each element's position within its run of equal values, starting at 0.

    sorted_groups: [N], int64, ascending. Returns [N], int64, on the same device.
    """
    place = torch.arange(sorted_groups.numel(), device=sorted_groups.device)
    return place - torch.searchsorted(sorted_groups, sorted_groups)


# --- Capacity: the slots that an expert keeps (GShard, arXiv 2006.16668) ---


class KeptSlots(NamedTuple):
    """Slots that receive a row.

    kept: [T, K], bool, on the device. capacity: the maximum number of slots that an expert keeps if all tokens have
    experts.
    """

    kept: Tensor
    capacity: int


# (probs [T, K], expert_indices [T, K], the slots with an expert [T, K] or None for all) -> the kept slots, or None if
# all are kept.
CapacityLimit = Callable[[Tensor, Tensor, Tensor | None], KeptSlots | None]


def get_capacity(num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None) -> int:
    """Returns the capacity of one expert; num_tokens: number of assignments, which is tokens x K."""
    capacity = math.ceil(num_tokens / num_experts * capacity_factor)
    return capacity if min_capacity is None else max(capacity, min_capacity)


def build_capacity_limit(config: CapacityConfig, num_experts: int) -> CapacityLimit:
    """Builds the function that selects the kept slots; it returns None if the configuration drops no tokens."""
    factor = config.moe_expert_capacity_factor
    if factor is None:
        return lambda probs, expert_indices, present: None
    # With equal weights, here zeros, the first tokens are kept.
    rank = torch.Tensor.detach if config.moe_token_drop_policy == "probs" else torch.zeros_like
    factor = min(factor, num_experts)

    def within_capacity(probs: Tensor, expert_indices: Tensor, present: Tensor | None = None) -> KeptSlots:
        num_tokens, num_choices = expert_indices.shape
        # A token chooses an expert at most once, so a capacity above the number of tokens is never used.
        capacity = min(get_capacity(expert_indices.numel(), num_experts, factor), num_tokens)
        own: int | Tensor = capacity
        if present is not None:
            # Tokens without any expert are padding, and the capacity is a share of the others.
            own = (present.any(dim=1).sum() * num_choices).double().div(num_experts).mul(factor).ceil()
        return KeptSlots(kept_slots(rank(probs), expert_indices, capacity=own), capacity)

    return within_capacity


def kept_slots(weights: Tensor, expert_indices: Tensor, *, capacity: int | Tensor) -> Tensor:
    """Selects the `capacity` slots of each expert with the largest weights. Ties are resolved in token order.

    weights: [T, K], float; expert_indices: [T, K], int64. capacity: an int, or a scalar on the device. Returns [T, K],
    bool, on the device, without a sync.
    """
    by_weight = weights.reshape(-1).sort(descending=True, stable=True).indices
    sorted_experts, within = expert_indices.reshape(-1)[by_weight].sort(stable=True)
    slots = by_weight[within]  # by expert, then by weight
    kept = torch.empty_like(slots, dtype=torch.bool)
    kept[slots] = place_in_group(sorted_experts) < capacity
    return kept.view(expert_indices.shape)


# --- Movement ---


def permute_tokens(tokens: Tensor, probs: Tensor, permutation: PermutationMap) -> tuple[Tensor, Tensor]:
    """Copies each token, and the weight of each slot, into its rows.

    tokens: [T, H], any float dtype; probs: [T, K], any float dtype. Returns rows [R, H] and weights [R].
    """
    rows, weights = _GatherRows.apply(tokens, probs, permutation)
    return rows, weights if permutation.filled is None else weights * permutation.filled


def unpermute_tokens(rows: Tensor, permutation: PermutationMap) -> Tensor:
    """Sums each token's rows; rows: [R, H], any float dtype. Returns [T, H], in token order.

    A row that belongs to no slot also receives a gradient, but its weight of 0 makes the gradient 0.
    """
    return _SumRows.apply(rows, permutation)


class _GatherRows(PlainFunction):
    """Computes out[r] = x[token_of_row[r]], and the same for the weights of slots.

    Backward gathers and sums K rows per token instead of scattering.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, permutation: PermutationMap) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(permutation.row_of_slot, permutation.kept)
        ctx.set_materialize_grads(False)
        ctx.probs_shape = probs.shape
        rows = x.index_select(0, permutation.token_of_row)
        return rows, probs.reshape(-1).index_select(0, permutation.slot_of_row)

    @staticmethod
    @first_order
    def backward(
        ctx: Any, grad_rows: Tensor | None, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        row_of_slot, kept = ctx.saved_tensors
        grad_x = grad_probs = None
        if grad_rows is not None and ctx.needs_input_grad[0]:
            grad_x = _sum_rows(grad_rows, row_of_slot, kept=kept)
        if grad_weights is not None and ctx.needs_input_grad[1]:
            one_each = None if kept is None else kept.view(-1, 1)
            grads = _sum_rows(grad_weights.unsqueeze(1), row_of_slot.view(-1, 1), kept=one_each)
            grad_probs = grads.view(ctx.probs_shape)
        return grad_x, grad_probs, None


class _SumRows(PlainFunction):
    """Computes out[t], the sum of x[row_of_slot[t, k]] over the kept k. Backward is a gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, permutation: PermutationMap) -> Tensor:
        ctx.save_for_backward(permutation.token_of_row)
        return _sum_rows(x, permutation.row_of_slot, kept=permutation.kept)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (token_of_row,) = ctx.saved_tensors
        return grad.index_select(0, token_of_row), None


def _sum_rows(x: Tensor, row_of_slot: Tensor, *, kept: Tensor | None) -> Tensor:
    """Gathers and sums each token's rows in one pass. Half precision is summed in fp32.

    x: [R, H]; row_of_slot: [T, K]. Returns [T, H].
    """
    if row_of_slot.shape[1] == 1 and kept is None:
        return x.index_select(0, row_of_slot.view(-1))
    if x.shape[0] == 0:
        # No slot has a row, so row 0 does not exist.
        return x.new_zeros(len(row_of_slot), *x.shape[1:])
    # embedding_bag sums rows of a table for each bag: the table is x, and a bag is a token's K rows.
    weights = None if kept is None else kept.to(x.dtype)
    return F.embedding_bag(row_of_slot, x, mode="sum", per_sample_weights=weights)
