"""Recording of some steps: by torch's profiler into a trace file, or by nsys, which waits for cudaProfilerStart."""

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megatron.core.device import start_cuda_profiler, stop_cuda_profiler
from megatron.training.callbacks.base import Callback, StepReport
from megatron.training.logging_config import ProfilingConfig


class TorchProfile(Callback):
    """Writes `folder/rank<R>_steps<A>-<B>.pt.trace.json`, for chrome://tracing, Perfetto or TensorBoard."""

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
            record_shapes=self.config.pytorch_profiler_collect_shapes,
            with_stack=self.config.pytorch_profiler_collect_callstack,
        )
        self._profile.start()

    def on_step_end(self, report: StepReport) -> None:
        """Writes the trace after step `profile_step_end`."""
        if self._profile is not None:
            self._steps.append(report.iteration)
            if report.iteration == self.config.profile_step_end:
                self._write()

    def on_run_end(self) -> None:
        """Writes what was recorded if the run ended before."""
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
    """Brackets the steps for `nsys profile --capture-range=cudaProfilerApi`; for GPUs alone."""

    def __init__(self, config: ProfilingConfig) -> None:
        self.config = config

    def on_step_start(self, iteration: int) -> None:
        """Starts the capture after `profile_step_start` steps."""
        if iteration == self.config.profile_step_start:
            start_cuda_profiler()

    def on_step_end(self, report: StepReport) -> None:
        """Ends the capture after step `profile_step_end`."""
        if report.iteration == self.config.profile_step_end:
            stop_cuda_profiler()
