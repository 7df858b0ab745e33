"""What ranks tell each other about a step: summed losses and the wish to stop, in one small all-reduce.

Gradients are the data-parallel wrapper's work.
"""

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from megatron.core.device import default_device
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.transformer.moe.aux_losses import AuxLossRecorder, LayerTotals
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from megatron.training.exit_conditions import LOCAL_REASONS, ExitReason

Reports = list[dict[str, torch.Tensor]]
# Name to (sum, count): [2], fp64.
Totals = dict[str, torch.Tensor]


@runtime_checkable
class RecordsAuxLosses(Protocol):
    """A model whose layers add losses of their own; a script's model need not be one."""

    aux_losses: AuxLossRecorder
    config: TransformerConfig


class NonFiniteLossError(RuntimeError):
    """A loss was NaN or infinite; raised on every rank, before the optimizer could use its gradients."""


@dataclass(frozen=True)
class StepStatistics:
    """Mean losses over the global batch, and why any rank wants to stop; None: go on.

    per_layer: name to layer number, from 1, to value. expert_load: layer number to tokens per expert over all ranks.
    Both are None where they were not asked for.
    """

    losses: dict[str, float]
    exit_reason: ExitReason | None
    per_layer: dict[str, dict[int, float]] | None = None
    expert_load: dict[int, list[int]] | None = None

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


def reduce_step_sync(
    reports: Reports, model: Sequence[nn.Module], *, groups: ProcessGroupCollection, exit_reasons: Sequence[bool]
) -> StepStatistics:
    """The statistics of a training step, with what the model's layers recorded, which is taken from them.

    reports: as for total_reports, fp32. NOTE: reads the device, see reduce_statistics_sync.
    """
    auxiliary, layers = _take_auxiliary_losses(model)
    totals = {**total_reports(reports), **auxiliary}
    return reduce_statistics_sync(
        totals,
        groups.dp_cp,
        mp_group=groups.mp,
        optional=auxiliary.keys(),
        exit_reasons=exit_reasons,
        layers=layers,
    )


@record_function("reduce_statistics_sync")
def reduce_statistics_sync(
    totals: Totals,
    group: dist.ProcessGroup | None,
    *,
    mp_group: dist.ProcessGroup | None = None,
    optional: Collection[str] = (),
    exit_reasons: Sequence[bool] = (),
    layers: LayerTotals | None = None,
) -> StepStatistics:
    """Sums `totals`, [2] fp64 each, over the ranks and reads the result; ranks of `group` must have the same names.

    mp_group: the ranks that hold the other parts of this rank's model. Stages before the last have no losses of the
    loss function, and tensor-parallel ranks all have the same: sum and count are added alike, so means stay.

    A loss of no token at all is 0 (every one of them was masked), unless it is `optional`: then it is left out (a
    model without experts has no z-loss).
    exit_reasons: which of LOCAL_REASONS hold on this rank. layers: what each layer recorded, where that is wanted.
    NOTE: reads the device. A step does so here for all losses together, for the gradient norm (clip_grads.py) and,
    unless the check for NaN is off, for the gradients before they are reduced (replica_checks.py).
    """
    names = list(totals)
    device = totals[names[0]].device if names else default_device()
    flags = torch.tensor([float(holds) for holds in exit_reasons], dtype=torch.float64, device=device)
    parts = [*totals.values(), flags]  # [2 * names + reasons]
    if layers is not None:
        # Exact up to 2^53 tokens.
        parts += [layers.losses.flatten(), layers.tokens_per_expert.flatten().double()]
    vector = torch.cat(parts)
    if group_size(group) > 1:
        dist.all_reduce(vector, group=group)
    values = vector.tolist()
    pairs = {name: (values[2 * i], values[2 * i + 1]) for i, name in enumerate(names)}
    sums = _over_model_parts(_Sums(pairs, set(optional), values[2 * len(names) :]), mp_group)
    losses = {
        name: total / (count or 1.0)
        for name, (total, count) in sums.losses.items()
        if count > 0 or name not in sums.optional
    }
    rest = sums.rest
    reasons = [reason for reason, holds, count in zip(LOCAL_REASONS, exit_reasons, rest) if count > 0]
    exit_reason = reasons[0] if reasons else None
    if layers is None:
        return StepStatistics(losses, exit_reason)
    per_layer, expert_load = _layer_figures(layers, rest[len(exit_reasons) :])
    return StepStatistics(losses, exit_reason, per_layer, expert_load)


@dataclass(frozen=True)
class _Sums:
    """What has been summed, on the host: losses by name to (sum, count), and what all ranks have alike."""

    losses: dict[str, tuple[float, float]]
    optional: set[str]
    rest: list[float]

    def plus(self, other: "_Sums") -> "_Sums":
        losses = dict(self.losses)
        for name, (total, count) in other.losses.items():
            its_total, its_count = losses.get(name, (0.0, 0.0))
            losses[name] = (its_total + total, its_count + count)
        rest = [a + b for a, b in zip(self.rest, other.rest, strict=True)]
        return _Sums(losses, self.optional | other.optional, rest)


def _over_model_parts(sums: _Sums, mp_group: dist.ProcessGroup | None) -> _Sums:
    if group_size(mp_group) == 1:
        return sums
    # By name: which losses a stage has is not known elsewhere.
    parts: list[Any] = [None] * group_size(mp_group)
    dist.all_gather_object(parts, sums, group=mp_group)
    # The last stage first, so that the log names the model's own loss before those of its routers.
    return functools.reduce(_Sums.plus, reversed(parts))


def _take_auxiliary_losses(model: Sequence[nn.Module]) -> tuple[Totals, LayerTotals | None]:
    """What layers recorded since the last call, over all of them and, under --moe-per-layer-logging, of each."""
    totals: Totals = {}
    layers: LayerTotals | None = None
    for chunk in unwrap_model(list(model)):
        if not isinstance(chunk, RecordsAuxLosses):
            continue
        # Before the totals are taken, which starts both anew. A chunk's rows of other chunks' layers are zero.
        if chunk.config.moe_per_layer_logging:
            its = chunk.aux_losses.layer_totals()
            layers = its if layers is None else layers.plus(its)
        for name, total in chunk.aux_losses.take_totals().items():
            totals[name] = totals[name] + total if name in totals else total
    return totals, layers


def _layer_figures(
    layers: LayerTotals, values: list[float]
) -> tuple[dict[str, dict[int, float]], dict[int, list[int]]]:
    """Mean losses and tokens per expert by layer, of those that have them; values: `layers` summed and flattened."""
    num_layers, num_experts = layers.tokens_per_expert.shape
    per_layer: dict[str, dict[int, float]] = {}
    for index, (total, count) in enumerate(zip(values[0 : layers.losses.numel() : 2], values[1::2])):
        if count > 0:
            per_layer.setdefault(layers.names[index // num_layers], {})[index % num_layers + 1] = total / count
    tokens = [int(value) for value in values[layers.losses.numel() :]]
    rows = {number: tokens[(number - 1) * num_experts : number * num_experts] for number in range(1, num_layers + 1)}
    return per_layer, {number: row for number, row in rows.items() if any(row)}


def raise_non_finite_loss(reports: Reports, group: dist.ProcessGroup | None, *, iteration: int) -> None:
    """Raises NonFiniteLossError naming each rank and microbatch whose loss was not finite; all ranks must call.

    reports: as for total_reports, fp32.
    """
    bad = _bad_microbatches_sync(reports)
    everyone: list[Any] = [bad]
    if group_size(group) > 1:
        everyone = [None] * group_size(group)
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
