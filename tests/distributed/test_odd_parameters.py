"""Parameters that few models have, in every mode of the wrappers."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.harness import run_on_ranks

OVERLAPPED = {"overlap_grad_reduce": True, "bucket_size": 8}
SHARDED = {"use_distributed_optimizer": True}
GATHERED = {**SHARDED, **OVERLAPPED, "overlap_param_gather": True}
RELEASED = {"release_gradients": True}
IN_BACKWARD = {"optimizer_in_backward": True, "optimizer_in_backward_clip": "exact"}
ZERO2 = {**SHARDED, "optimizer": "distributed_fused_adam"}
# Fields of the wrapper's configuration, and of the optimizer's.
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ddp": ({}, {}),
    "ddp, overlapped": (OVERLAPPED, {}),
    "zero1": (SHARDED, SHARDED),
    "zero1, overlapped": (GATHERED, SHARDED),
    "zero2": ({**SHARDED, "shard_gradients": True}, ZERO2),
    "zero2, overlapped": ({**GATHERED, "shard_gradients": True}, ZERO2),
    "ddp in backward": ({**RELEASED, **OVERLAPPED}, IN_BACKWARD),
    "zero1 in backward": ({**RELEASED, **GATHERED}, {**SHARDED, **IN_BACKWARD}),
}


class Net(nn.Module):
    """Two layers; with_empty: beside them parameters without elements, which take part in the loss or do not."""

    def __init__(self, *, with_empty: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        self.empty = nn.ParameterList([torch.empty(0, 4), torch.empty(2, 0), torch.empty(0)] if with_empty else [])

    def forward(self, x: Tensor) -> Tensor:
        loss = self.layers(x).square().sum()
        return loss + sum((param.sum() for param in list(self.empty)[:2]), loss.new_zeros(()))


def _trained(module: nn.Module, mode: str) -> list[Tensor]:
    """Trains two steps of two micro-batches; returns losses and parameters with elements."""
    settings, optimizing = MODES[mode]
    wrapped = DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(**settings), module)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.5, **optimizing), [wrapped])
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        with wrapped.accumulate():
            wrapped(torch.randn(4, 3, generator=generator)).backward()
        loss = wrapped(torch.randn(4, 3, generator=generator))
        loss.backward()
        wrapped.finish_grad_sync()
        optimizer.step()
        losses.append(loss.detach())
    wrapped.wait_params(list(module.parameters()))
    return [*losses, *(param.detach().clone() for param in module.parameters() if param.numel())]


def _with_and_without(mode: str) -> None:
    with_empty, without = (_trained(Net(with_empty=chosen), mode) for chosen in (True, False))
    torch.testing.assert_close(with_empty, without, rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_parameters_without_elements_change_nothing(mode: str) -> None:
    run_on_ranks(_with_and_without, 2, mode)
