"""Tokens in expert order and back: index maps as data, and the two row movements as autograd functions.

No communication and no matrix products; every index stays on the device. Which slots an expert has no room for is
capacity.py's matter.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class PermutationMap:
    """Where the K copies of each token go when rows are sorted by expert. R = T * K rows where every slot has one.

    A slot is one choice of one token: slot t * K + k. token_of_row, slot_of_row: [R], int64. row_of_slot: [T, K],
    int64: the inverse. All on the tokens' device.
    kept: [T, K], bool: slots that have a row; the others point to row 0 and count as zero. None: all have.
    filled: [R], bool: rows that stand for a slot; the others repeat token 0 with weight 0. None: all do.
    """

    token_of_row: Tensor
    slot_of_row: Tensor
    row_of_slot: Tensor
    kept: Tensor | None = None
    filled: Tensor | None = None


def sort_by_expert(expert_indices: Tensor, num_experts: int) -> tuple[PermutationMap, Tensor]:
    """Stable order of all (token, choice) slots by expert.

    expert_indices: [T, K], int64. Returns the map and tokens_per_expert: [E], int64, on the same device.
    """
    sorted_experts, slot_of_row = torch.sort(expert_indices.reshape(-1), stable=True)
    # The inverse permutation by one scatter.
    row_of_slot = torch.empty_like(slot_of_row)
    row_of_slot[slot_of_row] = torch.arange(slot_of_row.numel(), device=slot_of_row.device)
    token_of_row = slot_of_row // expert_indices.shape[1]
    permutation = PermutationMap(token_of_row, slot_of_row, row_of_slot.view(expert_indices.shape))
    return permutation, count_sorted(sorted_experts, num_experts)


def count_sorted(sorted_experts: Tensor, num_experts: int) -> Tensor:
    """Rows of each expert; sorted_experts: [R], int64, ascending -> [E], int64, same device, without a sync."""
    experts = torch.arange(num_experts, device=sorted_experts.device)
    # Where each expert's rows end: an expert without tokens ends where the one before does.
    row_ends = torch.searchsorted(sorted_experts, experts, right=True)
    return row_ends.diff(prepend=row_ends.new_zeros(1))


def permute_tokens(tokens: Tensor, permutation: PermutationMap) -> Tensor:
    """Each token K times, in expert order; tokens: [T, H], any float dtype -> [R, H]."""
    return _GatherRows.apply(tokens, permutation.token_of_row, permutation.row_of_slot, permutation.kept)


def permute_probs(probs: Tensor, permutation: PermutationMap) -> Tensor:
    """The weight of each row; probs: [T, K], any float dtype -> [R]."""
    slots = probs.reshape(-1, 1)  # [T * K, 1], one weight a slot
    kept = None if permutation.kept is None else permutation.kept.view(-1, 1)
    weights = _GatherRows.apply(slots, permutation.slot_of_row, permutation.row_of_slot.view(-1, 1), kept).view(-1)
    return weights if permutation.filled is None else weights * permutation.filled


def unpermute_tokens(rows: Tensor, permutation: PermutationMap) -> Tensor:
    """The sum of each token's rows, in token order; rows: [R, H], any float dtype -> [T, H].

    A row that stands for no slot still gets a gradient, which its weight of 0 ends.
    """
    return _SumRows.apply(rows, permutation.token_of_row, permutation.row_of_slot, permutation.kept)


class _GatherRows(torch.autograd.Function):
    """out[r] = x[token_of_row[r]]; backward sums K gathered rows a token instead of scattering into zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of_row: Tensor, row_of_slot: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(row_of_slot, kept)
        return x.index_select(0, token_of_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        row_of_slot, kept = ctx.saved_tensors
        return _sum_rows(grad, row_of_slot, kept=kept), None, None, None


class _SumRows(torch.autograd.Function):
    """out[t] = sum over the kept k of x[row_of_slot[t, k]]; backward is the gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of_row: Tensor, row_of_slot: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(token_of_row)
        return _sum_rows(x, row_of_slot, kept=kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (token_of_row,) = ctx.saved_tensors
        return grad.index_select(0, token_of_row), None, None, None


def _sum_rows(x: Tensor, row_of_slot: Tensor, *, kept: Tensor | None) -> Tensor:
    """[R, H] and [T, K] -> [T, H]: gathers and sums in one pass, accumulating half precision in fp32."""
    if row_of_slot.shape[1] == 1 and kept is None:
        return x.index_select(0, row_of_slot.view(-1))
    if x.shape[0] == 0:
        # No slot has a row: there is no row 0 for them to point to.
        return x.new_zeros(len(row_of_slot), *x.shape[1:])
    # The kernel sums rows of a table per bag: rows are the table here, and a token's K rows a bag.
    weights = None if kept is None else kept.to(x.dtype)
    return F.embedding_bag(row_of_slot, x, mode="sum", per_sample_weights=weights)
