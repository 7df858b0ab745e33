"""Traces the way of a gradient: the functions that a step enters in the two packages, in order. Holds no tests.

`trace_walk` trains a small model in fp32 on two gloo ranks, with DistributedDataParallel and the distributed optimizer,
where gradients and parameters overlap. Two steps settle the order of launches. Then it records each function that a
step enters in megatron.core.distributed and megatron.core.optimizer: zeroing, forward, backward, finalize_model_grads,
the optimizer, and the forward that gathers the updated parameters. It records wrapping, building and state_dict apart.

As a program it prints the way and its measures. It uses public names alone, so that it also measures
other commits, given the path of their tree:

    PYTHONPATH=/path/of/a/tree .venv/bin/python tests/distributed/gradient_walk.py
"""

import ast
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import megatron.core.distributed
import megatron.core.optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.harness import run_on_ranks

RANKS, LAYERS, WIDTH, WARM_UP_STEPS = 2, 3, 16, 2
PACKAGES = tuple(Path(str(package.__file__)).parent for package in (megatron.core.distributed, megatron.core.optimizer))
# Public names that begin with an underscore, as they do in Megatron.
MEGATRON_CLASSES = {"_ParamAndGradBuffer", "_ParamAndGradBucket", "_ParamAndGradBucketGroup"}
# Functions without a name of their own belong to the function around them.
_UNNAMED = ("<lambda>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


@dataclass(frozen=True)
class Entered:
    """A function that was entered. path: from megatron/core/; qualname: as Python has it, `Class.method`."""

    path: str
    qualname: str

    @property
    def owner(self) -> str | None:
        """The class that the function, or the function around it, is a method of."""
        outermost = self.qualname.partition(".<locals>")[0]
        return outermost.rpartition(".")[0] or None

    def __str__(self) -> str:
        return f"{Path(self.path).stem}: {self.qualname}"


@dataclass
class Walk:
    """Functions in order of first entry. step: of a training step; around: of wrapping, building and state_dict."""

    step: list[Entered] = field(default_factory=list)
    around: list[Entered] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Returns `file: qualname` of each function that the step enters, each once, in order of first entry."""
        return list(dict.fromkeys(map(str, self.step)))


def trace_walk() -> list[Walk]:
    """Returns the walk of each rank."""
    return run_on_ranks(_walk_on_rank, RANKS)


def paths(entered: Iterable[Entered]) -> list[str]:
    """Returns the files that were entered, each once, in order of first entry."""
    return list(dict.fromkeys(one.path for one in entered))


def public_classes(entered: Iterable[Entered]) -> list[str]:
    """Returns the public classes that own a function which was entered, each once, in order of first entry."""
    owners = dict.fromkeys(one.owner for one in entered if one.owner)
    return [owner for owner in owners if not owner.startswith("_") or owner in MEGATRON_CLASSES]


def count_statements() -> int:
    """Counts the statements of the two packages, without docstrings."""
    files = [path for package in PACKAGES for path in package.glob("*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    return sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in nodes)


@contextmanager
def traced() -> Iterator[list[Entered]]:
    """Yields a list to which the functions of the two packages that are entered inside are added, each once."""
    entered: list[Entered] = []
    seen: set[CodeType] = set()
    found: set[Entered] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code in seen:
            return
        seen.add(code)
        one = _entered(code)
        if one is not None and one not in found:
            found.add(one)
            entered.append(one)

    before = sys.getprofile()
    # Threads that start inside are traced as well. On a CPU, autograd runs backward on the thread that calls it.
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield entered
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def _entered(code: CodeType) -> Entered | None:
    # Bodies of modules and classes run when they are imported.
    if not code.co_flags & CO_OPTIMIZED:
        return None
    path = Path(code.co_filename)
    if path.parent not in PACKAGES:
        return None
    qualname = code.co_qualname
    while qualname.endswith(_UNNAMED):
        qualname = qualname.rpartition(".")[0].removesuffix(".<locals>")
    return Entered(f"{path.parent.name}/{path.name}", qualname)


def _walk_on_rank() -> Walk:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    x = torch.randn(4, WIDTH)
    with traced() as wrapping:
        # One bucket a layer.
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
    with traced() as stepping:
        step()
        ddp(x)
    with traced() as saving:
        ddp.state_dict()
        optimizer.state_dict()
    return Walk(stepping, [*wrapping, *saving])


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def report(walk: Walk) -> str:
    """Returns the measures of a walk, and the walk, as text."""
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
        ("statements of the two packages", count_statements()),
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
