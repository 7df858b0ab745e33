"""Segments: parameters that DistributedFusedAdam has taken over together, and the states of this rank's shards.

Where buffers lie and what is sent is megatron.core.distributed's; one update is flat_adam.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.dense_memory import flat_view
from megatron.core.device import SideStream
from megatron.core.distributed.collectives import ReductionPolicy
from megatron.core.distributed.flat_buffer import BufferKind, BufferSettings
from megatron.core.distributed.layout import RunParam, Span
from megatron.core.distributed.transient_buffer import ParamMemory
from megatron.core.distributed.transient_grads import TransientGroup
from megatron.core.optimizer.flat_adam import AdamUpdate, FlatAdam, Masters, write_parameters
from megatron.core.optimizer.fused_adam_settings import AdamMemory
from megatron.core.optimizer.late_buffer import LateBuffer
from megatron.core.optimizer.param_runs import ranges_in
from megatron.core.optimizer.rank_grid import RankGrid
from megatron.core.optimizer.stored_floats import WithRemainder
from megatron.core.process_groups_config import group_size


@dataclass(frozen=True)
class SegmentPlan:
    """Properties that all segments of an optimizer share. bucket_bytes: of a bucket's gradients."""

    grid: RankGrid
    bucket_bytes: float
    average: bool
    overlap: bool


@dataclass(frozen=True, eq=False)
class AdamRun:
    """Neighbours in a buffer that this rank owns and that one parameter group has. key: that group's place.

    grad: [N], their summed gradients, a view. start: of its elements in this rank's shard of the bucket of `group`.
    model: [N], the parameters, a view; None where they are sent from elsewhere. ranges: what is no padding.
    """

    key: int
    members: list[RunParam]
    state: FlatAdam
    grad: torch.Tensor
    group: TransientGroup
    start: int
    model: torch.Tensor | None
    ranges: Sequence[tuple[int, int]]

    def update(self) -> AdamUpdate:
        """Returns the run's operands for a step."""
        return AdamUpdate(self.state, self.grad, self._target(), self.ranges)

    def write_model(self) -> None:
        """Makes the parameters what the masters are, or what is sent of them."""
        target = self._target()
        if target is not None:
            write_parameters(self.state, target)

    def take_model(self) -> None:
        """Makes the masters what the parameters are."""
        main = self.state.main
        if isinstance(main, WithRemainder):
            main.forget()
        elif self.state.form.masters is Masters.COPY:
            main.write(0, self._parameters().to(main.read(0, 0).dtype))

    def take_changes(self) -> None:
        """Makes masters what their parameters are where these are not what the masters were rounded to."""
        if self.state.form.masters is Masters.COPY:
            main, wire = self.state.main, self.group.wire_dtype
            values = self._parameters()
            rounded = torch.empty_like(values, dtype=wire)
            write_parameters(self.state, rounded)
            own = main.read(0, main.numel)
            main.write(0, torch.where(values == rounded.to(values.dtype), own, values.to(own.dtype)))

    def _parameters(self) -> torch.Tensor:
        numel, device = self.grad.numel(), self.grad.device
        return _collect(self.members, numel=numel, dtype=self.members[0].param.dtype, device=device)

    def _target(self) -> torch.Tensor | None:
        """Where new parameters go: to their place, or to that from which they are sent; None: they are the masters."""
        if self.model is None:
            staged = self.group.staged_shard()
            return staged[self.start : self.start + self.grad.numel()]
        return self.model if self.state.form.masters is Masters.COPY else None


