"""Norm, clipping and zero count of gradients, on one rank and over all ranks that hold parts of the model.

Three functions with Megatron's names are intended for scripts. The optimizer uses GradStats, which counts each logical
element once; optimizer.py computes the clip factor, and the kernel of the update applies it. `group` always means a
process group here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.core.config_field import require_defaults
from megatron.core.device import default_device
from megatron.core.distributed.layout import FlatBuffer, ParamRange
from megatron.core.logical_tensors import LogicalPiece, range_views
from megatron.core.optimizer.flat_params import FlatParamRange
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.stored_floats import Plain, pieces
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.tensor_parallel.param_attributes import gradient_of, gradients_pass, param_facts

# Added to the norm before dividing by it, as in Megatron and torch.
_CLIP_EPS = 1e-6
# In elements. On a CPU, longer sums of squares in one fp32 accumulator lose digits: over 18M normal numbers the
# relative error is 8e-4 in one sum and 2e-7 in pieces, which take 1.5 times as long. A GPU's kernel splits sums itself;
# there, one tensor per piece would cost more than the sum.
_PIECE = 1 << 16
_NO_DECOUPLED_GRAD = "parameters have a single gradient, main_grad or grad, in the dtype in which it is reduced"


# For scripts.


def get_grad_norm_fp32(
    grads_for_norm: Sequence[torch.Tensor] | torch.Tensor,
    norm_type: float = 2,
    grad_stats_parallel_group: dist.ProcessGroup | None = None,
    *,
    accumulate_in: torch.dtype = torch.float32,
) -> float:
    """Returns the joint norm of all gradients over all ranks of the group, rounded to fp32.

    grads_for_norm: any shapes, contiguous, floating point; the norm of no gradients is 0. norm_type: order of the norm,
    such as 2, or infinity. grad_stats_parallel_group: ranks that hold other elements; None means this rank alone.
    accumulate_in: the dtype of sums; with torch.float64 the result does not depend on how gradients are split.
    """
    grads = [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else list(grads_for_norm)
    return read_norm_sync(total_norm(grads, norm_type, groups=[grad_stats_parallel_group], accumulate_in=accumulate_in))


def clip_grad_by_total_norm_fp32(
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    total_norm: float,
    use_decoupled_grad: bool = False,
) -> None:
    """Scales gradients in place by max_norm / total_norm if this factor is below 1.

    parameters: any shapes, floating point. A parameter's gradient is its `main_grad` if a data-parallel wrapper stores
    one, else its `.grad`. Raises ValueError for parameters of wrappers that free gradients during backward.
    use_decoupled_grad: must be False, because parameters have no separate decoupled gradient.
    """
    require_defaults("clip_grad_by_total_norm_fp32", _NO_DECOUPLED_GRAD, use_decoupled_grad=(use_decoupled_grad, False))
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    grads = [grad for tensor in tensors if (grad := persistent_gradient(tensor)) is not None]
    coefficient = clip_coefficient(max_norm, total_norm)
    # With a factor of 1, skips the pass over all gradients.
    if grads and coefficient < 1.0:
        torch._foreach_mul_(grads, coefficient)


def count_zeros_fp32(
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    grad_stats_parallel_group: dist.ProcessGroup | None = None,
    use_decoupled_grad: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    expert_tp_group: dist.ProcessGroup | None = None,
) -> float:
    """Returns the number of exact zeros in gradients over the group's ranks.

    parameters: any shapes, floating point. A parameter's gradient is its `main_grad` if a data-parallel wrapper stores
    one, else its `.grad`; parameters without a gradient are ignored. tp_group: unsplit parameters, which are replicated
    on all ranks of the group, are counted on its first rank only; a tied weight is counted on its owner.
    expert_tp_group: the corresponding group for expert parameters; None means tp_group. Raises ValueError for
    parameters of wrappers that free gradients during backward. use_decoupled_grad: must be False, because parameters
    have no separate decoupled gradient.
    """
    require_defaults("count_zeros_fp32", _NO_DECOUPLED_GRAD, use_decoupled_grad=(use_decoupled_grad, False))
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    experts = tp_group if expert_tp_group is None else expert_tp_group
    counted = (one for one in tensors if _owns_elements(one, experts if param_facts(one).is_expert else tp_group))
    grads = (persistent_gradient(tensor) for tensor in counted)
    return read_count_sync(_total_zeros((grad for grad in grads if grad is not None), [grad_stats_parallel_group]))


def persistent_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """Returns a parameter's main_grad, or else its grad, any shape and dtype; None if it has neither.

    Raises ValueError for a parameter of a wrapper that frees gradients during backward.
    """
    grad = gradient_of(param)
    if grad is None and gradients_pass(param):
        # Without an error its gradient would silently be ignored.
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is in a DistributedDataParallel with shard_gradients or "
            "release_gradients, which frees gradients during backward: clip with OptimizerConfig.clip_grad or "
            "optimizer_in_backward_clip, count zeros with log_num_zeros_in_grad, or use a hook on each bucket"
        )
    return grad


# Statistics over all ranks that count each logical element once.


@dataclass(frozen=True)
class PartialStat:
    """This rank's part of a statistic of some gradients, which may be freed afterwards.

    dense, experts: norms of pieces, [n], fp64 each; or numbers of exact zeros, [], int64 each.
    """

    dense: Tensor
    experts: Tensor


@dataclass(frozen=True)
class _CountedPart:
    """Elements of a flat range that this rank counts.

    with_experts: whether statistics are reduced over the ranks of expert layers.
    """

    start: int
    end: int
    with_experts: bool


class GradStats:
    """Norm and exact zeros of the gradients of a step, over all ranks that hold parts of the model.

    Replicated parameters are counted on the first tensor-parallel rank only, tied weights on their owner. Dense
    parameters are distributed over the group mp, expert parameters over tp_ep_pp. Every data-parallel replica computes
    the same statistics. If data-parallel ranks hold shards, the first sum is over these ranks.

    This class reads gradients that are persistent in their buffers. UpdatesInBackward overrides methods for gradients
    that are released before the step.

    buffers, ranges: all buffers and flat ranges of the model on this rank. logical_pieces: by parameter name, the
    pieces that exclude padding; parameters without an entry are counted whole. device: the tensors' device, the same
    kind on all ranks.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        groups: ProcessGroupCollection,
        buffers: Sequence[FlatBuffer],
        *,
        ranges: Sequence[FlatParamRange],
        logical_pieces: Mapping[str, list[LogicalPiece]],
        device: torch.device,
    ) -> None:
        self._config, self._groups, self._ranges = config, groups, list(ranges)
        self._logical_pieces = logical_pieces
        # In fp64 the norm does not depend on how gradients are split, which differs between layouts.
        self._norm_dtype = torch.float64 if config.deterministic_mode else torch.float32
        # A rank without gradients joins the reductions with a tensor on the same device as the other ranks.
        self._nothing = torch.empty(0, dtype=torch.float32, device=device)
        # Whether the same ranks hold all dense and all expert parameters. Experts are then treated as dense: their
        # gradients are in the dense list, in the parameters' order, and one collective is enough. The groups over which
        # shards are distributed may still differ. They are ignored here, because ranks of all stages must come to the
        # same result, and some have no shards.
        self._is_one_group = groups.mp is groups.tp_ep_pp or group_size(groups.mp) == group_size(groups.tp_ep_pp) == 1
        # All ranks of a group have the same buffers.
        shards = {buffer.is_expert: buffer.data_parallel_group for buffer in buffers if buffer.is_sharded}
        dense_shards = shards.get(False)
        # Experts without a separate buffer are among the dense parameters.
        expert_shards = shards.get(True, dense_shards)
        self._dense_groups = [dense_shards or (expert_shards if self._is_one_group else None), groups.mp]
        self._expert_groups = [expert_shards, groups.tp_ep_pp]
        self._parts = {param_range: self._parts_of(param_range) for param_range in self._ranges}

    # Called during a step.

    @property
    def is_updated(self) -> bool:
        """Whether parameters were updated before the step."""
        return False

    def norm(self) -> Tensor:
        """Returns the 2-norm of all reduced gradients, still scaled, on the device: [], fp64. Collective."""
        return self.join_norms([self.norms_of(self._ranges)])

    def count_zeros(self) -> Tensor:
        """Returns the number of exact zeros in all gradients, on the device: [], int64. Collective."""
        return self.join_zeros([self.zeros_of(self._ranges)])

    def end_step(self, grad_norm: float) -> None:
        """Hook that runs after an update. grad_norm: norm of the unscaled gradients before clipping."""

    def skip_step(self, grad_norm: float) -> None:
        """Hook that runs after a step was skipped because a gradient was not finite."""

    def forget(self) -> None:
        """Drops released gradients and their statistics."""

    def state_dict(self) -> dict[str, Any]:
        """Returns earlier norms that the next step requires, as JSON values."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores earlier norms from the state_dict of any kind of optimizer."""

    # In parts, for gradients that are freed as soon as they are counted.

    def norms_of(self, ranges: Iterable[FlatParamRange]) -> PartialStat:
        """Returns this rank's part of the gradient norm of some ranges."""
        grads = ((one.grad[part.start : part.end], part.with_experts) for one in ranges for part in self._parts[one])
        return self._part_of_norm(grads, accumulate_in=self._norm_dtype)

    def join_norms(self, parts: Sequence[PartialStat]) -> Tensor:
        """Combines parts into the norm of all their gradients, bit-identical to a joint norm: [], fp64. Collective."""
        return self._norm_over(parts, dense_groups=self._dense_groups, expert_groups=self._expert_groups)

    def zeros_of(self, ranges: Iterable[FlatParamRange]) -> PartialStat:
        """Returns this rank's part of the number of exact zeros in the gradients of some ranges."""
        # By logical piece, so that padding, between parameters and of the vocabulary, is not counted.
        grads = ((member, member.view_of(one.grad)) for one in ranges for member in one.params)
        owned = ((member, self._without_padding(member, grad)) for member, grad in grads if self._owns(member.param))
        dense, experts = self._dense_and_experts(
            (part, self._with_experts(member.param)) for member, parts in owned for part in parts
        )
        return PartialStat(_num_zeros(dense), _num_zeros(experts))

    def join_zeros(self, parts: Sequence[PartialStat]) -> Tensor:
        """Combines parts into the number of exact zeros in all their gradients: [], int64. Collective."""
        total = _sum_over_ranks(torch.stack([part.dense for part in parts]).sum(), self._dense_groups)
        if self._is_one_group:
            return total
        return total + _sum_over_ranks(torch.stack([part.experts for part in parts]).sum(), self._expert_groups)

    # Parameters.

    def params_norm(self) -> float:
        """Returns the 2-norm of all updated ranges (masters), summed in fp64. Collective."""
        owned = (
            (_with_norm_of_main(one, part.start, end=part.end), part.with_experts)
            for one in self._ranges
            for part in self._parts[one]
        )
        return read_norm_sync(self.join_norms([self._part_of_norm(owned, accumulate_in=torch.float64)]))

    def norm_of(self, params: Iterable[nn.Parameter]) -> float:
        """Returns the 2-norm of parameters that are not updated, summed in fp64. Collective."""
        owned = ((_with_norm_of(param), self._with_experts(param)) for param in params if self._owns(param))
        here = self._part_of_norm(owned, accumulate_in=torch.float64)
        # Not summed over shards, because each data-parallel rank has these parameters whole.
        groups = self._groups
        return read_norm_sync(self._norm_over([here], dense_groups=[groups.mp], expert_groups=[groups.tp_ep_pp]))

    # Inside.

    def _owns(self, param: Tensor) -> bool:
        """Returns whether this rank counts a parameter's elements."""
        return _owns_elements(param, self._groups.expt_tp if param_facts(param).is_expert else self._groups.tp)

    def _with_experts(self, param: Tensor) -> bool:
        return not self._is_one_group and param_facts(param).is_expert

    def _parts_of(self, param_range: FlatParamRange) -> list[_CountedPart]:
        """Returns the elements of a flat range that this rank counts, with adjacent parameters joined."""
        parts = []
        kinds = groupby(
            param_range.params, key=lambda member: (self._owns(member.param), self._with_experts(member.param))
        )
        for (owned, with_experts), members in kinds:
            spans = [member.span for member in members]
            if owned:
                # Padding between parameters is zero and included, so a range that is counted entirely is one part.
                parts.append(_CountedPart(spans[0].start, spans[-1].padded_end, with_experts))
        return parts

    def _without_padding(self, member: ParamRange, flat: Tensor) -> list[Tensor]:
        pieces_of_member = self._logical_pieces.get(member.name)
        return [flat] if pieces_of_member is None else range_views(pieces_of_member, flat, start=member.start)

    def _dense_and_experts(self, owned: Iterable[tuple[Tensor, bool]]) -> tuple[list[Tensor], list[Tensor]]:
        pairs = list(owned)
        dense = [tensor for tensor, with_experts in pairs if not with_experts]
        experts = [tensor for tensor, with_experts in pairs if with_experts]
        return dense or [self._nothing], experts or [self._nothing]

    def _part_of_norm(self, owned: Iterable[tuple[Tensor, bool]], *, accumulate_in: torch.dtype) -> PartialStat:
        """Returns this rank's part of a norm.

        owned: the tensors that this rank counts, any shapes, contiguous, floating point, each with its with_experts
        flag.
        """
        dense, experts = (_piece_norms(some, 2, accumulate_in=accumulate_in) for some in self._dense_and_experts(owned))
        return PartialStat(dense, experts)

    def _norm_over(
        self,
        parts: Sequence[PartialStat],
        *,
        dense_groups: Sequence[dist.ProcessGroup | None],
        expert_groups: Sequence[dist.ProcessGroup | None],
    ) -> Tensor:
        total = _total_of_norms(torch.cat([part.dense for part in parts]), 2, groups=dense_groups)
        if not self._is_one_group:
            norms = torch.cat([part.experts for part in parts])
            of_experts = _total_of_norms(norms, 2, groups=expert_groups)
            total = torch.linalg.vector_norm(torch.stack([total, of_experts]), 2)
        return total


