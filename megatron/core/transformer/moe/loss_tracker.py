"""Losses of all routers of this process under Megatron's names, by layer, for scripts to read and log.

Recorders (aux_losses.py) belong to models. A script that logs the losses itself has no access to them, so each recorder
registers with default_tracker(), which reads it on request. Losses saved by custom modules are stored here. The
functions in moe_utils.py are thin wrappers.
"""

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron.core.device import default_device
from megatron.core.process_groups_config import ProcessGroupCollection, group_size


class LossRecorder(ABC):
    """Interface through which the tracker reads a recorder of a model chunk's losses.

    recorded_names: names recorded since the recorder was created.
    """

    recorded_names: set[str]

    @abstractmethod
    def layer_losses(self) -> dict[str, Tensor]:
        """Returns the recorded losses by name: [L], fp32 or fp64, one sum per layer."""

    @abstractmethod
    def forget_losses(self) -> None:
        """Resets the sums of all losses to zero."""

    @abstractmethod
    def note_update(self, optimizer: object) -> None:
        """Records that an optimizer has updated parameters, which may be those of the recorder's model."""

    @abstractmethod
    def set_backward_scale(self, scale: Tensor) -> None:
        """Sets the gradient factor of the losses; scale: scalar or [1], any float dtype."""


@dataclass
class TrackedLoss:
    """Sums of one loss by layer, and the process groups that reduce them.

    values: [L], float. reduce_group: ranks that sum the loss, avg_group: ranks that average it; None means no
    reduction. reduce_group_has_dp: whether reduce_group includes the data-parallel ranks; if not, they average the
    loss.
    """

    values: Tensor
    reduce_group: dist.ProcessGroup | None = None
    avg_group: dist.ProcessGroup | None = None
    reduce_group_has_dp: bool = False


class AuxLossTracker:
    """Auxiliary losses of a process by name: saved losses, plus the losses of all live recorders.

    scale: the most recent gradient factor of auxiliary losses: scalar or [1], float, on the device.
    """

    def __init__(self) -> None:
        self.scale: Tensor | None = None
        self._recorders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._saved: dict[str, TrackedLoss] = {}
        self._told: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers whose loops were told to end their steps

    def watch(self, recorder: LossRecorder) -> None:
        """Registers a recorder, without keeping it alive."""
        self._recorders.add(recorder)

    def set_scale(self, scale: Tensor) -> None:
        """Sets the gradient factor of all losses, including the recorders' losses.

        scale: scalar or [1], any float dtype.
        """
        for recorder in self._recorders:
            recorder.set_backward_scale(scale)
        self.scale = scale

    def note_update(self, optimizer: object) -> None:
        """Tells all recorders that a torch optimizer has stepped."""
        for recorder in self._recorders:
            recorder.note_update(optimizer)

    def warn_of_missing_end(self, optimizer: object) -> None:
        """Warns that the loop of an optimizer never ends its steps, once for all recorders of its models."""
        if optimizer in self._told:
            return
        self._told.add(optimizer)
        warnings.warn(
            f"{type(optimizer).__name__} has updated parameters twice without the end of a step: routing biases "
            "and the loss of the global batch (global_aux_loss) require model.finalize_step(None) after each step's "
            "last backward (for a router outside of a GPTModel: router.aux_losses.finalize_step(None)), or "
            "finalize_model_grads([model]) with several ranks; see docs/library.md",
            stacklevel=2,
        )

    def save(
        self,
        name: str,
        loss: Tensor,
        layer_number: int,
        *,
        num_layers: int,
        reduce_group: dist.ProcessGroup | None,
        avg_group: dist.ProcessGroup | None,
        reduce_group_has_dp: bool,
    ) -> None:
        """Adds a loss to the saved sum of a layer.

        loss: scalar, float. Raises ValueError unless layer_number is between 1 and num_layers.
        """
        if not 1 <= layer_number <= num_layers:
            raise ValueError(f"layer_number is {layer_number}: must be between 1 and num_layers ({num_layers})")
        tracked = self.entry(name, num_layers, device=loss.device)
        tracked.values[layer_number - 1] += loss.detach()
        tracked.reduce_group, tracked.avg_group = reduce_group, avg_group
        tracked.reduce_group_has_dp = reduce_group_has_dp

    def entry(self, name: str, num_layers: int, *, device: torch.device | None = None) -> TrackedLoss:
        """Returns the saved loss of this name, with at least num_layers layers. A new loss is zero in all layers."""
        if name not in self._saved:
            self._saved[name] = TrackedLoss(
                torch.zeros(num_layers, dtype=torch.float32, device=device or default_device())
            )
        tracked = self._saved[name]
        if len(tracked.values) < num_layers:
            tracked.values = _sum_by_layer([tracked.values, tracked.values.new_zeros(num_layers)])
        return tracked

    def losses(self) -> dict[str, TrackedLoss]:
        """Returns all losses by name. Values from recorders are copies."""
        found = dict(self._saved)
        for name, values in self._recorded().items():
            saved = found.get(name)
            found[name] = TrackedLoss(values if saved is None else _sum_by_layer([saved.values, values]))
        return found

    def clear(self) -> None:
        """Sets all losses to zero, including those in the recorders."""
        for recorder in self._recorders:
            recorder.forget_losses()
        for tracked in self._saved.values():
            tracked.values.zero_()

    def reduce(self, names: Iterable[str] | None, groups: ProcessGroupCollection) -> None:
        """Reduces losses over the ranks, in place, and clears them in the recorders. Collective.

        names: losses to reduce; None means all. Values are summed over pipeline stages, which have different layers. A
        recorder's values are averaged over all ranks that process different tokens or parts of sequences.
        """
        recorded = self._recorded()
        for recorder in self._recorders:
            recorder.forget_losses()
        for name, values in recorded.items():
            tracked = self.entry(name, len(values), device=values.device)
            # Recorders store the whole loss of this rank's tokens, not a share, so the loss is the mean over ranks.
            tracked.values = tracked.values + _mean(values.to(tracked.values.dtype), groups.tp_dp_cp)
            tracked.reduce_group, tracked.avg_group, tracked.reduce_group_has_dp = None, None, True
        for name in self._saved if names is None else names:
            tracked = self._saved[name]
            _sum(tracked.values, groups.pp)
            _sum(tracked.values, tracked.reduce_group)
            if tracked.avg_group is not None:
                tracked.values = _mean(tracked.values, tracked.avg_group)
            if not tracked.reduce_group_has_dp and group_size(groups.dp_cp) > 1:
                tracked.values = _mean(tracked.values, groups.dp_cp)

    def _recorded(self) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {}
        for recorder in self._recorders:
            for name, values in recorder.layer_losses().items():
                found.setdefault(name, []).append(values)
        return {name: _sum_by_layer(values) for name, values in found.items()}


@cache
def default_tracker() -> AuxLossTracker:
    """Returns the tracker of this process."""
    tracker = AuxLossTracker()
    # On all torch optimizers, because the optimizers of custom training loops are not known here.
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: tracker.note_update(optimizer))
    return tracker


def _sum_by_layer(tensors: Sequence[Tensor]) -> Tensor:
    """Adds vectors of different lengths element by element; each [L], float. Returns a new tensor."""
    total = tensors[0].new_zeros(max(map(len, tensors)))
    for values in tensors:
        total[: len(values)] += values
    return total


def _sum(values: Tensor, group: dist.ProcessGroup | None) -> None:
    if group_size(group) > 1:
        dist.all_reduce(values, group=group)


def _mean(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group_size(group) == 1:
        return values
    total = values.clone()
    dist.all_reduce(total, group=group)
    return total / group_size(group)
