"""Buckets of a flat buffer, and the storage of their gradients, gradient sums and gathered parameters.

scheduler.py decides when a bucket's collectives are launched, and collectives.py implements them.
param_and_grad_buffer.py splits buffers into buckets. [Note: backward passes] in launch_sequence.py explains gradients
that are reduced in each backward pass.

A *message buffer* is a flat tensor in which a bucket's gradients or parameters are sent.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.dense_memory import dense_strides, flat_view, in_order_of
from megatron.core.device import Writers, keep_for_current_stream
from megatron.core.device.torch_internals import DisableTorchFunctionSubclass
from megatron.core.distributed.collectives import Handle, ReductionPolicy, gather_shards_, reduce_bucket_, shard_of
from megatron.core.distributed.consistency import GradChecks
from megatron.core.distributed.iteration import CollectiveTrace
from megatron.core.distributed.layout import BucketLayout, FlatBuffer, ParamRange, ParamSlot, Span
from megatron.core.distributed.packed_params import PackedParams
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.tensor_parallel.param_attributes import (
    added_to_main_grad,
    clear_added_to_main_grad,
    has_grad_beside_main_grad,
    set_main_grad,
)
from megatron.core.tensor_parallel.weight_grads import WeightGrad

# Maximum number of closed message buffers that a pool keeps for reuse. With overlap, at most three are open at a time:
# two in flight and one being filled. Without overlap, more may be open; when they are closed, the smallest are freed.
_MOST_SPARE = 3


@dataclass(frozen=True, eq=False)
class BufferSettings:
    """Settings that determine a buffer's buckets and collectives.

    group: the ranks over which gradients are summed and shards are distributed; None means this rank alone.
    bucket_size: see DistributedDataParallelConfig. is_sharded: whether each rank owns one shard of every bucket instead
    of the whole bucket. scale: factor applied to every gradient before its reduction. fp32_patterns: name patterns, or
    `all`, of parameters whose gradients accumulate in fp32 although a narrower dtype is reduced. split: whether bucket
    boundaries may split parameters. comm_dtype: all-gather dtype of parameters; None means the parameters' dtype.
    raw_dtype: the integer dtype to which gathered parameters are reinterpreted for sending; None sends them in
    comm_dtype. packs: whether all parameters are weights of experts in 8 bits, and are gathered in 8 bits.
    """

    group: dist.ProcessGroup | None
    bucket_size: int | None
    num_buckets: int | None = None
    is_sharded: bool = False
    scale: float = 1.0
    policy: ReductionPolicy = ReductionPolicy()
    high_busbw: bool = False
    fp32_patterns: tuple[str, ...] = ()
    split: bool = False
    comm_dtype: torch.dtype | None = None
    raw_dtype: torch.dtype | None = None
    packs: bool = False


class _ParamAndGradBucket:
    """Adjacent parameters of a buffer that are reduced and gathered together.

    param_data, grad_data: [N], views of the buffer's flat tensors. owned: the span of the buffer that this rank's
    optimizer updates; owned_part: the same span, relative to the bucket's start. ranges: the parts of parameters that
    lie in this bucket, with spans relative to its start; empty parameters are omitted. grads: the gradient storage,
    built by `storage`. staged: the message buffer in which parameters are gathered; None if parameters are gathered in
    place. packed: the message in which they are gathered if weights are gathered in 8 bits, else None. name: the bucket
    group's name, for error messages. trace: records the bucket's collectives; None if the bucket does not exist on all
    ranks of the stage.
    """

    def __init__(
        self,
        buffer: FlatBuffer,
        layout: BucketLayout,
        slots: list[ParamSlot],
        *,
        settings: BufferSettings,
        storage: "Callable[[_ParamAndGradBucket], GradStorage]",
    ) -> None:
        self.buffer, self.layout, self.slots, self.settings = buffer, layout, slots, settings
        self.param_data = buffer.param_data[layout.span.start : layout.span.end]
        self.grad_data = buffer.grad_data[layout.span.start : layout.span.end]
        self.owned = layout.span
        if settings.is_sharded:
            self.owned = buffer.layout.shard(layout.index, group_rank(settings.group))
        self.owned_part = Span(self.owned.start - layout.span.start, self.owned.numel)
        parts = ((slot, slot.span.intersection(layout.span)) for slot in slots)
        self.ranges = [
            ParamRange(
                slot.name, slot.param, Span(part.start - layout.span.start, part.numel), part.start - slot.span.start
            )
            for slot, part in parts
            if part.numel
        ]
        # Attributes that Megatron's users read.
        self.params_list = [slot.param for slot in slots]
        self.params = set(self.params_list)
        self.params_with_extra_main_grads = [slot.param for slot in slots if slot.main_grad is not slot.comm_view]
        self.bucket_id, self.offset, self.numel_unpadded = layout.index, layout.span.start, layout.numel_unpadded
        self.param_index_map = {slot.param: (slot.span.start, slot.span.end, layout.index) for slot in slots}
        self.gradient_scaling_factor = settings.scale
        self.name = ""
        self.trace: CollectiveTrace | None = None
        self.staged: StagedParams | None = StagedParams(self)
        self.packed: PackedParams | None = None
        if settings.packs and group_size(settings.group) > 1:
            self.packed = PackedParams(self.ranges, group=settings.group, numel=layout.span.numel)
        self.grads = storage(self)

    def move_in(self, param_data: torch.Tensor) -> None:
        """Records that the parameters are now views of `param_data`: [N], the parameters' dtype."""
        self.param_data = param_data
        if self.settings.comm_dtype in (None, param_data.dtype):
            self.staged = None

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.slots[0].param.device

    def reduced_grad(self) -> torch.Tensor:
        """Returns this rank's part of the reduced gradients: [owned elements], gradient dtype.

        See GradStorage.owned_grad.
        """
        return self.grads.owned_grad()

    def reduce(self, flat: torch.Tensor, *, into: torch.Tensor | None = None) -> Handle:
        """Launches the reduction of `flat` over the ranks. Collective.

        flat: [N], floating point. into: see reduce_bucket_.
        """
        settings = self.settings
        if self.trace is not None:
            op = "reduce-scatter" if settings.is_sharded else "all-reduce"
            self.trace.record(op=op, group=settings.group, flat=flat, bucket=self.name)
        return reduce_bucket_(flat, settings.group, sharded=settings.is_sharded, policy=settings.policy, into=into)

    def gather(self, *, as_they_are: bool = False) -> Handle:
        """Launches the gather of the parameters, to which each rank contributes its shard. Collective.

        as_they_are: also if weights are gathered in 8 bits; complete_gather is not needed then.
        """
        if self.packed is not None:
            flat = self.param_data if as_they_are else self.packed.message(self.param_data)
        else:
            flat = self.param_data if self.staged is None else self.staged.message()
        if self.settings.raw_dtype is not None:
            flat = flat.view(self.settings.raw_dtype)
        if self.trace is not None:
            self.trace.record(op="all-gather", group=self.settings.group, flat=flat, bucket=self.name)
        return gather_shards_(flat, self.settings.group)

    def complete_gather(self) -> None:
        """Copies gathered parameters into the buffer, unless they were gathered in place."""
        if self.packed is not None:
            self.packed.unpack(self.param_data)
        elif self.staged is not None:
            self.staged.unpack()


