"""AttentionLogits: collects the largest attention scores of a step over all ranks, and scales down projections.

The query and key projections of a head whose largest score exceeded a threshold are scaled after the update, as in
MuonClip of Kimi K2. Attention layers compute the scores, and determine which rows of which parameters are scaled.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed.layout import ParamRange
from megatron.core.optimizer.flat_params import FlatParamRange
from megatron.core.optimizer.stored_floats import WithRemainder, piece_elements
from megatron.core.process_groups_config import group_size
from megatron.core.tensor_parallel.largest_logits import LargestLogits


class _ClipSettings(Protocol):
    """Model settings that correspond to the --qk-clip flags."""

    qk_clip: bool
    qk_clip_threshold: float


@runtime_checkable
class ClipsLogits(Protocol):
    """An attention layer that records its largest scores. largest_logits: None if scores are not recorded."""

    largest_logits: LargestLogits | None
    config: _ClipSettings

    def clip_factors(self, largest: Tensor) -> Tensor:
        """Returns the scaling factor of each head's scores, at most 1: [N], fp64.

        largest: largest score of each head, [N], fp64.
        """
        ...

    def row_factors(self, factors: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Returns the parameters to scale, each with the factors of its rows: [rows], fp64.

        factors: [N], fp64, one per head.
        """
        ...


class AttentionLogits:
    """Largest scores of a rank's attention layers in a step.

    1. `collect` combines them over data- and context-parallel ranks in one all-reduce of all layers' heads.
    2. `rescale`, after ranges are updated and before they are gathered, multiplies rows of projections in the masters,
       and writes the parameters from the masters again. A step that the device skips multiplies by 1.

    Nothing waits for the device. largest: [], fp64, over this rank's layers and heads in the last step; -inf if there
    are none.
    """

    def __init__(
        self,
        layers: Sequence[ClipsLogits],
        trained: Collection[nn.Parameter],
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """Finds the projections to scale.

        trained: the parameters that the optimizer updates on any rank. Raises ValueError if a projection to scale is
        not among them, or not contiguous.
        """
        self._group, self._device, self._layers = group, device, list(layers)
        self.largest = torch.full((), -torch.inf, dtype=torch.float64, device=device)
        self._maxima = [torch.full_like(self._scores_of(layer), -torch.inf) for layer in self._layers]
        known = set(trained)
        for layer, maxima in zip(self._layers, self._maxima):
            if not layer.config.qk_clip:
                continue
            for param, _ in layer.row_factors(maxima):
                if param not in known or not param.is_contiguous():
                    raise ValueError(
                        f"qk_clip is True and a projection of shape {tuple(param.shape)} is frozen, split by "
                        "another wrapper, or not contiguous: must be contiguous and trained by this optimizer"
                    )

    def reset(self) -> None:
        """Clears the scores recorded since the last step."""
        for layer in self._layers:
            _largest_logits(layer).reset()

    @torch.no_grad()
    def collect(self) -> None:
        """Combines the scores of all micro-batches over ranks, and resets them. Collective if there are layers."""
        if not self._layers:
            return
        scores = torch.cat([self._scores_of(layer) for layer in self._layers])
        if group_size(self._group) > 1:
            dist.all_reduce(scores, op=dist.ReduceOp.MAX, group=self._group)
        self.largest.copy_(scores.amax())
        for maxima, of_layer in zip(self._maxima, scores.split([len(maxima) for maxima in self._maxima])):
            maxima.copy_(of_layer)
        self.reset()

    @torch.no_grad()
    def rescale(self, ranges: Iterable[FlatParamRange], *, skip: Tensor | None) -> None:
        """Scales the projections inside the given ranges, after their update.

        Each range must be passed exactly once per step, because a second pass would scale it twice. skip: [], any
        dtype, above 0 if the step is skipped; None if the host has decided to update.
        """
        rows = self._row_factors(skip)
        if not rows:
            return
        for run in ranges:
            for param_range in run.params:
                if param_range.param in rows:
                    _scale(run, param_range, rows[param_range.param])

    def _row_factors(self, skip: Tensor | None) -> dict[nn.Parameter, Tensor]:
        found: dict[nn.Parameter, Tensor] = {}
        for layer, maxima in zip(self._layers, self._maxima):
            if layer.config.qk_clip:
                factors = layer.clip_factors(maxima)
                if skip is not None:
                    factors = torch.where(skip > 0, torch.ones_like(factors), factors)
                found.update(layer.row_factors(factors))
        return found

    def _scores_of(self, layer: ClipsLogits) -> Tensor:
        return _largest_logits(layer).on(self._device)


def _largest_logits(layer: ClipsLogits) -> LargestLogits:
    assert layer.largest_logits is not None, "only layers that compute scores are watched"
    return layer.largest_logits


def _scale(run: FlatParamRange, param_range: ParamRange, rows: Tensor) -> None:
    """Scales the rows of one parameter within a range. rows: the factor of each row, [R], fp64."""
    columns = param_range.param.numel() // len(rows)
    # Some storage forms are written in whole blocks. Padding is 0, whatever its factor.
    end = min(param_range.span.padded_end, run.main.numel)
    chunk = piece_elements(run.main)
    for start in range(param_range.span.start, end, chunk):
        values = run.main.read(start, min(start + chunk, end))
        first = param_range.start + start - param_range.span.start
        row = torch.arange(first, first + values.numel(), device=rows.device).div_(columns, rounding_mode="floor")
        values.mul_(rows[row.clamp_(max=len(rows) - 1)].to(values))
        run.main.write(start, values)
        if run.is_copy and not isinstance(run.main, WithRemainder):
            # Read again, because parameters are rounded from the stored form of the masters.
            run.model[start : start + values.numel()].copy_(run.main.read(start, start + values.numel()))
