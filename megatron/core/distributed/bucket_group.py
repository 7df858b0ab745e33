"""_ParamAndGradBucketGroup: buckets whose gradients are reduced, and whose parameters are gathered, together.

A group launches its collectives when scheduler.py calls it, in the same order on every rank. What it shares with groups
of bucket-lifetime gradients, which transient_grads.py has, is in BucketGroupBase. A BucketObserver is told about the
gradients and collectives of groups: event_log.py records times, ddp_debug.py checks accesses.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from megatron.core.device import Arrival, Writers, keep_for_current_stream
from megatron.core.distributed.collectives import Handle, gather_shards_, reduce_bucket_
from megatron.core.distributed.consistency import GradChecks
from megatron.core.distributed.flat_buffer import _ParamAndGradBucket, plain_grad
from megatron.core.distributed.iteration import CollectiveTrace
from megatron.core.distributed.layout import ParamSlot
from megatron.core.tensor_parallel.param_attributes import added_to_main_grad
from megatron.core.tensor_parallel.weight_grads import WeightGrad

# Iterations in which a parameter must have had fewer gradients before fewer are expected of it.
_PATIENCE = 4


class GradState(Enum):
    """The state of a group's gradients in an iteration."""

    COLLECTING = "collecting"
    IN_FLIGHT = "in flight"
    REDUCED = "reduced"


class ParamState(Enum):
    """Whether a rank's copy of the parameters is what their owners hold.

    ARRIVED: gathered on this rank, perhaps not on others. CURRENT: gathered on all ranks. A group enters and leaves
    CURRENT at the same place of the program on all ranks; in between each rank has its own state.
    """

    CURRENT = "current"
    STALE = "stale"
    IN_FLIGHT = "in flight"
    ARRIVED = "arrived"


class Traffic(Enum):
    """The kinds of collectives that observers distinguish.

    LATE: a second round, for gradients added after the first had started. AGREE: the few numbers at the end of an
    iteration, which belong to no group.
    """

    REDUCE = "reduce"
    LATE = "late"
    GATHER = "gather"
    AGREE = "agree"


