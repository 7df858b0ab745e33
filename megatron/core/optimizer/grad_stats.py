"""Norms and zero counts of tensors that are spread over ranks: each logical element counts once.

The arithmetic of one rank's tensors is clip_grads.py's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.core.optimizer.clip_grads import (
    num_zeros,
    owns_elements,
    piece_norms,
    read_norm_sync,
    sum_over_ranks,
    total_of_norms,
)
from megatron.core.optimizer.param_runs import FlatBuffer, ParamRun
from megatron.core.optimizer.stored_floats import Plain, pieces
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.tensor_parallel.param_attributes import param_facts


@dataclass(frozen=True)
class OwnedPart:
    """A range of a run's flat tensors that this rank counts; with_experts: over the ranks of expert layers."""

    run: ParamRun
    start: int
    end: int
    with_experts: bool

    def of_grad(self) -> tuple[Tensor, bool]:
        """The range of the gradient, [n], any dtype, a view; and with_experts."""
        return self.run.grad[self.start : self.end], self.with_experts

    def of_main(self) -> tuple[Tensor, bool]:
        """A tensor with the norm of a range of the masters, [n], fp32 or fp64, perhaps of pieces; and with_experts."""
        main = self.run.main
        if isinstance(main, Plain) and main.tensor.device == self.run.model.device:
            return main.read(self.start, self.end), self.with_experts
        norms = [
            torch.linalg.vector_norm(v, dtype=torch.float64) for _, v in pieces(main, start=self.start, end=self.end)
        ]
        # A few numbers of what may be in the host's memory.
        return torch.stack(norms).to(self.run.model.device), self.with_experts


@dataclass(frozen=True)
class ShardGroups:
    """The data-parallel ranks over which the elements of dense and of expert parameters are spread; None: each rank
    has all of them.
    """

    dense: dist.ProcessGroup | None = None
    experts: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, buffers: Sequence[FlatBuffer]) -> "ShardGroups":
        """Returns the data-parallel groups of the sharded buffers; the other ranks of a group have the same buffers."""
        found = {b.is_expert: b.data_parallel_group for b in buffers if b.is_sharded}
        # Experts without a buffer of their own lie among the dense parameters.
        return cls(found.get(False), found.get(True, found.get(False)))


@dataclass(frozen=True)
class NormsHere:
    """This rank's part of a norm over all ranks, of dense parameters and of experts apart from them: [n], fp64."""

    dense: Tensor
    experts: Tensor


@dataclass(frozen=True)
class ZerosHere:
    """This rank's exact zeros, likewise: [], int64."""

    dense: Tensor
    experts: Tensor