# Gradients.


class GradState(Enum):
    """State of a bucket's gradients within an iteration."""

    COLLECTING = "collecting"
    IN_FLIGHT = "in flight"
    REDUCED = "reduced"


@dataclass(frozen=True)
class _Reduction:
    """A reduction in flight.

    flat: the tensor that is summed, [bucket elements], the gradients' dtype. into: the destination of this rank's part
    of the sum, [owned elements], same dtype; None means in place in `flat`.
    """

    flat: torch.Tensor
    handle: Handle
    into: torch.Tensor | None = None


class GradStorage(ABC):
    """Storage of one bucket's gradients: the memory in which they accumulate, and the memory of their sum over ranks.

    checks: applied to gradients before they are reduced; None disables checking.
    """

    def __init__(self, bucket: _ParamAndGradBucket, *, checks: GradChecks | None = None) -> None:
        self._bucket, self._checks = bucket, checks
        self.state = GradState.COLLECTING
        self._writers = Writers(bucket.device)
        # Slots of the parameters with a gradient in this iteration. Python code computes the hash of a tensor, but not
        # of a slot.
        self._with_grad: set[ParamSlot] = set()

    # Methods in the order in which an iteration calls them.

    @abstractmethod
    def accumulate(self, param: nn.Parameter) -> None:
        """Accumulates `param.grad`, if any."""

    @abstractmethod
    def add(self, param: nn.Parameter, new: WeightGrad) -> None:
        """Computes a deferred weight gradient and adds it to main_grad; `accumulate` must follow."""

    @abstractmethod
    def mark_added(self, param: nn.Parameter) -> None:
        """Records that the caller has added an unscaled gradient to main_grad."""

    def missing(self) -> list[str]:
        """Returns the names of the parameters without a gradient in this iteration."""
        return [slot.name for slot in self._bucket.slots if slot not in self._with_grad]

    @property
    @abstractmethod
    def is_late(self) -> bool:
        """Whether gradients were added after the most recent reduction was launched."""

    @property
    @abstractmethod
    def is_moving(self) -> bool:
        """Whether any gradients are being reduced and therefore cannot be scaled now."""

    @abstractmethod
    def launch(self, *, is_last: bool) -> None:
        """Launches the reduction of the gradients. Collective.

        is_last: whether this is the iteration's last backward pass.
        """

    @abstractmethod
    def launch_second_round(self, *, is_last: bool) -> None:
        """Launches the reduction of late gradients. Collective; all ranks call it if any rank has a late gradient."""

    @abstractmethod
    def advance(self) -> None:
        """Starts the second stage of each reduction, so that second stages of several buckets overlap. Collective."""

    @abstractmethod
    def advance_early(self) -> bool:
        """Starts second stages that are ready, without blocking; returns whether nothing is left to start early."""

    @abstractmethod
    def advance_second_round(self) -> None:
        """Starts the second stage of the second round's reduction, after `advance` of all buckets. Collective."""

    @abstractmethod
    def complete(self) -> None:
        """Waits for all reductions."""

    @abstractmethod
    def owned_grad(self) -> torch.Tensor:
        """Returns this rank's part of the reduced gradients: [owned elements], the gradients' dtype.

        The tensor is a view of persistent memory. Without persistent memory, ownership moves to the caller, once per
        iteration.
        """

    @abstractmethod
    def copy_from_comm(self) -> None:
        """Copies reduced gradients, including changes made by hooks, to each main_grad with a wider dtype."""

    @abstractmethod
    def works(self) -> list[dist.Work]:
        """Returns torch's work handles of the reductions in flight, for observers."""

    def late_works(self) -> list[dist.Work]:
        """Returns torch's work handles of the second round's reductions, for observers."""
        return self.works()

    def free_spare(self) -> None:  # noqa: B027
        """Frees memory that is kept between iterations for reuse, if any."""

    # Between iterations.

    @abstractmethod
    def abandon(self) -> None:
        """Ends reductions in flight and discards their results. Collective."""

    @abstractmethod
    def reset(self) -> None:
        """Begins an iteration. No reduction may be in flight.

        The current stream waits for gradients that an aborted iteration may still be writing. The streams that write
        them are then forgotten, because a reduction of a later iteration, which may be under graph capture, must not
        wait for them.
        """

    @abstractmethod
    def zero(self) -> None:
        """Sets all gradients to zero."""

    @abstractmethod
    def scale_(self, factor: float | torch.Tensor) -> None:
        """Multiplies all gradients by `factor`, a number or a tensor [] of any float dtype."""

    @property
    @abstractmethod
    def persistent(self) -> list[torch.Tensor]:
        """Gradient memory that persists between steps: [n] each, the gradients' dtype."""

    # Storages that are reduced in each backward pass, see [Note: backward passes] in launch_sequence.py.

    @property
    def can_be_released(self) -> bool:
        """Whether the sum is complete, so that hooks and an optimizer in backward can use it."""
        return False

    @property
    def is_closed(self) -> bool:
        """Whether the sum accepts no further gradients in this iteration."""
        return False

    @property
    def reuses_memory(self) -> bool:
        """Whether all backward passes accumulate gradients in the same memory."""
        return False

    def hold(self) -> None:
        """Keeps the sum until the next iteration instead of releasing it, so that late gradients can be added."""
        raise AssertionError(f"{self._bucket.name} is reduced once per iteration")

    def settle(self) -> None:
        """Waits for the oldest reduction, if any, and adds it to the sum."""
        raise AssertionError(f"{self._bucket.name} is reduced once per iteration")

    def resume_accumulation(self) -> None:
        """Allows further gradients to accumulate into a reduced sum."""
        raise AssertionError(f"{self._bucket.name} is reduced once per iteration")


