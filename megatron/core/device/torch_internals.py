"""Private interfaces of torch that several files use, so that a change in torch is an edit of this file.

docs/torch_versions.md lists all private interfaces, including those that a single file uses.
"""

from collections.abc import Callable
from operator import attrgetter

import torch
from torch import UntypedStorage
from torch._C import DisableTorchFunctionSubclass
from torch._C import _current_autograd_node as current_autograd_node
from torch._C import _current_graph_task_id as current_backward_id
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_mode_stack
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "DisableTorchFunctionSubclass",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "TreeSpec",
    "call_after_backward",
    "current_autograd_node",
    "current_backward_id",
    "dispatch_mode_stack",
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


def is_in_backward() -> bool:
    """Returns whether autograd is running a backward on this thread; a forward inside it is a recomputation."""
    return current_backward_id() != -1
