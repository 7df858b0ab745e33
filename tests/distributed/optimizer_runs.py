"""Trains a small model with any optimizer, sharded or not, and any overlap of its collectives. Holds no tests."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import model_logical_pieces, model_sharded_tensors
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.core.optimizer.reference import microbatches

OVERLAPS: dict[str, dict[str, bool]] = {
    "none": {},
    "grads": {"overlap_grad_reduce": True},
    "params": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "step": {
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "overlap_param_gather_with_optimizer_step": True,
    },
}
PRECISE = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp16"}


class Run:
    """Trains a small model.

    on_device: uses the optimizer's device step. settings: fields of OptimizerConfig.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        zero1: bool,
        zero2: bool = False,
        bucket_size: int | None = None,
        overlap: str = "none",
        on_device: bool = False,
        **settings: Any,
    ) -> None:
        self.on_device = on_device
        self.dtype = next(model.parameters()).dtype
        fp32_grads = settings.pop("grad_reduce_in_fp32", True)
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=zero1,
            shard_gradients=zero2,
            bucket_size=bucket_size,
            grad_reduce_in_fp32=fp32_grads,
            **OVERLAPS[overlap],
        )
        self.model = DistributedDataParallel(ModelParallelConfig(deterministic_mode=True), ddp_config, model)
        precision = {torch.bfloat16: {"bf16": True}, torch.float16: {"fp16": True}}.get(self.dtype, {})
        if zero2:
            settings = {"optimizer": "distributed_fused_adam", **settings}
        config = OptimizerConfig(**{"lr": 0.01, "clip_grad": 0.05, "deterministic_mode": True, **precision, **settings})
        self.optimizer: MegatronOptimizer = get_megatron_optimizer(config, [self.model])

    def step(self, step: int, factor: float = 1.0) -> tuple[Any, ...]:
        """Runs a training step and returns its report. factor: multiplies this rank's inputs."""
        self.optimizer.zero_grad()
        (x,) = microbatches(10 * step + dist.get_rank(), dtype=self.dtype)
        loss = self.model(x * factor).float().square().mean()
        self.optimizer.scale_loss(loss).backward()
        finalize_model_grads([self.model])
        report = self._step_on_device() if self.on_device else self.optimizer.step()
        return loss.item(), *report, float(self.optimizer.get_loss_scale()), self.optimizer.params_norm()

    def _step_on_device(self) -> tuple[bool, float, float | None]:
        self.model.launch_order.step()
        self.optimizer.prepare_device_step()
        return self.optimizer.settle_step_sync(self.optimizer.step_on_device())

    def weights(self) -> dict[str, torch.Tensor]:
        """Gathers all parameters and returns copies by name."""
        self.model.start_param_sync(force_sync=True)
        return {name: p.detach().clone() for name, p in self.model.module.named_parameters()}

    def tensors(self) -> list[dist_checkpointing.ShardedTensor]:
        """Returns the tensors of a checkpoint: weights and optimizer state."""
        pieces = model_logical_pieces(self.model)
        return model_sharded_tensors(self.model) + self.optimizer.sharded_state(pieces)
