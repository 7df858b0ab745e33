"""Wraps a run's model chunks for data parallelism, and sets the callables with which the schedule launches collectives.

megatron.core.distributed implements the collectives, and megatron.core.pipeline_parallel calls the callables.
"""

import copy
from collections.abc import Sequence

from torch import nn

from megatron.core.distributed import (
    DistributedDataParallel,
    TorchFullyShardedDataParallel,
    build_launch_order,
)
from megatron.core.parallel_state import get_process_groups
from megatron.core.tensor_parallel.tied_weights import follow_owner_on_stage
from megatron.core.utils import get_model_config
from megatron.training.config import RunConfig


def wrap_chunks(parts: Sequence[nn.Module], run_config: RunConfig) -> list[nn.Module]:
    """Wraps the chunks of a stage for data parallelism, with a shared scheduler for their collectives. Collective."""
    if run_config.sharded_parameters.use_torch_fsdp2:
        return [
            TorchFullyShardedDataParallel(
                get_model_config(part), run_config.torch_fsdp2, part, pg_collection=get_process_groups()
            )
            for part in parts
        ]
    # A copy, because a script may change the configuration of its wrappers.
    ddp_config = copy.copy(run_config.ddp)
    order = build_launch_order(get_process_groups(), ddp_config)
    follow_owner_on_stage(parts)
    return [
        DistributedDataParallel(
            get_model_config(part),
            ddp_config,
            part,
            # Collectives of later chunks already overlap with the computation of other chunks. Buckets are then useful
            # only for bucket-lifetime gradients, because they free memory earlier.
            disable_bucketing=chunk > 0 and not ddp_config.has_bucket_lifetime_grads,
            pg_collection=get_process_groups(),
            launch_order=order,
        )
        for chunk, part in enumerate(parts)
    ]


def restore_params(model: Sequence[nn.Module]) -> None:
    """Gathers parameters as they are, if they were gathered in 8 bits, before they are read. Collective."""
    for chunk in model:
        if isinstance(chunk, DistributedDataParallel):
            chunk.restore_params()


def join_schedule(model: Sequence[nn.Module], *, align_grad_reduce: bool) -> None:
    """Sets the callables with which the schedule defers and starts the chunks' collectives.

    align_grad_reduce: whether virtual stages start reductions together on all pipeline stages.
    """
    for chunk in model:
        if isinstance(chunk, TorchFullyShardedDataParallel):
            # Every backward pass reduces gradients, but torch needs to know which one is the last.
            chunk.config.no_sync_func = chunk.accumulate
    chunks = [chunk for chunk in model if isinstance(chunk, DistributedDataParallel)]
    for chunk in chunks:
        config, overlap = chunk.config, chunk.ddp_config
        if overlap.release_gradients:
            config.no_sync_func = [each.accumulate for each in chunks]
        # With shard_gradients every backward pass reduces its own gradients.
        elif overlap.overlap_grad_reduce and not overlap.shard_gradients:
            config.no_sync_func = [each.no_sync for each in chunks]
            # With one chunk per stage, starting reductions within its last backward pass overlaps more communication.
            if align_grad_reduce and len(chunks) > 1:
                config.grad_sync_func = [each.start_grad_sync for each in chunks]
        if overlap.overlap_param_gather and overlap.align_param_gather:
            config.param_sync_func = [each.start_stale_param_sync for each in chunks]
