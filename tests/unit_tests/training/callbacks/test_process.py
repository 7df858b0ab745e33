"""Recorded steps show the names of the step's functions, and garbage is collected at the configured steps."""

import gc
import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.cuda import _memory_viz
from torch.profiler import record_function

from megatron.core.device import DelegateThread
from megatron.core.device.trace_ranges import trace_range
from megatron.training.callbacks import RunStart
from megatron.training.callbacks.process import CpuMemoryHistory, ManualGC, TorchProfile
from megatron.training.config import GarbageCollectionConfig, ProfilingConfig
from tests.unit_tests.training.small_reports import EVALUATION, STEP


@pytest.mark.parametrize(("last", "name"), [(6, "rank5_steps2-3.pt.trace.json"), (2, "rank5_steps2-2.pt.trace.json")])
def test_trace_holds_the_steps_asked_for_also_of_a_run_that_ends_early(tmp_path: Path, last: int, name: str) -> None:
    config = ProfilingConfig(profile_step_start=1, profile_step_end=3)
    profile = TorchProfile(config, tmp_path, rank=5, device=torch.device("cpu"))
    for iteration in range(last):
        profile.on_step_start(iteration)
        with record_function(f"step {iteration + 1}"):
            torch.ones(2).sum()
        profile.on_step_end(replace(STEP, iteration=iteration + 1))
    profile.on_run_end()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    names = {event["name"] for event in json.loads((tmp_path / name).read_text())["traceEvents"]}
    assert {f"step {step}" for step in range(1, 7)} & names == {f"step {step}" for step in range(2, min(last, 3) + 1)}


def test_trace_shows_other_threads(tmp_path: Path) -> None:
    # The backward of a pair runs on such a thread.
    thread = DelegateThread("other")
    thread.submit(lambda: None)()
    config = ProfilingConfig(profile_step_start=0, profile_step_end=1)
    profile = TorchProfile(config, tmp_path, rank=0, device=torch.device("cpu"))

    @trace_range("of the other thread")
    def compute() -> None:
        torch.ones(2).exp()

    profile.on_step_start(0)
    thread.submit(compute)()
    profile.on_step_end(replace(STEP, iteration=1))
    thread.close()
    (path,) = tmp_path.iterdir()
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert {"of the other thread", "aten::exp"} <= names


def test_memory_history_names_who_took_the_memory(tmp_path: Path) -> None:
    history = CpuMemoryHistory(
        tmp_path / "memory.pickle",
        ProfilingConfig(profile_step_start=1, profile_step_end=2, record_memory_history=True),
    )
    for iteration in range(3):
        history.on_step_start(iteration)
        with record_function(f"step {iteration + 1}"):
            kept = [torch.empty(1000 * (iteration + 1)), torch.empty(7)]
            kept.pop(0)
        history.on_step_end(replace(STEP, iteration=iteration + 1))
    history.on_run_end()
    snapshot = pickle.loads((tmp_path / "memory.pickle").read_bytes())
    (actions,) = snapshot["device_traces"]
    sizes = {size: [one for one in actions if one["size"] == size] for size in (4000, 8000, 12000)}
    assert [one["action"] for one in sizes[8000]] == ["alloc", "free_completed"]
    assert not sizes[4000] and not sizes[12000]
    assert [frame["name"] for frame in sizes[8000][0]["frames"]] == ["aten::empty", "step 2"]
    assert "free completed for a 7.8KiB" in _memory_viz.trace(snapshot)  # readable by torch's own tool


@pytest.mark.parametrize(("interval", "around_evaluations", "expected"), [(2, True, 5), (3, False, 2), (0, True, 3)])
def test_garbage_is_collected_at_its_steps_alone(
    monkeypatch: pytest.MonkeyPatch, interval: int, around_evaluations: bool, expected: int
) -> None:
    collected = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: collected.append(generation))
    callback = ManualGC(GarbageCollectionConfig(manual_gc_interval=interval, manual_gc_eval=around_evaluations))
    try:
        callback.on_train_start(RunStart(iteration=0, train_iters=4))
        assert not gc.isenabled()
        for iteration in (1, 2, 3, 4):
            callback.on_step_end(replace(STEP, iteration=iteration))
        callback.on_evaluation_start(4)
        callback.on_evaluation_end(EVALUATION)
    finally:
        callback.on_run_end()
    assert len(collected) == expected and gc.isenabled()
