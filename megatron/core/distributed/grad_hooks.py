"""Users' hooks on reduced gradients, and the release of reduced buckets to these hooks and to an optimizer in backward.

Hooks of this package on unreduced gradients, as accumulated by autograd, are in grad_intake.py. scheduler.py decides
when a bucket is reduced. Releasing a bucket means passing it to the hooks and then to the `consumer`, an optimizer in
backward (GradConsumer). With release_gradients its memory is freed afterwards.

[Note: hooks by name] Torch's own hooks on a parameter are lost when the parameter is replaced, and fire for gradients
that are not reduced yet. Hooks are therefore stored here, by the parameter's name. Hooks registered on a parameter
before it is wrapped are moved here together with torch's dict that contains them, so that users can still remove them
by their handles.

[Note: stale values] A hook may update a parameter during backward, while a backward operation still needs the old value
that it saved. Autograd detects this by the parameter's version counter, which a write to the underlying flat tensor
does not increment. Every writer must therefore call ReadyBucket.note_written.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakMethod

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron.core.device.trace_ranges import trace_range
from megatron.core.distributed.layout import BucketLayout, FlatBuffer, ParamRange, ParamSlot, Span
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.tensor_parallel.param_attributes import param_facts


@dataclass(frozen=True, eq=False)
class RunState:
    """Optimizer state of adjacent elements of a bucket that share a parameter group.

    span: the elements' span in the bucket's flat tensors. settings: settings of their parameter group, such as `lr`, by
    name. master: the values that the optimizer updates, [span.numel], fp32 or wider. moments: by name, [span.numel]
    each. State stored in fp32 or wider is passed as views, state stored in narrower formats as copies.
    """

    span: Span
    settings: Mapping[str, Any]
    master: torch.Tensor
    moments: Mapping[str, torch.Tensor]

    def within(self, part: Span) -> "RunState | None":
        """Returns the state within a part of the bucket, with its span relative to the part; None without overlap."""
        both = self.span.intersection(part)
        if both.numel == 0:
            return None
        start = both.start - self.span.start
        cut = slice(start, start + both.numel)
        moments = {name: flat[cut] for name, flat in self.moments.items()}
        return RunState(Span(both.start - part.start, both.numel), self.settings, self.master[cut], moments)


def _no_states() -> Sequence[RunState]:
    return ()


@dataclass(eq=False)
class ReadyBucket:
    """This rank's part of a bucket, or of adjacent parameters of a bucket, whose gradients are reduced.

    slices: one range for each parameter of the bucket, in buffer order; its span is empty if this rank owns no element
    of the parameter. shard: this rank's flat part of the parameters, [n], the parameters' dtype. Modules read the
    values written to it, after a gather if parameters are sharded. grad: the gradients of the same elements, [n], the
    gradients' dtype; may be modified in place. Padding between parameters is zero in both. n may be 0.

    With DistributedDataParallelConfig.release_gradients the wrapper reuses the memory of `grad` after all hooks have
    returned; call `keep` to retain it.
    """

    name: str
    slices: Sequence[ParamRange]
    shard: torch.Tensor
    grad: torch.Tensor
    find_states: Callable[[], Sequence[RunState]] = _no_states

    @property
    def states(self) -> Sequence[RunState]:
        """Optimizer state of the bucket, as RunState objects; empty while no optimizer exists."""
        return self.find_states()

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters of the bucket."""
        return [one.param for one in self.slices]

    def note_written(self) -> None:
        """Records a write to `shard`; required during backward, see [Note: stale values]."""
        torch.autograd.graph.increment_version(self.params)

    def keep(self) -> torch.Tensor:
        """Keeps `grad` valid after the hooks have returned, and returns it: [n], the gradients' dtype.

        `grad` is copied if it is a view of a larger tensor. Its memory lives as long as this bucket or the returned
        tensor.
        """
        if self.grad.untyped_storage().nbytes() > self.grad.numel() * self.grad.element_size():
            self.grad = self.grad.clone()
        return self.grad

    def restricted(self, names: Iterable[str]) -> "list[ReadyBucket]":
        """Returns buckets with only the named parameters, one for each range of adjacent parameters, as views."""
        wanted = set(names)
        ranges: list[list[int]] = []
        for place, one in enumerate(self.slices):
            if one.name not in wanted:
                continue
            if ranges and ranges[-1][-1] == place - 1:
                ranges[-1].append(place)
            else:
                ranges.append([place])
        if len(ranges) == 1 and len(ranges[0]) == len(self.slices):
            return [self]
        return [self._restricted_to(places) for places in ranges]

    def _restricted_to(self, places: Sequence[int]) -> "ReadyBucket":
        members = [self.slices[place] for place in places]
        following = places[-1] + 1
        bound = self.slices[following].span.start if following < len(self.slices) else self.grad.numel()
        start = members[0].span.start
        # Includes the padding after the last parameter, because kernels round the elements before an unaligned end
        # differently.
        held = [one.span.padded_end for one in members if one.span.numel]
        part = Span(start, min(held[-1], bound) - start if held else 0)
        moved = [replace(one, span=Span(one.span.start - start, one.span.numel)) for one in members]
        cut = slice(part.start, part.end)

        def states() -> Sequence[RunState]:
            found = (state.within(part) for state in self.find_states())
            return [state for state in found if state is not None]

        return ReadyBucket(self.name, moved, self.shard[cut], self.grad[cut], states)


