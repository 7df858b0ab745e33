"""ForwardWaits: which bucket groups a module's forward must wait for, so that no stale parameter is read in it.

It launches nothing and waits for nothing; the wrapper's forward hooks do.

[Note: forward waits] A module is expected to read its own parameters when it is called. That misses those of modules
that are never called: lists of parameters, and modules whose parent reads their weights (out_proj of
nn.MultiheadAttention). So a module's first call waits for everything below it, which shows what it calls; from then on
it waits for its own parameters, and for those of modules below that nobody has called. What is called may differ
between training and evaluation, with gradients and without: each is learnt by itself.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.bucket_group import BucketGroupBase


class ForwardWaits:
    """groups_of: of each parameter that is gathered, what gathers it or its parts. root: whose `training` tells the
    modes of all apart; None: each module's own does.
    """

    def __init__(
        self, groups_of: Mapping[nn.Parameter, Sequence[BucketGroupBase]], *, root: nn.Module | None = None
    ) -> None:
        self._root, self._groups_of = root, groups_of
        # By module, whether it is called in training, and whether autograd is on.
        self._called: set[tuple[nn.Module, bool, bool]] = set()
        self._known: dict[tuple[nn.Module, bool, bool], Sequence[BucketGroupBase]] = {}

    def before(self, module: nn.Module) -> Sequence[BucketGroupBase]:
        """The groups that a forward of `module` needs, which begins now."""
        mode = (self._root or module).training, torch.is_grad_enabled()
        key = (module, *mode)
        known = self._known.get(key)
        if known is not None:
            return known
        if key not in self._called:
            self._called.add(key)
            # What modules above it waited for in its place, it does itself.
            self._known.clear()
            return self.below(module)
        groups = dict.fromkeys(group for part in self._uncalled(module, mode) for group in self.own(part))
        self._known[key] = list(groups)
        return self._known[key]

    def own(self, module: nn.Module) -> list[BucketGroupBase]:
        """The groups of the parameters that `module` itself has."""
        held = (self._groups_of.get(param, ()) for param in module.parameters(recurse=False))
        return list(dict.fromkeys(group for groups in held for group in groups))

    def forget(self) -> None:
        """Learns anew: other parameters are gathered from now on."""
        self._known.clear()

    def below(self, module: nn.Module) -> list[BucketGroupBase]:
        """The groups of all its parameters."""
        return list(dict.fromkeys(group for part in module.modules() for group in self.own(part)))

    def _uncalled(self, module: nn.Module, mode: tuple[bool, bool]) -> Iterator[nn.Module]:
        """The module, and those below it to which no called one is nearer."""
        yield module
        for child in module.children():
            if (child, *mode) not in self._called:
                yield from self._uncalled(child, mode)


class WaitForGroups:
    """A hook of a module: waits for groups that are looked up when it is called. In a module that is stored or copied
    it does nothing, as nobody gathers that one's parameters.
    """

    def __init__(
        self, groups: Callable[[], Iterable[BucketGroupBase]], *, need: Callable[[Iterable[BucketGroupBase]], None]
    ) -> None:
        self._groups, self._need = groups, need

    # In a compiled module the graph breaks here: whether to wait is known when it runs.
    @torch.compiler.disable
    def __call__(self, *unused: Any) -> None:
        self._need(self._groups())

    def __reduce__(self) -> tuple[Any, ...]:
        return NoWait, ()


class NoWait:
    """A hook that does nothing: it takes the place of WaitForGroups in a stored or copied module."""

    def __call__(self, *unused: Any) -> None:
        pass
