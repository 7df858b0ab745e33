"""TorchFullyShardedDataParallel: torch's fully_shard with the interface of the other data-parallel wrappers.

This file also contains ScaledReduceScatter, which reduces gradients with collectives.py. Units and the flat tensors of
their shards are in torch_fsdp2_shards.py, torch's private state in torch_fsdp2_state.py, the begin and end of an
iteration in torch_fsdp2_iteration.py, and values of parameters on the meta device in torch_fsdp2_init.py.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from megatron.core.device import default_device
from megatron.core.distributed.collectives import ReductionPolicy, reduce_bucket_, shard_of
from megatron.core.distributed.consistency import GradChecks, check_wraps_agree
from megatron.core.distributed.data_parallel_base import (
    _BaseDataParallel,
    check_params,
    check_wrapper_types,
    expert_ranks_differ,
    gradient_scale,
    groups_or_existing,
)
from megatron.core.distributed.grad_hooks import is_completed_later
from megatron.core.distributed.iteration import stage_group_of
from megatron.core.distributed.layout import ParamRange, Span
from megatron.core.distributed.torch_fsdp2_config import TorchFullyShardedDataParallelConfig
from megatron.core.distributed.torch_fsdp2_init import DeferredValues, InitFn
from megatron.core.distributed.torch_fsdp2_iteration import (
    EndOfBackwardRelease,
    FsdpIteration,
    StreamingRelease,
    UnitRelease,
)
from megatron.core.distributed.torch_fsdp2_shards import (
    ReleasedShardBuffer,
    ShardedFlatBuffer,
    ShardHookRunner,
    Unit,
    UnitKind,
    UnitShards,
    find_units,
    in_order_of_backward,
    repeated_layers,
    unit_groups,
)
from megatron.core.distributed.torch_fsdp2_state import (
    GatheredParams,
    ParamShard,
    ReduceScatter,
    WrappedShards,
    as_fsdp,
    check_torch,
    mesh_of,
    reduce_unused_params,
    refresh_dtypes,
    reset_passes,
    reshard_after_forward_over,
    shards_of,
    split_mesh_of,
)
from megatron.core.logical_tensors import canonical_name
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.tensor_parallel.kept_dtypes import dtype_after_cast, mark_keep_in_fp32
from megatron.core.tensor_parallel.param_attributes import is_served


@dataclass(frozen=True)
class ShardWeights:
    """This rank's shard of a parameter.

    flat: the flat tensor that contains the range, [N]; fp32 if modules compute in 16 bits (model_dtype).
    """

    range: ParamRange
    flat: torch.Tensor
    model_dtype: torch.dtype
    is_frozen: bool = False

    @property
    def values(self) -> torch.Tensor:
        """The shard's elements: [n], flat's dtype, a view."""
        return self.range.view_of(self.flat)


class TorchFullyShardedDataParallel(_BaseDataParallel):
    """Wraps a module whose parameters, gradients and optimizer state are sharded over data-parallel ranks (ZeRO-3).

    A unit (a layer, the rest of the model, or experts that are sharded over separate ranks) is gathered before its
    forward and its backward, and its gradients are reduced when its backward ends. Every backward outside `no_sync`
    reduces its gradients, which accumulate in this rank's shards. 16-bit parameters have fp32 shards, which the
    optimizer updates; modules use rounded copies.

    A step consists of `zero_grad_buffer`, forward and backward of each microbatch (all but the last in `accumulate` or
    in `no_sync`), `finish_grad_sync`, the optimizer's update and `note_update`. A parameter that backward did not reach
    has a zero gradient.

    config: only calculate_per_token_loss and deterministic_mode are used. sub_modules_to_wrap: the modules that become
    units, or their classes; None means the members of the outermost ModuleLists. disable_bucketing: makes the whole
    module one unit. process_group: the ranks over which all parameters are sharded, or all of this rank's process
    groups; an alternative to pg_collection, used by Megatron scripts. pg_collection: None means the groups of
    parallel_state, or all ranks if there are none. param_init_fn: called with each module that has its own parameters
    or buffers on the meta device, and initializes them; without it, a GPTModel sets its initial values and other
    modules need reset_parameters().

    The constructor is collective and raises ValueError if the module cannot be wrapped.
    """

    ddp_config: TorchFullyShardedDataParallelConfig

    def __init__(
        self,
        config: ModelParallelConfig,
        ddp_config: TorchFullyShardedDataParallelConfig,
        module: nn.Module,
        sub_modules_to_wrap: Iterable[type[nn.Module] | nn.Module] | None = None,
        disable_bucketing: bool = False,
        process_group: dist.ProcessGroup | ProcessGroupCollection | None = None,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        param_init_fn: InitFn | None = None,
    ) -> None:
        check_wrapper_types(
            "TorchFullyShardedDataParallel",
            config=(config, ModelParallelConfig),
            ddp_config=(ddp_config, TorchFullyShardedDataParallelConfig),
            module=(module, nn.Module),
        )
        super().__init__(module)
        self.config, self.ddp_config = config, ddp_config
        self.pg_collection = _chosen_groups(process_group, pg_collection)
        deferred = DeferredValues(module, param_init_fn)
        check_wraps_agree(
            module,
            self.pg_collection,
            settings=_settings_of_all_ranks(config, ddp_config, disable_bucketing=disable_bucketing),
            stage_group=stage_group_of(self.pg_collection),
            check_alone=partial(_check_settings, module, self.pg_collection, ddp_config=ddp_config, deferred=deferred),
        )
        layers = [] if disable_bucketing else _layers(module, sub_modules_to_wrap)
        self.units = find_units(module, layers, experts_apart=expert_ranks_differ(self.pg_collection))
        _check_classes(self.units)
        sharding = _Sharding(config, ddp_config, self.pg_collection)
        self._shards = sharding.shard(self.units)
        sharding.set_prefetch(layers)
        order = in_order_of_backward(self.units, layers)
        is_later = partial(is_completed_later, config=config, groups=self.pg_collection)
        self._flat_buffers = buffers = sharding.build_buffers(self._shards, order, is_later=is_later)
        # Trained shards of meta parameters have memory now, in the buffers.
        deferred.fill(self._shards.all)
        self._wrapped = WrappedShards(module, self._shards.all)
        # Later writes to the shards make gathered parameters stale.
        self._gathered = GatheredParams(module, self._shards.all)
        groups_of_units = unit_groups(buffers, order)
        self._hook_runner = hook_runner = ShardHookRunner(
            [group for of_unit in groups_of_units.values() for group in of_unit],
            is_later=is_later,
            sharded=self._wrapped.sharded,
        )
        hook_runner.hooks.adopt()
        checks = GradChecks.of(ddp_config)
        units: UnitRelease
        if ddp_config.release_gradients:
            units = StreamingRelease(groups_of_units, buffers, hook_runner=hook_runner, checks=checks)
        else:
            units = EndOfBackwardRelease(buffers, hook_runner=hook_runner, checks=checks)
        self._iteration = FsdpIteration(
            buffers,
            checks,
            groups=self.pg_collection,
            hook_runner=hook_runner,
            units=units,
            find_change=self._wrapped.find_change,
        )
        # Last, because its hooks run before those of fully_shard and of GatheredParams.
        self._iteration.watch(module)
        self.launch_order = self._iteration
        # Configures torch for the following backward passes.
        self._is_last, self._is_reducing = True, True

    @property
    def all_buffers(self) -> Sequence[ShardedFlatBuffer]:
        """This rank's shards of all trained parameters and of their gradients."""
        return self._flat_buffers

    def shard_weights(self) -> list[ShardWeights]:
        """Returns this rank's shard of each parameter, including frozen ones."""
        weights = [
            ShardWeights(
                ParamRange(slot.name, slot.param, slot.span, slot.start), buffer.param_data, buffer.model_dtype
            )
            for buffer in self._flat_buffers
            for slot in buffer.slots
        ]
        for name, shard in self._shards.frozen:
            flat = shard.local.detach().view(-1)
            held = ParamRange(name, shard.param, Span(0, flat.numel()), shard.start)
            weights.append(ShardWeights(held, flat, flat.dtype, is_frozen=True))
        return weights

    # Gradients, in the order of a step.

    def zero_grad_buffer(self, *, caller: Hashable = None) -> None:
        """Sets all gradients to zero and begins an iteration; call before the first microbatch."""
        self._iteration.begin()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Returns a context for all backwards of a step but the last. Each adds its reduced gradients to the shards."""
        with self._backwards(is_last=False, is_reducing=self._is_reducing):
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Returns a context in which unreduced gradients accumulate on each rank; a backward outside it must follow."""
        with self._backwards(is_last=False, is_reducing=False):
            yield

    def start_grad_sync(self, *unused: Any) -> None:
        """Does nothing, because each backward has reduced its gradients."""

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Completes the iteration's gradients; call after the last microbatch. Collective.

        Raises NonFiniteGradientError on all ranks if the check is enabled and any rank's shard is NaN or infinite.
        Raises ValueError on a rank whose last backward was in `no_sync`, or whose parameters were frozen or replaced
        since wrapping. The other ranks then raise RemoteRankError, as they do if a rank has called reset_iteration.
        force_all_reduce: must be False, because no rank has memory for all gradient sums.
        """
        if force_all_reduce:
            raise ValueError(
                "finish_grad_sync: force_all_reduce must be False with TorchFullyShardedDataParallel, which provides "
                "each rank with the sums of its shards only"
            )
        self._iteration.finish()
        # An update may follow, which would make parameters that are still gathered stale.
        self._gathered.drop()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiplies all gradients by `scaling_factor`, a number or a tensor [] of any float dtype."""
        for buffer in self._flat_buffers:
            buffer.scale_grads(scaling_factor)

    def reset_iteration(self) -> None:
        """Discards an iteration after an error, so that the next step does not depend on it.

        Must be called on the ranks that caught the error. Ranks that reach finish_grad_sync, or the optimizer's step,
        raise RemoteRankError there and must call it as well. A rank that is already waiting for this rank in a forward
        or backward continues to wait.
        """
        reset_passes(self.module)
        self._tell_torch(is_last=True, is_reducing=True)
        self._iteration.reset()

    # Parameters.

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields names and sharded parameters, even while the module's parameters are gathered."""
        for name, param in super().named_parameters(*args, **kwargs):
            yield name, self._wrapped.sharded(param)

    def note_update(self) -> None:
        """Records that an optimizer has updated the shards; frees parameters that are still gathered."""
        self._gathered.drop()

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Frees all gathered parameters; modules gather them again before they read them."""
        self._gathered.drop()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Converts shards in place for `.to(dtype)` and similar calls, and preserves their hooks and attributes.

        The optimizer must be built afterwards. fp32 shards of 16-bit parameters stay fp32. Raises ValueError for casts
        that must precede the wrapping: to the other 16-bit dtype, and if a unit's parameters would differ in dtype.
        """
        for buffer in self._flat_buffers:
            _check_cast(fn, buffer)
        params = [slot.param for buffer in self._flat_buffers for slot in buffer.slots]
        hooks = {param: param._post_accumulate_grad_hooks for param in params}
        frozen = [shard for _, shard in self._shards.frozen]
        marks = {param: vars(param).copy() for param in [*params, *(shard.param for shard in frozen)]}
        for param in params:
            param.grad = None
        result = super()._apply(fn, recurse)
        # torch has swapped the contents of these objects, so attributes and hooks are set again.
        for param, of_param in marks.items():
            vars(param).update(of_param)
        for param, called in hooks.items():
            if called:
                param._post_accumulate_grad_hooks = called
        for shard in frozen:
            shard.note_converted()
        for buffer in self._flat_buffers:
            buffer.rebuild()
        refresh_dtypes(self.module)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "a TorchFullyShardedDataParallel cannot be copied, because process groups cannot be copied: wrap "
            "another module and load this state_dict into it"
        )

    # Internals.

    @contextmanager
    def _backwards(self, *, is_last: bool, is_reducing: bool) -> Iterator[None]:
        before = self._is_last, self._is_reducing
        self._tell_torch(is_last=is_last, is_reducing=is_reducing)
        try:
            yield
        finally:
            self._tell_torch(is_last=before[0], is_reducing=before[1])

    def _tell_torch(self, *, is_last: bool, is_reducing: bool) -> None:
        root = as_fsdp(self.module)
        root.set_is_last_backward(is_last)
        root.set_requires_gradient_sync(is_reducing)
        self._is_last, self._is_reducing = is_last, is_reducing
        self._iteration.tell(is_last_backward=is_last)


