"""Simulates Slurm and Kubernetes on this machine: starts the nodes' tasks and sends signals. Contains no tests.

Sources: Slurm's manual pages of sbatch, srun and scontrol; "Pod Lifecycle" and "Jobs" of the Kubernetes documentation.
"""

import contextlib
import enum
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron.tools.ports import free_port
from tests.functional_tests.launch import ROOT, kill_all, processes_with

SECONDS = 60.0  # timeout for an expected event
STEP = "STEP_OF_THE_TEST"  # environment variable of each process of a job step
JOB = "RUN_OF_THE_TEST"
MOMENT = "MOMENT"  # variable with the path of a pipe that a rank writes to when it waits for the signal

# Runs one task per node, each in a separate session, and forwards SIGTERM to the tasks.
_SRUN = """#!{python} -SE
import json, os, pathlib, signal, subprocess, sys
words = sys.argv[1:]
options = dict()
while words[0].startswith("--"):
    name, value = words.pop(0)[2:].split("=")
    options[name] = value
path = pathlib.Path(os.environ["STEP_PATH"])

def kill(*_):
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if f"{step}={{path}}".encode() in (folder / "environ").read_bytes().split(b"\\0"):
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:
            pass

tasks = []
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
signal.signal(signal.SIGALRM, kill)
for node in range(int(os.environ["SLURM_JOB_NUM_NODES"])):
    environment = dict(os.environ, SLURM_NODEID=str(node), {step}=str(path))
    tasks.append(subprocess.Popen(words, env=environment, start_new_session=True))
path.with_suffix(".new").write_text(json.dumps([task.pid for task in tasks]))
path.with_suffix(".new").replace(path)
codes = []
while len(codes) < len(tasks):
    _, status = os.wait()
    codes.append(os.waitstatus_to_exitcode(status) % 256)
    if codes[-1] and options["kill-on-bad-exit"] == "1":
        kill()
    if len(codes) == 1:
        signal.alarm(int(options["wait"]))
sys.exit(max(codes))
"""
_SCONTROL = """#!/usr/bin/env bash
case $1 in
show) for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do echo 127.0.0.1; done ;;
requeue) echo "$2" >>"$REQUEUES" ;;
esac
"""
# Replaces .venv's Python: skips the memory plan and runs a different training program.
_PYTHON = """#!/usr/bin/env bash
[[ $1 == -m || " $* " == *" --dry-run "* ]] || exec {python} "$@"
words=()
for word in "$@"; do
    [[ $word != --dry-run ]] || exec echo "The plan."
    [[ $word != */pretrain_gpt.py ]] || word={program}
    words+=("$word")
done
printf '%s\\n' "${{words[@]}}" >"$LAST_COMMAND"
exec {launcher} "${{words[@]}}"
"""


class Receivers(enum.Enum):
    """Processes of a step that receive a signal, which depends on how a cluster tracks processes (ProctrackType)."""

    LEADERS = "the first process of each task"
    ALL = "every process of the step"


