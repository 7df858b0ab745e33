"""DistributedDataParallel: replicates a module and reduces its gradients in buckets, optionally during backward.

It builds buffers, bucket groups and a scheduler from a module, its settings and its process groups. layout.py computes
the layout of buffers, and scheduler.py decides when collectives are launched. GraphedReductions captures wrapped chunks
in the CUDA graph of a step.
"""

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import SideStream, default_device, release_cached_memory
from megatron.core.device import synchronize as wait_for_device
from megatron.core.distributed.bucket_group import ParamState, _ParamAndGradBucketGroup
from megatron.core.distributed.bucket_storage import (
    BucketLifetimeGrads,
    BufferSettings,
    GradStorage,
    MessagePool,
    PersistentGrads,
    ReleasedSum,
    ShardSum,
    _ParamAndGradBucket,
)
from megatron.core.distributed.collectives import ReductionPolicy
from megatron.core.distributed.consistency import (
    GradChecks,
    Measured,
    check_wraps_agree,
    follow_owner,
    settings_of_all_ranks,
)
from megatron.core.distributed.data_parallel_base import (
    _BaseDataParallel,
    changed_after_wrapping,
    check_params,
    check_wrapper_types,
    expert_ranks_differ,
    gradient_scale,
    groups_or_existing,
)
from megatron.core.distributed.ddp_debug import DdpDebug
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.forward_waits import ForwardWaits
from megatron.core.distributed.grad_hooks import GradHookRunner, is_completed_later
from megatron.core.distributed.grad_intake import GradIntake, StreamingIntake
from megatron.core.distributed.iteration import CollectiveTrace, stage_group_of
from megatron.core.distributed.launch_sequence import ReduceScope
from megatron.core.distributed.layout import BufferLayout, resolve_bucket_size
from megatron.core.distributed.param_and_grad_buffer import (
    BufferKind,
    BufferType,
    _ParamAndGradBuffer,
    buffer_kind,
    partition_buckets,
    require_same_layout,
)
from megatron.core.distributed.scheduler import ChunkSync, CollectiveScheduler, all_current
from megatron.core.graphs.capture import GraphParticipant
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.tensor_parallel.param_attributes import (
    param_facts,
)

logger = logging.getLogger(__name__)

# Longer than any interval between two launches of a healthy run.
_DEBUG_TIMEOUT_S = 600.0

# Maximum number of buckets in flight whose gradients are not freed yet. While one of them is waited for, the other
# keeps the links busy.
_MAX_IN_FLIGHT = 2
# Together with the bucket that is being filled, at most two buckets of gradients exist at any time.
_MAX_IN_FLIGHT_RELEASED = 1


