"""Steps in CUDA graphs are bitwise equal to eager steps. Skipped without a GPU.

Every body also runs on the CPU, with tapes (core/graphs/tape.py) in place of graphs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.core.device import default_device, memory_bytes
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.models.gpt import GPTModel
from megatron.training.callbacks import Callback, StepReport
from megatron.training.run import TrainingRun
from tests.distributed.graph_runs import FULL, LOCAL, Trained, own_graphs, train_here
from tests.distributed.stash_runs import ROUTER, stash
from tests.functional_tests.case import Flags
from tests.gpu.graph_cases import (
    CASES,
    DROPOUT,
    EXPERTS,
    HALF_OF_PARTS,
    SCALED,
    TURNS,
    UPDATE,
    Case,
    argv_of,
    both,
    on_gpu,
)

pytestmark = pytest.mark.gpu

REPLAYS = 100


@pytest.mark.parametrize("name", CASES)
def test_a_hundred_replays_have_the_bits_of_eager_steps(name: str) -> None:
    eager, captured = on_gpu(both, CASES[name], {"train-iters": REPLAYS + 2})
    assert (captured.failure, captured.num_captures, captured.num_graphs) == (None, 1, 1)
    captured.assert_same(eager, name)
    assert len({repr(step["losses"]) for step in captured.steps}) == REPLAYS + 2
    skipped = [step["skipped"] for step in captured.steps[2:]]
    assert any(skipped) == name.startswith("scaled") and not all(skipped)


PARTS = {
    "dense": ("attn mlp", Case("dense", {**HALF_OF_PARTS, **DROPOUT})),
    "experts": ("moe", Case("moe", {**EXPERTS, **ROUTER})),
    "experts alone": ("experts", Case("moe", EXPERTS)),
    "pages": ("moe", Case("moe", {**EXPERTS, **ROUTER, **HALF_OF_PARTS, **stash(1.5, compute="copies")})),
    "pages of experts alone": ("experts", Case("moe", {**EXPERTS, **stash(0.3, 0.4, compute="copies")})),
    "routers": ("moe_router experts", Case("moe", EXPERTS)),
}


def parts(modules: str, case: Case) -> tuple[Trained, Trained]:
    steps: Flags = {"train-iters": REPLAYS + 2}
    local: Flags = {**LOCAL, "cuda-graph-modules": modules.split()}
    return train_here(argv_of(case, steps)), train_here(argv_of(case, steps, local), graphs=own_graphs)


@pytest.mark.parametrize("name", PARTS)
def test_replayed_parts_of_layers_have_the_bits_of_eager_ones(name: str) -> None:
    eager, captured = on_gpu(parts, *PARTS[name])
    assert captured.num_captures == captured.num_graphs > 0
    captured.assert_same(eager, name)


class Starved(Callback):
    """Makes a run's pool appear full in the replays of some steps, and records the memory after each step."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.left = list(steps)
        self.pool_bytes: list[int] = []
        self.memory: list[dict[str, int]] = []

    @contextmanager
    def setup(self, run: TrainingRun) -> Iterator[None]:
        self.run, replay = run, FullCudaGraphWrapper._replay

        def starved(graph: FullCudaGraphWrapper, *given: Any) -> Any:
            if run.state.iteration + 1 in self.left:
                self.left.remove(run.state.iteration + 1)
                self.pool.heads.copy_(self.pool.tails)
            return replay(graph, *given)

        with patch.object(FullCudaGraphWrapper, "_replay", starved):
            yield

    @property
    def pool(self) -> Any:
        assert self.run.expert_memory is not None and self.run.expert_memory.stash is not None
        return self.run.expert_memory.stash.pool

    def on_step_end(self, report: StepReport) -> None:
        self.pool_bytes.append(sum(self.pool.num_bytes.values()))
        self.memory.append(memory_bytes(default_device()))


