"""Compares stash and restore on a GPU with a copy of the same bytes on the device, over sizes and program limits.

    python benchmarks/gpu/stash_copy.py [--rounds 20] [--json FILE] [--plot FILE.svg]
    python benchmarks/gpu/stash_copy.py --small     # a few small cases, also on the CPU: tests the program

A group is x, gate_up of twice its width and act, as in benchmarks/stash_copy.py. rows is the number of live rows of x.
Copies are timed by device events on a busy GPU, so that launches leave no gaps. The result is the rate of stash and
restore relative to copy_'s rate: seconds of the two copies / seconds of stash and restore, median over rounds.
num_programs limits the programs of a kernel, and thereby the multiprocessors that it uses; 0 means as many as are
useful. Host pages are compared with copies from and to pinned memory. The target applies to groups that exceed all
caches. Has not been run on a GPU yet.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.gpu.chart import Panel, drawing  # noqa: E402
from benchmarks.gpu.record import Target, benchmark_parser, hold, report_targets, require_device, write_record  # noqa: E402
from benchmarks.stash_copy import MIB, Bench, build, figures_of  # noqa: E402
from megatron.core.device import TimeMark, mark_time, prepare_device, seconds_between  # noqa: E402

WIDTHS = (1024, 2048, 4096, 8192, 14336)  # bytes of a row of x
ROWS = (256, 1024, 4096, 16384, 65536)
PROGRAMS = (2, 4, 8, 16, 32, 64, 132, 0)
TARGET = 0.9
LARGE = 128 * MIB  # more than twice the second-level cache of an H200
LAUNCHES_SECONDS = 3e-3  # time that the host takes to launch a round
WARM_ROUNDS = 2


@dataclass(frozen=True)
class Case:
    """One size, page tier and program limit. width: bytes of a row of x."""

    width: int
    rows: int
    tier: str = "device"
    num_programs: int = 0

    @property
    def num_bytes(self) -> int:
        """Approximate size of the group's live rows in bytes."""
        return 4 * self.width * self.rows


def all_cases() -> list[Case]:
    """Returns all widths x rows, then program limits at four sizes."""
    caps = [Case(4096, 4096), Case(4096, 16384), Case(14336, 16384), Case(4096, 4096, "host")]
    sizes = [Case(width, rows) for width in WIDTHS for rows in ROWS]
    return sizes + [Case(one.width, one.rows, one.tier, programs) for one in caps for programs in PROGRAMS]


def small_cases() -> list[Case]:
    """Returns cases that take about a second on a CPU."""
    return [Case(width, 64) for width in (64, 128)] + [Case(64, 64, tier, 2) for tier in ("device", "host")]


def measure(case: Case, rounds: int, *, device: torch.device) -> dict[str, Any]:
    """Returns the results of a case over these rounds, in device seconds."""
    bench = build(
        case.width, torch.bfloat16, num_bytes=case.num_bytes, order="step", device=str(device), tier=case.tier
    )
    for memory in (*bench.sources, *(part.view(torch.uint8) for parts in bench.buffers for part in parts)):
        memory.random_()  # equal bytes may be copied faster than random bytes
    bench.num_programs = case.num_programs
    marks: dict[str, list[tuple[TimeMark, TimeMark]]] = {}

    def timed(verb: Callable[[int], None], turn: int) -> None:
        start = mark_time(device)
        verb(turn)
        marks.setdefault(verb.__name__, []).append((start, mark_time(device)))

    for turn in range(WARM_ROUNDS + rounds):
        hold(device, LAUNCHES_SECONDS)
        bench.round(turn, timed)
    seconds = {verb: [seconds_between(*pair) for pair in pairs[WARM_ROUNDS:]] for verb, pairs in marks.items()}
    return {**asdict(case), **figures_of(seconds, bench.live_bytes), **rates(seconds, bench)}


