"""Parameters of DistributedFusedAdam: their registration in segments, buffers, states and rank groups.

Parameters that are registered together form a segment, with buffers and the states of this rank's shards; see [Note:
registered parameters] in distributed_fused_adam.py. An AwaitedParameter raises if it is read before the gather of its
new values. fused_adam_grads.py handles gradients, adam.py implements an update, and megatron/core/distributed orders
the collectives.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import SideStream
from megatron.core.device.torch_internals import DisableTorchFunctionSubclass, tree_leaves
from megatron.core.distributed.bucket_group import ParamState, _ParamAndGradBucketGroup
from megatron.core.distributed.bucket_storage import (
    BucketLifetimeGrads,
    BufferSettings,
    KernelMemory,
    MessagePool,
    ShardSum,
    _ParamAndGradBucket,
    elements_of,
)
from megatron.core.distributed.collectives import ReductionPolicy
from megatron.core.distributed.consistency import bits_sync
from megatron.core.distributed.layout import FlatBuffer, Span
from megatron.core.distributed.param_and_grad_buffer import BufferKind, BufferType, _ParamAndGradBuffer
from megatron.core.distributed.scheduler import ChunkSync, CollectiveScheduler
from megatron.core.group_collectives import gather_objects
from megatron.core.optimizer.adam import AdamUpdate, FlatAdam, GradUse
from megatron.core.optimizer.flat_params import FlatParamRange, ParamWrites, collect, ranges_in
from megatron.core.optimizer.fused_adam_settings import AdamMemory
from megatron.core.optimizer.state_dict import StateRange
from megatron.core.process_groups_config import group_size

# Attributes that read a tensor's values; all other attributes only describe it.
_VALUE_ATTRIBUTES = {"data", "T", "mT", "H", "mH", "real", "imag"}
# Methods that read only a tensor's shape, dtype and device, or build other tensors from these.
_FORM_METHODS = {
    torch.empty_like,
    torch.full_like,
    torch.is_complex,
    torch.is_floating_point,
    torch.numel,
    torch.ones_like,
    torch.rand_like,
    torch.randn_like,
    torch.zeros_like,
    torch.Tensor.is_complex,
    torch.Tensor.is_shared,
    torch.Tensor.new_empty,
    torch.Tensor.new_full,
    torch.Tensor.new_ones,
    torch.Tensor.new_zeros,
    torch.Tensor.retain_grad,
    torch.Tensor.type,
    torch.Tensor.dim,
    torch.Tensor.element_size,
    torch.Tensor.get_device,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.requires_grad_,
    torch.Tensor.size,
    torch.Tensor.storage_offset,
    torch.Tensor.stride,
    torch.Tensor.__len__,
}


@dataclass(frozen=True)
class RankGrid:
    """Process groups of an optimizer.

    ranks: all ranks. shards: the ranks over which each state is sharded. replicas: the ranks that hold copies of this
    rank's shard. None means this rank alone.
    """

    ranks: dist.ProcessGroup | None
    shards: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None

    @classmethod
    def of(
        cls,
        process_group: dist.ProcessGroup | None,
        *,
        distributed: dist.ProcessGroup | None,
        redundant: dist.ProcessGroup | None,
    ) -> "RankGrid":
        """Builds the grid from groups passed by the user.

        Raises ValueError if the groups do not form a grid, and TypeError for other objects.
        """
        given = {
            "process_group": process_group,
            "distributed_process_group": distributed,
            "redundant_process_group": redundant,
        }
        for name, group in given.items():
            if group is not None and not isinstance(group, dist.ProcessGroup):
                raise TypeError(f"{name} is {group!r}: must be a torch.distributed.ProcessGroup, or None")
        if not dist.is_initialized():
            return cls(None, None, None)
        ranks = process_group or dist.group.WORLD
        shards = distributed or (ranks if redundant is None else None)
        sizes = group_size(ranks), group_size(shards), group_size(redundant)
        if sizes[0] != sizes[1] * sizes[2]:
            raise ValueError(
                f"process_group has {sizes[0]} ranks, distributed_process_group {sizes[1]} and "
                f"redundant_process_group {sizes[2]}: the first number must be the product of the other two"
            )
        assert ranks is not None
        inside = set(dist.get_process_group_ranks(ranks))
        for name, group in (("distributed_process_group", distributed), ("redundant_process_group", redundant)):
            if group is not None and not inside.issuperset(dist.get_process_group_ranks(group)):
                raise ValueError(
                    f"{name} has ranks {dist.get_process_group_ranks(group)}: all must be in process_group, which "
                    f"has ranks {sorted(inside)}"
                )
        return cls(ranks, shards, redundant)


@dataclass(frozen=True)
class SegmentPlan:
    """Settings that all segments of an optimizer share.

    bucket_bytes: size of a bucket's gradients. average: averages gradients over ranks instead of summing. overlap:
    whether gradients are reduced during backward.
    """

    grid: RankGrid
    bucket_bytes: float
    average: bool
    overlap: bool


class ShardedParams:
    """The optimizer's parameters, in segments once they are registered.

    names, keys: every parameter's name for messages, and the index of its parameter group. groups_of: the bucket groups
    that contain parts of each registered parameter. memory: settings for parameters that `init_params` does not
    register. is_captured: whether all memory is allocated with the first gradients, because a graph may be captured
    later.
    """

    def __init__(self, plan: SegmentPlan, order: CollectiveScheduler, *, memory: AdamMemory, is_captured: bool) -> None:
        self._plan, self._order, self.memory, self._is_captured = plan, order, memory, is_captured
        self._segments: list[_Segment] = []
        self.names: dict[nn.Parameter, str] = {}
        self.keys: dict[nn.Parameter, int] = {}
        self.groups_of: dict[nn.Parameter, list[_ParamAndGradBucketGroup]] = {}
        self._states: dict[FlatParamRange[int], FlatAdam] = {}
        # Views of the summed gradients, built only once, because the memory of sums persists.
        self._sums: dict[FlatParamRange[int], torch.Tensor] = {}
        self._ranges_in: dict[tuple[FlatBuffer, int], list[FlatParamRange[int]]] = {}
        self._writes: list[ParamWrites] = []
        # Of every registered parameter, to detect that its memory was replaced.
        self._addresses: dict[nn.Parameter, int] = {}

    @property
    def groups(self) -> list[_ParamAndGradBucketGroup]:
        """The bucket groups of all registered parameters, one per bucket."""
        return [group for segment in self._segments for group in segment.groups]

    @property
    def states(self) -> dict[FlatParamRange[int], FlatAdam]:
        """All ranges that this rank owns, with their states. Moves parameters into their buffers, see move_in."""
        self.move_in()
        return self._states

    @property
    def sums(self) -> list[torch.Tensor]:
        """Views of the summed gradients of all ranges that this rank owns: [n] each, any float dtype."""
        self.move_in()
        return list(self._sums.values())

    def sums_of(self, params: Iterable[nn.Parameter]) -> list[torch.Tensor]:
        """Returns this rank's reduced gradients of some parameters: [n] each, any float dtype.

        Raises ValueError for a parameter that is not in the optimizer.
        """
        wanted = set(self.check_own(params))
        found = ((one, member) for one in self.states for member in one.params if member.param in wanted)
        return [member.view_of(self._sums[one]) for one, member in found]

    def updates_in(self, bucket: _ParamAndGradBucket) -> dict[int, list[AdamUpdate]]:
        """Returns the operands of a step for this rank's ranges in a bucket, by the index of their parameter group."""
        updates: dict[int, list[AdamUpdate]] = {}
        for one in self._ranges_in.get((bucket.buffer, bucket.layout.index), ()):
            updates.setdefault(one.group, []).append(
                AdamUpdate(self._states[one], self._sums[one], one.target, one.unpadded)
            )
        return updates

    @property
    def grad_use(self) -> GradUse:
        """Whether an update may overwrite gradients that it divides; the same for all buckets and on all ranks."""
        is_plain = all(segment.is_plain for segment in self._segments)
        return GradUse.DIVIDE if is_plain else GradUse.READ

    @property
    def waiting(self) -> list[nn.Parameter]:
        """Parameters that require grad and are not registered yet."""
        return [param for param in self.names if param.requires_grad and param not in self.groups_of]

    @property
    def order(self) -> list[list[int]]:
        """The indices of each segment's parameters, in buffer order."""
        index = {param: place for place, param in enumerate(self.names)}
        return [[index[param] for param in segment.params] for segment in self._segments]

    def in_order(self, order: Sequence[Sequence[int]]) -> list[list[nn.Parameter]]:
        """Returns the parameters in the order of the given indices.

        Returns [] unless these are the indices of all trained parameters.
        """
        params = list(self.names)
        trained = {place for place, param in enumerate(params) if param.requires_grad}
        is_fitting = {place for places in order for place in places} == trained
        return [[params[place] for place in places] for places in order] if is_fitting else []

    @property
    def without_state(self) -> frozenset[int]:
        """The indices of parameters that are not trained."""
        return frozenset(place for place, param in enumerate(self.names) if param not in self.groups_of)

    def owned_ranges(self) -> list[StateRange]:
        """Returns the parameter ranges whose state this rank owns."""
        index = {param: place for place, param in enumerate(self.names)}
        return [StateRange(index[part.param], part, state) for one, state in self.states.items() for part in one.params]

    def persistent_grad(self, param: nn.Parameter) -> torch.Tensor:
        """Returns the persistent gradient memory of a parameter: [*parameter shape], the dtype of the reduction.

        Raises ValueError without contiguous_grad_buffer.
        """
        segment = next(segment for segment in self._segments if any(param is own for own in segment.params))
        if not segment.memory.contiguous_grad_buffer:
            raise ValueError(
                f"grad_buffer_view of {self.names[param]}: contiguous_grad_buffer is False, but must be True for "
                "gradients to have persistent memory"
            )
        return next(buffer.slot_of[param].main_grad for buffer in segment.buffers if param in buffer.slot_of)

    def check_own(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Returns parameters as a list; raises ValueError if any of them is not in the optimizer."""
        given = list(params)
        for place, param in enumerate(given):
            if param not in self.names:
                raise ValueError(
                    f"parameter {place} of the given parameters is not in param_groups: must be a "
                    "parameter of the optimizer"
                )
        return given

    def agreed_order(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Merges the orders in which ranks give parameters into one order, the same on all ranks. Collective."""
        places = {param: place for place, param in enumerate(self.names)}
        by_place = list(self.names)
        orders = gather_objects([places[param] for param in params], self._plan.grid.ranks)
        # A rank's backward may have reached only some of the parameters.
        everywhere = dict.fromkeys(place for order in orders for place in order)
        return [by_place[place] for place in everywhere]

    def register(self, params: Sequence[nn.Parameter], memory: AdamMemory) -> None:
        """Registers parameters as a new segment. params: in buffer order.

        Collective. Raises ValueError on all ranks if parameters or settings differ between ranks.
        """
        if self._plan.grid.ranks is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "the optimizer was built before torch.distributed was initialized, so this rank would train alone: "
                "call init_process_group first"
            )
        self._check_equal([str(memory), *(_describe(self.names[param], param) for param in params)])
        self._check_equal([f"{self.names[param]} with checksum {bits_sync(param):08x}" for param in params])
        for param in params:
            memory.check_param(self.names[param], param)
        if not params:
            return
        name = f"segment {len(self._segments)}"
        named = [(self.names[param], param) for param in params]
        segment = _Segment(named, memory=memory, plan=self._plan, name=name)
        self._segments.append(segment)
        # Parameters without elements are in no bucket.
        self.groups_of.update((param, []) for param in params)
        for param, group in segment.groups_of():
            self.groups_of[param].append(group)
            group.on_arrival = partial(self._mark_arrived, group)
        self._note_addresses(params)
        self._order.resume_accumulation()
        self._order.attach(ChunkSync(segment.groups, nn.ParameterList(params), self._find_change, _nothing))
        if self._is_captured:
            # Without a capture, parameters are moved when states are first used, after full gradients were freed.
            self.move_in()

    def move_in(self) -> None:
        """Moves all registered parameters into their buffers and builds their states, if this has not been done yet."""
        for segment in (segment for segment in self._segments if not segment.is_moved_in):
            states = segment.move_in(self.keys)
            for one in states:
                self._ranges_in.setdefault((one.buffer, one.bucket), []).append(one)
            self._states.update(states)
            self._sums.update((one, one.grad) for one in states)
            self._writes.append(ParamWrites(states))
            self._writes[-1].note()
            self._note_addresses(segment.params)

    def take_changes(self) -> None:
        """Updates masters before a step if other code has written to parameters, such as the model's load_state_dict.

        Writes are detected by the parameters' version counters, which are on the host.
        """
        self.move_in()
        for writes in self._writes:
            writes.take()

    def note_written(self) -> None:
        """Records that parameters currently agree with their masters."""
        for writes in self._writes:
            writes.note()

    def mark_awaited(self) -> None:
        """Makes reads of parameters raise RuntimeError until their gathers are complete."""
        _refuse_reads(param for param, groups in self.groups_of.items() if _is_awaited(groups))

    def _mark_arrived(self, group: _ParamAndGradBucketGroup) -> None:
        states = (ParamState.ARRIVED, ParamState.CURRENT)
        own = [slot.param for slot in group.slots]
        _allow_reads(param for param in own if all(part.param_state in states for part in self.groups_of[param]))

    def _check_equal(self, own: list[str]) -> None:
        ranks = gather_objects(own, self._plan.grid.ranks)
        for rank, other in enumerate(ranks):
            if other == ranks[0]:
                continue
            pairs = zip([*ranks[0], "nothing"], [*other, "nothing"])
            first, here = next(pair for pair in pairs if pair[0] != pair[1])
            raise ValueError(
                f"the optimizer's parameters or settings differ: rank 0 has {first}, rank {rank} has {here}. "
                "Parameters, their values and settings must be equal on all ranks (seed all ranks identically, or "
                "broadcast the model from one rank)"
            )

    def _note_addresses(self, params: Iterable[nn.Parameter]) -> None:
        # Addresses are compared, which does not synchronize with the device.
        self._addresses.update((param, param.data_ptr()) for param in params)

    def _find_change(self) -> str | None:
        """Describes a change to a parameter that would make updates miss it; None if there is no such change."""
        frozen = next((param for param in self._addresses if not param.requires_grad), None)
        if frozen is not None:
            return (
                f"{self.names[frozen]} was frozen after the optimizer registered it: must remain trained; to freeze "
                "it, call release(), freeze it and build a new optimizer"
            )
        # Parameters may not be read before their gather, but their addresses may.
        with DisableTorchFunctionSubclass():
            moved = next((param for param, before in self._addresses.items() if param.data_ptr() != before), None)
        if moved is not None:
            return (
                f"{self.names[moved]} was moved, converted or assigned other data after the optimizer "
                "registered it: copy values into it (.data.copy_), or build the optimizer after the model is on "
                "its device and in its dtype"
            )
        return None


