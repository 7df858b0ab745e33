"""Reduces the statistics of a step over all ranks (losses, overflows, reasons to stop) with one small all-reduce.

The data-parallel wrapper reduces gradients.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.datasets.padding import NO_PADDING, PaddingCount
from megatron.core.device import default_device
from megatron.core.device.trace_ranges import trace_range
from megatron.core.group_collectives import gather_objects
from megatron.core.process_groups_config import group_size
from megatron.core.transformer.moe.aux_losses import AuxLossRecorder, LayerTotals
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from megatron.training.step.exit_conditions import LOCAL_REASONS, ExitReason

Reports = list[dict[str, torch.Tensor]]
# Maps a name to (sum, count): [2], fp64.
Totals = dict[str, torch.Tensor]


@runtime_checkable
class RecordsAuxLosses(Protocol):
    """Interface of a model whose layers record auxiliary losses. A script's model need not implement it."""

    aux_losses: AuxLossRecorder
    config: TransformerConfig


class NonFiniteLossError(RuntimeError):
    """Raised on every rank if a loss is NaN or infinite, before the optimizer uses its gradients."""


@dataclass(frozen=True)
class Overflow:
    """Number of ranks on which a step overflowed. All ranks discard a step that overflowed on any rank.

    expert: number of ranks with rows beyond an expert buffer. stash: number of ranks without a page for an input that
    backward requires.
    """

    expert: int = 0
    stash: int = 0

    @property
    def occurred(self) -> bool:
        """Whether any rank overflowed."""
        return self.expert + self.stash > 0

    def __str__(self) -> str:
        return f"ranks with expert overflow: {self.expert}, with stash overflow: {self.stash}"


@dataclass(frozen=True)
class StepStatistics:
    """Mean losses over the global batch, and the reason to stop if any rank has one.

    exit_reason: None to continue. overflow: if it occurred, all other fields are meaningless. per_layer: maps a name to
    values by layer number, from 1. expert_load: maps a layer number to the tokens per expert of this step over all
    ranks. per_layer and expert_load are None unless requested. padding: padding of the global batch.
    """

    losses: dict[str, float]
    exit_reason: ExitReason | None
    overflow: Overflow = Overflow()
    per_layer: dict[str, dict[int, float]] | None = None
    expert_load: dict[int, list[int]] | None = None
    padding: PaddingCount = NO_PADDING

    @property
    def nan(self) -> bool:
        """Whether any loss is NaN or infinite."""
        return not all(math.isfinite(value) for value in self.losses.values())


def total_reports(reports: Reports) -> Totals:
    """Sums the reports of all microbatches to a total (sum, count) for each name: [2], fp64.

    reports: for each microbatch, maps a name to a mean, or to a pair (sum, count), fp32. A loss function may report a
    mean as a tensor [] or [1], and a pair as a tensor [2] or a tuple of two numbers.
    """
    return {name: _total([report[name] for report in reports]) for name in (reports[0] if reports else {})}


def _total(values: list[torch.Tensor]) -> torch.Tensor:
    pairs = [_as_tensor(value).detach().double().reshape(-1) for value in values]
    return torch.stack([p if p.numel() == 2 else torch.cat([p, torch.ones_like(p)]) for p in pairs]).sum(dim=0)


def _as_tensor(value: torch.Tensor | Sequence[torch.Tensor | float] | float) -> torch.Tensor:
    if isinstance(value, (tuple, list)):
        return torch.stack([_as_tensor(part).reshape(()).double() for part in value])
    return (
        value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64, device=default_device())
    )


