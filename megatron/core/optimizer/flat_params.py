"""FlatParamRange: adjacent parameters, or this rank's parts of them, as one flat tensor that a kernel updates.

The data-parallel wrapper lays out parameters and gradients (layout.py); optimizer.py updates the ranges.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, takewhile
from typing import Generic, TypeVar

import torch
from torch import nn

from megatron.core.dense_memory import shaped_view
from megatron.core.distributed.bucket_storage import StagedParams, elements_of
from megatron.core.distributed.layout import ALIGNMENT, FlatBuffer, ParamRange, ParamSlot, Span
from megatron.core.optimizer.param_groups import GroupKey
from megatron.core.optimizer.stored_floats import (
    Plain,
    Rounded,
    StoredFloats,
    WithRemainder,
    full_masters,
    host_masters,
    piece_elements,
    pieces,
)
from megatron.core.tensor_parallel.param_attributes import set_main_param

# Key shared by parameters that are updated together.
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, eq=False)
class FlatParamRange(Generic[_Key]):
    """This rank's part of adjacent parameters that share dtype and parameter group.

    model: [N], the parameters' dtype; parameters are views of it, or it is on the meta device if they keep their own
    memory. main: the N values that the optimizer updates, either `model` itself or masters of any storage form. span:
    the range's position in `buffer`; N is a multiple of 64. Padding between parameters is always zero in `model`,
    `main` and `grad`, so norms and updates can include it. bucket: index into the owned spans of `buffer`. part: the
    range's position in that span. grad_of: returns the reduced gradients of a bucket's owned span. on_host: whether
    `main` is in host memory; on a CPU it marks the share that a GPU would offload. staged: the message buffer from
    which updated parameters are gathered; None if they are written to `model`.
    """

    params: list[ParamRange]
    group: _Key
    model: torch.Tensor
    main: StoredFloats
    buffer: FlatBuffer
    span: Span
    bucket: int
    part: slice
    grad_of: Callable[[int], torch.Tensor]
    on_host: bool = False
    staged: StagedParams | None = None

    @property
    def grad(self) -> torch.Tensor:
        """The reduced gradients: [N], the buffer's dtype, a view of their current memory."""
        return self.grad_of(self.bucket)[self.part]

    @property
    def has_master(self) -> bool:
        """Whether masters have higher precision than the model's parameters."""
        return self.buffer.model_dtype.itemsize < 4

    @property
    def is_copy(self) -> bool:
        """Whether a copy of the parameters is updated, instead of the parameters themselves."""
        return not (isinstance(self.main, (Plain, Rounded)) and self.main.tensor is self.model)

    @property
    def stepped(self) -> torch.Tensor:
        """The range's tensor in torch's parameter groups: [N], fp32 masters if there are any, else the parameters."""
        return self.main.tensor if isinstance(self.main, Plain) else self.model

    @property
    def target(self) -> torch.Tensor | None:
        """Memory to which updated masters are rounded: [N], the parameters' or the all-gather dtype.

        None if an update of `main` already changes the parameters.
        """
        if self.staged is not None:
            return self.staged.place_of(self.span)
        return self.model if self.is_copy and not isinstance(self.main, WithRemainder) else None

    @cached_property
    def unpadded(self) -> list[tuple[int, int]]:
        """Start and end of the parts that belong to parameters; see [Note: ends of parameters] in adam.py."""
        parts: list[tuple[int, int]] = []
        for span in (member.span for member in self.params):
            start = parts.pop()[0] if parts and parts[-1][1] == span.start else span.start
            parts.append((start, span.end))
        return parts

    def write_model(self) -> None:
        """Rounds the masters to the parameters' dtype and writes them to `target`."""
        target = self.target
        if target is not None:
            for start, values in pieces(self.main, start=0, end=self.main.numel):
                target[start : start + values.numel()].copy_(values)

    def take_model(self) -> None:
        """Copies the values of the parameters to the masters."""
        if isinstance(self.main, WithRemainder):
            self.main.forget()
        elif self.is_copy:
            current, like, step = self._current(), self.main.read(0, 0), piece_elements(self.main)
            for start in range(0, self.main.numel, step):
                self.main.write(start, current[start : start + step].to(like))

    def take_changes(self) -> None:
        """Overwrites masters where the parameters differ from the rounded masters, because other code wrote them.

        Values are compared on the device of the masters. Remainders need no comparison: the parameters themselves are
        the upper halves of these masters.
        """
        if not self.is_copy or isinstance(self.main, WithRemainder):
            return
        current, step = self._current(), piece_elements(self.main)
        for start in range(0, self.main.numel, step):
            own = self.main.read(start, min(start + step, self.main.numel))
            values = current[start : start + step].to(own.device)
            # As a gather rounds them, possibly to a narrower dtype than the parameters'.
            sent = own if self.staged is None else own.to(self.staged.dtype)
            self.main.write(start, torch.where(values == sent.to(values.dtype), own, values.to(own.dtype)))

    def _current(self) -> torch.Tensor:
        return self.model if self.buffer.persistent_params else collect(self.params, self.model)

    def check_attached(self) -> None:
        """Raises ValueError naming the first parameter whose memory is no longer part of the range."""
        base, size = self.model.data_ptr(), self.model.element_size()
        for member in self.params:
            address = base + member.span.start * size
            if not self.buffer.is_attached(member.param, start=member.start, address=address):
                raise ValueError(
                    f"parameter {member.name} was moved or replaced after the optimizer was built: "
                    "build the optimizer after the model is on its device and in its dtype"
                )


