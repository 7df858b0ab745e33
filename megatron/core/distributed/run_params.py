"""RunParam: a parameter, or a range of it, as a part of a flat tensor."""

from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.distributed.layout import Span


@dataclass(frozen=True)
class RunParam:
    """A parameter of a run, or a range of it. span: its elements in the run's flat tensors; start: the first of them in
    the flattened parameter.
    """

    name: str
    param: nn.Parameter
    span: Span
    start: int

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its part of a flat tensor of the run: [N], any dtype -> [span.numel], the same dtype, a view."""
        return flat[self.span.start : self.span.end]
