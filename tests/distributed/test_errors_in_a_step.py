"""Tests TRAPS B32: after reset_iteration, a step aborted by an error anywhere, on any ranks, has no lasting effect.

The exception is an error inside the optimizer's update, which is reported and prevents further training.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core import parallel_state
from megatron.core.dist_checkpointing import model_logical_pieces
from megatron.core.distributed import (
    CollectiveMismatchError,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.bucket_group import _ParamAndGradBucketGroup as Group
from megatron.core.group_collectives import RemoteRankError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer.adam import FusedRule
from megatron.core.optimizer.clip_grads import GradStats
from tests.counts import long_count
from tests.distributed.optimizer_runs import OVERLAPS, Run
from tests.harness import run_on_ranks
from tests.unit_tests.core.optimizer.reference import microbatches, tiny_model

MODES: list[dict[str, Any]] = [{"zero1": False}, {"zero1": False, "overlap": "grads"}]
MODES += [{"zero1": True, "overlap": overlap} for overlap in OVERLAPS]
ONE, SOME, ALL = (1,), (0, 2), (0, 1, 2, 3)
# (location, ranks) of the error; the optimizer's norm is a collective.
BREAKS = [(where, who) for where in ("data", "forward", "weight's hook", "after backward") for who in (ONE, ALL)]
BREAKS += [("forward", SOME), ("norm", ALL), ("gather", ONE), ("gather", ALL)]


class InjectedError(Exception):
    """An error that a user's code might raise."""


def _raise(*unused: Any, **kwargs: Any) -> Any:
    raise InjectedError


def _break_here(run: Run, where: str) -> AbstractContextManager[Any]:
    """Returns a context in which this rank's step raises at the given location."""
    layer: Any = run.model.module[2]  # type: ignore[index]
    if where == "forward":
        return patch.object(layer, "forward", _raise)
    if where == "norm":
        return patch.object(GradStats, "norm", _raise)
    if where == "gather":
        return patch.object(Group, "launch_gathers", _raise)
    return nullcontext()


def _broken_step(run: Run, where: str, step: int) -> None:
    run.optimizer.zero_grad()
    if where == "data":
        _raise()
    hook = run.model.module[2].weight.register_hook(_raise) if where == "weight's hook" else None  # type: ignore[index]
    try:
        run.model(microbatches(step)[0]).square().mean().backward()
        if where == "after backward":
            _raise()
        finalize_model_grads([run.model])
        run.optimizer.step()
    finally:
        if hook is not None:
            hook.remove()


