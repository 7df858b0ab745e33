"""Provides Megatron-LM's wrapper of pretrain() for in-process restarts, which are not supported here.

--inprocess-restart is rejected. A run that ends with an error is restarted by torchrun's --max-restarts or
examples/supervise.py, and continues from its last checkpoint.
"""

from collections.abc import Callable
from typing import Any


def maybe_wrap_for_inprocess_restart(pretrain: Callable[..., Any]) -> tuple[Callable[..., Any], None]:
    """Returns `pretrain` unchanged, and None for the store, like Megatron-LM without --inprocess-restart."""
    return pretrain, None