def _with_norm_of_main(param_range: FlatParamRange, start: int, *, end: int) -> Tensor:
    """Returns a tensor with the same norm as masters [start, end): [n], fp32 or fp64.

    The result contains either the masters or the norms of their pieces.
    """
    if isinstance(param_range.main, Plain) and param_range.main.tensor.device == param_range.model.device:
        return param_range.main.read(start, end)
    in_range = pieces(param_range.main, start=start, end=end)
    norms = [torch.linalg.vector_norm(values, dtype=torch.float64) for _, values in in_range]
    # Masters may be in host memory; only these few norms are copied to the device.
    return torch.stack(norms).to(param_range.model.device)


def _with_norm_of(param: Tensor) -> Tensor:
    """Returns a tensor with the same norm as a parameter: the parameter itself; for a DTensor its norm, [1], fp64."""
    if not isinstance(param, DTensor):
        return param.detach()
    square = torch.linalg.vector_norm(param._local_tensor.detach(), dtype=torch.float64).square().view(1)
    dist.all_reduce(square, group=param.device_mesh.get_group())
    return square.sqrt()


# Arithmetic, first over tensors of one rank, then over the ranks of groups.


def total_norm(
    grads: list[torch.Tensor],
    norm_type: float,
    *,
    groups: Sequence[dist.ProcessGroup | None],
    accumulate_in: torch.dtype,
) -> torch.Tensor:
    """Returns the joint norm of tensors over ranks, on the device: [], fp64.

    grads: any shape and dtype. groups: combined one after another; the ranks of each group hold different elements. See
    get_grad_norm_fp32.
    """
    return _total_of_norms(_piece_norms(grads, norm_type, accumulate_in=accumulate_in), norm_type, groups=groups)


