"""Weight gradients as passes of their own leave a training run bit-identical, and fill time in which stages wait."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron.core.distributed import grad_intake
from megatron.core.pipeline_parallel.runner import ScheduleRunner
from megatron.core.pipeline_parallel.schedule import (
    Action,
    ActionKind,
    Order,
    Pipeline,
    Schedule,
    ScheduleKind,
    stage_orders,
)
from megatron.core.pipeline_parallel.timeline import bubble_share, timeline
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.tensor_parallel import weight_grads
from megatron.core.tensor_parallel.weight_grads import SplitBackward
from megatron.training.run import TrainingRun
from megatron.training.training import run_step
from tests.counts import long_count, slow
from tests.distributed.parity import layout
from tests.distributed.stash_runs import argv_of
from tests.distributed.test_expert_overlap import COMMON, DIMENSIONS, EXPERTS, Collectives, train_argv
from tests.distributed.tiny_runs import started_run
from tests.functional_tests.case import Flags
from tests.harness import run_on_ranks
from tests.pairwise import Case, covering

ZB_H1: Flags = {"pipeline-schedule": "zb-h1"}
# Number of ranks, number of ranks with different batches, and flags.
LAYOUTS: dict[str, tuple[int, int, Flags]] = {
    "pp 2": (2, 1, layout(pp=2)),
    "pp 4": (4, 1, layout(pp=4)),
    "pp 2, ep 2": (4, 2, layout(pp=2, ep=2)),
    "pp 2, tp 2": (4, 1, {**layout(2, pp=2), "num-query-groups": 2}),
}
SIZES: dict[str, list[Any]] = {
    **{name: list(values) for name, values in DIMENSIONS.items() if name not in ("layout", "flags")},
    "layout": list(LAYOUTS),
    "microbatches": [1, 3, 5, "changing"],
    "tied": [False, True],
}


def _is_possible(case: Case) -> bool:
    """Returns whether the program accepts a case. Something must be left to stash and to offload."""
    experts, recompute, around = case.get("experts", "static"), case.get("recompute"), case.get("around")
    if "moe-paged-stash" in EXPERTS[experts] and recompute in ("full", "moe"):
        return False
    if "8 bits" in experts and around in ("adapters", "fp16"):
        return False
    return not (around == "offloading" and recompute in ("full", "some layers"))


def _sizes(name: str) -> dict[str, list[Any]]:
    """Returns the values that a layout has.

    Shared experts overlap with an exchange between several ranks. With 4 stages, a stage has one layer: it is not
    offloaded, recompute of some layers is recompute of all, and a stash needs several micro-batches.
    """
    without: dict[str, Any] = {} if name == "pp 2, ep 2" else {"shared": "overlapped"}
    if name == "pp 4":
        without |= {"around": "offloading", "recompute": "some layers", "microbatches": 1}
    sizes = {key: [value for value in values if value != without.get(key)] for key, values in SIZES.items()}
    return {**sizes, "layout": [name]}


def _flags(case: Case) -> Flags:
    _, replicas, of_layout = LAYOUTS[case["layout"]]
    flags: Flags = {**COMMON, **of_layout}
    for name, values in DIMENSIONS.items():
        if name not in ("layout", "flags", "microbatches"):
            flags |= values[case[name]]
    if case["tied"]:
        flags |= {"untie-embeddings-and-output-weights": None}
    if case["microbatches"] == "changing":
        # 5, 1 and 2 micro-batches. Thresholds count tokens, 16 a sample.
        sizes = f"0:{5 * replicas} {16 * 5 * replicas}:{replicas} {16 * 6 * replicas}:{2 * replicas}"
        return {**flags, "global-batch-size": None, "step-batch-size-schedule": sizes}
    return {**flags, "global-batch-size": replicas * case["microbatches"]}


@dataclass
class _Log:
    """The passes that a rank's runners have executed, in order, by training step. stage: of this rank."""

    pipeline: Pipeline = Pipeline(1)
    stage: int = 0
    steps: list[list[Action]] = field(default_factory=list)
    current: list[Action] = field(default_factory=list)

    @contextmanager
    def look(self, run: TrainingRun) -> Iterator[None]:
        self.pipeline, self.stage = Pipeline(group_size(run.groups.pp), len(run.model)), group_rank(run.groups.pp)
        run_step, forward, backward = ScheduleRunner.run, ScheduleRunner._forward, ScheduleRunner._backward
        complete, splits = SplitBackward.complete, dict[int, Action]()

        def begun(runner: ScheduleRunner, steps: Any) -> Any:
            of_step = list[Action]()
            self.current = of_step
            found = run_step(runner, steps)
            # An evaluation has no backward.
            if any(action.kind is ActionKind.BACKWARD for action in of_step):
                self.steps.append(of_step)
            return found

        def ran_forward(runner: ScheduleRunner, action: Action) -> None:
            forward(runner, action)
            self.current.append(action)

        def ran_backward(runner: ScheduleRunner, action: Action) -> None:
            backward(runner, action)
            self.current.append(action)
            if runner._weights is not None and runner._weights.is_splitting:
                splits[id(runner._weights._split)] = action

        def completed(split: SplitBackward) -> None:
            assert split.entries
            complete(split)
            self.current.append(splits.pop(id(split)).of_kind(ActionKind.WEIGHT))

        with (
            patch.object(ScheduleRunner, "run", begun),
            patch.object(ScheduleRunner, "_forward", ran_forward),
            patch.object(ScheduleRunner, "_backward", ran_backward),
            patch.object(SplitBackward, "complete", completed),
        ):
            yield


