"""CopiedWithGroups: lets copy.deepcopy, and with it averages of weights (EMA), copy layers that have process groups."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, Self

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.tensor_parallel.param_attributes import copy_marks


class CopiedWithGroups(nn.Module):
    """A module whose copies by copy.deepcopy share its process groups, and keep the marks of its parameters.

    torch cannot copy a group, and drops attributes of parameters, without which gradients would be reduced over the
    wrong ranks.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        for param in self.parameters():
            copy_marks(copy.deepcopy(param, memo), param)
        seen: set[int] = set()
        for module in self.modules():
            memo.update((id(group), group) for group in _groups_in(vars(module), seen))
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(vars(self), memo))
        return copied


def _groups_in(value: Any, seen: set[int]) -> Iterator[ProcessGroup]:
    """All process groups that a value leads to, but not through modules."""
    if id(value) in seen or isinstance(value, (nn.Module, Tensor, type, FunctionType, ModuleType, str, bytes)):
        return
    seen.add(id(value))
    if isinstance(value, ProcessGroup):
        yield value
        return
    inside: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = value
    else:
        # Numbers and other objects without attributes of their own lead nowhere.
        with contextlib.suppress(TypeError):
            inside = vars(value).values()
    for part in inside:
        yield from _groups_in(part, seen)