class StatisticsExchange:
    """Sums the statistics of a step over all ranks with one all-reduce.

    1. Each rank writes its sums into a vector with a slot for each known name, and flags whether it has a new name.
    2. If any rank has a new name, as in the first step, all ranks exchange names and repeat the all-reduce. Pipeline
       stages report different losses, and a loss function may report a new loss at any step.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Creates the exchange without known names. group: all ranks of the run; None for a single process."""
        self._group = group
        self._names: tuple[str, ...] = ()

    def reduce_step_sync(
        self,
        reports: Reports,
        model: Sequence[nn.Module],
        *,
        exit_reasons: Sequence[bool],
        overflow_flags: torch.Tensor | None = None,
        with_load: bool = False,
        padding: PaddingCount = NO_PADDING,
    ) -> StepStatistics:
        """Reduces the statistics of a training step, and clears the losses that the model's layers recorded.

        reports: as for total_reports, fp32. overflow_flags: as for reduce_sync, [2], fp64. with_load: whether to add
        the experts' loads, as --moe-per-layer-logging does; equal on all ranks. padding: as for reduce_sync.
        Collective. NOTE: reads the device, see reduce_sync.
        """
        auxiliary, layers = _take_auxiliary_losses(model, with_load=with_load)
        totals = {**total_reports(reports), **auxiliary}
        return self.reduce_sync(
            totals,
            optional=auxiliary.keys(),
            exit_reasons=exit_reasons,
            layers=layers,
            overflow_flags=overflow_flags,
            padding=padding,
        )

    @trace_range("StatisticsExchange.reduce_sync")
    def reduce_sync(
        self,
        totals: Totals,
        *,
        optional: Collection[str] = (),
        exit_reasons: Sequence[bool] = (),
        layers: LayerTotals | None = None,
        overflow_flags: torch.Tensor | None = None,
        padding: PaddingCount = NO_PADDING,
    ) -> StepStatistics:
        """Sums `totals`, [2] fp64 each, over all ranks and reads the result. Collective.

        Ranks may have different names, because stages before the last do not call the loss function. Tensor-parallel
        ranks have the same names and values, which multiplies sums and counts by the same factor and leaves means
        unchanged. The mean over zero tokens is 0, because all tokens were masked.

        optional: names that are omitted from the result if they cover no token, because the model does not have these
        losses (a model without experts has no z-loss). exit_reasons: whether each of LOCAL_REASONS holds on this rank.
        layers: records of each layer, if requested. overflow_flags: [2], fp64, on the device, in the order of Overflow,
        1 if this rank overflowed; None on all ranks if nothing can overflow. padding: of the samples that only this
        rank counts.

        NOTE: reads the device. A step reads the device here for all losses together, for the gradient norm
        (clip_grads.py), for the agreement of the collective scheduler (iteration.py) and, unless the check for NaN is
        disabled, for this rank's gradients (consistency.py). If logged, the number of zeros in gradients and the norm
        of the parameters require one more read each.
        """
        required = totals.keys() - set(optional)
        extras = [] if overflow_flags is None else [overflow_flags]
        if layers is not None:
            # Exact up to 2^53 tokens.
            extras += [layers.losses.flatten(), layers.tokens_per_expert.flatten().double()]
        known = [*exit_reasons, padding.tokens, padding.squares]
        values = self._sum_sync(totals, required, known=known, extras=extras)
        if values[0] > 0:
            self._learn_names(totals, required)
            values = self._sum_sync(totals, required, known=known, extras=extras)
        num_names, marks = len(self._names), 1 + len(known)
        num_requiring, pairs = values[marks : marks + num_names], values[marks + num_names : marks + 3 * num_names]
        rest = values[marks + 3 * num_names :]
        losses = {
            name: total / (count or 1.0)
            for name, total, count, requiring in zip(self._names, pairs[0::2], pairs[1::2], num_requiring)
            if count > 0 or requiring > 0
        }
        reasons = [reason for reason, count in zip(LOCAL_REASONS, values[1 : 1 + len(exit_reasons)]) if count > 0]
        exit_reason = reasons[0] if reasons else None
        padding = PaddingCount(*map(int, values[1 + len(exit_reasons) : marks]))
        overflow = Overflow()
        if overflow_flags is not None:
            overflow, rest = Overflow(int(rest[0]), int(rest[1])), rest[2:]
        if layers is None:
            return StepStatistics(losses, exit_reason, overflow, padding=padding)
        return StepStatistics(losses, exit_reason, overflow, *_layer_figures(layers, rest), padding=padding)

    def _sum_sync(
        self,
        totals: Totals,
        required: Collection[str],
        *,
        known: Sequence[bool | int],
        extras: Sequence[torch.Tensor],
    ) -> list[float]:
        """All-reduces one vector over all ranks and returns its elements, fp64.

        The elements are, in this order: the number of ranks with a new name, the values known to the host, the number
        of ranks that require each name, sum and count of each name, and the extras.
        """
        device = next(iter(totals.values())).device if totals else default_device()
        has_new = any(name not in self._names for name in totals)
        marks = [has_new, *known, *(name in required for name in self._names)]
        parts = [torch.tensor(marks, dtype=torch.float64, device=device)]
        absent = parts[0].new_zeros(2)
        parts += [totals.get(name, absent) for name in self._names]
        vector = torch.cat([*parts, *extras])
        if group_size(self._group) > 1:
            dist.all_reduce(vector, group=self._group)
        return vector.tolist()

    def _learn_names(self, own: Collection[str], required: Collection[str]) -> None:
        by_rank = gather_objects([(name in required, name) for name in own], self._group)
        names = [one for names in reversed(by_rank) for one in names]
        # The log shows the loss of the model before the losses of its routers, whichever stage computes it.
        first = [name for is_required, name in names if is_required]
        self._names = tuple(dict.fromkeys([*self._names, *first, *(name for _, name in names)]))


