"""ForwardWaits: determines the bucket groups to gather before a module's forward, so that it reads no stale parameter.

This file launches nothing and waits for nothing; the wrapper's forward hooks do.

[Note: forward waits] A module reads its own parameters when it is called. Some modules are never called: lists of
parameters, and modules whose weights their parent reads (out_proj of nn.MultiheadAttention). Therefore a module's first
call waits for all parameters below it and observes which modules it calls. Later calls wait for its own parameters and
for the parameters of submodules that were never called. Calls may differ between training and evaluation, and with and
without autograd, so each of these modes is learned separately.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.bucket_group import _ParamAndGradBucketGroup


class ForwardWaits:
    """Learns which bucket groups each module's forward needs; see [Note: forward waits].

    groups_of: for each gathered parameter, the groups that gather it or parts of it. root: the module whose `training`
    flag sets the mode of all modules; None means that each module's flag sets its mode.
    """

    def __init__(
        self, groups_of: Mapping[nn.Parameter, Sequence[_ParamAndGradBucketGroup]], *, root: nn.Module | None = None
    ) -> None:
        self._root, self._groups_of = root, groups_of
        # Keys: the module, its training mode, and whether autograd is on.
        self._called: set[tuple[nn.Module, bool, bool]] = set()
        self._known: dict[tuple[nn.Module, bool, bool], Sequence[_ParamAndGradBucketGroup]] = {}

    def before(self, module: nn.Module) -> Sequence[_ParamAndGradBucketGroup]:
        """Returns the groups that a forward of `module` needs; called when the forward begins."""
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

    def forget(self) -> None:
        """Clears the learned groups; called when different parameters are gathered from now on."""
        self._known.clear()

    def below(self, module: nn.Module) -> list[_ParamAndGradBucketGroup]:
        """Returns the groups of all parameters of the module and its submodules."""
        return list(dict.fromkeys(group for part in module.modules() for group in self.own(part)))

    def _uncalled(self, module: nn.Module, mode: tuple[bool, bool]) -> Iterator[nn.Module]:
        """Iterates over the module and its submodules, except called submodules and the modules inside them."""
        yield module
        for child in module.children():
            if (child, *mode) not in self._called:
                yield from self._uncalled(child, mode)


def forward_hook(
    groups: Callable[[], Iterable[_ParamAndGradBucketGroup]],
    *,
    need: Callable[[Iterable[_ParamAndGradBucketGroup]], None],
) -> Callable[..., None]:
    """Builds a module hook that calls `need` with the current result of `groups`.

    In a pickled or copied module, the hook becomes a no-op, because the parameters of that module are not gathered.
    """
    return _ForwardHook(groups, need)


class _ForwardHook:
    def __init__(
        self,
        groups: Callable[[], Iterable[_ParamAndGradBucketGroup]],
        need: Callable[[Iterable[_ParamAndGradBucketGroup]], None],
    ) -> None:
        self._groups, self._need = groups, need

    # Causes a graph break in a compiled module, because whether to wait is known only at run time.
    @torch.compiler.disable
    def __call__(self, *unused: Any) -> None:
        self._need(self._groups())

    def __reduce__(self) -> tuple[Any, ...]:
        return NoWait, ()


class NoWait:
    """No-op hook that replaces forward_hook in a pickled or copied module."""

    def __call__(self, *unused: Any) -> None:
        pass
