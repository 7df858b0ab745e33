"""Runs of the training program whose experts have buffers of a fixed size, with what their stash did in each step.

What runs are compared with is the tests' matter. Holds no tests.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from megatron.core.transformer.moe.paged_stash import Counter, StashEvent
from megatron.core.transformer.moe.paged_stash.learned_sizes import LearnedSizes
from megatron.core.transformer.moe.paged_stash.stash_order import StashOrder
from megatron.training.callbacks import Callback, CallbackList, EvaluationReport, StepReport
from megatron.training.expert_memory import ExpertMemory
from megatron.training.run import TrainingRun
from megatron.training.training import train
from tests.distributed.tiny_runs import comparable, started_run, state_of
from tests.functional_tests.case import Flags, command_line, read_bases

STEPS = 5
# 32 columns of x, 64 of gate_up, 32 of act: with pages of few rows a quarter of a pool holds the inputs.
FLAGS: Flags = {
    "num-layers": 4,
    "init-method-std": 0.1,
    "seq-length": 16,
    "micro-batch-size": 1,
    "train-iters": STEPS,
    "lr-warmup-iters": 0,
    "clip-grad": 0.3,
    "eval-iters": 0,
    "moe-expert-rank-capacity-factor": 8,
    "log-num-zeros-in-grad": True,
}
# A router with all that has a record of its own.
ROUTER: Flags = {
    "moe-input-jitter-eps": 0.1,
    "moe-router-load-balancing-type": ["aux_loss", "global_aux_loss"],
    "moe-aux-loss-coeff": [0.01, 0.01],
    "moe-router-score-function": "sigmoid",
    "moe-router-enable-expert-bias": True,
    "moe-per-layer-logging": True,
}


def stash(device: float | None = 3.0, host: float = 0.0, **more: object) -> Flags:
    """The flags of a stash whose pool has so many times the balanced pages; None: what `more` or the default says."""
    named = {f"moe-paged-stash-{name.replace('_', '-')}": value for name, value in more.items()}
    return {
        "moe-paged-stash": True,
        "moe-paged-stash-page-size": 2,
        "moe-paged-stash-buffer-size-factor-cuda": device,
        "moe-paged-stash-buffer-size-factor-cpu": host,
        **named,
    }


def argv_of(*flags: Flags) -> list[str]:
    """The command line of the small model with these flags, the last ones first."""
    merged: Flags = {**read_bases()["moe"], **FLAGS}
    for more in flags:
        merged |= more
    return command_line(merged)


@dataclass(frozen=True)
class StepPages:
    """What the stash of a rank did in a step. dropped: tensors that were computed again."""

    voids: int
    wanted: int
    high_water: int
    dropped: int
    spilled: int


@dataclass
class Trained:
    """A rank's part of a run. steps: what reports say; state: digests of all that the rest of a run depends on."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[EvaluationReport] = field(default_factory=list)
    pages: list[StepPages] = field(default_factory=list)
    state: dict[str, str] = field(default_factory=dict)

    def assert_same(self, reference: "Trained", name: str) -> None:
        """Every number of every step, and the state in the end."""
        for step, (own, expected) in enumerate(zip(self.steps, reference.steps, strict=True), 1):
            assert own == expected, f"{name}, step {step}"
        assert self.evaluations == reference.evaluations, name
        different = [key for key, digest in reference.state.items() if self.state[key] != digest]
        assert not different, f"{name}: {different}"


_observe = StashOrder.observe


class _Watch(Callback):
    """Writes down a run, and sees that its stash keeps to the schedule and keeps no page between steps."""

    def __init__(self, trained: Trained, memory: ExpertMemory) -> None:
        self._trained, self._memory = trained, memory
        self._seen: list[StashEvent] = []

    def observe(self, order: StashOrder, event: StashEvent) -> None:
        """In the place of StashOrder's."""
        self._seen.append(event)
        _observe(order, event)

    def on_step_end(self, report: StepReport) -> None:
        self._trained.steps.append({**comparable(report), "stash": None})
        figures, stash = self._memory.last_step, self._memory.stash
        assert figures is not None
        if figures.layout is None or stash is None:
            return
        # A schedule that is not kept to costs time and memory, but no bit.
        assert not stash.order.departed
        assert self._seen[-len(figures.events) :] == list(figures.events)
        self._seen = []
        stash.pool.check_integrity_sync()
        left = stash.pool.occupancy_sync()
        assert (left.device_held, left.host_held) == (0, 0)
        counters = figures.counters
        self._trained.pages.append(
            StepPages(
                figures.voids,
                figures.pages_wanted,
                counters[Counter.HIGH_WATER_DEVICE] + counters[Counter.HIGH_WATER_HOST],
                counters[Counter.DROPPED_ACT] + counters[Counter.DROPPED_GATE_UP],
                counters[Counter.SPILLED_PAGES],
            )
        )

    def on_evaluation_end(self, report: EvaluationReport) -> None:
        self._trained.evaluations.append(report)


Setup = Callable[[TrainingRun], AbstractContextManager[Any]]


def _nothing(run: TrainingRun) -> AbstractContextManager[Any]:
    return nullcontext()


def train_here(argv: Sequence[str], setup: Setup = _nothing) -> Trained:
    """The whole run of a command line, on this rank. setup: what is in force meanwhile."""
    trained = Trained()
    with started_run(argv) as run:
        assert run.expert_memory is not None
        watch = _Watch(trained, run.expert_memory)
        run.callbacks = CallbackList([watch])
        with patch.object(StashOrder, "observe", lambda *both: watch.observe(*both)), setup(run):
            train(run)
        # A run that had to grow knows more than one that did not, and a save keeps it.
        run.state.learned_sizes = LearnedSizes()
        trained.state = state_of(run)
    return trained