def collect(params: Sequence[ParamRange], model: torch.Tensor) -> torch.Tensor:
    """Copies ranges of parameters that keep their own memory into a flat tensor like `model`: [N], their dtype."""
    flat = torch.zeros_like(model, device=params[0].param.device)
    for member in params:
        member.view_of(flat).copy_(elements_of(member))
    return flat


class ParamWrites:
    """Detects writes of other code to parameters that have masters, such as the model's load_state_dict.

    The next update would otherwise undo them. Writes to a parameter are detected by its version counter, which is on
    the host. Writes to `param.data` and by collectives (dist.broadcast) do not change the counter, so all values are
    compared once, before the first update.
    """

    def __init__(self, ranges: Iterable[FlatParamRange]) -> None:
        self._ranges = [one for one in ranges if one.is_copy]
        self._params = list({member.param: None for one in self._ranges for member in one.params})
        self._versions: list[int] = []  # in the order of _params; a list, because hashing a parameter runs Python code

    def take(self) -> None:
        """Updates the masters of parameters that were written since the last call or `note`. Reads nothing back."""
        versions = [param._version for param in self._params]
        if versions != self._versions:
            before = self._versions or [-1] * len(versions)
            pairs = zip(self._params, versions, before, strict=True)
            changed = {param for param, now, then in pairs if now != then}
            for one in self._ranges:
                if any(member.param in changed for member in one.params):
                    one.take_changes()
            self._versions = versions

    def note(self) -> None:
        """Records that the parameters agree with their masters."""
        self._versions = [param._version for param in self._params]


def build_ranges(
    buffers: Sequence[FlatBuffer],
    groups: Mapping[nn.Parameter, GroupKey],
    *,
    main_of: Callable[[torch.Tensor], StoredFloats] = full_masters,
    host_fraction: float = 0.0,
    grads_of: Mapping[FlatBuffer, Callable[[int], torch.Tensor]] | None = None,
) -> list[FlatParamRange[GroupKey]]:
    """Joins this rank's parts of each buffer's parameters into ranges, in the order of the buffers.

    groups: the parameter group of every parameter in the buffers. main_of: builds the masters of parameters, [N], any
    floating dtype. host_fraction: fraction of each owned span whose masters are in host memory. grads_of: for each
    buffer without persistent gradients, a function that returns the gradients of a bucket's owned span.
    """
    ranges: list[FlatParamRange[GroupKey]] = []
    for buffer in buffers:
        grad_of = buffer.grad_of if grads_of is None else grads_of[buffer]
        owned = buffer.owned_spans()
        parts = [
            (part, kept, bucket)
            for bucket, span in enumerate(owned)
            for part, kept in _by_memory(span, main_of, host_fraction=host_fraction)
        ]
        for found in ranges_in(buffer, [part for part, _, _ in parts], groups=groups):
            _, kept, bucket = parts[found.place]
            model = buffer.param_data[found.span.start : found.span.end]
            ranges.append(
                FlatParamRange(
                    found.members,
                    found.key,
                    model,
                    kept(model),
                    buffer,
                    found.span,
                    bucket,
                    found.span.within(owned[bucket]),
                    grad_of,
                    on_host=kept is host_masters,
                )
            )
    return ranges


