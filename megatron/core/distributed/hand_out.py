"""HandOut: gives the reduced buckets of a chunk to hooks, and to an optimizer that is attached.

When a bucket is reduced is launch_order.py's; which hook is due for it, grad_hooks.py's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.profiler import record_function

from megatron.core.distributed.flat_buffer import Entry
from megatron.core.distributed.grad_hooks import GradHooks, ReadyBucket, RunState
from megatron.core.distributed.layout import BucketLayout, RunParam, Span
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.tensor_parallel.param_attributes import param_facts


class HandedBuffer(Protocol):
    """A buffer of parameters and gradients; param_data: [N], what this rank owns of it are owned_spans."""

    param_data: torch.Tensor

    @property
    def is_sharded(self) -> bool: ...
    def owned_spans(self) -> list[Span]: ...


class HandedBucket(Protocol):
    """A bucket of it; see _ParamAndGradBucket."""

    @property
    def buffer(self) -> HandedBuffer: ...
    @property
    def layout(self) -> BucketLayout: ...
    @property
    def entries(self) -> list[Entry]: ...


class HandedGroup(Protocol):
    """Buckets that are reduced together; see SyncedGroup."""

    name: str

    @property
    def entries(self) -> Sequence[Entry]: ...
    @property
    def buckets(self) -> Sequence[HandedBucket]: ...
    def reduced_grad(self, bucket: Any) -> torch.Tensor:
        """This rank's part of a bucket's gradient: [n], the gradients' dtype."""
        ...

    def take_sums(self) -> None:
        """Moves sums that hooks have changed to their places."""
        ...


class GradConsumer(Protocol):
    """An optimizer that takes each bucket's gradient as soon as it is reduced."""

    def begin(self) -> None:
        """Begins an iteration, perhaps after an aborted one, and drops gradients that are still held."""
        ...

    def take(self, bucket: ReadyBucket, place: HandedBucket) -> None:
        """Receives a bucket after all hooks; place: where it lies in the wrapper's buffers. Memory: see ReadyBucket."""
        ...


class StateProvider(Protocol):
    """Provides an optimizer's state for each bucket."""

    def states(self, place: HandedBucket) -> Sequence[RunState]:
        """Returns the optimizer state of a bucket, for hooks."""
        ...


def is_completed_later(param: nn.Parameter, *, config: ModelParallelConfig, groups: ProcessGroupCollection) -> bool:
    """Whether complete_model_grads changes a parameter's gradient after it is reduced over data-parallel ranks; any
    shape and dtype.
    """
    facts = param_facts(param)
    return (
        config.calculate_per_token_loss
        or (facts.sequence_parallel and group_size(groups.tp) > 1)
        or (facts.shared_embedding and group_size(groups.embd) > 1)
    )


def not_wrapped(param: nn.Parameter) -> ValueError:
    """Returns the error of owned_shard for a parameter, any shape and dtype, that no rank owns."""
    return ValueError(
        f"owned_shard was given a parameter of shape {tuple(param.shape)} that is not wrapped: must be one that "
        "required grad when its module was"
    )


@dataclass(frozen=True, eq=False)
class _Place:
    """A bucket and what this rank owns of it: span: in the buffer."""

    bucket: HandedBucket
    name: str
    span: Span
    slices: list[RunParam]

    @classmethod
    def of(cls, bucket: HandedBucket, name: str) -> "_Place":
        owned = bucket.buffer.owned_spans()[bucket.layout.index]
        return cls(bucket, name, owned, [_slice(entry, owned) for entry in bucket.entries])

    @property
    def shard(self) -> torch.Tensor:
        return self.bucket.buffer.param_data[self.span.start : self.span.end]

    @property
    def version(self) -> int:
        """Which writes to the flat parameters move, by whatever view."""
        return self.bucket.buffer.param_data._version


def _slice(entry: Entry, owned: Span) -> RunParam:
    part = entry.span.intersection(owned)
    if part.numel == 0:
        # In the order of places all the same.
        return RunParam(entry.name, entry.param, Span(min(part.start - owned.start, owned.numel), 0), 0)
    start = entry.start + part.start - entry.span.start
    return RunParam(entry.name, entry.param, Span(part.start - owned.start, part.numel), start)


