"""Runs of the training program whose steps are captured on a tape, which does on the CPU what a CUDA graph does.

What runs are compared with is the tests' matter. Holds no tests.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from megatron.core.graph_tape import TapeGraphs
from tests.functional_tests.case import Flags

FULL: Flags = {"cuda-graph-impl": "full_iteration", "cuda-graph-warmup-steps": 2}


@contextmanager
def tape_for_graphs() -> Iterator[None]:
    """Inside, runs that ask for CUDA graphs get tapes."""
    with patch("megatron.training.setup.graph_device", TapeGraphs):
        yield
