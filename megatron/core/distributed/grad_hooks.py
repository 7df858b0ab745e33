"""GradHooks: what users want done with reduced gradients, by parameter name, and when each of it is due.

Knows neither buckets' memory nor optimizers: wrappers give it a ReadyBucket for each bucket that is reduced.

[Note: hooks by name] Hooks that users put on a parameter itself are lost when the parameter is replaced, and fire for
gradients that are not reduced yet. So they are kept here, under the parameter's name. What is in `torch`'s own list of
a parameter at wrapping is taken over as it is, list and all: the handles that users hold still remove their hooks.

[Note: stale values] A parameter may be changed in the backward that it has had its gradient in, while an operation that
took it detached still needs what it was. Autograd refuses that by the parameter's version, which a write to the flat
tensor under it does not move. So who writes there says so.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron.core.distributed.layout import RunParam, Span


@dataclass(frozen=True, eq=False)
class RunState:
    """What an optimizer keeps of neighbouring elements of a bucket that share a parameter group.

    span: theirs in the bucket's flat tensors. settings: of their parameter group, `lr` and so on, by name. master:
    [span.numel], fp32 or wider, the numbers that are stepped. moments: [span.numel] each, by name. Both are views of
    what is kept in fp32 or wider, and copies of what is kept in fewer bits.
    """

    span: Span
    settings: Mapping[str, Any]
    master: torch.Tensor
    moments: Mapping[str, torch.Tensor]

    def within(self, part: Span) -> "RunState | None":
        """Returns the state of a part of the bucket, counted from the start of that part; None where there is none."""
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
    """A bucket, or neighbours of one, whose gradients are reduced; what this rank owns of it.

    slices: every parameter of the bucket, in the order of their places, those that this rank has nothing of with a span
    of 0 elements. shard: [n], the parameters' dtype, this rank's flat part of them; what is written there is what
    modules read (where other ranks have other parts: once they are gathered). grad: [n], the gradients' dtype, the same
    elements; it may be changed in place. Padding between parameters is zero in both. n may be 0.

    With DistributedDataParallelConfig.release_gradients the memory of `grad` is the wrapper's again when all hooks have
    returned: who wants it longer calls `keep`.
    """

    name: str
    slices: Sequence[RunParam]
    shard: torch.Tensor
    grad: torch.Tensor
    find_states: Callable[[], Sequence[RunState]] = _no_states

    @property
    def states(self) -> Sequence[RunState]:
        """The optimizer state of the bucket, one for each run; empty before there is one, and when it is gone."""
        return self.find_states()

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters of the bucket."""
        return [one.param for one in self.slices]

    def note_written(self) -> None:
        """Records that `shard` was written, where gradients are released: see [Note: stale values]."""
        torch.autograd.graph.increment_version(self.params)

    def keep(self) -> torch.Tensor:
        """Gives `grad` memory of its own, if it is a part of a larger message, and returns it: [n], the same dtype.

        It lives as long as somebody holds this bucket or what is returned.
        """
        if self.grad.untyped_storage().nbytes() > self.grad.numel() * self.grad.element_size():
            self.grad = self.grad.clone()
        return self.grad

    def restricted(self, names: Iterable[str]) -> "list[ReadyBucket]":
        """Only some parameters, given by name: one bucket for each stretch of neighbours among them, of views."""
        wanted = set(names)
        stretches: list[list[int]] = []
        for place, one in enumerate(self.slices):
            if one.name not in wanted:
                continue
            if stretches and stretches[-1][-1] == place - 1:
                stretches[-1].append(place)
            else:
                stretches.append([place])
        if len(stretches) == 1 and len(stretches[0]) == len(self.slices):
            return [self]
        return [self._stretch(places) for places in stretches]

    def _stretch(self, places: Sequence[int]) -> "ReadyBucket":
        members = [self.slices[place] for place in places]
        following = places[-1] + 1
        bound = self.slices[following].span.start if following < len(self.slices) else self.grad.numel()
        start = members[0].span.start
        # With the padding, which kernels may step as well; they give the same bits on its grid alone.
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
    """A hook that waits for several parameters. waiting: names of those that are still to come in this iteration."""

    def __init__(self, names: Sequence[str], hook: PostBackwardHook) -> None:
        self.names, self.hook = frozenset(names), hook
        self.waiting = set(names)
        self.ready: list[ReadyBucket] = []

    def begin(self) -> None:
        self.waiting = set(self.names)
        self.ready.clear()

    def came(self, bucket: ReadyBucket) -> bool:
        """Notes a bucket; whether it was the last one that this waited for."""
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


