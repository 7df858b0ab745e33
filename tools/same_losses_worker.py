"""The half of same_losses.py that runs inside one tree: trains each case of a plan on forked ranks.

Started by that tool with PYTHONPATH naming the tree; imports nothing of the project but what that tree has.
"""

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import megatron
import pretrain_gpt

TIMEOUT = 300.0  # seconds of one run


def main(tree: Path, plan: Path) -> None:
    """Runs `plan`: a list of {"folder", "processes", "runs": [argv, ...]}; writes each case's exit codes beside it."""
    for module in (megatron, pretrain_gpt):
        assert Path(str(module.__file__)).is_relative_to(tree), f"{module.__file__} is not in {tree}"
    print(f"{tree}: {megatron.__file__}", flush=True)
    for case in json.loads(plan.read_text(encoding="utf-8")):
        folder = Path(case["folder"])
        folder.mkdir(parents=True)
        codes = [train(argv, processes=case["processes"], folder=folder) for argv in case["runs"]]
        (folder / "exit_codes.json").write_text(json.dumps(codes), encoding="utf-8")


def train(argv: list[str], *, processes: int, folder: Path) -> list[int]:
    """Exit codes of the ranks; what they print goes to `folder`/output.txt."""
    # Forked, so that torch is imported once for all cases.
    context = multiprocessing.get_context("fork")
    port = free_port()
    words = {"argv": argv, "folder": folder, "world_size": processes, "port": port}
    ranks = [
        context.Process(target=run_rank, args=(pretrain_gpt.main, rank), kwargs=words) for rank in range(processes)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT)
        if process.is_alive():
            process.kill()
            process.join()
    return [int(process.exitcode or 0) for process in ranks]


def run_rank(
    program: Callable[[list[str]], None], rank: int, *, argv: list[str], folder: Path, world_size: int, port: int
) -> None:
    """One rank, as torchrun would start it."""
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
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
    program(argv)


def free_port() -> int:
    """A port nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
