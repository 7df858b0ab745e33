"""Cases of runs whose steps are captured on a GPU, or on tapes without a GPU, and functions to run them. No tests."""

from typing import Any, NamedTuple

from tests.distributed.graph_runs import FULL, Trained, own_graphs, train_here
from tests.distributed.stash_runs import ROUTER, stash
from tests.functional_tests.case import Flags, read_bases
from tests.functional_tests.merged_flags import merged_argv
from tests.harness import run_on_ranks

RUN: Flags = {"micro-batch-size": 1, "lr-warmup-iters": 0, "clip-grad": 0.3, "eval-iters": 0, "log-interval": 1}
EXPERTS: Flags = {"num-layers": 4, "seq-length": 16, "init-method-std": 0.1, "moe-expert-rank-capacity-factor": 2}
HALF: Flags = {"bf16": True}
# For graphs of parts, which return gradients in half precision. In eager steps, fused accumulation would add unrounded
# gradients to fp32.
HALF_OF_PARTS: Flags = {**HALF, "no-gradient-accumulation-fusion": True}
# The loss scale is so large, and grows so often, that steps overflow repeatedly.
SCALED: Flags = {"fp16": True, "initial-loss-scale": 2.0**18, "loss-scale-window": 2, "hysteresis": 1}
UPDATE: Flags = {"optimizer-cuda-graph": True}
DROPOUT = read_bases()["dropout"]
# Thresholds count tokens, 16 a sample (EXPERTS).
TURNS = " ".join(f"{16 * start}:{size}" for first in range(0, 60, 6) for start, size in ((first, 2), (first + 2, 4)))


class Case(NamedTuple):
    """A base of the functional tests and additional flags."""

    base: str
    flags: Flags


CASES = {
    "dropout": Case("dense", {**HALF, **DROPOUT}),
    "update": Case("dense", {**DROPOUT, **UPDATE}),
    "scaled": Case("llama", SCALED),
    "scaled update": Case("llama", {**SCALED, **UPDATE}),
    "experts": Case("moe", {**EXPERTS, **ROUTER}),
    "pages": Case("moe", {**EXPERTS, **ROUTER, **HALF, **DROPOUT, **stash(1.5, compute="copies")}),
    "pages on the host": Case("moe", {**EXPERTS, **stash(0.5, 2.0, compute="copies")}),
    "rungs": Case("moe", {**EXPERTS, **ROUTER, **stash(0.3, 0.4, compute="copies")}),
    "computed in pages": Case("moe", {**EXPERTS, **ROUTER, **HALF, **DROPOUT, **stash(1.5, compute="pages")}),
    "computed in few pages": Case("moe", {**EXPERTS, **stash(0.3, 0.4, compute="pages")}),
    "pages and update": Case("moe", {**EXPERTS, **HALF, **stash(0.3, 0.4, compute="copies"), **UPDATE}),
}
EAGER: Flags = {"cuda-graph-impl": "none", "optimizer-cuda-graph": False}


def argv_of(case: Case, *more: Flags) -> list[str]:
    """Returns the command line of a case with additional flags. Later flags override earlier ones."""
    return merged_argv(case.base, RUN, case.flags, *more)


def both(case: Case, *more: Flags) -> tuple[Trained, Trained]:
    """Trains a case without graphs and with graphs."""
    eager = train_here(argv_of(case, *more, EAGER))
    return eager, train_here(argv_of(case, FULL, case.flags, *more), graphs=own_graphs)


def on_gpu(function: Any, *args: Any) -> Any:
    """Runs a function on a new rank, which creates the process groups as a training program does."""
    return run_on_ranks(function, 1, *args, backend=None, timeout=500)[0]
