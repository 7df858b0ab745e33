"""Rows by expert in buffers of a fixed size, where only the device knows how many rows are live.

As in permutation.py, the orders come first, which give each slot a row, then the movements: two autograd functions,
each the gradient of the other. Their operators have a CPU version here and a Triton kernel in triton_rows.py. No shape
depends on the routing. The orders never read the device on the host, and the movements never read rows beyond the live
ones, so those rows may hold any bytes.

A slot is one choice of one token: slot t * K + k. T tokens, K choices, e experts of a rank, C rows of the buffer, of
which the first R are live, W elements in a row.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.transformer.moe.paged_stash.operator_library import operator
from megatron.core.transformer.moe.permutation import count_sorted, place_in_group

HAS_TRITON = importlib.util.find_spec("triton") is not None
# The launchers, which have the operators' names.
_LAUNCHERS: tuple[Callable[..., Any], ...] = ()
if HAS_TRITON:
    from megatron.core.transformer.moe import triton_rows

    _LAUNCHERS = (triton_rows.gather_rows, triton_rows.sum_rows)

# --- Orders ---


@dataclass(frozen=True)
class StaticOrder:
    """Slots and their rows in a buffer, all on one device.

    slot_of_row, token_of_row: [C], int64, -1 for padding. row_of_slot: [T, K], int64, -1 for a slot without a row.
    rows_per_group: int64, one count per expert, with a meaning that depends on the order. From order_by_expert it is
    [e]: the rows that each expert of this rank has in the buffer, alignment included. From order_by_rank it is
    [ranks * e]: the slots that chose each expert of each rank, including slots that got no row.
    rows_needed: [1], int64: the smallest buffer, or from order_by_rank the smallest part of each rank, that would have
    a row for every slot.
    """

    slot_of_row: Tensor
    token_of_row: Tensor
    row_of_slot: Tensor
    rows_per_group: Tensor
    rows_needed: Tensor


def order_by_expert(expert_indices: Tensor, num_experts: int, *, capacity: int, alignment: int = 1) -> StaticOrder:
    """Packs the rows of the experts, each padded to a multiple of `alignment` rows.

    expert_indices: [T, K], int64; slots outside 0 to num_experts - 1 get no row. capacity: C, a multiple of alignment.
    Slots of one expert keep their order.
    """
    experts, slots = _sorted_slots(expert_indices, num_experts)
    wanted = aligned_rows(count_sorted(experts, num_experts), alignment)
    ends = wanted.cumsum(0)
    # The last entry, the end of all experts, is for slots of no expert.
    starts = torch.cat([ends - wanted, ends[-1:]])
    rows = starts[experts] + place_in_group(experts)
    rows = rows.where((experts < num_experts) & (rows < capacity), capacity)
    kept = ends.clamp(max=capacity).diff(prepend=ends.new_zeros(1))
    return _order(
        slots, rows, shape=expert_indices.shape, num_rows=capacity, rows_per_group=kept, rows_needed=ends[-1:]
    )


def order_by_rank(expert_indices: Tensor, num_experts: int, *, num_ranks: int, rows_per_rank: int) -> StaticOrder:
    """Gives each rank a part of rows_per_rank rows. Within a part rows are sorted by expert, and padding is last.

    expert_indices: [T, K], int64; slots outside 0 to num_experts - 1 get no row. Each rank has the same number of
    experts, numbered consecutively.
    """
    experts, slots = _sorted_slots(expert_indices, num_experts)
    per_rank = num_experts // num_ranks
    ranks = experts // per_rank
    place = place_in_group(ranks)
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
    """Returns the local expert of each row that the ranks sent, and e for padding.

    rows_per_group: [ranks, e], int64: the slots of each rank for each expert; a rank sent its first rows_per_rank
    slots. Returns [ranks * rows_per_rank, 1], int64.
    """
    num_ranks, num_experts = rows_per_group.shape
    place = torch.arange(rows_per_rank, device=rows_per_group.device).expand(num_ranks, -1).contiguous()
    return torch.searchsorted(rows_per_group.cumsum(1), place, right=True).view(-1, 1)


def aligned_rows(counts: Tensor, alignment: int) -> Tensor:
    """Rounds each count up to a multiple of `alignment`; counts: [e], int64, on the device -> the same."""
    return (counts + (alignment - 1)).div(alignment, rounding_mode="floor") * alignment


def _sorted_slots(expert_indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Returns the experts in ascending order, num_experts for other ranks' experts, and their slots: [T * K] each."""
    flat = expert_indices.reshape(-1)
    sorted_experts, slots = flat.where((flat >= 0) & (flat < num_experts), num_experts).sort(stable=True)
    return sorted_experts, slots


def _order(
    slots: Tensor, rows: Tensor, *, shape: torch.Size, num_rows: int, rows_per_group: Tensor, rows_needed: Tensor
) -> StaticOrder:
    """Inverts the map; rows: [T * K], the row of each slot in `slots`, num_rows for none; shape: [T, K]."""
    # Slots without a row are written to one extra row, which is cut off below.
    slot_of_row = slots.new_full((num_rows + 1,), -1)
    slot_of_row[rows] = slots
    row_of_slot = torch.empty_like(slots)
    row_of_slot[slots] = rows.where(rows < num_rows, -1)
    slot_of_row = slot_of_row[:num_rows]
    token_of_row = slot_of_row.div(shape[1], rounding_mode="floor")
    return StaticOrder(slot_of_row, token_of_row, row_of_slot.view(shape), rows_per_group, rows_needed)


