"""Memory-efficient cross entropy per token over a padded vocabulary. The loss function applies masks and reduces.

The columns of the vocabulary may be split over a tensor-parallel group. Each rank then computes the softmax of its
columns, and one small collective combines the ranks: the log-sum-exp and the label's logit of each token, [2, T] per
rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.autograd import PlainFunction, first_order
from megatron.core.device import RowChunks
from megatron.core.group_collectives import all_gather_rows
from megatron.core.parallel_state import group_or_existing
from megatron.core.process_groups_config import group_rank, group_size

# On a CPU, a chunk of logits and its exponentials should fit into the cache. On a GPU, a chunk should fill the device.
_CHUNKS = RowChunks(cpu_elements=1 << 18, gpu_elements=1 << 25)


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """Computes the negative log-likelihood of each target.

    vocab_parallel_logits: [*, V / ranks], any float dtype, not modified. target: [*], int64, below V, equal on all
    ranks; negative targets, such as -100, have loss and gradient 0. label_smoothing: probability that is distributed
    evenly over the V - 1 other classes. tp_group: None means the group of parallel_state, see group_or_existing.
    Returns [*], fp32 (fp64 for fp64 logits), on the device of the logits, equal on all ranks. Raises ValueError for a
    label_smoothing below 0, or of 1 and more.
    """
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing is {label_smoothing}: must be at least 0 and below 1")
    columns = _Columns.of(
        vocab_parallel_logits, group_or_existing(tp_group), num_classes=None, label_smoothing=label_smoothing
    )
    loss: Tensor = _CrossEntropy.apply(vocab_parallel_logits, target.clamp(min=0), columns, False)
    return loss.masked_fill(target < 0, 0)


def consuming_cross_entropy(
    logits: Tensor, target: Tensor, *, num_classes: int, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Computes vocab_parallel_cross_entropy in place: the gradient overwrites the memory of the logits.

    logits: [*, V / ranks], any float dtype, contiguous, not a leaf, and not used elsewhere. Columns from `num_classes`
    on are padding, which is ignored and receives a gradient of exactly 0. target: [*], int64, 0 <= target <
    num_classes. tp_group: None means this rank alone. Returns [*], fp32 (fp64 for fp64 logits). A second backward
    through the same graph raises RuntimeError.
    """
    assert not (logits.is_leaf and logits.requires_grad), "the gradient would overwrite a leaf's values"
    columns = _Columns.of(logits, tp_group, num_classes=num_classes)
    loss: Tensor
    if logits.dtype in (torch.float32, torch.float64):
        loss = _CrossEntropyInPlace.apply(logits, target, columns)
    else:
        loss = _CrossEntropy.apply(logits, target, columns, True)
    return loss


