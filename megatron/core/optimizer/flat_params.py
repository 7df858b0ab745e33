"""Ranges of parameters, or of the parts of them that this rank owns, as one flat tensor that a kernel steps.

Where parameters and gradients lie is the data-parallel wrapper's layout; what a step does is optimizer.py.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Generic, TypeVar

import torch
from torch import nn

from megatron.core.distributed.data_parallel_base import FlatBuffer
from megatron.core.distributed.layout import ALIGNMENT, ParamRange, ParamSlot, Span
from megatron.core.optimizer.param_groups import GroupKey
from megatron.core.optimizer.stored_floats import (
    Plain,
    StoredFloats,
    WithRemainder,
    full_masters,
    host_masters,
    piece_elements,
    pieces,
)

# What parameters must share to be stepped together.
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, eq=False)
class FlatParamRange:
    """This rank's part of parameters that lie side by side and share dtype and parameter group.

    model: [N], the parameters' dtype; they are views of it. main: the N numbers that are stepped: `model` itself, or
    what has the digits that 16-bit parameters lack. span: its place in `buffer`; N is a multiple of 64. Padding between
    parameters is zero in these and in `grad`, and stays zero: neither norm nor step sees it. bucket: which of the owned
    spans of `buffer` it lies in. grad_of: returns the reduced gradients of one owned span, [span.numel], a view; the
    buffer's own, unless gradients are not persistent in it. on_host: `main` is kept in the host's memory, which on a
    CPU is the memory of all.
    """

    params: list[ParamRange]
    group: GroupKey
    model: torch.Tensor
    main: StoredFloats
    buffer: FlatBuffer
    span: Span
    bucket: int
    grad_of: Callable[[Span], torch.Tensor]
    on_host: bool = False

    @property
    def grad(self) -> torch.Tensor:
        """The reduced gradients, where they are now: [N], the buffer's dtype, a view."""
        return self.grad_of(self.span)

    @property
    def has_master(self) -> bool:
        """Whether there is more to the parameters than the model has of them."""
        return self.buffer.model_dtype.itemsize < 4

    @property
    def is_copy(self) -> bool:
        """Whether what is stepped is another tensor than the parameters."""
        return not (isinstance(self.main, Plain) and self.main.tensor is self.model)

    @property
    def stepped(self) -> torch.Tensor:
        """The run's tensor in torch's parameter groups: [N], the masters as fp32, or else the parameters."""
        return self.main.tensor if isinstance(self.main, Plain) else self.model

    def write_model(self) -> None:
        """Rounds the masters to the parameters' dtype."""
        if self.is_copy and not isinstance(self.main, WithRemainder):
            for start, values in pieces(self.main, start=0, end=self.main.numel):
                self.model[start : start + values.numel()].copy_(values)

    def take_model(self) -> None:
        """Makes the masters what the parameters are."""
        if isinstance(self.main, WithRemainder):
            self.main.forget()
        elif self.is_copy:
            like, step = self.main.read(0, 0), piece_elements(self.main)
            for start in range(0, self.main.numel, step):
                self.main.write(start, self.model[start : start + step].to(like))

    def check_attached(self) -> None:
        """Raises ValueError naming the first parameter whose memory is no longer the run's."""
        base, size = self.model.data_ptr(), self.model.element_size()
        for member in self.params:
            address = base + member.span.start * size
            if not self.buffer.is_attached(member.param, start=member.start, address=address):
                raise ValueError(
                    f"parameter {member.name} was moved or replaced after the optimizer was built: "
                    "build the optimizer after the model is on its device and in its dtype"
                )