ParamHook = Callable[[nn.Parameter], None]
BucketHook = Callable[[ReadyBucket], None]
PostBackwardHook = Callable[[list[ReadyBucket]], None]


class _PostBackward:
    """A post-backward hook. waiting: names of its parameters that are not ready yet in this iteration."""

    def __init__(self, names: Sequence[str], hook: PostBackwardHook) -> None:
        self.names, self.hook = frozenset(names), hook
        self.waiting = set(names)
        self.ready: list[ReadyBucket] = []

    def begin(self) -> None:
        self.waiting = set(self.names)
        self.ready.clear()

    def mark_ready(self, bucket: ReadyBucket) -> bool:
        """Records that a bucket is ready, and returns whether it was the last one that the hook waited for."""
        here = self.waiting.intersection(one.name for one in bucket.slices)
        if not here:
            return False
        self.waiting -= here
        self.ready.append(bucket)
        return not self.waiting

    def fire(self) -> None:
        ready = [part for bucket in self.ready for part in bucket.restricted(self.names)]
        self.ready.clear()
        self.hook(ready)


class _HookRegistry:
    """Stores and calls the hooks of one wrapper. names: names of the wrapper's parameters that require grad.

    In an iteration, after `begin`:

    1. For each parameter of a reduced bucket, the wrapper calls `fire_param`, which runs the post-accumulate hooks.
    2. It calls `fire_bucket`, which runs bucket hooks and then post-backward hooks whose parameters are all ready, both
       in the order of registration.
    3. `fire_bucket` returns the buckets that no waiting hook needs any longer, in the order in which they became ready.
    """

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self._names = dict(names)
        self._of_param: dict[str, dict[int, Any]] = {}
        self._of_bucket: dict[int, Any] = OrderedDict()
        self._post_backward: dict[int, Any] = OrderedDict()
        # Ready buckets that a waiting post-backward hook still needs.
        self._held: list[ReadyBucket] = []

    # Registration.

    def register_post_accumulate_grad_hook(self, param: nn.Parameter, hook: ParamHook) -> RemovableHandle:
        """Registers a hook that is called with the owned part of a parameter when its gradient is reduced."""
        return _register(self._of_param.setdefault(self._name_of(param), OrderedDict()), hook)

    def register_bucket_ready_hook(self, hook: BucketHook) -> RemovableHandle:
        """Registers a hook that is called with each bucket when it is reduced."""
        return _register(self._of_bucket, hook)

    def register_post_backward_hook(
        self, params: nn.Parameter | Iterable[nn.Parameter], hook: PostBackwardHook
    ) -> RemovableHandle:
        """Registers a hook that is called once per iteration, when the gradients of all `params` are reduced.

        The hook receives a list of ReadyBucket objects restricted to these parameters. Register it between two
        iterations, because a hook registered within an iteration also waits for parameters that were already reduced.
        """
        names = [self._name_of(param) for param in ([params] if isinstance(params, nn.Parameter) else params)]
        if not names:
            raise ValueError("register_post_backward_hook was given no params: pass at least one parameter")
        return _register(self._post_backward, _PostBackward(names, hook))

    def adopt(self) -> None:
        """Moves torch's hooks on the parameters into this registry; autograd no longer calls them.

        See [Note: hooks by name].
        """
        for param, name in self._names.items():
            found = param._post_accumulate_grad_hooks
            if not found:
                continue
            # An empty dict, because with None torch would continue to call the previous hooks.
            param._post_accumulate_grad_hooks = OrderedDict()
            self._of_param[name] = _joined(found, self._of_param.get(name))

    def give_back(self) -> None:
        """Moves parameter hooks back to the parameters, for autograd or the next wrapper; drops all other hooks."""
        for param, name in self._names.items():
            ours = self._of_param.pop(name, None)
            if ours:
                param._post_accumulate_grad_hooks = _joined(ours, param._post_accumulate_grad_hooks)
        self._of_bucket.clear()
        self._post_backward.clear()
        self.begin()

    def follow(self, names: Mapping[nn.Parameter, str]) -> None:
        """Replaces parameters; the new parameters inherit the names, and therefore the hooks."""
        self._names = dict(names)

    # In an iteration.

    @property
    def is_empty(self) -> bool:
        """Whether no hook is registered."""
        return not (self._of_bucket or self._post_backward or any(self._of_param.values()))

    def has_param_hooks(self, name: str) -> bool:
        """Returns whether `fire_param` would call a hook for the parameter with this name."""
        return bool(self._of_param.get(name))

    def begin(self) -> None:
        """Begins an iteration, also after an error; post-backward hooks again wait for all of their parameters."""
        self._held.clear()
        for waiting in self._post_backward.values():
            waiting.begin()

    def fire_param(self, name: str, owned: nn.Parameter) -> None:
        """Calls a parameter's post-accumulate hooks; owned: this rank's part, with the gradient in `.grad`."""
        # A hook may remove itself.
        for hook in list(self._of_param.get(name, {}).values()):
            hook(owned)

    def fire_bucket(self, bucket: ReadyBucket) -> list[ReadyBucket]:
        """Calls bucket hooks, and post-backward hooks whose parameters are now all ready.

        Returns the buckets that no waiting hook needs any longer, which may exclude this one.
        """
        for hook in list(self._of_bucket.values()):
            hook(bucket)
        self._held.append(bucket)
        for waiting in list(self._post_backward.values()):
            if waiting.mark_ready(bucket):
                waiting.fire()
        needed = {id(one) for waiting in self._post_backward.values() for one in waiting.ready}
        free = [one for one in self._held if id(one) not in needed]
        self._held = [one for one in self._held if id(one) in needed]
        return free

    def _name_of(self, param: nn.Parameter) -> str:
        name = self._names.get(param)
        if name is None:
            given = f"shape {tuple(param.shape)}" if isinstance(param, torch.Tensor) else repr(param)
            raise ValueError(
                f"a hook was registered for a parameter that this wrapper does not reduce ({given}): must be a "
                "parameter of the wrapped module that required grad when it was wrapped"
            )
        return name