def _compare(case: Case) -> int:
    """Checks that the schedule changes no results, and that it is executed; returns the number of weight passes."""
    flags, log = _flags(case), _Log()
    plain = train_argv(argv_of(flags), _Log().look)
    split = train_argv(argv_of(flags, ZB_H1), log.look)
    split.assert_same(plain, str(case))
    number = case["microbatches"]
    planned = [
        stage_orders(log.pipeline, one, Schedule(ScheduleKind.ZB_H1))[log.stage]
        for one in ((5, 1, 2) if number == "changing" else (number,) * 3)
    ]
    # Steps that overflow are repeated.
    assert [step for step, _ in groupby(log.steps)] == [step for step, _ in groupby(planned)], case
    return sum(action.kind is ActionKind.WEIGHT for step in log.steps for action in step)


def _compare_all(cases: Sequence[Case]) -> list[int]:
    return [_compare(case) for case in cases]


DRAWS = long_count(20, soak=40)
# Covers each value on two ranks, and each pair of values under `make soak`, and runs some cases of further layouts.
CASES = list(islice(covering(_sizes("pp 2"), draws=DRAWS, allowed=_is_possible), long_count(10, soak=1000)))
FURTHER = {
    name: list(islice(covering(_sizes(name), draws=DRAWS, allowed=_is_possible), long_count(2, soak=12)))
    for name, (ranks, _, _) in LAYOUTS.items()
    if ranks > 2
}


@pytest.mark.slow
def test_weight_passes_change_no_bit() -> None:
    for weights in run_on_ranks(_compare_all, 2, CASES, timeout=60 + 60 * len(CASES)):
        assert all(weights)


@pytest.mark.parametrize("name", [slow(name) for name in FURTHER])
def test_weight_passes_change_no_bit_on_more_ranks(name: str) -> None:
    cases = FURTHER[name]
    for weights in run_on_ranks(_compare_all, 4, cases, timeout=60 + 60 * len(cases)):
        assert all(weights)


def _collectives(flags: Flags) -> list[str]:
    """Returns the collectives and transfers of the second step, sorted."""
    with started_run(argv_of(flags)) as run:
        run_step(run)
        with Collectives() as collectives:
            run_step(run)
    return sorted(collectives.found)


def _of_schedules(flags: Flags) -> list[list[str]]:
    return [_collectives(flags), _collectives({**flags, **ZB_H1})]


SIX: Flags = {"global-batch-size": 6, "moe-expert-rank-capacity-factor": None}


@pytest.mark.parametrize("gradients", ["ddp", *map(slow, ["zero 1", "zero 2"])])
def test_a_step_launches_the_collectives_of_1f1b(gradients: str) -> None:
    flags: Flags = {**COMMON, **layout(pp=2, ep=2), **DIMENSIONS["gradients"][gradients], **SIX}
    for plain, split in run_on_ranks(_of_schedules, 4, flags, timeout=120):
        assert plain == split and len(plain) > 20


def _reduced_early(flags: Flags) -> str:
    """Runs with a fault, that hooks see gradients in the backward; returns how it is noticed, or "" if it is not."""
    sound = train_argv(argv_of(flags, ZB_H1), _Log().look)
    finish = weight_grads._HeldGrads.finish

    def without_hooks(held: Any, rest: Any, task: int) -> None:
        hooks, held._param._post_accumulate_grad_hooks = held._param._post_accumulate_grad_hooks, None
        try:
            finish(held, rest, task)
        finally:
            held._param._post_accumulate_grad_hooks = hooks

    try:
        with (
            patch.object(weight_grads._HeldGrads, "finish", without_hooks),
            patch.object(grad_intake, "is_deferred", lambda param: False),
        ):
            train_argv(argv_of(flags, ZB_H1), _Log().look).assert_same(sound, "reduced early")
    except (AssertionError, RuntimeError) as error:
        return str(error) or type(error).__name__
    return ""


@pytest.mark.parametrize("gradients", ["zero 1", *map(slow, ["ddp", "zero 2"])])
def test_a_reduction_before_the_weight_pass_is_noticed(gradients: str) -> None:
    flags: Flags = {**COMMON, **layout(pp=2, ep=2), **DIMENSIONS["gradients"][gradients], **SIX}
    found = run_on_ranks(_reduced_early, 4, flags, timeout=120)
    assert all(found), found


def _executed(flags: Flags) -> list[Order]:
    """Returns the passes of the last step as each stage has executed them."""
    log = _Log()
    train_argv(
        argv_of(COMMON, layout(pp=4), flags, {"global-batch-size": 8, "moe-expert-rank-capacity-factor": None}),
        log.look,
    )
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, log.steps[-1])
    return found


@pytest.mark.parametrize(("schedule", "units"), [("1f1b", 33), ("zb-h1", 27)])
def test_executed_passes_of_equal_length_leave_the_bubble_of_the_schedule(schedule: str, units: int) -> None:
    orders = run_on_ranks(_executed, 4, {"pipeline-schedule": schedule, "train-iters": 1}, timeout=120)[0]
    spans = timeline(orders, Pipeline(4))
    assert max(span.end for stage in spans for span in stage.values()) == units
    assert bubble_share(spans) == pytest.approx(1 - 24 / units)