class BucketGroupBase(ABC):
    """Buckets that are reduced and gathered together, however their gradients are stored.

    name: the same on all ranks, for messages. is_last_microbatch: gradients that become ready now are counted.
    is_last_backward: gradients that are counted now are the last of the iteration. number: its place among all groups,
    set when it is attached to a scheduler.
    """

    number: int

    def __init__(self, buckets: Sequence[_ParamAndGradBucket], *, name: str) -> None:
        self.buckets, self.name = list(buckets), name
        self.slots = [slot for bucket in self.buckets for slot in bucket.slots]
        # Records what is launched, where all ranks of the stage have this group.
        self.trace: CollectiveTrace | None = None
        self.is_last_microbatch = self.is_last_backward = True
        self.grad_state, self.param_state = GradState.COLLECTING, ParamState.CURRENT
        self._expected_grads = _ExpectedGrads(len(self.slots))
        self.arrival = Arrival(self.device)
        self._index_of = {slot.param: index for index, slot in enumerate(self.slots)}
        self._gathers: list[Handle] = []
        # Called when the parameters are gathered; set by their owner on this rank.
        self.on_arrival: Callable[[], None] | None = None

    def attach(
        self,
        number: int,
        *,
        mark_grad_ready: Callable[["BucketGroupBase", nn.Parameter], None],
        start_grad_sync: Callable[[Sequence["BucketGroupBase"]], None],
        start_param_sync: Callable[[Sequence["BucketGroupBase"]], None],
        need: Callable[..., None],
    ) -> None:
        """Sets the group's number, and the methods of a scheduler that reduce and gather it in its turn."""
        self.number = number
        self._mark_grad_ready, self._start_grad_sync = mark_grad_ready, start_grad_sync
        self._start_param_sync, self._need = start_param_sync, need

    # For users: each in its turn among all groups.

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Starts to gather the parameters of this group and of all before it; force_sync: waits, too. Collective."""
        self._start_param_sync([self])
        if force_sync:
            self._need(self, prefetch=False)

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        """Waits for the parameters; starts the gather that follows unless told to skip. Collective."""
        self._need(self, prefetch=not skip_next_bucket_dispatch)

    # Gradients.

    @property
    @abstractmethod
    def is_late(self) -> bool:
        """Whether gradients were added after the reductions that were launched so far."""

    @property
    @abstractmethod
    def is_moving(self) -> bool:
        """Whether some gradients are being reduced, so that they cannot all be scaled now."""

    @abstractmethod
    def take(self, param: nn.Parameter) -> None:
        """Moves the gradient in `param.grad`, if any, to its place."""

    @abstractmethod
    def add(self, param: nn.Parameter, new: WeightGrad) -> None:
        """Adds a gradient that is not computed yet to its place."""

    def count_gradient(self, param: nn.Parameter) -> bool:
        """Counts a gradient of the last microbatch and returns whether it was the last one expected in this group."""
        return self._expected_grads.count(self._index_of[param])

    @property
    def is_complete(self) -> bool:
        """Whether all gradients that are expected in this iteration were counted."""
        return self._expected_grads.is_complete

    def learn_counts(self) -> None:
        """Expects as many gradients as were counted, from the next iteration or backward pass on."""
        self._expected_grads.learn()

    @abstractmethod
    def unfilled(self) -> list[str]:
        """Names of the parameters without a gradient in this iteration."""

    @abstractmethod
    def launch_reductions(self) -> None:
        """Starts to reduce the gradients. Collective."""

    @abstractmethod
    def start_second_round(self) -> None:
        """Starts to reduce gradients that were late on any rank; on all ranks. Collective."""

    @abstractmethod
    def advance(self) -> None:
        """Starts the second stage of reductions, so that several groups may run theirs together. Collective."""

    @abstractmethod
    def advance_early(self) -> bool:
        """Starts the second stage early, without blocking the host; returns whether all of it is in flight."""

    @abstractmethod
    def advance_second_round(self) -> None:
        """Does what `advance` does for the second round; called after `advance` of all groups. Collective."""

    @abstractmethod
    def complete_reductions(self) -> None:
        """Waits for all reductions of the group."""

    @abstractmethod
    def abandon(self) -> None:
        """Ends reductions in flight and discards their results. Collective."""

    @abstractmethod
    def reset(self) -> None:
        """Begins an iteration; no reduction is under way."""

    @abstractmethod
    def works(self, traffic: Traffic) -> list[dist.Work]:
        """The messages under way, for observers."""

    @abstractmethod
    def take_sums(self) -> None:
        """Copies the reduced values into every main_grad, if they were reduced elsewhere."""

    def reduced_grad(self, bucket: _ParamAndGradBucket) -> torch.Tensor:
        """This rank's part of a bucket's reduced gradients: [owned elements], the gradients' dtype."""
        owned = bucket.buffer.owned_spans()[bucket.layout.index]
        return bucket.buffer.grad_of(owned)

    @property
    def can_be_released(self) -> bool:
        """Whether the sums are complete and only hooks and optimizers in backward still need them."""
        return False

    @property
    def is_closed(self) -> bool:
        """Whether gradients that become ready now could no longer be added."""
        return False

    def hold(self) -> None:
        """Keeps sums that could be released, and lets late gradients add to them; until the next iteration."""
        assert not self.can_be_released, f"{self.name} does not know how to keep what it releases"

    @property
    def keeps_memory(self) -> bool:
        """Whether all backward passes accumulate gradients in the same memory."""
        return False

    def settle(self) -> None:
        """Waits for the oldest reduction and frees its buffer; for groups that accumulate over backward passes."""
        raise AssertionError(f"{self.name} is reduced once an iteration")

    def resume_accumulation(self) -> None:
        """Lets further gradients add to reduced sums; for groups that accumulate over backward passes."""
        raise AssertionError(f"{self.name} is reduced once an iteration")

    def drop_captured(self) -> None:
        """Begins an iteration after a CUDA graph's capture: what was launched in it has not run."""
        self.reset()
        self._gathers.clear()
        self.arrival.forget()

    def note_replayed(self) -> None:
        """Records that a CUDA graph has reduced the gradients, and gathered parameters if it does."""
        self.grad_state = GradState.REDUCED
        # Streams other than the one that the graph ran on have to wait for what it gathered.
        self.arrival.note()

    def name_of(self, param: nn.Parameter) -> str:
        """The name of one of its parameters, any shape and dtype."""
        return self.slots[self._index_of[param]].name

    # Parameters.

    @record_function("_ParamAndGradBucketGroup.launch_gathers")
    def launch_gathers(self) -> None:
        """Starts to gather the parameters from the ranks that own their shards. Collective."""
        for bucket in self.buckets:
            flat, group = self._message_of(bucket), bucket.buffer.data_parallel_group
            if self.trace is not None:
                self.trace.record(op="all-gather", group=group, flat=flat, bucket=self.name)
            self._gathers.append(gather_shards_(flat, group))
        self.param_state = ParamState.IN_FLIGHT

    @record_function("_ParamAndGradBucketGroup.complete_gathers")
    def complete_gathers(self) -> None:
        """Waits for a gather under way."""
        for handle in self._gathers:
            handle.wait()
        self._unpack()
        self._gathers.clear()
        self.arrival.note()
        self.param_state = ParamState.ARRIVED
        if self.on_arrival is not None:
            self.on_arrival()

    def _message_of(self, bucket: _ParamAndGradBucket) -> torch.Tensor:
        """The gather buffer of a bucket: [bucket elements], any float dtype, with this rank's shard in its place."""
        return bucket.param_data

    @abstractmethod
    def _unpack(self) -> None:
        """Puts what was gathered where the parameters are, if it was gathered elsewhere."""

    @property
    def device(self) -> torch.device:
        """The parameters' device."""
        return self.slots[0].param.device

    @property
    def is_sharded(self) -> bool:
        """Whether each rank owns a shard of the parameters, which the others gather."""
        return self.buckets[0].buffer.is_sharded

    @property
    def can_repeat(self) -> bool:
        """Whether gradients under reduction keep the values that were sent until the wait."""
        return self.buckets[0].buffer.settings.policy.can_repeat


