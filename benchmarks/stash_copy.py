"""Compares stash and restore of a page pool with Tensor.copy_ of the same bytes.

    python benchmarks/stash_copy.py [--rounds 25] [--json benchmarks/results/stash_copy_cpu.json]

A group contains the tensors of an expert layer that also saves act: x, gate_up of twice its width, and act. 15/16 of
their rows are live, and a page stores 64 rows of x. The pool has space for two groups, so the plain copies alternate
between two sets of buffers. Stash, restore and plain copies are interleaved. The results, stash x and restore x, are
medians over rounds of copy_'s seconds / our seconds, i.e. the rate relative to copy_'s. A round under the profiler must
not allocate. The order of free pages in the pool's ring is

new       as after a reset: a tensor's pages are consecutive
step      as after a step in which 64 groups of other sizes used the pool, as under pipeline parallelism
shuffled  a random permutation, the worst case: hardly any two pages are consecutive

benchmarks/gpu/stash_copy.py measures the same on a GPU, for other sizes.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.sides import context as machine  # noqa: E402
from megatron.core.device import keep_cpu_heap  # noqa: E402
from megatron.core.transformer.moe.paged_stash.page_layout import PoolLayout, Priority, TensorSpec  # noqa: E402
from megatron.core.transformer.moe.paged_stash.page_pool import PageGroup, PagePool  # noqa: E402

WIDTHS = (256, 1024, 2048, 4096, 16384)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)
MIB = 2**20
GROUP_BYTES = 64 * MIB
SIZES_ON_CPU = (1, 4, 16, 256)  # MiB
GROUPS_OF_STEP = 64
TARGETS = {256: 0.75}  # minimum of stash x and restore x, by width in bytes; 0.9 for other widths


@dataclass
class Bench:
    """A pool with a group of three tensors, and two sets of buffers for copy_ that correspond to the pages."""

    pool: PagePool
    specs: list[TensorSpec]
    num_rows: Tensor
    sources: list[Tensor]
    targets: list[Tensor]
    buffers: list[list[Tensor]]
    num_programs: int = 0

    def __post_init__(self) -> None:
        self.group = self.pool.open_group(self.specs)

    @property
    def live_bytes(self) -> int:
        """Number of bytes that one stash, restore or copy moves."""
        return sum(buffer.nbytes for buffer in self.buffers[0])

    def stash(self, _turn: int) -> None:
        self.pool.stash(self.group, self.sources, num_programs=self.num_programs)

    def restore(self, _turn: int) -> None:
        self.pool.restore(self.group, self.targets, num_programs=self.num_programs)

    def copy_in(self, turn: int) -> None:
        for buffer, source in zip(self.buffers[turn % 2], self.sources):
            buffer.copy_(source[: buffer.nbytes].view(buffer.dtype), non_blocking=True)

    def copy_out(self, turn: int) -> None:
        for buffer, target in zip(self.buffers[turn % 2], self.targets):
            target[: buffer.nbytes].view(buffer.dtype).copy_(buffer, non_blocking=True)

    def round(self, turn: int, timed: Callable[[Callable[[int], None], int], None]) -> None:
        """Runs each operation once. Plain copies run first in every other round.

        timed: called as timed(verb, turn); must call verb(turn).
        """
        verbs = [(self.copy_in, self.stash), (self.copy_out, self.restore)]
        self.pool.plan(self.group, self.num_rows)
        for pair in verbs:
            for verb in pair if turn % 2 else reversed(pair):
                timed(verb, turn)
        self.pool.release(self.group)


def build(width: int, dtype: torch.dtype, *, num_bytes: int, order: str, device: str, tier: str) -> Bench:
    """Builds a bench with groups of num_bytes. width: of x, in bytes. Touches all memory once."""
    max_rows = num_bytes // (4 * width) * 16 // 15
    num_rows = num_bytes // (4 * width) - 3  # the last page is not full
    widths = ((width, Priority.INPUT), (2 * width, Priority.GATE_UP), (width, Priority.ACT))
    specs = [TensorSpec(one, one, max_rows, priority) for one, priority in widths]
    pages = 2 * sum(-(-num_rows * spec.row_bytes // (64 * width)) for spec in specs)
    layout = PoolLayout(64 * width, *((pages, 0) if tier == "device" else (0, pages)))
    pool = PagePool(device, layout)
    for memory in (pool.device_pages, pool.host_pages):
        memory.zero_()
    if order == "shuffled":
        pool.ring.copy_(torch.randperm(pages, generator=torch.Generator().manual_seed(1)))
    elif order == "step":
        age(pool, specs)
    sources, targets = (
        [torch.ones(spec.max_bytes, dtype=torch.uint8, device=device) for spec in specs] for _ in range(2)
    )
    place: dict[str, Any] = {"device": device} if tier == "device" else {"pin_memory": device != "cpu"}
    lengths = [num_rows * spec.row_bytes for spec in specs]
    buffers = [[torch.ones(length, dtype=torch.uint8, **place).view(dtype) for length in lengths] for _ in range(2)]
    bench = Bench(pool, specs, torch.tensor([num_rows], device=device), sources, targets, buffers)
    for turn in range(2):
        bench.round(turn, lambda verb, turn: verb(turn))
    return bench


def age(pool: PagePool, specs: list[TensorSpec]) -> None:
    """Sends GROUPS_OF_STEP groups through the pool, each with about a tenth of the rows and at most 9 at a time."""
    numbers = random.Random(1)
    waiting: list[PageGroup] = []
    for _ in range(GROUPS_OF_STEP):
        waiting.append(pool.open_group(specs))
        pool.plan(waiting[-1], torch.tensor([int(specs[0].max_rows * numbers.uniform(0.05, 0.15))]).to(pool.device))
        if len(waiting) > 8:
            leave(pool, waiting.pop(numbers.randrange(8)))
    for group in waiting:
        leave(pool, group)


def leave(pool: PagePool, group: PageGroup) -> None:
    """Releases a group's pages and its slot, as after its backward."""
    pool.release(group)
    pool.close_group(group)


