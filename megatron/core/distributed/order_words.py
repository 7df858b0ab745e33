"""OrderWords: what the owner of a launch order calls what its errors tell a user to call. Both have reset_iteration."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OrderWords:
    """Names of methods. zero: begins an iteration; finish: ends the reductions of one."""

    zero: str = "zero_grad_buffer"
    finish: str = "finish_grad_sync"
