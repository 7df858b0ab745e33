"""`progress.txt` beside the checkpoints: when jobs started and what each checkpoint had cost, to read at a glance."""

import argparse
import os
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch.distributed as dist

from megatron.training.callbacks.base import Callback, RunStart, StepReport
from megatron.training.callbacks.line_file import LineFile
from megatron.training.flops import num_floating_point_operations

_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
_LINE = re.compile(r"([-\d]+ [:\d]+)\tJob ID: [^\t]*\t# GPUs: (\d+)\t(.*)")
_FLOPS = re.compile(r"Floating-point operations: ([\d.eE+]+)")


@dataclass
class Stretch:
    """Jobs in a row on as many devices: when the first began, and the operations spent before."""

    start: datetime
    flops: float


class ProgressFile(Callback):
    """Appends a line at the start of a job and at each checkpoint, in the columns that Megatron's users know."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.path = folder / "progress.txt"
        self.num_devices = dist.get_world_size()
        self._flops_per_sample = num_floating_point_operations(args, 1)
        self._samples = 0
        self._seq_length = args.seq_length
        self._args = args
        self._job = self._stretch = Stretch(datetime.now(), 0.0)
        self._file: LineFile | None = None

    def on_train_start(self, start: RunStart) -> None:
        """Writes that a job starts."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = LineFile(self.path)
        # By now the checkpoint, if any, is loaded.
        self._samples = self._args.consumed_train_samples
        self._job = Stretch(datetime.now(), self._samples * self._flops_per_sample)
        self._append("Starting job")
        self._stretch = last_stretch(self.path.read_text(encoding="utf-8"), self.num_devices) or self._job

    def on_step_end(self, report: StepReport) -> None:
        """Remembers the samples read."""
        self._samples = report.consumed_samples

    def on_save(self, iteration: int) -> None:
        """Writes what the checkpoint took."""
        flops = self._samples * self._flops_per_sample
        self._append(
            f"Saved checkpoint\tIteration: {iteration}\t"
            f"Job throughput: {self._tflops(flops, self._job):.1f} TFLOP/s/GPU\t"
            f"Cumulative throughput: {self._tflops(flops, self._stretch):.1f} TFLOP/s/GPU\t"
            f"Floating-point operations: {flops:.2e}\t"
            f"Tokens (in billions): {self._samples * self._seq_length / 1e9:.2f}"
        )

    def on_run_end(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _tflops(self, flops: float, since: Stretch) -> float:
        seconds = max((datetime.now() - since.start).total_seconds(), 1e-6)
        return (flops - since.flops) / seconds / 1e12 / self.num_devices

    def _append(self, text: str) -> None:
        # What SLURM calls the job, so that the line finds its log.
        job = os.environ.get("SLURM_JOB_ID", "")
        line = f"{datetime.now().strftime(_TIME_FORMAT)}\tJob ID: {job}\t# GPUs: {self.num_devices}\t{text}\n"
        assert self._file is not None, "the file is opened by on_train_start"
        self._file.write(line.encode())


def last_stretch(text: str, num_devices: int) -> Stretch | None:
    """The latest jobs on `num_devices` devices without others between; None if the file ends with others."""
    stretch: Stretch | None = None
    flops = 0.0
    for found in map(_LINE.fullmatch, text.splitlines()):
        if found is None:
            continue
        if int(found[2]) != num_devices:
            stretch = None
        elif stretch is None and found[3] == "Starting job":
            stretch = Stretch(datetime.strptime(found[1], _TIME_FORMAT), flops)
        spent = _FLOPS.search(found[3])
        flops = float(spent[1]) if spent else flops
    return stretch