class _ParamAndGradBucketGroup(BucketGroupBase):
    """A group whose gradients persist in their buffers. name: the same on all ranks; checks: None to look at none."""

    def __init__(self, buckets: Sequence[_ParamAndGradBucket], *, name: str, checks: GradChecks | None) -> None:
        super().__init__(buckets, name=name)
        self._checks = checks
        self._bucket_of = {slot.param: bucket for bucket in self.buckets for slot in bucket.slots}
        self._writers = Writers(self.device)
        # Gradients that became ready while their bucket was in flight, in that order.
        self._late: list[tuple[ParamSlot, torch.Tensor]] = []
        self._late_sums: list[torch.Tensor] = []
        self._reductions: list[Handle] = []
        self._late_reductions: list[Handle] = []

    @property
    def is_late(self) -> bool:
        """Whether a gradient of this iteration became ready while its bucket was in flight."""
        return bool(self._late)

    @property
    def is_moving(self) -> bool:
        return self.grad_state is GradState.IN_FLIGHT

    # For users: each in its turn among all groups.

    def register_grad_ready(self, param: nn.Parameter, *unused: Any) -> None:
        """Records that the caller has added a parameter's gradient, any shape and dtype, to `param.main_grad`."""
        self.note_added(param)
        self._mark_grad_ready(self, param)

    def start_grad_sync(self, *unused: Any) -> None:
        """Starts to reduce the gradients of this group and of all before it. Collective."""
        self._start_grad_sync([self])

    # Gradients.

    def add(self, param: nn.Parameter, new: WeightGrad) -> None:
        """Accumulates a weight's gradient in the bucket, or keeps it for the second round if that is being reduced."""
        buffer = self._bucket_of[param].buffer
        if self.grad_state is GradState.COLLECTING:
            self._writers.note()
            buffer.add(param, new)
        else:
            self._put_aside(buffer.slot_of[param], new.compute())

    def take(self, param: nn.Parameter) -> None:
        """Moves `param.grad` to its place in the bucket, or keeps it for the second round if that is being reduced."""
        buffer = self._bucket_of[param].buffer
        if self.grad_state is GradState.COLLECTING:
            self._writers.note()
            buffer.take(param)
            if self._checks is not None and self._checks.looks_at(param):
                self._checks.measure_sum(buffer.slot_of[param].name, buffer.slot_of[param].main_grad)
            return
        slot = buffer.slot_of[param]
        if added_to_main_grad(param):
            raise RuntimeError(
                f"a kernel added to main_grad of {slot.name} while that was being reduced: wrap all microbatches but "
                "the last in no_sync, or leave out overlap_grad_reduce"
            )
        grad, param.grad = plain_grad(param), None
        if grad is not None:
            # A copy: a CUDA graph may be about to write to it again.
            self._put_aside(slot, grad.clone())

    def note_added(self, param: nn.Parameter) -> None:
        """Records that a caller added a gradient to main_grad, without the scale."""
        if self.grad_state is not GradState.COLLECTING:
            name = self._bucket_of[param].buffer.slot_of[param].name
            raise RuntimeError(f"register_grad_ready: the gradient of {name} was added while that was being reduced")
        self._writers.note()
        self._bucket_of[param].buffer.note_added(param)

    def unfilled(self) -> list[str]:
        """Names of the parameters without a gradient in this iteration."""
        return [name for bucket in self.buckets for name in bucket.buffer.unfilled(bucket.slots)]

    @record_function("_ParamAndGradBucketGroup.launch_reductions")
    def launch_reductions(self) -> None:
        """Starts to reduce the gradients. Collective."""
        self._writers.join()
        for bucket in self.buckets:
            bucket.buffer.complete(bucket.slots)
            if self._checks is not None:
                self._checks.measure([(slot.name, slot.main_grad) for slot in bucket.slots])
        self._reductions = [self._reduce(bucket, bucket.grad_data) for bucket in self.buckets]
        self.grad_state = GradState.IN_FLIGHT

    def start_second_round(self) -> None:
        """Starts to reduce gradients that were late on any rank; on all ranks. Collective."""
        for _, grad in self._late:
            keep_for_current_stream(grad)
        if self.can_repeat:
            self._discard()
            # One by one, as they would have been added had nothing been on its way: the sum has the same bits.
            for slot, grad in self._late:
                slot.main_grad.add_(grad, alpha=self._bucket_of[slot.param].buffer.settings.scale)
                if slot.comm_view is not slot.main_grad:
                    slot.comm_view.copy_(slot.main_grad)
            self._reductions = [self._reduce(bucket, bucket.grad_data) for bucket in self.buckets]
            return
        for bucket in self.buckets:
            late = torch.zeros_like(bucket.grad_data)
            for slot, grad in self._late:
                if self._bucket_of[slot.param] is bucket:
                    start = slot.span.start - bucket.layout.span.start
                    late[start : start + slot.span.numel].add_(grad.reshape(-1), alpha=bucket.buffer.settings.scale)
            self._late_sums.append(late)
            self._late_reductions.append(self._reduce(bucket, late))

    def advance(self) -> None:
        """Starts the second stage of reductions, so that several groups may run theirs together. Collective."""
        for handle in self._reductions:
            handle.advance()

    def advance_early(self) -> bool:
        """Starts the second stage early, without blocking the host; returns whether all of it is in flight."""
        return all(handle.advance_early() for handle in self._reductions)

    def advance_second_round(self) -> None:
        """Starts the second stage of late reductions, as `advance` does for the first round. Collective."""
        for handle in self._late_reductions:
            handle.advance()

    @record_function("_ParamAndGradBucketGroup.complete_reductions")
    def complete_reductions(self) -> None:
        """Waits until main_grad holds the sums, of sharded buffers this rank's shard of them."""
        for handle in [*self._reductions, *self._late_reductions]:
            handle.wait()
        for bucket, late in zip(self.buckets, self._late_sums):
            bucket.grad_data.add_(late)
        self._drop_handles()
        self.grad_state = GradState.REDUCED
        self.take_sums()

    def take_sums(self) -> None:
        """Copies the reduced values into every main_grad, if the group is reduced."""
        if self.grad_state is GradState.REDUCED:
            for slot in self.slots:
                slot.copy_from_comm()

    def abandon(self) -> None:
        """Ends reductions in flight and discards their results. Collective."""
        if self.can_repeat:
            self._discard()
        else:
            self.advance()
            for handle in self._reductions:
                handle.wait()
        self._drop_handles()
        self.grad_state = GradState.REDUCED

    def reset(self) -> None:
        """Begins an iteration; no reduction is under way."""
        self._expected_grads.forget()
        self._drop_handles()
        self.grad_state = GradState.COLLECTING

    def works(self, traffic: Traffic) -> list[dist.Work]:
        """The messages under way, for observers."""
        handles = {
            Traffic.REDUCE: self._reductions,
            Traffic.LATE: self._late_reductions or self._reductions,
            Traffic.GATHER: self._gathers,
        }
        return [work for handle in handles[traffic] for work in handle.works()]

    def _unpack(self) -> None:
        """Does nothing: parameters are views of the gathered buffer."""

    def _reduce(self, bucket: _ParamAndGradBucket, flat: torch.Tensor) -> Handle:
        buffer = bucket.buffer
        op = "reduce-scatter" if buffer.is_sharded else "all-reduce"
        if self.trace is not None:
            self.trace.record(op=op, group=buffer.data_parallel_group, flat=flat, bucket=self.name)
        return reduce_bucket_(
            flat, buffer.data_parallel_group, sharded=buffer.is_sharded, policy=buffer.settings.policy
        )

    def _put_aside(self, slot: ParamSlot, grad: torch.Tensor) -> None:
        self._late.append((slot, grad))
        if self._checks is not None:
            self._checks.measure([(slot.name, grad)])

    def _discard(self) -> None:
        for handle in self._reductions:
            handle.discard()

    def _drop_handles(self) -> None:
        self._late.clear()
        self._late_sums.clear()
        self._reductions.clear()
        self._late_reductions.clear()


