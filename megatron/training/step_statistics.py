"""What ranks tell each other about a step: summed losses and the wish to stop, in one small all-reduce.

Gradients are the data-parallel wrapper's work.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.transformer.moe.aux_losses import AuxLossRecorder
from megatron.core.utils import unwrap_model
from megatron.training.exit_conditions import LOCAL_REASONS, ExitReason

Reports = list[dict[str, torch.Tensor]]
# Name to (sum, count): [2], fp64.
Totals = dict[str, torch.Tensor]


@runtime_checkable
class RecordsAuxLosses(Protocol):
    """A model whose layers add losses of their own; a script's model need not be one."""

    aux_losses: AuxLossRecorder


class NonFiniteLossError(RuntimeError):
    """A loss was NaN or infinite; raised on every rank, before the optimizer could use its gradients."""


@dataclass(frozen=True)
class StepStatistics:
    """Mean losses over the global batch, and why any rank wants to stop; None: go on."""

    losses: dict[str, float]
    exit_reason: ExitReason | None

    @property
    def nan(self) -> bool:
        """Whether any loss is NaN or infinite."""
        return not all(math.isfinite(value) for value in self.losses.values())


def total_reports(reports: Reports) -> Totals:
    """Sums over microbatches. reports: name to a tensor [] (a mean) or [2] (sum, count), fp32 -> [2], fp64."""
    return {name: _total([report[name] for report in reports]) for name in (reports[0] if reports else {})}


def _total(values: list[torch.Tensor]) -> torch.Tensor:
    pairs = [value.detach().double().reshape(-1) for value in values]
    return torch.stack([p if p.numel() == 2 else torch.cat([p, torch.ones_like(p)]) for p in pairs]).sum(dim=0)


def total_auxiliary_losses(model: nn.Module) -> Totals:
    """Takes what the model's layers recorded since the last call, summed over layers and microbatches: [2], fp64."""
    chunk = unwrap_model(model)
    if not isinstance(chunk, RecordsAuxLosses):
        return {}
    return chunk.aux_losses.take_totals()


def reduce_statistics_sync(
    totals: Totals,
    group: dist.ProcessGroup | None,
    *,
    optional: Collection[str] = (),
    exit_reasons: Sequence[bool] = (),
) -> StepStatistics:
    """Sums `totals`, [2] fp64 each, over the ranks and reads the result; ranks must have the same names.

    A loss of no token at all is 0 (every one of them was masked), unless it is `optional`: then it is left out (a
    model without experts has no z-loss).
    exit_reasons: which of LOCAL_REASONS hold on this rank.
    NOTE: reads the device. A step does so here for all losses together, for the gradient norm (clip_grads.py) and,
    unless the check for NaN is off, for the gradients before they are reduced (replica_checks.py).
    """
    names = list(totals)
    device = totals[names[0]].device if names else torch.device("cpu")
    flags = torch.tensor([float(holds) for holds in exit_reasons], dtype=torch.float64, device=device)
    vector = torch.cat([*totals.values(), flags])  # [2 * names + reasons]
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(vector, group=group)
    values = vector.tolist()
    counts = {name: values[2 * i + 1] for i, name in enumerate(names)}
    losses = {
        name: values[2 * i] / (counts[name] or 1.0)
        for i, name in enumerate(names)
        if counts[name] > 0 or name not in optional
    }
    reasons = [reason for reason, count in zip(LOCAL_REASONS, values[2 * len(names) :]) if count > 0]
    return StepStatistics(losses, exit_reason=reasons[0] if reasons else None)


def raise_non_finite_loss(reports: Reports, group: dist.ProcessGroup | None, *, iteration: int) -> None:
    """Raises NonFiniteLossError naming each rank and microbatch whose loss was not finite; all ranks must call.

    reports: as for total_reports, fp32.
    """
    bad = _bad_microbatches_sync(reports)
    everyone: list[Any] = [bad]
    if group is not None and dist.get_world_size(group) > 1:
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, bad, group=group)
    where = "; ".join(f"rank {rank}: {', '.join(found)}" for rank, found in enumerate(everyone) if found)
    raise NonFiniteLossError(
        f"loss is not finite at iteration {iteration}: {where or 'an auxiliary loss'}. "
        "The model was not updated; --no-check-for-nan-in-loss-and-grad goes on regardless"
    )


def _bad_microbatches_sync(reports: Reports) -> list[str]:
    """NOTE: reads every loss, which only an error does."""
    return [
        f"microbatch {index} ({name} is {float(value.flatten()[0])})"
        for index, report in enumerate(reports)
        for name, value in report.items()
        if not bool(torch.isfinite(value).all())
    ]