class PersistentGrads(GradStorage):
    """Gradients that accumulate in the bucket's grad_data, which persists between steps, and are reduced in place.

    Each parameter's `main_grad` is a view of grad_data or, for parameters in fp32_patterns, a wider tensor that is
    rounded into grad_data before the reduction. A gradient that becomes ready while the bucket is in flight is late and
    is kept for a second round of reductions.
    """

    def __init__(self, bucket: _ParamAndGradBucket, *, checks: GradChecks | None = None) -> None:
        super().__init__(bucket, checks=checks)
        self._scale = bucket.settings.scale
        self._slot_of = {slot.param: slot for slot in bucket.slots}
        self._owned = bucket.grad_data[bucket.owned_part.start : bucket.owned_part.end]
        self._wider = [slot for slot in bucket.slots if slot.main_grad is not slot.comm_view]
        # Slots of parameters to whose main_grad unscaled gradients were added.
        self._unscaled: set[ParamSlot] = set()
        # Slots whose accumulated gradient is checked after each microbatch.
        self._probed = {slot for slot in bucket.slots if checks is not None and checks.looks_at(slot.param)}
        # Late gradients, in the order in which they became ready.
        self._late: list[tuple[ParamSlot, torch.Tensor]] = []
        # The reduction of the first round, then of the second.
        self._rounds: list[_Reduction] = []
        for slot in bucket.slots:
            set_main_grad(slot.param, slot.main_grad)

    def accumulate(self, param: nn.Parameter) -> None:
        """Calls accumulate_at for the parameter's slot."""
        self.accumulate_at(self._slot_of[param])

    def accumulate_at(self, slot: ParamSlot) -> None:
        """Adds the scaled `param.grad` of a slot to main_grad and frees `param.grad`.

        The first gradient of an iteration overwrites main_grad; later gradients are added. If a kernel has already
        added a gradient to main_grad, `param.grad` holds only the gradients of the parameter's other uses.
        """
        param = slot.param
        grad = plain_grad(param)
        # Freed immediately, so that the next gradient reuses memory that is still in the cache.
        param.grad = None
        if self.state is not GradState.COLLECTING:
            self._accumulate_late(slot, grad)
            return
        self._writers.note()
        if added_to_main_grad(param):
            self._mark_unscaled(slot)
            if grad is not None and has_grad_beside_main_grad(param):
                slot.main_grad.add_(grad)
        elif grad is not None:
            scale = 1.0 if slot in self._unscaled else self._scale
            accumulate_into(slot.main_grad, grad, scale=scale, is_first=slot not in self._with_grad)
        self._with_grad.add(slot)
        if slot in self._probed:
            assert self._checks is not None, "only checks have probes"
            self._checks.measure_sum(slot.name, slot.main_grad)

    def add(self, param: nn.Parameter, new: WeightGrad) -> None:
        """Calls add_at for the parameter's slot."""
        self.add_at(self._slot_of[param], new)

    def add_at(self, slot: ParamSlot, new: WeightGrad) -> None:
        """Computes a deferred weight gradient and adds it, scaled, to main_grad.

        A late gradient is kept for the second round of reductions.
        """
        if self.state is not GradState.COLLECTING:
            self._keep_late(slot, new.compute())
            return
        self._writers.note()
        scale = 1.0 if slot in self._unscaled else self._scale
        is_zero = slot not in self._with_grad and not added_to_main_grad(slot.param)
        new.add_to(slot.main_grad, scale=scale, is_zero=is_zero)
        self._with_grad.add(slot)

    def mark_added(self, param: nn.Parameter) -> None:
        slot = self._slot_of[param]
        if self.state is not GradState.COLLECTING:
            raise RuntimeError(
                f"register_grad_ready: a gradient was added to main_grad of {slot.name} while it was being reduced"
            )
        self._writers.note()
        self._mark_unscaled(slot)
        self._with_grad.add(slot)

    @property
    def is_late(self) -> bool:
        return bool(self._late)

    @property
    def is_moving(self) -> bool:
        return self.state is GradState.IN_FLIGHT

    def launch(self, *, is_last: bool) -> None:
        self._writers.join()
        if self._scale != 1.0:
            for slot in self._unscaled:
                slot.main_grad.mul_(self._scale)
        if self._checks is not None:
            self._checks.measure([(slot.name, slot.main_grad) for slot in self._bucket.slots])
        self._reduce_grad_data()
        self.state = GradState.IN_FLIGHT

    def launch_second_round(self, *, is_last: bool) -> None:
        for _, grad in self._late:
            keep_for_current_stream(grad)
        if self._bucket.settings.policy.can_repeat:
            self._discard()
            # Added one by one in the order in which they became ready, so that the sum is bit-identical to a run in
            # which they were not late.
            for slot, grad in self._late:
                slot.main_grad.add_(grad, alpha=self._scale)
            self._reduce_grad_data()
            return
        flat, first = torch.zeros_like(self._bucket.grad_data), self._bucket.layout.span.start
        for slot, grad in self._late:
            start = slot.span.start - first
            flat[start : start + slot.span.numel].add_(grad.reshape(-1), alpha=self._scale)
        self._rounds.append(_Reduction(flat, self._bucket.reduce(flat)))

    def advance(self) -> None:
        for one in self._rounds[:1]:
            one.handle.advance()

    def advance_early(self) -> bool:
        return all(one.handle.advance_early() for one in self._rounds[:1])

    def advance_second_round(self) -> None:
        for one in self._rounds[1:]:
            one.handle.advance()

    def complete(self) -> None:
        for one in self._rounds:
            one.handle.wait()
        for late in self._rounds[1:]:
            self._bucket.grad_data.add_(late.flat)
        self._drop()
        self.state = GradState.REDUCED
        self.copy_from_comm()

    def owned_grad(self) -> torch.Tensor:
        """Returns a view of this rank's part of grad_data: [owned elements], the gradients' dtype."""
        return self._owned

    def works(self) -> list[dist.Work]:
        return [work for one in self._rounds[:1] for work in one.handle.works()]

    def late_works(self) -> list[dist.Work]:
        # A reduction that was repeated as a whole has only one round.
        return [work for one in self._rounds[1:] or self._rounds for work in one.handle.works()]

    def abandon(self) -> None:
        if self._bucket.settings.policy.can_repeat:
            self._discard()
        else:
            self.advance()
            for one in self._rounds[:1]:
                one.handle.wait()
        self._drop()
        self.state = GradState.REDUCED

    def reset(self) -> None:
        self._writers.join()
        self._drop()
        self.state = GradState.COLLECTING

    def zero(self) -> None:
        self._bucket.grad_data.zero_()
        for slot in self._wider:
            slot.main_grad.zero_()
        for slot in self._unscaled:
            clear_added_to_main_grad(slot.param)
        self._with_grad.clear()
        self._unscaled.clear()

    def scale_(self, factor: float | torch.Tensor) -> None:
        """Multiplies grad_data and each main_grad by `factor`, a number or a tensor [] of any float dtype."""
        self._bucket.grad_data.mul_(factor)
        for slot in self._wider:
            slot.main_grad.mul_(factor)
        if self.state is GradState.REDUCED:
            self.copy_from_comm()

    def copy_from_comm(self) -> None:
        for slot in self._wider:
            slot.copy_from_comm()

    @property
    def persistent(self) -> list[torch.Tensor]:
        """The bucket's grad_data: [N], the gradients' dtype."""
        return [self._bucket.grad_data]

    # Internals.

    def _reduce_grad_data(self) -> None:
        for slot in self._wider:
            slot.comm_view.copy_(slot.main_grad)
        flat = self._bucket.grad_data
        self._rounds.append(_Reduction(flat, self._bucket.reduce(flat)))

    def _accumulate_late(self, slot: ParamSlot, grad: torch.Tensor | None) -> None:
        if added_to_main_grad(slot.param):
            raise RuntimeError(
                f"a kernel added a gradient to main_grad of {slot.name} while it was being reduced: wrap all "
                "microbatches but the last in no_sync, or disable overlap_grad_reduce"
            )
        if grad is not None:
            # A copy, because a CUDA graph may be about to overwrite the original.
            self._keep_late(slot, grad.clone())

    def _keep_late(self, slot: ParamSlot, grad: torch.Tensor) -> None:
        self._late.append((slot, grad))
        if self._checks is not None:
            self._checks.measure([(slot.name, grad)])

    def _mark_unscaled(self, slot: ParamSlot) -> None:
        # Autograd's gradients are already scaled, and a sum of both kinds can no longer be scaled correctly.
        if slot in self._with_grad and slot not in self._unscaled and self._scale != 1.0:
            raise RuntimeError(
                f"parameter {slot.name} has both autograd gradients and gradients added to main_grad in one "
                "iteration: they must all be of the same kind"
            )
        self._unscaled.add(slot)

    def _discard(self) -> None:
        for one in self._rounds:
            one.handle.discard()
        self._rounds.clear()

    def _drop(self) -> None:
        self._late.clear()
        self._rounds.clear()


