"""_ParamAndGradBucketGroup: buckets whose gradients are reduced, and whose parameters are gathered, together.

A group launches its collectives when scheduler.py calls it, in the same order on every rank. Where gradients lie is
bucket_storage.py's. A BucketObserver is told about the gradients and collectives of groups: event_log.py records times,
ddp_debug.py checks accesses.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from megatron.core.device import Arrival
from megatron.core.distributed.bucket_storage import GradState, _ParamAndGradBucket
from megatron.core.distributed.collectives import Handle
from megatron.core.distributed.iteration import CollectiveTrace
from megatron.core.tensor_parallel.weight_grads import WeightGrad

# Iterations in which a parameter must have had fewer gradients before fewer are expected of it.
_PATIENCE = 4


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


class _ParamAndGradBucketGroup:
    """Buckets that are reduced and gathered together, when a scheduler calls the group.

    name: the same on all ranks, for messages. is_last_microbatch: gradients that become ready now are counted.
    is_last_backward: gradients that are counted now are the last of the iteration. number: its place among all groups,
    set when it is attached to a scheduler.
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
        """Sets the group's number, and the methods of a scheduler that reduce and gather it in its turn.

        trace: records its collectives; None where other ranks have no such group.
        """
        self.number = number
        for bucket in self.buckets:
            bucket.trace = trace
        self._mark_grad_ready, self._start_grad_sync = mark_grad_ready, start_grad_sync
        self._start_param_sync, self._need = start_param_sync, need

    # For users: each in its turn among all groups.

    def register_grad_ready(self, param: nn.Parameter, *unused: Any) -> None:
        """Records that the caller has added a parameter's gradient, any shape and dtype, to `param.main_grad`."""
        self.mark_added(param)
        self._mark_grad_ready(self, param)

    def start_grad_sync(self, *unused: Any) -> None:
        """Starts to reduce the gradients of this group and of all before it. Collective."""
        self._start_grad_sync([self])

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Starts to gather the parameters of this group and of all before it; force_sync: waits, too. Collective."""
        self._start_param_sync([self])
        if force_sync:
            self._need(self, prefetch=False)

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        """Waits for the parameters; starts the gather that follows unless told to skip. Collective."""
        self._need(self, prefetch=not skip_next_bucket_dispatch)

    # Gradients, in the order of an iteration.

    def accumulate(self, param: nn.Parameter) -> None:
        """Moves the gradient in `param.grad`, if any, to its place, or keeps it for the second round if it is late."""
        self._grads_of[param].accumulate(param)

    def add(self, param: nn.Parameter, new: WeightGrad) -> None:
        """Adds a gradient that is not computed yet to its place, or keeps it for the second round if it is late."""
        self._grads_of[param].add(param, new)

    def mark_added(self, param: nn.Parameter) -> None:
        """Records that a caller added a gradient to its memory, without the scale."""
        self._grads_of[param].mark_added(param)

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
        """Whether some gradients are being reduced, so that they cannot all be scaled now."""
        return any(bucket.grads.is_moving for bucket in self.buckets)

    def missing(self) -> list[str]:
        """Names of the parameters without a gradient in this iteration."""
        return [name for bucket in self.buckets for name in bucket.grads.missing()]

    @record_function("_ParamAndGradBucketGroup.launch_reductions")
    def launch_reductions(self) -> None:
        """Starts to reduce the gradients. Collective."""
        for bucket in self.buckets:
            bucket.grads.launch(is_last=self.is_last_backward)

    def launch_second_round(self) -> None:
        """Starts to reduce gradients that were late on any rank; on all ranks. Collective."""
        for bucket in self.buckets:
            bucket.grads.launch_second_round(is_last=self.is_last_backward)

    def advance(self) -> None:
        """Starts the second stage of reductions, so that several groups may run theirs together. Collective."""
        for bucket in self.buckets:
            bucket.grads.advance()

    def advance_early(self) -> bool:
        """Starts the second stage early, without blocking the host; returns whether all of it is in flight."""
        return all(bucket.grads.advance_early() for bucket in self.buckets)

    def advance_second_round(self) -> None:
        """Does what `advance` does for the second round; called after `advance` of all groups. Collective."""
        for bucket in self.buckets:
            bucket.grads.advance_second_round()

    @record_function("_ParamAndGradBucketGroup.complete_reductions")
    def complete_reductions(self) -> None:
        """Waits until all gradients are reduced, of sharded buckets this rank's shard of them."""
        for bucket in self.buckets:
            bucket.grads.complete()

    def copy_from_comm(self) -> None:
        """Copies reduced values to each main_grad that is wider, after hooks may have changed them."""
        for bucket in self.buckets:
            bucket.grads.copy_from_comm()

    def works(self, traffic: Traffic) -> list[dist.Work]:
        """The messages in flight, for observers."""
        if traffic is Traffic.GATHER:
            return [work for handle in self._gathers for work in handle.works()]
        grads = [bucket.grads for bucket in self.buckets]
        return [work for one in grads for work in (one.late_works() if traffic is Traffic.LATE else one.works())]

    # Gradients of several backward passes, see [Note: backward passes] in launch_sequence.py.

    @property
    def is_closed(self) -> bool:
        """Whether gradients that become ready now could no longer be added."""
        return any(bucket.grads.is_closed for bucket in self.buckets)

    @property
    def can_be_released(self) -> bool:
        """Whether the sums are complete and only hooks and optimizers in backward still need them."""
        return all(bucket.grads.can_be_released for bucket in self.buckets)

    @property
    def reuses_memory(self) -> bool:
        """Whether all backward passes accumulate gradients in the same memory."""
        return any(bucket.grads.reuses_memory for bucket in self.buckets)

    def hold(self) -> None:
        """Keeps sums that could be released, and lets late gradients add to them; until the next iteration."""
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
        """Begins an iteration after a CUDA graph's capture: what was launched in it has not run."""
        self.reset()
        self._gathers.clear()
        self.arrival.forget()

    def note_replayed(self) -> None:
        """Records that a CUDA graph has reduced the gradients, and gathered parameters if it does."""
        for bucket in self.buckets:
            bucket.grads.state = GradState.REDUCED
        # Streams other than the one that the graph ran on have to wait for what it gathered.
        self.arrival.note()

    def name_of(self, param: nn.Parameter) -> str:
        """The name of one of its parameters, any shape and dtype."""
        return self.slots[self._index_of[param]].name

    # Parameters.

    @record_function("_ParamAndGradBucketGroup.launch_gathers")
    def launch_gathers(self) -> None:
        """Starts to gather the parameters from the ranks that own their shards. Collective."""
        self._gathers += [bucket.gather() for bucket in self.buckets]
        self.param_state = ParamState.IN_FLIGHT

    @record_function("_ParamAndGradBucketGroup.complete_gathers")
    def complete_gathers(self) -> None:
        """Waits for a gather in flight."""
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
    def is_sharded(self) -> bool:
        """Whether each rank owns a shard of the parameters, which the others gather."""
        return self.buckets[0].settings.is_sharded

    @property
    def can_repeat(self) -> bool:
        """Whether gradients under reduction keep the values that were sent until the wait."""
        return self.buckets[0].settings.policy.can_repeat


# What observers are told.


class BucketObserver(Protocol):
    """The moments of an iteration, in this order for each bucket group; those of several groups interleave.

    An observer that raises ends the iteration before the event that it objects to.
    """

    def attach(self, groups: Sequence[_ParamAndGradBucketGroup], module: nn.Module) -> None:
        """Adds the groups of another model chunk with this module to the observed ones."""
        ...

    def begin_iteration(self) -> None:
        """Called once a chunk before the first gradient of any chunk: gradients are about to be dropped."""
        ...

    def before_grad(self, group: _ParamAndGradBucketGroup, param: nn.Parameter) -> None:
        """Called when a gradient is ready, before it moves to `param.main_grad`, or elsewhere if it is late."""
        ...

    def after_grad(self, group: _ParamAndGradBucketGroup, param: nn.Parameter) -> None:
        """Called when a gradient was moved."""
        ...

    def before_launch(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> None:
        """Called before collectives over the group's buckets are launched."""
        ...

    def after_launch(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> None:
        """Called when these collectives are in flight."""
        ...

    def before_wait(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> None:
        """Called before a wait for the result; more than once where a collective has several parts."""
        ...

    def after_wait(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> None:
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

    def gather_due(self, group: _ParamAndGradBucketGroup) -> None:
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
