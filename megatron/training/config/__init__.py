"""Defines the settings of the training program as dataclasses from which flags are generated.

Settings of the model, the optimizer and the data are defined in megatron/core, next to the code that uses them.
"""

from megatron.training.config.checkpoint import CONTINUE_RUN, CheckpointConfig
from megatron.training.config.distributed import (
    DistributedConfig,
    GradientReductionConfig,
    LaunchConfig,
    ShardedParametersConfig,
    VirtualStagesConfig,
)
from megatron.training.config.logging import GarbageCollectionConfig, LoggingConfig, ProfilingConfig
from megatron.training.config.run_config import RunConfig, areas_with_flags
from megatron.training.config.training import (
    BatchScheduleConfig,
    CommandLineConfig,
    DryRunConfig,
    FaultConfig,
    TrainingConfig,
    planned_samples,
)

__all__ = [
    "CONTINUE_RUN",
    "BatchScheduleConfig",
    "CheckpointConfig",
    "CommandLineConfig",
    "DistributedConfig",
    "DryRunConfig",
    "FaultConfig",
    "GarbageCollectionConfig",
    "GradientReductionConfig",
    "LaunchConfig",
    "LoggingConfig",
    "ProfilingConfig",
    "RunConfig",
    "ShardedParametersConfig",
    "TrainingConfig",
    "VirtualStagesConfig",
    "areas_with_flags",
    "planned_samples",
]
