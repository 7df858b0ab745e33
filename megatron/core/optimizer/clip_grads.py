"""Norm, clipping and zero count of gradients, over the tensors and ranks that the caller chooses: grad_stats.py.

The optimizer folds the clip factor into its own pass (optimizer.py); clip_grad_by_total_norm_fp32 is for scripts.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from megatron.core.device import default_device
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.tensor_parallel.param_attributes import gradient_of, gradients_pass, param_facts

# Added to the norm before dividing by it, as in Megatron and torch.
_CLIP_EPS = 1e-6
# Elements. A sum of squares over more terms than this in one fp32 accumulator loses digits on CPU: relative error
# 8e-4 over 18M normal numbers at once, 2e-7 in pieces, for 1.5 times the time. A GPU's kernel cuts by itself, and a
# tensor for each piece would cost more than the sum.
_PIECE = 1 << 16


def get_grad_norm_fp32(
    grads_for_norm: Sequence[torch.Tensor] | torch.Tensor,
    norm_type: float = 2,
    grad_stats_parallel_group: dist.ProcessGroup | None = None,
    *,
    accumulate_in: torch.dtype = torch.float32,
) -> float:
    """Norm of all gradients together over all ranks of the group, rounded to fp32.

    grads_for_norm: any shapes, contiguous, floating point; none gives 0. norm_type: 2 or another p, or infinity.
    grad_stats_parallel_group: ranks that hold other elements; None for this rank alone. accumulate_in:
    torch.float64 makes the result independent of how the gradients are cut.
    """
    grads = [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else list(grads_for_norm)
    return read_norm_sync(total_norm(grads, norm_type, groups=[grad_stats_parallel_group], accumulate_in=accumulate_in))


def total_norm(
    grads: list[torch.Tensor],
    norm_type: float,
    *,
    groups: Sequence[dist.ProcessGroup | None],
    accumulate_in: torch.dtype,
) -> torch.Tensor:
    """As get_grad_norm_fp32, of tensors of any shape and dtype, but left on the device: [], fp64.

    groups: over the ranks of the first, then over those of the next: each spreads elements apart from the others.
    """
    return total_of_norms(piece_norms(grads, norm_type, accumulate_in=accumulate_in), norm_type, groups=groups)


def piece_norms(grads: Sequence[torch.Tensor], norm_type: float, *, accumulate_in: torch.dtype) -> torch.Tensor:
    """Norms of the pieces that gradients of any shape and dtype are cut into, for total_of_norms: [n], fp64."""
    # Views, so that cutting costs no memory.
    flat = [grad.view(-1) for grad in grads if grad.numel() > 0]
    pieces = [piece for grad in flat for piece in (grad.split(_PIECE) if grad.device.type == "cpu" else [grad])]
    if not pieces:
        return torch.zeros(0, dtype=torch.float64, device=grads[0].device if grads else default_device())
    # One launch for all gradients of a dtype.
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for piece in pieces:
        by_dtype.setdefault(torch.promote_types(piece.dtype, accumulate_in), []).append(piece)
    # fp64 gradients keep their own precision beside fp32 ones.
    norms = [torch.stack(torch._foreach_norm(some, norm_type, dtype=dtype)) for dtype, some in by_dtype.items()]
    # Few numbers by now: fp64 costs nothing and the order no longer matters.
    return torch.cat([of_dtype.double() for of_dtype in norms])


def total_of_norms(
    norms: torch.Tensor, norm_type: float, *, groups: Sequence[dist.ProcessGroup | None]
) -> torch.Tensor:
    """total_norm of gradients from the norms of their pieces, [n], fp64: the same bits, [], fp64."""
    # A rank may own nothing and still take part in the exchange over ranks.
    total = torch.linalg.vector_norm(norms, norm_type) if norms.numel() > 0 else norms.new_zeros(())
    for group in groups:
        total = _norm_over_ranks(total, norm_type, group=group)
    return total


def read_norm_sync(total: torch.Tensor) -> float:
    """A norm, [] fp64, rounded to fp32. NOTE: reads the device at each step: the optimizer needs it to decide."""
    return total.float().item()


def clip_coefficient(max_norm: float, total_norm: float) -> float:
    """Factor that brings gradients of `total_norm` down to `max_norm`; 1 where they are not above it."""
    return min(1.0, max_norm / (total_norm + _CLIP_EPS))


def clip_coefficient_on_device(max_norm: float, total_norm: torch.Tensor) -> torch.Tensor:
    """clip_coefficient of a norm on its device, the same bits: [], fp64 -> [], fp64."""
    # Of two tensors: a GPU divides a number by a tensor, and a tensor by a number, by way of a rounded reciprocal.
    return (torch.full_like(total_norm, max_norm) / (total_norm + _CLIP_EPS)).clamp(max=1.0)


def clip_grad_by_total_norm_fp32(
    parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, total_norm: float
) -> None:
    """Scales the gradients of `parameters` (any shape, floating point) in place so that their norm is `max_norm`.

    Of each its `main_grad` where a data-parallel wrapper keeps one, else its `.grad`. Raises ValueError for parameters
    of a wrapper that keeps none.
    """
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    grads = [grad for tensor in tensors if (grad := _gradient_of(tensor)) is not None]
    coefficient = clip_coefficient(max_norm, total_norm)
    # A pass over all gradients for a factor of one would be wasted.
    if grads and coefficient < 1.0:
        torch._foreach_mul_(grads, coefficient)


def count_zeros_fp32(
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    grad_stats_parallel_group: dist.ProcessGroup | None = None,
    *,
    tp_group: dist.ProcessGroup | None = None,
) -> float:
    """Number of exact zeros in the gradients of `parameters` (any shape, floating point) over the group's ranks.

    Of each its `main_grad` where a data-parallel wrapper keeps one, else its `.grad`; some have neither. Raises
    ValueError for parameters of a wrapper that keeps none.
    tp_group: its ranks hold copies of what they do not split, which count on the first alone; so do tied weights.
    """
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    grads = (_gradient_of(tensor) for tensor in tensors if owns_elements(tensor, tp_group))
    return read_count_sync(total_zeros((grad for grad in grads if grad is not None), [grad_stats_parallel_group]))


def owns_elements(param: torch.Tensor, tp_group: dist.ProcessGroup | None) -> bool:
    """Whether this rank counts a parameter's elements: any shape and dtype; of copies the group's first rank does."""
    facts = param_facts(param)
    return not facts.shared and (facts.tensor_model_parallel or group_rank(tp_group) == 0)


def total_zeros(grads: Iterable[torch.Tensor], groups: Sequence[dist.ProcessGroup | None]) -> torch.Tensor:
    """Number of exact zeros in `grads`, left on the device: [], int64.

    grads: any shapes, floating point, other elements on each rank of the groups, over the ranks of the first, then over
    those of the next.
    """
    return sum_over_ranks(num_zeros(grads), groups)


def num_zeros(grads: Iterable[torch.Tensor]) -> torch.Tensor:
    """total_zeros of this rank alone; grads: any shapes, floating point. [], int64."""
    counts = [grad.numel() - torch.count_nonzero(grad) for grad in grads]
    return torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64, device=default_device())


def sum_over_ranks(total: torch.Tensor, groups: Sequence[dist.ProcessGroup | None]) -> torch.Tensor:
    """A count, [], int64, summed in place over the ranks of the first group, then over those of the next."""
    for group in groups:
        if group_size(group) > 1:
            dist.all_reduce(total, group=group)
    return total


def read_count_sync(total: torch.Tensor) -> float:
    """A count, [], int64, as a number. NOTE: reads the device, where zeros are counted."""
    return float(total.item())


def _gradient_of(param: torch.Tensor) -> torch.Tensor | None:
    grad = gradient_of(param)
    if grad is None and gradients_pass(param):
        # To leave it out would be to clip nothing, silently.
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is in a DistributedDataParallel with shard_gradients or "
            "release_gradients, whose gradients do not stand: let the optimizer clip and count, by "
            "OptimizerConfig.clip_grad, optimizer_in_backward_clip and log_num_zeros_in_grad, or a hook on each bucket"
        )
    return grad


def _norm_over_ranks(local: torch.Tensor, norm_type: float, *, group: dist.ProcessGroup | None) -> torch.Tensor:
    # The norm of one norm is itself, but only up to rounding.
    if group_size(group) == 1:
        return local
    # Gathered and combined here rather than reduced there: the same bits on every rank and for every p.
    norms = [torch.empty_like(local) for _ in range(group_size(group))]
    dist.all_gather(norms, local, group=group)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)
