"""_ParamAndGradBucketGroup: buckets whose gradients are reduced, and whose parameters are gathered, together.

A group launches its collectives when scheduler.py calls it, in the same order on every rank. bucket_storage.py holds
the gradients. A BucketObserver is notified of the gradients and collectives of groups: event_log.py records times,
ddp_debug.py checks accesses.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import Arrival
from megatron.core.device.trace_ranges import trace_range
from megatron.core.distributed.bucket_storage import GradState, _ParamAndGradBucket
from megatron.core.distributed.collectives import Handle
from megatron.core.distributed.iteration import CollectiveTrace
from megatron.core.process_groups_config import group_size
from megatron.core.tensor_parallel.weight_grads import WeightGrad

# Consecutive iterations with fewer gradients of a parameter after which fewer are expected.
_PATIENCE = 4


class ParamState(Enum):
    """Whether this rank's copy of the parameters has the values of the ranks that own them.

    STALE: the owners have updated them, and no gather was launched yet. IN_FLIGHT: the gather was launched. ARRIVED:
    gathered on this rank, and other ranks may still wait for their gather. CURRENT: gathered on all ranks. Only CURRENT
    is the same on all ranks, which enter and leave it at the same point of the program.
    """

    CURRENT = "current"
    STALE = "stale"
    IN_FLIGHT = "in flight"
    ARRIVED = "arrived"


class Traffic(Enum):
    """The kinds of collectives that observers distinguish.

    LATE: a second round of reductions, for gradients added after the first had started. AGREE: the agreement of the
    stage's ranks at the end of an iteration, which belongs to no group.
    """

    REDUCE = "reduce"
    LATE = "late"
    GATHER = "gather"
    AGREE = "agree"


class _ParamAndGradBucketGroup:
    """Buckets that are reduced and gathered together, when a scheduler calls the group.

    name: for messages, the same on all ranks. is_last_microbatch: whether gradients that become ready now are counted.
    is_last_backward: whether gradients counted now belong to the iteration's last backward pass. number: the group's
    index among all groups, set by `attach`.
    """

    number: int

    def __init__(self, buckets: Sequence[_ParamAndGradBucket], *, name: str) -> None:
        self.buckets, self.name = list(buckets), name
        for bucket in self.buckets:
            bucket.name = name
        self.slots = [slot for bucket in self.buckets for slot in bucket.slots]
        self.is_last_microbatch = self.is_last_backward = True
        self.param_state = ParamState.CURRENT
        self._expected_grads = _ExpectedGrads(len(self.slots))
        self.arrival = Arrival(self.device)
        self._index_of = {slot.param: index for index, slot in enumerate(self.slots)}
        self._grads_of = {slot.param: bucket.grads for bucket in self.buckets for slot in bucket.slots}
        self._gathers: list[Handle] = []
        # Called when the parameters are gathered; set by their owner on this rank.
        self.on_arrival: Callable[[], None] | None = None

    def attach(
        self,
        number: int,
        *,
        trace: CollectiveTrace | None,
        mark_grad_ready: Callable[["_ParamAndGradBucketGroup", nn.Parameter], None],
        start_grad_sync: Callable[[Sequence["_ParamAndGradBucketGroup"]], None],
        start_param_sync: Callable[[Sequence["_ParamAndGradBucketGroup"]], None],
        need: Callable[..., None],
    ) -> None:
        """Sets the group's number, and the methods of a scheduler that launch its collectives in order.

        trace: records its collectives; None where other ranks have no such group.
        """
        self.number = number
        for bucket in self.buckets:
            bucket.trace = trace
        self._mark_grad_ready, self._start_grad_sync = mark_grad_ready, start_grad_sync
        self._start_param_sync, self._need = start_param_sync, need

    # For users: the scheduler launches the collectives of all groups in a fixed order.

    def register_grad_ready(self, param: nn.Parameter, *unused: Any) -> None:
        """Records that the caller has added a parameter's gradient, any shape and dtype, to `param.main_grad`.

        Raises RuntimeError while the gradient is being reduced, if gradients are freed after their reduction, and if
        autograd also produced a gradient of the parameter in this iteration and gradients are scaled. Raises ValueError
        for a parameter of another group.
        """
        if param not in self._grads_of:
            names = ", ".join(slot.name for slot in self.slots)
            raise ValueError(
                f"register_grad_ready was given a parameter of shape {tuple(param.shape)} that is not in bucket group "
                f"{self.name}: must be one of {names}"
            )
        self.mark_added(param)
        self._mark_grad_ready(self, param)

    def start_grad_sync(self, *unused: Any) -> None:
        """Starts to reduce the gradients of this group and of all groups before it. Collective."""
        self._start_grad_sync([self])

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Starts to gather the parameters of this group and of all groups before it. Collective.

        force_sync: also waits for this group's parameters.
        """
        self._start_param_sync([self])
        if force_sync:
            self._need(self, prefetch=False)

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        """Waits for the parameters, and prefetches the next group's unless told to skip. Collective."""
        self._need(self, prefetch=not skip_next_bucket_dispatch)

    # Gradients, in the order of an iteration.

    def accumulate(self, param: nn.Parameter) -> None:
        """Accumulates `param.grad`, if any, in the bucket, or keeps it for the second round if it is late."""
        self._grads_of[param].accumulate(param)

    def add(self, param: nn.Parameter, new: WeightGrad) -> None:
        """Computes a deferred weight gradient into main_grad, or keeps it for the second round if it is late."""
        self._grads_of[param].add(param, new)

    def mark_added(self, param: nn.Parameter) -> None:
        """Records that a caller added a gradient to main_grad without the gradient scale."""
        self._grads_of[param].mark_added(param)

    def count_gradient(self, param: nn.Parameter) -> bool:
        """Counts a gradient of the last microbatch; returns whether it was the last one expected in this group."""
        return self._expected_grads.count(self._index_of[param])

    @property
    def is_complete(self) -> bool:
        """Whether all gradients that are expected in this iteration were counted."""
        return self._expected_grads.is_complete

    def learn_counts(self) -> None:
        """Updates the expected numbers of gradients from this iteration's or backward pass's counts."""
        self._expected_grads.learn()

    @property
    def grad_state(self) -> GradState:
        """The state of the gradients, the same in all buckets."""
        return self.buckets[0].grads.state

    @property
    def is_late(self) -> bool:
        """Whether gradients were added after the reductions that were launched so far."""
        return any(bucket.grads.is_late for bucket in self.buckets)

    @property
    def is_moving(self) -> bool:
        """Whether some gradients are under reduction, so that they cannot all be scaled now."""
        return any(bucket.grads.is_moving for bucket in self.buckets)

    def missing(self) -> list[str]:
        """Names of the parameters without a gradient in this iteration."""
        return [name for bucket in self.buckets for name in bucket.grads.missing()]

    @trace_range("_ParamAndGradBucketGroup.launch_reductions")
    def launch_reductions(self) -> None:
        """Starts to reduce the gradients. Collective."""
        for bucket in self.buckets:
            bucket.grads.launch(is_last=self.is_last_backward)

    def launch_second_round(self) -> None:
        """Starts to reduce gradients that were late on any rank; on all ranks. Collective."""
        for bucket in self.buckets:
            bucket.grads.launch_second_round(is_last=self.is_last_backward)

    def advance(self) -> None:
        """Starts the second stage of reductions; the second stages of several groups overlap. Collective."""
        for bucket in self.buckets:
            bucket.grads.advance()

    def advance_early(self) -> bool:
        """Starts the second stage early, without blocking the host; returns whether all of it is in flight."""
        return all(bucket.grads.advance_early() for bucket in self.buckets)

    def advance_second_round(self) -> None:
        """Does what `advance` does for the second round; called after `advance` of all groups. Collective."""
        for bucket in self.buckets:
            bucket.grads.advance_second_round()

    @trace_range("_ParamAndGradBucketGroup.complete_reductions")
    def complete_reductions(self) -> None:
        """Waits until all gradients are reduced; in sharded buckets, only this rank's shard receives the sum."""
        for bucket in self.buckets:
            bucket.grads.complete()

    def copy_from_comm(self) -> None:
        """Copies reduced values, which hooks may have changed, to each main_grad that has a wider dtype."""
        for bucket in self.buckets:
            bucket.grads.copy_from_comm()

    def works(self, traffic: Traffic) -> list[dist.Work]:
        """The works of collectives in flight, for observers."""
        if traffic is Traffic.GATHER:
            return [work for handle in self._gathers for work in handle.works()]
        grads = [bucket.grads for bucket in self.buckets]
        return [work for one in grads for work in (one.late_works() if traffic is Traffic.LATE else one.works())]

    # Gradients that are reduced in each backward pass, see [Note: backward passes] in launch_sequence.py.

    @property
    def is_closed(self) -> bool:
        """Whether the sum accepts no further gradients in this iteration."""
        return any(bucket.grads.is_closed for bucket in self.buckets)

    @property
    def can_be_released(self) -> bool:
        """Whether the sums are complete, so that hooks and an optimizer in backward can receive them."""
        return all(bucket.grads.can_be_released for bucket in self.buckets)

    @property
    def reuses_memory(self) -> bool:
        """Whether all backward passes accumulate gradients in the same memory."""
        return any(bucket.grads.reuses_memory for bucket in self.buckets)

    def hold(self) -> None:
        """Keeps sums until the next iteration instead of releasing them, so that late gradients can be added."""
        for bucket in self.buckets:
            bucket.grads.hold()

    def settle(self) -> None:
        """Waits for the oldest reduction and adds it to the sum."""
        for bucket in self.buckets:
            bucket.grads.settle()

    def resume_accumulation(self) -> None:
        """Lets further gradients add to reduced sums."""
        for bucket in self.buckets:
            bucket.grads.resume_accumulation()

    # Between iterations.

    def reset(self) -> None:
        """Begins an iteration; no reduction is in flight."""
        self._expected_grads.forget()
        for bucket in self.buckets:
            bucket.grads.reset()

    def abandon(self) -> None:
        """Ends reductions in flight and discards their results. Collective."""
        for bucket in self.buckets:
            bucket.grads.abandon()

    def drop_captured(self) -> None:
        """Begins an iteration after a CUDA graph's capture, whose launches did not run."""
        self.reset()
        self._gathers.clear()
        self.arrival.forget()

    def note_replayed(self) -> None:
        """Records that a graph replay has reduced the gradients, and gathered parameters if they were captured."""
        for bucket in self.buckets:
            bucket.grads.state = GradState.REDUCED
        # Streams other than the graph's must wait for the parameters that it gathered.
        self.arrival.note()

    def name_of(self, param: nn.Parameter) -> str:
        """The name of one of its parameters, any shape and dtype."""
        return self.slots[self._index_of[param]].name

    # Parameters.

    @trace_range("_ParamAndGradBucketGroup.launch_gathers")
    def launch_gathers(self) -> None:
        """Starts to gather the parameters from the ranks that own their shards. Collective."""
        self._gathers += [bucket.gather() for bucket in self.buckets]
        self.param_state = ParamState.IN_FLIGHT

    @trace_range("_ParamAndGradBucketGroup.complete_gathers")
    def complete_gathers(self) -> None:
        """Waits for the gather in flight and calls on_arrival."""
        for handle in self._gathers:
            handle.wait()
        self._gathers.clear()
        for bucket in self.buckets:
            bucket.complete_gather()
        self.arrival.note()
        self.param_state = ParamState.ARRIVED
        if self.on_arrival is not None:
            self.on_arrival()

    @property
    def device(self) -> torch.device:
        """The parameters' device."""
        return self.buckets[0].device

    @property
    def collective_group(self) -> dist.ProcessGroup | None:
        """The ranks over which gradients are summed first and shards distributed; None means this rank alone."""
        return self.buckets[0].settings.group

    @property
    def collective_group_size(self) -> int:
        """The number of ranks in collective_group."""
        return group_size(self.collective_group)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank owns a shard of the parameters, which the other ranks gather."""
        return self.buckets[0].settings.is_sharded

    @property
    def can_repeat(self) -> bool:
        """Whether gradients under reduction keep their values until the wait; see ReductionPolicy.can_repeat."""
        return self.buckets[0].settings.policy.can_repeat


# Observers.


class BucketObserver(Protocol):
    """Callbacks of an iteration, in this order for each bucket group; callbacks of several groups interleave.

    An exception in a callback aborts the iteration before the event that the callback precedes.
    """

    def attach(self, groups: Sequence[_ParamAndGradBucketGroup], module: nn.Module) -> None:
        """Observes the groups of one more model chunk, which wraps `module`."""
        ...

    def begin_iteration(self) -> None:
        """Called once for each chunk, before gradients are reset and before the first gradient of any chunk."""
        ...

    def before_grad(self, group: _ParamAndGradBucketGroup, param: nn.Parameter) -> None:
        """Called when a gradient is ready, before it is accumulated, or kept if it is late."""
        ...

    def after_grad(self, group: _ParamAndGradBucketGroup, param: nn.Parameter) -> None:
        """Called after a gradient was accumulated or kept."""
        ...

    def before_launch(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> None:
        """Called before collectives over the group's buckets are launched."""
        ...

    def after_launch(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> None:
        """Called when these collectives are in flight."""
        ...

    def before_wait(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> None:
        """Called before each wait for the result; a collective of several parts has several waits."""
        ...

    def after_wait(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> None:
        """Called after that wait."""
        ...

    def before_agreement(self) -> None:
        """Called after all launches, before the ranks of the stage agree on the iteration's outcome."""
        ...

    def after_agreement(self) -> None:
        """Called when the ranks of the stage have agreed."""
        ...

    def end_iteration(self) -> None:
        """Called when all groups of all chunks are reduced, before the optimizer's step."""
        ...

    def gather_due(self, group: _ParamAndGradBucketGroup) -> None:
        """Called after this rank's parameter shards were updated; other shards are stale until the next gather."""
        ...


# Expected numbers of gradients.


class _ExpectedGrads:
    """Compares a bucket group's gradient counts with those of the last microbatches of earlier iterations.

    At least one gradient of each parameter is expected. The expected number rises immediately and falls only after
    _PATIENCE iterations: a number too high merely delays a reduction to the end of backward, one too low makes
    gradients late.
    """

    def __init__(self, num_params: int) -> None:
        self._expected = [1] * num_params
        self._counts = [0] * num_params
        self._num_incomplete = num_params
        # By parameter: the number of consecutive iterations with fewer gradients than expected, and the largest count.
        self._fewer: dict[int, tuple[int, int]] = {}

    @property
    def is_complete(self) -> bool:
        """Whether every parameter has at least the expected number of gradients."""
        return self._num_incomplete == 0

    def count(self, index: int) -> bool:
        """Counts a gradient of a parameter; returns whether it was the last one expected in the group."""
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
        """Ends an iteration and updates the expected numbers for the next."""
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
