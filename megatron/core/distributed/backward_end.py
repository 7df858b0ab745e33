"""BackwardEnd, OutermostBackward: of the backward that a gradient came in, when it is over, and whether it runs inside
another; for who sees gradients alone. is_in_backward: for who sees forwards.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves


def is_in_backward() -> bool:
    """Whether autograd is running a backward on this thread: a forward is then one that recomputation runs again."""
    return torch._C._current_graph_task_id() != -1


class BackwardEnd:
    """Calls `then` once after each outermost backward in which `note` was called; `before` runs first.

    [Note: inner backward] Activation recomputation runs a backward inside another, with callbacks of its own. When
    those run, a node of the outer one is still being evaluated: a hook of it leads to the end of that.
    """

    def __init__(self, then: Callable[[], None], *, before: Callable[[], None]) -> None:
        self._then, self._before = then, before
        # Stays so where an error broke a backward off.
        self._is_open = False
        # The graph task that calls back; another one inside it, or after an error, needs a callback of its own.
        self._task: int | None = None

    def note(self) -> None:
        """Call it in a hook that autograd runs."""
        self._is_open = True
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._call_back()

    def close(self) -> None:
        """Ends it here, if it is open."""
        if self._is_open:
            self._is_open, self._task = False, None
            self._then()

    def forget(self) -> None:
        """Drops the backward that is noted: `then` is not called for it."""
        self._is_open, self._task = False, None

    def _call_back(self, *unused: Any) -> None:
        Variable._execution_engine.queue_callback(self._at_end)

    def _at_end(self) -> None:
        node = torch._C._current_autograd_node()
        if node is None:
            if self._is_open:
                self._before()
            self.close()
        else:
            # See [Note: inner backward].
            node.register_hook(self._call_back)


class OutermostBackward:
    """Knows the backward that goes through the outputs of a forward from those that activation recomputation runs.

    Autograd says of a backward its number alone; so a hook of the outputs notes that.
    """

    def __init__(self) -> None:
        self._task: int | None = None

    def watch(self, outputs: Any) -> None:
        """Call it with what a forward returns: tensors of any shape and dtype, in any structure."""
        found = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if found:
            register_multi_grad_hook(found, self._note, mode="any")

    def is_here(self) -> bool:
        """In a hook that autograd runs: whether this is that backward; False as well where no output was seen in it."""
        return torch._C._current_graph_task_id() == self._task

    def _note(self, *unused: Any) -> None:
        self._task = torch._C._current_graph_task_id()
