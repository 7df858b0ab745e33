"""trace_range marks functions in traces, and adds no range without a profiler."""

import threading
from unittest.mock import patch

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.device.trace_ranges import trace_range


@trace_range("a range of the test")
def doubled(x: torch.Tensor, *, plus: float = 0.0) -> torch.Tensor:
    return 2 * x + plus


def ranges_of(run: profile) -> int:
    return sum(event.count for event in run.key_averages() if event.key == "a range of the test")


def test_ranges_appear_under_a_profiler_and_nowhere_else() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as run:
        assert doubled(torch.ones(()), plus=1.0) == 3.0
        with pytest.raises(TypeError):
            doubled()  # type: ignore[call-arg]
    assert ranges_of(run) == 2
    with patch("torch.autograd.profiler.record_function.__enter__", side_effect=AssertionError):
        assert doubled(torch.ones(())) == 2.0


def test_ranges_of_other_threads_appear_under_a_profiler_of_all_threads() -> None:
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as run:
        doubled(torch.ones(()))
        thread = threading.Thread(target=doubled, args=(torch.ones(()),))
        thread.start()
        thread.join()
    assert ranges_of(run) == 2


def test_a_dispatch_mode_sees_ranges_without_a_profiler() -> None:
    names = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    with Names():
        doubled(torch.ones(()))
    assert names.count("profiler::_record_function_enter_new") == 1
