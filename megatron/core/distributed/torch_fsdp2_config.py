"""TorchFullyShardedDataParallelConfig: settings of the wrapper around torch's fully_shard, without process groups."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig

_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
# The flags that select the modes of the other strategies.
_OTHER_MODES = {
    "no_shard": "leave out --use-torch-fsdp2",
    "optim": "leave out --use-torch-fsdp2 and give --use-distributed-optimizer",
    "optim_grads": "leave out --use-torch-fsdp2 and give --optimizer distributed_fused_adam",
}


@dataclass(kw_only=True)
class FullyShardConfig:
    """Settings of memory and communication for torch's fully_shard."""

    cli_group: ClassVar[str] = "data parallelism"

    data_parallel_sharding_strategy: str = config_field(
        "optim_grads_params",
        choices=_STRATEGIES,
        help="Sharding done by --use-torch-fsdp2, which is always optim_grads_params; other modes have separate flags.",
    )
    reshard_after_forward: bool | int = config_field(
        True,
        flags=("--torch-fsdp2-no-reshard-after-forward",),
        dest="torch_fsdp2_reshard_after_forward",
        at_least=1,
        help="Keep parameters gathered from forward to backward: less communication, more memory.",
    )
    forward_prefetch: int = config_field(
        0, flags=(), at_least=0, help="Layers to gather ahead in forward; 0 means torch's default."
    )
    backward_prefetch: int = config_field(
        0, flags=(), at_least=0, help="Layers to gather ahead in backward; 0 means torch's default of one."
    )
    cpu_offload: bool = config_field(
        False, flags=(), help="Keep shards of parameters and gradients, and the optimizer state, on the host."
    )

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.data_parallel_sharding_strategy in _OTHER_MODES:
            raise ValueError(
                f"data_parallel_sharding_strategy is {self.data_parallel_sharding_strategy}: must be "
                "optim_grads_params with fully_shard; for that mode "
                f"{_OTHER_MODES[self.data_parallel_sharding_strategy]}"
            )


# Settings of buckets and collectives that have no effect with fully_shard, each with the reason.
_NOT_HERE = {
    "use_distributed_optimizer": "each rank stores and updates only its shard anyway",
    "shard_gradients": "each rank stores only its shard of gradients anyway",
    "overlap_grad_reduce": "torch reduces each unit during backward anyway",
    "overlap_param_gather": "torch gathers each unit during forward and backward anyway",
    "bucket_size": "gradients are reduced by units, such as transformer layers",
    "num_buckets": "gradients are reduced by units, such as transformer layers",
    "pad_buckets_for_high_nccl_busbw": "torch chooses the layout of its collectives",
    "average_in_collective": "torch chooses how gradients are averaged",
    "reduce_scatter_with_fp32_accumulation": "gradients are reduced in fp32, or by torch's own collective",
    "param_name_patterns_for_fp32_local_accumulation": "shards of gradients accumulate in fp32 anyway",
    "overlap_param_gather_with_optimizer_step": "parameters are gathered before the module that needs them",
    "ddp_debug": "it only supports buffers that are reduced once per step",
}


@dataclass(kw_only=True)
class TorchFullyShardedDataParallelConfig(FullyShardConfig, DistributedDataParallelConfig):
    """Settings of TorchFullyShardedDataParallel.

    Only the fields of DistributedDataParallelConfig for gradient checks, the reduction dtype and the release of
    gradients have an effect; others are rejected or ignored.
    """

    def __post_init__(self) -> None:
        validate_fields(self)
        # Before other checks, because DistributedDataParallelConfig may ask for settings that are rejected here.
        self._refuse_settings_of_buckets()
        DistributedDataParallelConfig.__post_init__(self)
        FullyShardConfig.__post_init__(self)

    def _refuse_settings_of_buckets(self) -> None:
        problems = [
            f"TorchFullyShardedDataParallelConfig.{name} is {vars(self)[name]} with use_torch_fsdp2: {why}; do not "
            "set it"
            for name, why in _NOT_HERE.items()
            if vars(self)[name]
        ]
        if self.num_distributed_optimizer_instances > 1:
            problems.append(
                "TorchFullyShardedDataParallelConfig.num_distributed_optimizer_instances is "
                f"{self.num_distributed_optimizer_instances} with use_torch_fsdp2, which shards over all data-parallel "
                "ranks: must be 1"
            )
        if problems:
            raise ValueError("\n".join(problems))