class BucketLifetimeGrads(GradStorage):
    """Gradients whose memory lives from the bucket's first gradient to the end of its reduction.

    In a backward pass:

    1. The first gradient opens a message buffer, in which the bucket's gradients accumulate.
    2. `launch` sends the message buffer. Further gradients open a new one.
    3. `settle` adds this rank's part of the result to the sum of all backward passes and closes the message buffer.

    memory: allocates the message buffers. total: the sum of all backward passes.
    """

    def __init__(
        self,
        bucket: _ParamAndGradBucket,
        *,
        memory: "MessagePool | KernelMemory",
        total: "ShardSum | ReleasedSum",
        checks: GradChecks | None = None,
    ) -> None:
        super().__init__(bucket, checks=checks)
        self._memory, self._total = memory, total
        self._added_scale, self._sent_scale = memory.split_scale(bucket.settings.scale)
        self._slot_of = {slot.param: slot for slot in bucket.slots}
        self._range_of = {part.param: part for part in bucket.ranges}
        # Memory format of each parameter that is entirely in the bucket; gradients may have a different format.
        self._strides_of = {
            part.param: dense_strides(part.param) for part in bucket.ranges if part.span.numel == part.param.numel()
        }
        self._gaps = _gaps(bucket.layout.span.numel, [part.span for part in bucket.ranges])
        # The open message buffer, and the parameters whose gradients it contains.
        self._message: torch.Tensor | None = None
        self._filled: set[nn.Parameter] = set()
        self._in_flight: deque[_Reduction] = deque()

    @property
    def num_bytes(self) -> int:
        """Total size of the bucket's gradients in bytes: accumulating, in flight and reduced."""
        held = [self._message, self._total.sum, *(one.flat for one in self._in_flight)]
        return sum(one.untyped_storage().nbytes() for one in held if one is not None)

    def accumulate(self, param: nn.Parameter) -> None:
        """Adds `param.grad` to the bucket. The attribute remains set, because other buckets may need parts of it."""
        new = plain_grad(param)
        if new is None:
            return
        part = self._range_of.get(param)
        # A parameter without elements has no range.
        if part is not None:
            place, strides = part.view_of(self._open()), self._strides_of.get(param)
            if strides is not None:
                place = place.as_strided(param.shape, strides, place.storage_offset())
            else:
                new = in_order_of(new, param)[part.start : part.start + part.span.numel]
            accumulate_into(place, new, scale=self._added_scale, is_first=param not in self._filled)
        self._mark_filled(param)

    def add(self, param: nn.Parameter, new: WeightGrad) -> None:
        raise AssertionError(f"{self._bucket.name} has no main_grad to add to")

    def mark_added(self, param: nn.Parameter) -> None:
        if not self._memory.is_reused:
            raise RuntimeError(f"register_grad_ready: {self._bucket.name} has no persistent gradients to add to")
        self._open()
        self._mark_filled(param)

    @property
    def is_late(self) -> bool:
        """Whether any gradient was added since the last launch."""
        return bool(self._filled)

    @property
    def is_moving(self) -> bool:
        """Whether gradients were added in this iteration and are not all reduced yet."""
        return bool(self._with_grad) and self.state is not GradState.REDUCED

    def launch(self, *, is_last: bool) -> None:
        self._writers.join()
        message = self._open()
        for param, part in self._range_of.items():
            if param not in self._filled:
                part.view_of(message).zero_()
        for gap in self._gaps:
            message[gap].zero_()
        if self._sent_scale != 1.0:
            message.mul_(self._sent_scale)
        if self._checks is not None:
            self._checks.measure([(part.name, part.view_of(message)) for part in self._range_of.values()])
        into = self._total.place_for(is_first=not self._in_flight, is_last=is_last)
        self._in_flight.append(_Reduction(message, self._bucket.reduce(message, into=into), into))
        self._message = None
        self._filled.clear()

    def settle(self) -> None:
        if not self._in_flight:
            return
        done = self._in_flight.popleft()
        done.handle.wait()
        # The gradient may have been allocated on another stream, which could reuse the memory while this stream still
        # reads it.
        keep_for_current_stream(done.flat)
        settings = self._bucket.settings
        self._total.add(shard_of(done.flat, settings.group) if settings.is_sharded else done.flat, into=done.into)
        self._memory.close(done.flat)

    @property
    def can_be_released(self) -> bool:
        return self._total.is_closed and not self._in_flight

    @property
    def is_closed(self) -> bool:
        return self._total.is_closed

    @property
    def reuses_memory(self) -> bool:
        return self._memory.is_reused

    def hold(self) -> None:
        self._total.hold()

    def launch_second_round(self, *, is_last: bool) -> None:
        if self._message is not None:
            keep_for_current_stream(self._message)
        self.launch(is_last=is_last)

    def advance(self) -> None:
        for one in self._in_flight:
            one.handle.advance()

    def advance_early(self) -> bool:
        return all(one.handle.advance_early() for one in self._in_flight)

    def advance_second_round(self) -> None:
        """Does nothing, because `advance` covers the second round."""

    def complete(self) -> None:
        while self._in_flight:
            self.settle()
        self._total.complete()
        self.state = GradState.REDUCED

    def owned_grad(self) -> torch.Tensor:
        """Returns the sum of all backward passes: [owned elements], the gradients' dtype."""
        return self._total.owned_grad()

    def copy_from_comm(self) -> None:
        """Does nothing, because there is no main_grad."""

    def resume_accumulation(self) -> None:
        self.state = GradState.COLLECTING

    def free_spare(self) -> None:
        self._memory.free_spare()

    def works(self) -> list[dist.Work]:
        return [work for one in self._in_flight for work in one.handle.works()]

    def abandon(self) -> None:
        self._drop()
        self.state = GradState.REDUCED

    def reset(self) -> None:
        self._writers.join()
        self._drop()
        self.state = GradState.COLLECTING

    def zero(self) -> None:
        """Does nothing, because `reset` has dropped all gradients."""

    def scale_(self, factor: float | torch.Tensor) -> None:
        """Multiplies the sum by `factor`, a number or a tensor [] of any float dtype."""
        self._total.scale_(factor)

    @property
    def persistent(self) -> list[torch.Tensor]:
        """Persistent memory of the sum and of the gradients: [n] each, the gradients' dtype."""
        return [*self._total.persistent, *self._memory.persistent]

    # Internals.

    def _open(self) -> torch.Tensor:
        while self._message is None:
            self._message = self._memory.open(self._bucket.layout.span.numel)
            if self._message is None:
                # The only message buffer is in flight, because a parameter has a second gradient in the same backward
                # pass.
                self.settle()
        return self._message

    def _mark_filled(self, param: nn.Parameter) -> None:
        self._writers.note()
        self._filled.add(param)
        self._with_grad.add(self._slot_of[param])

    def _drop(self) -> None:
        for one in self._in_flight:
            one.handle.wait()
            self._memory.close(one.flat)
        self._in_flight.clear()
        if self._message is not None:
            self._memory.close(self._message)
        self._message = None
        self._memory.reset()
        self._total.reset()
        self._filled.clear()
        self._with_grad.clear()


