"""Memory-efficient cross entropy per token over a padded vocabulary; the loss function applies masks and reduces.

The vocabulary's columns may be split over a tensor-parallel group. Each rank then computes the softmax of its own
columns, and one small collective combines the ranks: log-sum-exp and the label's logit of each token, [2, T] per rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron.core.device import RowChunks
from megatron.core.group_collectives import all_gather_rows
from megatron.core.parallel_state import group_or_existing
from megatron.core.process_groups_config import group_rank, group_size

# A chunk of logits and its exponentials fit into a CPU's cache; a GPU needs a chunk that fills the device.
_CHUNKS = RowChunks(cpu_elements=1 << 18, gpu_elements=1 << 25)


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """Computes the negative log-likelihood of each target.

    vocab_parallel_logits: [*, V / ranks], any float dtype, not modified. target: [*], int64, below V, the same on all
    ranks; for negative targets, such as -100, loss and gradient are 0. Returns [*], fp32 (fp64 for fp64 logits), on the
    logits' device, the same on all ranks. label_smoothing: probability distributed evenly over the V - 1 other classes.
    tp_group: None means the group of parallel_state, see group_or_existing. Raises ValueError for a label_smoothing
    that is not a probability.
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
    """Computes vocab_parallel_cross_entropy in place: the memory of the logits is overwritten by their gradient.

    logits: [*, V / ranks], any float dtype, contiguous, not a leaf, and not used elsewhere. Of all V columns, those
    from `num_classes` on are padding: they are ignored and get a gradient of exactly 0. target: [*], int64, 0 <= target
    < num_classes. tp_group: None means this rank alone. Returns [*], fp32 (fp64 for fp64 logits). A second backward
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
    """This rank's columns [first, first + valid) of num_classes; columns beyond `valid` are padding.

    even: probability of every class under the target distribution, to which the label's own probability is added.
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
        """The label's probability in excess of the probability of all classes."""
        return 1 - self.even * self.num_classes

    def own(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the target's column on this rank and whether this rank has it, as bool; target: [T, 1], int64."""
        local = target - self.first
        mine = (local >= 0) & (local < self.valid)
        # Labels that exist on no rank stay out of range, so that gather fails on them.
        elsewhere = (target >= 0) & (target < self.num_classes) & ~mine
        return local.masked_fill(elsewhere, 0), mine

    def join(self, log_sum: Tensor, of_label: Tensor) -> tuple[Tensor, Tensor]:
        """Combines the ranks' columns; of_label is 0 if the label is on another rank.

        log_sum, of_label: [T, 1], fp32 or fp64. Returns the same form.
        """
        ranks = all_gather_rows(torch.stack([log_sum, of_label]).unsqueeze(0), self.group).wait()  # [ranks, 2, T, 1]
        return ranks[:, 0].logsumexp(dim=0), ranks[:, 1].sum(dim=0)


class _CrossEntropyInPlace(torch.autograd.Function):
    """Turns logits into probabilities in forward and into gradients in backward, in the same memory."""

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
            # log(sum(exp)) is computed from the largest entry, whose probability cannot underflow as the label's may.
            torch.sub(largest, valid.amax(-1, keepdim=True).log_(), out=log_sum[chunk])
        # The factor by which this rank's probabilities, which sum to 1, are too large.
        share = None
        if group_size(columns.group) > 1:
            local = log_sum
            log_sum, of_label = columns.join(local, of_label.masked_fill_(~mine, 0))
            share = (local - log_sum).exp_()
        ctx.save_for_backward(logits, labels, mine, share)
        ctx.columns = columns
        return (log_sum - of_label).view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        # In-place writes change the tensor's version, so autograd itself rejects a second backward.
        probs, labels, mine, share = ctx.saved_tensors
        rows, scale = probs.view(-1, probs.shape[-1]), grad_loss.reshape(-1, 1)
        if ctx.columns.valid:
            valid = rows[:, : ctx.columns.valid]
            valid.mul_(scale if share is None else scale * share).scatter_add_(1, labels, -scale * mine)
        rows[:, ctx.columns.valid :] = 0
        return probs, None, None


def _softmax_in_place(rows: Tensor) -> None:
    """Replaces logits [R, C], fp32 or fp64, by their probabilities."""
    if _can_overwrite(rows):
        torch.softmax(rows, -1, out=rows)
    else:
        rows.copy_(rows.softmax(-1))


def _can_overwrite(rows: Tensor) -> bool:
    # The CPU kernel writes an element only after its last read of it. GPU kernels do not guarantee this.
    return rows.device.type == "cpu"


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits and one number per token; exponentials are recomputed in backward, chunk by chunk."""

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
            # With an even part, of_label is already masked and contains only this rank's contribution.
            log_sum, of_label = columns.join(log_sum, of_label if columns.even else of_label.masked_fill_(~mine, 0))
        if group_size(columns.group) > 1 or columns.even:
            loss = log_sum - of_label
        ctx.save_for_backward(logits, labels, mine, log_sum)
        ctx.columns, ctx.consume = columns, consume
        return loss.view(target.shape)

    @staticmethod
    @once_differentiable
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