@dataclass
class Job:
    """A batch job, which the test starts once per attempt. folder: for its output and the stand-in programs."""

    script: str
    words: Sequence[str]
    folder: Path
    program: Path  # trained in place of pretrain_gpt.py
    nodes: int = 2
    env: Mapping[str, str] = field(default_factory=dict)
    launcher: str = sys.executable  # starts the program; receives the arguments of $PYTHON
    seconds_per_second: float = 1.0  # duration of a second of the script's #SBATCH lines
    process: subprocess.Popen[bytes] | None = None
    attempts: int = 0

    def __post_init__(self) -> None:
        text = (ROOT / self.script).read_text(encoding="utf-8")
        self.options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
        self.port = free_port()
        stand_ins = {
            "srun": _SRUN.format(python=sys.executable, step=STEP),
            "scontrol": _SCONTROL,
            "python": _PYTHON.format(python=sys.executable, program=self.program, launcher=self.launcher),
        }
        for name, body in stand_ins.items():
            write_program(self.folder / "bin" / name, body)
        make_pipe(self.folder / "moment")

    @property
    def requeues(self) -> int:
        """Number of times that the script has requeued itself."""
        path = self.folder / "requeues"
        return len(path.read_text().splitlines()) if path.exists() else 0

    @property
    def mark(self) -> str:
        """Environment variable, as NAME=VALUE, that marks each process of the job."""
        return f"{JOB}={self.folder}"

    @property
    def output(self) -> str:
        """The job's stdout and stderr so far."""
        return (self.folder / "output.txt").read_text(errors="replace")

    def start(self) -> None:
        """Starts the script on the first node, as Slurm does when the job is scheduled."""
        environment = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHON": str(self.folder / "bin/python"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "MASTER_PORT": str(self.port),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_JOB_NUM_NODES": str(self.nodes),
            "SLURM_GPUS_ON_NODE": "1",
            "SLURM_RESTART_COUNT": str(self.attempts),
            "REQUEUES": str(self.folder / "requeues"),
            "LAST_COMMAND": str(self.folder / "command"),
            MOMENT: str(self.folder / "moment"),
            JOB: str(self.folder),
            "STEP_PATH": str(self.folder / f"step{self.attempts}"),
            **self.env,
        }
        with (self.folder / "output.txt").open("ab") as output:
            command = ["bash", str(ROOT / self.script), *self.words]
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        self.attempts += 1

    def tasks(self) -> list[int]:
        """Returns the process id of each node's task."""
        return json.loads(self._step.read_text())

    def reach_time_limit(self, receivers: Receivers) -> None:
        """Sends the step the signal of --signal, and kills the job if it is alive after the seconds of --signal."""
        name, _, seconds = self.options["signal"].partition("@")
        number = signal.Signals[f"SIG{name}"]
        for process in self.tasks() if receivers is Receivers.LEADERS else processes_with(f"{STEP}={self._step}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        try:
            self.wait(float(seconds) * self.seconds_per_second)
        except subprocess.TimeoutExpired:
            kill_all(self.mark)

    def cancel(self) -> None:
        """Sends SIGTERM to every process of the job, including the batch script, as scancel does."""
        for process in processes_with(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)

    def fail_node(self, node: int) -> bool:
        """Kills a node's task and the job, as slurmctld does for a lost node. Returns whether Slurm requeues it."""
        os.killpg(self.tasks()[node], signal.SIGKILL)
        kill_all(self.mark)
        self.wait()
        return "requeue" in self.options

    def wait(self, seconds: float = SECONDS) -> int:
        """Waits for the batch script and returns its exit status."""
        assert self.process is not None
        return self.process.wait(seconds)

    def wait_for_moment(self) -> str:
        """Waits until a rank is ready for the signal, and returns the text that it wrote to the pipe."""
        return read_moment(self.folder / "moment", self.process)

    @property
    def _step(self) -> Path:
        """File with the task ids of the latest attempt. Its path marks the processes of the step."""
        return self.folder / f"step{self.attempts - 1}"


@dataclass
class Pod:
    """The container of a Kubernetes pod. Only its command, process 1, receives signals."""

    manifest: str
    index: int
    folder: Path  # replaces /checkpoints, and receives the output
    program: Path
    replaced: Mapping[str, str]  # replacements in the container's arguments and variables, such as host names
    env: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        _, self.job = yaml.safe_load_all((ROOT / self.manifest).read_text(encoding="utf-8"))
        self.spec = self.job["spec"]["template"]["spec"]
        (self.container,) = self.spec["containers"]
        program = _PYTHON.format(python=sys.executable, program=self.program, launcher=sys.executable)
        write_program(self.folder / "bin/python", program)

    def start(self) -> None:
        """Starts the container's command with the environment variables of the manifest."""
        environment = {
            **os.environ,
            "PYTHON": str(self.folder / "bin/python"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "LAST_COMMAND": str(self.folder / "command"),
            MOMENT: str(self.folder / "moment"),
            JOB: str(self.folder),
            **container_variables(self.container, index=self.index),
            **self.env,
        }
        words = [self._replace(word) for word in [*self.container["command"], *self.container.get("args", [])]]
        with (self.folder / f"pod{self.index}.txt").open("ab") as output:
            self.process = subprocess.Popen(
                words,
                cwd=ROOT,
                env={name: self._replace(value) for name, value in environment.items()},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait(self, seconds: float = SECONDS) -> int:
        """Waits for process 1 and returns its exit code."""
        assert self.process is not None
        return self.process.wait(seconds)

    def counts_as_failure(self, code: int, *, evicted: bool) -> bool:
        """Returns whether the Job's podFailurePolicy counts this exit code of the pod as a failure."""
        for rule in self.job["spec"]["podFailurePolicy"]["rules"]:
            conditions = [one["type"] for one in rule.get("onPodConditions", [])]
            if evicted and "DisruptionTarget" in conditions or code in rule.get("onExitCodes", {}).get("values", []):
                return bool(rule["action"] != "Ignore")
        return code != 0

    def _replace(self, text: str) -> str:
        for old, new in {"/checkpoints": str(self.folder), **self.replaced}.items():
            text = text if text.startswith(str(self.folder)) else text.replace(old, new)
        return text


def container_variables(container: Mapping[str, Any], *, index: int) -> dict[str, str]:
    """Returns the environment variables of a container in the pod with this completion index."""
    values: dict[str, str] = {}
    for variable in container["env"]:
        # A variable without a value reads the index from the pod's annotation. A value may refer to earlier variables.
        value = variable.get("value", str(index))
        values[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], value)
    return values


def make_pipe(path: Path) -> None:
    """Creates the pipe of MOMENT if it does not exist."""
    if not path.exists():
        os.mkfifo(path)


def read_moment(pipe: Path, process: subprocess.Popen[bytes] | None) -> str:
    """Returns the text that a rank writes to the pipe. Raises AssertionError if the process ends first."""
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return wait_until(lambda: _read_some(descriptor), process=process)
    finally:
        os.close(descriptor)


def wait_until(condition: Callable[[], Any], *, process: subprocess.Popen[bytes] | None = None) -> Any:
    """Polls until the condition returns a true value, and returns that value."""
    deadline = time.monotonic() + SECONDS
    while not (value := condition()):
        is_running = process is None or process.poll() is None
        assert time.monotonic() < deadline and is_running, f"no event in {SECONDS:g} s, or the process ended first"
        time.sleep(0.02)
    return value


def write_program(path: Path, text: str) -> None:
    """Writes an executable file."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def _read_some(descriptor: int) -> str:
    try:
        return os.read(descriptor, 100).decode()
    except BlockingIOError:
        return ""
