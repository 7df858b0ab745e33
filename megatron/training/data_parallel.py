"""Wraps a run's model chunks for data parallelism as the flags say, and joins them with the schedule of passes.

How gradients are reduced is megatron.core.distributed's; when the schedule calls is pipeline_parallel's.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from torch import nn

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    build_launch_order,
)
from megatron.core.parallel_state import get_process_groups
from megatron.core.utils import get_model_config
from megatron.training.command_line.config_builder import config_from_args

_ConfigT = TypeVar("_ConfigT", bound=DistributedDataParallelConfig)


def wrap_chunks(parts: Sequence[nn.Module], args: argparse.Namespace) -> list[nn.Module]:
    """The chunks of a stage, in order, each wrapped; their collectives have one order. Collective."""
    if args.use_torch_fsdp2:
        config = _with_flags_of_gradients(config_from_args(TorchFullyShardedDataParallelConfig, args), args)
        return [
            TorchFullyShardedDataParallel(get_model_config(part), config, part, pg_collection=get_process_groups())
            for part in parts
        ]
    ddp_config = ddp_config_of(args)
    order = build_launch_order(get_process_groups(), ddp_config)
    return [
        DistributedDataParallel(
            get_model_config(part),
            ddp_config,
            part,
            # Later chunks are computed while the first is reduced or gathered: nothing is hidden by cutting them, and
            # memory freed only where gradients do not stand.
            disable_bucketing=chunk > 0 and not ddp_config.has_bucket_lifetime_grads,
            pg_collection=get_process_groups(),
            launch_order=order,
        )
        for chunk, part in enumerate(parts)
    ]


def ddp_config_of(args: argparse.Namespace) -> DistributedDataParallelConfig:
    """How the flags have the chunks of a run wrapped."""
    return _with_flags_of_gradients(config_from_args(DistributedDataParallelConfig, args), args)


def _with_flags_of_gradients(config: _ConfigT, args: argparse.Namespace) -> _ConfigT:
    return dataclasses.replace(
        config,
        grad_reduce_in_fp32=not args.grad_reduce_in_bf16,
        # An overflow under fp16 is the loss scaler's business.
        check_for_nan_in_grad=args.check_for_nan_in_loss_and_grad and not args.fp16,
    )


def join_schedule(model: Sequence[nn.Module], args: argparse.Namespace) -> None:
    """Lets the schedule of passes start the collectives of the chunks that overlap with them."""
    for chunk in model:
        if isinstance(chunk, TorchFullyShardedDataParallel):
            # Each backward reduces; torch is told which is the last.
            chunk.config.no_sync_func = chunk.accumulate
    chunks = [chunk for chunk in model if isinstance(chunk, DistributedDataParallel)]
    for chunk in chunks:
        _join(chunk, chunks, args=args)


def _join(
    chunk: DistributedDataParallel, chunks: Sequence[DistributedDataParallel], *, args: argparse.Namespace
) -> None:
    config, overlap = chunk.config, chunk.ddp_config
    if overlap.release_gradients:
        config.no_sync_func = [each.accumulate for each in chunks]
    # With shard_gradients every backward ends with what it has reduced.
    elif overlap.overlap_grad_reduce and not overlap.shard_gradients:
        config.no_sync_func = [each.no_sync for each in chunks]
        # With one chunk a stage it is better to start within its last backward.
        if args.align_grad_reduce and len(chunks) > 1:
            config.grad_sync_func = [each.start_grad_sync for each in chunks]
    if overlap.overlap_param_gather and overlap.align_param_gather:
        config.param_sync_func = [each.start_stale_param_sync for each in chunks]
