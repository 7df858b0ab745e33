"""Shows that a change leaves losses alone: `python tools/same_losses.py BASE_COMMIT` trains both versions and compares.

Small runs of many kinds, each in a copy of the base commit and in this working tree (or in a copy of --head), with
the same Python. Every number that both log must be the same bits. Exit status: 0 if so, 1 if not, 2 if a commit
cannot be read.
"""

import argparse
import io
import json
import os
import random
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # noqa: E402
from tools.compare_runs import compare  # noqa: E402
from tools.run_log import read_run  # noqa: E402

RUN = """
--seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 6
--lr 0.01 --min-lr 0.001 --lr-decay-style cosine --lr-warmup-iters 2 --eval-iters 1 --eval-interval 3 --log-interval 1
--num-workers 0 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --tokenizer-type NullTokenizer --vocab-size 127
"""
MOCK = "--mock-data"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
LLAMA = f"""
{NO_DROPOUT} --group-query-attention --num-query-groups 2 --normalization RMSNorm --position-embedding-type rope
--swiglu --disable-bias-linear --untie-embeddings-and-output-weights
"""
SEQUENTIAL = f"""
{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001
"""
GROUPED = f"{SEQUENTIAL} --moe-grouped-gemm"
SECOND_LAYERS = "--moe-layer-freq 2 --deterministic-mode --global-batch-size 12"
EACH_LAYER = "--recompute-method uniform --recompute-num-layers 1"
PARTS_OF_SEQUENCES = "--context-parallel-size 2 --cp-comm-type p2p all_gather"
PARTS = "--recompute-modules core_attn layernorm moe_act"
BLEND = "--data-path 0.3 {data}/a 0.7 {data}/b --split 80,10,10 --data-cache-path {folder}/cache"


@dataclass(frozen=True)
class Case:
    """A run, or several one after the other in one folder; {data} and {folder} stand for paths."""

    name: str
    runs: tuple[str, ...]
    processes: int = 1


CASES = (
    Case("dense, learned positions, dropout", (MOCK,)),
    Case("dense, learned positions, dropout", (MOCK,), processes=2),
    Case("llama-like", (f"{MOCK} {LLAMA}",)),
    Case("llama-like, bf16", (f"{MOCK} {LLAMA} --bf16",), processes=2),
    Case("llama-like, parts of sequences, bf16", (f"{MOCK} {LLAMA} --bf16 {PARTS_OF_SEQUENCES}",), processes=2),
    Case("llama-like, fp16", (f"{MOCK} {LLAMA} --fp16 --initial-loss-scale 65536 --loss-scale-window 2",)),
    Case("llama-like, unfused attention", (f"{MOCK} {LLAMA} --attention-backend unfused",)),
    Case("experts, grouped", (f"{MOCK} {GROUPED}",), processes=2),
    Case("experts, grouped, bf16", (f"{MOCK} {GROUPED} --bf16",)),
    Case("experts, sequential", (f"{MOCK} {SEQUENTIAL}",)),
    Case("experts in every second layer, deterministic", (f"{MOCK} {GROUPED} {SECOND_LAYERS}",), processes=3),
    Case("SGD, constant rate, no clipping", (f"{MOCK} --optimizer sgd --lr-decay-style constant --clip-grad 0",)),
    Case("recompute of layers, dropout", (f"{MOCK} --recompute-granularity full {EACH_LAYER}",)),
    Case("recompute of layers, experts", (f"{MOCK} {GROUPED} --recompute-granularity full {EACH_LAYER}",)),
    Case("recompute of parts, experts", (f"{MOCK} {GROUPED} --recompute-granularity selective {PARTS}",)),
    Case("one corpus", ("--data-path {data}/a --split 80,10,10 --data-cache-path {folder}/cache",)),
    Case("blend of two corpora", (BLEND,), processes=2),
    Case("resume", (f"{BLEND} --save ckpt --exit-interval 3", f"{BLEND} --save ckpt --load ckpt")),
    Case(
        "resume, experts, bf16",
        (f"{MOCK} {GROUPED} --bf16 --save ckpt --exit-interval 2", f"{MOCK} {GROUPED} --bf16 --save ckpt --load ckpt"),
        processes=2,
    ),
)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    options = parse_options(argv)
    cases = [case for case in CASES if options.only in case.name]
    with tempfile.TemporaryDirectory(prefix="same_losses_") as place:
        folder = Path(place)
        try:
            base = export(options.base, folder / "base")
            head = export(options.head, folder / "head") if options.head else ROOT
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        write_corpora(folder / "data")
        # One tree after the other: both at once would share the cores.
        for name, tree in (("base", base), ("head", head)):
            run_tree(tree, cases=cases, folder=folder / "runs" / name, data=folder / "data")
        verdicts = [
            verdict(folder / "runs" / "base" / str(index), folder / "runs" / "head" / str(index))
            for index in range(len(cases))
        ]
    print_table(cases, verdicts)
    return int(not all(verdict.startswith("same") for verdict in verdicts))


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """The command line of this tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", metavar="BASE_COMMIT", help="version whose losses count as right")
    parser.add_argument("--head", metavar="COMMIT", help="version to check; default: the files of this working tree")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains this")
    options = parser.parse_args(argv)
    if not any(options.only in case.name for case in CASES):
        parser.error(f"--only is {options.only!r}: no case has that in its name")
    return options


def export(commit: str, folder: Path) -> Path:
    """The files of a commit, written to `folder`."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        raise ValueError(f"{commit} is no commit of {ROOT}: {packed.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def write_corpora(folder: Path) -> None:
    """Two small .bin/.idx pairs of random documents, the same in every call."""
    folder.mkdir()
    for seed, name in enumerate(("a", "b")):
        draw = random.Random(seed)
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=np.uint16)
        for _ in range(200):
            tokens = [draw.randrange(126) for _ in range(draw.randrange(5, 90))]
            builder.add_document(np.array([*tokens, 126]), [len(tokens) + 1])
        builder.finalize(str(folder / f"{name}.idx"))