class DistributedDataParallel(_BaseDataParallel):
    """Wraps a module and moves its parameters that require grad, and their gradients, into flat buffers.

    A step is `zero_grad_buffer`, forward and backward of each microbatch (all but the last in `no_sync`) and
    `finish_grad_sync`. Then `param.grad` is None and `param.main_grad` is the mean over the ranks. With
    calculate_per_token_loss it is the sum, which finalize_model_grads divides by the number of tokens. With
    use_distributed_optimizer only this rank's shard of each bucket holds the result. A rank whose backward did not
    reach a parameter contributes zeros. After catching an error in a step, call `reset_iteration`. The module's own
    (nn.Module) buffers are not synchronized.

    With shard_gradients there is no `param.main_grad`. The gradients of every backward outside `no_sync` are reduced by
    the end of that backward and added to this rank's shards, so all ranks must run the same number of backwards. If
    only some ranks catch an error, the others must not run a further backward in the iteration.

    config: only calculate_per_token_loss, deterministic_mode and gradient_accumulation_fusion are used.
    disable_bucketing: builds one bucket per buffer. pg_collection: None means parallel_state's groups or, without them,
    one group of all ranks. full_param_layout: None, or the result of DistributedOptimizer.compute_full_param_layout;
    ValueError for other layouts. launch_order: the scheduler that this pipeline stage's other chunks use. Wrapping a
    chunk with a tied weight waits for the other stage (consistency.py), so build all chunks before wrapping the first.

    The constructor is collective over the stage. It raises the same ValueError on all ranks if parameters or settings
    differ. If a single rank cannot wrap its module, that rank raises ValueError and the others raise RemoteRankError.
    An argument of the wrong type raises TypeError.
    """

    launch_order: CollectiveScheduler

    def __init__(
        self,
        config: ModelParallelConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        full_param_layout: Mapping[BufferKind, BufferLayout] | None = None,
        *,
        launch_order: CollectiveScheduler | None = None,
    ) -> None:
        check_wrapper_types(
            "DistributedDataParallel",
            config=(config, ModelParallelConfig),
            ddp_config=(ddp_config, DistributedDataParallelConfig),
            module=(module, nn.Module),
        )
        super().__init__(module)
        self.config, self.ddp_config = config, ddp_config
        self.pg_collection = pg_collection or groups_or_existing(None)
        check_wraps_agree(
            module,
            self.pg_collection,
            settings=settings_of_all_ranks(
                config,
                ddp_config,
                disable_bucketing=disable_bucketing,
                chunk=launch_order.num_chunks if launch_order else 0,
            ),
            stage_group=launch_order.stage_group if launch_order else stage_group_of(self.pg_collection),
            check_alone=partial(_check_settings, module, self.pg_collection, config=config, ddp_config=ddp_config),
        )
        follow_owner(module, self.pg_collection.embd)
        self.launch_order = launch_order or build_launch_order(self.pg_collection, ddp_config)
        self.checks = GradChecks.of(ddp_config, module)
        built = _build_buffers(
            module,
            self.pg_collection,
            config=config,
            ddp_config=ddp_config,
            checks=self.checks,
            # Later stages end their last backward earlier, so several buckets would hide no communication there.
            single_bucket=disable_bucketing
            or (group_rank(self.pg_collection.pp) > 0 and not ddp_config.has_bucket_lifetime_grads),
        )
        require_same_layout("full_param_layout", full_param_layout, {buffer.kind: buffer.layout for buffer in built})
        _warn_of_settings(ddp_config, built, scheduler=self.launch_order)
        # Megatron's public name hides nn.Module.buffers; named_buffers still lists the module's own buffers.
        dense = [buffer for buffer in built if not buffer.is_expert]
        self.buffers = dense  # type: ignore[assignment,method-assign]
        self.expert_parallel_buffers = [buffer for buffer in built if buffer.is_expert]
        self._every_buffer = built
        # Bucket-lifetime gradients are reduced bucket by bucket, so that each can be freed.
        force_single = disable_bucketing and not ddp_config.has_bucket_lifetime_grads
        build = partial(_build_groups, force_single=force_single)
        chunk = f"chunk {self.launch_order.num_chunks}"
        self.bucket_groups = build(dense, name=f"{chunk} dense")
        self.expert_parallel_bucket_groups = build(self.expert_parallel_buffers, name=f"{chunk} experts")
        self._groups = [*self.bucket_groups, *self.expert_parallel_bucket_groups]
        self.param_to_bucket_group = {slot.param: group for group in self._groups for slot in group.slots}
        find_change = _module_change_finder(module, self.param_to_bucket_group)
        is_later = partial(is_completed_later, config=config, groups=self.pg_collection)
        self._hook_runner = GradHookRunner(self._groups, is_later=is_later)
        self.launch_order.attach(
            ChunkSync(
                self._in_order_of_backward(), module, find_change, self._zero_grads, self.checks, self._hook_runner
            )
        )
        self._hook_runner.hooks.adopt()
        self._intake = self._build_intake()
        self.align_param_gather = ddp_config.align_param_gather
        self.overlap_param_gather_with_optimizer_step = ddp_config.overlap_param_gather_with_optimizer_step
        self._waits = ForwardWaits(
            self.launch_order,
            self.param_to_bucket_group,
            {param: [group] for param, group in self.param_to_bucket_group.items()},
            prefetch=self._prefetches,
            root=module,
        )
        if ddp_config.overlap_param_gather:
            self.enable_forward_pre_hook()

    @property
    def all_buffers(self) -> list[_ParamAndGradBuffer]:
        """Dense and expert buffers, in the order in which their parameters first appear in the module."""
        return self._every_buffer

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the wrapped module's forward.

        Raises RuntimeError while parameters or gradients are offloaded to the host.
        """
        if any(buffer.is_offloaded for buffer in self._every_buffer):
            raise RuntimeError(
                "forward was called while parameters or gradients are offloaded to the host: call "
                "restore_grad_buffers, or reload_from_cpu of each buffer, first"
            )
        outputs = super().forward(*inputs, **kwargs)
        if isinstance(self._intake, StreamingIntake):
            self._intake.watch_backward_of(outputs)
        return outputs

    # Gradients, in the order of a step.

    def zero_grad_buffer(self, *, caller: Hashable = None) -> None:
        """Zeroes all gradients and begins an iteration; call before the first microbatch.

        If the same caller began an iteration and did not finish it, all ranks discard that iteration, which is
        collective with overlap. caller: an optimizer that calls this in addition to the training loop; None means the
        training loop.
        """
        self.launch_order.begin_iteration((self, caller))
        self._zero_grads()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Returns a context for all microbatches but the last, in which gradients accumulate and nothing is reduced."""
        before = [group.is_last_microbatch for group in self._groups]
        for group in self._groups:
            group.is_last_microbatch = False
        try:
            yield
        finally:
            for group, was_last in zip(self._groups, before):
                group.is_last_microbatch = was_last

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Returns a context for all microbatches but the last, as an alternative to `no_sync`.

        With shard_gradients, each backward is still reduced, but none is treated as the iteration's last. This is
        required only if release_gradients is set as well. Without shard_gradients, identical to `no_sync`.
        """
        if not self.ddp_config.shard_gradients:
            with self.no_sync():
                yield
            return
        before = [group.is_last_backward for group in self._groups]
        for group in self._groups:
            group.is_last_backward = False
        try:
            yield
        finally:
            for group, was_last in zip(self._groups, before):
                group.is_last_backward = was_last

    def register_grad_ready(self, param: nn.Parameter, *unused: Any) -> None:
        """Records that the caller has added a parameter's gradient to `param.main_grad`.

        Intended for gradients that autograd does not produce. They must be unscaled, because they are scaled before the
        reduction. Raises ValueError for a parameter that is not wrapped, and with shard_gradients or release_gradients.
        Further errors: see _ParamAndGradBucketGroup.register_grad_ready.
        """
        group = self.param_to_bucket_group.get(param)
        if group is None:
            names = (name for name, other in self.module.named_parameters() if other is param)
            raise ValueError(
                f"register_grad_ready was given {next(names, 'a parameter of another module')}: must be a parameter of "
                "the wrapped module that required grad when it was wrapped"
            )
        if self.ddp_config.has_bucket_lifetime_grads:
            raise ValueError(
                f"register_grad_ready was called with DistributedDataParallelConfig.{self._lifetime_setting}: "
                f"parameters have no main_grad; return the gradient to autograd, or disable {self._lifetime_setting}"
            )
        group.register_grad_ready(param)

    def start_grad_sync(self, *unused: Any) -> None:
        """Launches the reductions of this chunk, and of groups that precede its groups in launch order. Collective."""
        self.launch_order.start_grad_sync(self._groups)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Reduces all remaining gradients and waits for all reductions; call after the last microbatch. Collective.

        The first call on any chunk finishes all chunks that share a scheduler. force_all_reduce: accepted only without
        use_distributed_optimizer, where every rank receives all sums anyway; ValueError otherwise. Raises
        NonFiniteGradientError on all ranks if the check is enabled and a rank's gradient is NaN or infinite. If a rank
        has aborted the iteration, that rank raises its own error and the others RemoteRankError. RuntimeError is raised
        if an error in a hook interrupted this iteration.
        """
        if force_all_reduce and self.ddp_config.use_distributed_optimizer:
            raise ValueError(
                "finish_grad_sync: force_all_reduce and use_distributed_optimizer are both set, but the distributed "
                "optimizer provides each rank with the sums of its shards only: set only one of them"
            )
        self.launch_order.finish()
        self._hook_runner.check_whole()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiplies all gradients by `scaling_factor`, a number or a tensor [] of any float dtype.

        Raises RuntimeError while gradients are being reduced, and with release_gradients.
        """
        self._check_at_rest("scale_gradients")
        for buffer in self.all_buffers:
            buffer.scale_gradients(scaling_factor)

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """Moves gradients to the host and frees their device memory. Must be called between two steps.

        synchronize: waits until the device has completed all launched work. empty_cache: releases the unused memory
        that torch's allocator caches. Raises RuntimeError while gradients are being reduced.
        """
        self._check_at_rest("offload_grad_buffers")
        for buffer in self.all_buffers:
            buffer.offload_to_cpu(move_params=False)
        if synchronize:
            wait_for_device(self.device)
        if empty_cache:
            release_cached_memory(self.device)

    def restore_grad_buffers(self, synchronize: bool = True) -> None:
        """Moves gradients back to the device after offload_grad_buffers; synchronize: waits for the copies."""
        for buffer in self.all_buffers:
            buffer.reload_from_cpu(move_params=False)
        if synchronize:
            wait_for_device(self.device)

    def free_overlap_buffers(self) -> None:
        """Frees the communication buffers kept between iterations; later iterations reallocate them."""
        for group in self._groups:
            group.free_overlap_buffers()

    def reset_iteration(self) -> None:
        """Discards the iteration of all chunks of the scheduler, so that its error does not affect the next one.

        Must be called on every rank that caught an error. The other ranks receive RemoteRankError from finish_grad_sync
        and must then call it as well.
        """
        self.launch_order.reset()

    def freeze_order(self) -> None:
        """Fixes the order of collectives, because captured graphs contain it."""
        self.launch_order.freeze()

    def named_main_grads(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, main_grad) of all parameters that require grad: views, [*parameter shape], floating point.

        Raises ValueError with shard_gradients or release_gradients.
        """
        if self.ddp_config.has_bucket_lifetime_grads:
            raise ValueError(
                f"named_main_grads was called with DistributedDataParallelConfig.{self._lifetime_setting}: no rank "
                "stores whole gradients; use owned_grads of all_buffers for this rank's parts, or "
                "register_bucket_ready_hook for released gradients"
            )
        return ((slot.name, slot.main_grad) for buffer in self.all_buffers for slot in buffer.slots)

    # Parameters.

    def load_state_dict(self, state_dict: Mapping[str, Any], *strict: bool, assign: bool = False, **kwargs: Any) -> Any:
        """Copies the values of a state_dict into the wrapped module.

        state_dict: tensors of any shape and dtype. assign: has no effect, because parameters must remain views of their
        buffers.
        """
        return super().load_state_dict(state_dict, *strict[:1], **kwargs)

    def note_update(self) -> None:
        """Records that an optimizer has updated the parameters. The next agreement detects ranks that have not."""
        self.launch_order.note_update()

    def mark_params_stale(self) -> None:
        """Records that an optimizer has updated this rank's shards.

        Parameters must then be gathered before modules read them.
        """
        self.launch_order.mark_stale(self._groups)

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Launches the gathers of sharded parameters and, without overlap_param_gather, waits for them. Collective.

        Gathers in flight are relaunched only if force_dispatch is set. force_sync: also waits with
        overlap_param_gather.
        """
        groups = [group for group in self._groups if group.is_sharded]
        self.launch_order.start_param_sync(groups, again=force_dispatch)
        if force_sync or not self.ddp_config.overlap_param_gather:
            self.launch_order.finish_param_sync(groups)

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        """Waits for all parameters of this chunk. Collective.

        Also launches the next pending gather unless skip_next_bucket_dispatch is set.
        """
        self.launch_order.finish_param_sync(self._groups)
        if not skip_next_bucket_dispatch:
            self.launch_order.prefetch()

    def restore_params(self) -> None:
        """Gathers parameters as they are, if fp8_param_gather has gathered them in 8 bits. Collective.

        Call it before parameters are read for a checkpoint or a comparison of replicas.
        """
        packed = [bucket for group in self._groups for bucket in group.buckets if bucket.packed is not None]
        if packed:
            self.launch_order.finish_param_sync(self._groups)
            for handle in [bucket.gather(as_they_are=True) for bucket in packed]:
                handle.wait()

    def start_stale_param_sync(self, *unused: Any) -> None:
        """Starts pending gathers without waiting; used as a schedule's param_sync_func. Collective."""
        if not all_current(self._groups):
            self.launch_order.start_param_sync(self._groups)

    def wait_params(self, params: nn.Parameter | Iterable[nn.Parameter], *, prefetch: bool = False) -> None:
        """Waits until the given parameters may be read, for code that reads them outside their module.

        prefetch: also launches the next gather, provided that modules prefetch before their forward.
        """
        # Iterating over a single parameter would yield its rows, which are not parameters.
        params = [params] if isinstance(params, nn.Parameter) else params
        for group in dict.fromkeys(self.param_to_bucket_group[p] for p in params if p in self.param_to_bucket_group):
            self.launch_order.need(group, prefetch=prefetch and self._prefetches)

    def enable_forward_pre_hook(self) -> None:
        """Registers hooks that wait for a module's parameters before its forward and launch the next gather.

        See [Note: forward waits]. The module's state_dict and load_state_dict also wait, and are therefore collective
        while a gather is pending. Raises ValueError without overlap_param_gather, and if the hooks are already enabled.
        """
        if not self.ddp_config.overlap_param_gather:
            raise ValueError(
                "enable_forward_pre_hook was called with overlap_param_gather False: set it, or remove the call, "
                "because without overlap_param_gather the optimizer's step gathers all parameters"
            )
        if self._waits.is_attached:
            raise ValueError("enable_forward_pre_hook was called twice: call disable_forward_pre_hook first")
        # Scripts may have changed its public attributes, such as align_param_gather.
        self._waits.prefetch = self._prefetches
        for module in self.module.modules():
            self._waits.attach(module, kept=self)

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Removes the forward pre-hooks; ValueError if they are not enabled.

        param_sync: also gathers all parameters and waits for them. Collective.
        """
        if not self._waits.is_attached:
            raise ValueError("disable_forward_pre_hook was called without enable_forward_pre_hook")
        self._waits.detach()
        if param_sync:
            self.start_param_sync(force_sync=True)

    def broadcast_params(self) -> None:
        """Copies parameters from the first rank of each set of replicas to the others. Collective."""
        # Until the gather is complete, the first rank has new values only in its own shards.
        self.launch_order.finish_param_sync(self._groups)
        flats = {buffer: buffer.param_data for buffer in self.all_buffers}
        for buffer, flat in flats.items():
            _broadcast(flat, self._group_of_replicas(is_expert=buffer.is_expert))
        for param in self.module.parameters():
            if param not in self.param_to_bucket_group:
                _broadcast(param.data, self._group_of_replicas(is_expert=param_facts(param).is_expert))
        # Collectives do not count as writes, by which the optimizer's masters would follow.
        torch.autograd.graph.increment_version(list(self.module.parameters()))

    def release(self) -> nn.Module:
        """Unwraps the module and returns it, with all parameters gathered and without gradients. Collective.

        Used to freeze, unfreeze or replace parameters between two steps; afterwards the module must be wrapped again
        and a new optimizer built. Post-accumulate hooks are moved back to the parameters, from which the next wrapper
        adopts them. This wrapper must not be used afterwards.
        """
        if self._waits.is_attached:
            self.disable_forward_pre_hook(param_sync=False)
        self.launch_order.finish_param_sync(self._groups)
        self.launch_order.close()
        self._intake.release()
        self._hook_runner.hooks.give_back()
        return self.module

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "a DistributedDataParallel cannot be copied, because process groups cannot be copied: copy its `module` "
            "after wait_params(module.parameters()), and wrap the copy"
        )

    # Internals.

    @property
    def _prefetches(self) -> bool:
        return not (
            self.overlap_param_gather_with_optimizer_step
            or (self.align_param_gather and group_size(self.pg_collection.pp) > 1)
        )

    @property
    def _lifetime_setting(self) -> str:
        """Name of the enabled setting with which gradients have no persistent memory."""
        return "shard_gradients" if self.ddp_config.shard_gradients else "release_gradients"

    def _check_at_rest(self, call: str) -> None:
        moving = next((group for group in self._groups if group.is_moving), None)
        if moving is not None:
            raise RuntimeError(
                f"{call} was called while gradients of {moving.slots[0].name} are being reduced: call it before the "
                "last microbatch or after finish_grad_sync"
            )

    def _build_intake(self) -> "GradIntake | StreamingIntake":
        group_of, scheduler = self.param_to_bucket_group, self.launch_order
        if self.ddp_config.has_bucket_lifetime_grads:
            releases = self.ddp_config.release_gradients
            return StreamingIntake(group_of, scheduler, hook_runner=self._hook_runner, releases=releases)
        # In-place accumulation rounds differently from adding a late gradient, so timing would change results.
        is_fused = self.config.gradient_accumulation_fusion and not self.config.deterministic_mode
        return GradIntake(self._groups, scheduler, is_fused=is_fused)

    def _group_of_replicas(self, *, is_expert: bool) -> dist.ProcessGroup | None:
        return self.pg_collection.expt_dp if is_expert else self.pg_collection.dp_cp

    def _zero_grads(self) -> None:
        if isinstance(self._intake, StreamingIntake):
            self._intake.forget()
        for buffer in self.all_buffers:
            buffer.reset()

    def _in_order_of_backward(self) -> list[_ParamAndGradBucketGroup]:
        # A bucket is complete when backward has reached the first of its modules.
        places = {param: place for place, param in enumerate(self.module.parameters())}
        return sorted(self._groups, key=lambda group: -min(places[slot.param] for slot in group.slots))


def _broadcast(flat: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    if group_size(group) > 1:
        dist.broadcast(flat, group=group, group_src=0)


# From groups to a scheduler.


def build_launch_order(
    groups: ProcessGroupCollection, ddp_config: DistributedDataParallelConfig
) -> CollectiveScheduler:
    """Builds the scheduler shared by all model chunks of a stage; with ddp_debug, DdpDebug observes it. Collective."""
    stage_group = stage_group_of(groups)
    scheduler = CollectiveScheduler(
        stage_group,
        pp_group=groups.pp,
        stage_host=groups.tp_dp_cp_host,
        pp_host=groups.pp_host,
        overlap_grad_reduce=ddp_config.reduces_in_backward,
        reduce_scope=ReduceScope.CHUNK if ddp_config.has_bucket_lifetime_grads else ReduceScope.ITERATION,
        max_in_flight=_MAX_IN_FLIGHT_RELEASED if ddp_config.release_gradients else _MAX_IN_FLIGHT,
        trace=CollectiveTrace(stage_group, debug_timeout_s=_DEBUG_TIMEOUT_S if ddp_config.ddp_debug else None),
        sends_over=(
            groups.dp_cp,
            groups.intra_dp_cp,
            groups.expt_dp,
            groups.intra_expt_dp,
            groups.inter_dist_opt,
        ),
    )
    if ddp_config.ddp_debug:
        scheduler.observe(DdpDebug(scheduler.trace.stop))
    return scheduler


class GraphedReductions(GraphParticipant):
    """Captures the gathers and reductions of a stage's chunks in the CUDA graph of a step.

    chunks: all chunks of one scheduler, whose launch order and buckets remain fixed.

    With overlap_param_gather the captured step begins with stale shards: each replay gathers the current parameters,
    even if an evaluation has already gathered them.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        settings = chunks[0].ddp_config
        if settings.has_bucket_lifetime_grads:
            name = "shard_gradients" if settings.shard_gradients else "release_gradients"
            raise ValueError(
                f"DistributedDataParallelConfig.{name} is set: it allocates gradients during backward, but a CUDA "
                "graph requires persistent gradients; must be False for chunks in a graph"
            )
        self._chunks, self._scheduler = list(chunks), chunks[0].launch_order
        self._gathered = [
            group
            for chunk in chunks
            if chunk.ddp_config.overlap_param_gather
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
            if group.is_sharded
        ]

    def prepare(self) -> None:
        """Completes gathers in flight, so that they are not matched with gathers in the graph.

        Collective if parameters were gathered since the last update, a condition that is the same on all ranks.
        """
        if any(group.param_state is not ParamState.STALE for group in self._gathered):
            self._scheduler.finish_param_sync(self._gathered)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        with self._scheduler.captured_iteration(self._gathered):
            yield

    def captured(self) -> list[Measured | None]:
        """Ends the captured iteration and returns the gradient measurements of each chunk."""
        self._scheduler.forget_captured(self._gathered)
        return [None if chunk.checks is None else chunk.checks.take_measured() for chunk in self._chunks]

    def dropped(self) -> None:
        self._scheduler.forget_captured(self._gathered)

    def replayed(self, account: list[Measured | None]) -> None:
        self._scheduler.note_replayed(self._gathered)
        for chunk, measured in zip(self._chunks, account):
            if chunk.checks is not None and measured is not None:
                chunk.checks.restore_measured(measured)