def name_masters(buffers: Sequence[FlatBuffer], ranges: Sequence[FlatParamRange], *, is_sharded: bool) -> None:
    """Sets `main_param` of the buffers' 16-bit parameters to views of their masters.

    Sets it to None if this rank has no masters of the parameter, or stores them in several parts, rounded or as
    remainders. is_sharded: whether the views are flat and cover only this rank's part of a parameter.
    """
    views: dict[nn.Parameter, list[torch.Tensor | None]] = {}
    for one in ranges:
        for member in one.params:
            flat = member.view_of(one.main.tensor) if isinstance(one.main, Plain) else None
            views.setdefault(member.param, []).append(flat)
    for slot in (slot for buffer in buffers for slot in buffer.slots):
        if slot.param.dtype.itemsize >= 4:
            continue
        found = views.get(slot.param, [])
        main = found[0] if len(found) == 1 else None
        if main is not None and not is_sharded:
            main = shaped_view(main, slot.param)
        set_main_param(slot.param, main, is_sharded=is_sharded)


@dataclass(frozen=True, eq=False)
class _Neighbours(Generic[_Key]):
    """Adjacent parameter ranges of a buffer that share a key and lie in one of the given spans.

    span: their elements in the buffer, including padding. place: index of the given span.
    """

    members: list[ParamRange]
    key: _Key
    span: Span
    place: int


def ranges_in(
    buffer: FlatBuffer, spans: Iterable[Span], *, groups: Mapping[nn.Parameter, _Key]
) -> Iterator[_Neighbours[_Key]]:
    """Joins adjacent parameter ranges with the same key, span by span. groups: maps parameters to their keys."""
    # Sorted by position, so that a bisection finds the slots of a span. An empty parameter starts where the next one
    # does.
    slots = sorted(buffer.slots, key=lambda slot: (slot.span.start, slot.span.end))
    ends = [slot.span.end for slot in slots]
    for place, span in enumerate(spans):
        here = slots[bisect_right(ends, span.start) :]
        for members, start, end in _neighbours_in(span, here, groups=groups):
            yield _Neighbours(members, groups[members[0].param], Span(start, end - start), place)


def host_elements(numel: int, host_fraction: float) -> int:
    """Returns the number of elements, at the start of an owned span, whose state is in host memory."""
    # A multiple of ALIGNMENT, so that results do not depend on the split.
    return int(numel * host_fraction) // ALIGNMENT * ALIGNMENT


def _by_memory(
    owned: Span, main_of: Callable[[torch.Tensor], StoredFloats], *, host_fraction: float
) -> Iterator[tuple[Span, Callable[[torch.Tensor], StoredFloats]]]:
    """Splits an owned span into the part whose masters are on the host, and the rest.

    Yields each part with the function that builds its masters.
    """
    on_host = host_elements(owned.numel, host_fraction)
    if on_host:
        yield Span(owned.start, on_host), host_masters
    if on_host < owned.numel:
        yield Span(owned.start + on_host, owned.numel - on_host), main_of


def _neighbours_in(
    owned: Span, slots: Sequence[ParamSlot], *, groups: Mapping[nn.Parameter, _Key]
) -> Iterator[tuple[list[ParamRange], int, int]]:
    """Yields members, start and end of each joined range inside one owned span. slots: sorted by position."""
    inside = takewhile(lambda slot: slot.span.start < owned.end, slots)
    parts = [(slot, part) for slot in inside if (part := slot.span.intersection(owned)).numel > 0]
    # Only neighbors are joined, because reductions determine the buffer's order, which must not depend on groups.
    for _, members in groupby(parts, key=lambda pair: groups[pair[0].param]):
        joined = list(members)
        # Both ends are multiples of ALIGNMENT: a parameter's padded end, or an end of the owned span.
        start, end = joined[0][1].start, min(joined[-1][1].padded_end, owned.end)
        yield [_member(slot, part, range_start=start) for slot, part in joined], start, end


def _member(slot: ParamSlot, part: Span, *, range_start: int) -> ParamRange:
    start = slot.start + part.start - slot.span.start
    return ParamRange(slot.name, slot.param, Span(part.start - range_start, part.numel), start)
