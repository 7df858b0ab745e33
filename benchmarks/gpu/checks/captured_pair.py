"""Checks a CUDA graph of passes that take turns: a replay is bitwise equal to eager steps whose passes run alone.

The forward of a pair launches from this thread, and its backward from a thread of its own. Rows are exchanged with this
rank alone, through NCCL, because a check has one GPU.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

from benchmarks.gpu.checks.reporting import checked_device, report
from benchmarks.gpu.checks.training import become_a_rank, failure_of, first_difference
from megatron.core.pipeline_parallel.pass_turns import PassTurns
from megatron.core.transformer.moe.dispatch_static import padded_rank_rows
from tests.distributed.graph_runs import FULL, own_graphs, train_here
from tests.distributed.stash_runs import ROUTER, stash
from tests.functional_tests.case import Flags
from tests.gpu.graph_cases import EAGER, EXPERTS, HALF, Case, argv_of

SENT: Flags = {**EXPERTS, **ROUTER, **HALF, "moe-token-dispatcher-type": "alltoall"}
TURNS: Flags = {"overlap-moe-expert-parallel-comm": True, "delay-wgrad-compute": True}
CASES = {
    "eager": (SENT, EAGER),
    "captured": (SENT, FULL),
    "captured, stash": ({**SENT, **stash(1.5, compute="copies")}, FULL),
    "captured, experts in pages": ({**SENT, **stash(1.5, compute="pages")}, FULL),
}


def main() -> None:
    """Compares each case, even if an earlier one failed."""
    options = parse_options()
    checked_device()
    become_a_rank()
    failed = {}
    for name in options.cases:
        wrong = failure_of(partial(_difference, *CASES[name], steps=options.steps))
        print(f"{'FAILS' if wrong else 'holds'}: {name}: {wrong or 'bitwise equal'}", flush=True)
        if wrong is not None:
            failed[name] = wrong
    report(steps=options.steps, cases=len(options.cases), failed=failed)
    raise SystemExit(bool(failed))


def _difference(flags: Flags, how: Flags, *, steps: int) -> str | None:
    """Trains with and without turns; returns a description of the first difference, or None."""
    case, counted = Case("moe", flags), {"train-iters": steps}
    with _exchanges_with_itself() as turns:
        alone = train_here(argv_of(case, counted, EAGER))
        taken = train_here(argv_of(case, how, case.flags, TURNS, counted), graphs=own_graphs)
    wrong = taken.failure or first_difference(taken, alone)
    if wrong is None and how is FULL and taken.num_graphs != 1:
        wrong = f"{taken.num_graphs} graphs, {taken.num_captures} captures"
    return "no pass handed over" if wrong is None and not turns else wrong


@contextmanager
def _exchanges_with_itself() -> Iterator[list[str]]:
    """Lets a single rank exchange rows, and take turns. Yields a list with an item for each turn."""
    hand_over, turns = PassTurns.hand_over, list[str]()

    def recorded(self: PassTurns) -> None:
        turns.append("turn")
        hand_over(self)

    with (
        patch("megatron.core.transformer.transformer_config.validate_expert_overlap"),
        patch("megatron.core.transformer.moe.token_dispatcher.group_size", return_value=2),
        # Also in a dry run on a CPU.
        patch("megatron.core.transformer.moe.dispatch_static.rank_row_layout", return_value=padded_rank_rows),
        patch.object(PassTurns, "hand_over", recorded),
    ):
        yield turns


def parse_options() -> argparse.Namespace:
    """Parses the command line of this check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=6, help="number of steps: two warm up, one is captured (default: 6)"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    return parser.parse_args()


if __name__ == "__main__":
    main()
