"""Trains a small custom module with the library's wrappers and optimizers, in the case named on the command line."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
)
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

sys.path.insert(0, str(Path(__file__).resolve().parent))

from step_log import Network, batch, log_step, start  # type: ignore[import-not-found]

STEPS, MICROBATCHES = 5, 2


def _ddp(**settings: Any) -> Callable[[nn.Module], Any]:
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=500, **settings)
    return lambda model: DistributedDataParallel(ModelParallelConfig(deterministic_mode=True), config, model)


def _fsdp2(**settings: Any) -> Callable[[nn.Module], Any]:
    config = TorchFullyShardedDataParallelConfig(grad_reduce_in_fp32=True, **settings)
    return lambda model: TorchFullyShardedDataParallel(ModelParallelConfig(), config, model)


ADAM = {"lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.5}
CASES: dict[str, tuple[Callable[[nn.Module], Any], dict[str, Any]]] = {
    "ddp": (_ddp(), {}),
    "zero1": (_ddp(use_distributed_optimizer=True), {"use_distributed_optimizer": True}),
    "zero2": (_ddp(use_distributed_optimizer=True, shard_gradients=True), {"optimizer": "distributed_fused_adam"}),
    "fsdp2": (_fsdp2(), {}),
    "fsdp2_offload": (_fsdp2(cpu_offload=True), {}),
}


def main(name: str) -> None:
    """Trains the case and logs the losses, gradient norm and parameters of each step."""
    wrap, settings = CASES[name]
    rank, _ = start()
    parallel_state.initialize_model_parallel()
    torch.manual_seed(1234)
    model = wrap(Network())
    optimizer = get_megatron_optimizer(OptimizerConfig(**{**ADAM, **settings}), [model])
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        model.zero_grad_buffer()
        losses = backward(model, step=step, rank=rank)
        model.finish_grad_sync()
        _, grad_norm, _ = optimizer.step()
        log_step(step, losses, params=model.parameters(), grad_norm=repr(float(grad_norm)))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def backward(model: Any, *, step: int, rank: int) -> list[Tensor]:
    """Runs forward and backward for every microbatch of a step. Gradients are reduced in the last one.

    model: the wrapped model. Returns the losses, each [] fp32.
    """
    losses = []
    for number in range(MICROBATCHES):
        pictures, labels = batch(step, rank, number=number)
        if number < MICROBATCHES - 1:
            with model.no_sync():
                losses.append(_backward(model, pictures, labels=labels))
        else:
            losses.append(_backward(model, pictures, labels=labels))
    return losses


def _backward(model: nn.Module, pictures: Tensor, *, labels: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(pictures), labels) / MICROBATCHES
    loss.backward()
    return loss.detach()


if __name__ == "__main__":
    main(sys.argv[1])
