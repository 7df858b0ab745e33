"""Peak memory as recorded by torch's profiler. Holds no tests."""

import itertools
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object]) -> int:
    """Returns the peak number of bytes that torch allocates during a call, not counting earlier allocations."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    changes = [event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(changes))
