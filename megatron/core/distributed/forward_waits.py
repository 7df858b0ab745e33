"""ForwardWaits: makes modules wait for the gathers of their parameters, so that a forward reads no stale parameter.

scheduler.py launches the gathers.

[Note: forward waits] A module reads its own parameters when it is called. Some modules are never called: lists of
parameters, and modules whose weights their parent reads (out_proj of nn.MultiheadAttention). Therefore a module's first
call waits for all parameters below it and observes which modules it calls. Later calls wait for its own parameters and
for the parameters of submodules that were never called. Calls may differ between training and evaluation, and with and
without autograd, so each of these modes is learned separately.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from megatron.core.distributed.bucket_group import _ParamAndGradBucketGroup
from megatron.core.distributed.scheduler import CollectiveScheduler


class ForwardWaits:
    """Module hooks that wait for bucket groups before a forward; see [Note: forward waits].

    order: gathers the groups. params: all parameters that are gathered, now or later. groups_of: for each parameter
    that is gathered now, the groups that gather it or parts of it. prefetch: also launches the next gather. root: the
    module whose `training` flag sets the mode of all modules; None means that each module's flag sets its mode.
    """

    def __init__(
        self,
        order: CollectiveScheduler,
        params: Collection[nn.Parameter],
        groups_of: Mapping[nn.Parameter, Sequence[_ParamAndGradBucketGroup]],
        *,
        prefetch: bool,
        root: nn.Module | None = None,
    ) -> None:
        self._order, self._params, self._groups_of = order, params, groups_of
        self.prefetch, self._root = prefetch, root
        self._handles: list[RemovableHandle] = []
        # Modules that attach_when_called has seen.
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # Keys: the module, its training mode, and whether autograd is on.
        self._called: set[tuple[nn.Module, bool, bool]] = set()
        self._known: dict[tuple[nn.Module, bool, bool], Sequence[_ParamAndGradBucketGroup]] = {}
        self._num_gathered = len(groups_of)

    # Hooks.

    @property
    def is_attached(self) -> bool:
        """Whether hooks are registered."""
        return bool(self._handles)

    def attach(self, module: nn.Module, *, kept: object = None) -> None:
        """Registers hooks on a module that has gathered parameters, but not on its submodules.

        kept: an object that the hooks keep alive. They do nothing after this ForwardWaits was freed.
        """
        if self._has_params(module):
            # Runs before the module's other hooks, which may read its weights, as in weight_norm.
            before = _WaitHook(self, ForwardWaits.before, kept)
            self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        if any(param in self._params for param in module.parameters(recurse=False)):
            # state_dict reads parameters; load_state_dict writes values that a later gather would overwrite.
            own = _WaitHook(self, ForwardWaits.own, kept)
            self._handles.append(module.register_state_dict_pre_hook(own))
            self._handles.append(module.register_load_state_dict_pre_hook(own))

    def attach_when_called(self) -> None:
        """Registers hooks on all modules that have gathered parameters, when a module above them is first called."""
        # A weak reference, because the hook is global and must not keep an unused optimizer alive.
        attach_new = weakref.WeakMethod(self._attach_new)

        # Causes a graph break in a compiled module, because whether to wait is known only at run time.
        @torch.compiler.disable
        def look(module: nn.Module, *unused: Any) -> None:
            if (method := attach_new()) is not None:
                method(module)

        handle = register_module_forward_pre_hook(look)
        self._handles.append(handle)
        weakref.finalize(self, handle.remove)

    def detach(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def wait(self, groups: Iterable[_ParamAndGradBucketGroup]) -> None:
        """Waits until the parameters of groups may be read."""
        for group in groups:
            self._order.need(group, prefetch=self.prefetch)

    def _attach_new(self, module: nn.Module) -> None:
        if module in self._seen:
            return
        below = list(module.modules())
        new = [part for part in below if part not in self._seen]
        self._seen.update(below)
        if not self._has_params(module):
            return
        for part in new:
            self.attach(part)
        # The new hooks do not run in this call.
        self.wait(self.before(module))

    def _has_params(self, module: nn.Module) -> bool:
        return any(param in self._params for param in module.parameters())

    # The groups of a module.

    def before(self, module: nn.Module) -> Sequence[_ParamAndGradBucketGroup]:
        """Returns the groups that a forward of `module` needs; called when the forward begins."""
        if len(self._groups_of) != self._num_gathered:
            self._num_gathered = len(self._groups_of)
            self._known.clear()
        mode = (self._root or module).training, torch.is_grad_enabled()
        key = (module, *mode)
        known = self._known.get(key)
        if known is not None:
            return known
        if key not in self._called:
            self._called.add(key)
            # Until now, parent modules waited for the parameters of this module. From now on, the module itself waits.
            self._known.clear()
            return self.below(module)
        groups = dict.fromkeys(group for part in self._uncalled(module, mode) for group in self.own(part))
        self._known[key] = list(groups)
        return self._known[key]

    def own(self, module: nn.Module) -> list[_ParamAndGradBucketGroup]:
        """Returns the groups of the module's own parameters."""
        held = (self._groups_of.get(param, ()) for param in module.parameters(recurse=False))
        return list(dict.fromkeys(group for groups in held for group in groups))

    def below(self, module: nn.Module) -> list[_ParamAndGradBucketGroup]:
        """Returns the groups of all parameters of the module and its submodules."""
        return list(dict.fromkeys(group for part in module.modules() for group in self.own(part)))

    def _uncalled(self, module: nn.Module, mode: tuple[bool, bool]) -> Iterator[nn.Module]:
        """Iterates over the module and its submodules, except called submodules and the modules inside them."""
        yield module
        for child in module.children():
            if (child, *mode) not in self._called:
                yield from self._uncalled(child, mode)


class _WaitHook:
    """Module hook that waits for groups while `waits` exists; a no-op in a pickled or copied module.

    The parameters of such a module are not gathered.
    """

    def __init__(
        self,
        waits: ForwardWaits,
        groups: Callable[[ForwardWaits, nn.Module], Sequence[_ParamAndGradBucketGroup]],
        kept: object,
    ) -> None:
        self._waits, self._groups, self._kept = weakref.ref(waits), groups, kept

    # Causes a graph break, as in attach_when_called.
    @torch.compiler.disable
    def __call__(self, module: nn.Module, *unused: Any) -> None:
        waits = self._waits()
        if waits is not None:
            waits.wait(self._groups(waits, module))

    def __reduce__(self) -> tuple[Any, ...]:
        return NoWait, ()


class NoWait:
    """No-op hook that replaces _WaitHook in a pickled or copied module."""

    def __call__(self, *unused: Any) -> None:
        pass