def _piece_norms(grads: Sequence[torch.Tensor], norm_type: float, *, accumulate_in: torch.dtype) -> torch.Tensor:
    """Returns norms of pieces of gradients, any shapes and dtypes, for _total_of_norms: [n], fp64."""
    # Views, so that splitting costs no memory.
    flat = [grad.view(-1) for grad in grads if grad.numel() > 0]
    cut = [piece for grad in flat for piece in (grad.split(_PIECE) if grad.device.type == "cpu" else [grad])]
    if not cut:
        return torch.zeros(0, dtype=torch.float64, device=grads[0].device if grads else default_device())
    # One launch for all gradients of a dtype.
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for piece in cut:
        by_dtype.setdefault(torch.promote_types(piece.dtype, accumulate_in), []).append(piece)
    # fp64 gradients are accumulated in fp64 even if others are accumulated in fp32.
    norms = [torch.stack(torch._foreach_norm(some, norm_type, dtype=dtype)) for dtype, some in by_dtype.items()]
    # For these few numbers fp64 costs nothing, and makes their order irrelevant.
    return torch.cat([of_dtype.double() for of_dtype in norms])


def _total_of_norms(
    norms: torch.Tensor, norm_type: float, *, groups: Sequence[dist.ProcessGroup | None]
) -> torch.Tensor:
    """Combines the norms of gradient pieces over ranks, for total_norm: [n], fp64 -> [], fp64."""
    # A rank without gradients joins the collectives.
    total = torch.linalg.vector_norm(norms, norm_type) if norms.numel() > 0 else norms.new_zeros(())
    for group in groups:
        total = _norm_over_ranks(total, norm_type, group=group)
    return total


