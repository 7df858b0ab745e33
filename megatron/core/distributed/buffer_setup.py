"""From a module, its settings and its groups to flat buffers, how they are cut and scaled, and to a launch order."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.dense_memory import check_apart
from megatron.core.device import SideStream, default_device
from megatron.core.distributed.bucket_group import _ParamAndGradBucketGroup
from megatron.core.distributed.collectives import ReductionPolicy
from megatron.core.distributed.consistency import GradChecks
from megatron.core.distributed.ddp_debug import DdpDebug
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.flat_buffer import (
    BufferKind,
    BufferSettings,
    _ParamAndGradBuffer,
    buffer_kind,
    partition_buckets,
)
from megatron.core.distributed.grad_hooks import is_completed_later
from megatron.core.distributed.iteration import Ledger, stage_group_of
from megatron.core.distributed.launch_order import LaunchOrder
from megatron.core.distributed.layout import resolve_bucket_size
from megatron.core.distributed.passes import Passes, PassScope
from megatron.core.distributed.synced_group import SyncedGroup
from megatron.core.distributed.transient_buffer import MemoryPolicy, SumMemory, TransientBuffer
from megatron.core.distributed.transient_grads import TransientGroup
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.tensor_parallel.param_attributes import is_wrapped, param_facts

# What optimizers step and all back ends add up.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Longer than any pause between two launches of a healthy run.
_DEBUG_TIMEOUT_S = 600.0

# Buckets of gradients that are sent and not yet freed, beside those that fill: one to wait for, one to keep links busy.
_MAX_IN_FLIGHT = 2
# Two buckets of gradients at any time.
_MAX_IN_FLIGHT_RELEASED = 1


def check_settings(
    module: nn.Module,
    groups: ProcessGroupCollection,
    *,
    config: ModelParallelConfig,
    ddp_config: DistributedDataParallelConfig,
) -> None:
    """Raises ValueError where a module cannot be wrapped with these settings and groups."""
    check_params(module)
    _check_has_memory(module)
    if ddp_config.gradients_are_transient:
        _check_contiguous(module, "shard_gradients" if ddp_config.shard_gradients else "release_gradients")
    if config.calculate_per_token_loss and ddp_config.average_in_collective:
        raise ValueError(
            "DistributedDataParallelConfig.average_in_collective and calculate_per_token_loss are both set: the sum "
            "over ranks is divided by their tokens, not by their number"
        )
    instances = ddp_config.num_distributed_optimizer_instances
    if instances > 1 and group_size(groups.inter_dist_opt) != instances:
        raise ValueError(
            f"DistributedDataParallelConfig.num_distributed_optimizer_instances is {instances}, and "
            f"pg_collection.inter_dist_opt has {group_size(groups.inter_dist_opt)} ranks: must be as many; give "
            "initialize_model_parallel the same num_distributed_optimizer_instances"
        )
    has_experts = any(param_facts(param).is_expert for param in module.parameters())
    # Without it experts would be summed with others, or with none, and nobody would notice.
    if has_experts and groups.dp_cp is not None and groups.expt_dp is None:
        raise ValueError(
            "pg_collection.expt_dp is None: the module has expert parameters, so give the ranks that share them"
        )
    tied = next((name for name, param in module.named_parameters() if param_facts(param).shared_embedding), None)
    # Else one end would train, or wait for a gradient that never comes.
    if tied is not None and groups.embd is None:
        raise ValueError(f"pg_collection.embd is None: another stage has {tied} too, so give the ranks that share it")


def check_params(module: nn.Module) -> None:
    """Raises ValueError where parameters that require grad are in no dtype or place that can be wrapped."""
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            raise ValueError(
                f"parameter {name} is a DTensor: the module was given to fully_shard, as by "
                "TorchFullyShardedDataParallel, before; wrap another one that is not, once"
            )
    check_apart([*module.named_parameters(), *module.named_buffers()])
    trained = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    for name, param in trained:
        if param.dtype not in _DTYPES:
            raise ValueError(f"parameter {name} is {param.dtype} and requires grad: must be one of {list(_DTYPES)}")
        if param.device != trained[0][1].device:
            raise ValueError(
                f"parameter {name} is on {param.device} where {trained[0][0]} is on {trained[0][1].device}: all that "
                "require grad must be on one device"
            )
        # Two wrappers would each reduce a part of its gradient, and the first one's buffer be nobody's parameter.
        if is_wrapped(param):
            raise ValueError(
                f"parameter {name} is in another DistributedDataParallel: call that one's release() before the module "
                "is wrapped again; two chunks cannot share a parameter"
            )


def _check_has_memory(module: nn.Module) -> None:
    if default_device().type == "meta":
        return  # a plan, in which nothing has
    name = next((name for name, param in module.named_parameters() if param.requires_grad and param.is_meta), None)
    if name is not None:
        raise ValueError(
            f"parameter {name} is on the meta device: ranks have whole parameters with DistributedDataParallel; give "
            "the module memory and values first, or wrap it in TorchFullyShardedDataParallel, which gives shards both"
        )


def _check_contiguous(module: nn.Module, setting: str) -> None:
    # Hooks are given a parameter's shard, whose order is that of memory, under its logical shape.
    for name, param in module.named_parameters():
        if param.requires_grad and not param.is_contiguous():
            raise ValueError(
                f"parameter {name} has shape {tuple(param.shape)} and strides {param.stride()}: must be contiguous "
                f"with DistributedDataParallelConfig.{setting}; make it so with .data = .data.contiguous()"
            )


def build_buffers(
    module: nn.Module,
    groups: ProcessGroupCollection,
    *,
    config: ModelParallelConfig,
    ddp_config: DistributedDataParallelConfig,
    single_bucket: bool,
) -> list[_ParamAndGradBuffer]:
    """Moves the parameters that require grad into buffers, one for each kind; of experts apart where they are reduced
    over other ranks.
    """
    several = ddp_config.num_distributed_optimizer_instances > 1
    device = next((param.device for param in module.parameters()), default_device())
    side = SideStream(device) if several and ddp_config.reduces_in_backward else None
    is_whole = single_bucket or not ddp_config.cuts_buckets
    buffers: list[_ParamAndGradBuffer] = []
    by_kind = _by_kind(module, groups, config=config, ddp_config=ddp_config)
    for kind, named_params in by_kind.items():
        replicas = groups.expt_dp if kind.is_expert else groups.dp_cp
        group = replicas
        if several:
            group = groups.intra_expt_dp if kind.is_expert else groups.intra_dp_cp
        settings = BufferSettings(
            group=group,
            bucket_size=resolve_bucket_size(
                ddp_config.bucket_size,
                ddp_config.num_buckets,
                num_ranks=group_size(group),
                single_bucket=is_whole,
            ),
            num_buckets=None if is_whole else ddp_config.num_buckets,
            is_sharded=ddp_config.use_distributed_optimizer,
            scale=gradient_scale(replicas, groups, config=config, ddp_config=ddp_config),
            policy=ReductionPolicy(
                # While debugging, so that a bucket under reduction stays what was sent and writes to it are seen.
                deterministic=config.deterministic_mode or ddp_config.ddp_debug,
                average=ddp_config.average_in_collective,
                fp32_accumulation=ddp_config.reduce_scatter_with_fp32_accumulation,
                instances_group=groups.inter_dist_opt if group is not replicas else None,
                side=side,
            ),
            high_busbw=ddp_config.pad_buckets_for_high_nccl_busbw,
            fp32_patterns=tuple(ddp_config.param_name_patterns_for_fp32_local_accumulation),
        )
        buffers.append(_new_buffer(kind, named_params, settings=settings, ddp_config=ddp_config))
    return buffers


def _by_kind(
    module: nn.Module,
    groups: ProcessGroupCollection,
    *,
    config: ModelParallelConfig,
    ddp_config: DistributedDataParallelConfig,
) -> dict[BufferKind, list[tuple[str, nn.Parameter]]]:
    apart = expert_ranks_differ(groups)
    found: dict[BufferKind, list[tuple[str, nn.Parameter]]] = {}
    # named_parameters gives a parameter that two modules share once.
    for name, param in module.named_parameters():
        if param.requires_grad:
            later = ddp_config.release_gradients and is_completed_later(param, config=config, groups=groups)
            fp32 = ddp_config.grad_reduce_in_fp32
            kind = buffer_kind(param, grad_reduce_in_fp32=fp32, experts_apart=apart, completed_later=later)
            found.setdefault(kind, []).append((name, param))
    return found


def _new_buffer(
    kind: BufferKind,
    named_params: list[tuple[str, nn.Parameter]],
    *,
    settings: BufferSettings,
    ddp_config: DistributedDataParallelConfig,
) -> _ParamAndGradBuffer:
    if not ddp_config.gradients_are_transient:
        return _ParamAndGradBuffer(kind, named_params, settings=settings)
    is_released = ddp_config.release_gradients and not kind.completed_later
    memory = MemoryPolicy(sums=SumMemory.RELEASED if is_released else SumMemory.STANDING)
    return TransientBuffer(kind, named_params, settings=settings, memory=memory)


def build_groups(
    buffers: Sequence[_ParamAndGradBuffer], *, name: str, force_single: bool, checks: GradChecks | None
) -> list[SyncedGroup]:
    """The bucket groups of buffers; name: what theirs begin with. force_single: one group, where gradients stand."""
    groups: list[SyncedGroup] = []
    for buckets in partition_buckets(buffers, force_single_bucket_group=force_single):
        if isinstance(buckets[0].buffer, TransientBuffer):
            for bucket in buckets:
                groups.append(TransientGroup(bucket, name=f"{name} {len(groups)}", checks=checks))
        else:
            groups.append(_ParamAndGradBucketGroup(buckets, name=f"{name} {len(groups)}", checks=checks))
    return groups


def build_launch_order(groups: ProcessGroupCollection, ddp_config: DistributedDataParallelConfig) -> LaunchOrder:
    """Builds the launch order shared by all model chunks of a stage; with ddp_debug also its observer. Collective."""
    stage_group = stage_group_of(groups)
    in_flight = _MAX_IN_FLIGHT_RELEASED if ddp_config.release_gradients else _MAX_IN_FLIGHT
    order = LaunchOrder(
        stage_group,
        pp_group=groups.pp,
        stage_host=groups.tp_dp_cp_host,
        pp_host=groups.pp_host,
        overlap_grad_reduce=ddp_config.reduces_in_backward,
        passes=Passes(PassScope.CHUNK, max_in_flight=in_flight) if ddp_config.gradients_are_transient else None,
        ledger=Ledger(stage_group, debug_timeout_s=_DEBUG_TIMEOUT_S if ddp_config.ddp_debug else None),
        sends_over=(
            groups.dp_cp,
            groups.intra_dp_cp,
            groups.expt_dp,
            groups.intra_expt_dp,
            groups.inter_dist_opt,
        ),
    )
    if ddp_config.ddp_debug:
        order.observe(DdpDebug(order.ledger.stop))
    return order


def gradient_scale(
    group: dist.ProcessGroup | None,
    groups: ProcessGroupCollection,
    *,
    config: ModelParallelConfig,
    ddp_config: DistributedDataParallelConfig,
) -> float:
    """Factor of every gradient before its sum over `group`, all ranks that hold the parameter."""
    if config.calculate_per_token_loss:
        return 1.0
    # An expert's gradient has its share of every rank's tokens already, so the number of replicas is that of the dense
    # layers for both.
    replicas = group_size(groups.dp_cp)
    return group_size(group) / replicas if ddp_config.average_in_collective else 1.0 / replicas


def expert_ranks_differ(groups: ProcessGroupCollection) -> bool:
    """Whether experts are reduced over other ranks than the rest."""
    return _ranks(groups.expt_dp) != _ranks(groups.dp_cp)


def _ranks(group: dist.ProcessGroup | None) -> list[int] | None:
    # A group of this rank alone is None, or one of a grid.
    return None if group is None or group_size(group) == 1 else dist.get_process_group_ranks(group)