def _check_cast(fn: Callable[[torch.Tensor], torch.Tensor], buffer: ShardedFlatBuffer) -> None:
    dtypes: dict[torch.dtype, str] = {}
    for slot in buffer.slots:
        cast = fn(torch.empty(0, dtype=slot.param.dtype, device=slot.param.device)).dtype
        dtypes.setdefault(dtype_after_cast(slot.param, cast), slot.name)
        if cast.itemsize < 4 and buffer.model_dtype.itemsize < 4 and cast != buffer.model_dtype:
            raise ValueError(
                f"{slot.name} is cast to {cast} after it was wrapped, and its module computes in {buffer.model_dtype}: "
                "cast the module before TorchFullyShardedDataParallel wraps it"
            )
    if len(dtypes) > 1:
        found = ", ".join(f"{name} would be {dtype}" for dtype, name in dtypes.items())
        raise ValueError(
            f"parameters that are sharded together would differ in dtype, because some keep a dtype of their own "
            f"({found}): cast the module before TorchFullyShardedDataParallel wraps it"
        )


# Reduction with collectives.py.


class ScaledReduceScatter(ReduceScatter):
    """Reduce-scatter for fully_shard that scales gradients and sums them with collectives.py, following `policy`."""

    def __init__(self, scale: float, policy: ReductionPolicy) -> None:
        self._scale, self._policy = scale, policy

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates a communication buffer: [*size], dtype."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce-scatters input_tensor, [ranks * N], into output_tensor, [N], of the same dtype.

        Overwrites the input. op: ignored; the reduction is always a sum. On a GPU the current stream waits, not the
        host.
        """
        if self._scale != 1.0:
            input_tensor.mul_(self._scale)
        reduce_bucket_(input_tensor, group, sharded=True, policy=self._policy).wait()
        output_tensor.copy_(shard_of(input_tensor, group))


def _scale_(flat: torch.Tensor, *, factor: float) -> None:
    if factor != 1.0:
        flat.mul_(factor)


# Wrapping, in the order of the constructor.


def _chosen_groups(
    process_group: dist.ProcessGroup | ProcessGroupCollection | None, pg_collection: ProcessGroupCollection | None
) -> ProcessGroupCollection:
    """Returns the groups of the arguments; a single process_group shards both dense and expert parameters."""
    if process_group is not None and pg_collection is not None:
        raise ValueError("process_group and pg_collection are both given: give only one of them")
    if process_group is not None and not isinstance(process_group, ProcessGroupCollection):
        return ProcessGroupCollection(dp=process_group, dp_cp=process_group, expt_dp=process_group)
    return pg_collection or process_group or groups_or_existing(None)


def _settings_of_all_ranks(
    config: ModelParallelConfig, ddp_config: TorchFullyShardedDataParallelConfig, *, disable_bucketing: bool
) -> dict[str, object]:
    of_config = ("calculate_per_token_loss", "deterministic_mode")
    return {
        "wrapper": "TorchFullyShardedDataParallel",
        **{f"TorchFullyShardedDataParallelConfig.{name}": value for name, value in vars(ddp_config).items()},
        **{f"ModelParallelConfig.{name}": vars(config)[name] for name in of_config},
        "disable_bucketing": bool(disable_bucketing),
    }


def _check_settings(
    module: nn.Module,
    groups: ProcessGroupCollection,
    *,
    ddp_config: TorchFullyShardedDataParallelConfig,
    deferred: DeferredValues,
) -> None:
    """Raises ValueError if a module cannot be wrapped with these groups."""
    check_torch()
    if not dist.is_initialized():
        raise ValueError(
            "TorchFullyShardedDataParallel was built before torch.distributed.init_process_group was called: call it "
            "first, because fully_shard requires a process group"
        )
    check_params(module)
    deferred.check()
    if group_size(groups.pp) > 1:
        raise ValueError(
            f"pipeline_model_parallel_size is {group_size(groups.pp)} with use_torch_fsdp2: each microbatch of each "
            "stage would gather all of its parameters again; set only one of them"
        )
    _check_ranks_after_forward(ddp_config.reshard_after_forward, groups)
    for name, param in module.named_parameters():
        if is_served(param):
            raise ValueError(
                f"{name} is served by a WeightGradQueue (--delay-wgrad-compute, "
                "--overlap-dispatch-backward-with-experts-wgrad), but fully_shard reduces gradients in each module's "
                "backward: call release() on the queue, and omit the flag with --use-torch-fsdp2"
            )
        if not param.numel() and param.requires_grad:
            raise ValueError(
                f"parameter {name} has shape {tuple(param.shape)}, without elements: fully_shard cannot reduce its "
                "gradient; remove it from the module, or set its requires_grad to False"
            )
        if not param.dim() or not param.is_contiguous():
            raise ValueError(
                f"parameter {name} has shape {tuple(param.shape)} and strides {param.stride()}: fully_shard splits "
                "contiguous parameters with at least one dimension by rows; give it shape [1], or make it contiguous"
            )


def _check_ranks_after_forward(reshard_after_forward: bool | int, groups: ProcessGroupCollection) -> None:
    """Raises ValueError for a number of ranks that does not divide a group over which parameters are sharded."""
    sizes = {"data-parallel": group_size(groups.dp_cp)}
    # Experts held by a single rank are not sharded, so they accept any number.
    if expert_ranks_differ(groups) and group_size(groups.expt_dp) > 1:
        sizes["expert-data-parallel"] = group_size(groups.expt_dp)
    for name, num_ranks in sizes.items():
        if not isinstance(reshard_after_forward, bool) and num_ranks % reshard_after_forward:
            raise ValueError(
                f"reshard_after_forward is {reshard_after_forward}: must be true, false, or a divisor of the "
                f"{num_ranks} {name} ranks, the number of ranks over which parameters stay sharded between forward "
                "and backward"
            )


def _layers(module: nn.Module, wanted: Iterable[type[nn.Module] | nn.Module] | None) -> list[nn.Module]:
    """Returns the modules that become units: given modules and instances of given classes, outermost only."""
    if wanted is None:
        return repeated_layers(module)
    wanted = list(wanted)
    classes = tuple(kind for kind in wanted if isinstance(kind, type))
    chosen = {id(one) for one in wanted if not isinstance(one, type)}
    found: list[nn.Module] = []

    def look(inside: nn.Module) -> None:
        for child in inside.children():
            if isinstance(child, classes) or id(child) in chosen:
                found.append(child)
            else:
                look(child)

    look(module)
    if wanted and not found:
        names = ", ".join(sorted({kind.__name__ if isinstance(kind, type) else type(kind).__name__ for kind in wanted}))
        raise ValueError(
            f"sub_modules_to_wrap is {names}: the module contains none of them; pass classes of its submodules"
        )
    return [layer for layer in found if any(True for _ in layer.parameters())]


def _check_classes(units: Iterable[Unit]) -> None:
    """Raises ValueError for a unit whose class torch cannot replace by a subclass."""
    for unit in units:
        base = type(unit.module)
        while base.__base__ not in (object, None):
            base = base.__base__
        if base is not nn.Module:
            raise ValueError(
                f"{unit.name or 'the model'} is a {type(unit.module).__name__}, whose first base class derives from "
                f"{base.__name__}: fully_shard requires one that derives from nn.Module; list that base first"
            )


@dataclass(frozen=True)
class _Shards:
    """This rank's shards of a module: of trained parameters by unit, and of frozen ones with their names."""

    trained: dict[Unit, UnitShards]
    frozen: list[tuple[str, ParamShard]]

    @property
    def all(self) -> list[ParamShard]:
        """The shards of all parameters, trained ones first."""
        trained = [pair for unit in self.trained.values() for pair in unit.shards]
        return [shard for _, shard in (*trained, *self.frozen)]