class MessagePool:
    """Allocates message buffers of one dtype on one device. On a CPU, closed message buffers are reused.

    On a CPU, freed memory of this size returns to the operating system, which zeroes the pages of the next allocation.
    This costs a tenth of a step. On an accelerator nothing is pooled here, because torch's allocator caches freed
    memory for each stream.

    is_kept: whether a few closed message buffers are kept on a CPU, also between steps. The caller must then close
    every message buffer.
    """

    is_reused = False
    persistent: Sequence[torch.Tensor] = ()

    def __init__(self, dtype: torch.dtype, device: torch.device, *, is_kept: bool) -> None:
        self._dtype, self._device = dtype, device
        self._is_kept = is_kept and device.type == "cpu"
        # Closed message buffers, in ascending order of size.
        self._spare: list[torch.Tensor] = []
        # Open message buffers by address, whole; the view that `open` returned may be shorter.
        self._in_use: dict[int, torch.Tensor] = {}

    def split_scale(self, scale: float) -> tuple[float, float]:
        """Returns the factors by which gradients are scaled when they are added and when they are sent."""
        return scale, 1.0

    def open(self, numel: int) -> torch.Tensor:
        """Returns an uninitialised message buffer: [numel], the pool's dtype."""
        place = next((place for place, spare in enumerate(self._spare) if spare.numel() >= numel), None)
        if place is None:
            # All spare message buffers are too small. The smallest is freed in exchange for the new one, which can be
            # reused later.
            del self._spare[:1]
            whole = torch.empty(numel, dtype=self._dtype, device=self._device)
        else:
            whole = self._spare.pop(place)
        if self._is_kept:
            self._in_use[whole.data_ptr()] = whole
        return whole[:numel]

    def close(self, message: torch.Tensor) -> None:
        """Returns a message buffer to the pool; ignores tensors that the pool did not allocate.

        message: [n], the pool's dtype.
        """
        whole = self._in_use.pop(message.data_ptr(), None)
        if whole is not None:
            self._spare = sorted([*self._spare, whole], key=torch.Tensor.numel)[-_MOST_SPARE:]

    def reset(self) -> None:
        """Does nothing, because buckets close their message buffers themselves."""

    def free_spare(self) -> None:
        """Frees the closed message buffers that are kept for reuse."""
        self._spare.clear()


