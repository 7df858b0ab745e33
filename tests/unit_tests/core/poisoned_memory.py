"""Fills new memory with NaN, so that reads of unwritten values show."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills memory that torch.empty allocates with NaN, or with the largest integer."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    # False if an earlier test of this process has called use_deterministic_kernels.
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before