class Segment:
    """named_params: those taken over, in the order of places; keys: of each its parameter group. name: its own.

    Parameters of one dtype share a buffer, whose buckets cut them. Until move_in they stay in their own memory, and
    have no states.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, nn.Parameter]],
        keys: Mapping[nn.Parameter, int],
        *,
        memory: AdamMemory,
        plan: SegmentPlan,
        name: str,
    ) -> None:
        self.memory = memory
        self.params = [param for _, param in named_params]
        by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
        for param_name, param in named_params:
            by_dtype.setdefault(param.dtype, []).append((param_name, param))
        self.buffers = [_buffer(members, memory, plan=plan) for members in by_dtype.values()]
        self._keys = keys
        self._runs: list[AdamRun] | None = None
        self._note_addresses()
        self._groups_of = {
            buffer: [
                TransientGroup(bucket, name=f"{name}, bucket {index} of {buffer.kind.param_dtype}")
                for index, bucket in enumerate(buffer.buckets)
            ]
            for buffer in self.buffers
        }
        self.groups = [group for groups in self._groups_of.values() for group in groups]

    @property
    def runs(self) -> list[AdamRun]:
        """All that this rank owns; whoever asks first moves the parameters in."""
        return self.move_in()

    def move_in(self) -> list[AdamRun]:
        """Gives the parameters their places, and this rank's runs of them states, unless they have them."""
        if self._runs is None:
            self._runs = []
            for buffer, groups in self._groups_of.items():
                buffer.move_in()
                self._runs += _runs(buffer, groups, memory=self.memory, keys=self._keys)
            self._note_addresses()
        return self._runs

    @property
    def is_plain(self) -> bool:
        """Whether torch's kernel on a CPU serves all of it; GPUs have one that divides gradients while it reads."""
        firsts = [buffer.entries[0].param for buffer in self.buffers]
        return all(param.device.type == "cpu" and self.memory.is_plain(param) for param in firsts)

    def find_moved(self) -> Iterator[nn.Parameter]:
        """Parameters, any shapes and dtypes, whose memory is no longer where it was."""
        with torch._C.DisableTorchFunctionSubclass():
            addresses = [param.data_ptr() for param in self.params]
        return (param for param, now, before in zip(self.params, addresses, self._addresses) if now != before)

    def groups_of(self) -> Iterator[tuple[nn.Parameter, TransientGroup]]:
        """Each parameter with each bucket that has a part of it."""
        return ((entry.param, group) for group in self.groups for entry in group.entries)

    def _note_addresses(self) -> None:
        # By address: a comparison of numbers, no read of a device.
        self._addresses = [param.data_ptr() for param in self.params]


def _buffer(members: Sequence[tuple[str, nn.Parameter]], memory: AdamMemory, *, plan: SegmentPlan) -> LateBuffer:
    first = members[0][1]
    kind = BufferKind(first.dtype, memory.grad_dtype(first), is_expert=False)
    device = first.device
    settings = BufferSettings(
        group=plan.grid.shards,
        bucket_size=max(1, int(plan.bucket_bytes) // kind.grad_dtype.itemsize),
        is_sharded=True,
        scale=1.0 / group_size(plan.grid.ranks) if plan.average else 1.0,
        policy=ReductionPolicy(
            deterministic=torch.are_deterministic_algorithms_enabled(),
            instances_group=plan.grid.replicas,
            side=SideStream(device) if plan.overlap and group_size(plan.grid.replicas) > 1 else None,
        ),
        split=True,
    )
    return LateBuffer(kind, members, settings=settings, memory=memory.policy(first))


def _runs(
    buffer: LateBuffer,
    groups: Sequence[TransientGroup],
    *,
    memory: AdamMemory,
    keys: Mapping[nn.Parameter, int],
) -> Iterator[AdamRun]:
    form, owned = memory.form(buffer.entries[0].param), buffer.owned_spans()
    is_flat, device = buffer.memory.params is ParamMemory.FLAT, buffer.shard_grads.device
    for found in ranges_in(buffer, owned, groups=keys):
        span = found.span
        model = (
            buffer.param_data[span.start : span.end]
            if is_flat
            else _collect(found.members, numel=span.numel, dtype=buffer.kind.param_dtype, device=device)
        )
        yield AdamRun(
            key=found.key,
            members=found.members,
            state=FlatAdam(model, form),
            grad=buffer.grad_of(span),
            group=groups[found.place],
            start=span.start - owned[found.place].start,
            model=None if buffer.is_staged else model,
            ranges=_joined([member.span for member in found.members]),
        )


def _joined(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Ranges of the spans, neighbours with no padding in between as one; see [Note: ends of parameters]."""
    ranges: list[tuple[int, int]] = []
    for span in spans:
        if ranges and ranges[-1][1] == span.start:
            ranges[-1] = (ranges[-1][0], span.end)
        else:
            ranges.append((span.start, span.end))
    return ranges


def _collect(members: Sequence[RunParam], *, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A run's parameters from their own memory: [numel], their dtype."""
    flat = torch.zeros(numel, dtype=dtype, device=device)
    for member in members:
        member.view_of(flat).copy_(flat_view(member.param)[member.start : member.start + member.span.numel])
    return flat
