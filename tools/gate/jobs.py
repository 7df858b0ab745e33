"""Runs cases with the code of several trees at the same time, in one worker process per tree and one folder per case.

cases.py defines the cases, and worker.py is the program of a worker process.
"""

import io
import json
import os
import random
import re
import shlex
import signal
import struct
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from megatron.tools.gate.cases import CHECKPOINTS, PRETRAIN, RESULT, Case
from megatron.tools.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
GATE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Job:
    """A case to run in one tree: its folder and command lines. needs: file that must exist before the job starts."""

    case: Case
    folder: Path
    runs: list[list[str]]
    needs: Path | None = None

    def entry(self, tree: Path) -> dict[str, Any]:
        """Returns the job as a plan entry, the format that worker.py reads."""
        program = self.case.program
        return {
            "folder": str(self.folder),
            "program": str(tree / program if program == PRETRAIN else GATE / "scripts" / program),
            "ranks": self.case.ranks,
            "runs": self.runs,
            "ports": [free_port() for _ in self.runs],
            "needs": None if self.needs is None else str(self.needs),
        }


@dataclass(frozen=True)
class Tree:
    """A version of the project and the cases to run with it. name: also the name of the folder of its runs."""

    name: str
    folder: Path
    cases: Sequence[Case]


def main_folder(case: Case, tree: str, *, folder: Path) -> Path:
    """Returns the folder of a case's main run with the tree `tree`.

    Its name is the case's name with "_" for characters other than letters and digits.
    """
    return folder / tree / re.sub(r"[^A-Za-z0-9]+", "_", case.name)


def resumed_folder(case: Case, tree: str, *, folder: Path) -> Path:
    """Returns the folder of the run that resumes from the base's checkpoint."""
    main = main_folder(case, tree, folder=folder)
    return main.with_name(f"{main.name}.resumed")


def export(commit: str, folder: Path, *, root: Path = ROOT) -> Path:
    """Writes the files of a commit of `root` to `folder` and returns `folder`.

    Raises ValueError if there is no such commit.
    """
    packed = subprocess.run(["git", "archive", commit], cwd=root, capture_output=True, check=False)
    if packed.returncode:
        raise ValueError(f"cannot read commit {commit} of {root}: {packed.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def write_corpora(folder: Path) -> None:
    """Writes two small .bin/.idx pairs of random documents, identical in every call.

    Does not use this project's writer, because a fault in the head's writer would affect both trees.
    """
    folder.mkdir()
    for seed, name in enumerate(("a", "b")):
        draw = random.Random(seed)
        documents = [[*(draw.randrange(126) for _ in range(draw.randrange(5, 90))), 126] for _ in range(200)]
        lengths = np.array([len(tokens) for tokens in documents], dtype=np.int32)
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        np.array(sum(documents, []), dtype=np.uint16).tofile(folder / f"{name}.bin")
        # Megatron's index: magic, version 1, 8 for uint16, numbers of sequences and of document boundaries.
        head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(documents), len(documents) + 1)
        parts = lengths, ends[:-1] * 2, np.arange(len(documents) + 1, dtype=np.int64)
        (folder / f"{name}.idx").write_bytes(head + b"".join(part.tobytes() for part in parts))


def run_trees(trees: Sequence[Tree], *, folder: Path, base: str) -> None:
    """Runs the cases of all trees, with one worker process per tree at the same time.

    folder: contains the corpora in `data` and receives the runs. base: name of the tree whose checkpoints all trees
    resume; it is one of `trees` or has already run. Raises RuntimeError if a worker exits before it has completed its
    plan.
    """
    at_once = max(1, (os.cpu_count() or 1) // len(trees))
    workers: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for tree in trees:
            plan = folder / f"{tree.name}.plan.json"
            content = {"at_once": at_once, "jobs": [job.entry(tree.folder) for job in jobs_of(tree, folder, base=base)]}
            plan.write_text(json.dumps(content), encoding="utf-8")
            workers[tree.name] = _start_worker(tree.folder, plan)
        while any(worker.poll() is None for worker in workers.values()):
            _raise_if_one_failed(workers, folder)
            time.sleep(0.1)
        _raise_if_one_failed(workers, folder)
    finally:
        for worker in workers.values():
            _kill(worker)


def jobs_of(tree: Tree, folder: Path, *, base: str) -> Iterator[Job]:
    """Yields the jobs of a tree. Resuming jobs come last, because they require the base's checkpoints."""
    resumed = []
    for case in tree.cases:
        place = main_folder(case, tree.name, folder=folder)
        yield Job(case, place, [_words(line, folder, place=place) for line in case.command_lines()])
        if case.resume_at is not None and not case.is_new:
            source = main_folder(case, base, folder=folder)
            place = resumed_folder(case, tree.name, folder=folder)
            line = case.resumed_command_line(source / CHECKPOINTS)
            resumed.append(Job(case, place, [_words(line, folder, place=place)], needs=source / RESULT))
    yield from resumed


def _words(line: str, folder: Path, *, place: Path) -> list[str]:
    return [word.replace("{data}", str(folder / "data")).replace("{folder}", str(place)) for word in shlex.split(line)]


def _start_worker(tree: Path, plan: Path) -> "subprocess.Popen[bytes]":
    # Uses its own session, so that one signal ends the worker and its ranks. -P keeps worker.py's folder off the path.
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(GATE / "worker.py"), str(tree), str(plan)]
    with plan.with_suffix(".txt").open("wb") as output:
        return subprocess.Popen(
            command, cwd=plan.parent, env=environment, stdout=output, stderr=output, start_new_session=True
        )


def _raise_if_one_failed(workers: "dict[str, subprocess.Popen[bytes]]", folder: Path) -> None:
    for name, worker in workers.items():
        if worker.poll():
            written = (folder / f"{name}.plan.txt").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"the worker of {name} ended with status {worker.returncode}:\n{written[-3000:]}")


def _kill(worker: "subprocess.Popen[bytes]") -> None:
    """Kills a worker and its ranks, which could outlive it."""
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


@contextmanager
def ends_on_signals() -> Iterator[None]:
    """Converts SIGTERM and SIGHUP to SystemExit in its body, so that workers and temporary folders are cleaned up."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