class KernelMemory:
    """Single persistent message buffer of a bucket, to which kernels add unscaled gradients.

    The message buffer is zero before each backward pass. message: [bucket elements], the gradients' dtype.
    """

    is_reused = True

    def __init__(self, message: torch.Tensor) -> None:
        self._message, self._is_open = message, False
        self.persistent = [message]

    def split_scale(self, scale: float) -> tuple[float, float]:
        """Returns the factors by which gradients are scaled when they are added and when the message buffer is sent."""
        return 1.0, scale

    def open(self, numel: int) -> torch.Tensor | None:
        """Returns the message buffer: [numel], the gradients' dtype; None while it is in flight."""
        if self._is_open:
            return None
        self._is_open = True
        return self._message

    def close(self, message: torch.Tensor) -> None:
        """Zeroes the message buffer after its reduction; message: [numel], the gradients' dtype."""
        self._is_open = False
        message.zero_()

    def free_spare(self) -> None:
        """Does nothing, because the message buffer is persistent."""

    def reset(self) -> None:
        """Zeroes gradients that kernels may have added."""
        self._is_open = False
        self._message.zero_()


class ShardSum:
    """Sum of the gradients of all backward passes, in persistent memory: [owned elements], the gradients' dtype."""

    is_closed = False

    def __init__(self, bucket: _ParamAndGradBucket) -> None:
        self._is_sharded = bucket.settings.is_sharded
        self.sum = torch.zeros(bucket.owned.numel, dtype=bucket.grad_data.dtype, device=bucket.device)
        self.persistent = [self.sum]
        # Whether anything was added in this iteration.
        self._has_sum = False

    def place_for(self, *, is_first: bool, is_last: bool) -> torch.Tensor | None:
        """Returns the destination of a reduction, [owned elements], the gradients' dtype; None means in place."""
        return self.sum if self._is_sharded and is_first and not self._has_sum else None

    def add(self, total: torch.Tensor, *, into: torch.Tensor | None) -> None:
        """Adds the result of a reduction to the sum.

        total: the result, [owned elements], the gradients' dtype. into: the destination that `place_for` returned.
        """
        if self._has_sum:
            self.sum.add_(total)
        elif into is None:
            self.sum.copy_(total)
        self._has_sum = True

    def hold(self) -> None:
        """Does nothing, because the sum is always kept."""

    def complete(self) -> None:
        """Ends an iteration; sets the sum to zero if there was no backward pass."""
        if not self._has_sum:
            self.sum.zero_()
        self._has_sum = True

    def owned_grad(self) -> torch.Tensor:
        """Returns the sum: [owned elements], the gradients' dtype."""
        return self.sum

    def scale_(self, factor: float | torch.Tensor) -> None:
        """Multiplies the sum by `factor`, a number or a tensor [] of any float dtype."""
        self.sum.mul_(factor)

    def reset(self) -> None:
        """Begins an iteration."""
        self._has_sum = False


