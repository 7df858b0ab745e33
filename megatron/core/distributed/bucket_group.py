"""_ParamAndGradBucketGroup: buckets whose gradients are reduced, and whose parameters are gathered, together.

It does what it is told; launch_order.py tells it when, in the same order on every rank.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from megatron.core.device import Arrival, Writers, keep_for_current_stream
from megatron.core.distributed.bucket_observer import Traffic
from megatron.core.distributed.collectives import Handle, gather_shards_, reduce_bucket_
from megatron.core.distributed.flat_buffer import Entry, _ParamAndGradBucket, plain_grad
from megatron.core.distributed.grad_checks import GradChecks
from megatron.core.distributed.launch_sequence import Readiness
from megatron.core.distributed.ledger import Ledger
from megatron.core.tensor_parallel.param_attributes import added_to_main_grad
from megatron.core.tensor_parallel.weight_grads import WeightGrad


class GradState(Enum):
    """Where the gradients of a group are in an iteration."""

    COLLECTING = "collecting"
    IN_FLIGHT = "in flight"
    REDUCED = "reduced"


class ParamState(Enum):
    """Whether a rank's copy of the parameters is what their owners hold.

    ARRIVED: it is, but other ranks may still wait for theirs; CURRENT: it is on all ranks. A group leaves CURRENT, and
    comes back to it, at the same place of the program on all ranks; in between each is at its own state.
    """

    CURRENT = "current"
    STALE = "stale"
    IN_FLIGHT = "in flight"
    ARRIVED = "arrived"


class GroupOrder(Protocol):
    """What launches groups, each in its turn; LaunchOrder is one."""

    def gradient_ready(self, group: "_ParamAndGradBucketGroup", param: nn.Parameter) -> None:
        """Counts a gradient that is in its place, and launches what need not wait any longer."""
        ...

    def start_grad_sync(self, groups: Sequence["_ParamAndGradBucketGroup"]) -> None:
        """Launches the reductions of these groups and of all before them."""
        ...

    def start_param_sync(self, groups: Sequence["_ParamAndGradBucketGroup"], *, again: bool = False) -> None:
        """Launches their gathers and those before them."""
        ...

    def need(self, group: "_ParamAndGradBucketGroup", *, prefetch: bool) -> None:
        """Waits until a group's parameters may be read; prefetch: launches the next gather as well."""
        ...


