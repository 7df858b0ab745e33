"""`run.json` beside the step log: where and with which settings a run, and each continuation of it, was started."""

import argparse
import json
import platform
import socket
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.device import default_device, device_name
from megatron.core.files import replaced_file
from megatron.training.arguments import config_values
from megatron.training.callbacks.base import Callback, RunStart
from megatron.training.flops import num_floating_point_operations


class RunFile(Callback):
    """Writes `folder/run.json` at the start: the latest start's settings, and when and where each start was."""

    def __init__(self, folder: Path, *, record: dict[str, Any]) -> None:
        self.path = folder / "run.json"
        self.record = record

    def on_train_start(self, start: RunStart) -> None:
        """A run from step 0 replaces the file; one that goes on adds to its list of starts."""
        starts = _read_starts(self.path) if start.iteration > 0 else []
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        environment = self.record["environment"]
        starts.append({"started": started, "iteration": start.iteration, "environment": environment})
        record = {"started": started, "iteration": start.iteration, **self.record, "starts": starts}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(self.path) as file:
            file.write(json.dumps(record, indent=1).encode() + b"\n")


def describe_run(args: argparse.Namespace, size: tuple[int, int]) -> dict[str, Any]:
    """Environment, flags and size of the model as JSON values; size: as count_parameters gives it."""
    parameters, active = size
    flops_per_token = num_floating_point_operations(args, 1) / args.seq_length
    return {
        "environment": environment(),
        "flags": config_values(args),
        "model": {"parameters": parameters, "active_parameters": active, "flops_per_token": flops_per_token},
    }


def environment() -> dict[str, Any]:
    """What the run runs on; the commit is that of this code where it is a git checkout."""
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
    """The starts of an earlier run; none where there is no file, or one that is not ours."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return []
    starts = record.get("starts") if isinstance(record, dict) else None
    return starts if isinstance(starts, list) else []