def _breaks_of(mode: int) -> list[tuple[str, tuple[int, ...]]]:
    """Returns half of all errors, and the other half for the next mode; all of them under `make soak`."""
    return [one for at, one in enumerate(BREAKS) if long_count(0, soak=1) or (at // 2 + at + mode) % 2 == 0]


def _survive(modes: Sequence[dict[str, Any]], instances: int) -> str:
    """Alternates aborted and good steps in each mode; returns the first error that this rank was told."""
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
    more: Any = {"num_distributed_optimizer_instances": instances}
    told = []
    for index, mode in enumerate(modes):
        with patch.dict(OVERLAPS, {name: {**flags, **more} for name, flags in OVERLAPS.items()}):
            run, plain = (Run(tiny_model(), bucket_size=1, **mode) for _ in range(2))
        assert repr(run.step(0)) == repr(plain.step(0))
        # With the last overlap, gathers are launched inside the update.
        gathers = mode["zero1"] and mode["overlap"] != "step"
        for number, (where, who) in enumerate(each for each in _breaks_of(index) if gathers or each[0] != "gather"):
            # Without overlap, gathers follow the update, which is complete.
            is_done = where == "gather" and mode["overlap"] != "params"
            told.append(_break_off(run, where, step=number, here=dist.get_rank() in who))
            if is_done:
                _broken_step(plain, "nowhere", number)
            else:
                assert told[-1] is not None and not any(buffer.grad_data.any() for buffer in run.model.all_buffers)
            assert repr(run.step(number)) == repr(plain.step(number)), (mode, where, who)
        ours, theirs = run.weights(), plain.weights()
        assert all(torch.equal(ours[name], weight) for name, weight in theirs.items()), mode
    return str(told[0])


def _break_off(run: Run, where: str, *, step: int, here: bool) -> str | None:
    """Runs a step that raises on some ranks, possibly this one; returns this rank's error message, or None."""
    try:
        with _break_here(run, where) if here else nullcontext():
            _broken_step(run, where if here else "nowhere", step)
    except (InjectedError, RemoteRankError) as error:
        run.model.reset_iteration()
        return str(error)
    return None


@pytest.mark.slow
def test_b32_a_step_broken_off_anywhere_on_any_ranks_leaves_no_trace() -> None:
    for told in run_on_ranks(_survive, 3, MODES, 1)[::2]:
        assert "rank 1 aborted the iteration: reset_iteration() was called after an error" in told


@pytest.mark.slow
def test_b32_nor_does_it_with_two_instances() -> None:
    run_on_ranks(_survive, 4, MODES[long_count(4, soak=2) :], 2)


def _break_updates() -> None:
    for mode in MODES:
        for who in (ALL, ONE):
            run = Run(tiny_model(), bucket_size=1, **mode)
            run.step(0)
            with pytest.raises(InjectedError) if dist.get_rank() in who else nullcontext():
                with patch.object(FusedRule, "update", _raise) if dist.get_rank() in who else nullcontext():
                    _broken_step(run, "nowhere", 1)
            if dist.get_rank() in who:
                run.model.reset_iteration()
                with pytest.raises(RuntimeError, match="interrupted the update .*: load a checkpoint"):
                    run.optimizer.sharded_state(model_logical_pieces(run.model))
            expected = (
                (RuntimeError, "interrupted the update of an earlier step")
                if who == ALL
                else (CollectiveMismatchError, "ranks 0, 2 launch an update of the parameters by the optimizer; rank 1")
            )
            with pytest.raises(expected[0], match=expected[1]):
                run.step(2)


@pytest.mark.slow
def test_b32_an_update_that_was_broken_off_is_told_on_all_ranks() -> None:
    run_on_ranks(_break_updates, 3)


def break_off(run: Run, where: str) -> str | None:
    """Runs a step that fails on some or all ranks; returns this rank's error message."""
    rank, told = dist.get_rank(), None
    try:
        run.optimizer.zero_grad()
        if where == "one rank has no gradient" and rank == 1:
            raise KeyError
        run.model(microbatches(77 + rank, dtype=run.dtype)[0]).square().mean().backward()
        if where == "one rank has no gradient":
            raise KeyError
        if where != "not finished":
            run.model.finish_grad_sync()
        if where == "all after finish" or (where == "one after finish" and rank == 1):
            raise KeyError
        run.optimizer.step()
    except (KeyError, RuntimeError) as error:
        told = f"{type(error).__name__}: {error}"
    # Otherwise the next step resets the iteration.
    if where != "one rank has no gradient":
        run.model.reset_iteration()
    return told


BROKEN = ("one rank has no gradient", "one after finish", "all after finish", "not finished")


def broken_steps(kinds: list[dict[str, Any]]) -> list[list[str | None]]:
    told = []
    for kind in kinds:
        run, plain = (Run(tiny_model(torch.float32), **settings) for settings in (kind, {"zero1": False}))
        for where in BROKEN:
            for step in range(2):
                assert run.step(step) == plain.step(step)
            told.append(break_off(run, where))
        assert run.step(2) == plain.step(2)
        assert all(torch.equal(*pair) for pair in zip(run.weights().values(), plain.weights().values()))
    return told


@pytest.mark.slow
def test_b32_a_step_broken_off_around_the_optimizer_leaves_no_trace() -> None:
    overlaps = [(False, "none"), (False, "grads"), (True, "step")]
    kinds = [{"zero1": zero1, "overlap": overlap, "bucket_size": 1} for zero1, overlap in overlaps]
    first, second, _ = run_on_ranks(broken_steps, 3, kinds)
    for told in (first[:4], first[4:8], first[8:]):
        assert "RemoteRankError: rank 1 aborted the iteration: reset_iteration() was called" in told[1]
        assert "optimizer.step() was called before finish_grad_sync()" in told[3]
    assert second[1] == second[2] == "KeyError: "


def _told_of_an_abort_in_the_second_stage() -> str | None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    chunk = DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(), nn.Linear(2, 2))
    chunk.zero_grad_buffer()
    chunk(torch.ones(1, 2)).sum().backward()
    if dist.get_rank() == 3:
        chunk.reset_iteration()
        return None
    try:
        chunk.finish_grad_sync()
    except RemoteRankError as error:
        return str(error)
    return None


def test_an_abort_is_told_with_the_rank_of_the_job_not_of_the_stage() -> None:
    first, second, third, fourth = run_on_ranks(_told_of_an_abort_in_the_second_stage, 4)
    assert first is second is fourth is None
    assert third is not None and third.startswith("rank 3 aborted the iteration: reset_iteration() was called")
