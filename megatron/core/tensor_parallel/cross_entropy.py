"""Cross entropy per token over a padded vocabulary, lean in memory; the loss function masks and reduces."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.device import RowChunks

# A chunk of logits and its exponentials stay in a CPU's cache; a GPU needs a chunk that fills the device.
_CHUNKS = RowChunks(cpu_elements=1 << 18, gpu_elements=1 << 25)


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
    """Negative log-likelihood of each target.

    vocab_parallel_logits: [*, V], any float dtype; left as it is. target: [*], int64, 0 <= target < V.
    Returns [*], fp32 (fp64 for fp64 logits), on the logits' device.
    """
    loss: Tensor = _CrossEntropy.apply(vocab_parallel_logits, target, vocab_parallel_logits.shape[-1], False)
    return loss


def consuming_cross_entropy(logits: Tensor, target: Tensor, *, num_classes: int) -> Tensor:
    """Like vocab_parallel_cross_entropy, but the logits' memory is used up: it ends as their gradient.

    logits: [*, V], any float dtype, contiguous, not a leaf, and nobody else's; columns from `num_classes` on are
    padding: they take no part and get a gradient of exactly 0. target: [*], int64, 0 <= target < num_classes.
    Returns [*], fp32 (fp64 for fp64 logits). A second backward through the same graph raises RuntimeError.
    """
    assert not (logits.is_leaf and logits.requires_grad), "the gradient would overwrite a leaf's values"
    loss: Tensor
    if logits.dtype in (torch.float32, torch.float64):
        loss = _CrossEntropyInPlace.apply(logits, target, num_classes)
    else:
        loss = _CrossEntropy.apply(logits, target, num_classes, True)
    return loss


class _CrossEntropyInPlace(torch.autograd.Function):
    """Logits become probabilities in forward and gradients in backward, in one memory: exponentials once."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, num_classes: int) -> Tensor:
        rows, labels = logits.view(-1, logits.shape[-1]), target.reshape(-1, 1)  # [T, V], [T, 1]
        loss = torch.empty(labels.shape, dtype=logits.dtype, device=logits.device)
        for chunk in _CHUNKS.of(rows):
            valid = rows[chunk, :num_classes]
            largest, of_label = valid.amax(-1, keepdim=True), valid.gather(1, labels[chunk])
            valid.copy_(valid.softmax(-1))
            # log(sum(exp)) from the largest entry, whose probability cannot underflow as the label's may.
            torch.sub(largest - valid.amax(-1, keepdim=True).log_(), of_label, out=loss[chunk])
        ctx.save_for_backward(logits, labels)
        ctx.num_classes = num_classes
        return loss.view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        # Writing in place moves the tensor's version, so autograd itself refuses a second backward.
        probs, labels = ctx.saved_tensors
        rows, scale = probs.view(-1, probs.shape[-1]), grad_loss.reshape(-1, 1)
        rows[:, : ctx.num_classes].mul_(scale).scatter_add_(1, labels, -scale)
        rows[:, ctx.num_classes :] = 0
        return probs, None, None


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits and one number per token; exponentials are computed again in backward, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, num_classes: int, consume: bool) -> Tensor:
        rows, labels = logits.reshape(-1, logits.shape[-1]), target.reshape(-1, 1)  # [T, V], [T, 1]
        accumulate = torch.promote_types(logits.dtype, torch.float32)
        loss = torch.empty(labels.shape, dtype=accumulate, device=logits.device)
        log_sum = torch.empty_like(loss)
        for chunk in _CHUNKS.of(rows):
            valid = rows[chunk, :num_classes]
            log_probs = torch.log_softmax(valid, dim=-1, dtype=accumulate)
            torch.neg(log_probs.gather(1, labels[chunk]), out=loss[chunk])
            torch.add(valid.gather(1, labels[chunk]).to(accumulate), loss[chunk], out=log_sum[chunk])
        ctx.save_for_backward(logits, labels, log_sum)
        ctx.num_classes, ctx.consume = num_classes, consume
        return loss.view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, log_sum = ctx.saved_tensors
        grad = logits if ctx.consume else torch.empty_like(logits, memory_format=torch.contiguous_format)
        source, result = logits.reshape(-1, logits.shape[-1]), grad.view(-1, logits.shape[-1])
        scale = grad_loss.reshape(-1, 1).to(log_sum.dtype)
        for chunk in _CHUNKS.of(source):
            probs = (source[chunk, : ctx.num_classes].to(log_sum.dtype) - log_sum[chunk]).exp_()
            probs.mul_(scale[chunk]).scatter_add_(1, labels[chunk], -scale[chunk])
            result[chunk, : ctx.num_classes] = probs
        result[:, ctx.num_classes :] = 0
        return grad, None, None, None