@dataclass(frozen=True)
class _Ranks:
    """The ranks over which dense units, or expert units, are sharded.

    mesh_after_forward: the ranks in parts, over which units other than the root stay sharded between forward and
    backward; None for all ranks. scale: factor of gradients before they are summed.
    """

    mesh: DeviceMesh
    mesh_after_forward: DeviceMesh | None
    scale: float


@dataclass(frozen=True)
class _Sharding:
    """Settings with which fully_shard is applied to units, and the flat buffers of their shards are built."""

    config: ModelParallelConfig
    ddp_config: TorchFullyShardedDataParallelConfig
    groups: ProcessGroupCollection

    def shard(self, units: Sequence[Unit]) -> _Shards:
        """Applies fully_shard to each unit, inner units first and the root unit last. Collective."""
        *inner, root = units
        # By UnitKind.is_expert.
        ranks = {one: self._ranks(inner, is_expert=one) for one in dict.fromkeys(unit.kind.is_expert for unit in units)}
        owners = _owners(root.module)
        shards = _Shards({}, [])
        for unit in units:
            self._fully_shard(unit, ranks[unit.kind.is_expert], is_root=unit is root)
            trained: list[tuple[str, ParamShard]] = []
            for shard in shards_of(as_fsdp(unit.module)):
                name, marks, hooks = owners[shard.owner]
                vars(shard.param).update(marks)
                if unit.dtype_of_half is not None and shard.param.requires_grad:
                    mark_keep_in_fp32(shard.param)
                if hooks:
                    shard.param._post_accumulate_grad_hooks = hooks
                (trained if shard.param.requires_grad else shards.frozen).append((name, shard))
            shards.trained[unit] = UnitShards(unit.name, trained)
        return shards

    def set_prefetch(self, layers: Sequence[nn.Module]) -> None:
        """Sets the layers that are gathered ahead of each layer; 0 is torch's default, the next layer."""
        modules = [as_fsdp(layer) for layer in layers]
        forward, backward = self.ddp_config.forward_prefetch, self.ddp_config.backward_prefetch
        for index, module in enumerate(modules):
            if forward:
                module.set_modules_to_forward_prefetch(modules[index + 1 : index + 1 + forward])
            if backward:
                module.set_modules_to_backward_prefetch(modules[max(0, index - backward) : index][::-1])

    def build_buffers(
        self, shards: _Shards, order: Sequence[Unit], *, is_later: Callable[[nn.Parameter], bool]
    ) -> list[ShardedFlatBuffer]:
        """Moves the trained shards to one flat buffer for each kind of units, in which units are in this order.

        is_later: whether a parameter's gradient is completed after backward; see is_completed_later.
        """
        releases = self.ddp_config.release_gradients
        by_kind: dict[UnitKind, list[UnitShards]] = {}
        for unit in order:
            # Gradients that are completed at the end must not delay the release of the others.
            parts = shards.trained[unit].split(is_later) if releases else [shards.trained[unit]]
            by_kind.setdefault(unit.kind, []).extend(part for part in parts if part.shards)
        buffer_type = ReleasedShardBuffer if releases else ShardedFlatBuffer
        return [
            buffer_type(kind, of_kind, group=self._group(is_expert=kind.is_expert), pin_memory=self._pins_shards)
            for kind, of_kind in by_kind.items()
            if of_kind
        ]

    def _group(self, *, is_expert: bool) -> dist.ProcessGroup | None:
        return self.groups.expt_dp if is_expert else self.groups.dp_cp

    @property
    def _pins_shards(self) -> bool:
        return self.ddp_config.cpu_offload and default_device().type != "cpu"

    def _ranks(self, inner: Sequence[Unit], *, is_expert: bool) -> _Ranks:
        """Builds the meshes of one kind. inner: all units but the root."""
        group = self._group(is_expert=is_expert)
        mesh, after_forward = mesh_of(group, default_device()), None
        num_ranks = self.ddp_config.reshard_after_forward
        is_split = not isinstance(num_ranks, bool) and 1 < num_ranks < group_size(group)
        if group is not None and is_split and any(unit.kind.is_expert == is_expert for unit in inner):
            after_forward = split_mesh_of(group, default_device(), part_size=num_ranks)
        scale = gradient_scale(group, self.groups, config=self.config, ddp_config=self.ddp_config)
        return _Ranks(mesh, after_forward, scale)

    def _fully_shard(self, unit: Unit, ranks: _Ranks, *, is_root: bool) -> None:
        half, config = unit.dtype_of_half, self.ddp_config
        for param in unit.module.parameters():
            # Parameters of inner units are sharded already.
            if param.requires_grad and param.dtype == half:
                # One unit at a time, so that only one unit exists in both dtypes.
                param.data = param.data.float()
        reduce_dtype = torch.float32 if config.grad_reduce_in_fp32 else half
        chosen = config.reshard_after_forward
        # An integer is a number of ranks, as in torch: 1 keeps parameters gathered.
        reshards = chosen if isinstance(chosen, bool) else chosen > 1
        fully_shard(
            unit.module,
            mesh=ranks.mesh,
            # The root's parameters are needed from the start of forward to the end of backward. None keeps them
            # gathered.
            reshard_after_forward=None if is_root and reshards else reshards,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=half, reduce_dtype=reduce_dtype if half else None, cast_forward_inputs=False
            ),
            offload_policy=CPUOffloadPolicy(pin_memory=self._pins_shards) if config.cpu_offload else OffloadPolicy(),
        )
        module = as_fsdp(unit.module)
        if ranks.mesh_after_forward is not None and not is_root:
            reshard_after_forward_over(module, ranks.mesh_after_forward)
        self._set_reduction(module, ranks)

    def _set_reduction(self, module: FSDPModule, ranks: _Ranks) -> None:
        # Ranks may differ in the parameters that backward reaches, such as experts without tokens; reductions must not
        # differ.
        reduce_unused_params(module)
        if ranks.mesh.size() == 1:
            module.set_gradient_divide_factor(1.0)
            module.set_all_reduce_hook(partial(_scale_, factor=ranks.scale))
        elif self.config.deterministic_mode or ranks.mesh.device_type == "cpu":
            policy = ReductionPolicy(deterministic=self.config.deterministic_mode)
            module.set_custom_reduce_scatter(ScaledReduceScatter(ranks.scale, policy))
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        else:
            module.set_gradient_divide_factor(1.0 / ranks.scale)


def _owners(root: nn.Module) -> dict[tuple[nn.Module, str], tuple[str, dict[str, Any], Any]]:
    """Maps each (module, local name) of a parameter to the parameter's full name, attributes and hooks.

    The name of a shared parameter is its first name.
    """
    names: dict[nn.Parameter, str] = {}
    owners = {}
    for module_name, module in root.named_modules(remove_duplicate=False):
        for local_name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            name = names.setdefault(param, canonical_name(f"{module_name}.{local_name}" if module_name else local_name))
            owners[module, local_name] = (name, vars(param).copy(), param._post_accumulate_grad_hooks)
    return owners