class HandOut:
    """Releases the reduced bucket groups of one chunk to hooks and to the attached optimizer.

    In an iteration, after `begin`, each group is released once by `reduced`, and groups whose gradients are completed
    later by `complete`, in launch order. is_later: whether a parameter's gradient is completed later.

    [Note: several gradients] A parameter has one gradient in a backward, unless activation recomputation runs others
    inside. The first backward counts how many there are. Until that is known, a release in backward would be too early,
    and groups `hold` their gradients to the end.
    """

    def __init__(self, groups: Sequence[HandedGroup], *, is_later: Callable[[nn.Parameter], bool]) -> None:
        self.hooks = GradHooks({entry.param: entry.name for group in groups for entry in group.entries})
        self.consumer: GradConsumer | None = None
        self._provider: ReferenceType[StateProvider] | None = None
        self._places = {
            group: [_Place.of(bucket, f"{group.name}.{number}") for number, bucket in enumerate(group.buckets)]
            for group in groups
        }
        self._later = {group for group in groups if any(is_later(entry.param) for entry in group.entries)}
        self._waiting: list[HandedGroup] = []
        self._given: set[HandedGroup] = set()
        # Of buckets that a hook waits with.
        self._place_of: dict[ReadyBucket, _Place] = {}
        self._owned: dict[nn.Parameter, nn.Parameter] = {}
        # Whether a backward has shown how many gradients come; see [Note: several gradients].
        self.knows_counts = False
        self._is_stopped = False
        # An error left some hooks without their calls.
        self._is_broken = False

    @property
    def groups(self) -> list[HandedGroup]:
        """All that there is to hand out."""
        return list(self._places)

    def owned_shard(self, param: nn.Parameter) -> nn.Parameter:
        """This rank's part of a parameter, always the same object: itself, or where it is sharded [n], a view."""
        if param not in self._owned:
            found = ((place, one) for places in self._places.values() for place in places for one in place.slices)
            mine = next(((place, one) for place, one in found if one.param is param), None)
            if mine is None:
                raise not_wrapped(param)
            place, one = mine
            is_whole = not place.bucket.buffer.is_sharded
            self._owned[param] = param if is_whole else nn.Parameter(one.view_of(place.shard))
        return self._owned[param]

    def set_state_provider(self, provider: StateProvider) -> None:
        """Lets hooks see what an optimizer keeps, the last that was given, for as long as somebody else holds it."""
        # Weakly: who drops an optimizer wants its memory back, also where the wrapper goes on.
        self._provider = ref(provider)

    def begin(self) -> None:
        """Begins an iteration."""
        self._waiting.clear()
        self._given.clear()
        self._place_of.clear()
        self._is_stopped = self._is_broken = False
        self.hooks.begin()
        if self.consumer is not None:
            self.consumer.begin()

    def stop(self) -> None:
        """Gives out nothing more until `begin`."""
        self._is_stopped = True

    def check_whole(self) -> None:
        """Raises RuntimeError if an error in a hook or an optimizer kept others from their calls in this iteration."""
        if self._is_broken:
            raise RuntimeError(
                "an error broke the hooks on reduced gradients off in this iteration: call reset_iteration() and run "
                "the iteration again"
            )

    def end_backward(self) -> None:
        """A backward that reduces is over: what it has shown is known."""
        self.knows_counts = True

    def reduced(self, group: HandedGroup) -> None:
        """Releases a group whose gradients are reduced over data-parallel ranks, or queues it for `complete`."""
        if group in self._given or self._is_stopped:
            return
        self._given.add(group)
        if group in self._later:
            self._waiting.append(group)
        else:
            self._give(group)

    def complete(self) -> None:
        """Releases the queued groups, now that all gradients are complete."""
        waiting, self._waiting = self._waiting, []
        for group in waiting:
            self._give(group)

    @record_function("HandOut.give")
    @torch.no_grad()
    def _give(self, group: HandedGroup) -> None:
        self.check_whole()
        self._is_broken = True
        for place in self._places[group]:
            # Taken in any case: what nobody wants is free.
            ready = ReadyBucket(place.name, place.slices, place.shard, group.reduced_grad(place.bucket))
            if self.consumer is None and self.hooks.is_empty:
                continue
            ready.find_states = partial(self._states_of, place)
            self._place_of[ready] = place
            before = place.version
            for one in place.slices:
                if self.hooks.has_param_hooks(one.name):
                    self._fire_param(one, ready.grad)
            free_buckets = self.hooks.fire_bucket(ready)
            if ready not in free_buckets:
                ready.keep()
            if place.version != before:
                # Which of them a hook wrote to nobody knows.
                for seen in {ready, *free_buckets}:
                    seen.note_written()
            for free in free_buckets:
                freed = self._place_of.pop(free)
                if self.consumer is not None:
                    self.consumer.take(free, freed.bucket)
        # Hooks may have changed them.
        group.take_sums()
        self._is_broken = False

    def _states_of(self, place: _Place) -> Sequence[RunState]:
        provider = None if self._provider is None else self._provider()
        return () if provider is None else provider.states(place.bucket)

    def _fire_param(self, one: RunParam, flat: torch.Tensor) -> None:
        owned = self.owned_shard(one.param)
        with _lent(owned, one.view_of(flat).view(owned.shape)):
            self.hooks.fire_param(one.name, owned)


@contextmanager
def _lent(owned: nn.Parameter, grad: torch.Tensor) -> Iterator[None]:
    """Makes `owned.grad` the gradient, rounded to its dtype, inside the block, and copies changes back to `grad`."""
    given = grad.to(owned.dtype)
    rounded = None if given is grad else given.clone()
    owned.grad = given
    try:
        yield
        left = owned.grad
        if left is not None and left is not grad:
            # What a hook left alone keeps the digits that were rounded off; writes to `.data` show in values alone.
            grad.copy_(left if rounded is None else torch.where(left == rounded, grad, left.to(grad.dtype)))
    finally:
        owned.grad = None
