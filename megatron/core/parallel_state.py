"""The one registry of process groups: built once from the parallel sizes, read by builders, never in a forward.

No policy lives here; components receive a ProcessGroupCollection.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass
class _Registry:
    groups: ProcessGroupCollection | None = None


_REGISTRY = _Registry()


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    distributed_timeout_minutes: int = 30,
) -> None:
    """Builds the process groups over all ranks; torch.distributed must be initialised.

    Raises ValueError for a parallel size that is not available, RuntimeError when called twice.
    """
    if _REGISTRY.groups is not None:
        raise RuntimeError("model parallel groups exist already: call destroy_model_parallel() first")
    sizes = {
        "tensor_model_parallel_size": tensor_model_parallel_size,
        "pipeline_model_parallel_size": pipeline_model_parallel_size,
        "context_parallel_size": context_parallel_size,
        "expert_model_parallel_size": expert_model_parallel_size,
    }
    for name, size in sizes.items():
        if size != 1:
            raise ValueError(f"{name} is {size}: only data parallelism is available, so it must be 1")
    data_parallel = dist.new_group(timeout=timedelta(minutes=distributed_timeout_minutes))
    _REGISTRY.groups = ProcessGroupCollection(dp=data_parallel, dp_cp=data_parallel, expt_dp=data_parallel)


def destroy_model_parallel() -> None:
    """Forgets the groups; the process group of torch.distributed stays."""
    _REGISTRY.groups = None


def model_parallel_is_initialized() -> bool:
    """Whether initialize_model_parallel has run."""
    return _REGISTRY.groups is not None


def get_process_groups() -> ProcessGroupCollection:
    """All groups of this rank, for builders to hand down."""
    if _REGISTRY.groups is None:
        raise RuntimeError("process groups do not exist: call initialize_model_parallel() first")
    return _REGISTRY.groups


def existing_process_groups() -> ProcessGroupCollection:
    """All groups of this rank; without model parallel groups, those of a rank alone."""
    return _REGISTRY.groups or ProcessGroupCollection()


def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    """The ranks that hold copies of the same dense weights; `with_context_parallel` also counts sequence parts."""
    groups = get_process_groups()
    group = groups.dp_cp if with_context_parallel else groups.dp
    assert group is not None, "the data-parallel group is always built"
    return group


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    """This rank's index in its data-parallel group."""
    return dist.get_rank(get_data_parallel_group(with_context_parallel))


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    """Number of data-parallel copies."""
    return dist.get_world_size(get_data_parallel_group(with_context_parallel))


def get_expert_data_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold copies of the same expert weights."""
    group = get_process_groups().expt_dp
    assert group is not None, "the expert data-parallel group is always built"
    return group


def get_tensor_model_parallel_world_size() -> int:
    """Ranks that share one layer's weights: 1, as only data parallelism is available."""
    return 1


def get_tensor_model_parallel_rank() -> int:
    """This rank's index in its tensor-parallel group."""
    return 0


def get_pipeline_model_parallel_world_size() -> int:
    """Number of pipeline stages: 1, as only data parallelism is available."""
    return 1


def get_pipeline_model_parallel_rank() -> int:
    """This rank's pipeline stage."""
    return 0


def is_pipeline_first_stage() -> bool:
    """Whether this rank reads the input tokens."""
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage() -> bool:
    """Whether this rank computes the loss."""
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1