class OwnedElements:
    """Which elements of its parameters a rank counts, and over which ranks the counts are joined.

    Of copies on several tensor-parallel ranks the first rank's counts, of tied weights the owner's. Dense and expert
    parameters are spread over different groups: mp, and tp_ep_pp. Their data-parallel copies count in each replica
    alike, so all ranks come to one result; where these have a shard each, shards joins them first. device: of the
    tensors, the same kind on all ranks.
    """

    def __init__(self, groups: ProcessGroupCollection, shards: ShardGroups, *, device: torch.device) -> None:
        self._groups = groups
        # A rank that owns nothing joins the sums on the device that the others' are on.
        self._nothing = torch.empty(0, dtype=torch.float32, device=device)
        # Then there is one list, in the parameters' order, and one collective. Not by the shards' groups: the ranks of
        # another stage must come to the same answer, and may have none.
        self._one_group = groups.mp is groups.tp_ep_pp or group_size(groups.mp) == group_size(groups.tp_ep_pp) == 1
        self._dense_groups = [shards.dense or (shards.experts if self._one_group else None), groups.mp]
        self._expert_groups = [shards.experts, groups.tp_ep_pp]

    def owns(self, param: Tensor) -> bool:
        """Whether this rank counts a parameter's elements: any shape and dtype."""
        return owns_elements(param, self._groups.expt_tp if param_facts(param).is_expert else self._groups.tp)

    def parts_of(self, runs: Sequence[ParamRun]) -> list[OwnedPart]:
        """The flat ranges of runs that this rank counts, neighbours joined."""
        parts = []
        for run in runs:
            kinds = groupby(run.params, key=lambda member: (self.owns(member.param), self._with_experts(member.param)))
            for (owned, with_experts), members in kinds:
                spans = [member.span for member in members]
                if owned:
                    # With the padding behind each, which is zero: one range for a run that is owned as a whole.
                    parts.append(OwnedPart(run, spans[0].start, spans[-1].padded_end, with_experts))
        return parts

    def norm(self, owned: Iterable[tuple[Tensor, bool]], *, accumulate_in: torch.dtype) -> Tensor:
        """2-norm over all ranks, left on the device: [], fp64. Collective.

        owned: tensors that this rank counts, any shapes, contiguous, floating point; and with_experts of each.
        """
        return self.norm_of_all([self.norms_here(owned, accumulate_in=accumulate_in)])

    def norms_here(self, owned: Iterable[tuple[Tensor, bool]], *, accumulate_in: torch.dtype) -> "NormsHere":
        """This rank's part of a norm of tensors, any shapes, floating point, which may be freed afterwards."""
        dense, experts = (piece_norms(some, 2, accumulate_in=accumulate_in) for some in self._by_group(owned))
        return NormsHere(dense, experts)

    def norm_of_all(self, parts: Sequence["NormsHere"]) -> Tensor:
        """`norm` of the tensors of all parts, the same bits as of all at once: [], fp64. Collective."""
        total = total_of_norms(torch.cat([part.dense for part in parts]), 2, groups=self._dense_groups)
        if not self._one_group:
            norms = torch.cat([part.experts for part in parts])
            of_experts = total_of_norms(norms, 2, groups=self._expert_groups)
            total = torch.linalg.vector_norm(torch.stack([total, of_experts]), 2)
        return total

    def norm_of(self, params: Iterable[nn.Parameter]) -> float:
        """2-norm of parameters, any shapes and dtypes, over all ranks, summed in fp64. Collective."""
        owned = ((_with_norm_of(param), self._with_experts(param)) for param in params if self.owns(param))
        return read_norm_sync(self.norm(owned, accumulate_in=torch.float64))

    def count_zeros(self, grads: Iterable[tuple[Tensor, list[Tensor]]]) -> Tensor:
        """Exact zeros over all ranks, left on the device: [], int64. Collective. grads: parameters and what there is of
        their gradients, any shape and floating dtype.
        """
        return self.zeros_of_all([self.zeros_here(grads)])

    def zeros_here(self, grads: Iterable[tuple[Tensor, list[Tensor]]]) -> "ZerosHere":
        """This rank's part of count_zeros of gradients, any shape and floating dtype, which may change afterwards."""
        owned = ((param, parts) for param, parts in grads if self.owns(param))
        dense, experts = self._by_group((part, self._with_experts(param)) for param, parts in owned for part in parts)
        return ZerosHere(num_zeros(dense), num_zeros(experts))

    def zeros_of_all(self, parts: Sequence["ZerosHere"]) -> Tensor:
        """count_zeros of the gradients of all parts: [], int64. Collective."""
        total = sum_over_ranks(torch.stack([part.dense for part in parts]).sum(), self._dense_groups)
        if self._one_group:
            return total
        return total + sum_over_ranks(torch.stack([part.experts for part in parts]).sum(), self._expert_groups)

    def _with_experts(self, param: Tensor) -> bool:
        return not self._one_group and param_facts(param).is_expert

    def _by_group(self, owned: Iterable[tuple[Tensor, bool]]) -> tuple[list[Tensor], list[Tensor]]:
        pairs = list(owned)
        dense = [tensor for tensor, with_experts in pairs if not with_experts]
        experts = [tensor for tensor, with_experts in pairs if with_experts]
        return dense or [self._nothing], experts or [self._nothing]


def _with_norm_of(param: Tensor) -> Tensor:
    """Returns a tensor with a parameter's norm: itself, any shape and dtype, or of a DTensor [1], fp64."""
    if not isinstance(param, DTensor):
        return param.detach()
    square = torch.linalg.vector_norm(param._local_tensor.detach(), dtype=torch.float64).square().view(1)
    dist.all_reduce(square, group=param.device_mesh.get_group())
    return square.sqrt()
