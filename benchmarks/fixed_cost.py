"""Compares CPU step times of this framework, of plain PyTorch and of PyTorch with its fastest settings.

    python benchmarks/fixed_cost.py [--rows tiny usual ...] [--rounds 30] [--json FILE]

Two processes with one thread each train the model of train_step.py in the sizes of the row. *plain* is torch's DDP,
fused AdamW and clipping around a loop over experts. *grouped* is the same with grouped GEMMs and a glibc
heap that keeps freed memory, like ours (unlike megatron-core's). All sides of a row take turns. The rows are:

- tiny: 1 layer, hidden 64, sequence 64, where a step is mostly fixed cost
- usual: 4 layers, hidden 256, sequence 256; *limit*: only its GEMMs and copies, at the machine's best rate
- experts 32: the usual sizes with 32 experts
- EP 2: the usual sizes, each rank with half of the experts; grouped exchanges rows by hand
- bf16: ours in bf16, with the distributed optimizer and without
- fsdp2: torch's fully_shard around the plain model and ours with --use-torch-fsdp2
- stash 1.25, stash 2: ours with 12 layers and experts over both ranks: dropless, with static buffers of that factor,
and also with a stash, in pages and with copies; stash 4 layers: stash 2 with 4 layers
- stash copy: stash_copy.py's table; dry run: seconds and peak memory of a plan of 16,384 ranks

--megatron-core DIR adds megatron-core to the rows tiny and usual, from a folder that
`pip install --no-deps --target DIR megatron-core` has filled.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.ddp import build_fsdp2  # noqa: E402
from benchmarks.megatron_core import build_megatron_core  # noqa: E402
from benchmarks.plain_model import PlainConfig, PlainModel  # noqa: E402
from benchmarks.sides import Build, print_table, run_rounds, start_side, write_record  # noqa: E402
from benchmarks.train_step import MICRO_BATCH, RANKS, SEQUENCE, build_ours, build_plain  # noqa: E402

SHARDED, STASH = "--use-distributed-optimizer", "--moe-paged-stash"
FSDP2 = ("--use-torch-fsdp2", "--no-gradient-accumulation-fusion")
COMMANDS = {
    "stash copy": ("benchmarks/stash_copy.py",),
    # The plan in the README.
    "dry run": (
        *("pretrain_gpt.py", "--model", "deepseek-v3", "--dry-run", "--world-size", "16384"),
        *("--pipeline-model-parallel-size", "16", "--expert-model-parallel-size", "64"),
        *("--decoder-first-pipeline-num-layers", "3", "--decoder-last-pipeline-num-layers", "2"),
        *("--moe-token-dispatcher-type", "alltoall", "--recompute-granularity", "selective"),
        *("--recompute-modules", "moe", "layernorm", "mla_up_proj", "--bf16", SHARDED),
        *("--seq-length", "4096", "--micro-batch-size", "1", "--global-batch-size", "16384", "--train-iters", "10"),
        *("--lr", "1e-4", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "129280"),
    ),
}
TINY = PlainConfig(num_layers=1, hidden_size=64, ffn_hidden_size=128)
TINY_SEQUENCE = 64


@dataclass(frozen=True)
class Row:
    """The sides of one row by name.

    base: side that ratios are relative to. steps: steps per round, chosen so that most rounds take less than a second.
    """

    base: str
    sides: dict[str, Build]
    steps: int = 1


def main() -> None:
    """Measures the rows and prints a table for each."""
    options = parse_options()
    os.environ["OMP_NUM_THREADS"] = "1"
    figures, measured = {}, {}
    for name in options.rows:
        if name in COMMANDS:
            figures[name] = {name: run_command(*COMMANDS[name], shows_output=name == "stash copy")}
            continue
        row = rows(options.megatron_core)[name]
        sides = [start_side(side, build, ranks=RANKS) for side, build in row.sides.items()]
        rounds = run_rounds(sides, rounds=options.rounds, steps=row.steps)
        print(f"\n{name}, x of {row.base}")
        figures[name] = print_table(rounds, base=row.base)
        measured.update({f"{name}, {side}": some for side, some in rounds.items()})
    if options.json is not None:
        write_record(options.json, figures, measured=measured)


def rows(megatron_core: Path | None = None) -> dict[str, Row]:
    """Returns the rows by name. megatron_core: folder of the megatron-core package, which adds sides."""
    tiny = [
        *("--num-layers", "1", "--hidden-size", "64", "--moe-ffn-hidden-size", "128"),
        *("--seq-length", str(TINY_SEQUENCE), "--max-position-embeddings", str(TINY_SEQUENCE)),
    ]
    shared = ["--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"]
    return {
        "tiny": Row(
            "grouped",
            {
                **plain_sides(TINY, sequence=TINY_SEQUENCE),
                **megatron_core_sides(megatron_core, TINY, sequence=TINY_SEQUENCE),
                **our_sides(*tiny),
            },
            steps=10,
        ),
        "usual": Row(
            "plain",
            {
                **plain_sides(PlainConfig()),
                **megatron_core_sides(megatron_core, PlainConfig(), sequence=SEQUENCE),
                **our_sides(),
                "limit": partial(build_limit, PlainConfig(), tokens=MICRO_BATCH * SEQUENCE),
            },
        ),
        "experts 32": Row("grouped", {**plain_sides(PlainConfig(num_experts=32)), **our_sides("--num-experts", "32")}),
        "EP 2": Row(
            "grouped",
            {
                "grouped": partial(build_plain, PlainConfig(grouped=True, expert_parallel=True), keeps_heap=True),
                **our_sides(*shared),
            },
        ),
        "bf16": Row("ours", our_sides("--bf16")),
        "fsdp2": Row("plain", {"plain": build_plain, "torch FSDP2": build_fsdp2, "ours": partial(build_ours, *FSDP2)}),
        "stash 1.25": stash_row(*shared, factor="1.25"),
        "stash 2": stash_row(*shared, factor="2"),
        "stash 4 layers": stash_row(*shared, factor="2", num_layers=4),
    }


def stash_row(*flags: str, factor: str, num_layers: int = 12) -> Row:
    """Returns a row with balanced routing: dropless, static buffers, and static buffers with a stash of both kinds."""
    flags = (*flags, "--num-layers", str(num_layers), "--moe-router-force-load-balancing")
    static = partial(build_ours, *flags, "--moe-expert-rank-capacity-factor", factor)
    stashed = {kind: partial(static, STASH, "--moe-paged-stash-compute", kind) for kind in ("pages", "copies")}
    return Row("static", {"dropless": partial(build_ours, *flags), "static": static, **stashed})


def plain_sides(config: PlainConfig, *, sequence: int = SEQUENCE) -> dict[str, Build]:
    """Returns the sides plain and grouped in the sizes of `config`."""
    return {
        "plain": partial(build_plain, config, sequence=sequence),
        "grouped": partial(build_plain, replace(config, grouped=True), sequence=sequence, keeps_heap=True),
    }


def megatron_core_sides(folder: Path | None, config: PlainConfig, *, sequence: int) -> dict[str, Build]:
    """Returns megatron-core with all-reduce and with its distributed optimizer; none if `folder` is None."""
    if folder is None:
        return {}
    build = partial(build_megatron_core, str(folder), config, sequence=sequence, micro_batch=MICRO_BATCH)
    return {
        "megatron-core": partial(build, sharded=False),
        "megatron-core, ZeRO-1": partial(build, sharded=True),
    }


def our_sides(*flags: str) -> dict[str, Build]:
    """Returns this framework with all-reduce and with the distributed optimizer."""
    return {"ours": partial(build_ours, *flags), "ours, ZeRO-1": partial(build_ours, *flags, SHARDED)}


def build_limit(config: PlainConfig, *, tokens: int) -> Callable[[], None]:
    """Builds a lower bound: a step's floating-point operations as square GEMMs, its minimum memory traffic as copies.

    Both write to allocated memory. In units of the weights' size, fused Adam reads four and writes three, and
    communication reads and writes the gradients once. A copy both reads and writes, so the traffic equals nine copies
    of half the size.
    """
    dist.init_process_group("gloo")
    side = 1024
    num_products = round(operations_of_step(config, tokens=tokens, sequence=SEQUENCE) / (2 * side**3))
    left, right, product = (torch.ones(side, side) for _ in range(3))
    num_weights = sum(weight.numel() for weight in PlainModel(config).parameters())
    source, target = torch.ones(2, num_weights // 2), torch.ones(2, num_weights // 2)

    def step() -> None:
        for _ in range(num_products):
            torch.mm(left, right, out=product)
        for number in range(9):
            target[number % 2].copy_(source[number % 2])

    return step


def operations_of_step(config: PlainConfig, *, tokens: int, sequence: int) -> int:
    """Counts the floating-point operations of a step's GEMMs, forward and backward, with causal attention as half.

    Backward requires twice the operations of forward, and nothing is recomputed.
    """
    hidden = config.hidden_size
    experts = config.topk * 3 * hidden * config.ffn_hidden_size
    weights = config.num_layers * (hidden * (4 * hidden + config.num_experts) + experts) + config.vocab_size * hidden
    return 3 * 2 * tokens * (weights + config.num_layers * sequence * hidden)


def run_command(script: str, *flags: str, shows_output: bool) -> dict[str, float]:
    """Runs a script. Prints and returns its wall time in seconds and peak memory."""
    print(f"\n{script}", flush=True)
    started_at = time.perf_counter()
    output = None if shows_output else subprocess.DEVNULL
    child = subprocess.Popen([sys.executable, ROOT / script, *flags], stdout=output)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    seconds, peak = time.perf_counter() - started_at, usage.ru_maxrss * 1024
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, script)
    print(f"{script}: {seconds:.1f} s, peak {peak / 2**20:.0f} MiB")
    return {"seconds": seconds, "peak_bytes": peak}


def parse_options() -> argparse.Namespace:
    """Parses the command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*rows(), *COMMANDS]
    parser.add_argument("--rows", nargs="+", default=names, choices=names, help="rows to measure (default: all)")
    parser.add_argument("--rounds", type=int, default=30, help="counted rounds per side (default: 30)")
    parser.add_argument("--megatron-core", type=Path, metavar="DIR", help="folder of megatron-core's package")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}: must be at least 1")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json is {options.json}: {options.json.parent} is not a folder")
    if options.megatron_core is not None and not (options.megatron_core / "megatron" / "core").is_dir():
        parser.error(f"--megatron-core is {options.megatron_core}: it does not contain megatron/core")
    return options


if __name__ == "__main__":
    main()