@dataclass(frozen=True)
class _Columns:
    """The range of classes in this rank's columns: [first, first + valid) of num_classes. Further columns are padding.

    even: probability of every class other than the label under the smoothed target distribution.
    """

    first: int
    valid: int
    num_classes: int
    group: ProcessGroup | None
    even: float = 0.0

    @classmethod
    def of(
        cls, logits: Tensor, group: ProcessGroup | None, *, num_classes: int | None, label_smoothing: float = 0.0
    ) -> "_Columns":
        held = logits.shape[-1]
        first = group_rank(group) * held
        num_classes = held * group_size(group) if num_classes is None else num_classes
        even = label_smoothing / max(num_classes - 1, 1)
        return cls(first, min(max(num_classes - first, 0), held), num_classes, group, even)

    @property
    def of_label(self) -> float:
        """Amount by which the label's probability exceeds `even`."""
        return 1 - self.even * self.num_classes

    def own(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the local column of each target, and whether it is on this rank (bool). target: [T, 1], int64."""
        local = target - self.first
        mine = (local >= 0) & (local < self.valid)
        # Invalid labels remain out of range, so that gather fails.
        elsewhere = (target >= 0) & (target < self.num_classes) & ~mine
        return local.masked_fill(elsewhere, 0), mine

    def join(self, log_sum: Tensor, of_label: Tensor) -> tuple[Tensor, Tensor]:
        """Combines log-sum-exp and label logit over all ranks. Returns both with the same shape and dtype.

        log_sum, of_label: [T, 1], fp32 or fp64. of_label must be 0 if the label is on a different rank.
        """
        ranks = all_gather_rows(torch.stack([log_sum, of_label]).unsqueeze(0), self.group).wait()  # [ranks, 2, T, 1]
        return ranks[:, 0].logsumexp(dim=0), ranks[:, 1].sum(dim=0)


class _CrossEntropyInPlace(PlainFunction):
    """Replaces logits by probabilities in forward and by gradients in backward, in the same memory."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, columns: _Columns) -> Tensor:
        rows = logits.view(-1, logits.shape[-1])  # [T, V]
        labels, mine = columns.own(target.reshape(-1, 1))  # [T, 1]
        log_sum = rows.new_full(labels.shape, -torch.inf)
        of_label = torch.zeros_like(log_sum)
        # A rank may hold only padding.
        for chunk in _CHUNKS.of(rows) if columns.valid else ():
            valid = rows[chunk, : columns.valid]
            largest, of_label[chunk] = valid.amax(-1, keepdim=True), valid.gather(1, labels[chunk])
            _softmax_in_place(valid)
            # log(sum(exp)) is computed from the largest entry, whose probability cannot underflow, unlike the label's.
            torch.sub(largest, valid.amax(-1, keepdim=True).log_(), out=log_sum[chunk])
        # Scale of this rank's probabilities, which sum to 1 on each rank, in the global softmax.
        share = None
        if group_size(columns.group) > 1:
            local = log_sum
            log_sum, of_label = columns.join(local, of_label.masked_fill_(~mine, 0))
            share = (local - log_sum).exp_()
        ctx.save_for_backward(logits, labels, mine, share)
        ctx.columns = columns
        return (log_sum - of_label).view(target.shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        # In-place writes change the tensor's version, so autograd rejects a second backward.
        probs, labels, mine, share = ctx.saved_tensors
        rows, scale = probs.view(-1, probs.shape[-1]), grad_loss.reshape(-1, 1)
        if ctx.columns.valid:
            valid = rows[:, : ctx.columns.valid]
            valid.mul_(scale if share is None else scale * share).scatter_add_(1, labels, -scale * mine)
        rows[:, ctx.columns.valid :] = 0
        return probs, None, None


def _softmax_in_place(rows: Tensor) -> None:
    """Replaces logits by probabilities in place. rows: [R, C], fp32 or fp64."""
    if _can_overwrite(rows):
        torch.softmax(rows, -1, out=rows)
    else:
        rows.copy_(rows.softmax(-1))


def _can_overwrite(rows: Tensor) -> bool:
    # The CPU kernel writes an element only after its last read of it. GPU kernels do not guarantee this.
    return rows.device.type == "cpu"


class _CrossEntropy(PlainFunction):
    """Saves the logits and one number per token. Backward recomputes the exponentials chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, columns: _Columns, consume: bool) -> Tensor:
        rows = logits.reshape(-1, logits.shape[-1])  # [T, V]
        labels, mine = columns.own(target.reshape(-1, 1))  # [T, 1]
        accumulate = torch.promote_types(logits.dtype, torch.float32)
        loss = torch.zeros(labels.shape, dtype=accumulate, device=logits.device)
        log_sum, of_label = torch.full_like(loss, -torch.inf), torch.zeros_like(loss)
        for chunk in _CHUNKS.of(rows) if columns.valid else ():
            valid = rows[chunk, : columns.valid]
            log_probs = torch.log_softmax(valid, dim=-1, dtype=accumulate)
            torch.neg(log_probs.gather(1, labels[chunk]), out=loss[chunk])
            of_label[chunk] = valid.gather(1, labels[chunk])
            torch.add(of_label[chunk], loss[chunk], out=log_sum[chunk])
            if columns.even:
                # The expected logit under the target distribution, restricted to this rank's columns.
                of_label[chunk].mul_(mine[chunk]).mul_(columns.of_label)
                of_label[chunk] += columns.even * valid.sum(-1, keepdim=True, dtype=accumulate)
        if group_size(columns.group) > 1:
            # With label smoothing, of_label is already masked and contains only this rank's contribution.
            log_sum, of_label = columns.join(log_sum, of_label if columns.even else of_label.masked_fill_(~mine, 0))
        if group_size(columns.group) > 1 or columns.even:
            loss = log_sum - of_label
        ctx.save_for_backward(logits, labels, mine, log_sum)
        ctx.columns, ctx.consume = columns, consume
        return loss.view(target.shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, mine, log_sum = ctx.saved_tensors
        num_valid = ctx.columns.valid
        grad = logits if ctx.consume else torch.empty_like(logits, memory_format=torch.contiguous_format)
        source, result = logits.reshape(-1, logits.shape[-1]), grad.view(-1, logits.shape[-1])
        scale = grad_loss.reshape(-1, 1).to(log_sum.dtype)
        for chunk in _CHUNKS.of(source) if num_valid else ():
            probs = (source[chunk, :num_valid].to(log_sum.dtype) - log_sum[chunk]).exp_()
            if ctx.columns.even:
                probs.sub_(ctx.columns.even)
            own = scale[chunk] * mine[chunk]
            probs.mul_(scale[chunk]).scatter_add_(1, labels[chunk], -ctx.columns.of_label * own)
            result[chunk, :num_valid] = probs
        result[:, num_valid:] = 0
        return grad, None, None, None
