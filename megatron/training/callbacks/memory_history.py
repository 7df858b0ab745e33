"""Who took and gave back which memory, as a snapshot for torch's viewer (https://pytorch.org/memory_viz)."""

import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from megatron.core.device import cuda_memory_snapshot, start_cuda_memory_history
from megatron.core.files import replaced_file
from megatron.training.callbacks.base import Callback, RunStart, StepReport
from megatron.training.logging_config import ProfilingConfig


class CudaMemoryHistory(Callback):
    """Writes what the GPU's allocator did since the start, at most its last 100,000 actions, at every log interval.

    Not run on a GPU yet.
    """

    def __init__(self, path: Path, *, log_interval: int) -> None:
        self.path = path
        self.log_interval = log_interval

    def on_train_start(self, start: RunStart) -> None:
        """Starts the record."""
        start_cuda_memory_history()

    def on_step_end(self, report: StepReport) -> None:
        """Replaces the file: a run that ends for want of memory leaves the last one."""
        if report.iteration % self.log_interval == 0:
            self._write()

    def on_run_end(self) -> None:
        """Writes the end, also where an error ended the run."""
        self._write()

    def _write(self) -> None:
        write_snapshot(cuda_memory_snapshot(), self.path)


class CpuMemoryHistory(Callback):
    """Writes what torch took and gave back on the CPU in the steps that the profiler's flags name.

    The allocator of the CPU keeps no record, so torch's profiler does.
    """

    def __init__(self, path: Path, config: ProfilingConfig) -> None:
        self.path = path
        self.config = config
        self._profile: Any = None

    def on_step_start(self, iteration: int) -> None:
        """Starts the record after `profile_step_start` steps."""
        if iteration == self.config.profile_step_start:
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.start()

    def on_step_end(self, report: StepReport) -> None:
        """Writes the snapshot after step `profile_step_end`."""
        if report.iteration == self.config.profile_step_end:
            self.on_run_end()

    def on_run_end(self) -> None:
        """Writes what was recorded if the run ended before."""
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
    """The memory events of a profiler's trace in the form of torch.cuda.memory snapshots, sizes in bytes.

    Each action carries the names of the operators and ranges that it happened in, innermost first.
    """
    actions: list[dict[str, Any]] = []
    open_ranges: list[tuple[float, str]] = []  # end and name, of one thread at a time
    thread = None
    # A range comes before what it contains: at equal starts the longer one is outside.
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
    """Pickles it as the viewer reads it; a file that is there is replaced as a whole."""
    with replaced_file(path) as file:
        pickle.dump(snapshot, file)
