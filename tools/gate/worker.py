"""Runs a plan of small training runs with the code of one tree. Ranks are forked from this preloaded process.

jobs.py starts it with the tree in PYTHONPATH. It imports the project's code only from that tree.
"""

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch

import megatron
import pretrain_gpt

TIMEOUT = 180.0  # seconds of one run
GRACE = 10.0  # seconds that ranks may continue after the first one failed
RESULT = "result.json"  # as in cases.py, which other trees may not contain
# Slow imports, done once before ranks are forked. Some trees do not contain all of the last modules.
PRELOAD = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "megatron.core.graphs.tape",
    "megatron.core.graph_tape",  # its name in older versions
    "megatron.core.optimizer",
    "megatron.core.distributed",
)

Job = dict[str, Any]  # see Job.entry of jobs.py


def main(tree: Path, plan: Path) -> None:
    """Runs the jobs of `plan`. Each job writes result.json to its folder when it ends."""
    for module in (megatron, pretrain_gpt):
        assert Path(str(module.__file__)).is_relative_to(tree), f"{module.__file__} is not in {tree}"
    for name in PRELOAD:
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    with suppress(ImportError, AttributeError):
        importlib.import_module("megatron.training.command_line.flags").flag_table()  # cached; every run needs it
    torch.set_num_threads(1)
    # Garbage collection in a rank would copy every page that the rank shares with this process.
    gc.collect()
    gc.freeze()
    content = json.loads(plan.read_text(encoding="utf-8"))
    run_jobs(content["jobs"], at_once=content["at_once"])


def run_jobs(jobs: Sequence[Job], *, at_once: int) -> None:
    """Runs all jobs, at most `at_once` in parallel. A job that requires another job's result waits for its file.

    Raises RuntimeError if a job's process ends without writing a result, because other jobs could wait for it forever.
    """
    context = multiprocessing.get_context("fork")
    waiting, running = list(jobs), dict[int, tuple[Job, ForkProcess]]()
    while waiting or running:
        ready = [job for job in waiting if job["needs"] is None or Path(job["needs"]).exists()]
        for job in ready[: at_once - len(running)]:
            waiting.remove(job)
            process = context.Process(target=run_job, args=(job,))
            process.start()
            running[process.sentinel] = job, process
        if not running:
            time.sleep(0.05)
            continue
        for sentinel in wait(list(running), timeout=0.2 if waiting else None):
            assert isinstance(sentinel, int)
            job, process = running.pop(sentinel)
            process.join()
            if not (Path(job["folder"]) / RESULT).exists():
                raise RuntimeError(f"the job in {job['folder']} ended without a result, exit code {process.exitcode}")


def run_job(job: Job) -> None:
    """Runs a job's command lines in its folder until one fails, then writes the result."""
    folder = Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    codes: list[list[int]] = []
    started_at = time.monotonic()
    for argv, port in zip(job["runs"], job["ports"], strict=True):
        codes.append(run_ranks(argv, program=job["program"], ranks=job["ranks"], folder=folder, port=port))
        if any(codes[-1]):
            break
    result = {"exit_codes": codes, "seconds": time.monotonic() - started_at}
    unfinished = folder / "result.unfinished"
    unfinished.write_text(json.dumps(result), encoding="utf-8")
    unfinished.rename(folder / RESULT)  # atomic: a job that waits for the file sees it complete


def run_ranks(argv: list[str], *, program: str, ranks: int, folder: Path, port: int) -> list[int]:
    """Runs all ranks of one command line and returns their exit codes. Rank i prints to `folder`/rank<i>.txt."""
    context = multiprocessing.get_context("fork")
    words = {"argv": argv, "program": program, "folder": folder, "world_size": ranks, "port": port}
    processes = [context.Process(target=run_rank, args=(rank,), kwargs=words) for rank in range(ranks)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + TIMEOUT
    while alive := [process.sentinel for process in processes if process.is_alive()]:
        if time.monotonic() > deadline:
            break
        wait(alive, timeout=1.0)
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE)
    for rank, process in enumerate(processes):
        if process.is_alive():
            process.kill()
            with (folder / f"rank{rank}.txt").open("a", encoding="utf-8") as output:
                output.write(f"\nTimeoutError: killed {TIMEOUT:g} s after its start, or {GRACE:g} s after a failure\n")
        process.join()
    return [int(process.exitcode or 0) for process in processes]


def run_rank(rank: int, *, argv: list[str], program: str, folder: Path, world_size: int, port: int) -> None:
    """Runs the program as one rank, with torchrun's environment variables."""
    output = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.chdir(folder)
    sys.argv = [program, *argv]
    # multiprocessing writes the traceback of an error to that file and sets the exit code.
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
