"""A discarded and retried step or evaluation leaves no trace; a step that always overflows ends the run."""

import os
import random
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pretrain_gpt
from megatron.core.utils import unwrap_model
from megatron.training.callbacks import Callback, CallbackList, EvaluationReport, StepReport
from megatron.training.checkpointing.rng_state import capture_rng, restore_rng
from megatron.training.run import TrainingRun
from megatron.training.step.expert_memory import ExpertMemory
from megatron.training.step.step_runner import ExpertOverflowError, RetryBatches
from megatron.training.training import run_step, train
from tests.counts import slow, soak_only
from tests.distributed.stash_runs import ROUTER, stash
from tests.distributed.tiny_runs import OVERLAPPED_SMALL_BUCKETS, comparable, started_run, state_of
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.functional_tests.expectations import assert_same_checkpoint
from tests.harness import run_on_ranks

# Steps 1 to 3, and two batches of an evaluation after step 2. Each attempt at a step or evaluation batch has a number,
# discarded attempts included: two attempts of the first step in succession, the step before a save, both batches, and
# the last step, in which rank 1 receives a signal to stop.
VOID: dict[int, Collection[int]] = {0: {1}, 1: {0}, 3: {0, 1}, 5: {1}, 7: {0}, 8: {1}, 10: {0}}
NUM_RUNS, STOPPED_AT = 12, 3
RUN: Flags = {
    "micro-batch-size": 1,
    "train-iters": STOPPED_AT + 1,
    "eval-interval": 2,
    "eval-iters": 2,
    "save-interval": 2,
    "exit-signal-handler": True,
    "hidden-dropout": 0.1,
    "attention-dropout": 0.1,
    **ROUTER,
}
LAYOUTS: dict[str, tuple[int, Flags]] = {
    "experts": (2, {"expert-model-parallel-size": 2, **OVERLAPPED_SMALL_BUCKETS}),
    # The sharded replicas of experts and of the other parameters use separate groups.
    "copies of experts": (4, {"expert-model-parallel-size": 2, "global-batch-size": 8, **OVERLAPPED_SMALL_BUCKETS}),
    "stages": (
        2,
        {
            "num-layers": 4,
            "global-batch-size": 4,
            "pipeline-model-parallel-size": 2,
            "num-virtual-stages-per-pipeline-rank": 2,
            "reset-attention-mask": True,
            "recompute-granularity": "full",
            "recompute-method": "uniform",
            "recompute-num-layers": 1,
            **OVERLAPPED_SMALL_BUCKETS,
        },
    ),
    "replicas": (2, {"bf16": True, "ddp-debug": True}),
}


class PlannedMemory:
    """Reports attempts as overflowed on the ranks that `void` lists.

    may_grow: if False, an overflow ends the run with an error.
    """

    def __init__(self, void: Mapping[int, Collection[int]], *, may_grow: bool = True) -> None:
        self.void, self.may_grow = void, may_grow
        self.number = -1
        self.log: list[str] = []

    @property
    def is_void_here(self) -> bool:
        return dist.get_rank() in self.void.get(self.number, ())

    def begin_step(self, *, num_microbatches: int, forward_only: bool) -> None:
        self.number += 1

    def overflow_flags(self) -> Tensor:
        return torch.tensor([self.is_void_here, self.is_void_here and self.number > 5], dtype=torch.float64)

    def grow_sync(self, *, iteration: int) -> str:
        if not self.may_grow:
            raise ExpertOverflowError(f"iteration {iteration}: not allowed to grow")
        self.log.append(f"grown at {iteration}")
        torch.rand(7)
        return self.log[-1]

    def end_step(self) -> None:
        self.log.append("ended")


class Script(Callback):
    """A script that draws random numbers before and while reading, empties its batches, and computes NaN if discarded.

    seen: reports of the run.
    """

    def __init__(self, memory: PlannedMemory | None) -> None:
        self.memory = memory
        self.seen: list[dict[str, Any] | EvaluationReport] = []

    def run(self, argv: list[str], act: Callable[[TrainingRun], Any]) -> Any:
        with started_run(argv, forward_step=self.forward_step) as run:
            self.state, run.steps.memory, run.callbacks = run.state, self.memory, CallbackList([self])
            (valid,) = run.valid_sets
            assert run.train_iterator is not None and valid.iterator is not None
            run.train_iterator = _drawing(run.train_iterator)
            run.valid_sets = [replace(valid, iterator=_drawing(valid.iterator))]
            return act(run)

    def forward_step(self, iterator: Iterator[Any] | None, model: nn.Module) -> tuple[Tensor, Any]:
        if model.training and self.state.iteration == STOPPED_AT - 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        factor = 1 + float(torch.rand(()))
        if iterator is not None:
            batch = next(iterator)
            iterator = iter([{name: batch.pop(name) for name in list(batch)}])
        output, loss_func = pretrain_gpt.forward_step(iterator, model)
        is_void = self.memory is not None and self.memory.is_void_here
        return output * (float("nan") if is_void else factor), loss_func

    def on_step_end(self, report: StepReport) -> None:
        self.seen.append(comparable(report))

    def on_evaluation_end(self, report: EvaluationReport) -> None:
        self.seen.append(report)