# --- Movement ---


def gather_live_rows(x: Tensor, source_of_row: Tensor, *, row_of_slot: Tensor, num_rows: Tensor) -> Tensor:
    """Copies x[source_of_row[r]] into row r of a buffer, or zeros if the source is -1; rows from R on hold any bytes.

    x: [T, W], any float dtype; source_of_row: [C], int64; row_of_slot: [T, K], int64, the inverse, -1 for none;
    num_rows: [1], int64, R; all on one device. Returns [C, W], x's dtype.
    """
    return _GatherLiveRows.apply(x, source_of_row, row_of_slot, num_rows)


def sum_live_rows(rows: Tensor, row_of_slot: Tensor, *, source_of_row: Tensor, num_rows: Tensor) -> Tensor:
    """Sums rows[row_of_slot[t, k]] over k into row t, leaving out entries of -1.

    rows: [C, W], any float dtype, half precision is summed in fp32; row_of_slot, source_of_row, num_rows: as in
    gather_live_rows. Returns [T, W], the rows' dtype. In backward, the gradient of rows from R on holds any bytes.
    """
    return _SumLiveRows.apply(rows, row_of_slot, source_of_row, num_rows)


class _GatherLiveRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source_of_row: Tensor, row_of_slot: Tensor, num_rows: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_slot)
        return _gather(x, source_of_row, num_rows=num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (row_of_slot,) = ctx.saved_tensors
        return _sum(grad, row_of_slot), None, None, None


class _SumLiveRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_of_slot: Tensor, source_of_row: Tensor, num_rows: Tensor) -> Tensor:
        ctx.save_for_backward(source_of_row, num_rows)
        return _sum(rows, row_of_slot)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        source_of_row, num_rows = ctx.saved_tensors
        return _gather(grad, source_of_row, num_rows=num_rows), None, None, None


def _gather(x: Tensor, source_of_row: Tensor, *, num_rows: Tensor) -> Tensor:
    out = x.new_empty(len(source_of_row), x.shape[1])
    ops.gather_rows(x.contiguous(), source_of_row, num_rows=num_rows, out=out)
    return out


def _sum(rows: Tensor, row_of_slot: Tensor) -> Tensor:
    summed: Tensor = ops.sum_rows(rows.contiguous(), row_of_slot)
    return summed


# --- Operators: ops.gather_rows and ops.sum_rows ---

ops = torch.ops.static_rows

_NAMESPACE = "static_rows"


def _like_tokens(rows: Tensor, row_of_slot: Tensor) -> Tensor:
    return rows.new_empty(row_of_slot.shape[0], rows.shape[1])


@operator(_NAMESPACE, "(Tensor x, Tensor source_of_row, *, Tensor num_rows, Tensor(a!) out) -> ()", cuda=_LAUNCHERS)
def gather_rows(x: Tensor, source_of_row: Tensor, *, num_rows: Tensor, out: Tensor) -> None:
    """Writes out[r] = x[source_of_row[r]], zeros for -1, for live rows only.

    x: [T, W], any dtype; source_of_row: [C], int64; num_rows: [1], int64; out: [C, W], x's dtype.
    """
    live = source_of_row[: _live_rows_sync(num_rows, out)]
    rows = out[: len(live)]
    if len(x) == 0:
        rows.zero_()
        return
    padding = _padding_rows_sync(live)
    torch.index_select(x, 0, live.clamp(min=0) if len(padding) else live, out=rows)
    if len(padding):
        rows.index_fill_(0, padding, 0)


@operator(_NAMESPACE, "(Tensor rows, Tensor row_of_slot) -> Tensor", cuda=_LAUNCHERS, fake=_like_tokens)
def sum_rows(rows: Tensor, row_of_slot: Tensor) -> Tensor:
    """Sums rows[row_of_slot[t, k]] over k, leaving out -1; half precision is summed in fp32.

    rows: [C, W], any float dtype; row_of_slot: [T, K], int64. Returns [T, W], same dtype.
    """
    if row_of_slot.numel() == 0:
        return _like_tokens(rows, row_of_slot).zero_()
    there = row_of_slot >= 0
    if there.all():
        one_each = row_of_slot.shape[1] == 1
        return (
            rows.index_select(0, row_of_slot.view(-1)) if one_each else F.embedding_bag(row_of_slot, rows, mode="sum")
        )
    # One bag for each token, with as many rows as the token has.
    ends = there.sum(dim=1).cumsum(0)
    return F.embedding_bag(row_of_slot[there], rows, F.pad(ends[:-1], (1, 0)), mode="sum")


def _live_rows_sync(num_rows: Tensor, rows: Tensor) -> int:
    """Returns R, at most the rows of the buffer. NOTE: reads memory of the CPU, so nothing waits for a device."""
    return max(0, min(int(num_rows.item()), rows.shape[0]))


def _padding_rows_sync(live: Tensor) -> Tensor:
    # The number of padding rows is a shape, but nothing waits on the CPU. The Triton kernel writes zeros row by row.
    return (live < 0).nonzero().view(-1)