def rates(seconds: dict[str, list[float]], bench: Bench) -> dict[str, float]:
    """Returns the rates of both directions together. GB/s counts bytes read and bytes written."""
    copies = [sum(pair) for pair in zip(seconds["copy_in"], seconds["copy_out"], strict=True)]
    ours = [sum(pair) for pair in zip(seconds["stash"], seconds["restore"], strict=True)]
    moved = 4 * bench.live_bytes / 1e9
    return {
        "copy_gb_s": moved / statistics.median(copies),
        "stash_gb_s": moved / statistics.median(ours),
        "rate_x": statistics.median(copy / own for copy, own in zip(copies, ours, strict=True)),
    }


def targets_of(rows: Sequence[dict[str, Any]]) -> list[Target]:
    """Returns the lowest rate of the sizes to which the target applies."""
    large = [row["rate_x"] for row in rows if is_free(row) and row["live_bytes"] >= LARGE * 0.95]
    name = f"stash + restore / copy_, unlimited programs, groups of at least {LARGE // MIB} MiB, lowest"
    return [Target(name, min(large, default=None), TARGET, is_least=True)]


def is_free(row: dict[str, Any]) -> bool:
    """Returns whether a row was measured in device memory without a program limit."""
    return row["tier"] == "device" and row["num_programs"] == 0


def plot(rows: Sequence[dict[str, Any]], *, title: str) -> str:
    """Draws rates over sizes with a line for each width, and over program limits with a line for each size."""
    sizes, caps = Lines(), Lines()
    for row in rows:
        if is_free(row):
            sizes.add(f"x of {row['width']} bytes", row["rows"], rate=row["rate_x"])
        mib = 4 * row["width"] * row["rows"] / MIB
        # Unlimited cases come last.
        caps.add(f"{mib:g} MiB, {row['tier']} pages", row["num_programs"] or 10**6, rate=row["rate_x"])
    caps.values = {name: line for name, line in caps.values.items() if len(line) > 1}
    return drawing(
        title,
        [
            sizes.panel("rate / rate of copy_, as many programs as are useful", "live rows", last=None),
            caps.panel("rate / rate of copy_", "maximum programs of a kernel", last="all"),
        ],
    )


@dataclass
class Lines:
    """Rates by line name and position on the x axis."""

    values: dict[str, dict[int, float]] = field(default_factory=dict)

    def add(self, name: str, place: int, *, rate: float) -> None:
        """Adds one point to a line."""
        self.values.setdefault(name, {})[place] = rate

    def panel(self, title: str, x_label: str, *, last: str | None) -> Panel:
        """Returns a panel with all lines. last: label of the last position."""
        places = sorted({place for line in self.values.values() for place in line})
        ticks = [str(place) for place in places]
        series = {name: [line.get(place) for place in places] for name, line in self.values.items()}
        return Panel(title, x_label, [*ticks[:-1], last or ticks[-1]] if ticks else [], series, limit=TARGET)


def main() -> None:
    """Measures, prints and writes the results. Exits with status 1 if a target is missed."""
    options = benchmark_parser(__doc__, rounds=20).parse_args()
    device = require_device(options)
    prepare_device(device)
    print("tier    x bytes   rows       MiB programs copy GB/s ours GB/s stash x restore x  both x")
    rows = []
    for case in small_cases() if options.small else all_cases():
        row = measure(case, options.rounds, device=device)
        rows.append(row)
        print(
            f"{case.tier:6} {case.width:8} {case.rows:6} {row['live_bytes'] / MIB:9.2f} {case.num_programs or 'all':>8}"
            f" {row['copy_gb_s']:9.0f} {row['stash_gb_s']:9.0f} {row['stash_x']:7.2f} {row['restore_x']:9.2f}"
            f" {row['rate_x']:7.2f}",
            flush=True,
        )
    targets = [] if options.small else targets_of(rows)
    holds = report_targets(targets)
    write_record(options.json, {"rounds": options.rounds, "rows": rows}, device=device, targets=targets)
    if options.plot is not None:
        options.plot.write_text(plot(rows, title="Stash and restore relative to copy_"))
    sys.exit(not holds)


if __name__ == "__main__":
    main()