def _norm_over_ranks(local: torch.Tensor, norm_type: float, *, group: dist.ProcessGroup | None) -> torch.Tensor:
    # The norm of a single norm may round, so a single rank skips it.
    if group_size(group) == 1:
        return local
    # Gathered and combined locally, not reduced, so that results are bit-identical on every rank for every p.
    norms = [torch.empty_like(local) for _ in range(group_size(group))]
    dist.all_gather(norms, local, group=group)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def read_norm_sync(total: torch.Tensor) -> float:
    """Reads a norm, [], fp64, and rounds it to fp32. NOTE: waits for the device."""
    return total.float().item()


def clip_coefficient(max_norm: float, total_norm: float) -> float:
    """Returns the factor that reduces a norm of `total_norm` to `max_norm`, at most 1."""
    return min(1.0, max_norm / (total_norm + _CLIP_EPS))


def clip_coefficient_on_device(max_norm: float, total_norm: torch.Tensor) -> torch.Tensor:
    """Computes clip_coefficient on the device, bit-identical to the host: [], fp64 -> [], fp64."""
    # A quotient of two tensors, because with a Python number a GPU multiplies by a rounded reciprocal.
    return (torch.full_like(total_norm, max_norm) / (total_norm + _CLIP_EPS)).clamp(max=1.0)


