"""Replayed steps launch one graph without waits or allocations, and a capture that the GPU aborts leaves torch usable.
Skipped without a GPU.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from megatron.core.device import CudaGraphs, default_device
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.training.callbacks import Callback, StepReport
from megatron.training.run import TrainingRun
from tests.distributed.graph_runs import FULL, Trained, own_graphs, train_here
from tests.distributed.stash_runs import ROUTER, stash
from tests.functional_tests.case import Flags
from tests.gpu.graph_cases import DROPOUT, EXPERTS, HALF, SCALED, UPDATE, Case, argv_of, on_gpu

pytestmark = pytest.mark.gpu

STEPS, WATCHED, PROFILED = 30, 20, 3
NUMBERS = ("allocated_bytes.all.current", "reserved_bytes.all.current", "num_alloc_retries", "num_device_alloc")
# CUDA calls that wait for the device or allocate its memory. Queries do neither, and the allocator needs them for
# memory that several streams have used.
FORBIDDEN = ("Malloc", "Free", "HostAlloc", "Synchronize")
RUNS = {
    "dense": Case("dense", {**HALF, **DROPOUT}),
    "scaled update": Case("llama", {**SCALED, **UPDATE}),
    "pages": Case("moe", {**EXPERTS, **ROUTER, **stash(0.5, 2.0, compute="copies")}),
    "rungs and update": Case("moe", {**EXPERTS, **stash(0.3, 0.4, compute="copies"), **UPDATE}),
}


class Watched(Callback):
    """Forbids device reads in replays and their input copies, and records memory and, for some steps, CUDA calls."""

    def __init__(self) -> None:
        self.memory: list[dict[str, Any]] = []
        self.calls: list[Counter[str]] = []
        self._profile: Any = None

    @contextmanager
    def setup(self, run: TrainingRun) -> Iterator[None]:
        replay = FullCudaGraphWrapper._replay

        def watched(graph: FullCudaGraphWrapper, *given: Any) -> Any:
            with refusing_reads():
                return replay(graph, *given)

        with patch.object(FullCudaGraphWrapper, "_replay", watched):
            yield

    def on_step_end(self, report: StepReport) -> None:
        if report.iteration == STEPS - PROFILED:
            self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self._profile.start()
        elif report.iteration == STEPS:
            self._profile.stop()
            self.calls, self._profile = calls_in_replays(self._profile), None
        if default_device().type == "cuda":
            stats = torch.cuda.memory_stats()
            self.memory.append({name: stats.get(name) for name in NUMBERS})


@contextmanager
def refusing_reads() -> Iterator[None]:
    if default_device().type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def calls_in_replays(recorded: profile) -> list[Counter[str]]:
    """Counts the host's CUDA calls by name within each replay."""
    events = [event for event in recorded.events() or [] if event.device_type == DeviceType.CPU]
    spans = [event.time_range for event in events if event.name == "FullCudaGraphWrapper.replay"]
    return [
        Counter(
            event.name
            for event in events
            if event.name.startswith("cu") and span.start <= event.time_range.start <= span.end
        )
        for span in spans
    ]


def is_forbidden(call: str) -> bool:
    """Returns whether a replay must not make this CUDA call."""
    return any(word in call for word in FORBIDDEN)


def watch(case: Case) -> tuple[Trained, Watched]:
    # Otherwise CUPTI is reinitialized during the run, which breaks existing graphs in some versions.
    os.environ |= {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
    watched = Watched()
    steps: Flags = {"train-iters": STEPS}
    run = train_here(
        argv_of(case, FULL, case.flags, steps), graphs=own_graphs, setup=watched.setup, callbacks=[watched]
    )
    return run, watched


@pytest.mark.parametrize("name", RUNS)
def test_a_replay_is_one_launch_that_waits_for_nothing_and_takes_no_memory(name: str) -> None:
    run, watched = on_gpu(watch, RUNS[name])
    assert (run.failure, run.num_captures) == (None, 1)
    assert len(watched.calls) == PROFILED
    for calls in watched.calls:
        assert calls["cudaGraphLaunch"] == 1, calls
        assert not any(map(is_forbidden, calls)), calls
    before_the_profile = watched.memory[-PROFILED - WATCHED - 1 : -PROFILED - 1]
    assert before_the_profile == before_the_profile[:1] * WATCHED


def seed() -> None:
    model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)


@pytest.fixture
def graphs() -> CudaGraphs:
    seed()
    return CudaGraphs(default_device(), generators=get_cuda_rng_tracker().generators)


def draw(ones: torch.Tensor) -> torch.Tensor:
    """Draws from the default random stream and from another one: [2, N], fp32."""
    with get_cuda_rng_tracker().fork():
        own = F.dropout(ones, 0.25)
    return torch.stack([own, F.dropout(ones, 0.5)])


def test_a_capture_that_the_gpu_breaks_off_leaves_stream_generators_and_allocator_alone(graphs: CudaGraphs) -> None:
    ones, main = torch.ones(1 << 14, device=default_device()), torch.cuda.current_stream()
    expected = [draw(ones) for _ in range(4)]
    seed()
    with graphs.on_capture_stream():
        warm = draw(ones)
    with graphs.capturing() as before:
        drawn = draw(ones)
    with pytest.raises(RuntimeError, match="captur"):
        with graphs.capturing():
            draw(ones).sum().item()
    assert torch.cuda.current_stream() == main and not torch.cuda.is_current_stream_capturing()
    before.replay()
    found = [warm, drawn.clone(), draw(ones)]
    with graphs.capturing() as after:
        last = draw(ones)
    after.replay()
    assert all(map(torch.equal, [*found, last], expected))
    # The allocator reuses memory of a second stream, which shows that it queries events again.
    side, reserved = torch.cuda.Stream(), torch.cuda.memory_reserved()
    for _ in range(20):
        used = torch.empty(64 << 20, dtype=torch.uint8, device=default_device())
        with torch.cuda.stream(side):
            used.zero_()
        used.record_stream(side)
        del used
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - reserved <= 128 << 20


def test_graphs_can_be_captured_while_somebody_holds_a_tensor_of_dropped_ones(graphs: CudaGraphs) -> None:
    ones = torch.ones(1 << 20, device=default_device())
    reserved = []
    for factor in range(2, 12):
        with graphs.capturing() as graph:
            product = (ones * factor) + (ones * 0)
        graph.replay()
        assert product[0].item() == factor
        del graph
        reserved.append(torch.cuda.memory_reserved())
    # Only two pools exist: one is kept alive by the last product, and one is new.
    assert reserved[-1] <= reserved[2]
