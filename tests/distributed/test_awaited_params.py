"""Tests reads of DistributedFusedAdam's parameters between a step and their gather, with overlap_param_sync."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.optimizer import DistributedFusedAdam
from tests.distributed.fused_adam_runs import cap
from tests.harness import run_on_ranks

# Reads that copies of weights, logging and hand-written layers perform.
READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm": lambda param: param.norm(),
    "detach": lambda param: param.detach(),
    "data": lambda param: param.data,
    "deepcopy": copy.deepcopy,
    "tolist": lambda param: param.tolist(),
    "numpy": lambda param: param.numpy(),
    "index": lambda param: param[0],
    "sum of two": lambda param: param + 1,
    "as an argument": lambda param: torch.nn.functional.linear(torch.ones(1, 5), param),
    "a list": lambda param: torch.stack([param, param]),
    "another type": lambda param: param.type(torch.float64),
    "address": lambda param: param.data_ptr(),
    "copy_": lambda param: param.copy_(torch.zeros(6, 5)),
}


def _net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def _loss(net: nn.Module, step: int) -> Tensor:
    return net(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().mean()


def _reads_raise_until_the_gather() -> None:
    net, plain = _net(), _net()
    # Buckets that split parameters, so that a parameter is gathered in parts.
    optimizer = DistributedFusedAdam(net.parameters(), lr=0.1, overlap_param_sync=True, bucket_cap_mb=cap(128))
    expected = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.0, fused=True)
    weight = net[0].weight
    waits: list[Callable[[], Any]] = [
        lambda: optimizer.wait_params([weight]),
        optimizer.param_sync,
        net.state_dict,
        lambda: net(torch.ones(1, 5)),
    ]
    for step, wait in enumerate(waits):
        for module, steps in ((net, optimizer), (plain, expected)):
            steps.zero_grad()
            _loss(module, step).backward()
            steps.step()
        for name, read in READS.items():
            with pytest.raises(RuntimeError, match="wait_params|param_sync"):
                pytest.fail(f"{name} gave {read(weight)}")
        # Attributes that do not depend on values remain readable.
        assert weight.shape == (6, 5) and weight.dtype == torch.float32 and weight.requires_grad and weight.is_leaf
        assert torch.zeros_like(weight).shape == weight.new_ones(6, 5).shape == (6, 5)
        assert torch.is_floating_point(weight) and "wait_params" in repr(weight)
        assert weight.numel() == 30 and weight.stride() == (5, 1) and isinstance(weight, nn.Parameter)
        wait()
        for read in READS.values():
            if read is not READS["copy_"] and read is not READS["numpy"]:
                read(weight)
        torch.testing.assert_close(weight, plain[0].weight, rtol=0, atol=1e-6)
    optimizer.wait_params(net.parameters())
    assert {type(param) for param in net.parameters()} == {nn.Parameter}


def test_reads_between_step_and_gather_raise() -> None:
    run_on_ranks(_reads_raise_until_the_gather, 2)


def test_one_rank_has_new_values_at_once() -> None:
    net = _net()
    optimizer = DistributedFusedAdam(net.parameters(), lr=0.1, overlap_param_sync=True)
    _loss(net, 0).backward()
    optimizer.step()
    before = _net()[0].weight
    assert not torch.equal(net[0].weight, before) and torch.equal(copy.deepcopy(net)[0].weight, net[0].weight)


def _compiled() -> None:
    trained = []
    for compiled in (False, True):
        net = _net()
        called = torch.compile(net, backend="eager") if compiled else net
        optimizer = DistributedFusedAdam(net.parameters(), lr=0.1, overlap_param_sync=True, bucket_cap_mb=cap(128))
        for step in range(3):
            optimizer.zero_grad()
            _loss(called, step).backward()
            optimizer.step()
        optimizer.param_sync()
        trained.append([param.detach() for param in net.parameters()])
    torch.testing.assert_close(*trained, rtol=0, atol=0)


def test_compiled_modules_wait_for_their_parameters() -> None:
    run_on_ranks(_compiled, 2)
