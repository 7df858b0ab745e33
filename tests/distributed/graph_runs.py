"""Runs of the training program whose steps are captured on a tape, which does on the CPU what a CUDA graph does.

What runs are compared with is the tests' matter. Holds no tests.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from megatron.core.graph_tape import Tape, TapeGraphs
from megatron.core.transformer.moe.paged_stash.learned_sizes import LearnedSizes
from megatron.training.callbacks import Callback, CallbackList, EvaluationReport, StepReport
from megatron.training.training import train
from tests.distributed.tiny_runs import comparable, started_run, state_of
from tests.functional_tests.case import Flags

FULL: Flags = {"cuda-graph-impl": "full_iteration", "cuda-graph-warmup-steps": 2}
LOCAL: Flags = {"cuda-graph-impl": "local", "cuda-graph-warmup-steps": 2}


class CountedTapes(TapeGraphs):
    """Counts captures, also such as failed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_captures = 0

    @contextmanager
    def capturing(self) -> Iterator[Tape]:
        """See TapeGraphs."""
        self.num_captures += 1
        with super().capturing() as tape:
            yield tape


@dataclass
class Trained(Callback):
    """A rank's part of a run: what its reports say, digests of all that the rest of the run depends on, and graphs."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[EvaluationReport] = field(default_factory=list)
    state: dict[str, str] = field(default_factory=dict)
    num_captures: int = 0
    num_graphs: int = 0
    failure: str | None = None

    def on_step_end(self, report: StepReport) -> None:
        """See Callback."""
        # What a stash held follows from what it has seen, of which a resumed run has seen less.
        self.steps.append({**comparable(report), "is_last": None, "stash": None})

    def on_evaluation_end(self, report: EvaluationReport) -> None:
        """See Callback."""
        self.evaluations.append(report)

    def assert_same(self, eager: "Trained", name: str) -> None:
        """Every number of every step and evaluation, and the state in the end."""
        for step, (own, expected) in enumerate(zip(self.steps, eager.steps, strict=True), 1):
            assert own == expected, f"{name}, step {step}"
        assert self.evaluations == eager.evaluations, name
        different = [key for key, digest in eager.state.items() if self.state[key] != digest]
        assert not different, f"{name}: {different}"


def train_here(argv: Sequence[str]) -> Trained:
    """The whole run of a command line, on this rank; where it asks for CUDA graphs, it gets tapes."""
    trained, tapes = Trained(), CountedTapes()
    with patch("megatron.training.setup.graph_device", lambda: tapes), started_run(argv) as run:
        run.callbacks = CallbackList([trained])
        train(run)
        # A resumed run that had to grow knows other sizes than one that never stopped.
        run.state.learned_sizes = LearnedSizes()
        trained.state = state_of(run)
        if run.steps.graph is not None:
            trained.num_graphs, trained.failure = run.steps.graph.num_graphs, run.steps.graph.failure
        trained.num_captures = tapes.num_captures
    return trained
