"""Tests that torch.set_default_dtype changes no result of a training step."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import DistributedFusedAdam, OptimizerConfig, get_megatron_optimizer
from tests.harness import run_on_ranks

STEPS = 3
FP16 = {"fp16": True, "initial_loss_scale": 2.0**24, "hysteresis": 1}  # the first steps overflow
WRAPPED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "replicas": ({}, {}),
    "replicas in fp16": ({"grad_reduce_in_fp32": True}, FP16),
    "shards": ({"use_distributed_optimizer": True}, {"use_distributed_optimizer": True}),
    "gradient shards": (
        {"use_distributed_optimizer": True, "shard_gradients": True},
        {"use_distributed_optimizer": True, "optimizer": "distributed_fused_adam"},
    ),
    "updates in backward": (
        {"release_gradients": True},
        {"optimizer_in_backward": True, "optimizer_in_backward_clip": "exact"},
    ),
    "few bits": (
        {"use_distributed_optimizer": True},
        {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"},
    ),
    "momentum": ({}, {"optimizer": "sgd"}),
}


def _net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7, dtype=torch.float32), nn.Tanh(), nn.Linear(7, 2, dtype=torch.float32))


def _inputs(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, 5, generator=generator, dtype=torch.float32)


def _wrapped(settings: dict[str, Any], optimizing: dict[str, Any]) -> list[Tensor]:
    net = _net().half() if optimizing.get("fp16") else _net()
    wrapped = DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(**settings), net)
    config = OptimizerConfig(lr=0.05, clip_grad=0.1, log_num_zeros_in_grad=True, **optimizing)
    optimizer = get_megatron_optimizer(config, [wrapped])
    reports = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = wrapped(_inputs(step).to(next(net.parameters()).dtype)).float().square().sum()
        optimizer.scale_loss(loss).backward()
        wrapped.finish_grad_sync()
        _, norm, zeros = optimizer.step()
        reports.append(torch.tensor([norm or 0.0, zeros or 0.0], dtype=torch.float64))
    return [*reports, *(param.detach().clone() for param in net.parameters())]


def _fused_adam() -> list[Tensor]:
    net = _net()
    optimizer = DistributedFusedAdam(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(net(_inputs(step)).square().sum() * (float("inf") if step == 1 else 1.0)).backward()
        optimizer.unscale_grads(inv_scale=torch.tensor(0.5))
        optimizer.clip_grad_norm(0.1)
        scaler.step(optimizer)
        scaler.update()
    again = DistributedFusedAdam(_net().parameters(), lr=0.05)
    again.load_state_dict(optimizer.state_dict())
    # Only rank 0 returns a state.
    states = (again.state_dict(state_dict_format="torch") or {"state": {}})["state"]
    moments = [value for state in states.values() for value in state.values()]
    return [*(param.detach().clone() for param in net.parameters()), *moments]


def _numbers(dtype: torch.dtype) -> dict[str, list[Tensor]]:
    torch.set_default_dtype(dtype)
    numbers = {name: _wrapped(*settings) for name, settings in WRAPPED.items()}
    return numbers | {"fused Adam": _fused_adam()}


@pytest.fixture(scope="module")
def usual() -> list[dict[str, list[Tensor]]]:
    return run_on_ranks(_numbers, 2, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_training_has_the_same_bits_under_any_default_dtype(
    dtype: torch.dtype, usual: list[dict[str, list[Tensor]]]
) -> None:
    for found, expected in zip(run_on_ranks(_numbers, 2, dtype), usual, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
