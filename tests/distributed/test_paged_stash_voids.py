"""TRAPS 6, 10, 14, 16 and 19 through the training program, with fixed-size expert buffers.

Steps discarded because of one rank's routing, evaluations and stops leave no trace in the results.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.moe.router import TopKRouter
from megatron.training.run import TrainingRun
from megatron.training.training import evaluate_validation
from tests.counts import long_count, slow, soak_only
from tests.distributed.parity import layout
from tests.distributed.stash_runs import ROUTER, Trained, argv_of, stash, train_here
from tests.distributed.tiny_runs import OVERLAPPED_SMALL_BUCKETS
from tests.functional_tests.case import Flags
from tests.functional_tests.expectations import assert_same_checkpoint
from tests.harness import run_on_ranks

STEPS = 3
RUN: Flags = {"hidden-dropout": 0.1, **ROUTER, **OVERLAPPED_SMALL_BUCKETS, "train-iters": STEPS, "save-interval": 1}
EVALUATED: Flags = {"eval-interval": 1, "eval-iters": 2}
LAYOUTS: dict[str, tuple[int, Flags]] = {
    "ep 2": (2, {**layout(ep=2), "global-batch-size": 6}),
    "pp 2, ep 2": (4, {**layout(pp=2, ep=2), "global-batch-size": 6}),
    "ep 2, zero 2": (2, {**layout(ep=2), "global-batch-size": 6, "optimizer": "distributed_fused_adam"}),
    # The first step overflows; the second does not, so that the scale grows, and the last one overflows again.
    "ep 2, fp16": (
        2,
        {
            **layout(ep=2),
            "global-batch-size": 6,
            "fp16": True,
            "initial-loss-scale": 2.0**18,
            "hysteresis": 1,
            "loss-scale-window": 1,
        },
    ),
}
FEW_ROWS: Flags = {"moe-expert-rank-capacity-factor": 1.7}
LACKING: dict[str, Flags] = {
    "rows": {**stash(8), **FEW_ROWS},
    # Enough for half of the balanced inputs, so that the pool must grow more than once.
    "inputs": stash(0.15),
    "pages": stash(1.27, overflow_policy="rerun"),
    "rows and pages": {**stash(1.27, overflow_policy="rerun"), **FEW_ROWS},
}


@dataclass(frozen=True)
class Skew:
    """Routes all tokens to the first rank's experts in these passes of a step, or of the evaluation after it."""

    step: int
    layers: Sequence[int] = (1, 2, 3, 4)
    microbatches: Sequence[int] = (0, 1, 2)
    in_training: bool = True


PLANS: dict[str, list[Skew]] = {
    "first layer": [Skew(2, layers=[1])],
    "middle layer": [Skew(2, layers=[3])],
    "last layer": [Skew(2, layers=[4])],
    "one microbatch": [Skew(2, microbatches=[1])],
    "twice in a row": [Skew(2, layers=[1, 2]), Skew(3)],
    "first step": [Skew(1)],
    "last step": [Skew(STEPS)],
    "evaluation": [Skew(2, in_training=False)],
}
# Layout, plan, shortfall, and the steps that the first rank discards; `make soak` runs all combinations.
CASES = [
    ("ep 2", "first step", "rows and pages", [1]),
    slow("ep 2", "last step", "inputs", [1, STEPS]),
    slow("pp 2, ep 2", "first layer", "rows", [2]),
    slow("ep 2, fp16", "twice in a row", "pages", [2, 3]),
    slow("ep 2, zero 2", "one microbatch", "pages", [2]),
    # Each repeats a case above in another place: the cause decides how a step continues, not the layer that overflows.
    soak_only("ep 2", "first layer", "rows", [2]),
    soak_only("ep 2", "middle layer", "rows", [2]),
    soak_only("ep 2", "last layer", "rows", [2]),
    soak_only("ep 2", "one microbatch", "pages", [2]),
    soak_only("ep 2", "twice in a row", "pages", [2, 3]),
    soak_only("ep 2", "evaluation", "rows", [-2]),  # evaluations: test_step_runner.py
    soak_only("pp 2, ep 2", "last layer", "rows", [2]),
    soak_only("ep 2, zero 2", "middle layer", "rows", [2]),
]


