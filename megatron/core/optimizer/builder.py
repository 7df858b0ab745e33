"""get_megatron_optimizer: builds an optimizer from settings and wrapped model chunks.

param_groups.py assigns each parameter a group on one rank. In this file, ranks agree on the groups before anything is
built.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.data_parallel_base import _BaseDataParallel, require_wrapped
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.layout import FlatBuffer, ParamSlot
from megatron.core.group_collectives import all_ranks_agree, gather_objects, is_fake, union_over_model
from megatron.core.logical_tensors import LogicalPiece, canonical_name, model_logical_pieces
from megatron.core.optimizer.adam import FusedRule, UpdateRule
from megatron.core.optimizer.attention_logits import AttentionLogits, ClipsLogits
from megatron.core.optimizer.clip_grads import GradStats
from megatron.core.optimizer.distrib_optimizer import (
    DistributedOptimizer,
    check_same_sharding,
    check_sharded_gradients,
)
from megatron.core.optimizer.flat_params import FlatParamRange, build_ranges, name_masters
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megatron.core.optimizer.muon import MuonRule
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig, check_whole_matrices
from megatron.core.optimizer.optimizer_in_backward import HandedGrads, UpdatesInBackward, check_in_backward
from megatron.core.optimizer.optimizer_parts import OptimizerParts
from megatron.core.optimizer.param_groups import ConfigOverrides, GroupKey, ParamGrouping
from megatron.core.optimizer.stored_floats import masters_for
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.tensor_parallel.param_attributes import (
    HasWeightMatrices,
    MatrixWindow,
    param_facts,
)
from megatron.core.tensor_parallel.tied_weights import follow_owner_on_stage, owners_and_copies

# Names of attention weights that contain several matrices.
_PROJECTIONS = ("linear_qkv.weight", "linear_kv_up_proj.weight", "linear_kv_down_proj.weight")


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    config_overrides: ConfigOverrides | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: ProcessGroupCollection | None = None,
    dump_param_to_param_group_map: str | None = None,
    *,
    no_weight_decay_cond: None = None,
    scale_lr_cond: None = None,
    lr_mult: float = 1.0,
) -> MegatronOptimizer:
    """Builds the optimizer for wrapped model chunks, which must already have their final device and dtype.

    Returns a DistributedOptimizer if the chunks shard optimizer state. config_overrides: learning rates and weight
    decays for selected parameters, the same on all ranks; if several match a parameter, the last one wins. None means
    get_standard_config_overrides, which a script can extend; with {} every parameter decays. use_gloo_process_groups:
    whether save_parameter_state of a DistributedOptimizer gathers through the host, if there is a group for it.
    pg_collection: groups over which norm and overflow are reduced; None means the groups of parallel_state, if there
    are any. Collective over these groups. If a stage holds both ends of the model, the copy of a tied weight takes the
    values of its owner. dump_param_to_param_group_map: path of a JSON file to which rank 0 writes the
    group settings of each parameter of the model, by name. no_weight_decay_cond, scale_lr_cond, lr_mult: arguments of
    older scripts. Raises ValueError if these are set, and for settings that are inconsistent with the chunks.
    """
    _check_older_arguments(no_weight_decay_cond, scale_lr_cond, lr_mult)
    if not model_chunks:
        raise ValueError("model_chunks is empty: must have at least one wrapped chunk of the model")
    groups = pg_collection or existing_process_groups()
    chunks = [require_wrapped(chunk) for chunk in model_chunks]
    buffers: list[FlatBuffer] = [buffer for chunk in chunks for buffer in chunk.all_buffers]
    _check_settings(config, groups, buffers=buffers)
    is_sharded = check_same_sharding(chunks, is_wanted=config.use_distributed_optimizer)
    _check_overlap(config, [chunk.ddp_config for chunk in chunks])
    check_sharded_gradients(chunks, optimizer=config.optimizer)
    check_in_backward(config, [(chunk.ddp_config, chunk.config) for chunk in chunks], groups=groups)
    grouping = ParamGrouping(config, config_overrides)
    slots = [slot for buffer in buffers for slot in buffer.slots]
    keys = _agree_on_groups(slots, grouping, groups=groups)
    # The wrapper of a chunk does not see the others, where a copy on the same stage has its owner.
    follow_owner_on_stage(model_chunks)
    if dump_param_to_param_group_map is not None:
        _write_groups(dump_param_to_param_group_map, config, {slot.name: keys[slot.param] for slot in slots}, groups)
    patterns = chunks[0].ddp_config.param_name_patterns_for_fp32_local_accumulation
    _check_patterns_match(patterns, [slot.name for slot in slots], groups=groups)
    # Released gradients by buffer; None if gradients are persistent in their buffers.
    handed = {buffer: HandedGrads(buffer) for buffer in buffers} if config.optimizer_in_backward else None
    ranges = build_ranges(
        buffers,
        keys,
        main_of=masters_for(config),
        host_fraction=config.host_fraction,
        grads_of=None if handed is None else {buffer: of_buffer.grad_of for buffer, of_buffer in handed.items()},
    )
    rules: list[UpdateRule] = [_fused_rule(config, ranges, keys=[*grouping.plain_keys(), *keys.values()])]
    if config.optimizer == "muon":
        of_matrices = [param_range for param_range in ranges if param_range.group.is_matrix]
        matrices = _weight_matrices(model_chunks, split_qkv=config.muon_split_qkv)
        rules.append(MuonRule(config, of_matrices, buffers=buffers, keys=keys, matrices=matrices))
    pieces, device = _logical_pieces(model_chunks), chunks[0].device
    in_backward = None
    if handed is not None:
        in_backward = UpdatesInBackward(
            config, groups, handed, rules=rules, ranges=ranges, logical_pieces=pieces, device=device
        )
    stats = in_backward or GradStats(config, groups, buffers, ranges=ranges, logical_pieces=pieces, device=device)
    modules = (module for chunk in chunks for module in chunk.modules())
    layers = [one for one in modules if isinstance(one, ClipsLogits) and one.largest_logits is not None]
    params = [slot.param for slot in slots]
    logits = [AttentionLogits(layers, params, group=groups.dp_cp, device=device)] if layers else []
    parts = OptimizerParts(rules, ranges, chunks, stats, device, pieces, logits)
    gloo = groups.tp_dp_cp_host if use_gloo_process_groups and group_size(groups.tp) == 1 else None
    optimizer = _optimizer_of(parts, config, chunks=chunks if is_sharded else None, gloo=gloo)
    if in_backward is not None:
        in_backward.attach(optimizer, chunks)
    return optimizer


def _logical_pieces(model_chunks: Sequence[nn.Module]) -> dict[str, list[LogicalPiece]]:
    return {name: held for chunk in model_chunks for name, held in model_logical_pieces(chunk).items()}


def _check_older_arguments(*given: object) -> None:
    if given != (None, None, 1.0):
        raise ValueError(
            "get_megatron_optimizer: no_weight_decay_cond, scale_lr_cond and lr_mult are {}, {} and {}: must be None, "
            "None and 1.0; pass config_overrides instead, such as {{ParamKey(name=...): "
            "ParamGroupOverride(wd_mult=0.0, lr_mult=0.1)}}".format(*given)
        )


def _check_overlap(config: OptimizerConfig, ddp_configs: Sequence[DistributedDataParallelConfig]) -> None:
    for name in ("overlap_param_gather", "overlap_param_gather_with_optimizer_step"):
        if vars(config)[name] and not all(vars(ddp_config)[name] for ddp_config in ddp_configs):
            raise ValueError(
                f"OptimizerConfig.{name} is True and DistributedDataParallelConfig.{name} is False: set both or neither"
            )


def _check_settings(config: OptimizerConfig, groups: ProcessGroupCollection, *, buffers: Sequence[FlatBuffer]) -> None:
    check_whole_matrices(
        config.optimizer,
        tensor_model_parallel_size=group_size(groups.tp),
        expert_tensor_parallel_size=group_size(groups.expt_tp),
    )
    if config.lr is None:
        raise ValueError("OptimizerConfig.lr is None: must be the maximum learning rate (--lr)")
    narrow = [buffer for buffer in buffers if buffer.param_data.dtype.itemsize == 2]
    if config.main_grads_dtype == torch.bfloat16 and any(buffer.grad_data.dtype != torch.bfloat16 for buffer in narrow):
        raise ValueError(
            "OptimizerConfig.main_grads_dtype is bf16: must be fp32, unless gradients are reduced in bf16 "
            "(--grad-reduce-in-bf16)"
        )
    if config.main_params_dtype == torch.float16 and any(
        buffer.model_dtype.itemsize < buffer.param_data.dtype.itemsize for buffer in buffers
    ):
        raise ValueError(
            "OptimizerConfig.main_params_dtype is fp16 with use_torch_fsdp2: must be fp32, because its fp32 shards are "
            "the masters"
        )


def _fused_rule(config: OptimizerConfig, ranges: Sequence[FlatParamRange], *, keys: Sequence[GroupKey]) -> FusedRule:
    # Groups of all parameters, not only of this rank's ranges. A dictionary keeps the order of first appearance.
    groups = list(dict.fromkeys(key for key in keys if not key.is_matrix))
    return FusedRule(config, [one for one in ranges if not one.group.is_matrix], groups=groups)


def _optimizer_of(
    parts: OptimizerParts,
    config: OptimizerConfig,
    *,
    chunks: Sequence[_BaseDataParallel] | None,
    gloo: dist.ProcessGroup | None,
) -> MegatronOptimizer:
    """Builds the optimizer from its parts.

    chunks: the model's chunks if they shard state, else None. gloo: the group of dense shards with a CPU backend, or
    None.
    """
    first, scaler = parts.rules[0].optimizer, _grad_scaler(config)
    if chunks is not None:
        buffers = {index: chunk.all_buffers for index, chunk in enumerate(chunks)}
        group = next((buffer.data_parallel_group for of_chunk in buffers.values() for buffer in of_chunk), None)
        return DistributedOptimizer(first, config, scaler, None, chunks, buffers, group, gloo, parts=parts)
    # Decided by settings, not by parameter dtypes, because a bf16 model may have an fp32 router.
    has_masters = config.fp16 or config.bf16
    name_masters(
        [buffer for chunk in parts.model_chunks for buffer in chunk.all_buffers], parts.ranges, is_sharded=False
    )

    def one_of(some: OptimizerParts) -> MegatronOptimizer:
        torch_optimizer = some.rules[0].optimizer
        if has_masters:
            return Float16OptimizerWithFloat16Params(torch_optimizer, config, scaler, None, parts=some)
        return FP32Optimizer(torch_optimizer, config, None, parts=some)

    if len(parts.rules) == 1:
        return one_of(parts)
    # The chain performs the updates, with one norm of all ranges in the order of the buffers.
    alone = [dataclasses.replace(parts, rules=[rule], ranges=rule.ranges, logits=[]) for rule in parts.rules]
    return ChainedOptimizer([one_of(some) for some in alone], parts=parts)


def _weight_matrices(model_chunks: Sequence[nn.Module], *, split_qkv: bool) -> dict[str, list[MatrixWindow]]:
    """Returns the matrices that modules declare in weight_matrices(), by parameter name without wrapper prefixes."""
    found = {}
    for chunk in model_chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, HasWeightMatrices):
                for local_name, windows in module.weight_matrices().items():
                    if split_qkv or not local_name.endswith(_PROJECTIONS):
                        found[canonical_name(f"{name}.{local_name}" if name else local_name)] = windows
    return found


def _grad_scaler(config: OptimizerConfig) -> MegatronGradScaler | None:
    if not config.fp16:
        return None
    # Only fp16 has too small an exponent range for gradients; bf16 has the range of fp32.
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale)
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        # Powers of two scale without rounding.
        growth_factor=2.0,
        backoff_factor=0.5,
        # A float on the command line, as in Megatron.
        growth_interval=int(config.loss_scale_window),
        hysteresis=config.hysteresis,
    )


def _write_groups(
    path: str, config: OptimizerConfig, keys: Mapping[str, GroupKey], groups: ProcessGroupCollection
) -> None:
    """Writes the group settings of every parameter of the model to a JSON file. Collective."""
    found = {name: key.values(config) for name, key in keys.items()}
    for group in (groups.mp, groups.tp_ep_pp):
        found = {name: values for part in gather_objects(found, group) for name, values in part.items()}
    with all_ranks_agree():
        if not dist.is_initialized() or dist.get_rank() == 0:
            Path(path).write_text(json.dumps(found, indent=1, sort_keys=True), encoding="utf-8")


# Agreement between the ranks that hold parts of one model.


def _agree_on_groups(
    slots: Sequence[ParamSlot], grouping: ParamGrouping, *, groups: ProcessGroupCollection
) -> dict[nn.Parameter, GroupKey]:
    """Returns the group of each parameter of this rank. Collective over all ranks that hold parts of the model.

    The copy of a tied weight is in the group of its owner; overrides for the copy's name are ignored. Raises ValueError
    for contradicting learning rates, or for an override that matches no parameter in any part of the model;
    RemoteRankError if another rank has such an error.
    """
    with _all_parts_agree(groups):
        owners, copies = owners_and_copies((slot.param, slot.name) for slot in slots)
        if len(owners) < len(copies) and group_size(groups.embd) == 1:
            raise ValueError(
                f"pg_collection.embd is {groups.embd}: must be the group of the first and the last stage, because "
                f"{copies[0]} is a copy of a weight of the first stage"
            )
        keys = {e.param: grouping.key_of(e.name, e.param) for e in slots if not param_facts(e.param).shared}
    keys |= _owners_keys(slots, keys, grouping=grouping, groups=groups)
    grouping.check_all_used(union_over_model(grouping.used, groups))
    return keys


def _check_patterns_match(patterns: Sequence[str], names: Sequence[str], *, groups: ProcessGroupCollection) -> None:
    """Raises ValueError on every rank for a pattern that matches no parameter in any part of the model.

    patterns: param_name_patterns_for_fp32_local_accumulation, the same on all ranks. Collective if there are patterns.
    """
    if not patterns:
        return
    used = {pattern for pattern in patterns if pattern == "all" or any(fnmatch(name, pattern) for name in names)}
    known = union_over_model(used, groups)
    # A misspelt name would silently have no effect.
    unknown = [pattern for pattern in patterns if pattern not in known]
    if unknown:
        raise ValueError(
            f"DistributedDataParallelConfig.param_name_patterns_for_fp32_local_accumulation contains {unknown[0]}: "
            "must match the name of a parameter that requires grad"
        )


def _owners_keys(
    slots: Sequence[ParamSlot],
    keys: dict[nn.Parameter, GroupKey],
    *,
    grouping: ParamGrouping,
    groups: ProcessGroupCollection,
) -> dict[nn.Parameter, GroupKey]:
    """Returns the parameter group of each tied-weight copy on this rank, as received from the owner on the first stage.

    In a dry run, which cannot query the owner, derives the groups from the copies' names.
    """
    owners, copies = owners_and_copies((slot.param, slot.param) for slot in slots)
    if is_fake(groups.embd):
        return {e.param: grouping.key_of(e.name, e.param) for e in slots if param_facts(e.param).shared}
    owned = [keys[param] for param in owners]
    # Sent by the owner, because only the owner has the parameter that attributes and predicates inspect.
    of_first_stage = gather_objects(owned, groups.embd)[0]
    return dict(zip(copies, of_first_stage, strict=True)) if copies else {}


@contextmanager
def _all_parts_agree(groups: ProcessGroupCollection) -> Iterator[None]:
    """Enters all_ranks_agree over the ranks of dense layers, then over the ranks of expert layers.

    Together these ranks hold all parts of a model.
    """
    with ExitStack() as stack:
        for group in (groups.mp, groups.tp_ep_pp):
            # For all_ranks_agree, None would mean all ranks.
            if group_size(group) > 1:
                stack.enter_context(all_ranks_agree(group))
        yield
