"""Measures how much GEMMs slow down while a stash runs, for several limits on the stash's number of programs.

    python benchmarks/gpu/gemm_beside_stash.py [--rounds 7] [--json FILE] [--plot FILE.svg]
    python benchmarks/gpu/gemm_beside_stash.py --small     # tiny, also on the CPU: tests the program

Runs a sequence of bf16 GEMMs on the main stream, and a longer sequence of stash and restore of one group on a side
stream.

gemm x    time of the GEMMs during the stash / time of the GEMMs alone
rate x    rate of stash and restore during the GEMMs / rate of copy_ alone
cost x    additional time of the GEMMs per stash and restore / time of two copy_ of the same bytes alone.
          0: completely hidden, 1: as if the copies ran alone on the GPU

Results are medians over rounds, in which the GEMMs run alone and during the stash.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.gpu.chart import Panel, drawing  # noqa: E402
from benchmarks.gpu.record import Target, benchmark_parser, hold, report_targets, require_device, write_record  # noqa: E402
from benchmarks.stash_copy import MIB, Bench, build  # noqa: E402
from megatron.core.device import (  # noqa: E402
    TimeMark,
    mark_time,
    prepare_device,
    seconds_between,
    synchronize,
)
from megatron.core.device.streams import SideStream  # noqa: E402

PROGRAMS = (2, 4, 8, 16, 32, 64, 132, 0)
TARGET = 1.1
LAUNCH_SECONDS = 2e-4  # upper bound of the host's time to launch one kernel
MOST_PAIRS = 300  # stash and restore pairs, with events, that a stream's queue accepts before the host has to wait
WARM_TURNS = 2


@dataclass(frozen=True)
class Sizes:
    """Sizes of a measurement.

    gemm: the three sizes of a GEMM. products: number of consecutive GEMMs. width: bytes of a row of x. group_bytes:
    bytes of the stashed group.
    """

    gemm: int = 8192
    products: int = 16
    width: int = 4096
    group_bytes: int = 256 * MIB


SMALL = Sizes(gemm=32, products=3, width=64, group_bytes=16384)


@dataclass(frozen=True)
class Beside:
    """Seconds of the GEMMs during copies, and the end time of each stash and restore, relative to the GEMMs' start."""

    seconds: float
    ends: list[float]

    @property
    def is_covered(self) -> bool:
        """Whether copies were running until the GEMMs ended."""
        return max(self.ends) > self.seconds

    @property
    def pairs(self) -> float:
        """Number of stash and restore pairs completed meanwhile, including the estimated part of an unfinished pair."""
        ended = [0.0, *(end for end in self.ends if end <= self.seconds)]
        done = len(ended) - 1
        if not self.is_covered:
            return float(done)
        return done + (self.seconds - ended[-1]) / (self.ends[done] - ended[-1])


class Rivals:
    """Matrix multiplications on the main stream, and a group's copies on a side stream."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device, self.side = sizes, device, SideStream(device)
        self.bench: Bench = build(
            sizes.width, torch.bfloat16, num_bytes=sizes.group_bytes, order="step", device=str(device), tier="device"
        )
        for memory in self.bench.sources:
            memory.random_()
        self.bench.pool.plan(self.bench.group, self.bench.num_rows)
        shape = sizes.gemm, sizes.gemm
        self.matrices = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)]
        self.out: Tensor = torch.empty(shape, device=device, dtype=torch.bfloat16)

    def products(self) -> None:
        """Launches the GEMMs on the current stream."""
        for _ in range(self.sizes.products):
            torch.mm(*self.matrices, out=self.out)

    def pair(self) -> None:
        """Launches a stash and a restore on the current stream."""
        self.bench.stash(0)
        self.bench.restore(0)

    def copies(self) -> None:
        """Launches copy_ of the same number of bytes in and out, on the current stream."""
        self.bench.copy_in(0)
        self.bench.copy_out(0)

    def alone(self, work: Callable[[], None], *, turns: int = 1) -> float:
        """Returns the device's seconds per turn when nothing else runs."""
        hold(self.device, LAUNCH_SECONDS * (self.sizes.products + 4 * turns))
        start = mark_time(self.device)
        for _ in range(turns):
            work()
        return seconds_between(start, mark_time(self.device)) / turns

    def beside(self, pairs: int) -> Beside:
        """Runs the GEMMs and the given number of stash and restore pairs, which start at the same time."""
        hold(self.device, LAUNCH_SECONDS * (self.sizes.products + 3 * pairs))
        ends: list[TimeMark] = []
        with self.side.behind_main():
            for _ in range(pairs):
                self.pair()
                ends.append(mark_time(self.device))
        start = mark_time(self.device)
        self.products()
        seconds = seconds_between(start, mark_time(self.device))
        synchronize(self.device)
        return Beside(seconds, [seconds_between(start, end) for end in ends])


