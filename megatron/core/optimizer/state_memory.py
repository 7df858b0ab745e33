"""Persistent memory of a rank in bytes, computed from sizes and settings without reading tensors.

Excludes activations and the temporary memory of collectives.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import torch

from megatron.core.distributed import TorchFullyShardedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.layout import FlatBuffer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import ParamGrouping
from megatron.core.optimizer.stored_floats import BLOCK
from megatron.core.process_groups_config import group_size


@dataclass(frozen=True)
class StateBytes:
    """Bytes of trained parameters and their state on one rank, without padding (below 64 elements per parameter)."""

    parameters: float = 0
    gradients: float = 0
    masters: float = 0
    moments: float = 0

    @property
    def total(self) -> float:
        """Sum of all fields."""
        return sum(astuple(self))

    def __add__(self, other: "StateBytes") -> "StateBytes":
        return StateBytes(*(a + b for a, b in zip(astuple(self), astuple(other))))


def state_bytes(
    num_params: int,
    config: OptimizerConfig,
    *,
    params_dtype: torch.dtype,
    grads_dtype: torch.dtype,
    num_shards: int = 1,
    num_grad_shards: int = 1,
    num_param_shards: int = 1,
    num_matrix_params: int = 0,
) -> StateBytes:
    """Returns the bytes of `num_params` parameters of one dtype and their state on one rank.

    num_shards: ranks that shard the optimizer's state (use_distributed_optimizer); 1 if each rank stores all of it.
    num_grad_shards: ranks that shard the gradients (shard_gradients), not counting buckets in flight in a backward
    pass. num_param_shards: ranks that shard the parameters (torch's fully_shard), not counting gathered units.
    num_matrix_params: number of parameters updated by Muon, which has one moment.
    """
    # The dtype that the update computes in.
    wide = torch.promote_types(params_dtype, torch.float32).itemsize
    if config.optimizer == "sgd":
        moments: float = num_params * wide * (config.sgd_momentum > 0)
    else:
        of_adam = sum(_stored_bytes(dtype, wide) for dtype in (config.exp_avg_dtype, config.exp_avg_sq_dtype))
        moments = (num_params - num_matrix_params) * of_adam + num_matrix_params * wide
    return StateBytes(
        parameters=num_params * params_dtype.itemsize / num_param_shards,
        gradients=num_params * grads_dtype.itemsize / num_grad_shards,
        masters=num_params * _master_bytes(params_dtype, config) / num_shards,
        moments=moments / num_shards,
    )


def state_bytes_of(model_chunks: Sequence[_BaseDataParallel], config: OptimizerConfig) -> StateBytes:
    """Returns the StateBytes of all parameters that are trained in the wrapped chunks of this rank."""
    grouping = ParamGrouping(config, None)
    total = StateBytes()
    for chunk in model_chunks:
        for buffer in chunk.all_buffers:
            shares_all = isinstance(chunk, TorchFullyShardedDataParallel)
            shares_grads = shares_all or chunk.ddp_config.shard_gradients
            here = _bytes_of(buffer, config, grouping=grouping, shares_grads=shares_grads, shares_params=shares_all)
            # Released gradients occupy no persistent memory, unless their sums are divided by token counts later.
            releases = chunk.ddp_config.release_gradients and not chunk.config.calculate_per_token_loss
            total += replace(here, gradients=0.0) if releases else here
    return total


def _bytes_of(
    buffer: FlatBuffer,
    config: OptimizerConfig,
    *,
    grouping: ParamGrouping,
    shares_grads: bool,
    shares_params: bool,
) -> StateBytes:
    num_shards = group_size(buffer.data_parallel_group) if buffer.is_sharded else 1
    matrices = [slot.param.numel() for slot in buffer.slots if grouping.key_of(slot.name, slot.param).is_matrix]
    return state_bytes(
        sum(slot.param.numel() for slot in buffer.slots),
        config,
        params_dtype=buffer.param_data.dtype,
        grads_dtype=buffer.grad_data.dtype,
        num_shards=num_shards,
        num_grad_shards=num_shards if shares_grads else 1,
        num_param_shards=num_shards if shares_params else 1,
        num_matrix_params=sum(matrices),
    )


def _stored_bytes(dtype: torch.dtype, wide: int) -> float:
    # fp16 has a scale of one byte for each block.
    return {torch.float32: wide, torch.bfloat16: 2, torch.float16: 2 + 1 / BLOCK}[dtype]


def _master_bytes(params_dtype: torch.dtype, config: OptimizerConfig) -> float:
    if params_dtype.itemsize >= 4:
        return 0
    if config.keeps_remainders and params_dtype == torch.bfloat16:
        return 2
    return _stored_bytes(config.main_params_dtype, 4)