class _ParamAndGradBucketGroup:
    """name: the same on all ranks, for messages. checks: None to look at no gradients.

    is_last_microbatch: gradients that come now complete the sums of the iteration. number, order: its place
    among the others and what launches them, given when it is attached to a LaunchOrder.
    """

    number: int
    order: GroupOrder

    def __init__(self, buckets: Sequence[_ParamAndGradBucket], *, name: str, checks: GradChecks | None) -> None:
        self.buckets, self.name = list(buckets), name
        self.entries = [entry for bucket in self.buckets for entry in bucket.entries]
        # Notes what is launched, where all ranks of the stage have this group.
        self.ledger: Ledger | None = None
        self.is_last_microbatch = True
        self.grad_state, self.param_state = GradState.COLLECTING, ParamState.CURRENT
        # Whether a gradient of this iteration came when its bucket was on its way.
        self.is_late = False
        self._checks = checks
        self._bucket_of = {entry.param: bucket for bucket in self.buckets for entry in bucket.entries}
        self._index_of = {entry.param: index for index, entry in enumerate(self.entries)}
        self.readiness = Readiness(len(self.entries))
        device = self.buckets[0].param_data.device
        self._writers, self.arrival = Writers(device), Arrival(device)
        # Gradients that came when their bucket was on its way, in the order they came.
        self._late: list[tuple[Entry, torch.Tensor]] = []
        self._late_sums: list[torch.Tensor] = []
        self._reductions: list[Handle] = []
        self._late_reductions: list[Handle] = []
        self._gathers: list[Handle] = []

    # For users: each in its turn among all groups.

    def register_grad_ready(self, param: nn.Parameter, *unused: Any) -> None:
        """Says that the caller has added a parameter's gradient, any shape and dtype, to `param.main_grad` itself."""
        self.note_added(param)
        self.order.gradient_ready(self, param)

    def start_grad_sync(self, *unused: Any) -> None:
        """Starts to reduce the gradients of this group and of all before it. Collective."""
        self.order.start_grad_sync([self])

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Starts to gather the parameters of this group and of all before it; force_sync: waits, too. Collective."""
        self.order.start_param_sync([self])
        if force_sync:
            self.order.need(self, prefetch=False)

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        """Waits for the parameters; starts the gather that follows unless told to skip. Collective."""
        self.order.need(self, prefetch=not skip_next_bucket_dispatch)

    # Gradients.

    def add(self, param: nn.Parameter, new: WeightGrad) -> None:
        """Lets a gradient be added where it is computed; aside if its place is being reduced."""
        buffer = self._bucket_of[param].buffer
        if self.grad_state is GradState.COLLECTING:
            self._writers.note()
            buffer.add(param, new)
        else:
            self._put_aside(buffer.entry_of[param], new.compute())

    def take(self, param: nn.Parameter) -> None:
        """Moves the gradient that autograd left in `param.grad` to its place, or aside if that is being reduced."""
        buffer = self._bucket_of[param].buffer
        if self.grad_state is GradState.COLLECTING:
            self._writers.note()
            buffer.take(param)
            if self._checks is not None and self._checks.looks_at_each:
                self._checks.measure_sum(buffer.entry_of[param].name, buffer.entry_of[param].main_grad)
            return
        entry = buffer.entry_of[param]
        if added_to_main_grad(param):
            raise RuntimeError(
                f"a kernel added to main_grad of {entry.name} while that was being reduced: wrap all microbatches but "
                "the last in no_sync, or leave out overlap_grad_reduce"
            )
        grad, param.grad = plain_grad(param), None
        if grad is not None:
            # A copy: a CUDA graph may be about to write to it again.
            self._put_aside(entry, grad.clone())

    def note_added(self, param: nn.Parameter) -> None:
        """Says that someone added a gradient to main_grad, without the scale."""
        if self.grad_state is not GradState.COLLECTING:
            name = self._bucket_of[param].buffer.entry_of[param].name
            raise RuntimeError(f"register_grad_ready: the gradient of {name} was added while that was being reduced")
        self._writers.note()
        self._bucket_of[param].buffer.note_added(param)

    def count_gradient(self, param: nn.Parameter) -> bool:
        """Counts a gradient of the last microbatch; whether it was the last one expected in this group."""
        return self.readiness.came(self._index_of[param])

    def unfilled(self) -> list[str]:
        """Names of the parameters without a gradient in this iteration."""
        return [name for bucket in self.buckets for name in bucket.buffer.unfilled(bucket.entries)]

    @record_function("_ParamAndGradBucketGroup.launch_reductions")
    def launch_reductions(self) -> None:
        """Starts to reduce the gradients. Collective."""
        self._writers.join()
        for bucket in self.buckets:
            bucket.buffer.complete(bucket.entries)
            if self._checks is not None:
                self._checks.measure([(entry.name, entry.main_grad) for entry in bucket.entries])
        self._reductions = [self._reduce(bucket, bucket.grad_data) for bucket in self.buckets]
        self.grad_state = GradState.IN_FLIGHT

    def start_second_round(self) -> None:
        """Starts to reduce what came too late on any rank; on all ranks. Collective."""
        for _, grad in self._late:
            keep_for_current_stream(grad)
        if self.can_repeat:
            self._discard()
            # One by one, as they would have been added had nothing been on its way: the sum has the same bits.
            for entry, grad in self._late:
                entry.main_grad.add_(grad, alpha=self._bucket_of[entry.param].buffer.settings.scale)
                if entry.wire is not entry.main_grad:
                    entry.wire.copy_(entry.main_grad)
            self._reductions = [self._reduce(bucket, bucket.grad_data) for bucket in self.buckets]
            return
        for bucket in self.buckets:
            late = torch.zeros_like(bucket.grad_data)
            for entry, grad in self._late:
                if self._bucket_of[entry.param] is bucket:
                    start = entry.span.start - bucket.layout.span.start
                    late[start : start + entry.span.numel].add_(grad.reshape(-1), alpha=bucket.buffer.settings.scale)
            self._late_sums.append(late)
            self._late_reductions.append(self._reduce(bucket, late))

    def advance(self) -> None:
        """Starts what follows the first messages, so that several groups' may be under way together. Collective."""
        for handle in self._reductions:
            handle.advance()

    def advance_early(self) -> bool:
        """Starts what may follow before the end, without blocking the host; whether all of it is under way."""
        return all(handle.advance_early() for handle in self._reductions)

    def advance_second_round(self) -> None:
        """As `advance`, of the second round; after all groups' `advance`, which others may have started long ago."""
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
        """Makes every main_grad what was reduced, if it was."""
        if self.grad_state is GradState.REDUCED:
            for entry in self.entries:
                entry.take_wire()

    def abandon(self) -> None:
        """Ends reductions whose sums nobody wants. Collective."""
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
        self.readiness.forget()
        self._drop_handles()
        self.is_late = False
        self.grad_state = GradState.COLLECTING

    def drop_captured(self) -> None:
        """Begins an iteration after a CUDA graph's capture: what was launched in it has not run."""
        self.reset()
        self._gathers.clear()
        self.arrival.forget()

    def note_replayed(self) -> None:
        """Says that a CUDA graph has reduced the gradients, and gathered parameters if it does."""
        self.grad_state = GradState.REDUCED
        # Streams other than the one that the graph ran on have to wait for what it gathered.
        self.arrival.note()

    # Parameters.

    @record_function("_ParamAndGradBucketGroup.launch_gathers")
    def launch_gathers(self) -> None:
        """Starts to gather the parameters from the ranks that own their shards. Collective."""
        for bucket in self.buckets:
            group = bucket.buffer.data_parallel_group
            if self.ledger is not None:
                self.ledger.record(op="all-gather", group=group, flat=bucket.param_data, bucket=self.name)
            self._gathers.append(gather_shards_(bucket.param_data, group))
        self.param_state = ParamState.IN_FLIGHT

    @record_function("_ParamAndGradBucketGroup.complete_gathers")
    def complete_gathers(self) -> None:
        """Waits for a gather under way."""
        for handle in self._gathers:
            handle.wait()
        self._gathers.clear()
        self.arrival.note()
        self.param_state = ParamState.ARRIVED

    def works(self, traffic: Traffic) -> list[dist.Work]:
        """The messages under way, for observers."""
        handles = {
            Traffic.REDUCE: self._reductions,
            Traffic.LATE: self._late_reductions or self._reductions,
            Traffic.GATHER: self._gathers,
        }
        return [work for handle in handles[traffic] for work in handle.works()]

    @property
    def is_sharded(self) -> bool:
        """Whether each rank owns a shard of the parameters, which the others gather."""
        return self.buckets[0].buffer.is_sharded

    @property
    def can_repeat(self) -> bool:
        """See ObservedGroup."""
        return self.buckets[0].buffer.settings.policy.can_repeat

    def _reduce(self, bucket: _ParamAndGradBucket, flat: torch.Tensor) -> Handle:
        buffer = bucket.buffer
        op = "reduce-scatter" if buffer.is_sharded else "all-reduce"
        if self.ledger is not None:
            self.ledger.record(op=op, group=buffer.data_parallel_group, flat=flat, bucket=self.name)
        return reduce_bucket_(
            flat, buffer.data_parallel_group, sharded=buffer.is_sharded, policy=buffer.settings.policy
        )

    def _put_aside(self, entry: Entry, grad: torch.Tensor) -> None:
        self.is_late = True
        self._late.append((entry, grad))
        if self._checks is not None:
            self._checks.measure([(entry.name, grad)])

    def _discard(self) -> None:
        for handle in self._reductions:
            handle.discard()

    def _drop_handles(self) -> None:
        self._late.clear()
        self._late_sums.clear()
        self._reductions.clear()
        self._late_reductions.clear()