def build_ranges(
    buffers: Sequence[FlatBuffer],
    groups: Mapping[nn.Parameter, GroupKey],
    *,
    main_of: Callable[[torch.Tensor], StoredFloats] = full_masters,
    host_fraction: float = 0.0,
    grads_of: Mapping[FlatBuffer, Callable[[Span], torch.Tensor]] | None = None,
) -> list[FlatParamRange]:
    """Joins what this rank owns of each buffer's parameters into ranges, in the order of the buffers.

    groups: of every parameter of the buffers. main_of: how the numbers that are stepped are kept of parameters [N], any
    floating dtype. host_fraction: part of each owned span that is kept in the host's memory. grads_of: of each
    buffer, where gradients are not persistent in it, what returns those of an owned span, [span.numel], a view.
    """
    runs: list[FlatParamRange] = []
    for buffer in buffers:
        grad_of = buffer.grad_of if grads_of is None else grads_of[buffer]
        parts = [
            (part, kept, bucket)
            for bucket, owned in enumerate(buffer.owned_spans())
            for part, kept in _by_memory(owned, main_of, host_fraction=host_fraction)
        ]
        for found in ranges_in(buffer, [part for part, _, _ in parts], groups=groups):
            _, kept, bucket = parts[found.place]
            model = buffer.param_data[found.span.start : found.span.end]
            on_host = kept is host_masters
            place = found.span
            runs.append(
                FlatParamRange(found.members, found.key, model, kept(model), buffer, place, bucket, grad_of, on_host)
            )
    return runs


@dataclass(frozen=True, eq=False)
class _Neighbours(Generic[_Key]):
    """Neighbours in a buffer, in one of the spans asked for, that share a key.

    span: theirs in the buffer, with padding. place: of the span asked for, among all of these.
    """

    members: list[ParamRange]
    key: _Key
    span: Span
    place: int


def ranges_in(
    buffer: FlatBuffer, spans: Iterable[Span], *, groups: Mapping[nn.Parameter, _Key]
) -> Iterator[_Neighbours[_Key]]:
    """Yields the parameter ranges in some spans of a buffer; groups: a key for every parameter of it."""
    # By their places, so that those of a span are found without looking at all.
    # An empty parameter starts where the next one does.
    slots = sorted(buffer.slots, key=lambda slot: (slot.span.start, slot.span.end))
    ends = [slot.span.end for slot in slots]
    for place, span in enumerate(spans):
        here = slots[bisect_right(ends, span.start) :]
        for members, start, end in _neighbours_in(span, here, groups=groups):
            yield _Neighbours(members, groups[members[0].param], Span(start, end - start), place)


def host_elements(numel: int, host_fraction: float) -> int:
    """Returns how many of an owned span's elements, from its start, are kept in the host's memory."""
    # On the grid, so that no element's bits depend on the cut.
    return int(numel * host_fraction) // ALIGNMENT * ALIGNMENT


def _by_memory(
    owned: Span, main_of: Callable[[torch.Tensor], StoredFloats], *, host_fraction: float
) -> Iterator[tuple[Span, Callable[[torch.Tensor], StoredFloats]]]:
    """The part of an owned span that is kept in the host's memory, and the rest, which main_of keeps."""
    on_host = host_elements(owned.numel, host_fraction)
    if on_host:
        yield Span(owned.start, on_host), host_masters
    if on_host < owned.numel:
        yield Span(owned.start + on_host, owned.numel - on_host), main_of


def _neighbours_in(
    owned: Span, slots: Sequence[ParamSlot], *, groups: Mapping[nn.Parameter, _Key]
) -> Iterator[tuple[list[ParamRange], int, int]]:
    """Members and range of each run inside one owned span; slots: in the order of their places."""
    inside = takewhile(lambda slot: slot.span.start < owned.end, slots)
    parts = [(slot, part) for slot in inside if (part := slot.span.intersection(owned)).numel > 0]
    # Neighbours only: the order of the buffer is that of the reduction and must not depend on groups.
    for _, members in groupby(parts, key=lambda pair: groups[pair[0].param]):
        run = list(members)
        # Both ends are on the grid: of a parameter with the padding behind it, or of the owned span.
        start, end = run[0][1].start, min(run[-1][1].padded_end, owned.end)
        yield [_member(slot, part, run_start=start) for slot, part in run], start, end


def _member(slot: ParamSlot, part: Span, *, run_start: int) -> ParamRange:
    start = slot.start + part.start - slot.span.start
    return ParamRange(slot.name, slot.param, Span(part.start - run_start, part.numel), start)
