"""Memory as torch's profiler sees it. Holds no tests."""

import itertools
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that torch held besides what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    changes = [event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(changes))
