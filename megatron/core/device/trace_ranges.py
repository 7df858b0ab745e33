"""trace_range: names a function in the traces of torch's profiler, and costs next to nothing while nobody traces."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.autograd import profiler
from torch.profiler import record_function

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def trace_range(name: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Decorates a function whose calls appear as a range `name` in traces.

    torch's record_function does so too, but calls an operator at each end even where no profiler runs: 8 Python calls
    and two operators a range, about 20 ranges a step. Ranges appear under torch.profiler.profile and emit_nvtx, of this
    thread or of all, but not for observers without a profiler, such as an ExecutionTraceObserver alone.
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        traced = record_function(name)(function)

        @functools.wraps(function)
        def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            # A plan's recorder (dry_run/recorder.py) is a dispatch mode that reads the ranges, without a profiler.
            # The flag of the process: a profiler of all threads is started in one of them.
            is_traced = profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled()
            if is_traced or torch._C._len_torch_dispatch_stack():
                return traced(*args, **kwargs)
            return function(*args, **kwargs)

        return run

    return decorate
