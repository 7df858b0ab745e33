"""Compares module graphs with two microbatches in flight, in the order F1 F2 B1 F3 B2 B3, with eager passes.

The results must be bitwise equal. This is the order of the first of two pipeline stages. Here one GPU runs it without
the second stage.
"""

import time
from functools import partial
from unittest.mock import patch

from benchmarks.gpu.checks.reporting import checked_device, report
from benchmarks.gpu.checks.training import become_a_rank, failure_of, first_difference
from megatron.core.pipeline_parallel import schedule
from megatron.core.pipeline_parallel.schedule import Action, Pair
from tests.distributed.graph_runs import LOCAL, own_graphs, train_here
from tests.distributed.stash_runs import ROUTER, stash
from tests.functional_tests.case import Flags
from tests.gpu.graph_cases import DROPOUT, EXPERTS, HALF_OF_PARTS, Case, argv_of

MICROBATCHES, STEPS = 3, 8
ORDER = "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"
# By name: captured parts, number of graphs (a pair for each part and each of two microbatches), and the run.
PARTS = {
    "dense": ("attn mlp", 16, Case("dense", {**HALF_OF_PARTS, **DROPOUT})),
    "experts": ("attn moe", 32, Case("moe", {**EXPERTS, **ROUTER})),
    "stash": (
        "moe",
        16,
        Case("moe", {**EXPERTS, **ROUTER, **stash(1.5, compute="copies"), "moe-paged-stash-prefetch-layers": 0}),
    ),
    "stash, host pages, recomputed gate_up": (
        "experts",
        16,
        Case("moe", {**EXPERTS, **stash(0.3, 0.4, compute="copies"), "moe-paged-stash-prefetch-layers": 0}),
    ),
}
one_forward_one_backward = schedule.one_forward_one_backward


def as_first_of_two(stage: int, num_stages: int, *, num_microbatches: int, paired: bool = False) -> list[Action | Pair]:
    """Returns the order of the first of two stages, in place of the order of a single-stage pipeline."""
    return one_forward_one_backward(0, 2, num_microbatches=num_microbatches, paired=paired)


def main() -> None:
    """Compares each case, even if an earlier one failed."""
    checked_device()
    become_a_rank()
    order = " ".join(map(str, as_first_of_two(0, 1, num_microbatches=MICROBATCHES)))
    assert order == ORDER, order
    failed = {}
    with patch.object(schedule, "one_forward_one_backward", as_first_of_two):
        for name, (modules, num_graphs, case) in PARTS.items():
            wrong = failure_of(partial(difference, name, case, modules=modules, num_graphs=num_graphs))
            if wrong is not None:
                failed[name] = wrong
    report(order="F1 F2 B1 F3 B2 B3", steps=STEPS, cases=len(PARTS), failed=failed)
    raise SystemExit(bool(failed))


def difference(name: str, case: Case, *, modules: str, num_graphs: int) -> str | None:
    """Trains a case with graphs and eagerly. Returns a description of the first difference, or None."""
    began = time.perf_counter()
    flags: Flags = {"train-iters": STEPS, "global-batch-size": MICROBATCHES}
    eager = train_here(argv_of(case, flags))
    local: Flags = {**LOCAL, "cuda-graph-modules": modules.split()}
    captured = train_here(argv_of(case, flags, local), graphs=own_graphs)
    wrong = captured.failure or first_difference(captured, eager)
    if wrong is None and captured.num_graphs != num_graphs:
        wrong = f"{captured.num_graphs} graphs instead of {num_graphs}"
    outcome = wrong or f"bitwise equal from {captured.num_graphs} graphs"
    print(f"{'FAILS' if wrong else 'holds'}: {name}: {outcome} ({time.perf_counter() - began:.1f} s)", flush=True)
    return wrong


if __name__ == "__main__":
    main()
