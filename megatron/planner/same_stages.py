"""Which stages of a pipeline are built alike, so that what their passes keep and send is found once for all of them."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from megatron.core.pipeline_parallel.schedule import Action
from megatron.planner.activations import Kept, peak_bytes
from megatron.planner.rehearsal import Rehearsed

_PLAIN = (int, float, bool, str, type(None), Enum, torch.dtype, torch.Size)
# What tells stages apart that are otherwise alike.
_OWN_NAMES = {"layer_number", "offset", "_init_seed"}


@dataclass(frozen=True)
class Passes:
    """What a microbatch of each of a stage's chunks keeps for backward, and bytes of the experts of the fullest layer;
    what a step sends, None where nothing is trained.
    """

    saved: tuple[Kept, ...]
    experts_of_layer: int
    rehearsed: Rehearsed | None

    def working(self, actions: Sequence[Action]) -> int:
        """Bytes that passes take beside what waits for backward; actions: of the step that was rehearsed."""
        kept = peak_bytes(actions, [one.by_kind for one in self.saved]).total()
        return 0 if self.rehearsed is None else max(0, self.rehearsed.peak - kept)


def structure_of(model: Sequence[nn.Module]) -> Hashable:
    """Equal for chunks with equal modules, settings and parameters, whatever the numbers of their layers."""
    return tuple(_module(chunk) for chunk in model)


def _module(part: nn.Module) -> tuple[Any, ...]:
    parameters = tuple(
        (name, one.shape, one.dtype, one.requires_grad) for name, one in part.named_parameters(recurse=False)
    )
    settings = tuple((name, _setting(value)) for name, value in vars(part).items() if name not in _OWN_NAMES)
    # A list of layers names them by their numbers in the whole model.
    children = tuple((None if name.isdecimal() else name, _module(child)) for name, child in part.named_children())
    return type(part), parameters, settings, children


def _setting(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_setting(one) for one in value)
    return type(value)
