"""Tests errors on one rank: the other ranks are told, and all restart bitwise equal to a run without the error."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.group_collectives import RemoteRankError
from megatron.core.optimizer import DistributedFusedAdam
from tests.counts import long_count, soak_only
from tests.distributed.fused_adam_runs import ODD, Case, Run, cap, world
from tests.harness import run_on_ranks

SMALL = {"bucket_cap_mb": cap(700)}
EVERY = (
    SMALL,
    {**SMALL, "overlap_param_sync": True, "debug": True},
    {**SMALL, "overlap_grad_sync": False},
    {**SMALL, "contiguous_grad_buffer": True},
)


class Failing(RuntimeError):
    pass


def fail(*unused):
    raise Failing


def fail_at(run, *, number, step):
    """Runs a backward in which the gradient hook of a parameter raises."""
    handle = list(run.model.parameters())[number].register_hook(fail)
    with pytest.raises(Failing):
        run.backward(step)
    handle.remove()


def fail_in_forward(run, step):
    handle = run.model.products[2].register_forward_pre_hook(fail)
    with pytest.raises(Failing):
        run.backward(step)
    handle.remove()


def _behind_a_registration(settings: dict[str, Any], registers: str) -> None:
    """Resets on the last rank after a registration of parameters behind the gradients' norm."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])
    first, last = list(model[:2].parameters()), list(model[2].parameters())
    optimizer, x = DistributedFusedAdam(first, lr=0.1, **settings), torch.ones(2, 6)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.grad_norm()
    optimizer.add_param_group({"params": last})
    if registers == "init_params":
        optimizer.init_params(last)
    else:
        optimizer.state_dict()
    if dist.get_rank() == dist.get_world_size() - 1:
        optimizer.reset_iteration()
    else:
        with pytest.raises(RemoteRankError):
            optimizer.step()
        optimizer.reset_iteration()
    model(x).square().mean().backward()
    optimizer.step()
    flat = torch.cat([param.detach().flatten() for param in model.parameters()])
    sums = flat.clone()
    dist.all_reduce(sums)
    assert torch.equal(sums, flat * dist.get_world_size())


@pytest.mark.parametrize("registers", ["init_params", "state_dict"])
def test_an_error_behind_a_registration_reaches_the_other_ranks(registers: str) -> None:
    run_on_ranks(_behind_a_registration, 2, SMALL, registers, timeout=60)


# Where the last rank's iteration fails.
FAILURES = {
    "in forward": fail_in_forward,
    "at the first gradient": lambda run, step: fail_at(run, number=-1, step=step),
    "late in backward": lambda run, step: fail_at(run, number=1, step=step),
    "behind backward": lambda run, step: run.backward(step),
}
# The next calls of the other ranks.
CALLS = (
    lambda optimizer: optimizer.step(),
    lambda optimizer: optimizer.clip_grad_norm(1.0),
    lambda optimizer: optimizer.grad_sync(),
)


def break_off(run, failure, *, call, step):
    """Runs an iteration that only the last rank aborts."""
    rank, size = world()
    run.optimizer.zero_grad()
    if rank == size - 1:
        failure(run, step)
        run.optimizer.reset_iteration()
        return
    run.backward(step)
    with pytest.raises(RemoteRankError, match=rf"rank {size - 1} .* reset_iteration\(\) was called after an error"):
        call(run.optimizer)
    with pytest.raises(RuntimeError, match=r"was aborted: call reset_iteration\(\) or zero_grad\(\) first"):
        run.optimizer.step()
    run.optimizer.reset_iteration()


def errors_of_one_rank(name):
    failure, calls, steps = FAILURES[name], itertools.cycle(CALLS), long_count(2, soak=4)
    for settings in EVERY:
        run = Run(Case(settings, shapes=tuple(ODD)))
        # The first failure occurs before the optimizer initializes its parameters.
        for step in range(steps):
            break_off(run, failure, call=next(calls), step=7 + step)
            run.step(step)
        run.check(steps)


# With three ranks, a rank other than the first is also told of the error.
ON_RANKS = {"in forward": 3, "at the first gradient": 2, "late in backward": 3, "behind backward": 2}


@pytest.mark.parametrize(
    ("name", "ranks"), [*ON_RANKS.items(), *(soak_only(name, 5 - ranks) for name, ranks in ON_RANKS.items())]
)
def test_b32_after_an_error_of_one_rank_reset_iteration_begins_anew_on_all(name, ranks):
    run_on_ranks(errors_of_one_rank, ranks, name, timeout=60)


def errors_in_several_backwards():
    """Aborts iterations of three backwards: the first iteration, and one that adds to the previous step's gradients."""
    rank, size = world()
    run = Run(Case(SMALL, shapes=tuple(ODD), microbatches=3))
    for step in range(2):
        if rank == size - 1:
            fail_at(run, number=1, step=step)
            run.optimizer.reset_iteration(num_backwards=3)
        else:
            run.backward(step)
            with pytest.raises(RemoteRankError):
                run.optimizer.step()
            run.optimizer.reset_iteration(num_backwards=3)
        run.step(step)
    run.check(2)


def test_an_iteration_of_several_backwards_is_broken_off_where_their_number_is_told():
    run_on_ranks(errors_in_several_backwards, 2, timeout=60)


def errors_before_gradients_by_hand():
    rank, _ = world()
    run = Run(Case(SMALL, shapes=tuple(ODD)))
    params = list(run.model.parameters())
    for step in range(2):
        if rank == 0:
            run.optimizer.reset_iteration(num_backwards=0)
        else:
            for param in params:
                param.grad = torch.ones_like(param)
            with pytest.raises(RemoteRankError):
                run.optimizer.grad_norm()
            run.optimizer.reset_iteration(num_backwards=0)
        assert all(param.grad is None for param in params)
        run.step(step)
    run.check(2)


def test_without_a_backward_gradients_set_by_hand_are_dropped():
    run_on_ranks(errors_before_gradients_by_hand, 2, timeout=60)


def errors_of_all_ranks():
    run = Run(Case(SMALL, shapes=tuple(ODD)))
    for step, failure in enumerate(FAILURES.values()):
        failure(run, step)
        run.optimizer.reset_iteration()
        run.step(step)
    run.check(4)


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_may_call_reset_iteration(ranks):
    run_on_ranks(errors_of_all_ranks, ranks, timeout=60)
