"""Private interfaces of torch that several files use, so that a change in torch is an edit of this file.

docs/torch_versions.md lists all private interfaces, including those that a single file uses.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._C import DisableTorchFunctionSubclass
from torch._C import _current_autograd_node as current_autograd_node
from torch._C import _current_graph_task_id as current_backward_id
from torch._C._autograd import _get_current_graph_task_keep_graph as graph_is_kept
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_mode_stack
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "DisableTorchFunctionSubclass",
    "FakeTensor",
    "FakeTensorMode",
    "Hooks",
    "TorchDispatchMode",
    "TreeSpec",
    "active_hooks",
    "call_after_backward",
    "current_autograd_node",
    "current_backward_id",
    "dispatch_mode_stack",
    "graph_is_kept",
    "is_in_backward",
    "storage_id",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]

# Calls a function without arguments at the end of the backward pass in which it is called.
call_after_backward = torch.autograd.Variable._execution_engine.queue_callback

# The address of a storage object, which differs between live storages, even those without memory.
storage_id: Callable[[UntypedStorage], int] = attrgetter("_cdata")

# Hooks on saved tensors: pack receives a tensor of any shape and dtype, and unpack returns it.
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

# Returns the innermost saved_tensors_hooks, (pack, unpack), which later hooks override; None without any.
active_hooks: Callable[[], Hooks | None] = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)


def is_in_backward() -> bool:
    """Returns whether autograd is running a backward on this thread; a forward inside it is a recomputation."""
    return current_backward_id() != -1