class GradHooks:
    """The hooks of one wrapper. names: of its parameters that require grad. In an iteration, after `begin`:

    1. for each parameter of a reduced bucket the wrapper calls `fire_param`, which runs its post-accumulate hooks;
    2. it calls `fire_bucket`, which runs bucket hooks, then post-backward hooks that have all they wait for, both in
       the order of registration;
    3. that returns the buckets for which no hook is waiting any more, in the order in which they came.
    """

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self._names = dict(names)
        self._of_param: dict[str, dict[int, Any]] = {}
        self._of_bucket: dict[int, Any] = OrderedDict()
        self._post_backward: dict[int, Any] = OrderedDict()
        # Buckets that a post-backward hook waits with.
        self._held: list[ReadyBucket] = []

    # Registration.

    def register_post_accumulate_grad_hook(self, param: nn.Parameter, hook: ParamHook) -> RemovableHandle:
        """Calls `hook` with the owner's part of a parameter, any shape and dtype, whose `.grad` is reduced."""
        return _register(self._of_param.setdefault(self._name_of(param), OrderedDict()), hook)

    def register_bucket_ready_hook(self, hook: BucketHook) -> RemovableHandle:
        """Calls `hook` with each bucket that is reduced."""
        return _register(self._of_bucket, hook)

    def register_post_backward_hook(
        self, params: nn.Parameter | Iterable[nn.Parameter], hook: PostBackwardHook
    ) -> RemovableHandle:
        """Calls `hook` once when all `params`, of any shapes and dtypes, are reduced, with what they are of buckets.

        Register it between two iterations: it waits for all of them from then on.
        """
        names = [self._name_of(param) for param in ([params] if isinstance(params, nn.Parameter) else params)]
        if not names:
            raise ValueError("register_post_backward_hook was given no params: must be at least one parameter")
        return _register(self._post_backward, _PostBackward(names, hook))

    def adopt(self) -> None:
        """Takes the hooks that are on the parameters: autograd no longer calls them. See [Note: hooks by name]."""
        for param, name in self._names.items():
            found = param._post_accumulate_grad_hooks
            if not found:
                continue
            # Not None, with which torch goes on calling those it had.
            param._post_accumulate_grad_hooks = OrderedDict()
            self._of_param[name] = _joined(found, self._of_param.get(name))

    def give_back(self) -> None:
        """Puts the hooks of parameters on these, for autograd or another wrapper; bucket hooks are dropped."""
        for param, name in self._names.items():
            ours = self._of_param.pop(name, None)
            if ours:
                param._post_accumulate_grad_hooks = _joined(ours, param._post_accumulate_grad_hooks)
        self._of_bucket.clear()
        self._post_backward.clear()
        self.begin()

    def follow(self, names: Mapping[nn.Parameter, str]) -> None:
        """Records that parameters were replaced: the new ones inherit the names, and so the hooks."""
        self._names = dict(names)

    # In an iteration.

    @property
    def is_empty(self) -> bool:
        """Whether there is nobody to call."""
        return not (self._of_bucket or self._post_backward or any(self._of_param.values()))

    def has_param_hooks(self, name: str) -> bool:
        """Whether `fire_param` would call anybody."""
        return bool(self._of_param.get(name))

    def begin(self) -> None:
        """Begins an iteration; hooks that an error kept from firing start anew."""
        self._held.clear()
        for waiting in self._post_backward.values():
            waiting.begin()

    def fire_param(self, name: str, owned: nn.Parameter) -> None:
        """Calls a parameter's post-accumulate hooks; owned: the owner's part, any shape, its gradient in `.grad`."""
        # A hook may remove itself.
        for hook in list(self._of_param.get(name, {}).values()):
            hook(owned)

    def fire_bucket(self, bucket: ReadyBucket) -> list[ReadyBucket]:
        """Calls bucket hooks, and post-backward hooks that waited for nothing else; returns the buckets that are free,
        perhaps not this one.
        """
        for hook in list(self._of_bucket.values()):
            hook(bucket)
        self._held.append(bucket)
        for waiting in list(self._post_backward.values()):
            if waiting.came(bucket):
                waiting.fire()
        needed = {id(one) for waiting in self._post_backward.values() for one in waiting.ready}
        free = [one for one in self._held if id(one) not in needed]
        self._held = [one for one in self._held if id(one) in needed]
        return free

    def _name_of(self, param: nn.Parameter) -> str:
        name = self._names.get(param)
        if name is None:
            given = f"one of shape {tuple(param.shape)}" if isinstance(param, torch.Tensor) else repr(param)
            raise ValueError(
                f"a hook was registered for a parameter that has no gradients here, {given}: must be a parameter of "
                "the wrapped module that required grad when it was wrapped"
            )
        return name


def _register(hooks: dict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _joined(first: dict[int, Any], other: Mapping[int, Any] | None) -> dict[int, Any]:
    """`first` itself, which handles know, with the hooks of another."""
    first.update(other or {})
    return first
