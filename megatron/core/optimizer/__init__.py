"""Public names of the optimizers, as imported by scripts written for Megatron."""

from megatron.core.optimizer.builder import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.distributed_fused_adam import DistributedFusedAdam
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
    MixedPrecisionOptimizer,
    ProxyDict,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey, ParamPredicate, ParamWithNamePredicate
from megatron.core.optimizer.param_groups import ParamGroupOverride, get_standard_config_overrides

__all__ = [
    "ChainedOptimizer",
    "ConstantGradScaler",
    "DistributedFusedAdam",
    "DistributedOptimizer",
    "DynamicGradScaler",
    "FP32Optimizer",
    "Float16OptimizerWithFloat16Params",
    "MegatronGradScaler",
    "MegatronOptimizer",
    "MixedPrecisionOptimizer",
    "OptimizerConfig",
    "ParamGroupOverride",
    "ParamKey",
    "ParamPredicate",
    "ParamWithNamePredicate",
    "ProxyDict",
    "get_megatron_optimizer",
    "get_standard_config_overrides",
]
