"""Callbacks that act on the process: profiles and memory histories of selected steps, and manual garbage collection."""

import gc
import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from megatron.core.device import (
    cuda_memory_snapshot,
    start_cuda_memory_history,
    start_cuda_profiler,
    stop_cuda_profiler,
)
from megatron.core.files import replaced_file
from megatron.training.callbacks.base import Callback, EvaluationReport, RunStart, StepReport
from megatron.training.config import GarbageCollectionConfig, ProfilingConfig


class TorchProfile(Callback):
    """Profiles steps with torch's profiler and writes `folder/rank<R>_steps<A>-<B>.pt.trace.json`.

    The trace can be opened in chrome://tracing, Perfetto or TensorBoard.
    """

    def __init__(self, config: ProfilingConfig, folder: Path, *, rank: int, device: torch.device) -> None:
        self.config = config
        self.folder = folder
        self._rank = rank
        self._device = device
        self._profile: Any = None
        self._steps: list[int] = []

    def on_step_start(self, iteration: int) -> None:
        """Starts recording after `profile_step_start` steps."""
        if iteration != self.config.profile_step_start:
            return
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            # The backward of a pair runs on another thread than its caller.
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
            record_shapes=self.config.pytorch_profiler_collect_shapes,
            with_stack=self.config.pytorch_profiler_collect_callstack,
        )
        self._profile.start()

    def on_step_end(self, report: StepReport) -> None:
        """Writes the trace after step `profile_step_end`."""
        if self._profile is not None:
            self._steps.append(report.iteration)
            if report.iteration >= self.config.profile_step_end:
                self._write()

    def on_run_end(self) -> None:
        """Writes the recorded steps if the run ends early."""
        if self._profile is not None:
            self._write()

    def _write(self) -> None:
        self._profile.stop()
        if self._steps:
            self.folder.mkdir(parents=True, exist_ok=True)
            name = f"rank{self._rank}_steps{self._steps[0]}-{self._steps[-1]}.pt.trace.json"
            self._profile.export_chrome_trace(str(self.folder / name))
        self._profile = None


class NsysProfile(Callback):
    """Starts and stops the capture of `nsys profile --capture-range=cudaProfilerApi`. Works on GPUs only."""

    def __init__(self, config: ProfilingConfig) -> None:
        self.config = config
        self._is_recording = False

    def on_step_start(self, iteration: int) -> None:
        """Starts the capture after `profile_step_start` steps."""
        if iteration == self.config.profile_step_start:
            self._is_recording = True
            start_cuda_profiler()

    def on_step_end(self, report: StepReport) -> None:
        """Ends the capture after step `profile_step_end`, or after the next step if that one is skipped."""
        if self._is_recording and report.iteration >= self.config.profile_step_end:
            self._is_recording = False
            stop_cuda_profiler()


class CudaMemoryHistory(Callback):
    """Writes the last 100,000 events of the GPU allocator at every log interval, for https://pytorch.org/memory_viz.

    Not tested on a GPU yet.
    """

    def __init__(self, path: Path, *, log_interval: int) -> None:
        self.path = path
        self.log_interval = log_interval

    def on_train_start(self, start: RunStart) -> None:
        """Starts recording."""
        start_cuda_memory_history()

    def on_step_end(self, report: StepReport) -> None:
        """Overwrites the file at log intervals, so that a run that fails with out-of-memory leaves a recent history."""
        if report.iteration % self.log_interval == 0:
            self._write()

    def on_run_end(self) -> None:
        """Writes the history at the end, even after an error."""
        self._write()

    def _write(self) -> None:
        write_snapshot(cuda_memory_snapshot(), self.path)


class CpuMemoryHistory(Callback):
    """Writes a snapshot of torch's allocations and releases on the CPU during the profiled steps.

    The CPU allocator records no history, so torch's profiler is used. It records allocations of the thread that calls
    the callback only, and therefore not those of the backward of a pair.
    """

    def __init__(self, path: Path, config: ProfilingConfig) -> None:
        self.path = path
        self.config = config
        self._profile: Any = None

    def on_step_start(self, iteration: int) -> None:
        """Starts recording after `profile_step_start` steps."""
        if iteration == self.config.profile_step_start:
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.start()

    def on_step_end(self, report: StepReport) -> None:
        """Writes the snapshot after step `profile_step_end`."""
        if report.iteration >= self.config.profile_step_end:
            self.on_run_end()

    def on_run_end(self) -> None:
        """Writes the recorded steps if the run ends early."""
        if self._profile is None:
            return
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        self._profile = None
        write_snapshot(snapshot_of_trace(events), self.path)


def snapshot_of_trace(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Converts the memory events of a profiler trace to a snapshot in the format of torch.cuda.memory, in bytes.

    Each event lists the operators and ranges around it, innermost first.
    """
    actions: list[dict[str, Any]] = []
    open_ranges: list[tuple[float, str]] = []  # end and name, of one thread at a time
    thread = None
    # Outer ranges sort before inner ranges. Of two ranges with the same start, the longer one is the outer one.
    for event in sorted(filter(_is_of_interest, events), key=lambda e: (str(e["tid"]), e["ts"], -e.get("dur", 0))):
        if event["tid"] != thread:
            thread, open_ranges = event["tid"], []
        while open_ranges and open_ranges[-1][0] < event["ts"]:
            open_ranges.pop()
        if event["ph"] == "X":
            open_ranges.append((event["ts"] + event["dur"], event["name"]))
        else:
            actions.append(_action(event, names=[name for _, name in reversed(open_ranges)]))
    actions.sort(key=lambda action: action["time_us"])
    return {"segments": [], "device_traces": [actions]}


def _is_of_interest(event: dict[str, Any]) -> bool:
    return event.get("name") == "[memory]" or event.get("cat") in ("cpu_op", "user_annotation")


def _action(event: dict[str, Any], *, names: list[str]) -> dict[str, Any]:
    change = event["args"]["Bytes"]
    return {
        "action": "alloc" if change > 0 else "free_completed",
        "addr": event["args"]["Addr"],
        "size": abs(change),
        "stream": 0,
        "time_us": event["ts"],
        "frames": [{"filename": "", "line": 0, "name": name} for name in names],
    }


def write_snapshot(snapshot: dict[str, Any], path: Path) -> None:
    """Pickles a snapshot in the format of pytorch.org/memory_viz. Replaces an existing file atomically."""
    with replaced_file(path) as file:
        pickle.dump(snapshot, file)


class ManualGC(Callback):
    """Disables automatic garbage collection, and collects at the configured steps, at the same time on all ranks."""

    def __init__(self, config: GarbageCollectionConfig) -> None:
        self.config = config

    def on_train_start(self, start: RunStart) -> None:
        """Disables automatic collection, and collects the garbage of the setup."""
        gc.disable()
        gc.collect()

    def on_step_end(self, report: StepReport) -> None:
        """Collects garbage every `manual_gc_interval` steps."""
        if self.config.manual_gc_interval and report.iteration % self.config.manual_gc_interval == 0:
            gc.collect()

    def on_evaluation_start(self, iteration: int) -> None:
        """Collects garbage before an evaluation."""
        if self.config.manual_gc_eval:
            gc.collect()

    def on_evaluation_end(self, report: EvaluationReport) -> None:
        """Collects the youngest generation, which holds the objects of the evaluation."""
        if self.config.manual_gc_eval:
            gc.collect(generation=0)

    def on_run_end(self) -> None:
        """Re-enables automatic garbage collection."""
        gc.enable()
