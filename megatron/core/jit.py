"""jit_fuser, with which modules written for Megatron-LM mark functions that a compiler may fuse."""

from collections.abc import Callable
from typing import TypeVar

_Function = TypeVar("_Function", bound=Callable[..., object])


def jit_fuser(function: _Function) -> _Function:
    """Returns the function as it is: our own kernels fuse what is worth it, and results do not depend on a compiler."""
    return function
