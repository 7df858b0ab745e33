"""Public names of data parallelism: wrappers, their settings, errors and checks. Re-exports only."""

from megatron.core.distributed.consistency import NonFiniteGradientError, check_weights_agree
from megatron.core.distributed.ddp_debug import DdpDebugError
from megatron.core.distributed.distributed_data_parallel import (
    DistributedDataParallel,
    GraphedReductions,
    build_launch_order,
)
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.iteration import CollectiveMismatchError
from megatron.core.distributed.scheduler import CollectiveScheduler
from megatron.core.distributed.torch_fsdp2 import TorchFullyShardedDataParallel
from megatron.core.distributed.torch_fsdp2_config import TorchFullyShardedDataParallelConfig

# Alias of CollectiveScheduler, which users' training loops import under this name.
LaunchOrder = CollectiveScheduler

__all__ = [
    "CollectiveMismatchError",
    "CollectiveScheduler",
    "DdpDebugError",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GraphedReductions",
    "LaunchOrder",
    "NonFiniteGradientError",
    "TorchFullyShardedDataParallel",
    "TorchFullyShardedDataParallelConfig",
    "build_launch_order",
    "check_weights_agree",
    "finalize_model_grads",
]
