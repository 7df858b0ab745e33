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

from megatron.core.device import default_device
from megatron.core.device.trace_ranges import trace_range
from megatron.core.process_groups_config import group_size
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
class Overflow:
    """On how many ranks the experts of a step lost something; what such a step computed is void on all of them.

    over_budget: rows that had no place in a buffer of a fixed size. without_pages: inputs that could not be stashed.
    """

    over_budget: int = 0
    without_pages: int = 0

    @property
    def is_void(self) -> bool:
        """Whether any rank lost anything."""
        return self.over_budget + self.without_pages > 0

    def __str__(self) -> str:
        return f"ranks with rows over budget: {self.over_budget}, with inputs without pages: {self.without_pages}"


@dataclass(frozen=True)
class StepStatistics:
    """Mean losses over the global batch, and why any rank wants to stop; None: go on.

    overflow: if it is void, so is the rest. per_layer: name to layer number, from 1, to value. expert_load: layer
    number to tokens per expert of this step over all ranks. Both are None where they were not asked for.
    """

    losses: dict[str, float]
    exit_reason: ExitReason | None
    overflow: Overflow = Overflow()
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


class StatisticsExchange:
    """Sums what ranks know of a step over all of them, in one all-reduce.

    1. A rank puts its sums where their names stand in a vector, and marks whether it has a name that stands nowhere.
    2. If any rank has, as in the first step, all exchange names and sum again: which losses other stages have is not
       known, and a loss function may come to report another one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """group: all ranks of the run; None for this one alone."""
        self._group = group
        self._names: tuple[str, ...] = ()

    def reduce_step_sync(
        self,
        reports: Reports,
        model: Sequence[nn.Module],
        *,
        exit_reasons: Sequence[bool],
        void_flags: torch.Tensor | None = None,
        with_load: bool = False,
    ) -> StepStatistics:
        """The statistics of a training step, with what the model's layers recorded, which is taken from them.

        with_load: experts' loads too, as under --moe-per-layer-logging; alike on all ranks.
        reports: as for total_reports, fp32. void_flags: as for reduce_sync, [2], fp64. NOTE: reads the device, see
        there.
        """
        auxiliary, layers = _take_auxiliary_losses(model, with_load=with_load)
        totals = {**total_reports(reports), **auxiliary}
        return self.reduce_sync(
            totals, optional=auxiliary.keys(), exit_reasons=exit_reasons, layers=layers, void_flags=void_flags
        )

    @trace_range("StatisticsExchange.reduce_sync")
    def reduce_sync(
        self,
        totals: Totals,
        *,
        optional: Collection[str] = (),
        exit_reasons: Sequence[bool] = (),
        layers: LayerTotals | None = None,
        void_flags: torch.Tensor | None = None,
    ) -> StepStatistics:
        """Sums `totals`, [2] fp64 each, over the ranks and reads the result. Collective.

        Ranks may have different names: stages before the last have no losses of the loss function. Tensor-parallel
        ranks all have the same: sum and count are added alike, so means stay.
        A loss of no token at all is 0 (every one of them was masked), unless it is `optional`: then it is left out (a
        model without experts has no z-loss).
        exit_reasons: which of LOCAL_REASONS hold on this rank. layers: what each layer recorded, where that is wanted.
        void_flags: [2], fp64, on the device, in the order of Overflow: 1 where this rank lost something; None on all
        ranks where nothing can be lost.
        NOTE: reads the device. A step does so here for all losses together, for the gradient norm (clip_grads.py), for
        what ranks agree on (iteration.py) and, unless the check for NaN is off, for this rank's gradients
        (consistency.py); zeros of gradients and the parameters' norm, where they are logged, take a read each.
        """
        required = totals.keys() - set(optional)
        extras = [] if void_flags is None else [void_flags]
        if layers is not None:
            # Exact up to 2^53 tokens.
            extras += [layers.losses.flatten(), layers.tokens_per_expert.flatten().double()]
        values = self._sum_sync(totals, required, exit_reasons=exit_reasons, extras=extras)
        if values[0] > 0:
            self._learn_names(totals)
            values = self._sum_sync(totals, required, exit_reasons=exit_reasons, extras=extras)
        num_names, marks = len(self._names), 1 + len(exit_reasons)
        num_requiring, pairs = values[marks : marks + num_names], values[marks + num_names : marks + 3 * num_names]
        rest = values[marks + 3 * num_names :]
        losses = {
            name: total / (count or 1.0)
            for name, total, count, requiring in zip(self._names, pairs[0::2], pairs[1::2], num_requiring)
            if count > 0 or requiring > 0
        }
        reasons = [reason for reason, count in zip(LOCAL_REASONS, values[1:marks]) if count > 0]
        exit_reason = reasons[0] if reasons else None
        overflow = Overflow()
        if void_flags is not None:
            overflow, rest = Overflow(int(rest[0]), int(rest[1])), rest[2:]
        if layers is None:
            return StepStatistics(losses, exit_reason, overflow)
        return StepStatistics(losses, exit_reason, overflow, *_layer_figures(layers, rest))

    def _sum_sync(
        self,
        totals: Totals,
        required: Collection[str],
        *,
        exit_reasons: Sequence[bool],
        extras: Sequence[torch.Tensor],
    ) -> list[float]:
        """Sums over all ranks: 1 for each with a new name; for each exit reason and then for each name the ranks where
        it holds, or is required; sum and count of each name; the extras, [N] fp64 each.
        """
        device = next(iter(totals.values())).device if totals else default_device()
        has_new = any(name not in self._names for name in totals)
        marks = [has_new, *exit_reasons, *(name in required for name in self._names)]
        parts = [torch.tensor(marks, dtype=torch.float64, device=device)]
        nothing = parts[0].new_zeros(2)
        parts += [totals.get(name, nothing) for name in self._names]
        vector = torch.cat([*parts, *extras])
        if group_size(self._group) > 1:
            dist.all_reduce(vector, group=self._group)
        return vector.tolist()

    def _learn_names(self, own: Collection[str]) -> None:
        found: list[Any] = [list(own)]
        if group_size(self._group) > 1:
            found = [None] * group_size(self._group)
            dist.all_gather_object(found, list(own), group=self._group)
        # The last stage first, so that the log names the model's own loss before those of its routers.
        every = [name for names in reversed(found) for name in names]
        self._names = tuple(dict.fromkeys([*self._names, *every]))


def _take_auxiliary_losses(model: Sequence[nn.Module], *, with_load: bool) -> tuple[Totals, LayerTotals | None]:
    """Returns and clears the losses that layers recorded: totals over all layers, and figures of each layer.

    The figures of layers are None without --moe-per-layer-logging, unless with_load, which adds each layer's tokens per
    expert.
    """
    totals: Totals = {}
    layers: LayerTotals | None = None
    for chunk in unwrap_model(list(model)):
        if not isinstance(chunk, RecordsAuxLosses):
            continue
        # Before the totals are taken, which starts both anew. A chunk's rows of other chunks' layers are zero.
        wants_losses = chunk.config.moe_per_layer_logging
        if wants_losses or (with_load and chunk.config.num_moe_experts):
            its = chunk.aux_losses.layer_totals() if wants_losses else chunk.aux_losses.load_totals()
            layers = its if layers is None else layers.plus(its)
        for name, total in chunk.aux_losses.take_totals().items():
            totals[name] = totals[name] + total if name in totals else total
    return totals, layers


def _layer_figures(
    layers: LayerTotals, values: list[float]
) -> tuple[dict[str, dict[int, float]] | None, dict[int, list[int]]]:
    """Mean losses, None where they were not asked for, and tokens per expert by layer, of those that have them.

    values: `layers` summed and flattened.
    """
    num_layers, num_experts = layers.tokens_per_expert.shape
    per_layer: dict[str, dict[int, float]] = {}
    for index, (total, count) in enumerate(zip(values[0 : layers.losses.numel() : 2], values[1::2])):
        if count > 0:
            per_layer.setdefault(layers.names[index // num_layers], {})[index % num_layers + 1] = total / count
    tokens = [int(value) for value in values[layers.losses.numel() :]]
    rows = {number: tokens[(number - 1) * num_experts : number * num_experts] for number in range(1, num_layers + 1)}
    return per_layer if layers.names else None, {number: row for number, row in rows.items() if any(row)}


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
