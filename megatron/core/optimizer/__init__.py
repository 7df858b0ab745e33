"""The public names of the optimizers, under which scripts written for Megatron import them."""

from megatron.core.optimizer.builder import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.distributed_fused_adam import DistributedFusedAdam
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import ParamGroupOverride, ParamKey

__all__ = [
    "ChainedOptimizer",
    "ConstantGradScaler",
    "DistributedFusedAdam",
    "DistributedOptimizer",
    "DynamicGradScaler",
    "FP32Optimizer",
    "Float16OptimizerWithFloat16Params",
    "MegatronOptimizer",
    "OptimizerConfig",
    "ParamGroupOverride",
    "ParamKey",
    "get_megatron_optimizer",
]
