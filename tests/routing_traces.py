"""Writes traces of routing that tests invent. Holds no tests."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from megatron.training.callbacks.routing_trace import RoutingHeader, step_line


def write_trace(path: Path, header: RoutingHeader, steps: Iterable[Mapping[int, Tensor]]) -> None:
    """Writes what a run of iterations 1, 2, ... would have recorded.

    steps: tokens of each expert by layer, [micro-batches, ranks, experts], int64, for each iteration.
    """
    lines = [step_line(iteration, tokens) for iteration, tokens in enumerate(steps, 1)]
    path.write_bytes(b"".join([header.line(0), *lines]))
