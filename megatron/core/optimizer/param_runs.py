"""Runs: neighbouring parameters, or the parts of them that this rank owns, as one flat tensor that a kernel steps.

Where parameters and gradients lie is the data-parallel wrapper's layout; what a step does is optimizer.py.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.grad_buffer import Span
from megatron.core.optimizer.param_groups import GroupKey

_OWN_PRECISION = (torch.float32, torch.float64)


class PlacedParam(Protocol):
    """A parameter and its elements in the flat tensors of a buffer."""

    @property
    def name(self) -> str: ...
    @property
    def param(self) -> nn.Parameter: ...
    @property
    def span(self) -> Span: ...


class FlatBuffer(Protocol):
    """What runs need of a data-parallel buffer: parameters and gradients of one dtype each, at the same places.

    param_data, grad_data: [N]; parameters are views of the first, and what is padding in both is zero. Each span that
    this rank owns, sorted, starts and ends on the grid of 64 elements. data_parallel_group: if the buffer is sharded,
    the ranks that own the rest.
    """

    param_data: torch.Tensor
    grad_data: torch.Tensor
    is_expert: bool

    @property
    def entries(self) -> Sequence[PlacedParam]: ...
    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None: ...
    @property
    def is_sharded(self) -> bool: ...
    def owned_spans(self) -> list[Span]: ...


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


@dataclass(frozen=True, eq=False)
class ParamRun:
    """What this rank owns of parameters that lie side by side and share dtype and parameter group.

    model: [N], the parameters' dtype; they are views of it. main: [N], what the optimizer steps: `model` itself, or an
    fp32 copy of 16-bit parameters. grad: [N], the buffer's dtype, a view of it. N is a multiple of 64. Padding between
    parameters is zero in all three and stays zero: neither norm nor step sees it. bucket: which of the buffer's owned
    spans it lies in.
    """

    params: list[RunParam]
    group: GroupKey
    model: torch.Tensor
    main: torch.Tensor
    grad: torch.Tensor
    bucket: int

    @property
    def has_master(self) -> bool:
        """Whether the optimizer steps a copy, to be written back into the model."""
        return self.main is not self.model

    def check_attached(self) -> None:
        """Raises ValueError naming the first parameter whose memory is no longer the run's."""
        # By address: a comparison of a hundred numbers, no read of the device.
        base, size = self.model.data_ptr(), self.model.element_size()
        for member in self.params:
            # An empty tensor's pointer means nothing.
            if member.param.numel() and member.param.data_ptr() != base + (member.span.start - member.start) * size:
                raise ValueError(
                    f"parameter {member.name} was moved or replaced after the optimizer was built: "
                    "build the optimizer after the model is on its device and in its dtype"
                )


def build_runs(buffers: Sequence[FlatBuffer], groups: Mapping[nn.Parameter, GroupKey]) -> list[ParamRun]:
    """Joins what this rank owns of each buffer's parameters into runs, in the order of the buffers.

    groups: of every parameter of the buffers.
    """
    runs: list[ParamRun] = []
    for buffer in buffers:
        # By their places, so that those of a span are found without looking at all.
        entries = sorted(buffer.entries, key=lambda entry: entry.span.start)
        ends = [entry.span.end for entry in entries]
        for bucket, owned in enumerate(buffer.owned_spans()):
            runs += _runs_in(
                buffer, groups, entries=entries[bisect_right(ends, owned.start) :], owned=owned, bucket=bucket
            )
    return runs


def _runs_in(
    buffer: FlatBuffer,
    groups: Mapping[nn.Parameter, GroupKey],
    *,
    entries: Sequence[PlacedParam],
    owned: Span,
    bucket: int,
) -> Iterator[ParamRun]:
    """The runs of one owned span; entries: in the order of their places."""
    inside = takewhile(lambda entry: entry.span.start < owned.end, entries)
    parts = [(entry, part) for entry in inside if (part := _common(entry.span, owned)).numel > 0]
    # Neighbours only: the order of the buffer is that of the reduction and must not depend on groups.
    for group, members in groupby(parts, key=lambda pair: groups[pair[0].param]):
        run = list(members)
        first, last = run[0][1], run[-1][1]
        # Both ends are on the grid: of a parameter with the padding behind it, or of the owned span.
        start, end = first.start, min(last.padded_end, owned.end)
        model = buffer.param_data[start:end]
        # 16-bit weights lose updates below their last digit; the copy keeps them.
        main = model if model.dtype in _OWN_PRECISION else model.float()
        params = [
            RunParam(entry.name, entry.param, Span(part.start - start, part.numel), part.start - entry.span.start)
            for entry, part in run
        ]
        yield ParamRun(params, group, model, main, buffer.grad_data[start:end], bucket)


def _common(span: Span, owned: Span) -> Span:
    start = max(span.start, owned.start)
    return Span(start, max(0, min(span.end, owned.end) - start))