# Parameters that were registered together.


class _Segment:
    """Parameters that were registered together, in buffer order.

    Parameters of one dtype share a buffer, whose buckets may split them. Until move_in, parameters remain in their
    original memory. name: the segment's name, for messages.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, nn.Parameter]],
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
        self.groups = [
            _ParamAndGradBucketGroup(
                [bucket], name=f"{name}, bucket {bucket.layout.index} of {buffer.kind.param_dtype}"
            )
            for buffer in self.buffers
            for bucket in buffer.buckets
        ]
        # Whether torch's kernel, which divides gradients in place, updates the whole segment.
        self.is_plain = all(memory.is_plain(buffer.slots[0].param) for buffer in self.buffers)
        self.is_moved_in = False

    def move_in(self, keys: Mapping[nn.Parameter, int]) -> dict[FlatParamRange[int], FlatAdam]:
        """Moves the parameters into their buffers, and returns this rank's ranges with newly built states.

        keys: index of each parameter's group. Parameters that keep their own memory are not moved.
        """
        self.is_moved_in = True
        states: dict[FlatParamRange[int], FlatAdam] = {}
        for buffer in self.buffers:
            if self.memory.is_flat:
                buffer.move_in()
            form = self.memory.form(buffer.slots[0].param)
            owned = buffer.owned_spans()
            for found in ranges_in(buffer, owned, groups=keys):
                model = buffer.param_data[found.span.start : found.span.end]
                state = FlatAdam.of_form(model if self.memory.is_flat else collect(found.members, model), form)
                one = FlatParamRange(
                    found.members,
                    found.key,
                    model,
                    state.main,
                    buffer,
                    found.span,
                    found.place,
                    found.span.within(owned[found.place]),
                    buffer.grad_of,
                    staged=buffer.buckets[found.place].staged,
                )
                states[one] = state
        return states

    def groups_of(self) -> Iterator[tuple[nn.Parameter, _ParamAndGradBucketGroup]]:
        """Yields each parameter with each bucket group that contains a part of it."""
        return ((slot.param, group) for group in self.groups for slot in group.slots)


def _buffer(
    members: Sequence[tuple[str, nn.Parameter]], memory: AdamMemory, *, plan: SegmentPlan
) -> _ParamAndGradBuffer:
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
        comm_dtype=memory.comm_dtype(first),
        raw_dtype=memory.raw_dtype,
    )
    pool = MessagePool(kind.grad_dtype, device, is_kept=True)

    def storage(bucket: _ParamAndGradBucket) -> BucketLifetimeGrads:
        is_persistent = memory.contiguous_grad_buffer
        return BucketLifetimeGrads(
            bucket, memory=KernelMemory(bucket.grad_data) if is_persistent else pool, total=ShardSum(bucket)
        )

    # Built without parameter memory, because this happens after the first backward, when memory contains full
    # gradients. The second copy of all parameters, which move_in requires, is allocated after gradients are reduced and
    # freed.
    flats = {BufferType.GRAD} if memory.contiguous_grad_buffer else ()
    return _ParamAndGradBuffer.of_kind(kind, members, settings=settings, storage=storage, flats=flats)


def poison(bucket: _ParamAndGradBucket) -> None:
    """Fills stale parameters of a bucket with NaN before the gather, for debugging."""
    # With a message, new values have not been copied to this rank's own part yet.
    own = bucket.owned_part
    current = Span(own.start, own.numel if bucket.staged is None else 0)
    for part in bucket.ranges:
        flat, here = elements_of(part), part.span.intersection(current)
        first = max(0, min(here.start - part.span.start, part.span.numel))
        flat[:first].fill_(float("nan"))
        flat[first + here.numel :].fill_(float("nan"))


def _is_awaited(groups: Iterable[_ParamAndGradBucketGroup]) -> bool:
    """Returns whether parameters have stale values on this rank between an update and the end of their gather."""
    buckets = [bucket for group in groups for bucket in group.buckets]
    return any(bucket.staged is not None or group_size(bucket.settings.group) > 1 for bucket in buckets)


def _describe(name: str, param: nn.Parameter) -> str:
    return f"{name} of shape {tuple(param.shape)}, strides {param.stride()} and {param.dtype}"


def _nothing() -> None:
    """Does nothing when the scheduler resets, because the optimizer's zero_grad drops gradients in param.grad."""