# From a module and its settings to buffers and bucket groups.


def _check_settings(
    module: nn.Module,
    groups: ProcessGroupCollection,
    *,
    config: ModelParallelConfig,
    ddp_config: DistributedDataParallelConfig,
) -> None:
    """Raises ValueError if a module cannot be wrapped with these settings and groups."""
    check_params(module)
    _check_has_memory(module)
    if ddp_config.has_bucket_lifetime_grads:
        _check_contiguous(module, "shard_gradients" if ddp_config.shard_gradients else "release_gradients")
    if config.calculate_per_token_loss and ddp_config.average_in_collective:
        raise ValueError(
            "DistributedDataParallelConfig.average_in_collective and calculate_per_token_loss are both set: the "
            "collective must sum, because per-token loss divides by the number of tokens, not of ranks"
        )
    instances = ddp_config.num_distributed_optimizer_instances
    if instances > 1 and group_size(groups.inter_dist_opt) != instances:
        raise ValueError(
            f"DistributedDataParallelConfig.num_distributed_optimizer_instances is {instances}, and "
            f"pg_collection.inter_dist_opt has {group_size(groups.inter_dist_opt)} ranks: must be equal; pass the "
            "same num_distributed_optimizer_instances to initialize_model_parallel"
        )
    has_experts = any(param_facts(param).is_expert for param in module.parameters())
    # Otherwise experts would silently be summed over wrong ranks, or not at all.
    if has_experts and groups.dp_cp is not None and groups.expt_dp is None:
        raise ValueError(
            "pg_collection.expt_dp is None: must be the group of ranks that share the module's expert parameters"
        )
    tied = next((name for name, param in module.named_parameters() if param_facts(param).shared_embedding), None)
    # Otherwise the two copies would diverge, or one stage would wait for the other forever.
    if tied is not None and groups.embd is None:
        raise ValueError(f"pg_collection.embd is None: must be the group of the two stages that share {tied}")


