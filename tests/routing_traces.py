"""Writes routing traces with made-up data. Contains no tests."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from megatron.training.callbacks.routing_trace import RoutingHeader, step_line


def write_trace(path: Path, header: RoutingHeader, steps: Iterable[Mapping[int, Tensor]]) -> None:
    """Writes the routing trace of a run with iterations 1, 2, ...

    steps: for each iteration, the tokens of each expert by layer number: [micro-batches, ranks, experts], int64.
    """
    lines = [step_line(iteration, tokens) for iteration, tokens in enumerate(steps, 1)]
    path.write_bytes(b"".join([header.line(0), *lines]))
