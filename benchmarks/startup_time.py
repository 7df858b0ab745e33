"""Compares the start of a program between two versions: --help, a dry run, and a run of one step.

    python benchmarks/startup_time.py BASE_COMMIT [--head COMMIT] [--rounds 9]

The head is this working tree or the commit of --head. Every round runs each program once with each version, in an order
that alternates between rounds. Prints medians of CPU and wall seconds and of the ratio head / base per round. CPU time
depends less on other load on the machine.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from megatron.tools.gate.jobs import export  # noqa: E402

_MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --disable-bias-linear --micro-batch-size 2 "
    "--train-iters 1 --lr 0.01 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 "
    "--num-workers 0"
)
PROGRAMS = {"help": "--help", "dry run": f"{_MODEL} --dry-run --world-size 2", "run of a step": _MODEL}


@dataclass(frozen=True)
class Start:
    """Seconds of a process from its start to its end."""

    cpu: float
    wall: float


def main() -> None:
    """Measures both versions and prints the table."""
    options = parse_options()
    with tempfile.TemporaryDirectory(prefix="startup_time_") as place:
        base = export(options.base, Path(place, "base"))
        head = export(options.head, Path(place, "head")) if options.head else ROOT
        print(f"{'program':15}{'':6}{'base s':>9}{'head s':>9}{'head / base':>13}{'lowest':>9}{'highest':>9}")
        for name, words in PROGRAMS.items():
            print_rows(name, measure(base, head, words.split(), rounds=options.rounds))


def parse_options() -> argparse.Namespace:
    """Parses the command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE_COMMIT", help="reference version")
    parser.add_argument("--head", metavar="COMMIT", help="version to compare; default: the files of this working tree")
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds (default: 9)")
    return parser.parse_args()


def measure(base: Path, head: Path, words: list[str], *, rounds: int) -> list[tuple[Start, Start]]:
    """Returns (base, head) of each round, after an uncounted round that compiles the files of the trees."""
    found = []
    for number in range(rounds + 1):
        order = (base, head) if number % 2 else (head, base)
        starts = {tree: timed(tree, words) for tree in order}
        found.append((starts[base], starts[head]))
    return found[1:]


def timed(tree: Path, words: list[str]) -> Start:
    """Runs pretrain_gpt.py of a tree. Raises RuntimeError with its output if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(tree / "pretrain_gpt.py"), *words]
    with tempfile.TemporaryFile() as output:
        started_at = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - started_at
        # wait4 has reaped the process, so that Popen cannot.
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise RuntimeError(
                f"{' '.join(command)} ended with {process.returncode}:\n{output.read().decode()[-2000:]}"
            )
    return Start(cpu=usage.ru_utime + usage.ru_stime, wall=wall)


def print_rows(name: str, rounds: list[tuple[Start, Start]]) -> None:
    """Prints a program's CPU and wall time."""
    for kind in ("cpu", "wall"):
        pairs = [(vars(base)[kind], vars(head)[kind]) for base, head in rounds]
        ratios = [head / base for base, head in pairs]
        medians = (statistics.median(values) for values in zip(*pairs, strict=True))
        figures = "".join(f"{median:9.2f}" for median in medians)
        print(
            f"{name if kind == 'cpu' else '':15}{kind:6}{figures}"
            f"{statistics.median(ratios):13.3f}{min(ratios):9.3f}{max(ratios):9.3f}"
        )


if __name__ == "__main__":
    main()