def check_no_allocation(bench: Bench) -> None:
    """Raises AssertionError naming the operators that allocated during plan, stash, restore and release."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        bench.round(0, lambda verb, turn: verb(turn))
    allocated = [(event.name, event.cpu_memory_usage) for event in seen.events() if event.cpu_memory_usage]
    assert not allocated, f"the steady state allocates: {allocated}"


def measure_cpu(bench: Bench, rounds: int) -> dict[str, Any]:
    """Returns the results over these rounds, in CPU seconds with one thread and in wall seconds with two.

    Raises AssertionError if the steady state allocates.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in ("copy_in", "stash", "copy_out", "restore")}

    def timed(verb: Callable[[int], None], turn: int) -> None:
        start = clock()
        verb(turn)
        seconds[verb.__name__].append(clock() - start)

    for turn in range(rounds):
        bench.round(turn, timed)
    check_no_allocation(bench)
    return figures_of(seconds, bench.live_bytes)


def figures_of(seconds: dict[str, list[float]], live_bytes: int) -> dict[str, Any]:
    """Returns medians over rounds: ratios to plain copies, and microseconds. seconds: by operation, one per round."""
    ratio = {
        ours: statistics.median(copy / own for copy, own in zip(seconds[theirs], seconds[ours]))
        for ours, theirs in (("stash", "copy_in"), ("restore", "copy_out"))
    }
    medians = {f"{name}_us": statistics.median(values) * 1e6 for name, values in seconds.items()}
    return {"stash_x": ratio["stash"], "restore_x": ratio["restore"], "live_bytes": live_bytes, **medians}


def main_cpu(rounds: int) -> list[dict[str, Any]]:
    """Measures widths x dtypes, widths x orders, then sizes at one width, all with one thread and with two threads."""
    keep_cpu_heap()
    cases = [(w, d, GROUP_BYTES, "step") for w in WIDTHS for d in DTYPES]
    cases += [(w, torch.float32, GROUP_BYTES, order) for order in ("new", "shuffled") for w in WIDTHS]
    cases += [(2048, torch.float32, size * MIB, "step") for size in SIZES_ON_CPU]
    rows = []
    print("threads group MiB  width dtype          order    copy GB/s  stash x restore x")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for width, dtype, num_bytes, order in cases:
            bench = build(width, dtype, num_bytes=num_bytes, order=order, device="cpu", tier="device")
            case: dict[str, Any] = {"threads": threads, "group_mib": num_bytes // MIB, "width": width}
            case |= {"dtype": str(dtype).removeprefix("torch."), "order": order}
            row = case | measure_cpu(bench, rounds)
            rows.append(row)
            gigabytes = row["live_bytes"] / row["copy_in_us"] / 1e3
            low = min(row["stash_x"], row["restore_x"]) < TARGETS.get(width, 0.9)
            print(
                f"{threads:7} {case['group_mib']:9} {width:6} {case['dtype']:14} {order:5} {gigabytes:9.1f}"
                f" {row['stash_x']:8.2f} {row['restore_x']:9.2f}{'  low' if low else ''}",
                flush=True,
            )
    return rows


def main() -> None:
    """Measures the cases, prints the table and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="counted rounds per case (default: 25)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    record = {"rows": main_cpu(options.rounds), "rounds": options.rounds, **machine()}
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
