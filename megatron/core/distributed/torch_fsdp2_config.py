"""TorchFullyShardedDataParallelConfig: settings of the wrapper around torch's fully_shard; no process group is here."""

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
        help="What data-parallel ranks share under --use-torch-fsdp2: all of it; other modes have flags of their own.",
    )
    reshard_after_forward: bool = config_field(
        True,
        flags=("--torch-fsdp2-no-reshard-after-forward",),
        dest="torch_fsdp2_reshard_after_forward",
        help="Keep gathered parameters from forward to backward: less is sent, more memory is held.",
    )
    forward_prefetch: int = config_field(
        0, flags=(), at_least=0, help="Layers that are gathered ahead in forward; 0: torch's own choice."
    )
    backward_prefetch: int = config_field(
        0, flags=(), at_least=0, help="Layers that are gathered ahead in backward; 0: torch's own choice, one."
    )
    cpu_offload: bool = config_field(
        False, flags=(), help="Keep shards of parameters and gradients, and the optimizer's state, on the host."
    )

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.data_parallel_sharding_strategy in _OTHER_MODES:
            raise ValueError(
                f"data_parallel_sharding_strategy is {self.data_parallel_sharding_strategy}: fully_shard shares "
                "parameters, gradients and optimizer state, optim_grads_params; for that mode "
                f"{_OTHER_MODES[self.data_parallel_sharding_strategy]}"
            )


# Settings of buckets and collectives that torch decides by itself here, each with the reason to leave it out.
_NOT_HERE = {
    "use_distributed_optimizer": "each rank has and steps a shard anyway",
    "overlap_grad_reduce": "torch reduces each unit during backward anyway",
    "overlap_param_gather": "torch gathers each unit during forward and backward anyway",
    "bucket_size": "a unit, as a transformer layer, is what is reduced together",
    "num_buckets": "a unit, as a transformer layer, is what is reduced together",
    "pad_buckets_for_high_nccl_busbw": "torch lays out what it sends",
    "average_in_collective": "torch chooses how means are taken",
    "reduce_scatter_with_fp32_accumulation": "gradients are reduced in fp32, or by torch's own collective",
    "param_name_patterns_for_fp32_local_accumulation": "shards of gradients add up in fp32 anyway",
    "overlap_param_gather_with_optimizer_step": "parameters are gathered before the module that needs them",
    "ddp_debug": "its checks are of buffers that are reduced once a step",
}


@dataclass(kw_only=True)
class TorchFullyShardedDataParallelConfig(FullyShardConfig, DistributedDataParallelConfig):
    """Settings of TorchFullyShardedDataParallel; of DistributedDataParallelConfig's, the checks of gradients and the
    type they are reduced in.
    """

    def __post_init__(self) -> None:
        DistributedDataParallelConfig.__post_init__(self)
        FullyShardConfig.__post_init__(self)
        for name, why in _NOT_HERE.items():
            if vars(self)[name]:
                raise ValueError(f"{name} is {vars(self)[name]} with use_torch_fsdp2: {why}; leave one of them out")
        if self.num_distributed_optimizer_instances > 1:
            raise ValueError(
                f"num_distributed_optimizer_instances is {self.num_distributed_optimizer_instances} with "
                "use_torch_fsdp2, whose shards are spread over all data-parallel ranks: must be 1"
            )