def run_tree(tree: Path, *, cases: Sequence[Case], folder: Path, data: Path) -> None:
    """Trains every case with the code of `tree`; case i logs to `folder`/i."""
    folder.mkdir(parents=True)
    plan = folder / "plan.json"
    plan.write_text(json.dumps(list(_plan(cases, folder, data=data))), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    worker = ROOT / "tools" / "same_losses_worker.py"
    subprocess.run([sys.executable, str(worker), str(tree), str(plan)], cwd=folder, env=environment, check=True)


def _plan(cases: Sequence[Case], folder: Path, *, data: Path) -> Iterator[dict[str, object]]:
    for index, case in enumerate(cases):
        place = folder / str(index)
        words = [f"{RUN} {run.format(data=data, folder=place)} --tensorboard-dir {place}" for run in case.runs]
        yield {"folder": str(place), "processes": case.processes, "runs": [shlex.split(line) for line in words]}


def verdict(base: Path, head: Path) -> str:
    """What to say of a case, given its two folders; starts with "same" where nothing differs."""
    for name, folder in (("base", base), ("head", head)):
        codes = json.loads((folder / "exit_codes.json").read_text(encoding="utf-8"))
        if any(code for run in codes for code in run):
            return f"failed in {name}: {_last_line(folder / 'output.txt')}"
    before, after = read_run(base), read_run(head)
    if not np.array_equal(before.steps, after.steps):
        return f"other steps: {len(before.steps)} before, {len(after.steps)} now"
    lost = set(before.series) - set(after.series)
    if lost:
        return f"no longer logged: {', '.join(sorted(lost))}"
    parted = [(first, one.name) for one in compare(before, after) if (first := one.first) is not None]
    if parted:
        step = min(first for first, _ in parted)
        return f"differs from iteration {step}: {', '.join(name for first, name in parted if first == step)}"
    return f"same, {len(before.steps)} steps"


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "no output")


def print_table(cases: Sequence[Case], verdicts: Sequence[str]) -> None:
    """A line for each case."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("case", "processes", "result"):
        table.add_column(title, overflow="fold")
    for case, text in zip(cases, verdicts):
        table.add_row(case.name, str(case.processes), text)
    Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