def measure(rivals: Rivals, num_programs: int, *, rounds: int) -> dict[str, Any]:
    """Returns the results for one program limit."""
    rivals.bench.num_programs = num_programs
    for _ in range(WARM_TURNS):
        rivals.pair()
        rivals.products()
    pair_seconds = rivals.alone(rivals.pair, turns=5)
    # Enough pairs to outlast the GEMMs, which are slower during the copies than alone.
    pairs = min(MOST_PAIRS, 2 + int(2.5 * rivals.alone(rivals.products) / pair_seconds))
    rows = []
    for _ in range(rounds):
        floor, alone, beside = rivals.alone(rivals.copies, turns=5), rivals.alone(rivals.products), rivals.beside(pairs)
        rows.append(
            {
                "gemm_x": beside.seconds / alone,
                "rate_x": beside.pairs * floor / beside.seconds,
                "cost_x": (beside.seconds - alone) / (max(beside.pairs, 1e-9) * floor),
                "is_covered": float(beside.is_covered),
            }
        )
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {"num_programs": num_programs, "pair_alone_us": pair_seconds * 1e6, "pairs": pairs, **medians, "all": rows}


def targets_of(rows: Sequence[dict[str, Any]]) -> list[Target]:
    """Returns the lowest cost over the program limits whose copies ran until the GEMMs ended."""
    costs = [row["cost_x"] for row in rows if row["is_covered"]]
    return [
        Target(
            "additional time of GEMMs per stash and restore / two copy_, best program limit",
            min(costs, default=None),
            TARGET,
        )
    ]


def plot(rows: Sequence[dict[str, Any]]) -> str:
    """Draws two panels over the program limits."""
    caps = [str(row["num_programs"] or "all") for row in rows]
    series = {
        "GEMMs: time during the stash / alone": [row["gemm_x"] for row in rows],
        "stash: rate during the GEMMs / rate of copy_": [row["rate_x"] for row in rows],
    }
    cost = {"additional time / time of two copy_": [row["cost_x"] for row in rows]}
    return drawing(
        "GEMMs during a running stash",
        [
            Panel("both at the same time", "maximum programs of a kernel", caps, series, limit=1.0),
            Panel("cost of a stash and a restore", "maximum programs of a kernel", caps, cost, limit=TARGET),
        ],
    )


def main() -> None:
    """Measures, prints and writes the results. Exits with status 1 if a target is missed."""
    options = benchmark_parser(__doc__, rounds=7).parse_args()
    device = require_device(options)
    prepare_device(device)
    sizes = SMALL if options.small else Sizes()
    rivals = Rivals(sizes, device)
    print("programs  gemm x  rate x  cost x")
    rows = []
    for num_programs in PROGRAMS[-2:] if options.small else PROGRAMS:
        row = measure(rivals, num_programs, rounds=options.rounds)
        rows.append(row)
        note = "" if row["is_covered"] else "  the copies ended before the GEMMs"
        print(
            f"{num_programs or 'all':>8} {row['gemm_x']:7.3f} {row['rate_x']:7.3f} {row['cost_x']:7.3f}{note}",
            flush=True,
        )
    targets = [] if options.small else targets_of(rows)
    holds = report_targets(targets)
    write_record(options.json, {"sizes": vars(sizes), "rows": rows}, device=device, targets=targets)
    if options.plot is not None:
        options.plot.write_text(plot(rows))
    sys.exit(not holds)


if __name__ == "__main__":
    main()
