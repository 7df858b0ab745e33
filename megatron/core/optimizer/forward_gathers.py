"""ForwardGathers: lets the modules that own parameters wait for their gathers, wherever these modules are.

An optimizer is given parameters, not modules. A hook of all modules finds those that have any of them when they are
first called; from then on they have hooks of their own.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from megatron.core.distributed.forward_waits import ForwardWaits, NoWait
from megatron.core.distributed.synced_group import SyncedGroup


class ForwardGathers:
    """params: whose modules are to be found; groups_of: of those that are gathered so far, what gathers them; both may
    grow. need: waits for groups.
    """

    def __init__(
        self,
        params: Collection[nn.Parameter],
        groups_of: Mapping[nn.Parameter, Sequence[SyncedGroup]],
        *,
        need: Callable[[Iterable[SyncedGroup]], None],
    ) -> None:
        self._params, self._groups_of, self._need = params, groups_of, need
        self._num_gathered = len(groups_of)
        self._waits = ForwardWaits(groups_of)
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handles: list[Any] = []
        # Weakly: the hook is of the process, and must not keep an optimizer alive that nobody uses any more.
        attach_new = weakref.WeakMethod(self._attach_new)

        # In a compiled module the graph breaks at these hooks: what to wait for is known when it runs.
        @torch.compiler.disable
        def look(module: nn.Module, *unused: Any) -> None:
            if (method := attach_new()) is not None:
                method(module)

        self._handles.append(register_module_forward_pre_hook(look))
        weakref.finalize(self, self._handles[0].remove)

    def remove(self) -> None:
        """Takes all hooks away."""
        for handle in self._handles:
            handle.remove()

    def _attach_new(self, module: nn.Module) -> None:
        """Before a forward: gives hooks to what is seen for the first time."""
        if module in self._known:
            return
        below = list(module.modules())
        new = [part for part in below if part not in self._known]
        self._known.update(below)
        if not any(param in self._params for param in module.parameters()):
            return
        for part in new:
            self._attach(part)
        # Its own hooks come too late for this call.
        self.wait(lambda waits: waits.before(module))

    def _attach(self, module: nn.Module) -> None:
        if any(param in self._params for param in module.parameters()):
            wait = _Wait(self, lambda waits: waits.before(module))
            # Before others of the module, which may read its weights: weight_norm does.
            self._handles.append(module.register_forward_pre_hook(wait, prepend=True))
        if any(param in self._params for param in module.parameters(recurse=False)):
            # Weights are read and written by their names as well, and what was loaded must not be gathered over.
            wait = _Wait(self, lambda waits: waits.own(module))
            self._handles.append(module.register_state_dict_pre_hook(wait))
            self._handles.append(module.register_load_state_dict_pre_hook(wait))

    def wait(self, groups: Callable[[ForwardWaits], Iterable[SyncedGroup]]) -> None:
        """Waits for groups that are looked up now."""
        if len(self._groups_of) != self._num_gathered:
            # Others are gathered than it has learnt of.
            self._num_gathered = len(self._groups_of)
            self._waits.forget()
        self._need(groups(self._waits))


class _Wait:
    """A hook of a module; weakly, as above, and of a module that is stored or copied it does nothing."""

    def __init__(self, gathers: ForwardGathers, groups: Callable[[ForwardWaits], Iterable[SyncedGroup]]) -> None:
        self._gathers, self._groups = weakref.ref(gathers), groups

    @torch.compiler.disable
    def __call__(self, *unused: Any) -> None:
        gathers = self._gathers()
        if gathers is not None:
            gathers.wait(self._groups)

    def __reduce__(self) -> tuple[Any, ...]:
        return NoWait, ()