Raised = dict[int, list[tuple[float, ...]]]


class Skewed:
    """A run whose routers follow a plan.

    raised: for each step, the overflow flags (rows, pages) of each of its attempts. Evaluations have the negative
    number of the step before them.
    """

    def __init__(self, plan: Sequence[Skew]) -> None:
        self.plan = plan
        self.raised: Raised = {}

    @contextmanager
    def setup(self, run: TrainingRun) -> Iterator[None]:
        memory, passes = run.expert_memory, Counter[int]()
        assert memory is not None
        begin_step, overflow_flags, gating = memory.begin_step, memory.overflow_flags, TopKRouter.gating

        def begun(**sizes: Any) -> None:
            passes.clear()
            begin_step(**sizes)

        def noted() -> Tensor:
            found = overflow_flags()
            step = run.state.iteration + 1 if run.model[0].training else -run.state.iteration
            self.raised.setdefault(step, []).append(tuple(found.tolist()))
            return found

        def skewed(router: TopKRouter, tokens: Tensor) -> Tensor:
            layer, logits = router.layer_number, gating(router, tokens)
            step = run.state.iteration + router.training
            microbatch, passes[layer] = passes[layer], passes[layer] + 1
            if any(
                (one.step, one.in_training) == (step, router.training)
                and layer in one.layers
                and microbatch in one.microbatches
                for one in self.plan
            ):
                logits = logits + 100 * (logits.new_ones(4).cumsum(0) < 2.5)
            return logits

        with (
            patch.object(memory, "begin_step", begun),
            patch.object(memory, "overflow_flags", noted),
            patch.object(TopKRouter, "gating", skewed),
        ):
            yield


def _run_void(argvs: Sequence[Sequence[str]], plan: Sequence[Skew]) -> list[Raised]:
    """Checks that all runs equal the first, and returns the overflow flags of each later run on this rank."""
    expected = train_here(argvs[0], Skewed(plan).setup)
    assert "--fp16" not in argvs[0] or {step["skipped"] for step in expected.steps} == {False, True}
    raised = []
    for number, argv in enumerate(argvs[1:], 1):
        skewed = Skewed(plan)
        train_here(argv, skewed.setup).assert_same(expected, f"run {number}")
        raised.append(skewed.raised)
    return raised


def _train_void(where: str, plan: str, lacks: Sequence[str], folder: Path) -> tuple[list[Raised], ...]:
    """Trains with ample buffers and with each shortfall, compares checkpoints, and returns flags by rank, then run."""
    ranks, flags = LAYOUTS[where]
    flags = {**RUN, **flags, **(EVALUATED if plan == "evaluation" else {})}
    # The first run has rows and pages for any routing.
    runs = [stash(8), *(LACKING[lack] for lack in lacks)]
    argvs = [argv_of(flags, run, {"save": folder / str(number)}) for number, run in enumerate(runs)]
    by_rank = run_on_ranks(_run_void, ranks, argvs, PLANS[plan], timeout=60 + 60 * len(argvs))
    for number in range(1, len(runs)):
        for step in range(1, STEPS + 1):
            name = f"iter_{step:07d}"
            assert_same_checkpoint(folder / str(number) / name, folder / "0" / name)
        attempts = [{step: len(found) for step, found in of_rank[number - 1].items()} for of_rank in by_rank]
        assert all(of_rank == attempts[0] for of_rank in attempts), "ranks reran different steps"
    return tuple(by_rank)


@pytest.mark.slow
@pytest.mark.parametrize(("where", "plan", "lack", "steps"), CASES)
def test_steps_void_on_one_rank_leave_no_trace(
    where: str, plan: str, lack: str, steps: list[int], tmp_path: Path
) -> None:
    by_rank = [raised for (raised,) in _train_void(where, plan, [lack], tmp_path)]
    void = [[step for step, found in raised.items() if any(map(sum, found))] for raised in by_rank]
    # With "inputs", every rank runs out of pages in step 1. Otherwise only the rank that receives the skewed tokens
    # overflows.
    first = 2 * (where == "pp 2, ep 2" and plan == "last layer")
    assert void.pop(first) == steps
    assert all(others == ([1] if lack == "inputs" else []) for others in void)
    if lack == "rows and pages":
        assert by_rank[0][steps[0]] == [(1, 1), (0, 1), (0, 0)]


