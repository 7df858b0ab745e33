"""_ParamAndGradBucketGroup: buckets whose gradients are reduced together and whose parameters are gathered together.

scheduler.py tells each group when to launch its collectives, so that all ranks launch them in the same order.
bucket_storage.py stores the gradients. A BucketObserver is notified of the gradients and collectives of groups:
event_log.py records times, ddp_debug.py checks accesses.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import Arrival
from megatron.core.device.trace_ranges import trace_range
from megatron.core.distributed.bucket_storage import GradState, _ParamAndGradBucket
from megatron.core.distributed.collectives import Handle
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.iteration import CollectiveTrace
from megatron.core.process_groups_config import group_size
from megatron.core.tensor_parallel.weight_grads import WeightGrad

# After this many consecutive iterations with fewer gradients of a parameter, its expected count is lowered.
_PATIENCE = 4


class ParamState(Enum):
    """Freshness of this rank's copy of the parameters.

    STALE: the owning ranks have updated their shards, and the gather is not launched yet. IN_FLIGHT: the gather is
    launched but not complete. ARRIVED: the gather is complete on this rank, while other ranks may still be waiting.
    CURRENT: gathered on all ranks. All ranks enter and leave CURRENT at the same point of the program. The other states
    may differ between ranks.
    """

    CURRENT = "current"
    STALE = "stale"
    IN_FLIGHT = "in flight"
    ARRIVED = "arrived"


class Traffic(Enum):
    """Kind of a collective, as reported to observers.

    LATE: the second round of reductions, for gradients added after the first round was launched. AGREE: the exchange at
    the end of an iteration in which the stage's ranks agree on its outcome. It belongs to no bucket group.
    """

    REDUCE = "reduce"
    LATE = "late"
    GATHER = "gather"
    AGREE = "agree"


class GroupScheduler(Protocol):
    """Launches the collectives of bucket groups: a CollectiveScheduler, or GroupAlone."""

    def mark_grad_ready(self, group: "_ParamAndGradBucketGroup", param: nn.Parameter) -> None: ...
    def start_grad_sync(self, groups: Sequence["_ParamAndGradBucketGroup"]) -> None: ...
    def finish(self) -> None: ...
    def start_param_sync(self, groups: Sequence["_ParamAndGradBucketGroup"]) -> None: ...
    def need(self, group: "_ParamAndGradBucketGroup", *, prefetch: bool) -> None: ...


class _ParamAndGradBucketGroup:
    """Buckets that are reduced and gathered together. A scheduler launches their collectives.

    A group built by a script without DistributedDataParallel launches its own collectives: gradients written to
    main_grad are scaled and reduced by start_grad_sync, or by the last register_grad_ready with overlap_grad_reduce.

    ddp_config: None disables overlap in a standalone group. collective_group, collective_group_size: must be None or
    match the buckets; otherwise ValueError is raised. name: used in messages; must be the same on all ranks.
    is_last_microbatch: whether the current microbatch is the iteration's last. Only its gradients are counted.
    is_last_backward: whether the current backward pass is the iteration's last. scheduler: launches the collectives;
    GroupAlone until a CollectiveScheduler calls `attach`. number: the group's index among all groups of that scheduler.
    """

    number: int
    scheduler: GroupScheduler

    def __init__(
        self,
        buckets: Sequence[_ParamAndGradBucket],
        ddp_config: DistributedDataParallelConfig | None = None,
        collective_group: dist.ProcessGroup | None = None,
        collective_group_size: int | None = None,
        *,
        name: str = "bucket group",
    ) -> None:
        self.buckets, self.ddp_config = list(buckets), ddp_config
        self._check_group(collective_group, collective_group_size)
        self.rename(name)
        self.slots = [slot for bucket in self.buckets for slot in bucket.slots]
        self.is_last_microbatch = self.is_last_backward = True
        self.param_state = ParamState.CURRENT
        self._expected_grads = _ExpectedGrads(len(self.slots))
        self.arrival = Arrival(self.device)
        self._index_of = {slot.param: index for index, slot in enumerate(self.slots)}
        self._grads_of = {slot.param: bucket.grads for bucket in self.buckets for slot in bucket.slots}
        self._gathers: list[Handle] = []
        # Attributes that Megatron's users read.
        self.params = {slot.param for slot in self.slots}
        self.param_to_bucket = {slot.param: bucket for bucket in self.buckets for slot in bucket.slots}
        self.scheduler = GroupAlone(self)
        # Called when the parameters are gathered; set by their owner on this rank.
        self.on_arrival: Callable[[], None] | None = None

    def attach(self, scheduler: GroupScheduler, number: int, *, trace: CollectiveTrace | None) -> None:
        """Makes the group's collectives part of a scheduler's common order.

        number: index of the group among all groups. trace: records the group's collectives; None if the group is not
        identical on all ranks of the stage.
        """
        self.scheduler, self.number = scheduler, number
        for bucket in self.buckets:
            bucket.trace = trace

    # Public methods. The scheduler launches the collectives of all groups in a fixed order.

    def register_grad_ready(self, param: nn.Parameter, force_all_reduce: bool = False) -> None:
        """Records that the caller has added a parameter's gradient to `param.main_grad`.

        force_all_reduce: see start_grad_sync.

        Raises RuntimeError while the gradient is being reduced, if gradients are freed after their reduction, and if
        gradients are scaled and autograd also produced a gradient of the parameter in this iteration. Raises ValueError
        for a parameter of a different group.
        """
        if param not in self._grads_of:
            names = ", ".join(slot.name for slot in self.slots)
            raise ValueError(
                f"register_grad_ready was given a parameter of shape {tuple(param.shape)} that is not in bucket group "
                f"{self.name}: must be one of {names}"
            )
        self._check_all_reduce(force_all_reduce, "register_grad_ready")
        self.mark_added(param)
        self.scheduler.mark_grad_ready(self, param)

    def start_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Launches the reductions of this group and of all groups that precede it in launch order. Collective.

        force_all_reduce: accepted only if buckets are not sharded, where every rank receives all sums anyway. Otherwise
        ValueError is raised.
        """
        self._check_all_reduce(force_all_reduce, "start_grad_sync")
        self.scheduler.start_grad_sync([self])

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Reduces the remaining groups of the scheduler and waits for the reductions of all of its groups. Collective.

        The first call waits; later calls by other groups return immediately. force_all_reduce: see start_grad_sync.
        """
        self._check_all_reduce(force_all_reduce, "finish_grad_sync")
        self.scheduler.finish()

    def free_overlap_buffers(self) -> None:
        """Frees the communication buffers kept between iterations; later iterations reallocate them."""
        for bucket in self.buckets:
            bucket.grads.free_spare()

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Launches the gathers of this group and of all groups that precede it in gather order. Collective.

        force_sync: also waits for this group's parameters.
        """
        self.scheduler.start_param_sync([self])
        if force_sync:
            self.scheduler.need(self, prefetch=False)

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        """Waits for this group's parameters. Collective.

        Also launches the next pending gather unless skip_next_bucket_dispatch is set.
        """
        self.scheduler.need(self, prefetch=not skip_next_bucket_dispatch)

    def rename(self, name: str) -> None:
        """Sets the group's name for messages, which must be the same on all ranks. Call before `attach`."""
        self.name = name
        for bucket in self.buckets:
            bucket.name = name

    # Gradients, in the order of an iteration.

    def accumulate(self, param: nn.Parameter) -> None:
        """Accumulates `param.grad`, if any, in the bucket. A late gradient is kept for the second round."""
        self._grads_of[param].accumulate(param)

    def add(self, param: nn.Parameter, new: WeightGrad) -> None:
        """Computes a deferred weight gradient and adds it to main_grad.

        A late gradient is kept for the second round of reductions.
        """
        self._grads_of[param].add(param, new)

    def mark_added(self, param: nn.Parameter) -> None:
        """Records that the caller has added an unscaled gradient to main_grad."""
        self._grads_of[param].mark_added(param)

    def count_gradient(self, param: nn.Parameter) -> bool:
        """Counts a gradient of the last microbatch, and returns whether it was the last one expected in this group."""
        return self._expected_grads.count(self._index_of[param])

    @property
    def is_complete(self) -> bool:
        """Whether all gradients expected in this iteration have been counted."""
        return self._expected_grads.is_complete

    def learn_counts(self) -> None:
        """Updates the expected gradient counts from the counts of this iteration or backward pass."""
        self._expected_grads.learn()

    @property
    def grad_state(self) -> GradState:
        """State of the gradients, which is the same in all buckets."""
        return self.buckets[0].grads.state

    @property
    def is_late(self) -> bool:
        """Whether gradients were added after the most recent reduction was launched."""
        return any(bucket.grads.is_late for bucket in self.buckets)

    @property
    def is_moving(self) -> bool:
        """Whether any gradients are being reduced and therefore cannot be scaled now."""
        return any(bucket.grads.is_moving for bucket in self.buckets)

    def missing(self) -> list[str]:
        """Returns the names of the parameters without a gradient in this iteration."""
        return [name for bucket in self.buckets for name in bucket.grads.missing()]

    @trace_range("_ParamAndGradBucketGroup.launch_reductions")
    def launch_reductions(self) -> None:
        """Launches the reductions of all buckets. Collective."""
        for bucket in self.buckets:
            bucket.grads.launch(is_last=self.is_last_backward)

    def launch_second_round(self) -> None:
        """Launches the reduction of late gradients. Collective; all ranks call it if any rank has a late gradient."""
        for bucket in self.buckets:
            bucket.grads.launch_second_round(is_last=self.is_last_backward)

    def advance(self) -> None:
        """Starts the second stage of each reduction, so that second stages of several groups overlap. Collective."""
        for bucket in self.buckets:
            bucket.grads.advance()

    def advance_early(self) -> bool:
        """Starts second stages that are ready, without blocking; returns whether nothing is left to start early."""
        return all(bucket.grads.advance_early() for bucket in self.buckets)

    def advance_second_round(self) -> None:
        """Starts the second stage of the second round's reductions, after `advance` of all groups. Collective."""
        for bucket in self.buckets:
            bucket.grads.advance_second_round()

    @trace_range("_ParamAndGradBucketGroup.complete_reductions")
    def complete_reductions(self) -> None:
        """Waits until all gradients are reduced; in sharded buckets, only this rank's shard receives the sum."""
        for bucket in self.buckets:
            bucket.grads.complete()

    def copy_from_comm(self) -> None:
        """Copies reduced gradients, including changes made by hooks, to each main_grad with a wider dtype."""
        for bucket in self.buckets:
            bucket.grads.copy_from_comm()

    def works(self, traffic: Traffic) -> list[dist.Work]:
        """Returns torch's work handles of the collectives in flight, for observers."""
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
        """Whether the sums are complete, so that hooks and an optimizer in backward can use them."""
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
        """Waits for each bucket's oldest reduction and adds its result to the sum."""
        for bucket in self.buckets:
            bucket.grads.settle()

    def resume_accumulation(self) -> None:
        """Allows further gradients to be added to reduced sums."""
        for bucket in self.buckets:
            bucket.grads.resume_accumulation()

    # Between iterations.

    def reset(self) -> None:
        """Begins an iteration. No reduction may be in flight."""
        self._expected_grads.forget()
        for bucket in self.buckets:
            bucket.grads.reset()

    def abandon(self) -> None:
        """Ends reductions in flight and discards their results. Collective."""
        for bucket in self.buckets:
            bucket.grads.abandon()

    def drop_captured(self) -> None:
        """Begins an iteration after the capture of a CUDA graph, because captured collectives did not run."""
        self.reset()
        self._gathers.clear()
        self.arrival.forget()

    def note_replayed(self) -> None:
        """Records that a graph replay has reduced the gradients and, if captured, gathered the parameters."""
        for bucket in self.buckets:
            bucket.grads.state = GradState.REDUCED
        # Streams other than the graph's must wait for the parameters that it gathered.
        self.arrival.note()

    def name_of(self, param: nn.Parameter) -> str:
        """Returns the name of a parameter of this group."""
        return self.slots[self._index_of[param]].name

    # Parameters.

    @trace_range("_ParamAndGradBucketGroup.launch_gathers")
    def launch_gathers(self) -> None:
        """Launches the gathers of all buckets, to which each rank contributes its parameter shards. Collective."""
        self._gathers += [bucket.gather() for bucket in self.buckets]
        self.param_state = ParamState.IN_FLIGHT

    @trace_range("_ParamAndGradBucketGroup.complete_gathers")
    def complete_gathers(self) -> None:
        """Waits for the gathers in flight, copies the parameters into place and calls on_arrival."""
        for handle in self._gathers:
            handle.wait()
        self._gathers.clear()
        for bucket in self.buckets:
            bucket.complete_gather()
        self.arrival.note()
        self.param_state = ParamState.ARRIVED
        if self.on_arrival is not None:
            self.on_arrival()

    def _check_all_reduce(self, force_all_reduce: bool, call: str) -> None:
        if force_all_reduce and self.is_sharded:
            raise ValueError(
                f"{call}: force_all_reduce and use_distributed_optimizer are both set, but the distributed optimizer "
                "provides each rank with the sums of its shards only: set only one of them"
            )

    def _check_group(self, group: dist.ProcessGroup | None, size: int | None) -> None:
        if group is not None and group is not self.collective_group:
            raise ValueError(f"collective_group is {group}: must be the group of the buckets, {self.collective_group}")
        if size not in (None, self.collective_group_size):
            raise ValueError(
                f"collective_group_size is {size}: must match the buckets' group size, {self.collective_group_size}"
            )

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.buckets[0].device

    @property
    def collective_group(self) -> dist.ProcessGroup | None:
        """Ranks over which shards are distributed and gradients are summed; None means this rank alone.

        If there are several optimizer instances, a second sum over the instances follows.
        """
        return self.buckets[0].settings.group

    @property
    def collective_group_size(self) -> int:
        """Number of ranks in collective_group."""
        return group_size(self.collective_group)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank owns a shard of the parameters, which the other ranks gather."""
        return self.buckets[0].settings.is_sharded

    @property
    def can_repeat(self) -> bool:
        """Whether gradients in flight keep their values until the wait; see ReductionPolicy.can_repeat."""
        return self.buckets[0].settings.policy.can_repeat


class GroupAlone:
    """Launches the collectives of one group as soon as they are asked for, in no common order with other groups.

    It serves groups that a script built without DistributedDataParallel.
    """

    def __init__(self, group: _ParamAndGradBucketGroup) -> None:
        self._group = group

    def mark_grad_ready(self, group: _ParamAndGradBucketGroup, param: nn.Parameter) -> None:
        """Counts a gradient; with overlap, the last expected one launches the reductions."""
        overlaps = group.ddp_config is not None and group.ddp_config.reduces_in_backward
        if group.is_last_microbatch and group.count_gradient(param) and overlaps:
            self.start_grad_sync([group])

    def start_grad_sync(self, groups: Sequence[_ParamAndGradBucketGroup]) -> None:
        """Launches the reductions, unless they were launched already. Collective."""
        group = self._group
        if group.grad_state is not GradState.COLLECTING:
            return
        # A script may have written gradients without calling register_grad_ready; they are scaled like all others.
        missing = set(group.missing())
        for slot in group.slots:
            if slot.name in missing:
                group.mark_added(slot.param)
        group.launch_reductions()

    def finish(self) -> None:
        """Launches the reductions, if necessary, and waits for them. Collective."""
        self.start_grad_sync([self._group])
        self._group.advance()
        self._group.complete_reductions()

    def start_param_sync(self, groups: Sequence[_ParamAndGradBucketGroup]) -> None:
        """Launches the gathers of sharded parameters, unless they are in flight. Collective."""
        if self._group.is_sharded and self._group.param_state is not ParamState.IN_FLIGHT:
            self._group.launch_gathers()

    def need(self, group: _ParamAndGradBucketGroup, *, prefetch: bool) -> None:
        """Waits for the gathers in flight. prefetch: has no effect."""
        if group.param_state is ParamState.IN_FLIGHT:
            group.complete_gathers()


# Observers.


class BucketObserver(Protocol):
    """Callbacks of an iteration, in the order in which one bucket group triggers them.

    Callbacks of several groups interleave. An exception in a callback aborts the iteration; after an exception in a
    `before_` callback, the announced event does not take place.
    """

    def attach(self, groups: Sequence[_ParamAndGradBucketGroup], module: nn.Module) -> None:
        """Starts observing the bucket groups of one more model chunk; module: the wrapped module."""
        ...

    def begin_iteration(self) -> None:
        """Called once per chunk, before its gradients are zeroed and before the first gradient of any chunk."""
        ...

    def before_grad(self, group: _ParamAndGradBucketGroup, param: nn.Parameter) -> None:
        """Called when a gradient is ready, before it is accumulated or, if late, kept for the second round."""
        ...

    def after_grad(self, group: _ParamAndGradBucketGroup, param: nn.Parameter) -> None:
        """Called after a gradient was accumulated or, if late, kept for the second round."""
        ...

    def before_launch(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> None:
        """Called before the group's collectives of one kind are launched."""
        ...

    def after_launch(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> None:
        """Called after the group's collectives of one kind were launched."""
        ...

    def before_wait(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> None:
        """Called before each wait for the group's collectives; a reduction in two stages has several waits."""
        ...

    def after_wait(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> None:
        """Called after each wait for the group's collectives."""
        ...

    def before_agreement(self) -> None:
        """Called after all launches, before the ranks of the stage agree on the iteration's outcome."""
        ...

    def after_agreement(self) -> None:
        """Called after the ranks of the stage have agreed on the iteration's outcome."""
        ...

    def end_iteration(self) -> None:
        """Called when all groups of all chunks are reduced, before the optimizer's step."""
        ...

    def gather_due(self, group: _ParamAndGradBucketGroup) -> None:
        """Called after this rank's parameter shards were updated. Other ranks' shards are now stale."""
        ...


# Expected gradient counts.


class _ExpectedGrads:
    """Expected number of gradients of each parameter in the last microbatch, learned from earlier iterations.

    At least one gradient of each parameter is expected. The expected count rises immediately and falls only after
    _PATIENCE iterations. A count that is too high merely delays the reduction to the end of backward. A count that is
    too low makes gradients late.
    """

    def __init__(self, num_params: int) -> None:
        self._expected = [1] * num_params
        self._counts = [0] * num_params
        self._num_incomplete = num_params
        # By parameter: the number of consecutive iterations with fewer gradients than expected, and the largest count
        # in them.
        self._fewer: dict[int, tuple[int, int]] = {}

    @property
    def is_complete(self) -> bool:
        """Whether every parameter has at least the expected number of gradients."""
        return self._num_incomplete == 0

    def count(self, index: int) -> bool:
        """Counts a gradient of a parameter, and returns whether it was the last one expected in the group."""
        self._counts[index] += 1
        if self._counts[index] != self._expected[index]:
            return False
        self._num_incomplete -= 1
        return self._num_incomplete == 0

    def forget(self) -> None:
        """Clears this iteration's counts."""
        self._counts = [0] * len(self._counts)
        self._num_incomplete = len(self._counts)

    def learn(self) -> None:
        """Ends an iteration and updates the expected counts for the next one."""
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
