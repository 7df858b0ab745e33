"""_ParamAndGradBucketGroup: buckets whose gradients are reduced, and whose parameters are gathered, together.

It does what it is told; scheduler.py tells it when, in the same order on every rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from megatron.core.device import Writers, keep_for_current_stream
from megatron.core.distributed.bucket_observer import Traffic
from megatron.core.distributed.collectives import Handle, reduce_bucket_
from megatron.core.distributed.consistency import GradChecks
from megatron.core.distributed.flat_buffer import Entry, _ParamAndGradBucket, plain_grad
from megatron.core.distributed.synced_group import GradState, SyncedGroup
from megatron.core.tensor_parallel.param_attributes import added_to_main_grad
from megatron.core.tensor_parallel.weight_grads import WeightGrad


class _ParamAndGradBucketGroup(SyncedGroup):
    """A group whose gradients stand in their buffers. name: the same on all ranks; checks: None to look at none."""

    def __init__(self, buckets: Sequence[_ParamAndGradBucket], *, name: str, checks: GradChecks | None) -> None:
        super().__init__(buckets, name=name)
        self._checks = checks
        self._bucket_of = {entry.param: bucket for bucket in self.buckets for entry in bucket.entries}
        self._writers = Writers(self.device)
        # Gradients that came when their bucket was on its way, in the order they came.
        self._late: list[tuple[Entry, torch.Tensor]] = []
        self._late_sums: list[torch.Tensor] = []
        self._reductions: list[Handle] = []
        self._late_reductions: list[Handle] = []

    @property
    def is_late(self) -> bool:
        """Whether a gradient of this iteration came when its bucket was on its way."""
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
            if self._checks is not None and self._checks.looks_at(param):
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
        """Records that a caller added a gradient to main_grad, without the scale."""
        if self.grad_state is not GradState.COLLECTING:
            name = self._bucket_of[param].buffer.entry_of[param].name
            raise RuntimeError(f"register_grad_ready: the gradient of {name} was added while that was being reduced")
        self._writers.note()
        self._bucket_of[param].buffer.note_added(param)

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
            for entry in self.entries:
                entry.take_wire()

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
        self.readiness.forget()
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
        if self.ledger is not None:
            self.ledger.record(op=op, group=buffer.data_parallel_group, flat=flat, bucket=self.name)
        return reduce_bucket_(
            flat, buffer.data_parallel_group, sharded=buffer.is_sharded, policy=buffer.settings.policy
        )

    def _put_aside(self, entry: Entry, grad: torch.Tensor) -> None:
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
