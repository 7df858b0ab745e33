"""Traces the path of a gradient: the functions that a step enters in the two packages, in order. Holds no tests.

`trace_walk` trains a small model in fp32 on two gloo ranks with DistributedDataParallel and the distributed optimizer,
overlapping gradient reduction and parameter gathering. Two warm-up steps fix the launch order. Then it records each
function that a step enters in megatron.core.distributed and megatron.core.optimizer: zeroing, forward, backward,
finalize_model_grads, the optimizer, and the forward that gathers the updated parameters. It records wrapping, building
and state_dict separately.

As a program it prints the path and its measures. It uses only public names and walks.py, so that it also measures other
commits that contain this file, given the path of their tree:

    PYTHONPATH=/path/of/a/tree .venv/bin/python tests/distributed/gradient_walk.py
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import megatron.core.distributed
import megatron.core.optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.distributed.walks import Entered, count_statements, paths, public_classes, traced
from tests.distributed.walks import lines as lines_of
from tests.harness import run_on_ranks

RANKS, LAYERS, WIDTH, WARM_UP_STEPS = 2, 3, 16, 2
PACKAGES = tuple(Path(str(package.__file__)).parent for package in (megatron.core.distributed, megatron.core.optimizer))


@dataclass
class Walk:
    """Functions in order of first entry.

    step: entered by a training step. around: entered by wrapping, building and state_dict.
    """

    step: list[Entered] = field(default_factory=list)
    around: list[Entered] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Returns `file: qualname` of each function that the step enters, once each, in order of first entry."""
        return lines_of(self.step)


def trace_walk() -> list[Walk]:
    """Returns the walk of each rank."""
    return run_on_ranks(_walk_on_rank, RANKS)


def _walk_on_rank() -> Walk:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    x = torch.randn(4, WIDTH)
    with traced(PACKAGES) as wrapping:
        # One bucket per layer.
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            bucket_size=WIDTH * WIDTH,
        )
        ddp = DistributedDataParallel(ModelParallelConfig(), ddp_config, model)
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.01), [ddp])

    def step() -> None:
        ddp.zero_grad_buffer()
        ddp(x).square().mean().backward()
        finalize_model_grads([ddp])
        optimizer.step()

    for _ in range(WARM_UP_STEPS):
        step()
    with traced(PACKAGES) as stepping:
        step()
        ddp(x)
    with traced(PACKAGES) as saving:
        ddp.state_dict()
        optimizer.state_dict()
    return Walk(stepping, [*wrapping, *saving])


def report(walk: Walk) -> str:
    """Returns the measures of a walk, followed by its functions, as text."""
    whole = [*walk.step, *walk.around]
    classes = public_classes(walk.step)
    files = [path for package in PACKAGES for path in package.glob("*.py")]
    counts: Sequence[tuple[str, int]] = [
        ("files of the two packages", len(files)),
        ("files entered in a step", len(paths(walk.step))),
        ("files entered in a step, wrapping, building and saving", len(paths(whole))),
        ("public classes that own a function entered in a step", len(classes)),
        ("public classes that own one in a step, wrapping, building and saving", len(public_classes(whole))),
        ("functions entered in a step", len(walk.step)),
        ("statements of the two packages", count_statements(files)),
    ]
    return "\n".join(
        [
            *(f"{name}: {count}" for name, count in counts),
            "",
            f"classes: {', '.join(classes)}",
            f"files: {', '.join(paths(walk.step))}",
            f"files of wrapping, building and saving alone: {', '.join(sorted({*paths(whole)} - {*paths(walk.step)}))}",
            "",
            *walk.lines(),
        ]
    )


if __name__ == "__main__":
    print(report(trace_walk()[0]))
