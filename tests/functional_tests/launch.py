"""Starts a training program on warm ranks, or under torchrun for tests that send signals to real processes.

case.py reads the cases; expectations.py checks their runs.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.tools.ports import free_port
from tests.harness import RankOutcome, launch_on_ranks

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "pretrain_gpt:main"
LEFT_SECONDS = 10.0  # grace period for a run's other processes after its last rank has ended
# Logged fields that may differ between two equal runs, and the reason.
UNCOMPARED_FIELDS: dict[str, str] = {
    "seconds": "time",
    "tokens_per_second": "time",
    "tflops": "time",
    "mfu": "time",
    "timers": "time",
    "rank_times": "time",
    "overlap": "time",
    "straggler": "time",
    "memory": "memory of the process, its libraries included",
    "held": "memory: a resumed run allocates in another order",
    # The gate does compare this field, since both of its runs start or resume at the same step.
    "stash": "Stash pages depend on history that a resumed run lacks",
}


@dataclass(frozen=True)
class Run:
    """A finished run: the outcome of each rank, and the log lines."""

    outcomes: list[RankOutcome]
    log: list[dict[str, Any]]

    @property
    def exit_codes(self) -> list[int]:
        return [outcome.exit_code for outcome in self.outcomes]

    @property
    def steps(self) -> dict[int, dict[str, Any]]:
        """Maps each iteration to the step's fields, without UNCOMPARED_FIELDS."""
        lines = [line for line in self.log if "lm_loss" in line]
        return {
            line["iteration"]: {name: line[name] for name in line.keys() - UNCOMPARED_FIELDS.keys()} for line in lines
        }

    @property
    def validation_losses(self) -> dict[int, list[float]]:
        """Maps each iteration to its validation losses. There are two if the run evaluates at its last iteration."""
        losses: dict[int, list[float]] = {}
        for line in self.log:
            if "validation_loss" in line:
                losses.setdefault(line["iteration"], []).append(line["validation_loss"])
        return losses

    def written(self) -> str:
        """Returns the output of all ranks and the first traceback, for assertion messages."""
        parts = [f"--- rank {one.rank}: exit {one.exit_code}\n{one.stdout}{one.stderr}" for one in self.outcomes]
        notes = [note for one in self.outcomes if one.error for note in vars(one.error).get("__notes__", ())]
        return "\n".join([*parts, *notes[:1]])


def run_program(
    argv: Sequence[str],
    processes: int,
    *,
    folder: Path,
    program: str = PROGRAM,
    env: Mapping[str, str] | None = None,
    timeout: float = 180,
    grace: float = 20,
) -> Run:
    """Runs `program` (module:function taking argv) on warm ranks in `folder`, and returns when all have ended.

    Raises AssertionError if a process of a rank, such as a data worker, outlives the run.
    grace: seconds after the failure of one rank until the other ranks are killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = [*argv, "--tensorboard-dir", str(folder)]
    outcomes = launch_on_ranks(
        _call, processes, program, words, str(folder), backend=None, env=env, timeout=timeout, grace=grace
    )
    assert not any(outcome.outlived for outcome in outcomes), (
        "a process of the run was still alive 10 s after its last rank"
    )
    return Run(outcomes, read_log(folder))


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Returns the complete lines of `folder/steps.jsonl`, or an empty list if the file does not exist."""
    path = folder / "steps.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def torchrun(
    argv: Sequence[str],
    nproc: int,
    *,
    cwd: Path,
    script: str = "pretrain_gpt.py",
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a script of this repository under torchrun in `cwd`. The caller must end the process.

    stdout and stderr go to `cwd`/output.txt, because a full pipe that nobody reads would block the run.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc)]
    rendezvous = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    with (cwd / "output.txt").open("wb") as output:
        return subprocess.Popen(
            [*launcher, *rendezvous, str(ROOT / script), *argv],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def processes_with(variable: str) -> list[int]:
    """Returns the ids of the processes that have `variable`, as NAME=VALUE, in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def left_of(variable: str) -> list[str]:
    """Waits up to LEFT_SECONDS for the processes that have `variable`, as NAME=VALUE, in their environment.

    Kills the processes that are left, and returns their command lines. Call it after the last rank of a run has ended.
    """
    deadline = time.monotonic() + LEFT_SECONDS
    while (left := processes_with(variable)) and time.monotonic() < deadline:
        # There is no event for the end of a process that is not a child.
        time.sleep(0.02)
    words = []
    for process in left:
        with contextlib.suppress(OSError):
            words.append(Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode())
    kill_all(variable)
    return words


def kill_all(variable: str) -> None:
    """Kills the processes that have `variable` in their environment."""
    for process in processes_with(variable):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _call(program: str, argv: list[str], folder: str) -> None:
    os.chdir(folder)
    module, function = program.split(":")
    vars(importlib.import_module(module))[function](argv)
