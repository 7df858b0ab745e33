"""Gradients that live no longer than they must: from the first of a bucket to the end of its reduction.

The sums of all backward passes add up in what this rank owns (ZeRO-2: its shard); where sums are released, not even
that persists. scheduler.py knows when a reduction is launched, see [Note: backward passes] in launch_sequence.py, and
grad_hooks.py who gets the sums.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from megatron.core.dense_memory import flat_view, in_order_of, shaped_view
from megatron.core.device import Writers, keep_for_current_stream
from megatron.core.distributed.bucket_group import BucketGroupBase, GradState, Traffic
from megatron.core.distributed.collectives import Handle, reduce_bucket_, shard_of
from megatron.core.distributed.consistency import GradChecks
from megatron.core.distributed.flat_buffer import (
    _ParamAndGradBucket,
    plain_grad,
)
from megatron.core.distributed.layout import Fragment, Span
from megatron.core.distributed.transient_buffer import GradMemory, SumMemory, TransientBuffer
from megatron.core.process_groups_config import group_size
from megatron.core.tensor_parallel.weight_grads import WeightGrad


@dataclass(frozen=True)
class _Reduction:
    """A bucket's gradients on their way: flat: [bucket elements], the gradients' dtype.

    into: where this rank's part of the sum goes, [owned elements], the same dtype; None: to its place in `flat`.
    is_last: of the last backward of an iteration.
    """

    flat: torch.Tensor
    handle: Handle
    into: torch.Tensor | None
    is_last: bool


class TransientGroup(BucketGroupBase):
    """One bucket of a TransientBuffer. In a backward pass:

    1. the first gradient allocates the bucket's memory, in which all that come add up;
    2. `launch_reductions` sends it, and what comes from then on begins memory of its own;
    3. `settle` adds what this rank owns of the sum to shard_grads and frees the memory.

    Where sums are released, the last backward pass of an iteration leaves its own in the message, which `reduced_grad`
    gives away; a gradient that becomes ready then has nothing to add to. checks: looks at what each reduction sends;
    None: nobody does.
    """

    def __init__(self, bucket: _ParamAndGradBucket, *, name: str, checks: GradChecks | None = None) -> None:
        assert isinstance(bucket.buffer, TransientBuffer), "a bucket of gradients that do not persist"
        super().__init__([bucket], name=name)
        self.bucket, self._buffer, self._checks = bucket, bucket.buffer, checks
        # The sums, where they persist.
        self.shard = self._buffer.shard_grad(bucket.layout.index)
        # This rank's part of the buffer's elements.
        self._own = self._buffer.owned_spans()[bucket.layout.index]
        self._is_released = self._buffer.memory.sums is SumMemory.RELEASED
        # What the sums add up in, once there are any: `shard`, where they persist.
        self._sum: torch.Tensor | None = None
        self._is_held = self._is_last_sent = False
        fragments = self._buffer.layout.fragments(bucket.layout.index)
        self._fragment_of = {self._buffer.slots[one.param].param: one for one in fragments}
        self._gaps = _gaps(bucket.layout.span, [one.span for one in fragments])
        self._is_standing = self._buffer.memory.grads is GradMemory.STANDING
        self._writers = Writers(self.device)
        self._flat: torch.Tensor | None = None
        self._filled: set[nn.Parameter] = set()
        self._counted: set[nn.Parameter] = set()
        self._in_flight: deque[_Reduction] = deque()
        self._has_sum = False
        self._stage: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the bucket's gradients in memory: accumulating, in flight and reduced."""
        held = [self._flat, self._sum, *(one.flat for one in self._in_flight)]
        return sum(one.untyped_storage().nbytes() for one in held if one is not None)

    # Gradients.

    @property
    def is_late(self) -> bool:
        """Whether any gradient was added since the last launch."""
        return bool(self._filled)

    @property
    def is_moving(self) -> bool:
        """Whether some gradients were added in this iteration and are not all reduced yet."""
        return bool(self._counted) and self.grad_state is not GradState.REDUCED

    def take(self, param: nn.Parameter) -> None:
        """Moves `param.grad` into the bucket. The attribute stays set, since other buckets may hold parts of it."""
        grad = plain_grad(param)
        if grad is not None:
            self._move(param, grad)

    def add(self, param: nn.Parameter, new: WeightGrad) -> None:
        self._move(param, new.compute())

    def note_added(self, param: nn.Parameter) -> None:
        """Records that a kernel has added a parameter's gradient to its persistent memory."""
        self._open()
        self._note(param)

    def unfilled(self) -> list[str]:
        return [slot.name for slot in self.slots if slot.param not in self._counted]

    @record_function("TransientGroup.launch_reductions")
    def launch_reductions(self) -> None:
        self._writers.join()
        flat = self._open()
        for param, fragment in self._fragment_of.items():
            if param not in self._filled:
                self._place(flat, fragment).zero_()
        for start, end in self._gaps:
            flat[start:end].zero_()
        if self._is_standing and self._buffer.settings.scale != 1.0:
            flat.mul_(self._buffer.settings.scale)
        if self._checks is not None:
            names = {slot.param: slot.name for slot in self.slots}
            self._checks.measure([(names[p], self._place(flat, part)) for p, part in self._fragment_of.items()])
        if self.trace is not None:
            group = self._buffer.data_parallel_group
            op = "reduce-scatter" if self.is_sharded else "all-reduce"
            self.trace.record(op=op, group=group, flat=flat, bucket=self.name)
        is_last = self.is_last_backward
        into = self._place_of_sum(is_last=is_last)
        self._in_flight.append(_Reduction(flat, self._reduce(flat, into), into, is_last))
        self._is_last_sent = is_last
        self._flat = None
        self._filled.clear()

    @property
    def keeps_memory(self) -> bool:
        return self._is_standing

    def settle(self) -> None:
        """Waits for the oldest reduction, if there is one, and adds this rank's part to the sum."""
        if not self._in_flight:
            return
        done = self._in_flight.popleft()
        done.handle.wait()
        # Another stream may have allocated it, and would hand its memory out while this one reads.
        keep_for_current_stream(done.flat)
        total = shard_of(done.flat, self._buffer.data_parallel_group) if self.is_sharded else done.flat
        if self._has_sum:
            assert self._sum is not None, "a sum that was given away gets no more"
            self._sum.add_(total)
        elif done.into is not None:
            self._sum = done.into
        elif not self._is_released:
            self._sum = self.shard.copy_(total)
        else:
            # With several to come the message would be in the way.
            self._sum = total.clone() if self._is_held and self.is_sharded else total
        self._has_sum = True
        if self._is_standing:
            # Kernels add to it.
            done.flat.zero_()
        self._buffer.messages.give_back(done.flat)

    @property
    def can_be_released(self) -> bool:
        return self.is_closed and not self._in_flight

    @property
    def is_closed(self) -> bool:
        return self._is_released and self._is_last_sent and not self._is_held

    def hold(self) -> None:
        """Keeps the sums to the end of the iteration, unless they were released already."""
        self._is_held = self._sum is not None or not self._has_sum

    def reduced_grad(self, bucket: _ParamAndGradBucket) -> torch.Tensor:
        """This rank's part of the sums, [owned elements], the gradients' dtype. A released sum becomes the caller's."""
        if not self._is_released:
            return self.shard
        assert self._sum is not None, f"{self.name} was given away, or not reduced"
        given, self._sum = self._sum, None
        return given

    def start_second_round(self) -> None:
        if self._flat is not None:
            keep_for_current_stream(self._flat)
        self.launch_reductions()

    def advance(self) -> None:
        for one in self._in_flight:
            one.handle.advance()

    def advance_early(self) -> bool:
        return all(one.handle.advance_early() for one in self._in_flight)

    def advance_second_round(self) -> None:
        """Does nothing: `advance` covers the second round."""

    @record_function("TransientGroup.complete_reductions")
    def complete_reductions(self) -> None:
        """Waits for all reductions; `shard` then holds the sums of all backward passes, unless they are released."""
        while self._in_flight:
            self.settle()
        if not self._has_sum:
            assert not self._is_released, "every iteration has a last backward pass"
            self._sum = self.shard.zero_()
        self.grad_state, self._has_sum = GradState.REDUCED, True

    def take_sums(self) -> None:
        """Does nothing: there is no main_grad."""

    def resume_accumulation(self) -> None:
        self.grad_state = GradState.COLLECTING

    def abandon(self) -> None:
        self._drop()
        self.grad_state = GradState.REDUCED

    def reset(self) -> None:
        self._drop()
        self._expected_grads.forget()
        self.grad_state = GradState.COLLECTING

    def works(self, traffic: Traffic) -> list[dist.Work]:
        handles = self._gathers if traffic is Traffic.GATHER else [one.handle for one in self._in_flight]
        return [work for handle in handles for work in handle.works()]

    # Parameters.

    @property
    def comm_dtype(self) -> torch.dtype:
        """The all-gather dtype of parameters."""
        return self._buffer.comm_dtype

    @property
    def is_awaited(self) -> bool:
        """Whether parameters have old values on this rank between an update and the end of the gather."""
        return self._buffer.is_staged or group_size(self._buffer.data_parallel_group) > 1

    def staged_shard(self) -> torch.Tensor:
        """The place to which an optimizer writes this rank's new parameters for the next gather.

        [shard elements], in the all-gather dtype.
        """
        if self._stage is None:
            self._stage = torch.empty(self.bucket.layout.span.numel, dtype=self.comm_dtype, device=self.device)
        return shard_of(self._stage, self._buffer.data_parallel_group)

    def fill_stage(self) -> None:
        """Makes this rank's part of what is sent what the parameters are now."""
        if not self._buffer.is_staged:
            return
        self.staged_shard()
        assert self._stage is not None, "staged_shard allocates it"
        for param, fragment in self._fragment_of.items():
            part = fragment.span.intersection(self._own)
            if part.numel:
                start = fragment.start + part.start - fragment.span.start
                here = Fragment(fragment.param, part, start)
                self._place(self._stage, here).copy_(self._part_of(param, here))

    def poison(self) -> None:
        """Fills what is no parameter's value before the gather with NaN, for debugging."""
        # What is staged has not come to this rank's own part either.
        current = Span(self._own.start, 0 if self._buffer.is_staged else self._own.numel)
        for param, fragment in self._fragment_of.items():
            flat = self._part_of(param, fragment)
            here = fragment.span.intersection(current)
            first = max(0, min(here.start - fragment.span.start, fragment.span.numel))
            flat[:first].fill_(float("nan"))
            flat[first + here.numel :].fill_(float("nan"))

    def _message_of(self, bucket: _ParamAndGradBucket) -> torch.Tensor:
        if not self._buffer.is_staged:
            return super()._message_of(bucket)
        if self._stage is None:
            self.fill_stage()
        assert self._stage is not None, "fill_stage allocates it"
        return self._stage

    @torch.no_grad()
    def _unpack(self) -> None:
        if self._stage is not None:
            for param, fragment in self._fragment_of.items():
                self._part_of(param, fragment).copy_(self._place(self._stage, fragment))
            self._stage = None

    # Inside.

    def _open(self) -> torch.Tensor:
        """The memory for gradients that come now."""
        if self._flat is None and self._is_standing:
            while self._in_flight:
                # They are in flight in the same memory: a parameter has another gradient in the same backward pass.
                self.settle()
            self._flat = self.bucket.grad_data
        elif self._flat is None:
            self._flat = self._buffer.messages.take(self.bucket.layout.span.numel)
        return self._flat

    def _move(self, param: nn.Parameter, new: torch.Tensor) -> None:
        # A parameter without elements lies in no bucket, but its gradient is counted.
        if param in self._fragment_of:
            self._add(param, new, fragment=self._fragment_of[param])
        self._note(param)

    def _add(self, param: nn.Parameter, new: torch.Tensor, *, fragment: Fragment) -> None:
        # What kernels add has no scale yet: there all get it together.
        scale = 1.0 if self._is_standing else self._buffer.settings.scale
        place = self._place(self._open(), fragment)
        if fragment.span.numel == param.numel():
            # The whole of it, in whatever order it comes.
            place = shaped_view(place, param)
        else:
            new = in_order_of(new, param)[fragment.start : fragment.start + fragment.span.numel]
        if param in self._filled:
            place.add_(new, alpha=scale)
        elif new.dtype == place.dtype:
            torch.mul(new, scale, out=place)
        else:
            # mul would round the product to the narrower type first.
            place.copy_(new).mul_(scale)

    def _place_of_sum(self, *, is_last: bool) -> torch.Tensor | None:
        """Returns the destination of a new reduction; None for its message, or where it is added to a sum."""
        if self._has_sum or self._in_flight or not self.is_sharded:
            return None
        if not self._is_released:
            return self.shard
        # The last one's message has room for it.
        return None if is_last and not self._is_held else torch.empty_like(self.shard, device=self.device)

    def _note(self, param: nn.Parameter) -> None:
        self._writers.note()
        self._filled.add(param)
        self._counted.add(param)

    def _place(self, flat: torch.Tensor, fragment: Fragment) -> torch.Tensor:
        start = fragment.span.start - self.bucket.layout.span.start
        return flat[start : start + fragment.span.numel]

    def _part_of(self, param: nn.Parameter, fragment: Fragment) -> torch.Tensor:
        # Also of a parameter that others may not read: what has come is put there.
        with torch._C.DisableTorchFunctionSubclass():
            return flat_view(param)[fragment.start : fragment.start + fragment.span.numel]

    def _reduce(self, flat: torch.Tensor, into: torch.Tensor | None) -> Handle:
        settings = self._buffer.settings
        return reduce_bucket_(flat, settings.group, sharded=self.is_sharded, policy=settings.policy, into=into)

    def _drop(self) -> None:
        while self._in_flight:
            done = self._in_flight.popleft()
            done.handle.wait()
            self._buffer.messages.give_back(done.flat)
        if self._flat is not None:
            self._buffer.messages.give_back(self._flat)
        if self._is_standing:
            self.bucket.grad_data.zero_()
        self._flat, self._has_sum, self._sum = None, False, None
        self._is_held = self._is_last_sent = False
        self._filled.clear()
        self._counted.clear()


def _gaps(whole: Span, spans: Iterable[Span]) -> list[tuple[int, int]]:
    """Returns the ranges of a bucket that belong to no parameter, counted from its start."""
    gaps, position = [], whole.start
    for span in sorted(spans, key=lambda span: span.start):
        gaps.append((position - whole.start, span.start - whole.start))
        position = span.end
    gaps.append((position - whole.start, whole.numel))
    return [(start, end) for start, end in gaps if start < end]