def _owns_elements(param: torch.Tensor, tp_group: dist.ProcessGroup | None) -> bool:
    """Returns whether this rank counts a parameter; replicas are counted on the group's first rank only."""
    facts = param_facts(param)
    return not facts.shared and (facts.tensor_model_parallel or group_rank(tp_group) == 0)


def _total_zeros(grads: Iterable[torch.Tensor], groups: Sequence[dist.ProcessGroup | None]) -> torch.Tensor:
    """Returns the number of exact zeros over ranks, on the device: [], int64.

    grads: any shapes, floating point, different elements on each rank of the groups, which are summed over in turn.
    """
    return _sum_over_ranks(_num_zeros(grads), groups)


def _num_zeros(grads: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the number of exact zeros on this rank: [], int64; grads: any shapes, floating point."""
    counts = [grad.numel() - torch.count_nonzero(grad) for grad in grads]
    return torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64, device=default_device())


def _sum_over_ranks(total: torch.Tensor, groups: Sequence[dist.ProcessGroup | None]) -> torch.Tensor:
    """Sums a count, [], int64, in place over the ranks of each group in turn, and returns it."""
    for group in groups:
        if group_size(group) > 1:
            dist.all_reduce(total, group=group)
    return total


def read_count_sync(total: torch.Tensor) -> float:
    """Reads a count, [], int64, as a number. NOTE: waits for the device."""
    return float(total.item())
