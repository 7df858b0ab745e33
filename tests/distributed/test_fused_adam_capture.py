"""Tests whole iterations with DistributedFusedAdam in a CUDA graph: capture and replay, on one or more ranks."""

import math
import threading
import time

import pytest
import torch
from torch import nn

from megatron.core.graphs.safety import assert_capturable
from megatron.core.graphs.tape import TapeGraphs
from megatron.core.optimizer import DistributedFusedAdam
from tests.counts import long_count
from tests.distributed.fused_adam_runs import usually, world
from tests.harness import run_on_ranks

BF16, FP32 = torch.bfloat16, torch.float32


def capturable(params, **settings):
    chosen = {"lr": torch.tensor(0.05), "weight_decay": 0.1, "bucket_cap_mb": 700 / 2**20, "capturable": True}
    return DistributedFusedAdam(params, **{**chosen, **settings})


def products(dtype):
    torch.manual_seed(2)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((7, 7), (65,), (3, 5, 7), (1,))]


def iteration(optimizer, params, factors, scaler):
    """Runs an iteration as a user writes it; all of it is captured."""
    optimizer.zero_grad()
    loss = torch.stack([(param * factor).sum().float() for param, factor in zip(params, factors)]).sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = optimizer.clip_grad_norm(2.0)
    scaler.step(optimizer)
    scaler.update()
    return norm


def new_scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)


CAPTURED = [
    (FP32, {}),
    (BF16, {}),
    (BF16, {"store_params": False}),
    (BF16, {"contiguous_grad_buffer": True, "contiguous_param_buffer": False, "grad_sync_dtype": BF16}),
    (FP32, {"adam_w_mode": False, "bias_correction": False}),
]
# Two good steps follow the first overflow, so that the scale grows; one follows the last overflow.
OVERFLOWS = {0, 3}


def captures(dtype, settings):
    """Asserts that the linter accepts the whole iteration."""
    params = products(dtype)
    optimizer, scaler = capturable(params, **settings), new_scaler()
    factors = [torch.ones_like(param) for param in params]
    # Allocations of the first step exist before the capture, as on a GPU.
    iteration(optimizer, params, factors, scaler)
    with assert_capturable() as region:
        norm = iteration(optimizer, params, factors, scaler)
        region.keep(norm, *(param.grad for param in params if param.grad is not None))


def step_count(optimizer):
    # torch's Adam, whose state dict format is used here, always corrects the bias.
    if not optimizer.param_groups[0]["bias_correction"]:
        return None
    state = optimizer.state_dict(state_dict_format="torch")
    counts = set() if state is None else {float(one["step"]) for one in state["state"].values()}
    assert len(counts) <= 1
    return counts.pop() if counts else None


def set_factors(factors, step, *, overflow):
    """Writes new values to the same memory, different on each rank. overflow: infinite on the last rank only."""
    rank, size = world()
    for factor in factors:
        factor.copy_(torch.randn(factor.shape, generator=torch.Generator().manual_seed(10 * step + rank)))
    if overflow and rank == size - 1:
        factors[1][3] = math.inf


def replays(dtype, settings):
    """Compares replays of one capture, with changing gradients, rates and scales, with an eager optimizer."""
    params, others = products(dtype), products(dtype)
    graphed = capturable(params, **settings)
    eager = DistributedFusedAdam(others, lr=0.05, weight_decay=0.1, bucket_cap_mb=700 / 2**20, **settings)
    factors, scaler, other_scaler = [torch.ones_like(param) for param in params], new_scaler(), new_scaler()
    iteration(graphed, params, factors, scaler)
    iteration(eager, others, factors, other_scaler)
    with TapeGraphs().capturing() as tape:
        captured = iteration(graphed, params, factors, scaler)
    for step in range(5):
        set_factors(factors, step, overflow=step in OVERFLOWS)
        graphed.param_groups[0]["lr"].fill_(0.1 / (step + 1))
        eager.param_groups[0]["lr"] = graphed.param_groups[0]["lr"].item()
        before = [param.detach().clone() for param in params]
        tape.replay()
        norm = iteration(eager, others, factors, other_scaler)
        torch.testing.assert_close(captured, norm, rtol=0, atol=0, equal_nan=True)
        assert all(torch.equal(a, b) for a, b in zip(params, others)), step
        assert (step in OVERFLOWS) == all(torch.equal(a, b) for a, b in zip(params, before))
        assert scaler.state_dict() == other_scaler.state_dict()
        count = step_count(graphed)
        assert count == step_count(eager)
        assert count in (None, 2 + step - len([one for one in OVERFLOWS if one <= step]))


@pytest.mark.parametrize("dtype, settings", CAPTURED, ids=str)
def test_an_iteration_with_scaling_and_clipping_can_be_captured(dtype, settings):
    captures(dtype, settings)


@pytest.mark.parametrize("dtype, settings", CAPTURED, ids=str)
def test_a_replay_follows_rates_scales_and_overflows_as_steps_by_themselves_do(dtype, settings):
    replays(dtype, settings)


def test_a_replay_of_the_update_alone_leaves_no_divisor_to_the_next_iteration():
    """Captures only the scaler's step, not backward, and compares it with an eager optimizer under overflows."""
    params, others = products(FP32), products(FP32)
    graphed, eager = capturable(params), DistributedFusedAdam(others, lr=0.05, weight_decay=0.1)
    scaler, other_scaler = new_scaler(), new_scaler()

    def take_gradients(optimizer, own, own_scaler, factor):
        optimizer.zero_grad()
        own_scaler.scale(torch.stack([(param * factor).sum() for param in own]).sum()).backward()
        optimizer.grad_sync()

    def update(optimizer, own_scaler):
        own_scaler.step(optimizer)
        own_scaler.update()

    tape = None
    for step, factor in enumerate([1.0, 0.5, math.inf, 2.0, math.inf, math.inf, 3.0, 0.1]):
        take_gradients(graphed, params, scaler, factor)
        take_gradients(eager, others, other_scaler, factor)
        update(eager, other_scaler)
        if step == 0:
            update(graphed, scaler)
        else:
            if tape is None:
                with TapeGraphs().capturing() as tape:
                    update(graphed, scaler)
            tape.replay()
        assert all(torch.equal(a, b) for a, b in zip(params, others)), step
        assert scaler.state_dict() == other_scaler.state_dict()


def on_ranks():
    # test_a_replay_follows_rates_scales_and_overflows_as_steps_by_themselves_do captures every form on one rank.
    for dtype, settings in usually([CAPTURED[0], CAPTURED[3]], soak=CAPTURED):
        captures(dtype, settings)
        replays(dtype, settings)


@pytest.mark.slow
def test_iterations_of_several_ranks_are_captured_and_replayed():
    run_on_ranks(on_ranks, long_count(2, soak=3))


def released_by_a_thread():
    """Frees memory of a region from a thread 50 ms after its end, as gloo's threads do for finished collectives."""
    held, outside, ends = [], torch.ones(3), threading.Event()

    def release():
        ends.wait()
        time.sleep(0.05)
        held.clear()

    thread = threading.Thread(target=release)
    thread.start()
    with assert_capturable():
        held.append(outside + 1)
        ends.set()
    thread.join()


def test_memory_that_gloo_has_not_released_yet_is_waited_for():
    run_on_ranks(released_by_a_thread, 1)
