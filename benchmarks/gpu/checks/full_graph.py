"""Checks that replays of the full-iteration graph are bitwise equal to eager steps, for increasing use of the stash."""

import argparse
import time
from functools import partial

from benchmarks.gpu.checks.reporting import checked_device, report
from benchmarks.gpu.checks.training import StashCounts, become_a_rank, failure_of, first_difference
from tests.distributed.graph_runs import FULL, own_graphs, train_here
from tests.distributed.stash_runs import ROUTER, stash
from tests.gpu.graph_cases import DROPOUT, EAGER, EXPERTS, HALF, UPDATE, Case, argv_of

# By name, with the counters that must not be 0, because otherwise a case would not cover what its name says.
CASES = {
    "experts": (Case("moe", {**EXPERTS, **ROUTER}), ()),
    "stash": (
        Case("moe", {**EXPERTS, **ROUTER, **HALF, **DROPOUT, **stash(1.5, compute="copies")}),
        ("planned_pages",),
    ),
    "stash, host pages": (Case("moe", {**EXPERTS, **stash(0.5, 2.0, compute="copies")}), ("spilled_pages",)),
    "stash, host pages, recomputed gate_up": (
        Case("moe", {**EXPERTS, **ROUTER, **stash(0.3, 0.4, compute="copies")}),
        ("spilled_pages", "dropped_gate_up"),
    ),
    "the same with the update in the graph": (
        Case("moe", {**EXPERTS, **HALF, **stash(0.3, 0.4, compute="copies"), **UPDATE}),
        ("spilled_pages", "dropped_gate_up"),
    ),
}


def main() -> None:
    """Compares each case, even if an earlier one failed."""
    options = parse_options()
    checked_device()
    become_a_rank()
    failed = {}
    for name, (case, needed) in CASES.items():
        wrong = failure_of(partial(difference, name, case, needed=needed, steps=options.steps))
        if wrong is not None:
            failed[name] = wrong
    report(steps=options.steps, cases=len(CASES), failed=failed)
    raise SystemExit(bool(failed))


def difference(name: str, case: Case, *, needed: tuple[str, ...], steps: int) -> str | None:
    """Trains a case with graphs and eagerly. Returns a description of the first difference, or None."""
    counts, began = StashCounts(), time.perf_counter()
    eager = train_here(argv_of(case, {"train-iters": steps}, EAGER))
    middle = time.perf_counter()
    captured = train_here(
        argv_of(case, FULL, case.flags, {"train-iters": steps}),
        graphs=own_graphs,
        setup=counts.setup,
        callbacks=[counts],
    )
    wrong = captured.failure or first_difference(captured, eager)
    if wrong is None and captured.num_graphs != 1:
        wrong = f"{captured.num_graphs} graphs, {captured.num_captures} captures"
    missing = [count for count in needed if not counts.total.get(count)]
    if wrong is None and missing:
        wrong = f"the counters {', '.join(missing)} remained 0"
    seconds = f"eager {middle - began:.1f} s, captured {time.perf_counter() - middle:.1f} s"
    print(
        f"{'FAILS' if wrong else 'holds'}: {name}: {wrong or 'bitwise equal'} ({seconds}; {counts.total})", flush=True
    )
    return wrong


def parse_options() -> argparse.Namespace:
    """Parses the command line of this check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=12, help="number of steps: two warm up, one is captured (default: 12)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
