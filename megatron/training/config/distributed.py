"""Defines settings of a run's processes: virtual pipeline stages, process groups, and data parallelism."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields


@dataclass(kw_only=True)
class VirtualStagesConfig:
    """Number of virtual stages per pipeline stage, given directly or as a number of layers."""

    cli_group: ClassVar[str] = "parallel layout"

    num_layers_per_virtual_pipeline_stage: int | None = config_field(
        None, help="Layers per virtual stage of a pipeline stage; unset: no virtual stages.", at_least=1
    )
    num_virtual_stages_per_pipeline_rank: int | None = config_field(
        None, help="Virtual stages per pipeline stage; unset: 1.", at_least=1
    )

    def __post_init__(self) -> None:
        validate_fields(self)
        layers, stages = self.num_layers_per_virtual_pipeline_stage, self.num_virtual_stages_per_pipeline_rank
        if layers is not None and stages is not None:
            raise ValueError(
                f"VirtualStagesConfig.num_layers_per_virtual_pipeline_stage is {layers} and "
                f"num_virtual_stages_per_pipeline_rank is {stages}: give one of them"
            )


@dataclass(kw_only=True)
class DistributedConfig:
    """Backend, timeout and order of the processes of a run."""

    cli_group: ClassVar[str] = "distributed init"

    distributed_backend: str | None = config_field(
        None, choices=("nccl", "gloo"), help="Communication library; unset: nccl with GPUs, gloo without."
    )
    distributed_timeout_minutes: int = config_field(
        10, help="Minutes that a collective may take before the run fails.", at_least=1, at_most=1_000_000
    )
    use_gloo_process_groups: bool = config_field(
        True,
        flags=("--disable-gloo-process-groups",),
        help="With GPUs, use NCCL only, instead of exchanging errors and file lists over gloo on the CPU.",
    )
    use_tp_pp_dp_mapping: bool = config_field(
        False, help="Order ranks by pipeline stage before data-parallel rank, which places stages closer together."
    )
    fake_process_group: bool = config_field(
        False,
        help="Run a single rank (RANK, default 0) of --world-size or WORLD_SIZE ranks without communication. "
        "Memory and time are meaningful, losses are not.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(kw_only=True)
class ShardedParametersConfig:
    """Selects sharding of parameters over data-parallel ranks. FullyShardConfig defines the details."""

    cli_group: ClassVar[str] = "data parallelism"

    use_torch_fsdp2: bool = config_field(
        False,
        help="Shard parameters, gradients and optimizer state over the data-parallel ranks with torch's fully_shard.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(kw_only=True)
class GradientReductionConfig:
    """Flags of gradient reduction whose fields in DistributedDataParallelConfig have different names."""

    cli_group: ClassVar[str] = "data parallelism"

    grad_reduce_in_bf16: bool = config_field(
        False, help="Reduce gradients in bf16, the dtype of the parameters, instead of fp32."
    )
    accumulate_allreduce_grads_in_fp32: bool = config_field(
        False, help="Accumulate and reduce gradients in fp32, which is the default without --grad-reduce-in-bf16."
    )
    align_grad_reduce: bool = config_field(
        True,
        flags=("--no-align-grad-reduce", "--disable-align-grad-reduce"),
        help="Start reductions of virtual stages as soon as backward allows, instead of together on all stages.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.grad_reduce_in_bf16 and self.accumulate_allreduce_grads_in_fp32:
            raise ValueError(
                "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 are both given: choose one type"
            )


@dataclass(kw_only=True)
class LaunchConfig:
    """Number of ranks of the run, and this process among them.

    The launcher sets them, or --world-size for a run that only plans. data_parallel_size: derived from the layout.
    """

    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    data_parallel_size: int = 1
