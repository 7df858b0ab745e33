"""Rows sorted by expert in fixed-size buffers, where only the device knows how many rows are live.

As in permutation.py, an *order* assigns rows to slots; it is computed on the device without a host sync. Two autograd
functions, each the gradient of the other, then move the rows. Each operator has a CPU version here and a Triton kernel
in triton_rows.py. No shape depends on the routing. Rows beyond the live ones are never read, so they may be undefined.
`gather` and `sum_slots` are the same movements without autograd, for functions that own their rows.

[Note: placeholders] Packed rows, as bytes, cannot carry gradients. If rows are sent in 8 bits, autograd passes a
placeholder through the same functions: a tensor of the rows' shape and dtype, with undefined content and the gradient
of the rows. All of its elements share the memory of one.

A slot is one choice of one token: slot t * K + k. T tokens, K choices, e experts of a rank, C rows of the buffer, of
which the first R are live, W elements in a row.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.autograd import PlainFunction, first_order
from megatron.core.operator_library import operator
from megatron.core.paged_rows import Rows, num_rows_of, operand, paging_schema, store_sync, write_sync

HAS_TRITON = importlib.util.find_spec("triton") is not None
# Launchers, which have the operators' names.
_LAUNCHERS: tuple[Callable[..., Any], ...] = ()
if HAS_TRITON:
    from megatron.core.transformer.moe import triton_rows

    _LAUNCHERS = (
        triton_rows.order_slots,
        triton_rows.experts_of_rows,
        triton_rows.gather_rows,
        triton_rows.sum_rows,
    )

# --- Orders ---


class StaticOrder(NamedTuple):
    """Slots and their rows in a buffer, all on one device.

    slot_of_row, token_of_row: [C], int32, -1 for padding. row_of_slot: [T, K], int32, -1 for a slot without a row.
    rows_per_group: int64, one count per expert, whose meaning depends on the order. With order_by_expert it is [e]: the
    rows of each expert of this rank in the buffer, including alignment. With order_by_rank it is [ranks * e]: the slots
    that chose each expert of each rank, including slots without a row. rows_needed: [1], int64: the size of the
    smallest buffer (with order_by_rank: of each rank's part) that has a row for every slot. num_rows: [1], int64: the
    number of rows that belong to a slot, plus, with order_by_expert, the padding of each expert. alignment: a divisor
    of C and of the rows of each expert in the buffer.
    """

    slot_of_row: Tensor
    token_of_row: Tensor
    row_of_slot: Tensor
    rows_per_group: Tensor
    rows_needed: Tensor
    num_rows: Tensor
    alignment: int = 1


def order_by_expert(
    expert_indices: Tensor, num_experts: int, *, capacity: int, alignment: int = 1, first_expert: int = 0
) -> StaticOrder:
    """Assigns rows to slots, expert after expert, each padded to a multiple of `alignment` rows.

    expert_indices: [T, K], int64 or int32; only slots of the num_experts experts starting at first_expert receive a
    row. capacity: C, a multiple of alignment. Slots of one expert keep their order.
    """
    slots, tokens, rows, _, kept, rows_needed, num_rows = ops.order_slots(
        expert_indices,
        first_expert=first_expert,
        num_experts=num_experts,
        num_parts=1,
        rows_per_part=capacity,
        alignment=alignment,
    )
    return StaticOrder(slots, tokens, rows, kept, rows_needed, num_rows, alignment)


def order_by_rank(expert_indices: Tensor, num_experts: int, *, num_ranks: int, rows_per_rank: int) -> StaticOrder:
    """Assigns each rank a part of rows_per_rank rows, in which rows are sorted by expert and padding comes last.

    expert_indices: [T, K], int64 or int32; slots with an index outside 0 to num_experts - 1 receive no row. Each rank
    has the same number of experts, numbered consecutively.
    """
    slots, tokens, rows, wanted, _, rows_needed, num_rows = ops.order_slots(
        expert_indices,
        first_expert=0,
        num_experts=num_experts,
        num_parts=num_ranks,
        rows_per_part=rows_per_rank,
        alignment=1,
    )
    return StaticOrder(slots, tokens, rows, wanted, rows_needed, num_rows)


def expert_of_received_rows(rows_per_group: Tensor, *, rows_per_rank: int) -> Tensor:
    """Returns the local expert of each row received from other ranks, or e for a padding row.

    rows_per_group: [ranks, e], int64: number of slots of each rank for each expert, of which each rank sent the first
    rows_per_rank. Returns [ranks * rows_per_rank, 1], int32.
    """
    experts: Tensor = ops.experts_of_rows(rows_per_group, rows_per_rank=rows_per_rank)
    return experts


def aligned_rows(counts: Tensor, alignment: int) -> Tensor:
    """Rounds each count up to a multiple of `alignment`; counts: [e], int64, on the device. Returns [e], int64."""
    return (counts + (alignment - 1)).div(alignment, rounding_mode="floor") * alignment


# --- Movement ---


def gather_live_rows(x: Tensor, probs: Tensor, *, order: StaticOrder, num_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Copies each row's token and weight into a buffer, or zeros into padding, for the first R rows.

    x: [T, W], any float dtype; probs: [T, K], or [T] if K is 1, any float dtype; order: assigns C rows to the slots;
    num_rows: [1], int64, R; all on one device. Returns [C, W] and [C], the dtypes of x and probs, undefined beyond the
    first R rows.
    """
    rows, _, weights = _GatherLiveRows.apply(x, probs, order, num_rows, None)
    return rows, weights


def gather_packed_rows(
    x: Tensor, packed: Tensor, probs: Tensor, *, order: StaticOrder, num_rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Does the same for tokens that are copied as packed rows: [T, bytes], uint8; see format.py of block_scaled.

    Returns a placeholder for the rows, [C, W], x's dtype, see [Note: placeholders]; the packed rows, [C, bytes]; and
    the weights, [C].
    """
    return _GatherLiveRows.apply(x, probs, order, num_rows, packed)


def placeholder(like: Tensor, num_rows: int) -> Tensor:
    """Returns a placeholder for rows: [num_rows, W], like's dtype; like: [*, W], any float dtype."""
    return like.new_empty(()).expand(num_rows, like.shape[1])


def sum_live_rows(rows: Tensor, *, order: StaticOrder, num_rows: Tensor) -> Tensor:
    """Sums the rows of each token.

    rows: [C, W], any float dtype; half precision is summed in fp32. order, num_rows: as in gather_live_rows. Returns
    [T, W], the rows' dtype. The gradient of rows beyond the first R is undefined.
    """
    return _SumLiveRows.apply(rows, order, num_rows)


class _GatherLiveRows(PlainFunction):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor, order: StaticOrder, num_rows: Tensor, packed: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        ctx.save_for_backward(order.row_of_slot)
        ctx.set_materialize_grads(False)
        ctx.probs_shape = probs.shape
        packed_rows = None
        if packed is None:
            rows = gather(x, order.token_of_row, num_rows=num_rows)
        else:
            rows = placeholder(x, order.token_of_row.shape[0])
            packed_rows = gather(packed, order.token_of_row, num_rows=num_rows)
            ctx.mark_non_differentiable(packed_rows)
        weights = gather(probs.reshape(-1, 1), order.slot_of_row, num_rows=num_rows)
        return rows, packed_rows, weights.view(-1)

    @staticmethod
    @first_order
    def backward(
        ctx: Any, grad_rows: Tensor | None, _: None, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (row_of_slot,) = ctx.saved_tensors
        grad_x = grad_probs = None
        if grad_rows is not None and ctx.needs_input_grad[0]:
            grad_x = sum_slots(grad_rows, row_of_slot)
        if grad_weights is not None and ctx.needs_input_grad[1]:
            grad_probs = sum_slots(grad_weights.view(-1, 1), row_of_slot.view(-1, 1)).view(ctx.probs_shape)
        return grad_x, grad_probs, None, None, None


class _SumLiveRows(PlainFunction):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: StaticOrder, num_rows: Tensor) -> Tensor:
        ctx.save_for_backward(order.token_of_row, num_rows)
        return sum_slots(rows, order.row_of_slot)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        source_of_row, num_rows = ctx.saved_tensors
        return gather(grad, source_of_row, num_rows=num_rows), None, None


def gather(x: Tensor, source_of_row: Tensor, *, num_rows: Tensor) -> Tensor:
    """Copies x[source_of_row] into the first R rows of a buffer, zeros for -1, without recording for backward.

    x: [T, W], any float dtype; source_of_row: [C], int32; num_rows: [1], int64. Returns [C, W], same dtype.
    """
    out = x.new_empty(source_of_row.shape[0], x.shape[1])
    gather_into(out, x, source_of_row, num_rows=num_rows)
    return out


def gather_into(out: Rows, x: Tensor, source_of_row: Tensor, *, num_rows: Tensor) -> None:
    """Does the same with the memory of `out`: [C, W], x's dtype, possibly in pages."""
    memory, places = operand("out", out)
    ops.gather_rows(x.contiguous(), source_of_row, num_rows=num_rows, out=memory, **places)


def sum_slots(rows: Tensor, row_of_slot: Tensor) -> Tensor:
    """Sums the rows of each token, without recording for backward; -1 is no row.

    rows: [C, W], any float dtype; half precision is summed in fp32; row_of_slot: [T, K], int32. Returns [T, W], same
    dtype.
    """
    summed: Tensor = ops.sum_rows(rows.contiguous(), row_of_slot)
    return summed


# --- Operators, as ops.<name> ---

ops = torch.ops.static_rows

_NAMESPACE = "static_rows"


def _maps_and_counts(
    expert_indices: Tensor,
    *,
    first_expert: int,
    num_experts: int,
    num_parts: int,
    rows_per_part: int,
    alignment: int,
) -> tuple[Tensor, ...]:
    slot_of_row, token_of_row = (
        expert_indices.new_empty(num_parts * rows_per_part, dtype=torch.int32) for _ in range(2)
    )
    row_of_slot = torch.empty_like(expert_indices, dtype=torch.int32, memory_format=torch.contiguous_format)
    counts = (expert_indices.new_empty(size, dtype=torch.int64) for size in (num_experts, num_experts, 1, 1))
    return slot_of_row, token_of_row, row_of_slot, *counts


@operator(
    _NAMESPACE,
    "(Tensor expert_indices, *, int first_expert, int num_experts, int num_parts, int rows_per_part, int alignment) -> "
    "(Tensor slot_of_row, Tensor token_of_row, Tensor row_of_slot, Tensor wanted, Tensor kept, Tensor rows_needed, "
    "Tensor num_rows)",
    cuda=_LAUNCHERS,
    fake=_maps_and_counts,
)
def order_slots(
    expert_indices: Tensor,
    *,
    first_expert: int,
    num_experts: int,
    num_parts: int,
    rows_per_part: int,
    alignment: int,
) -> tuple[Tensor, ...]:
    """Assigns rows to slots by expert, in parts of the buffer with equal numbers of experts and rows.

    Slots of one expert keep their order. Within a part, the rows of each expert begin at a multiple of `alignment`, and
    rows beyond rows_per_part are dropped. expert_indices: [T, K], int64 or int32; only slots of the num_experts experts
    starting at first_expert receive a row.

    Returns slot_of_row, token_of_row, row_of_slot: as in StaticOrder; wanted: [num_experts], int64, the slots of each
    expert; kept: [num_experts], int64, the rows of each expert in the buffer, alignment included; rows_needed: [1],
    int64, the smallest rows_per_part that drops nothing; num_rows: [1], int64, the sum of kept.
    """
    flat = expert_indices.reshape(-1) - first_expert
    experts, slots = flat.where((flat >= 0) & (flat < num_experts), num_experts).int().sort(stable=True)
    # The last count is the number of slots without a row.
    counts = torch.bincount(experts, minlength=num_experts + 1)
    wanted = counts[:num_experts].clone()
    aligned = aligned_rows(wanted, alignment).view(num_parts, -1)
    ends = aligned.cumsum(1)  # within the part, [num_parts, experts of a part]
    firsts = F.pad((ends - aligned).view(-1), (0, 1))
    place = firsts[experts] + torch.arange(len(slots)) - (counts.cumsum(0) - counts)[experts]
    num_rows = num_parts * rows_per_part
    rows = experts // aligned.shape[1] * rows_per_part + place
    # Slots without a row are written to one extra row, which is removed below.
    rows = rows.where((experts < num_experts) & (place < rows_per_part), num_rows)
    slot_of_row = rows.new_full((num_rows + 1,), -1, dtype=torch.int32)
    slot_of_row[rows] = slots.int()
    slot_of_row = slot_of_row[:num_rows]
    row_of_slot = torch.empty_like(experts)
    row_of_slot[slots] = rows.where(rows < num_rows, -1).int()
    kept = ends.clamp(max=rows_per_part).diff(dim=1, prepend=ends.new_zeros(num_parts, 1)).view(-1)
    return (
        slot_of_row.clone(),
        slot_of_row.div(expert_indices.shape[1], rounding_mode="floor"),
        row_of_slot.view(expert_indices.shape),
        wanted,
        kept,
        ends[:, -1].amax(0, keepdim=True),
        kept.sum(0, keepdim=True),
    )


def _one_expert_per_row(rows_per_group: Tensor, *, rows_per_rank: int) -> Tensor:
    return rows_per_group.new_empty(len(rows_per_group) * rows_per_rank, 1, dtype=torch.int32)


@operator(
    _NAMESPACE,
    "(Tensor rows_per_group, *, int rows_per_rank) -> Tensor",
    cuda=_LAUNCHERS,
    fake=_one_expert_per_row,
)
def experts_of_rows(rows_per_group: Tensor, *, rows_per_rank: int) -> Tensor:
    """Finds the local expert of each received row, or e for a padding row.

    rows_per_group: [ranks, e], int64. Returns [ranks * rows_per_rank, 1], int32.
    """
    place = torch.arange(rows_per_rank).expand(len(rows_per_group), -1).contiguous()
    return torch.searchsorted(rows_per_group.cumsum(1), place, right=True, out_int32=True).view(-1, 1)


def _like_tokens(rows: Tensor, row_of_slot: Tensor) -> Tensor:
    return rows.new_empty(row_of_slot.shape[0], rows.shape[1])


@operator(
    _NAMESPACE,
    f"(Tensor x, Tensor source_of_row, *, Tensor num_rows, Tensor(a!) out, {paging_schema('out')}) -> ()",
    cuda=_LAUNCHERS,
)
def gather_rows(
    x: Tensor,
    source_of_row: Tensor,
    *,
    num_rows: Tensor,
    out: Tensor,
    out_table: Tensor | None = None,
    out_sizes: Sequence[int] = (),
) -> None:
    """Writes out[r] = x[source_of_row[r]], or zeros if the source is -1, for live rows only.

    x: [T, W], any dtype; source_of_row: [C], int32; num_rows: [1], int64; out: [C, W], x's dtype, or pages.
    """
    live = source_of_row[: _live_rows_sync(num_rows, num_rows_of(out, out_sizes))]
    target, is_copy = write_sync(out, out_table, out_sizes, num_rows=len(live))
    rows = target[: len(live)]
    if len(x) == 0:
        rows.zero_()
    else:
        padding = _padding_rows_sync(live)
        torch.index_select(x, 0, live.clamp(min=0) if len(padding) else live, out=rows)
        if len(padding):
            rows.index_fill_(0, padding, 0)
    if is_copy and out_table is not None:
        store_sync(rows, out, out_table, out_sizes)


@operator(_NAMESPACE, "(Tensor rows, Tensor row_of_slot) -> Tensor", cuda=_LAUNCHERS, fake=_like_tokens)
def sum_rows(rows: Tensor, row_of_slot: Tensor) -> Tensor:
    """Sums rows[row_of_slot[t, k]] over k, skipping entries of -1; half precision is summed in fp32.

    rows: [C, W], any float dtype; row_of_slot: [T, K], int32. Returns [T, W], same dtype.
    """
    if row_of_slot.numel() == 0:
        return _like_tokens(rows, row_of_slot).zero_()
    there = row_of_slot >= 0
    if there.all():
        one_each = row_of_slot.shape[1] == 1
        return (
            rows.index_select(0, row_of_slot.view(-1)) if one_each else F.embedding_bag(row_of_slot, rows, mode="sum")
        )
    # One bag per token, with the rows that the token has in the buffer.
    ends = there.sum(dim=1).cumsum(0)
    return F.embedding_bag(row_of_slot[there], rows, F.pad(ends[:-1], (1, 0)), mode="sum")


def _live_rows_sync(num_rows: Tensor, most: int) -> int:
    """Returns R, at most `most`. NOTE: reads CPU memory, so the host waits for no device."""
    return max(0, min(int(num_rows.item()), most))


def _padding_rows_sync(live: Tensor) -> Tensor:
    # The number of padding rows is a shape, but no device is involved. The Triton kernel writes zeros row by row.
    return (live < 0).nonzero().view(-1)