def _drawing(batches: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    for batch in batches:
        yield {**batch, "loss_mask": batch["loss_mask"] * float(torch.rand(())) * random.random()}


def _train(argv: list[str], memory: PlannedMemory | None) -> Any:
    """Returns what this rank recorded of a run, its final state, and the batch it would have read next."""
    script = Script(memory)

    def act(run: TrainingRun) -> Any:
        reason = train(run)
        assert run.train_iterator is not None
        return reason, state_of(run), next(run.train_iterator)["tokens"].tolist()

    return script.run(argv, act), script.seen


def _train_twice(argv: list[str], folder: str) -> None:
    """Compares a run without overflow with a run that discards and retries attempts."""
    memory = PlannedMemory(VOID)
    plain = _train([*argv, "--save", f"{folder}/plain"], None)
    rerun = _train([*argv, "--save", f"{folder}/rerun"], memory)
    assert plain == rerun
    assert memory.number == NUM_RUNS - 1 and memory.log.count("ended") == NUM_RUNS - len(VOID)
    assert [line for line in memory.log if line != "ended"] == [f"grown at {at}" for at in (1, 1, 2, 2, 2, 2, 3)]


# "copies of experts" combines the groups of "experts" and "replicas", which check that all ranks retry a step that
# overflows on one rank.
@pytest.mark.slow
@pytest.mark.parametrize("layout", [slow("experts"), slow("stages"), slow("replicas"), soak_only("copies of experts")])
def test_steps_that_were_void_and_ran_again_leave_no_trace(layout: str, tmp_path: Path) -> None:
    ranks, flags = LAYOUTS[layout]
    run_on_ranks(_train_twice, ranks, command_line({**read_bases()["moe"], **RUN, **flags}), str(tmp_path))
    for iteration in (2, STOPPED_AT):
        folders = [tmp_path / run / f"iter_{iteration:07d}" for run in ("plain", "rerun")]
        assert_same_checkpoint(*folders)


def _stay_void(argv: list[str], *, may_grow: bool) -> tuple[str, int]:
    """Returns the error of a run whose second step always overflows on rank 1, and the number of attempts."""
    memory = PlannedMemory({number: {1} for number in range(1, 99)}, may_grow=may_grow)

    def act(run: TrainingRun) -> str:
        with pytest.raises(ExpertOverflowError) as caught:
            train(run)
        assert run.state.iteration == run.state.consumed_train_samples / 4 == 1 and run.state.nan_iterations == 0
        with pytest.raises(AssertionError, match="no backward pass"):
            run.steps.update_sync()
        assert not any(grad.any() for chunk in run.model for _, grad in chunk.named_main_grads())  # type: ignore[operator]
        return str(caught.value)

    return Script(memory).run(argv, act), memory.number + 1


def _fail_twice(argv: list[str], folder: str) -> list[tuple[str, int]]:
    return [_stay_void([*argv, "--save", f"{folder}/{may_grow}"], may_grow=may_grow) for may_grow in (False, True)]


@pytest.mark.slow
def test_a_step_that_stays_void_ends_all_ranks_and_saves_nothing(tmp_path: Path) -> None:
    flags = {**read_bases()["moe"], **RUN, **OVERLAPPED_SMALL_BUCKETS, "save-interval": 1}
    refused, in_vain = zip(*run_on_ranks(_fail_twice, 2, command_line(flags), str(tmp_path)))
    assert refused[0] == refused[1] == ("iteration 2: not allowed to grow", 2)
    assert in_vain[0] == in_vain[1] and in_vain[0][1] == 10
    assert "iteration 2 still overflows after 8 retries (ranks with expert overflow: 1" in in_vain[0][0]
    assert [folder.name for folder in tmp_path.glob("*/iter_*")] == ["iter_0000001"] * 2


class BrokenOffError(Exception):
    """An error that a script catches during a step."""


def _break_next_pass(run: TrainingRun, where: str, error: type[BaseException]) -> None:
    """Makes the second layer's forward, or the first layer's backward, raise once."""
    first, second = unwrap_model(run.model)[0].decoder.layers

    def fail(*unused: Any) -> None:
        handle.remove()
        raise error

    handle = (
        second.register_forward_pre_hook(fail) if where == "forward" else first.mlp.router.weight.register_hook(fail)
    )


def _train_over_error(argv: list[str], where: str | None, error: type[BaseException] = BrokenOffError) -> Any:
    """Runs three steps. The second raises in its passes and is retried as the docs tell a script to do."""
    with started_run(argv) as run:
        reports = [comparable(run_step(run)[0])]
        assert run.train_iterator is not None and isinstance(run.steps.memory, ExpertMemory)
        run.train_iterator = batches = RetryBatches(run.train_iterator)
        if where is not None:
            generators = capture_rng()
            _break_next_pass(run, where, error)
            with pytest.raises(error):
                run_step(run)
            for chunk in run.model:
                chunk.reset_iteration()  # type: ignore[operator]
            batches.rewind()
            restore_rng(generators)
        reports += [comparable(run_step(run)[0]) for _ in range(2)]
        assert run.steps.memory.stash is not None
        run.steps.memory.stash.pool.check_integrity_sync()
        return reports, state_of(run)


def _train_over_errors(argv: list[str]) -> None:
    plain = _train_over_error(argv, None)
    for where, error in (("forward", BrokenOffError), ("backward", KeyboardInterrupt)):
        assert _train_over_error(argv, where, error) == plain, (where, error)


@pytest.mark.slow
def test_an_error_in_the_passes_leaves_stash_and_counts_as_they_were() -> None:
    flags = {
        **read_bases()["moe"],
        **RUN,
        "save-interval": None,
        "moe-expert-rank-capacity-factor": 3,
        **stash(1.1, page_size=4),
    }
    run_on_ranks(_train_over_errors, 1, command_line(flags))
