"""Cross entropy per token over a padded vocabulary, lean in memory; the loss function masks and reduces."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

# A chunk of logits and its exponentials stay in a CPU core's cache; a GPU needs a chunk that fills the device.
_CHUNK_ELEMENTS_CPU = 1 << 17
_CHUNK_ELEMENTS_GPU = 1 << 25


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
    """Negative log-likelihood of each target.

    vocab_parallel_logits: [*, V], any float dtype; left as it is. target: [*], int64, 0 <= target < V.
    Returns [*], fp32 (fp64 for fp64 logits), on the logits' device.
    """
    return _CrossEntropy.apply(vocab_parallel_logits, target, vocab_parallel_logits.shape[-1], False)


def consuming_cross_entropy(logits: Tensor, target: Tensor, *, num_classes: int) -> Tensor:
    """Like vocab_parallel_cross_entropy, but backward writes the gradient into the logits' memory.

    logits: [*, V], any float dtype, contiguous, not a leaf, and nobody else's; columns from `num_classes` on are
    padding: they take no part and get a gradient of exactly 0. target: [*], int64, 0 <= target < num_classes.
    Returns [*], fp32 (fp64 for fp64 logits). A second backward through the same graph raises RuntimeError.
    """
    assert not (logits.is_leaf and logits.requires_grad), "the gradient would overwrite a leaf's values"
    return _CrossEntropy.apply(logits, target, num_classes, True)


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits and one number per token; exponentials are computed again in backward, chunk by chunk."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, target: Tensor, num_classes: int, consume: bool) -> Tensor:
        rows = logits.reshape(-1, logits.shape[-1])  # [T, V]
        labels = target.reshape(-1, 1)  # [T, 1]
        accumulate = torch.promote_types(logits.dtype, torch.float32)
        loss = torch.empty(rows.shape[0], 1, dtype=accumulate, device=logits.device)
        log_sum = torch.empty_like(loss)
        for chunk in _chunks(rows):
            valid = rows[chunk, :num_classes]
            log_probs = torch.log_softmax(valid, dim=-1, dtype=accumulate)
            torch.neg(log_probs.gather(1, labels[chunk]), out=loss[chunk])
            torch.add(valid.gather(1, labels[chunk]).to(accumulate), loss[chunk], out=log_sum[chunk])
        ctx.save_for_backward(logits, labels, log_sum)
        ctx.num_classes, ctx.consume = num_classes, consume
        return loss.view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_loss: Tensor) -> tuple[Tensor | None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        logits, labels, log_sum = ctx.saved_tensors
        # Writing in place moves the tensor's version, so autograd itself refuses a second backward.
        grad = logits if ctx.consume else torch.empty_like(logits, memory_format=torch.contiguous_format)
        source, result = logits.reshape(-1, logits.shape[-1]), grad.view(-1, logits.shape[-1])
        scale = grad_loss.reshape(-1, 1).to(log_sum.dtype)
        for chunk in _chunks(source):
            valid, out = source[chunk, : ctx.num_classes], result[chunk, : ctx.num_classes]
            direct = out.dtype == log_sum.dtype
            probs = torch.sub(valid, log_sum[chunk], out=out) if direct else valid.to(log_sum.dtype) - log_sum[chunk]
            probs.exp_().mul_(scale[chunk]).scatter_add_(1, labels[chunk], -scale[chunk])
            if not direct:
                out.copy_(probs)
        result[:, ctx.num_classes :] = 0
        return grad, None, None, None


def _chunks(rows: Tensor) -> Iterator[slice]:
    """Consecutive row ranges of about one chunk each; rows: [T, V]."""
    elements = _CHUNK_ELEMENTS_CPU if rows.device.type == "cpu" else _CHUNK_ELEMENTS_GPU
    step = max(1, elements // rows.shape[1])
    return (slice(start, start + step) for start in range(0, rows.shape[0], step))
