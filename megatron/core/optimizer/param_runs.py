"""Runs: neighbouring parameters joined into one flat tensor that an optimizer kernel steps at once.

Which gradients they have is the data-parallel wrapper's layout; what a step does is optimizer.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn

from megatron.core.distributed.grad_buffer import GradBuffer, GradEntry, Span
from megatron.core.optimizer.param_groups import GroupKey, ParamGrouping


@dataclass(frozen=True)
class RunParam:
    """A parameter of a run. span: its elements in the run's flat tensors."""

    name: str
    param: nn.Parameter
    span: Span

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its part of a flat tensor of the run, any dtype -> [*parameter shape], the same dtype, a view."""
        return flat[self.span.start : self.span.end].view(self.param.shape)


@dataclass(frozen=True, eq=False)
class ParamRun:
    """Parameters that lie side by side and share dtype and parameter group.

    model: [N], the parameters' dtype; they are views of it. main: [N], what the optimizer steps: `model` itself, or an
    fp32 copy of 16-bit parameters; its `.grad` is `grad`. grad: [N], `main`'s dtype, a view of the gradient buffer.
    Padding between parameters is zero in all three and stays zero: neither norm nor step sees it.
    """

    params: list[RunParam]
    group: GroupKey
    model: torch.Tensor
    main: torch.Tensor
    grad: torch.Tensor

    @property
    def has_master(self) -> bool:
        """Whether the optimizer steps a copy, to be written back into the model."""
        return self.main is not self.model

    def named_views(self, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter's name and part of `flat`: [N], any dtype -> [*parameter shape], views."""
        return ((member.name, member.view_of(flat)) for member in self.params)

    def check_attached(self) -> None:
        """Raises ValueError naming the first parameter whose memory is no longer the run's."""
        # By address: a comparison of a hundred numbers, no read of the device.
        base, size = self.model.data_ptr(), self.model.element_size()
        for member in self.params:
            # An empty tensor's pointer means nothing.
            if member.param.numel() and member.param.data_ptr() != base + member.span.start * size:
                raise ValueError(
                    f"parameter {member.name} was moved or replaced after the optimizer was built: "
                    "build the optimizer after the model is on its device and in its dtype"
                )


def build_runs(buffers: Sequence[GradBuffer], grouping: ParamGrouping) -> list[ParamRun]:
    """Joins the parameters of each buffer into runs and moves their storage into the runs' flat tensors."""
    # Neighbours only: the order of the buffer is that of the reduction and must not depend on groups.
    runs = []
    for buffer in buffers:
        keyed = [((entry.param.dtype, grouping.key_of(entry.name, entry.param)), entry) for entry in buffer.entries]
        for (_, group), members in groupby(keyed, key=lambda pair: pair[0]):
            runs.append(_build_run([entry for _, entry in members], buffer, group=group))
    return runs


def _build_run(entries: list[GradEntry], buffer: GradBuffer, *, group: GroupKey) -> ParamRun:
    first, last = entries[0].span, entries[-1].span
    grad = buffer.storage[first.start : last.padded_end]
    # Spans count from the run's own start.
    params = [RunParam(e.name, e.param, Span(e.span.start - first.start, e.span.numel)) for e in entries]
    # Zeros: padding must not hold what would spread in a sum.
    model = torch.zeros(grad.numel(), dtype=entries[0].param.dtype, device=grad.device)
    for member in params:
        view = member.view_of(model)
        view.copy_(member.param.detach())
        # The parameter object stays, and with it hooks, ties and whoever holds it.
        member.param.data = view
    # 16-bit weights lose updates below their last digit; the copy keeps them.
    main = model if model.dtype == grad.dtype else model.to(grad.dtype)
    # Once: the kernel finds the standing gradient here at every step.
    main.grad = grad
    return ParamRun(params, group, model, main, grad)