# The guard against stale reads. Between an update and the gather, memory contains old values that kernels cannot
# detect. The parameter's class is therefore replaced, as torch's UninitializedParameter does for parameters without
# memory. The object, its hooks and names remain the same.


class AwaitedParameter(nn.Parameter):
    """A parameter whose gather is not complete. Only its shape, gradient and hooks may be used."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__repr__:
            return f"AwaitedParameter of shape {tuple(args[0].shape)}, {args[0].dtype}: call wait_params to see values"
        is_accessor = func.__name__ in ("__get__", "__set__", "__delete__")
        # type() without an argument returns the dtype; with an argument it converts values.
        is_conversion = func is torch.Tensor.type and len(args) + len(kwargs or {}) > 1
        if is_conversion or (
            func not in _FORM_METHODS and not (is_accessor and func.__self__.__name__ not in _VALUE_ATTRIBUTES)
        ):
            shape = next(tuple(leaf.shape) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
            raise RuntimeError(
                f"a parameter of shape {shape} is accessed (by {func.__name__}) after "
                "DistributedFusedAdam.step and before the gather of its new values, which overlap_param_sync defers to "
                "the forward of its module: call wait_params([parameter]) or param_sync() first"
            )
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _refuse_reads(params: Iterable[nn.Parameter]) -> None:
    """Makes reads of these parameters raise RuntimeError.

    Parameters of a user-defined class keep that class and are not guarded.
    """
    for param in params:
        if type(param) is nn.Parameter:
            param.__class__ = AwaitedParameter


def _allow_reads(params: Iterable[nn.Parameter]) -> None:
    """Makes these parameters readable after _refuse_reads."""
    for param in params:
        if type(param) is AwaitedParameter:
            param.__class__ = nn.Parameter  # type: ignore[assignment]  # same object layout, as torch's own classes do
