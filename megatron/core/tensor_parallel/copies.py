"""CopiedWithGroups: base class of layers with process groups, with support for copy.deepcopy and checkpoints."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, Self

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.config_field import require_defaults
from megatron.core.dist_checkpointing.mapping import BoxesOfTensor, ShardedTensor, module_sharded_state
from megatron.core.tensor_parallel.kept_dtypes import KeepsDtypes
from megatron.core.tensor_parallel.param_attributes import copy_marks


class CopiedWithGroups(KeepsDtypes):
    """A module whose deep copies share its process groups and preserve the attributes of its parameters.

    torch cannot copy process groups, and drops the attributes of copied parameters. Without them, gradients would be
    reduced over the wrong ranks.
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
        """Returns this rank's shards of parameters and buffers, any shape and dtype, for dist_checkpointing.

        prefix: full name of the module with a trailing dot. A parameter that is stored as several tensors is a list of
        shards, which dist_checkpointing.load replaces by the parameter. sharded_offsets: must be empty. metadata:
        ignored, because there is only one checkpoint format.
        """
        why = "layers are stored under their own names, not as rows of one tensor"
        require_defaults("sharded_state_dict", why, sharded_offsets=(tuple(sharded_offsets), ()))
        return module_sharded_state(self, prefix=prefix)


def _groups_in(value: Any, seen: set[int]) -> Iterator[ProcessGroup]:
    """Yields the process groups reachable from a value without passing through modules."""
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
        # Objects without attributes, such as numbers, reference no groups.
        with contextlib.suppress(TypeError):
            inside = vars(value).values()
    for part in inside:
        yield from _groups_in(part, seen)
