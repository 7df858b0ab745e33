"""Measures six points of stash_copy.py: small, large and very large groups with unlimited programs, the very large
group also with two program limits, and host pages.
"""

import argparse

from benchmarks.gpu.checks.reporting import checked_device, expect, report
from benchmarks.gpu.stash_copy import LARGE, TARGET, Case, is_free, measure

POINTS = (
    Case(4096, 1024),
    Case(4096, 16384),
    Case(14336, 16384),
    Case(14336, 16384, num_programs=8),
    Case(14336, 16384, num_programs=32),
    Case(4096, 4096, "host"),
)
SMALL = (Case(64, 64), Case(128, 64), Case(64, 128), Case(64, 64, num_programs=2), Case(64, 64, num_programs=1))
SHOWN = ("copy_gb_s", "stash_gb_s", "stash_x", "restore_x", "rate_x")


def main() -> None:
    """Measures the points, and reports each as soon as it is measured."""
    options = parse_options()
    device = checked_device()
    rows = []
    for case in (*SMALL, Case(64, 64, "host")) if options.small else POINTS:
        row = measure(case, options.rounds, device=device)
        rows.append(row)
        name = f"{case.tier} {case.width} x {case.rows}, programs {case.num_programs or 'all'}"
        print(name, *(f"{key} {row[key]:.3g}" for key in SHOWN), flush=True)
        report(points=[{key: one[key] for key in ("tier", "width", "rows", "num_programs", *SHOWN)} for one in rows])
    large = [row["rate_x"] for row in rows if is_free(row) and row["live_bytes"] >= 0.95 * LARGE]
    if large:
        report(lowest_rate_x=min(large))
        expect(min(large) >= TARGET, f"large groups with unlimited programs run at {min(large):.2f} times copy_'s rate")


def parse_options() -> argparse.Namespace:
    """Parses the command line of this check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny groups without targets, also on the CPU")
    parser.add_argument("--rounds", type=int, default=10, help="counted rounds per point (default: 10)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
