"""CopiedWithGroups: the base class of layers with process groups that support copy.deepcopy and checkpoints."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, Self

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.config_field import require_defaults
from megatron.core.dist_checkpointing.mapping import BoxesOfTensor, ShardedTensor, module_sharded_state
from megatron.core.tensor_parallel.param_attributes import copy_marks


class CopiedWithGroups(nn.Module):
    """A module whose copies by copy.deepcopy share its process groups and keep the attributes of its parameters.

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

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, ShardedTensor | BoxesOfTensor]:
        """Returns this rank's boxes of parameters and buffers, any shape and dtype, in the form that dist_checkpointing
        saves.

        prefix: the module's full name with a trailing dot. A list contains the boxes of a parameter that is stored as
        several tensors; dist_checkpointing.load returns the parameter in its place. sharded_offsets: must be empty.
        metadata: ignored, because there is only one checkpoint format here.
        """
        why = "layers are stored under their own names, not as rows of one tensor"
        require_defaults("sharded_state_dict", why, sharded_offsets=(tuple(sharded_offsets), ()))
        return module_sharded_state(self, prefix=prefix)


def _groups_in(value: Any, seen: set[int]) -> Iterator[ProcessGroup]:
    """Yields all process groups reachable from a value, except through modules."""
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
        # Numbers and other objects without attributes have nothing to follow.
        with contextlib.suppress(TypeError):
            inside = vars(value).values()
    for part in inside:
        yield from _groups_in(part, seen)
