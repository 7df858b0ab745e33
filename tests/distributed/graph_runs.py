"""Runs of the training program with captured steps, as CUDA graphs on a GPU or as tapes that emulate them on the CPU.

Holds no tests.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.device import default_device
from megatron.core.graphs.capture import Graph, GraphDevice
from megatron.core.graphs.tape import Tape, TapeGraphs
from megatron.core.transformer.moe.paged_stash import PagePool, PoolLayout
from megatron.core.transformer.paged_stash_config import PagedStashConfig
from megatron.training.callbacks import Callback, StepReport
from megatron.training.run import TrainingRun
from megatron.training.step.expert_memory import ExpertMemory, open_pool
from megatron.training.step.graph import graph_device
from tests.distributed.tiny_runs import Setup, TrainedRun, started_run
from tests.functional_tests.case import Flags

FULL: Flags = {"cuda-graph-impl": "full_iteration", "cuda-graph-warmup-steps": 2}
LOCAL: Flags = {"cuda-graph-impl": "local", "cuda-graph-warmup-steps": 2}


class CountedGraphs:
    """A GraphDevice that counts captures, including failed ones."""

    def __init__(self, device: GraphDevice) -> None:
        self.num_captures = 0
        self._device = device
        self.on_capture_stream, self.capturing_together = device.on_capture_stream, device.capturing_together
        self.new_pool = device.new_pool

    @contextmanager
    def capturing(self, pool: Any = None) -> Iterator[Graph]:
        self.num_captures += 1
        with self._device.capturing(pool) as graph:
            yield graph


def own_graphs() -> GraphDevice:
    """Returns the graph device of this process's GPU, or tapes if there is none."""
    return TapeGraphs() if default_device().type == "cpu" else graph_device()


@dataclass
class Trained(TrainedRun):
    """A rank's record of a run, with its number of captures and graphs, and the reason for a failed capture."""

    num_captures: int = 0
    num_graphs: int = 0
    failure: str | None = None

    def on_step_end(self, report: StepReport) -> None:
        super().on_step_end(report)
        # A run that stops early to be resumed ends with a different last step.
        self.steps[-1]["is_last"] = None


class WatchedPages:
    """Tracks how many tapes and page pools of a run are alive whenever pages are allocated."""

    def __init__(self) -> None:
        self.num_alive: list[tuple[int, int]] = []  # (tapes alive, page pools alive) at each allocation
        self.num_dropped: list[int] = []  # number of tapes recorded before each allocation
        self._tapes: list[weakref.ref[Tape]] = []
        self._pages: list[StorageWeakRef] = []

    def graphs(self) -> GraphDevice:
        """Returns a graph device whose tapes are tracked."""
        noted = self._tapes

        class NotedTapes(TapeGraphs):
            @contextmanager
            def capturing(self, pool: Any = None) -> Iterator[Tape]:
                with super().capturing(pool) as tape:
                    noted.append(weakref.ref(tape))
                    yield tape

        return NotedTapes()

    @contextmanager
    def setup(self, run: TrainingRun) -> Iterator[None]:
        """Tracks the run's current page pool and the pools that it opens inside this context."""
        memory = run.steps.memory
        assert isinstance(memory, ExpertMemory) and memory.stash is not None
        self._note(memory.stash.pool)

        def noted_pool(
            device: torch.device, layout: PoolLayout | None, *, config: PagedStashConfig, **scratch: int
        ) -> PagePool | None:
            if layout is not None:
                self.num_alive.append(
                    (sum(one() is not None for one in self._tapes), sum(not one.expired() for one in self._pages))
                )
                self.num_dropped.append(len(self._tapes))
            pool = open_pool(device, layout, config=config, **scratch)
            if pool is not None:
                self._note(pool)
            return pool

        with patch("megatron.training.step.expert_memory.open_pool", noted_pool):
            yield

    def _note(self, pool: PagePool) -> None:
        self._pages.append(StorageWeakRef(pool.device_pages.untyped_storage()))


def train_here(
    argv: Sequence[str],
    *,
    graphs: Callable[[], GraphDevice] = TapeGraphs,
    setup: Setup = nullcontext,
    callbacks: Sequence[Callback] = (),
) -> Trained:
    """Trains a command line to its end on this rank and returns the record.

    graphs: builds the device that replaces CUDA graphs. setup: a context manager that is active during the run.
    """
    trained, built = Trained(), list[CountedGraphs]()

    def counted() -> CountedGraphs:
        built.append(CountedGraphs(graphs()))
        return built[-1]

    with patch("megatron.training.setup.graph_device", counted), started_run(argv) as run:
        trained.train(run, *callbacks, setup=setup)
        if run.steps.graph is not None:
            trained.num_graphs, trained.failure = run.steps.graph.num_graphs, run.steps.graph.failure
            trained.num_captures = built[0].num_captures
    return trained
