"""get_megatron_optimizer: from settings and wrapped model chunks to an optimizer; re-exports the names users know."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.plain_data_parallel import PlainDataParallel
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, GradScaler
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_runs import ParamRun, build_runs

__all__ = [
    "ConstantGradScaler",
    "DynamicGradScaler",
    "FP32Optimizer",
    "Float16OptimizerWithFloat16Params",
    "MegatronOptimizer",
    "OptimizerConfig",
    "get_megatron_optimizer",
]


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    *,
    grad_stats_group: dist.ProcessGroup | None = None,
) -> MegatronOptimizer:
    """Builds the optimizer of chunks that are on their device, in their dtype and wrapped for data parallelism.

    The parameters that require grad move into flat storage. grad_stats_group: ranks that hold other parameters
    (model parallel), for norm and overflow; None for this rank alone.
    """
    if config.lr is None:
        raise ValueError("OptimizerConfig.lr is None: a learning rate must be given (--lr)")
    buffers = [buffer for chunk in model_chunks for buffer in _wrapped(chunk).grad_buffers]
    runs = build_runs(buffers)
    # By the settings, not by looking at dtypes: an fp32 router in a bf16 model changes nothing.
    low_precision = config.fp16 or config.bf16
    return (Float16OptimizerWithFloat16Params if low_precision else FP32Optimizer)(
        _torch_optimizer(config, runs),
        config,
        runs=runs,
        grad_buffers=buffers,
        grad_scaler=_grad_scaler(config),
        grad_stats_group=grad_stats_group,
    )


def _wrapped(chunk: nn.Module) -> PlainDataParallel:
    if not isinstance(chunk, PlainDataParallel):
        raise ValueError(f"model chunk is a {type(chunk).__name__}: must be wrapped in PlainDataParallel")
    return chunk


def _torch_optimizer(config: OptimizerConfig, runs: list[ParamRun]) -> torch.optim.Optimizer:
    assert config.lr is not None
    # Both groups always, so that a schedule and a log line find them also in a model without, say, biases.
    groups = [_param_group(config, runs, decays=True), _param_group(config, runs, decays=False)]
    if config.optimizer == "sgd":
        # Its decay is added to the gradient, as in Megatron; only Adam decays apart from it.
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum, fused=True)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)


def _param_group(config: OptimizerConfig, runs: list[ParamRun], *, decays: bool) -> dict[str, Any]:
    return {
        "params": [run.main for run in runs if run.decays == decays],
        "weight_decay": config.weight_decay if decays else 0.0,
        # The schedule multiplies by these, under the names Megatron's groups have.
        "wd_mult": 1.0 if decays else 0.0,
        "lr_mult": 1.0,
    }


def _grad_scaler(config: OptimizerConfig) -> GradScaler | None:
    if not config.fp16:
        return None
    # Only fp16 has too few exponents for gradients; bf16 has those of fp32.
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale)
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        # Powers of two, which scale without rounding.
        growth_factor=2.0,
        backoff_factor=0.5,
        # A float on the command line, for Megatron's sake.
        growth_interval=int(config.loss_scale_window),
        hysteresis=config.hysteresis,
    )