class ReleasedSum:
    """A sum that is released to hooks and an optimizer in backward, and freed after they have used it.

    The last backward pass of an iteration completes the sum and leaves it in the message buffer of that pass, without a
    copy. Later gradients can be added to the sum only after `hold`, which keeps it until the end of the iteration.
    """

    persistent: Sequence[torch.Tensor] = ()

    def __init__(self, bucket: _ParamAndGradBucket) -> None:
        self._bucket = bucket
        self.sum: torch.Tensor | None = None
        self._has_sum = self._is_held = self._is_last_sent = False

    @property
    def is_closed(self) -> bool:
        """Whether the reduction of the last backward pass was launched and the sum is not held."""
        return self._is_last_sent and not self._is_held

    def place_for(self, *, is_first: bool, is_last: bool) -> torch.Tensor | None:
        """Returns the destination of a reduction, [owned elements], the gradients' dtype; None means in place."""
        self._is_last_sent = is_last
        # The last backward pass leaves the sum in its message buffer.
        if not self._bucket.settings.is_sharded or self._has_sum or not is_first or (is_last and not self._is_held):
            return None
        bucket = self._bucket
        return torch.empty(bucket.owned.numel, dtype=bucket.grad_data.dtype, device=bucket.device)

    def add(self, total: torch.Tensor, *, into: torch.Tensor | None) -> None:
        """Adds the result of a reduction to the sum.

        total: the result, [owned elements], the gradients' dtype. into: the destination that `place_for` returned.
        """
        if self._has_sum:
            assert self.sum is not None, "a reduction was added to a sum that was already released"
            self.sum.add_(total)
        elif into is not None:
            self.sum = into
        else:
            # A held shard is cloned. As a view it would keep the whole message buffer alive, while more are opened.
            self.sum = total.clone() if self._is_held and self._bucket.settings.is_sharded else total
        self._has_sum = True

    def hold(self) -> None:
        """Keeps the sum until the end of the iteration, unless it was already released."""
        self._is_held = self.sum is not None or not self._has_sum

    def complete(self) -> None:
        """Ends an iteration."""
        assert self._has_sum, "every iteration has a last backward pass"

    def owned_grad(self) -> torch.Tensor:
        """Returns the sum and passes its ownership to the caller: [owned elements], the gradients' dtype."""
        assert self.sum is not None, f"{self._bucket.name} was already released, or is not reduced yet"
        released, self.sum = self.sum, None
        return released

    def scale_(self, factor: float | torch.Tensor) -> None:
        """Raises RuntimeError, because hooks have already received the sum.

        factor: a number or a tensor [] of any float dtype.
        """
        raise RuntimeError(
            "scale_gradients was called with DistributedDataParallelConfig.release_gradients: hooks and the optimizer "
            f"have already received the gradient of {self._bucket.buffer.slots[0].name}; scale the loss instead"
        )

    def reset(self) -> None:
        """Begins an iteration."""
        self.sum = None
        self._has_sum = self._is_held = self._is_last_sent = False