def _check_has_memory(module: nn.Module) -> None:
    if default_device().type == "meta":
        return  # in a dry run, all parameters are on the meta device
    name = next((name for name, param in module.named_parameters() if param.requires_grad and param.is_meta), None)
    if name is not None:
        raise ValueError(
            f"parameter {name} is on the meta device: DistributedDataParallel requires whole parameters in memory; "
            "materialize the module first, or wrap it in TorchFullyShardedDataParallel, which materializes shards"
        )


def _check_contiguous(module: nn.Module, setting: str) -> None:
    # Hooks receive a shard in memory order, but with the parameter's logical shape.
    for name, param in module.named_parameters():
        if param.requires_grad and not param.is_contiguous():
            raise ValueError(
                f"parameter {name} has shape {tuple(param.shape)} and strides {param.stride()}: must be contiguous "
                f"with DistributedDataParallelConfig.{setting}; set param.data = param.data.contiguous() first"
            )


def _build_buffers(
    module: nn.Module,
    groups: ProcessGroupCollection,
    *,
    config: ModelParallelConfig,
    ddp_config: DistributedDataParallelConfig,
    checks: GradChecks | None,
    single_bucket: bool,
) -> list[_ParamAndGradBuffer]:
    """Builds one buffer per BufferKind and moves the parameters that require grad into these buffers.

    Experts have separate buffers if they are reduced over different ranks than dense parameters.
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
                # In debug mode a bucket must keep its values during reduction, so that writes to it are detected.
                deterministic=config.deterministic_mode or ddp_config.ddp_debug,
                average=ddp_config.average_in_collective,
                fp32_accumulation=ddp_config.reduce_scatter_with_fp32_accumulation,
                instances_group=groups.inter_dist_opt if group is not replicas else None,
                side=side,
            ),
            high_busbw=ddp_config.pad_buckets_for_high_nccl_busbw,
            fp32_patterns=tuple(ddp_config.param_name_patterns_for_fp32_local_accumulation),
            packs=kind.is_packed,
        )
        buffers.append(_new_buffer(kind, named_params, settings=settings, ddp_config=ddp_config, checks=checks))
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
    # named_parameters lists a parameter that two modules share only once.
    for name, param in module.named_parameters():
        if param.requires_grad:
            later = ddp_config.release_gradients and is_completed_later(param, config=config, groups=groups)
            fp32, packs = ddp_config.grad_reduce_in_fp32, ddp_config.fp8_param_gather
            kind = buffer_kind(param, grad_reduce_in_fp32=fp32, experts_apart=apart, completed_later=later, packs=packs)
            found.setdefault(kind, []).append((name, param))
    return found


def _new_buffer(
    kind: BufferKind,
    named_params: list[tuple[str, nn.Parameter]],
    *,
    settings: BufferSettings,
    ddp_config: DistributedDataParallelConfig,
    checks: GradChecks | None,
) -> _ParamAndGradBuffer:
    if not ddp_config.has_bucket_lifetime_grads:
        persistent = partial(PersistentGrads, checks=checks)
        return _ParamAndGradBuffer.of_kind(
            kind, named_params, settings=settings, storage=persistent, ddp_config=ddp_config
        )
    is_released = ddp_config.release_gradients and not kind.completed_later
    # A released sum may be part of a message buffer, which is then never closed.
    pool = MessagePool(kind.grad_dtype, named_params[0][1].device, is_kept=not is_released)

    def storage(bucket: _ParamAndGradBucket) -> GradStorage:
        total = ReleasedSum(bucket) if is_released else ShardSum(bucket)
        return BucketLifetimeGrads(bucket, memory=pool, total=total, checks=checks)

    return _ParamAndGradBuffer.of_kind(
        kind, named_params, settings=settings, storage=storage, flats={BufferType.PARAM}, ddp_config=ddp_config
    )


def _build_groups(
    buffers: Sequence[_ParamAndGradBuffer], *, name: str, force_single: bool
) -> list[_ParamAndGradBucketGroup]:
    """Builds the bucket groups of buffers.

    name: prefix of the groups' names. force_single: puts all buckets in one group.
    """
    groups = partition_buckets(buffers, force_single_bucket_group=force_single)
    for index, group in enumerate(groups):
        group.rename(f"{name} {index}")
    return groups


def _warn_of_settings(
    config: DistributedDataParallelConfig, buffers: list[_ParamAndGradBuffer], *, scheduler: CollectiveScheduler
) -> None:
    # Warns only once, for the stage's first chunk.
    if scheduler.num_chunks > 0 or group_rank(scheduler.stage_group) > 0:
        return
    is_narrow = any(buffer.grad_data.dtype.itemsize < 4 for buffer in buffers)
    has_packed = any(bucket.packed is not None for buffer in buffers for bucket in buffer.buckets)
    for words in config.without_effect(has_16_bit_grads=is_narrow, has_packed_params=has_packed):
        logger.warning("DistributedDataParallelConfig: %s has no effect", words)


# Changes to the module after wrapping.


def _module_change_finder(module: nn.Module, wrapped: Collection[nn.Parameter]) -> Callable[[], str | None]:
    """Returns a function that detects changes to `module` that would exclude a parameter from reduction or update.

    The function describes the first such change, or returns None if there is none. wrapped: the parameters in buffers.
    WrappedShards.find_change (torch_fsdp2_state.py) is its counterpart for modules sharded by fully_shard.
    """
    in_buffers = frozenset(wrapped)
    at_start = dict(module.named_parameters())
    addresses = {param: param.data_ptr() for param in wrapped}
    modules, params = list(module.modules()), list(at_start.values())

    def held() -> tuple[list[int], list[bool], list[int]]:
        # Runs once a step on each rank, so names are looked up only if something has changed.
        members = [id(one) for its in modules for one in (*its._parameters.values(), *its._modules.values())]
        return members, [param.requires_grad for param in params], [param.data_ptr() for param in wrapped]

    held_at_start = held()

    def find_change() -> str | None:
        if held() == held_at_start:
            return None
        now = dict(module.named_parameters())
        for name, param in now.items():
            if param.requires_grad == (param in in_buffers):
                continue
            before = at_start.get(name)
            if before is param:
                what = "unfrozen" if param.requires_grad else "frozen"
            else:
                what = "added" if before is None else "replaced"
            return _changed(name, what)
        if len(now) < len(at_start):
            return _changed(next(name for name in at_start if name not in now), "removed")
        lost = next(
            (name for name, param in at_start.items() if param in in_buffers and now.get(name) is not param), None
        )
        if lost is not None:
            return _changed(lost, "replaced")
        for name, param in now.items():
            if param.data_ptr() != addresses.get(param, param.data_ptr()):
                # The parameter is no longer a view of its buffer: forward would read memory that is never updated.
                return _changed(name, "moved, converted or assigned other data")
        return None

    return find_change


_changed = partial(
    changed_after_wrapping,
    wrapper="DistributedDataParallel",
    allowed="before wrapping, or between steps after release()",
)
