"""Runs of the training program whose steps are captured: on a tape, which does on the CPU what a CUDA graph does, or
by a GPU.

What runs are compared with is the tests' matter. Holds no tests.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from megatron.core.device import default_device
from megatron.core.graph_capture import Graph, GraphDevice
from megatron.core.graph_tape import TapeGraphs
from megatron.core.transformer.moe.paged_stash.learned_sizes import LearnedSizes
from megatron.training.callbacks import Callback, CallbackList, EvaluationReport, StepReport
from megatron.training.graphed_step import graph_device
from megatron.training.run import TrainingRun
from megatron.training.training import train
from tests.distributed.tiny_runs import comparable, started_run, state_of
from tests.functional_tests.case import Flags

FULL: Flags = {"cuda-graph-impl": "full_iteration", "cuda-graph-warmup-steps": 2}
LOCAL: Flags = {"cuda-graph-impl": "local", "cuda-graph-warmup-steps": 2}


class CountedGraphs:
    """A GraphDevice that counts captures, also such as failed."""

    def __init__(self, device: GraphDevice) -> None:
        self.num_captures = 0
        self._device = device
        self.on_capture_stream, self.capturing_together = device.on_capture_stream, device.capturing_together

    @contextmanager
    def capturing(self) -> Iterator[Graph]:
        self.num_captures += 1
        with self._device.capturing() as graph:
            yield graph


def own_graphs() -> GraphDevice:
    """Returns the graphs of this process's GPU, or tapes where there is none."""
    return TapeGraphs() if default_device().type == "cpu" else graph_device()


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
        # What a stash held follows from what it has seen, of which a resumed run has seen less.
        self.steps.append({**comparable(report), "is_last": None, "stash": None})

    def on_evaluation_end(self, report: EvaluationReport) -> None:
        self.evaluations.append(report)

    def assert_same(self, eager: "Trained", name: str) -> None:
        """Every number of every step and evaluation, and the state in the end."""
        for step, (own, expected) in enumerate(zip(self.steps, eager.steps, strict=True), 1):
            assert own == expected, f"{name}, step {step}"
        assert self.evaluations == eager.evaluations, name
        different = [key for key, digest in eager.state.items() if self.state[key] != digest]
        assert not different, f"{name}: {different}"


Setup = Callable[[TrainingRun], AbstractContextManager[Any]]


def train_here(
    argv: Sequence[str],
    *,
    graphs: Callable[[], GraphDevice] = TapeGraphs,
    setup: Setup = nullcontext,
    callbacks: Sequence[Callback] = (),
) -> Trained:
    """The whole run of a command line, on this rank. graphs: makes what a command line gets that asks for CUDA graphs.
    setup: what is in force meanwhile.
    """
    trained, built = Trained(), list[CountedGraphs]()

    def counted() -> CountedGraphs:
        built.append(CountedGraphs(graphs()))
        return built[-1]

    with patch("megatron.training.setup.graph_device", counted), started_run(argv) as run, setup(run):
        run.callbacks = CallbackList([trained, *callbacks])
        train(run)
        # A resumed run that had to grow knows other sizes than one that never stopped.
        run.state.learned_sizes = LearnedSizes()
        trained.state = state_of(run)
        if run.steps.graph is not None:
            trained.num_graphs, trained.failure = run.steps.graph.num_graphs, run.steps.graph.failure
            trained.num_captures = built[0].num_captures
    return trained
