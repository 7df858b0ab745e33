"""Runs the training runs of checks in this process, as the only rank. Checks nothing itself.

Runs and comparisons are the same as in tests/gpu. A check prints more details, and runs the rank in its own process, so
that the stacks of a hang can be printed.
"""

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron.core.transformer.moe.paged_stash import Counter
from megatron.tools.ports import free_port
from megatron.training.callbacks import Callback, StepReport
from megatron.training.run import TrainingRun
from tests.distributed.graph_runs import Trained


def become_a_rank() -> None:
    """Sets the environment variables that a launcher sets for the only rank of a job."""
    torch.set_num_threads(1)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(free_port())


def failure_of(work: Callable[[], str | None]) -> str | None:
    """Returns the result of `work`, or a description of the error that ended it, so that further cases can run."""
    try:
        return work()
    except (RuntimeError, ValueError, AssertionError, OSError, TypeError, AttributeError, KeyError) as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {str(error)[:300]}"


class StashCounts(Callback):
    """Sums of a run's stash activity over all steps: pages planned and spilled, and tensors recomputed."""

    def __init__(self) -> None:
        self.total: dict[str, int] = {}

    @contextmanager
    def setup(self, run: TrainingRun) -> Iterator[None]:
        """Stores the run whose stash is observed."""
        self._run = run
        yield

    def on_step_end(self, report: StepReport) -> None:
        memory = self._run.expert_memory
        step = None if memory is None else memory.last_step
        if step is None or step.layout is None:
            return
        for counter in (Counter.PLANNED_PAGES, Counter.SPILLED_PAGES, Counter.DROPPED_GATE_UP):
            name = counter.name.lower()
            self.total[name] = self.total.get(name, 0) + int(step.counters[counter])


def first_difference(own: Trained, expected: Trained) -> str | None:
    """Describes the first value that differs between two runs, or returns None if they are bitwise equal."""
    for number, (ours, theirs) in enumerate(zip(own.steps, expected.steps, strict=False), 1):
        for name, value in theirs.items():
            if ours.get(name) != value:
                return f"step {number}, {name}: {_short(ours.get(name))} instead of {_short(value)}"
    if len(own.steps) != len(expected.steps):
        return f"{len(own.steps)} steps instead of {len(expected.steps)}"
    different = [name for name, digest in expected.state.items() if own.state.get(name) != digest]
    return f"final states: {len(different)} of {len(expected.state)}, {different[0]} first" if different else None


def losses_of(run: Trained) -> list[float]:
    """Returns the language-model loss of each step."""
    return [float(step["losses"]["lm loss"]) for step in run.steps]


def _short(value: Any) -> str:
    return repr(value)[:200]
