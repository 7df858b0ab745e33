"""Runs: neighbouring parameters, or the parts of them that this rank owns, as one flat tensor that a kernel steps.

Where parameters and gradients lie is the data-parallel wrapper's layout; what a step does is optimizer.py.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.layout import ALIGNMENT, BufferLayout, RunParam, Span
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


class PlacedParam(Protocol):
    """A parameter and its elements in the flat tensors of a buffer; start: the first of them in the flattened
    parameter, of which there are more where other ranks have the rest.
    """

    @property
    def name(self) -> str: ...
    @property
    def param(self) -> nn.Parameter: ...
    @property
    def span(self) -> Span: ...
    @property
    def start(self) -> int: ...


class PlacedParams(Protocol):
    """A buffer's parameters and their places."""

    @property
    def entries(self) -> Sequence[PlacedParam]: ...


class GradPlace(Protocol):
    """A source of reduced gradients: their buffer, or the object that holds them during an update."""

    def grad_of(self, span: Span) -> torch.Tensor:
        """The reduced gradients of elements of one owned span: [span.numel], their dtype, a view."""
        ...


class FlatBuffer(PlacedParams, Protocol):
    """What runs need of a data-parallel buffer: parameters and gradients of one dtype each, at the same places.

    param_data, grad_data: [N]; parameters are views of the first, and what is padding in both is zero. Each span that
    this rank owns, sorted, starts and ends on the grid of 64 elements. data_parallel_group: if the buffer is sharded,
    the ranks that own the rest. model_dtype: what modules compute in, perhaps narrower than what is stepped.
    """

    param_data: torch.Tensor
    grad_data: torch.Tensor

    @property
    def model_dtype(self) -> torch.dtype: ...
    @property
    def is_expert(self) -> bool: ...
    @property
    def layout(self) -> BufferLayout: ...
    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None: ...
    @property
    def is_sharded(self) -> bool: ...
    def owned_spans(self) -> list[Span]: ...
    def grad_of(self, span: Span) -> torch.Tensor:
        """Returns the reduced gradients of one owned span, a view: [span.numel], the dtype of grad_data."""
        ...

    def is_attached(self, param: nn.Parameter, *, start: int, address: int) -> bool:
        """Whether element `start` of a flattened parameter, any shape, lies at that address."""
        ...


@dataclass(frozen=True, eq=False)
class ParamRun:
    """What this rank owns of parameters that lie side by side and share dtype and parameter group.

    model: [N], the parameters' dtype; they are views of it. main: the N numbers that are stepped: `model` itself, or
    what has the digits that 16-bit parameters lack. span: its place in `buffer`; N is a multiple of 64. Padding between
    parameters is zero in these and in `grad`, and stays zero: neither norm nor step sees it. bucket: which of the owned
    spans of `buffer` it lies in. grads: the buffer itself, unless gradients do not stand in it. on_host: `main` is kept
    in the host's memory, which on a CPU is the memory of all.
    """

    params: list[RunParam]
    group: GroupKey
    model: torch.Tensor
    main: StoredFloats
    buffer: FlatBuffer
    span: Span
    bucket: int
    grads: GradPlace
    on_host: bool = False

    @property
    def grad(self) -> torch.Tensor:
        """The reduced gradients, where they are now: [N], the buffer's dtype, a view."""
        return self.grads.grad_of(self.span)

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


def build_runs(
    buffers: Sequence[FlatBuffer],
    groups: Mapping[nn.Parameter, GroupKey],
    *,
    main_of: Callable[[torch.Tensor], StoredFloats] = full_masters,
    host_fraction: float = 0.0,
    grad_places: Mapping[FlatBuffer, GradPlace] | None = None,
) -> list[ParamRun]:
    """Joins what this rank owns of each buffer's parameters into runs, in the order of the buffers.

    groups: of every parameter of the buffers. main_of: how the numbers that are stepped are kept of parameters [N], any
    floating dtype. host_fraction: part of each owned span that is kept in the host's memory. grad_places: of each
    buffer, where its gradients do not stand in it.
    """
    runs: list[ParamRun] = []
    for buffer in buffers:
        grads = buffer if grad_places is None else grad_places[buffer]
        parts = [
            (part, kept, bucket)
            for bucket, owned in enumerate(buffer.owned_spans())
            for part, kept in _by_memory(owned, main_of, host_fraction=host_fraction)
        ]
        for found in ranges_in(buffer, [part for part, _, _ in parts], groups=groups):
            _, kept, bucket = parts[found.place]
            model = buffer.param_data[found.span.start : found.span.end]
            on_host = kept is host_masters
            runs.append(
                ParamRun(found.members, found.key, model, kept(model), buffer, found.span, bucket, grads, on_host)
            )
    return runs


@dataclass(frozen=True, eq=False)
class OwnedParams(Generic[_Key]):
    """Neighbours in a buffer, in one of the spans asked for, that share a key.

    span: theirs in the buffer, with padding. place: of the span asked for, among all of these.
    """

    members: list[RunParam]
    key: _Key
    span: Span
    place: int


def ranges_in(
    buffer: PlacedParams, spans: Iterable[Span], *, groups: Mapping[nn.Parameter, _Key]
) -> Iterator[OwnedParams[_Key]]:
    """Yields the parameter ranges in some spans of a buffer; groups: a key for every parameter of it."""
    # By their places, so that those of a span are found without looking at all.
    # An empty parameter starts where the next one does.
    entries = sorted(buffer.entries, key=lambda entry: (entry.span.start, entry.span.end))
    ends = [entry.span.end for entry in entries]
    for place, span in enumerate(spans):
        here = entries[bisect_right(ends, span.start) :]
        for members, start, end in _neighbours_in(span, here, groups=groups):
            yield OwnedParams(members, groups[members[0].param], Span(start, end - start), place)


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
    owned: Span, entries: Sequence[PlacedParam], *, groups: Mapping[nn.Parameter, _Key]
) -> Iterator[tuple[list[RunParam], int, int]]:
    """Members and range of each run inside one owned span; entries: in the order of their places."""
    inside = takewhile(lambda entry: entry.span.start < owned.end, entries)
    parts = [(entry, part) for entry in inside if (part := entry.span.intersection(owned)).numel > 0]
    # Neighbours only: the order of the buffer is that of the reduction and must not depend on groups.
    for _, members in groupby(parts, key=lambda pair: groups[pair[0].param]):
        run = list(members)
        # Both ends are on the grid: of a parameter with the padding behind it, or of the owned span.
        start, end = run[0][1].start, min(run[-1][1].padded_end, owned.end)
        yield [_member(entry, part, run_start=start) for entry, part in run], start, end


def _member(entry: PlacedParam, part: Span, *, run_start: int) -> RunParam:
    start = entry.start + part.start - entry.span.start
    return RunParam(entry.name, entry.param, Span(part.start - run_start, part.numel), start)
