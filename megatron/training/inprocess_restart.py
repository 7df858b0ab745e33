"""The name by which scripts of Megatron-LM wrap pretrain() for restarts within a process, which do not exist here.

--inprocess-restart is refused. A run that ends with an error is started again by torchrun's --max-restarts or
examples/supervise.py, and continues from its last checkpoint.
"""

from collections.abc import Callable
from typing import Any


def maybe_wrap_for_inprocess_restart(pretrain: Callable[..., Any]) -> tuple[Callable[..., Any], None]:
    """Returns pretrain itself, and None in place of a store, as Megatron-LM does without --inprocess-restart."""
    return pretrain, None
