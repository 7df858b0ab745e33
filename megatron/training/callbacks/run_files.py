"""Writes the files in a run's folder: settings (`run.json`), one line per step (`steps.jsonl`), and `progress.txt`.

console.py prints to the console, and tensorboard.py writes files for TensorBoard.
"""

import json
import math
import os
import platform
import re
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.datasets.padding import NO_PADDING
from megatron.core.device import default_device, device_name
from megatron.core.files import replaced_file
from megatron.training.callbacks.base import Callback, EvaluationReport, RunStart, StepReport
from megatron.training.callbacks.lines import LineFile
from megatron.training.command_line.yaml_config import config_values
from megatron.training.compute.flops import num_floating_point_operations, num_operations_of_samples
from megatron.training.config import RunConfig


class RunFile(Callback):
    """Writes `folder/run.json` at startup: the settings of the latest start, and time and host of every start."""

    def __init__(self, folder: Path, *, record: dict[str, Any]) -> None:
        self.path = folder / "run.json"
        self.record = record

    def on_train_start(self, start: RunStart) -> None:
        """Overwrites the file at step 0. A resumed run adds an entry to the file's list of starts."""
        starts = _read_starts(self.path) if start.iteration > 0 else []
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        environment = self.record["environment"]
        starts.append({"started": started, "iteration": start.iteration, "environment": environment})
        record = {"started": started, "iteration": start.iteration, **self.record, "starts": starts}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(self.path) as file:
            file.write(json.dumps(record, indent=1).encode() + b"\n")


def describe_run(run_config: RunConfig, size: tuple[int, int]) -> dict[str, Any]:
    """Returns the run's environment, flags and model size as JSON values. size: the result of count_parameters."""
    parameters, active = size
    flops_per_token = num_floating_point_operations(run_config, 1) / run_config.data.seq_length
    return {
        "environment": environment(),
        "flags": config_values(run_config.values),
        "model": {"parameters": parameters, "active_parameters": active, "flops_per_token": flops_per_token},
    }


def environment() -> dict[str, Any]:
    """Returns versions, device, host, number of processes, and the commit of the git checkout, as JSON values."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device_name(default_device()),
        "host": socket.gethostname(),
        "world_size": dist.get_world_size(),
        "commit": _commit(Path(__file__).resolve().parents[3]),
    }


def _commit(folder: Path) -> str | None:
    try:
        command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if (folder / ".git").exists() else None


def _read_starts(path: Path) -> list[Any]:
    """Reads the starts recorded in run.json. Returns an empty list if the file is missing or invalid."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return []
    starts = record.get("starts") if isinstance(record, dict) else None
    return starts if isinstance(starts, list) else []


# Report fields that are written under the same name unless they are None.
_OPTIONAL = (
    "num_zeros",
    "params_norm",
    "max_attention_logit",
    "weight_decay",
    "decoupled_learning_rate",
    "tflops",
    "mfu",
    "memory",
    "held",
    "timers",
    "overlap",
    "expert_load",
    "per_layer",
    "straggler",
)


class JsonlLog(Callback):
    """Appends a line per step to `folder/steps.jsonl`. First removes lines of steps that a resumed run will repeat."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "steps.jsonl"
        self._file: LineFile | None = None

    def on_train_start(self, start: RunStart) -> None:
        """Opens the file and truncates it to the run's first iteration."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        keep_lines_until(self.path, start.iteration)
        self._file = LineFile(self.path)

    def on_rewind(self, iteration: int) -> None:
        """Removes the lines of steps that will be repeated."""
        self.on_run_end()
        self.on_train_start(RunStart(iteration=iteration, train_iters=iteration))

    def on_step_end(self, report: StepReport) -> None:
        """Writes the step's line immediately, so that a killed run leaves complete lines."""
        losses = {name.replace(" ", "_"): value for name, value in report.losses.items()}
        known = {name: vars(report)[name] for name in _OPTIONAL if vars(report)[name] is not None}
        if report.rank_times is not None:
            known["rank_times"] = asdict(report.rank_times)
        if report.stash is not None:
            known["stash"] = asdict(report.stash)
        if report.consumed_padding.tokens:
            known["padding_tokens"] = report.padding.tokens
            known["consumed_padding_tokens"] = report.consumed_padding.tokens
        self._write(
            {
                "iteration": report.iteration,
                **losses,
                "grad_norm": report.grad_norm,
                "learning_rate": report.learning_rate,
                "loss_scale": report.loss_scale,
                "global_batch_size": report.global_batch_size,
                "consumed_samples": report.consumed_samples,
                "skipped": report.skipped,
                "seconds": round(report.seconds, 6),
                "tokens_per_second": round(report.tokens / report.seconds, 1),
                **known,
            }
        )

    def on_evaluation_end(self, report: EvaluationReport) -> None:
        """Writes a line with the loss as `validation_loss` or `test_loss`, and a script's other values as `test_NAME`.

        With several validation sets, the key of each set is `validation-SET_loss`.
        """
        words = {name: "loss" if name == "lm loss" else name.replace(" ", "_") for name in report.losses}
        values = {f"{report.label}_{words[name]}": value for name, value in report.losses.items()}
        self._write({"iteration": report.iteration, **values})

    def on_run_end(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: dict[str, Any]) -> None:
        assert self._file is not None, "on_train_start opens the log"
        self._file.write(json.dumps(_json_value(record)).encode() + b"\n")