def _take_auxiliary_losses(model: Sequence[nn.Module], *, with_load: bool) -> tuple[Totals, LayerTotals | None]:
    """Returns and clears the losses that layers recorded: totals over all layers, and totals of each layer.

    with_load: whether to add each layer's tokens per expert. The second result is None unless --moe-per-layer-logging
    or with_load requests it.
    """
    totals: Totals = {}
    layers: LayerTotals | None = None
    for chunk in unwrap_model(list(model)):
        if not isinstance(chunk, RecordsAuxLosses):
            continue
        # Called before take_totals, which clears all records. A chunk's rows for layers of other chunks are zero.
        wants_losses = chunk.config.moe_per_layer_logging
        if wants_losses or (with_load and chunk.config.num_moe_experts):
            own = chunk.aux_losses.layer_totals() if wants_losses else chunk.aux_losses.load_totals()
            layers = own if layers is None else layers.plus(own)
        for name, total in chunk.aux_losses.take_totals().items():
            totals[name] = totals[name] + total if name in totals else total
    return totals, layers


def _layer_figures(
    layers: LayerTotals, values: list[float]
) -> tuple[dict[str, dict[int, float]] | None, dict[int, list[int]]]:
    """Returns the mean losses of each layer (None unless requested), and the tokens per expert of each MoE layer.

    values: `layers`, summed over ranks and flattened.
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
    """Raises NonFiniteLossError naming each rank and microbatch with a non-finite loss. Collective.

    reports: as for total_reports, fp32.
    """
    everyone = gather_objects(_bad_microbatches_sync(reports), group)
    where = "; ".join(f"rank {rank}: {', '.join(found)}" for rank, found in enumerate(everyone) if found)
    raise NonFiniteLossError(
        f"loss is not finite at iteration {iteration}: {where or 'an auxiliary loss'}. The model was not updated; "
        "--no-check-for-nan-in-loss-and-grad disables this check"
    )


def _bad_microbatches_sync(reports: Reports) -> list[str]:
    """Describes each non-finite loss of this rank. NOTE: reads every loss, which happens only before an error."""
    return [
        f"microbatch {index} ({name} is {float(value.flatten()[0])})"
        for index, report in enumerate(reports)
        for name, value in ((name, _as_tensor(value)) for name, value in report.items())
        if not bool(torch.isfinite(value).all())
    ]