# What observers are told.


class BucketObserver(Protocol):
    """The moments of an iteration, in this order for each bucket group; those of several groups interleave.

    An observer that raises ends the iteration before the event that it objects to.
    """

    def attach(self, groups: Sequence[BucketGroupBase], module: nn.Module) -> None:
        """Adds the groups of another model chunk with this module to the observed ones."""
        ...

    def begin_iteration(self) -> None:
        """Called once a chunk before the first gradient of any chunk: gradients are about to be dropped."""
        ...

    def before_grad(self, group: BucketGroupBase, param: nn.Parameter) -> None:
        """Called when a gradient is ready, before it moves to `param.main_grad`, or elsewhere if it is late."""
        ...

    def after_grad(self, group: BucketGroupBase, param: nn.Parameter) -> None:
        """Called when a gradient was moved."""
        ...

    def before_launch(self, traffic: Traffic, group: BucketGroupBase) -> None:
        """Called before collectives over the group's buckets are launched."""
        ...

    def after_launch(self, traffic: Traffic, group: BucketGroupBase) -> None:
        """Called when these collectives are in flight."""
        ...

    def before_wait(self, traffic: Traffic, group: BucketGroupBase) -> None:
        """Called before a wait for the result; more than once where a collective has several parts."""
        ...

    def after_wait(self, traffic: Traffic, group: BucketGroupBase) -> None:
        """Called after that wait."""
        ...

    def before_agreement(self) -> None:
        """Called when everything is launched, before the ranks of the stage wait for each other."""
        ...

    def after_agreement(self) -> None:
        """Called when the ranks of the stage have agreed."""
        ...

    def end_iteration(self) -> None:
        """Called when all groups of all chunks are reduced; the optimizer may step."""
        ...

    def gather_due(self, group: BucketGroupBase) -> None:
        """Called when this rank's parameter shards are new; the others are stale until the wait for the next gather."""
        ...