def _register(hooks: dict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _joined(first: dict[int, Any], other: Mapping[int, Any] | None) -> dict[int, Any]:
    """Adds the hooks of `other` to `first` in place, because handles refer to that dict, and returns `first`."""
    first.update(other or {})
    return first


# The release of reduced buckets to hooks, and to an optimizer in backward.


class ReleasedBucket(Protocol):
    """Interface of a bucket, or of this rank's shards of an FSDP2 unit, that is released to hooks."""

    @property
    def buffer(self) -> FlatBuffer: ...
    @property
    def layout(self) -> BucketLayout: ...
    @property
    def slots(self) -> list[ParamSlot]: ...
    def reduced_grad(self) -> torch.Tensor:
        """Returns this rank's part of the gradients: [n], gradient dtype.

        If gradients have no persistent memory, ownership passes to the caller.
        """
        ...


class ReleasedGroup(Protocol):
    """Interface of a group of buckets that are reduced together and released to hooks."""

    name: str

    @property
    def slots(self) -> Sequence[ParamSlot]: ...
    @property
    def buckets(self) -> Sequence[ReleasedBucket]: ...
    def copy_from_comm(self) -> None:
        """Copies reduced gradients, including changes made by hooks, to other tensors that store them."""
        ...


class GradConsumer(Protocol):
    """An optimizer that receives each bucket's gradient during backward, once it is reduced."""

    def begin(self) -> None:
        """Begins an iteration, possibly after an aborted one, and drops gradients that are still held."""
        ...

    def take(self, bucket: ReadyBucket, place: ReleasedBucket) -> None:
        """Receives a bucket after all hooks have run.

        place: the wrapper's bucket. ReadyBucket describes how long the gradient's memory remains valid.
        """
        ...


StateProvider = Callable[[ReleasedBucket], Sequence[RunState]]


def is_completed_later(param: nn.Parameter, *, config: ModelParallelConfig, groups: ProcessGroupCollection) -> bool:
    """Returns whether complete_model_grads changes a parameter's gradient after the data-parallel reduction.

    Hooks on such gradients are deferred until notify_grads_final. The three cases are in finalize_model_grads.py:
    _divide_by_tokens (see also gradient_scale in data_parallel_base.py), _reduce_partial_grads and
    _reduce_shared_grads.
    """
    facts = param_facts(param)
    return (
        config.calculate_per_token_loss
        or (facts.sequence_parallel and group_size(groups.tp) > 1)
        or facts.shared_embedding
    )


def not_wrapped(param: nn.Parameter) -> ValueError:
    """Builds the error that owned_shard raises for a parameter that is not wrapped."""
    return ValueError(
        f"owned_shard was given a parameter of shape {tuple(param.shape)} that is not wrapped: must be a parameter "
        "that required grad when its module was wrapped"
    )


@dataclass(frozen=True, eq=False)
class _Place:
    """A bucket and this rank's part of it; span: the part's span in the buffer."""

    bucket: ReleasedBucket
    name: str
    span: Span
    slices: list[ParamRange]

    @classmethod
    def of(cls, bucket: ReleasedBucket, name: str) -> "_Place":
        owned = bucket.buffer.owned_spans()[bucket.layout.index]
        return cls(bucket, name, owned, [_slice(slot, owned) for slot in bucket.slots])

    @property
    def shard(self) -> torch.Tensor:
        return self.bucket.buffer.param_data[self.span.start : self.span.end]

    @property
    def version(self) -> int:
        """Version counter that changes with every write to the flat parameters, through any view."""
        return self.bucket.buffer.param_data._version


def _slice(slot: ParamSlot, owned: Span) -> ParamRange:
    part = slot.span.intersection(owned)
    if part.numel == 0:
        # An empty span, at the position that keeps slices in buffer order.
        return ParamRange(slot.name, slot.param, Span(min(part.start - owned.start, owned.numel), 0), 0)
    start = slot.start + part.start - slot.span.start
    return ParamRange(slot.name, slot.param, Span(part.start - owned.start, part.numel), start)


class GradHookRunner:
    """Releases the reduced bucket groups of one chunk to hooks and to the attached optimizer.

    In an iteration, after `begin`, `release` runs the hooks of each group once. Groups whose gradients are completed
    later are queued, in launch order, until `release_queued`. is_later: whether a parameter's gradient is completed
    later, see is_completed_later.

    [Note: several gradients] A parameter has one gradient in a backward pass, unless nested backward passes of
    activation recomputation add more. The first backward pass counts them. Until the counts are known, a release during
    backward could miss a gradient, so groups `hold` their gradients until the end.
    """

    def __init__(self, groups: Sequence[ReleasedGroup], *, is_later: Callable[[nn.Parameter], bool]) -> None:
        self.hooks = _HookRegistry({slot.param: slot.name for group in groups for slot in group.slots})
        self.consumer: GradConsumer | None = None
        self._provider: WeakMethod[StateProvider] | None = None
        self._places = {
            group: [_Place.of(bucket, f"{group.name}.{number}") for number, bucket in enumerate(group.buckets)]
            for group in groups
        }
        self._later = {group for group in groups if any(is_later(slot.param) for slot in group.slots)}
        self._queued: list[ReleasedGroup] = []
        self._released: set[ReleasedGroup] = set()
        # Released buckets whose gradients a waiting hook still needs.
        self._place_of: dict[ReadyBucket, _Place] = {}
        self._owned: dict[nn.Parameter, nn.Parameter] = {}
        # Whether a backward pass has counted each parameter's gradients; see [Note: several gradients].
        self.knows_counts = False
        self._is_stopped = False
        # Whether an error in a hook or an optimizer prevented later calls.
        self._is_broken = False

    @property
    def groups(self) -> list[ReleasedGroup]:
        """All groups of the chunk, whether or not they have been released."""
        return list(self._places)

    def owned_shard(self, param: nn.Parameter) -> nn.Parameter:
        """Returns this rank's part of a parameter, always as the same object.

        The part is the parameter itself or, if it is sharded, a view [n].
        """
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
        """Sets the bound method that finds an optimizer's state for hooks; replaces the previous one."""
        # Weak, so that the wrapper does not keep a dropped optimizer's memory alive.
        self._provider = WeakMethod(provider)

    def begin(self) -> None:
        """Begins an iteration."""
        self._queued.clear()
        self._released.clear()
        self._place_of.clear()
        self._is_stopped = self._is_broken = False
        self.hooks.begin()
        if self.consumer is not None:
            self.consumer.begin()

    def stop(self) -> None:
        """Stops releasing groups until `begin`."""
        self._is_stopped = True

    def check_whole(self) -> None:
        """Raises RuntimeError if an error in a hook or an optimizer has interrupted this iteration's calls."""
        if self._is_broken:
            raise RuntimeError(
                "an error interrupted the hooks on reduced gradients in this iteration: call reset_iteration() and run "
                "the iteration again"
            )

    def end_backward(self) -> None:
        """Ends a backward pass that reduces, after which each parameter's number of gradients is known."""
        self.knows_counts = True

    def release(self, group: ReleasedGroup) -> None:
        """Releases a group whose gradients are reduced over data-parallel ranks, or queues it for `release_queued`."""
        if group in self._released or self._is_stopped:
            return
        self._released.add(group)
        if group in self._later:
            self._queued.append(group)
        else:
            self._run_hooks(group)

    def release_queued(self) -> None:
        """Releases the queued groups, now that all gradients are complete."""
        queued, self._queued = self._queued, []
        for group in queued:
            self._run_hooks(group)

    @trace_range("GradHookRunner._run_hooks")
    @torch.no_grad()
    def _run_hooks(self, group: ReleasedGroup) -> None:
        self.check_whole()
        self._is_broken = True
        for place in self._places[group]:
            # Called even without hooks, because it passes ownership to this function, so that unused gradients are
            # freed.
            grad = place.bucket.reduced_grad()
            if self.consumer is None and self.hooks.is_empty:
                continue
            ready = ReadyBucket(place.name, place.slices, place.shard, grad, partial(self._states_of, place))
            self._place_of[ready] = place
            before = place.version
            for one in place.slices:
                if self.hooks.has_param_hooks(one.name):
                    self._fire_param(one, ready.grad)
            free_buckets = self.hooks.fire_bucket(ready)
            if ready not in free_buckets:
                ready.keep()
            if place.version != before:
                # The version counter does not show which of the buckets was written.
                for seen in {ready, *free_buckets}:
                    seen.note_written()
            for free in free_buckets:
                freed = self._place_of.pop(free)
                if self.consumer is not None:
                    self.consumer.take(free, freed.bucket)
        # Hooks may have changed gradients.
        group.copy_from_comm()
        self._is_broken = False

    def _states_of(self, place: _Place) -> Sequence[RunState]:
        provider = None if self._provider is None else self._provider()
        return () if provider is None else provider(place.bucket)

    def _fire_param(self, one: ParamRange, flat: torch.Tensor) -> None:
        owned = self.owned_shard(one.param)
        with _grad_set(owned, one.view_of(flat).view(owned.shape)):
            self.hooks.fire_param(one.name, owned)


@contextmanager
def _grad_set(owned: nn.Parameter, grad: torch.Tensor) -> Iterator[None]:
    """Sets `owned.grad` inside the block to `grad`, in the dtype of `owned`, and copies changes back to `grad`."""
    given = grad.to(owned.dtype)
    rounded = None if given is grad else given.clone()
    owned.grad = given
    try:
        yield
        left = owned.grad
        if left is not None and left is not grad:
            # Elements that hooks did not change keep their full precision. Values are compared, because writes through
            # `.data` do not change the version counter.
            grad.copy_(left if rounded is None else torch.where(left == rounded, grad, left.to(grad.dtype)))
    finally:
        owned.grad = None
