"""Runs of the training program with expert buffers of a fixed size, with a record of the stash in each step.

Holds no tests.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from unittest.mock import patch

from megatron.core.transformer.moe.paged_stash import Counter, StashEvent
from megatron.core.transformer.moe.paged_stash.arithmetic import GroupRows, simulate
from megatron.core.transformer.moe.paged_stash.stash_order import StashOrder, late_groups
from megatron.training.callbacks import Callback, StepReport
from megatron.training.step.expert_memory import ExpertMemory, StepFigures, rows_by_group
from tests.distributed.tiny_runs import Setup, TrainedRun, started_run
from tests.functional_tests.case import Flags, command_line, read_bases

STEPS = 5
# 32 columns of x, 64 of gate_up. With pages of few rows, the inputs fill a third of a pool.
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
# Router options that record state: jitter, two balancing losses, expert biases, per-layer logs.
ROUTER: Flags = {
    "moe-input-jitter-eps": 0.1,
    "moe-router-load-balancing-type": ["aux_loss", "global_aux_loss"],
    "moe-aux-loss-coeff": [0.01, 0.01],
    "moe-router-score-function": "sigmoid",
    "moe-router-enable-expert-bias": True,
    "moe-per-layer-logging": True,
}


def stash(device: float | None = 3.0, host: float = 0.0, **more: object) -> Flags:
    """Returns the flags of a stash.

    device, host: size factors of the pools, 1 for a balanced batch; None: the flag's default. more: other flags of the
    stash, without the prefix moe-paged-stash.
    """
    named = {f"moe-paged-stash-{name.replace('_', '-')}": value for name, value in more.items()}
    return {
        "moe-paged-stash": True,
        "moe-paged-stash-page-size": 2,
        "moe-paged-stash-buffer-size-factor-cuda": device,
        "moe-paged-stash-buffer-size-factor-cpu": host,
        **named,
    }


def argv_of(*flags: Flags) -> list[str]:
    """Returns the command line of the small MoE model with `flags`; later flags override earlier ones."""
    merged: Flags = {**read_bases()["moe"], **FLAGS}
    for more in flags:
        merged |= more
    return command_line(merged)


@dataclass(frozen=True)
class StepPages:
    """Statistics of a rank's stash in one step. dropped: number of recomputed tensors."""

    voids: int
    wanted: int
    high_water: int
    dropped: int
    spilled: int


@dataclass
class Trained(TrainedRun):
    """A rank's record of a run with expert buffers.

    pages: statistics of the stash, by step; empty without a stash.
    """

    pages: list[StepPages] = field(default_factory=list)


_observe = StashOrder.observe


def _check_counters(figures: StepFigures) -> None:
    """Asserts that the pages in use were those of the simulated pool, if all are released in weight passes.

    A prefetch may release other pages earlier than the simulation.
    """
    assert figures.layout is not None
    rows = rows_by_group(figures.passes, figures.rows)
    if late_groups(figures.events) != rows.keys():
        return
    simulated = simulate(
        figures.events,
        lambda group: GroupRows(figures.specs[group[0]], rows[group]),
        layout=figures.layout,
        reserve=figures.reserve,
    )
    assert simulated.counters == figures.counters


class _Watch(Callback):
    """Records the statistics of a stash; asserts that it follows its schedule and uses no page between steps."""

    def __init__(self, trained: Trained, memory: ExpertMemory) -> None:
        self._trained, self._memory = trained, memory
        self._seen: list[StashEvent] = []

    def observe(self, order: StashOrder, event: StashEvent) -> None:
        """Records an event and calls StashOrder.observe, which this method replaces."""
        self._seen.append(event)
        _observe(order, event)

    def on_step_end(self, report: StepReport) -> None:
        figures, stash = self._memory.last_step, self._memory.stash
        assert figures is not None
        if figures.layout is None or stash is None:
            return
        # Departing from the schedule costs time and memory, but does not change results.
        assert not stash.order.departed
        assert self._seen[-len(figures.events) :] == list(figures.events)
        self._seen = []
        _check_counters(figures)
        stash.pool.check_integrity_sync()
        left = stash.pool.occupancy_sync()
        assert (left.device_held, left.host_held) == (0, 0)
        counters = figures.counters
        self._trained.pages.append(
            StepPages(
                figures.num_discards,
                figures.pages_wanted,
                counters[Counter.HIGH_WATER_DEVICE] + counters[Counter.HIGH_WATER_HOST],
                counters[Counter.DROPPED_GATE_UP],
                counters[Counter.SPILLED_PAGES],
            )
        )


def train_here(argv: Sequence[str], setup: Setup = nullcontext) -> Trained:
    """Trains a command line to its end on this rank. setup: a context manager that is active during the run."""
    trained = Trained()
    with started_run(argv) as run:
        assert run.expert_memory is not None
        watch = _Watch(trained, run.expert_memory)
        with patch.object(StashOrder, "observe", lambda *both: watch.observe(*both)):
            trained.train(run, watch, setup=setup)
    return trained