# What a group waits for.


class _ExpectedGrads:
    """Counts the gradients of a bucket group against those of the last microbatches before.

    At least one of each parameter is expected; more as soon as more were seen, fewer only after _PATIENCE iterations:
    too many merely delays a reduction to the end of backward, too few makes gradients late.
    """

    def __init__(self, num_params: int) -> None:
        self._expected = [1] * num_params
        self._counts = [0] * num_params
        self._num_incomplete = num_params
        # Of the iterations in a row with fewer than expected: how many, and the most gradients in any of them.
        self._fewer: dict[int, tuple[int, int]] = {}

    @property
    def is_complete(self) -> bool:
        """Whether every parameter has had as many gradients as expected, or more."""
        return self._num_incomplete == 0

    def count(self, index: int) -> bool:
        """Counts a gradient of a parameter and returns whether it was the last one expected of all."""
        self._counts[index] += 1
        if self._counts[index] != self._expected[index]:
            return False
        self._num_incomplete -= 1
        return self._num_incomplete == 0

    def forget(self) -> None:
        """Drops this iteration's counts."""
        self._counts = [0] * len(self._counts)
        self._num_incomplete = len(self._counts)

    def learn(self) -> None:
        """Ends an iteration: its counts are expected of the next."""
        if self._fewer or self._counts != self._expected:
            for index, (count, expected) in enumerate(zip(self._counts, self._expected)):
                self._learn_one(index, count, expected=expected)
        self.forget()

    def _learn_one(self, index: int, count: int, *, expected: int) -> None:
        if count >= expected:
            self._expected[index] = count
            self._fewer.pop(index, None)
            return
        iterations, most = self._fewer.get(index, (0, 0))
        self._fewer[index] = (iterations + 1, max(most, count))
        if iterations + 1 == _PATIENCE:
            self._expected[index] = max(1, most, count)
            del self._fewer[index]