def _json_value(value: Any) -> Any:
    """Converts numbers that JSON cannot represent to strings, so that strict readers can parse the line."""
    if isinstance(value, dict):
        return {name: _json_value(inner) for name, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def lines_of(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file one at a time, because a log with many experts' loads may not fit in memory."""
    with path.open("rb") as file:
        yield from file


def keep_lines_until(
    path: Path,
    iteration: int,
    *,
    read: Callable[[Path], Iterable[bytes]] = lines_of,
    encode: Callable[[bytes], bytes] = bytes,
) -> None:
    """Rewrites a log without the lines after `iteration` and without a truncated last line.

    read: yields the lines of a file. encode: the inverse of `read`, for one line.
    """
    if not path.exists():
        return
    with replaced_file(path) as new:
        for line in read(path):
            step = _iteration(line)
            if step is not None and step <= iteration:
                new.write(encode(line.rstrip(b"\n") + b"\n"))


def _iteration(line: bytes) -> int | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    step = record.get("iteration") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None


_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
_LINE = re.compile(r"([-\d]+ [:\d]+)\tJob ID: [^\t]*\t# GPUs: (\d+)\t(.*)")
_FLOPS = re.compile(r"Floating-point operations: ([\d.eE+]+)")


@dataclass
class Stretch:
    """Consecutive jobs on the same number of devices.

    start: start time of the first job. flops: operations completed before the first job.
    """

    start: datetime
    flops: float


class ProgressFile(Callback):
    """Appends a line to `progress.txt` at the start of a job and at each checkpoint, in Megatron-LM's format."""

    def __init__(self, folder: Path, run_config: RunConfig) -> None:
        self.path = folder / "progress.txt"
        self.num_devices = dist.get_world_size()
        self._samples, self._padding = 0, NO_PADDING
        self._run_config = run_config
        self._job = self._stretch = Stretch(datetime.now(), 0.0)
        self._file: LineFile | None = None

    def on_train_start(self, start: RunStart) -> None:
        """Writes a line for the start of the job."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = LineFile(self.path)
        # The checkpoint, if any, is already loaded.
        self._samples, self._padding = self._run_config.values["consumed_train_samples"], start.consumed_padding
        self._job = Stretch(datetime.now(), self._flops)
        self._append("Starting job")
        self._stretch = last_stretch(self.path.read_text(encoding="utf-8"), self.num_devices) or self._job

    def on_step_end(self, report: StepReport) -> None:
        """Records the number of consumed samples, and their padding."""
        self._samples, self._padding = report.consumed_samples, report.consumed_padding

    def on_save(self, iteration: int) -> None:
        """Writes a line with the throughput, operations and tokens up to the checkpoint."""
        flops, tokens = self._flops, self._samples * self._run_config.data.seq_length - self._padding.tokens
        self._append(
            f"Saved checkpoint\tIteration: {iteration}\t"
            f"Job throughput: {self._tflops(flops, self._job):.1f} TFLOP/s/GPU\t"
            f"Cumulative throughput: {self._tflops(flops, self._stretch):.1f} TFLOP/s/GPU\t"
            f"Floating-point operations: {flops:.2e}\t"
            f"Tokens (in billions): {tokens / 1e9:.2f}"
        )

    def on_run_end(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def _flops(self) -> float:
        return num_operations_of_samples(self._run_config, self._samples, self._padding)

    def _tflops(self, flops: float, since: Stretch) -> float:
        seconds = max((datetime.now() - since.start).total_seconds(), 1e-6)
        return (flops - since.flops) / seconds / 1e12 / self.num_devices

    def _append(self, text: str) -> None:
        # The SLURM job number, which leads from the line to the job's log.
        job = os.environ.get("SLURM_JOB_ID", "")
        line = f"{datetime.now().strftime(_TIME_FORMAT)}\tJob ID: {job}\t# GPUs: {self.num_devices}\t{text}\n"
        assert self._file is not None, "on_train_start opens the file"
        self._file.write(line.encode())


def last_stretch(text: str, num_devices: int) -> Stretch | None:
    """Returns the consecutive jobs on `num_devices` devices at the end of a progress file.

    Returns None if the last job used a different number of devices.
    """
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