def plain_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Returns `param.grad` as a detached, strided tensor: [*parameter shape], the parameter's dtype; or None."""
    grad = param.grad
    if grad is None or not (grad.requires_grad or grad.is_sparse):
        return grad
    # backward(create_graph=True) leaves a graph, which would extend through main_grad; embeddings may leave sparse
    # gradients.
    grad = grad.detach()
    return grad.to_dense() if grad.is_sparse else grad


def accumulate_into(place: torch.Tensor, new: torch.Tensor, *, scale: float, is_first: bool) -> None:
    """Adds `scale` times a gradient to its destination, or overwrites the destination with it if is_first is set.

    place: the destination. new: the gradient. Both [*shape], any float dtypes.
    """
    if not is_first:
        place.add_(new, alpha=scale)
    elif new.dtype == place.dtype:
        torch.mul(new, scale, out=place)
    else:
        place.copy_(new)
        # On the meta device the scaling always runs, so that a plan counts it: a traced step may have fewer ranks than
        # the real run, and then its scale is 1.
        if scale != 1.0 or place.is_meta:
            # torch.mul(new, scale) would first round its result to the narrower dtype.
            place.mul_(scale)


def _gaps(numel: int, spans: Iterable[Span]) -> list[slice]:
    """Returns the ranges of a bucket that belong to no parameter."""
    gaps, position = [], 0
    for span in sorted(spans, key=lambda span: span.start):
        gaps.append(slice(position, span.start))
        position = span.end
    gaps.append(slice(position, numel))
    return [gap for gap in gaps if gap.start < gap.stop]


# Parameters.


class StagedParams:
    """Gathers parameters in a message buffer, possibly in a narrower dtype, and copies them into the flat buffer."""

    def __init__(self, bucket: _ParamAndGradBucket) -> None:
        self._bucket = bucket
        self.dtype = bucket.settings.comm_dtype or bucket.param_data.dtype
        self._message: torch.Tensor | None = None

    def place_of(self, span: Span) -> torch.Tensor:
        """Returns the memory of one owned span of the buffer, for the optimizer's update: [span.numel], `dtype`."""
        start = span.start - self._bucket.layout.span.start
        return self._open()[start : start + span.numel]

    def message(self) -> torch.Tensor:
        """Returns the message buffer, which already contains this rank's shard: [bucket elements], `dtype`."""
        if self._message is None:
            self.fill()
        return self._open()

    def fill(self) -> None:
        """Copies this rank's current parameters into its part of the message buffer."""
        message = self._open()
        for part in self._bucket.ranges:
            own = part.span.intersection(self._bucket.owned_part)
            if own.numel:
                start = part.start + own.start - part.span.start
                here = ParamRange(part.name, part.param, own, start)
                here.view_of(message).copy_(elements_of(here))

    @torch.no_grad()
    def unpack(self) -> None:
        """Copies the gathered parameters into the buffer and frees the message buffer."""
        if self._message is not None:
            for part in self._bucket.ranges:
                elements_of(part).copy_(part.view_of(self._message))
            self._message = None

    def _open(self) -> torch.Tensor:
        if self._message is None:
            self._message = torch.empty(self._bucket.layout.span.numel, dtype=self.dtype, device=self._bucket.device)
        return self._message


def elements_of(part: ParamRange) -> torch.Tensor:
    """Returns a view of the parameter's elements in a range: [part.span.numel], the parameter's dtype."""
    # Bypasses the subclass of a parameter that may not be read yet, because gathered values are written to it.
    with DisableTorchFunctionSubclass():
        return flat_view(part.param)[part.start : part.start + part.span.numel]