@pytest.mark.parametrize(("where", "plan"), list(product(LAYOUTS, PLANS))[:24])
@pytest.mark.soak  # the cases above cover each layout and each lack
def test_no_lack_of_anything_at_any_time_leaves_a_trace(where: str, plan: str, tmp_path: Path) -> None:
    by_rank = _train_void(where, plan, list(LACKING), tmp_path)
    assert all(found[-1] == (0, 0) for of_rank in by_rank for raised in of_rank for found in raised.values())
    assert any(len(found) > 1 for found in by_rank[0][0].values())


@contextmanager
def _evaluating_first(run: TrainingRun) -> Iterator[None]:
    evaluate_validation(run)
    with torch.inference_mode():
        evaluate_validation(run)
    yield


def _evaluate_between(argv: Sequence[str]) -> tuple[Trained, Trained]:
    return train_here(argv), train_here([*argv, "--eval-interval", "1", "--eval-iters", "2"], _evaluating_first)


@pytest.mark.slow
def test_evaluations_leave_pages_order_and_training_as_they_were() -> None:
    argv = argv_of(RUN, LAYOUTS["ep 2"][1], stash(0.6), {"save-interval": None})
    for plain, evaluated in run_on_ranks(_evaluate_between, 2, argv):
        assert len(evaluated.evaluations) == 2 + STEPS and len(evaluated.pages) == STEPS
        evaluated.evaluations, evaluated.state["others"] = [], plain.state["others"]
        evaluated.assert_same(plain, "with evaluations")


def _train_all(argvs: Sequence[Sequence[str]]) -> list[Trained]:
    return [train_here(argv) for argv in argvs]


@pytest.mark.slow
def test_a_run_of_few_pages_goes_on_in_any_layout_as_one_without_a_stash(tmp_path: Path) -> None:
    base: Flags = {**RUN, "save-interval": None, "global-batch-size": 6, "lr-decay-iters": STEPS}
    first = argv_of(base, layout(ep=2), LACKING["rows and pages"], {"train-iters": 2, "save": tmp_path})
    # These layouts change the numbers of stages and of experts per rank; other layouts resume in the same way.
    layouts = [layout(pp=2), layout(2, etp=2), layout(ep=2), {**layout(ep=2), "micro-batch-size": 3}]
    layouts = layouts[: long_count(2, soak=4)]
    pools: list[Flags] = [{}, stash(0.15)]
    others = [argv_of(base, flags, pool, {"load": tmp_path}) for flags in layouts for pool in pools]
    for _, *resumed in run_on_ranks(_train_all, 2, [first, *others], timeout=300):
        for flags, without, stashed in zip(layouts, resumed[::2], resumed[1::2], strict=True):
            assert [step["iteration"] for step in without.steps] == [3]
            stashed.assert_same(without, str(flags))


@pytest.mark.slow
def test_a_run_goes_on_with_a_stash_as_without_whichever_it_began_with(tmp_path: Path) -> None:
    base: Flags = {**RUN, **LAYOUTS["ep 2"][1], "save-interval": None}
    pools: dict[str, Flags] = {"without": {}, "with": stash(0.15)}
    whole = [argv_of(base, pool, {"save": tmp_path / name, "save-interval": 2}) for name, pool in pools.items()]
    switched = [
        argv_of(base, pool, {"load": tmp_path / name, "ckpt-step": 2})
        for name, pool in zip(pools, reversed(pools.values()))
    ]
    for expected, stashed, *resumed in run_on_ranks(_train_all, 2, [*whole, *switched]):
        stashed.assert_same(expected, "never stopped")
        expected.steps = expected.steps[2:]
        for name, one in zip(pools, resumed, strict=True):
            one.assert_same(expected, f"began {name}")
        assert [len(one.pages) for one in resumed] == [1, 0] and stashed.pages[0].voids > 0
