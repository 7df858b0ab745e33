"""DistributedOptimizer: each data-parallel rank updates its shard of every bucket, then ranks gather the parameters.

megatron.core.distributed splits parameters into buckets and launches collectives; optimizer.py implements the step.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.config_field import require_defaults
from megatron.core.dist_checkpointing.mapping import ShardedState
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.layout import BufferLayout, FlatBuffer
from megatron.core.distributed.param_and_grad_buffer import BufferKind, full_param_layout
from megatron.core.group_collectives import all_ranks_agree, gather_objects
from megatron.core.optimizer.adam import GradScale
from megatron.core.optimizer.flat_params import FlatParamRange, name_masters
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.optimizer.optimizer import FULLY_RESHARDABLE, FlatState, MixedPrecisionOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.optimizer_parts import InitStateFn, OptimizerParts, parts_over_shards
from megatron.core.process_groups_config import group_rank, group_size

# Optimizer state as written by save_parameter_state. For each chunk: by parameter and kind of state, flat tensors [N],
# fp32 or fp64, in the parameter's memory order.
ParameterState = list[dict[str, dict[str, Tensor]]]


_NO_ITEMS: ShardedState = MappingProxyType({})


class DistributedOptimizer(MixedPrecisionOptimizer):
    """ZeRO-1 optimizer: stores masters and moments of this rank's shards only. ZeRO-2 if chunks also shard gradients.

    Steps like MegatronOptimizer, except that an update

    1. marks the parameters of other ranks' shards as stale;
    2. updates this rank's shards;
    3. gathers the parameters: immediately without overlap, before each module's forward with overlap_param_gather, or
       bucket by bucket, in forward order and as soon as each is updated, with overlap_param_gather_with_optimizer_step.

    A rank may own only padding, or no part of a parameter group. The norm counts each element once, so that all ranks
    skip a step together. Checkpoints contain boxes of whole tensors and load on any number of ranks.

    optimizer: a torch optimizer over the parameters of model_chunks, which must shard optimizer state. Its groups are
    replaced by this rank's shards, so its update must be elementwise. per_model_buffers: the buffers of each chunk, by
    chunk index. data_parallel_group: the ranks over which the buffers are sharded. data_parallel_group_gloo: the same
    ranks, over which get_parameter_state_dp_zero gathers through host memory. data_parallel_group_idx,
    distributed_optimizer_instance_id: stored as attributes, otherwise unused. Raises ValueError for buffers or a group
    that do not belong to the chunks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None,
        init_state_fn: InitStateFn | None,
        model_chunks: Sequence[_BaseDataParallel],
        per_model_buffers: Mapping[int, Sequence[FlatBuffer]],
        data_parallel_group: dist.ProcessGroup | None,
        data_parallel_group_gloo: dist.ProcessGroup | None = None,
        data_parallel_group_idx: int = 0,
        distributed_optimizer_instance_id: int = 0,
        *,
        parts: OptimizerParts | None = None,
    ) -> None:
        sharded = [chunk for chunk in model_chunks if isinstance(chunk, DistributedDataParallel)]
        if len(sharded) < len(model_chunks) or not check_same_sharding(list(model_chunks), is_wanted=False):
            raise ValueError(
                "model_chunks are not all sharded: must be DistributedDataParallel with use_distributed_optimizer"
            )
        _check_buffers(model_chunks, per_model_buffers, group=data_parallel_group)
        parts = parts or parts_over_shards(optimizer, config, init_state_fn, model_chunks=model_chunks)
        super().__init__(optimizer, config, grad_scaler, init_state_fn, parts=parts)
        self._sharded_chunks = sharded
        name_masters([buffer for chunk in model_chunks for buffer in chunk.all_buffers], self._ranges, is_sharded=True)
        self.data_parallel_group, self.data_parallel_group_gloo = data_parallel_group, data_parallel_group_gloo
        self.data_parallel_group_idx = data_parallel_group_idx
        self.distributed_optimizer_instance_id = distributed_optimizer_instance_id
        # Chunks of a stage share a scheduler, which orders their gathers.
        self._gather_schedulers = list(dict.fromkeys(chunk.launch_order for chunk in sharded))
        overlap = sharded[0].ddp_config
        self._gathers_in_step = overlap.overlap_param_gather_with_optimizer_step
        self._gathers_after_step = not overlap.overlap_param_gather
        self._ranges_in: dict[tuple[FlatBuffer, int], list[FlatParamRange]] = {}
        for param_range in self._ranges:
            self._ranges_in.setdefault((param_range.buffer, param_range.bucket), []).append(param_range)

    @staticmethod
    def compute_full_param_layout(
        params: Sequence[nn.Parameter],
        bucket_size: int | None,
        data_parallel_world_size: int,
        ddp_config: DistributedDataParallelConfig,
        expert_data_parallel_world_size: int | None = None,
    ) -> dict[BufferKind, BufferLayout]:
        """Computes the layout of each buffer of a wrapped model without process groups; see full_param_layout."""
        return full_param_layout(
            params, bucket_size, data_parallel_world_size, ddp_config, expert_data_parallel_world_size
        )

    # State, apart from the step.

    def state_dict(self) -> dict[str, Any]:
        """Returns step count and loss scale, the same on all ranks, as JSON values.

        sharded_state_dict returns moments and masters for any layout; save_parameter_state writes them to a file.
        """
        return self.common_state()

    def sharded_state_dict(  # type: ignore[override]  # Megatron's order of arguments
        self,
        model_sharded_state_dict: ShardedState = _NO_ITEMS,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Calls MegatronOptimizer.sharded_state_dict.

        sharding_type: None or fully_reshardable, the only format. Raises ValueError for other formats.
        """
        if sharding_type not in (None, FULLY_RESHARDABLE):
            raise ValueError(f"sharding_type is {sharding_type!r}: must be None or {FULLY_RESHARDABLE!r}")
        return super().sharded_state_dict(model_sharded_state_dict, is_loading, metadata)

    def get_parameter_state_dp_zero(
        self, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
    ) -> ParameterState | None:
        """Gathers moments and masters of whole parameters to the CPU of the first rank of each buffer's group.

        Returns None on other ranks, unless return_on_all_ranks is set. use_gloo_comm: gathers through
        data_parallel_group_gloo, if it was passed to the constructor. empty_data: returns tensors without data (meta
        device). Collective over data-parallel ranks.
        """
        is_reader = return_on_all_ranks or all(
            group_rank(buffer.data_parallel_group) == 0 for buffer in self._sharded_buffers()
        )
        found: ParameterState = []
        for chunk in self._sharded_chunks:
            of_chunk: dict[str, dict[str, Tensor]] = {}
            for buffer in chunk.all_buffers:
                group = self._group_for(buffer, use_gloo=use_gloo_comm)
                for kind in self._kinds(buffer):
                    shards = [self._read_shard(buffer, index, kind) for index in range(len(buffer.owned_spans()))]
                    whole = torch.zeros(buffer.layout.numel, dtype=shards[0].dtype, device="meta")
                    if not empty_data:
                        whole = _gather_sync(shards, buffer, group, to_all=return_on_all_ranks)
                    for slot in buffer.slots:
                        flat = whole[slot.span.start : slot.span.end]
                        of_chunk.setdefault(slot.name, {})[kind] = flat if empty_data else flat.clone()
            found.append(of_chunk)
        return found if is_reader else None

    def load_parameter_state_from_dp_zero(
        self, state_dict: ParameterState | None, *, update_legacy_format: bool = False
    ) -> None:
        """Loads moments and masters from get_parameter_state_dp_zero, then gathers the parameters. Collective.

        state_dict: read on the first rank of each buffer's group; may come from any number of data-parallel ranks.
        Raises ValueError on all ranks if a parameter or a kind of state is missing or has the wrong size.
        """
        why = "files of save_parameter_state have only one format"
        require_defaults("load_parameter_state", why, update_legacy_format=(update_legacy_format, False))
        for index, chunk in enumerate(self._sharded_chunks):
            for buffer in chunk.all_buffers:
                kinds = self._kinds(buffer)
                is_first = group_rank(buffer.data_parallel_group) == 0
                with all_ranks_agree(buffer.data_parallel_group):
                    of_chunk = _checked(state_dict, index, buffer, kinds) if is_first else {}
                for kind in kinds:
                    self._write_shards(buffer, kind, of_chunk)
        for one in self._ranges:
            one.write_model()
        self.mark_whole()
        for chunk in self._sharded_chunks:
            chunk.start_param_sync(force_sync=True, force_dispatch=True)

    def save_parameter_state(self, filename: str) -> None:
        """Saves the result of get_parameter_state_dp_zero with torch.save on the first data-parallel rank. Collective.

        Each tensor-, expert- and pipeline-parallel rank requires a separate file.
        """
        state = self.get_parameter_state_dp_zero()
        with all_ranks_agree(self.data_parallel_group):
            if state is not None:
                torch.save(state, filename)

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Loads a file written by save_parameter_state; see load_parameter_state_from_dp_zero. Collective."""
        state = None
        with all_ranks_agree(self.data_parallel_group):
            if group_rank(self.data_parallel_group) == 0:
                state = torch.load(Path(filename), map_location="cpu", weights_only=True)
        self.load_parameter_state_from_dp_zero(state, update_legacy_format=update_legacy_format)

    def _sharded_buffers(self) -> list[FlatBuffer]:
        return [buffer for chunk in self._sharded_chunks for buffer in chunk.all_buffers]

    def _kinds(self, buffer: FlatBuffer) -> list[str]:
        """Returns the kinds of state that any rank stores for a buffer. Collective."""
        own = {state.kind for state in self._flat_states() if state.param_range.buffer is buffer}
        return sorted(set().union(*gather_objects(own, buffer.data_parallel_group)))

    def _read_shard(self, buffer: FlatBuffer, bucket: int, kind: str) -> Tensor:
        """Reads one kind of state for this rank's shard of a bucket: [shard], fp32 or fp64.

        Elements without this state are zero.
        """
        owned = buffer.owned_spans()[bucket]
        dtype = torch.float64 if buffer.param_data.dtype == torch.float64 else torch.float32
        shard = torch.zeros(owned.numel, dtype=dtype, device=buffer.param_data.device)
        for state in self._states_in(buffer, bucket, kind):
            start = state.param_range.span.start - owned.start
            shard[start : start + state.stored.numel].copy_(state.read())
        return shard

    def _write_shards(self, buffer: FlatBuffer, kind: str, of_chunk: Mapping[str, Mapping[str, Tensor]]) -> None:
        group = buffer.data_parallel_group
        whole = None
        if group_rank(group) == 0:
            whole = torch.zeros(buffer.layout.numel, dtype=self._read_shard(buffer, 0, kind).dtype)
            for slot in buffer.slots:
                whole[slot.span.start : slot.span.end].copy_(of_chunk[slot.name][kind])
        for bucket, owned in enumerate(buffer.owned_spans()):
            shard = _scattered(whole, buffer, bucket, like=self._read_shard(buffer, bucket, kind))
            for state in self._states_in(buffer, bucket, kind):
                start = state.param_range.span.start - owned.start
                values = state.read().copy_(shard[start : start + state.stored.numel])
                state.stored.write(0, values)

    def _states_in(self, buffer: FlatBuffer, bucket: int, kind: str) -> list[FlatState]:
        return [
            state
            for state in self._flat_states()
            if state.param_range.buffer is buffer and state.param_range.bucket == bucket and state.kind == kind
        ]

    def _group_for(self, buffer: FlatBuffer, *, use_gloo: bool) -> dist.ProcessGroup | None:
        gloo, group = self.data_parallel_group_gloo, buffer.data_parallel_group
        if not use_gloo or gloo is None or group is None:
            return group
        is_same = dist.get_process_group_ranks(gloo) == dist.get_process_group_ranks(group)
        return gloo if is_same else group

    def _after_load(self) -> None:
        # The chunks' dtypes decide, because this rank may own no ranges.
        dtypes = [buffer.param_data.dtype for chunk in self._sharded_chunks for buffer in chunk.all_buffers]
        if self.config.keeps_remainders and torch.bfloat16 in dtypes:
            # Loading remainders has changed this rank's shard of the parameters, so the other ranks must gather it.
            for chunk in self._sharded_chunks:
                chunk.start_param_sync(force_sync=True, force_dispatch=True)

    # Inside a step.

    def _update(self, scale: GradScale) -> None:
        # Must come first, because a gather in flight would overwrite updated parameters.
        self._mark_params_stale()
        self.mark_half_done()
        if self._gathers_in_step:
            self._update_and_gather_buckets(scale)
        else:
            self.update_ranges(scale, self._ranges)
        self.mark_whole()
        self._note_update()
        if self._gathers_after_step:
            self._start_gathers()

    def _after_device_update(self) -> None:
        self._mark_params_stale()
        super()._after_device_update()
        # Unlike `step`, this cannot gather bucket by bucket, because the host learns of the update only at the end.
        if self._gathers_in_step or self._gathers_after_step:
            self._start_gathers()

    def _mark_params_stale(self) -> None:
        for chunk in self._sharded_chunks:
            chunk.mark_params_stale()

    def _start_gathers(self) -> None:
        for chunk in self._sharded_chunks:
            chunk.start_param_sync()

    def _update_and_gather_buckets(self, scale: GradScale) -> None:
        together = [rule for rule in self._rules if rule.is_collective]
        self.update_ranges(scale, self._ranges, rules=together)
        rest = [rule for rule in self._rules if not rule.is_collective]
        for group in (group for scheduler in self._gather_schedulers for group in scheduler.gather_each()):
            places = [(bucket.buffer, bucket.layout.index) for bucket in group.buckets]
            ranges = [one for place in places for one in self._ranges_in.get(place, [])]
            self.update_ranges(scale, ranges, rules=rest)


def _gather_sync(
    shards: Sequence[Tensor], buffer: FlatBuffer, group: dist.ProcessGroup | None, *, to_all: bool
) -> Tensor:
    """Gathers a buffer's values from all ranks' shards to the CPU: [N], the shards' dtype.

    shards: this rank's shard of each bucket, [n] each. to_all: gathers to all ranks; otherwise only to the first rank,
    and the other ranks return zeros. NOTE: waits for the device.
    """
    whole = torch.zeros(buffer.layout.numel, dtype=shards[0].dtype)
    for bucket, shard in zip(buffer.layout.buckets, shards, strict=True):
        span = slice(bucket.span.start, bucket.span.end)
        if group_size(group) == 1:
            whole[span].copy_(shard)
            continue
        assert group is not None
        sent = shard.cpu() if dist.get_backend(group) == "gloo" else shard
        is_reader = to_all or group_rank(group) == 0
        parts = [torch.empty_like(sent) for _ in range(group_size(group))] if is_reader else None
        if to_all:
            dist.all_gather(parts, sent, group=group)
        else:
            dist.gather(sent, parts, group=group, group_dst=0)
        if parts is not None:
            whole[span].copy_(torch.cat(parts))
    return whole


def _scattered(whole: Tensor | None, buffer: FlatBuffer, bucket: int, *, like: Tensor) -> Tensor:
    """Scatters a bucket from the first rank and returns this rank's shard.

    whole: the buffer's values on the first rank, [N]; None elsewhere. like: a tensor with the shard's shape, dtype and
    device, which may be overwritten.
    """
    group = buffer.data_parallel_group
    spans = [buffer.layout.shard(bucket, rank) for rank in range(group_size(group))]
    parts = None if whole is None else [whole[one.start : one.end].to(like) for one in spans]
    if parts is not None and group_size(group) == 1:
        return parts[0]
    dist.scatter(like, parts, group=group, group_src=0)
    return like


def _checked(
    state: ParameterState | None, chunk: int, buffer: FlatBuffer, kinds: Sequence[str]
) -> Mapping[str, Mapping[str, Tensor]]:
    """Returns a chunk's state; raises ValueError if an entry of the buffer is missing or has the wrong size."""
    of_chunk = state[chunk] if state is not None and chunk < len(state) else {}
    for slot in buffer.slots:
        for kind in kinds:
            found = of_chunk.get(slot.name, {}).get(kind)
            if found is None or found.numel() != slot.span.numel:
                size = "missing" if found is None else f"of {found.numel()} elements"
                raise ValueError(
                    f"parameter state {kind} of {slot.name} is {size}: must have {slot.span.numel} elements, on the "
                    "first data-parallel rank"
                )
    return of_chunk


def _check_buffers(
    chunks: Sequence[_BaseDataParallel],
    per_model_buffers: Mapping[int, Sequence[FlatBuffer]],
    *,
    group: dist.ProcessGroup | None,
) -> None:
    known = {index: list(chunk.all_buffers) for index, chunk in enumerate(chunks)}
    given = {index: list(buffers) for index, buffers in per_model_buffers.items()}
    # An optimizer may not update only part of a chunk, because its update makes all other shards stale.
    if given != known:
        sizes = {index: len(buffers) for index, buffers in known.items()}
        raise ValueError(
            f"per_model_buffers has { {index: len(buffers) for index, buffers in given.items()} } buffers: must "
            f"contain all buffers of each model chunk, {sizes}. One DistributedOptimizer updates both dense and "
            "expert parameters"
        )
    groups = [buffer.data_parallel_group for buffers in known.values() for buffer in buffers]
    num_ranks = [group_size(one) for one in groups]
    if groups and group_size(group) not in num_ranks:
        raise ValueError(
            f"data_parallel_group has {group_size(group)} ranks: must be the group over which buffers are sharded, "
            f"which has {num_ranks[0]} ranks"
        )


def check_same_sharding(chunks: list[_BaseDataParallel], *, is_wanted: bool) -> bool:
    """Returns whether the chunks are sharded.

    Raises ValueError if only some chunks are sharded, or if sharding is wanted but missing.
    """
    sharded = [chunk.ddp_config.use_distributed_optimizer for chunk in chunks]
    if len(set(sharded)) > 1:
        raise ValueError(
            f"DistributedDataParallelConfig.use_distributed_optimizer of the chunks is {sharded}: must be equal"
        )
    if is_wanted and not sharded[0]:
        raise ValueError(
            "OptimizerConfig.use_distributed_optimizer is True and "
            "DistributedDataParallelConfig.use_distributed_optimizer is False: set both"
        )
    return sharded[0]


def check_sharded_gradients(chunks: list[_BaseDataParallel], *, optimizer: str) -> None:
    """Raises ValueError if shard_gradients of the chunks does not fit the optimizer.

    All chunks must shard gradients with distributed_fused_adam, and none with other optimizers.
    """
    wanted = optimizer == "distributed_fused_adam"
    found = [chunk.ddp_config.shard_gradients for chunk in chunks]
    if any(is_sharded != wanted for is_sharded in found):
        raise ValueError(
            f"OptimizerConfig.optimizer is {optimizer} and DistributedDataParallelConfig.shard_gradients of the chunks "
            f"is {found}: must be {wanted} for all chunks, or optimizer must be "
            + ("adam" if wanted else "distributed_fused_adam")
        )