def starve(flags: Flags) -> tuple[Trained, Trained, Starved]:
    """Trains without graphs and with a large pool, and with graphs and a small pool that is full in two replays."""
    case = Case("moe", {**EXPERTS, **DROPOUT, "train-iters": 14})
    starved = Starved([5, 9])
    large = train_here(argv_of(case, stash(2.0)))
    small = train_here(
        argv_of(case, FULL, stash(0.4), flags), graphs=own_graphs, setup=starved.setup, callbacks=[starved]
    )
    starved.run = None  # type: ignore[assignment]  # not pickled for the parent process
    return large, small, starved


@pytest.mark.parametrize("flags", [{}, UPDATE], ids=["passes", "update"])
def test_a_replay_that_finds_no_pages_runs_again_with_more_and_is_captured_once_a_growth(flags: Flags) -> None:
    large, small, starved = on_gpu(starve, flags)
    assert not starved.left and starved.pool_bytes[3] < starved.pool_bytes[5] < starved.pool_bytes[-1]
    assert (small.failure, small.num_captures, small.num_graphs) == (None, 3, 1)
    small.assert_same(large, "starved")
    grown = starved.pool_bytes[-1] - starved.pool_bytes[3]
    for kind, slack in (("allocated", 1 << 20), ("reserved", 64 << 20)):
        before, after = (starved.memory[step].get(kind, 0) for step in (3, -1))
        # The old pools and graphs have been freed.
        assert after - before <= grown + slack, kind


def take_turns(flags: Flags, folder: str) -> tuple[Trained, Trained, Trained]:
    """Alternates steps of 2 and 4 microbatches and evaluations, in an eager, a captured, and a resumed captured run."""
    turns: Flags = {"train-iters": 14, "eval-iters": 2, "eval-interval": 3, "step-batch-size-schedule": TURNS}
    case = Case("moe", {**EXPERTS, **ROUTER, **DROPOUT, **stash(1.0), **turns, **flags, "global-batch-size": None})
    eager, captured = both(case)
    saving: Flags = {**FULL, **case.flags, "save": folder, "load": folder}
    first = train_here(argv_of(case, saving, {"exit-interval": 7}), graphs=own_graphs)
    resumed = train_here(argv_of(case, saving), graphs=own_graphs)
    resumed.steps, resumed.evaluations = first.steps + resumed.steps, first.evaluations + resumed.evaluations
    return eager, captured, resumed


@pytest.mark.parametrize("flags", [{}, {**SCALED, **UPDATE}], ids=["passes", "scaled update"])
def test_evaluations_lengths_in_turns_and_a_resume_change_no_bit(flags: Flags, tmp_path: Path) -> None:
    eager, captured, resumed = on_gpu(take_turns, flags, str(tmp_path))
    for name, run in (("captured", captured), ("resumed", resumed)):
        assert (run.failure, run.num_captures, run.num_graphs) == (None, 2, 2), name
        run.assert_same(eager, name)


def read_a_loss() -> tuple[Trained, Trained, float]:
    """Trains a model that waits for the device, and then captures and replays a small graph in the same process."""
    forward = GPTModel.forward

    def reads(*args: Any, **keywords: Any) -> Any:
        losses = forward(*args, **keywords)
        losses.sum().item()
        return losses

    case = Case("moe", {**EXPERTS, **DROPOUT, **stash(0.3, 0.4), "train-iters": 6})
    with patch.object(GPTModel, "forward", reads):
        eager, captured = both(case)
    value, graphs = torch.zeros(4, device=default_device()), own_graphs()
    with graphs.capturing() as graph:
        value.add_(1)
    for _ in range(3):
        graph.replay()
    return eager, captured, value.sum().item()


def test_a_capture_that_fails_costs_one_line_and_no_bit(capfd: pytest.CaptureFixture[str]) -> None:
    eager, captured, total = on_gpu(read_a_loss)
    assert captured.failure is not None and (captured.num_captures, captured.num_graphs) == (1, 0)
    assert capfd.readouterr().out.count("could not be captured as a CUDA graph") == 1
    captured.assert_same(eager, "a forward that reads its loss")
    assert total == 12
