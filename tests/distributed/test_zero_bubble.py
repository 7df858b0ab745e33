"""Weight gradients as passes of their own leave a training run bit-identical, and fill time in which stages wait."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import nn

import pretrain_gpt
from megatron.core.distributed import grad_intake
from megatron.core.group_collectives import gather_objects
from megatron.core.pipeline_parallel.runner import ScheduleRunner
from megatron.core.pipeline_parallel.schedule import (
    ONE_F_ONE_B,
    Action,
    ActionKind,
    Order,
    Pair,
    Pipeline,
    Schedule,
    configured_schedule,
    passes,
    pipeline_of,
    stage_orders,
)
from megatron.core.pipeline_parallel.timeline import bubble_share, timeline
from megatron.core.pipeline_placement import V_SCHEDULES
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.tensor_parallel import weight_grads
from megatron.core.tensor_parallel.weight_grads import SplitBackward
from megatron.core.transformer.moe.paged_stash.stash_order import EventKind
from megatron.core.utils import get_model_config
from megatron.training.run import TrainingRun
from megatron.training.training import run_step
from tests.counts import long_count, slow
from tests.distributed.pair_runs import PAIRS
from tests.distributed.parity import boxes_of_state, layout, put_together
from tests.distributed.stash_runs import argv_of
from tests.distributed.test_expert_overlap import COMMON, DIMENSIONS, EXPERTS, Collectives, train_argv
from tests.distributed.tiny_runs import TrainedRun, digest_of, started_run
from tests.functional_tests.case import Flags
from tests.harness import run_on_ranks
from tests.pairwise import Case, covering

SCHEDULES: dict[str, Flags] = {
    "zb-h1": {"pipeline-schedule": "zb-h1"},
    "zbv": {"pipeline-schedule": "zbv"},
    "dualpipev": {"pipeline-schedule": "dualpipev", **PAIRS},
}
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
    "schedule": list(SCHEDULES),
    "microbatches": [1, 3, 5, "changing"],
    "tied": [False, True],
}


def _is_possible(case: Case) -> bool:
    """Returns whether the program accepts a case and its results can be those of 1F1B.

    Something must be left to stash and to offload. The random state of a stage does not depend on its layers, so
    dropout differs between placements. With fewer micro-batches, dualpipev is zbv.
    """
    experts, recompute, around = case.get("experts", "static"), case.get("recompute"), case.get("around")
    if case.get("schedule") in V_SCHEDULES and case.get("dropout"):
        return False
    if case.get("schedule") == "dualpipev" and case.get("microbatches") in (1, 3):
        return False
    if "moe-paged-stash" in EXPERTS[experts] and recompute in ("full", "moe"):
        return False
    if "8 bits" in experts and around in ("adapters", "fp16"):
        return False
    return not (around == "offloading" and recompute in ("full", "some layers"))


def _sizes(name: str) -> dict[str, list[Any]]:
    """Returns the values that a layout has.

    Shared experts and pairs overlap with an exchange between several ranks. With 4 stages, a stage or chunk has one
    layer: it is not offloaded, recompute of some layers is recompute of all, and a stash needs several micro-batches.
    """
    without: dict[str, Any] = {} if name == "pp 2, ep 2" else {"shared": "overlapped", "schedule": "dualpipev"}
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
    if case["schedule"] in V_SCHEDULES:
        num_chunks = 2 * of_layout["pipeline-model-parallel-size"]
        has_two = case["around"] == "offloading" or case["recompute"] == "some layers"
        # Jitter is random, as dropout.
        flags |= {"num-layers": num_chunks * (1 + has_two), "moe-input-jitter-eps": None}
    if case["microbatches"] == "changing":
        # 5, 1 and 2 micro-batches. Thresholds count tokens, 16 a sample.
        sizes = f"0:{5 * replicas} {16 * 5 * replicas}:{replicas} {16 * 6 * replicas}:{2 * replicas}"
        return {**flags, "global-batch-size": None, "step-batch-size-schedule": sizes}
    return {**flags, "global-batch-size": replicas * case["microbatches"]}


@dataclass
class _Log:
    """The passes that a rank's runners have executed, in order, by training step.

    stage: of this rank. whole: digests of the tensors of all ranks at the end of the run, by logical name.
    """

    schedule: Schedule = ONE_F_ONE_B
    pipeline: Pipeline = Pipeline(1)
    stage: int = 0
    steps: list[list[Action | Pair]] = field(default_factory=list)
    current: list[Action | Pair] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def look(self, run: TrainingRun) -> Iterator[None]:
        self.schedule, self.stage = configured_schedule(get_model_config(run.model[0])), group_rank(run.groups.pp)
        self.pipeline = pipeline_of(self.schedule, group_size(run.groups.pp), len(run.model))
        run_step, run_action, complete = ScheduleRunner.run, ScheduleRunner._run, SplitBackward.complete
        num_completed = 0

        def begun(runner: ScheduleRunner, steps: Any) -> Any:
            of_step = list[Action | Pair]()
            self.current = of_step
            found = run_step(runner, steps)
            # An evaluation has no backward.
            if any(action.kind is ActionKind.BACKWARD for action in passes(of_step)):
                self.steps.append(of_step)
            return found

        def ran(runner: ScheduleRunner, step: Action | Pair) -> None:
            before = num_completed
            run_action(runner, step)
            assert num_completed - before == (isinstance(step, Action) and step.kind is ActionKind.WEIGHT)
            self.current.append(step)

        def completed(split: SplitBackward) -> None:
            nonlocal num_completed
            assert split.entries
            complete(split)
            num_completed += 1

        with (
            patch.object(ScheduleRunner, "run", begun),
            patch.object(ScheduleRunner, "_run", ran),
            patch.object(SplitBackward, "complete", completed),
        ):
            yield
        boxes = [box for of_rank in gather_objects(boxes_of_state(run), dist.group.WORLD) for box in of_rank]
        self.whole = {name: digest_of(tensor) for name, tensor in put_together(boxes).items()}


def _compare(case: Case) -> int:
    """Checks that the schedule changes no results, and that it is executed; returns the number of weight passes."""
    flags, of_plain, log = _flags(case), _Log(), _Log()
    plain = train_argv(argv_of(flags), of_plain.look)
    split = train_argv(argv_of(flags, SCHEDULES[case["schedule"]]), log.look)
    if log.pipeline.is_v:
        # Each rank holds other layers.
        plain.state, split.state = of_plain.whole, log.whole
    split.assert_same(plain, str(case))
    number = case["microbatches"]
    assert log.schedule.kind.value == case["schedule"]
    planned = [
        stage_orders(log.pipeline, one, log.schedule)[log.stage]
        for one in ((5, 1, 2) if number == "changing" else (number,) * 3)
    ]
    # Steps that overflow are repeated.
    assert [step for step, _ in groupby(log.steps)] == [step for step, _ in groupby(planned)], case
    return sum(action.kind is ActionKind.WEIGHT for step in log.steps for action in passes(step))


def _compare_all(cases: Sequence[Case]) -> list[int]:
    return [_compare(case) for case in cases]


DRAWS = long_count(20, soak=40)
# Covers each value on two ranks, and each pair of values under `make soak`, and runs some cases of further layouts.
CASES = list(islice(covering(_sizes("pp 2"), draws=DRAWS, allowed=_is_possible), long_count(10, soak=1000)))
FURTHER = {
    name: list(
        islice(
            covering(_sizes(name), draws=DRAWS, allowed=_is_possible),
            long_count(len(_sizes(name)["schedule"]), soak=16),
        )
    )
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


def _of_both(flags: Flags, reference: Flags, schedule: Flags) -> list[list[str]]:
    return [_collectives({**flags, **reference}), _collectives({**flags, **schedule})]


EIGHT: Flags = {"global-batch-size": 8, "moe-expert-rank-capacity-factor": None}
OF_GRADIENTS = [("zb-h1", "ddp"), *(slow("zb-h1", gradients) for gradients in ("zero 1", "zero 2"))]


@pytest.mark.parametrize(("schedule", "gradients"), OF_GRADIENTS)
def test_a_step_launches_the_collectives_of_1f1b(schedule: str, gradients: str) -> None:
    flags: Flags = {**COMMON, **layout(pp=2, ep=2), **DIMENSIONS["gradients"][gradients], **EIGHT}
    for plain, split in run_on_ranks(_of_both, 4, flags, {}, SCHEDULES[schedule], timeout=120):
        assert plain == split and len(plain) > 20


@pytest.mark.parametrize(("schedule", "gradients"), [slow("zbv", "zero 1"), slow("dualpipev", "ddp")])
def test_stages_in_a_v_launch_the_collectives_of_virtual_stages(schedule: str, gradients: str) -> None:
    flags: Flags = {**COMMON, **layout(pp=2, ep=2), **DIMENSIONS["gradients"][gradients], **EIGHT}
    by_rank = run_on_ranks(_of_both, 4, flags, layout(pp=2, vpp=2, ep=2), SCHEDULES[schedule], timeout=120)
    plain, split = (sorted(line for of_rank in found for line in of_rank) for found in zip(*by_rank))
    transfers = [[line for line in found if line.startswith(("send", "recv"))] for found in (plain, split)]
    assert [line for line in plain if line not in transfers[0]] == [line for line in split if line not in transfers[1]]
    # The last stage hands over between its chunks itself.
    assert 2 * len(transfers[0]) == 3 * len(transfers[1]) > 0


def _reduced_early(flags: Flags) -> str:
    """Runs with a fault, that hooks see gradients in the backward; returns how it is noticed, or "" if it is not."""
    sound = train_argv(argv_of(flags), _Log().look)
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
            train_argv(argv_of(flags), _Log().look).assert_same(sound, "reduced early")
    except (AssertionError, RuntimeError) as error:
        return str(error) or type(error).__name__
    return ""


@pytest.mark.parametrize(("schedule", "gradients"), [*OF_GRADIENTS, slow("zbv", "zero 1")])
def test_a_reduction_before_the_weight_pass_is_noticed(schedule: str, gradients: str) -> None:
    of_gradients = DIMENSIONS["gradients"][gradients]
    flags: Flags = {**COMMON, **layout(pp=2, ep=2), **of_gradients, **EIGHT, **SCHEDULES[schedule]}
    found = run_on_ranks(_reduced_early, 4, flags, timeout=120)
    assert all(found), found


def _executed(flags: Flags) -> tuple[Pipeline, list[Order]]:
    """Returns the pipeline and the passes of the last step as each stage has executed them."""
    log = _Log()
    train_argv(argv_of(COMMON, {"train-iters": 1, "moe-expert-rank-capacity-factor": None}, flags), log.look)
    by_stage = dict(gather_objects((log.stage, log.steps[-1]), dist.group.WORLD))
    return log.pipeline, [by_stage[stage] for stage in range(log.pipeline.num_stages)]


EXECUTED: list[tuple[Flags, int, int]] = [
    ({**layout(pp=4), "global-batch-size": 8}, 33, 24),
    ({**layout(pp=4), "global-batch-size": 8, **SCHEDULES["zb-h1"]}, 27, 24),
    # A chunk is half of a stage, so times are twice as long.
    ({**layout(pp=4), "num-layers": 8, "global-batch-size": 8, **SCHEDULES["zbv"]}, 51, 48),
    ({**layout(pp=2, ep=2), "global-batch-size": 16, **SCHEDULES["dualpipev"]}, 50, 48),
]


@pytest.mark.parametrize(("flags", "units", "busy"), EXECUTED, ids=["1f1b", "zb-h1", "zbv", "dualpipev"])
def test_executed_passes_of_equal_length_leave_the_bubble_of_the_schedule(flags: Flags, units: int, busy: int) -> None:
    pipeline, orders = run_on_ranks(_executed, 4, flags, timeout=120)[0]
    spans = timeline(orders, pipeline)
    assert max(span.end for stage in spans for span in stage.values()) == units
    assert bubble_share(spans) == pytest.approx(1 - busy / units)


def _with_frozen_fc1(**position: Any) -> nn.Module:
    model = pretrain_gpt.model_provider(**position)
    for name, param in model.named_parameters():
        param.requires_grad_(not name.endswith("experts.weight1"))
    return model


def _beside_frozen_fc1(schedule: Flags, kind: str) -> tuple[list[Any], int]:
    """Returns the steps, and the number of weight passes that the stash expects."""
    trained = TrainedRun()
    argv = argv_of(COMMON, layout(pp=2), EXPERTS[kind], {"global-batch-size": 5, "train-iters": 2}, schedule)
    with started_run(argv, model_provider=_with_frozen_fc1) as run:
        trained.train(run)
        assert run.expert_memory is not None and run.expert_memory.stash is not None
        order = run.expert_memory.stash.order
        assert not order.departed
        return trained.steps, sum(event.kind is EventKind.WEIGHT for event in order.events)


@pytest.mark.parametrize("kind", ["pages", slow("copies")])
def test_layers_whose_weights_do_not_read_x_release_it_in_backward(kind: str) -> None:
    plain, split = (run_on_ranks(_beside_frozen_fc1, 2, flags, kind, timeout=60) for flags in ({}, SCHEDULES["zb-h1"]))
    assert split == plain and all(num_weights == 0 for _, num_weights in split)
