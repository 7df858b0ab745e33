"""AttentionLogits: largest scores of attention over the ranks of a step, and projections that are scaled down by them.

The query and key projections of a head whose largest score exceeded a threshold are scaled after the update, as in
MuonClip of Kimi K2. Attention layers find the scores, and say which rows of which parameters are scaled.
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
    """The settings of the flags --qk-clip of a model's config."""

    qk_clip: bool
    qk_clip_threshold: float


@runtime_checkable
class ClipsLogits(Protocol):
    """An attention layer; largest_logits: None if nothing asks for them."""

    largest_logits: LargestLogits | None
    config: _ClipSettings

    def clip_factors(self, largest: Tensor) -> Tensor:
        """Returns the factor of each head's scores, at most 1: [N], fp64; largest: [N], fp64."""
        ...

    def row_factors(self, factors: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Returns parameters with the factors of their rows: [rows], fp64; factors: [N], fp64, of heads."""
        ...


class AttentionLogits:
    """The largest scores of a rank's attention layers in a step.

    1. `collect` joins them over data- and context-parallel ranks: one all-reduce of all layers' heads.
    2. `rescale`, after ranges are stepped and before they are gathered, multiplies rows of projections in the masters,
       and rounds these to the parameters again. A step that the device skips multiplies by 1.

    Nothing waits for the device. largest: [], fp64, over this rank's layers and heads in the last step, -inf without.
    """

    def __init__(
        self,
        layers: Sequence[ClipsLogits],
        trained: Collection[nn.Parameter],
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """trained: the parameters that the optimizer steps on any rank.

        Raises ValueError if a projection to scale is not among them, or not contiguous.
        """
        self._group, self._device, self._layers = group, device, list(layers)
        self.largest = torch.full((), -torch.inf, dtype=torch.float64, device=device)
        self._maxima = [torch.full_like(self._of(layer), -torch.inf) for layer in self._layers]
        self._rows: dict[nn.Parameter, Tensor] = {}
        known = set(trained)
        for layer, maxima in zip(self._layers, self._maxima):
            for param, _ in layer.row_factors(maxima) if layer.config.qk_clip else ():
                if param not in known or not param.is_contiguous():
                    raise ValueError(
                        f"qk_clip is True and a projection of shape {tuple(param.shape)} is frozen, split by another "
                        "wrapper, or not contiguous: must be trained by this optimizer"
                    )

    def reset(self) -> None:
        """Forgets the scores of passes since the last step."""
        for layer in self._layers:
            self._largest_of(layer).reset()

    @torch.no_grad()
    def collect(self) -> None:
        """Joins the scores of all micro-batches over ranks, and resets them. Collective, if there are layers."""
        if not self._layers:
            return
        together = torch.cat([self._of(layer) for layer in self._layers])
        if group_size(self._group) > 1:
            dist.all_reduce(together, op=dist.ReduceOp.MAX, group=self._group)
        self.largest.copy_(together.amax())
        for maxima, found in zip(self._maxima, together.split([len(one) for one in self._maxima])):
            maxima.copy_(found)
        self.reset()

    @torch.no_grad()
    def rescale(self, runs: Iterable[FlatParamRange], *, skip: Tensor | None) -> None:
        """Scales the projections in ranges that were stepped; call it once for each range.

        skip: [], any dtype, above 0 if the step changes nothing; None on the host.
        """
        rows = self._row_factors(skip)
        for one in runs if rows else ():
            for member in one.params:
                if member.param in rows:
                    _scale(one, member, rows[member.param])

    def _row_factors(self, skip: Tensor | None) -> dict[nn.Parameter, Tensor]:
        found: dict[nn.Parameter, Tensor] = {}
        for layer, maxima in zip(self._layers, self._maxima):
            if layer.config.qk_clip:
                factors = layer.clip_factors(maxima)
                if skip is not None:
                    factors = torch.where(skip > 0, torch.ones_like(factors), factors)
                found.update(layer.row_factors(factors))
        return found

    def _of(self, layer: ClipsLogits) -> Tensor:
        return self._largest_of(layer).on(self._device)

    @staticmethod
    def _largest_of(layer: ClipsLogits) -> LargestLogits:
        assert layer.largest_logits is not None, "only layers that find scores are watched"
        return layer.largest_logits


def attention_logits(
    modules: Iterable[nn.Module],
    trained: Collection[nn.Parameter],
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> AttentionLogits | None:
    """Returns the AttentionLogits of the layers among modules; None if the flags are off on this rank."""
    layers = [one for one in modules if isinstance(one, ClipsLogits) and one.largest_logits is not None]
    return AttentionLogits(layers, trained, group=group, device=device) if layers else None


def _scale(run: FlatParamRange, member: ParamRange, rows: Tensor) -> None:
    """Multiplies a range's elements of one parameter; rows: [R], fp64, the factors of the parameter's rows."""
    columns = member.param.numel() // len(rows)
    # Some forms of storage are written in whole blocks. Padding is 0, whatever its factor.
    end = min(member.span.padded_end, run.main.numel)
    step = piece_elements(run.main)
    for start in range(member.span.start, end, step):
        values = run.main.read(start, min(start + step, end))
        first = member.start + start - member.span.start
        places = torch.arange(first, first + values.numel(), device=rows.device).div_(columns, rounding_mode="floor")
        values.mul_(rows[places.clamp_(max=len(rows) - 1)].to(values))
        run.main.write(start, values)
        if run.is_copy and not isinstance(run.main, WithRemainder):
            run.model[start : start + values.numel()].copy_(run.main.read(start, start + values.numel()))
