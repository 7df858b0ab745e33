"""Tests overlapped gathers of weights that are not awaited by their own module's forward."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.harness import run_on_ranks

WIDTH = 5
ZERO = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
BOTH = {**ZERO, "overlap_param_gather": True}


class ReadsParts(nn.Module):
    """Weights in lists, and weights of modules that are never called, called only in training, or called only later."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(WIDTH, WIDTH) / 2) for _ in range(3)]
        self.lists = nn.ModuleList([nn.ParameterList(weights[:2]), nn.ParameterDict({"a": weights[2]})])
        self.attention = nn.MultiheadAttention(WIDTH, 1)
        self.late, self.trained = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, step):
        for weight in [*self.lists[0], self.lists[1]["a"]]:
            x = torch.tanh(x @ weight)
        x = self.attention(x, x, x)[0] + (checkpoint(self.late, x, use_reentrant=True) if step % 3 == 2 else 0.0)
        return self.trained(x) if self.training else x @ self.trained.weight.T + self.trained.bias


def train_parts(settings):
    """Returns losses of training and evaluation, using the wrapper in every allowed way in between."""
    model, losses, rank = ReadsParts(), [], dist.get_rank()
    config = ModelParallelConfig(deterministic_mode=True)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(**settings, bucket_size=1), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.05), [ddp])
    for step in range(8):
        optimizer.zero_grad()
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(7 * step + rank)).requires_grad_()
        with ddp.no_sync():
            with ddp.no_sync():
                ddp(x, step).square().mean().backward()
            ddp(x, step + 1).square().mean().backward()
        ddp(x, step).square().mean().backward()
        ddp.finish_grad_sync()
        optimizer.step()
        if step == 3:
            ddp.broadcast_params()
        if step == 5:
            ddp.wait_params(model.trained.weight)
            losses.append(model.trained.weight.sum().item())
        with torch.set_grad_enabled(step % 2 == 0):
            losses.append(ddp.eval()(x, step).square().mean().item())
        ddp.train()
    return losses


def parts_with_and_without_overlap():
    return train_parts({}) == train_parts(ZERO) == train_parts(BOTH)


@pytest.mark.slow
def test_b2_weights_that_other_modules_read_are_waited_for():
    assert all(run_on_ranks(parts_with_and_without_overlap, 3))
