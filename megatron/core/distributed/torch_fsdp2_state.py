"""torch's private state of a module that fully_shard has sharded: shards, gathered parameters and module changes.

No other file of this package uses the private names of fully_shard; versions of torch without them are rejected.
ParamShard is this rank's part of a parameter. GatheredParams frees parameters that an update has made stale.
WrappedShards detects changes to the module that its shards do not reflect. The flat tensors that hold shards are in
torch_fsdp2_shards.py.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron import torch_range
from megatron.core.device import default_device
from megatron.core.device.torch_internals import is_in_backward, storage_id
from megatron.core.distributed.data_parallel_base import changed_after_wrapping

__all__ = [
    "GatheredParams",
    "ParamShard",
    "ReduceScatter",
    "WrappedShards",
    "as_fsdp",
    "check_torch",
    "fsdp_modules",
    "mesh_of",
    "reduce_unused_params",
    "refresh_dtypes",
    "reset_passes",
    "reshard_after_forward_over",
    "reshard_all",
    "shards_of",
    "split_mesh_of",
    "wait_for_sums",
    "watch_passes",
]

_changed = partial(changed_after_wrapping, wrapper="TorchFullyShardedDataParallel", allowed="before wrapping")
_NEEDED = ("_get_fsdp_state", "set_custom_reduce_scatter", "set_force_sum_reduction_for_comms")


def check_torch() -> None:
    """Raises ValueError if torch's FSDPModule lacks a method that this file uses."""
    missing = [name for name in _NEEDED if name not in vars(FSDPModule)]
    if missing:
        raise ValueError(
            f"torch is {torch.__version__}, whose FSDPModule has no {', '.join(missing)}: use_torch_fsdp2 requires "
            f"torch {torch_range()}; other data-parallel modes, such as use_distributed_optimizer, do not"
        )


def mesh_of(group: dist.ProcessGroup | None, device: torch.device) -> DeviceMesh:
    """Returns the mesh of a group's ranks, for fully_shard; group: None creates a group of this rank alone."""
    if group is None:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    # torch queries a mesh's device type for its current device. A plan, on the meta device, has none.
    kind = "cpu" if device.type == "meta" else device.type
    # Without a name, the mesh would equal the mesh of an earlier group of these ranks, which torch's caches may still
    # hold.
    return DeviceMesh.from_group(group, kind, mesh_dim_names=(f"shards {group.group_name}",))


def split_mesh_of(group: dist.ProcessGroup, device: torch.device, *, part_size: int) -> DeviceMesh:
    """Returns a mesh [parts, part_size] of a group's ranks, in their order. Collective.

    part_size must divide the number of ranks. torch's mesh for an integer reshard_after_forward would require all ranks
    of the job in one fully_shard group.
    """
    ranks = dist.get_process_group_ranks(group)
    parts = [ranks[start : start + part_size] for start in range(0, len(ranks), part_size)]
    part, place = divmod(ranks.index(dist.get_rank()), part_size)
    across = [one[place] for one in parts]
    backend = dist.get_backend(group)
    groups = [dist.new_group(one, backend=backend, use_local_synchronization=True) for one in (across, parts[part])]
    names = (f"parts {groups[0].group_name}", f"shards {groups[1].group_name}")
    kind = "cpu" if device.type == "meta" else device.type
    return DeviceMesh.from_group(groups, kind, mesh=torch.tensor(parts, dtype=torch.int32), mesh_dim_names=names)


# Shards.


class ParamShard:
    """This rank's rows of a parameter that fully_shard has split along its first dimension.

    param: the DTensor that the module stores between passes, [*parameter shape]. start, numel: the rows are elements
    [start, start + numel) of the flattened parameter. padded_numel: elements that this rank sends, the same number on
    all ranks; the padding is zero. owner: the module that contains the parameter, and the parameter's name in it.
    places: all such pairs, if the parameter is shared.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self.param: nn.Parameter = state.sharded_param
        self.is_trained = self.param.requires_grad
        info = state._module_info
        self.owner: tuple[nn.Module, str] = (info.module, info.param_name)
        self.places = [self.owner, *zip(info.shared_modules, info.shared_param_names, strict=True)]
        self.padded_numel: int = state.padded_sharded_param_size.numel()
        self.numel: int = state.sharded_size.numel()
        whole, rows = state._orig_size, state.padded_sharded_param_size[0]
        per_row = whole.numel() // whole[0] if whole.numel() else 0
        self.start: int = min(state.shard_mesh.get_local_rank() * rows, whole[0]) * per_row
        self.note_converted()

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows: [n, *], the parameter's dtype."""
        return _local_of(self.param)

    @property
    def device(self) -> torch.device:
        """The device of the rows; for rows on the meta device, their future device."""
        if not self.local.is_meta or default_device().type == "meta":
            return self.local.device
        return torch.device("cpu") if self._state.offload_to_cpu else torch.device(self._state.device)

    @property
    def whole(self) -> nn.Parameter | None:
        """The gathered parameter, [*parameter shape], with or without memory; None before the first gather."""
        return vars(self._state).get("_unsharded_param")

    @property
    def after_forward(self) -> nn.Parameter | None:
        """The parameter between forward and backward, sharded over fewer ranks: a DTensor [*parameter shape]."""
        return vars(self._state).get("_sharded_post_forward_param")

    @property
    def version(self) -> int:
        """A number that changes with every write to the parameter, or to its memory, that autograd sees."""
        return int(self._memory._version) + self.param._version

    @property
    def is_elsewhere(self) -> bool:
        """Whether different data was assigned to the parameter, so that its recorded memory is no longer used."""
        return self.local.data_ptr() != self._address or storage_id(self.param.untyped_storage()) != self._storage

    def note_converted(self) -> None:
        """Records that torch has replaced the storage of the parameter."""
        self._memory: torch.Tensor = self._state._sharded_param_data
        self._address, self._storage = self.local.data_ptr(), storage_id(self.param.untyped_storage())

    def take_in(self) -> None:
        """Copies the values of a parameter that has replaced `param`, as load_state_dict(assign=True) does.

        The module's attribute is set to `param` again, so that references to it and its hooks remain valid.
        """
        self.move_to(self._memory)

    @torch.no_grad()
    def move_to(self, place: torch.Tensor) -> None:
        """Moves the rows to `place`: [padded_numel], the parameter's dtype, zero after the rows."""
        rows = place.view(self._state.padded_sharded_param_size).narrow(0, 0, self.local.shape[0])
        now = [(module, name, module._parameters.get(name)) for module, name in self.places]
        others = [one for _, _, one in now if isinstance(one, DTensor) and one is not self.param]
        for given in (self.local, *(_local_of(one) for one in others)):
            if given.numel() and given.data_ptr() != rows.data_ptr() and not given.is_meta:
                rows.copy_(given)
        for module, name, one in now:
            if isinstance(one, DTensor):
                module._parameters[name] = self.param
        self._state.sharded_param = self.param
        self._state._sharded_param_data = place
        if self.local.is_meta:
            self._exchange_for(rows)
        else:
            self.param._local_tensor = rows  # type: ignore[attr-defined]
        self.note_converted()

    def leave_meta(self) -> None:
        """Allocates memory for rows that are on the meta device, as zeros."""
        # Only frozen shards are allocated here. Their memory is from torch's allocator, because FSDP2 itself pins it.
        is_pinned = self._state.pin_memory
        self.move_to(torch.zeros(self.padded_numel, dtype=self.param.dtype, device=self.device, pin_memory=is_pinned))

    def _exchange_for(self, rows: torch.Tensor) -> None:
        # A DTensor's own device cannot be changed. Swapping preserves the object that others refer to, with its hooks.
        marks = vars(self.param).copy()
        other = nn.Parameter(self._state.to_sharded_dtensor(rows), requires_grad=self.param.requires_grad)
        torch.utils.swap_tensors(self.param, other)
        vars(self.param).update(marks)

    def grad_in(self, place: torch.Tensor) -> DTensor:
        """Wraps `place` as the parameter's gradient: [numel], the parameter's dtype -> DTensor [*parameter shape]."""
        grad: DTensor = self._state.to_sharded_dtensor(place.view(self._state.sharded_size))
        return grad

    @property
    def has_unreduced_grad(self) -> bool:
        """Whether this rank has accumulated gradients that were not reduced."""
        whole = self.whole
        return self._state.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)

    def drop_unreduced_grad(self) -> None:
        """Drops gradients that were not reduced."""
        self._state.unsharded_accumulated_grad = None
        if (whole := self.whole) is not None:
            whole.grad = None


def _local_of(param: torch.Tensor) -> torch.Tensor:
    assert isinstance(param, DTensor), "the parameter was not sharded by fully_shard"
    return param._local_tensor


def shards_of(module: FSDPModule) -> list[ParamShard]:
    """Returns the shards of parameters that fully_shard manages with this module, excluding nested modules."""
    return [ParamShard(state) for group in _groups_of(module) for state in group.fsdp_params]


# Torch's groups of parameters.


def _groups_of(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    # torch 2.11 has at most one group, under a different name.
    found = vars(state).get("_fsdp_param_groups", [vars(state).get("_fsdp_param_group")])
    return [group for group in found if group is not None]


def as_fsdp(module: nn.Module) -> FSDPModule:
    """Returns the module as an FSDPModule; fully_shard must have been applied to it."""
    assert isinstance(module, FSDPModule), "fully_shard was not applied to the module"
    return module


def fsdp_modules(root: nn.Module) -> Iterator[FSDPModule]:
    """Iterates over the modules in `root` that fully_shard was applied to, outermost first."""
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def reshard_after_forward_over(module: FSDPModule, mesh: DeviceMesh) -> None:
    """Makes a module shard its parameters over only the second axis of `mesh` from forward to backward.

    The module must have been sharded with reshard_after_forward=True. Its backward then gathers only over that axis.
    """
    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group in _groups_of(module):
        group.post_forward_mesh_info = info
        for state in group.fsdp_params:
            state.post_forward_mesh_info = info
            # Reads only the shape.
            state._init_sharded_post_forward_param_metadata(
                torch.empty(state._orig_size, dtype=torch.float32, device="meta")
            )


def refresh_dtypes(root: nn.Module) -> None:
    """Makes torch re-read the dtypes of shards after they were converted."""
    for module in fsdp_modules(root):
        for group in _groups_of(module):
            group._init_mp_dtypes()
            for state in group.fsdp_params:
                # Tensors of the first gather, which torch keeps and reuses.
                state.all_gather_outputs, state._unsharded_inner_tensors = [], []
                vars(state).pop("_unsharded_param", None)


def reshard_all(root: nn.Module) -> None:
    """Frees all gathered parameters. Their next use gathers the current shards."""
    for module in fsdp_modules(root):
        for group in _groups_of(module):
            group._to_sharded()


def reduce_unused_params(module: FSDPModule) -> None:
    """Makes a module reduce zeros for parameters that backward did not reach.

    Backward may therefore reach different parameters on different ranks.
    """
    is_known = "set_reduce_scatter_unused_params" in vars(FSDPModule)
    if is_known:
        module.set_reduce_scatter_unused_params(True, recurse=False)
    for group in _groups_of(module):
        # Torch 2.11 and 2.12 omit unused parameters from the reduction.
        post_backward = group.post_backward if is_known else partial(_post_backward_of_all, group, group.post_backward)
        group.post_backward = partial(_post_backward_if_run, group, post_backward)


def _post_backward_if_run(group: Any, post_backward: Callable[..., None], *args: Any) -> None:
    # In no_sync torch reads the gradients of gathered parameters, which do not exist before the first gather.
    if group.reduce_grads or all("_unsharded_param" in vars(state) for state in group.fsdp_params):
        post_backward(*args)


def _post_backward_of_all(group: Any, post_backward: Callable[..., None], *args: Any) -> None:
    for state in group.fsdp_params if group.reduce_grads else ():
        whole = vars(state).get("_unsharded_param")
        if whole is not None and whole.requires_grad and whole.grad is None:
            if state.unsharded_accumulated_grad is None:
                whole.grad = torch.zeros_like(whole)
    post_backward(*args)


def watch_passes(
    module: FSDPModule,
    *,
    forward_begins: Callable[[], None],
    reduction_begins: Callable[[], None],
    backward_ends: Callable[[bool], None],
) -> None:
    """Registers functions to be called at each forward and backward of a module.

    forward_begins: called before parameters are used, in a forward or a recomputed forward. reduction_begins: called
    before gradients are reduced. backward_ends: called after the backward of one or more forwards, with a flag for
    whether its gradients are reduced or being reduced.
    """
    for group in _groups_of(module):
        group.pre_forward = partial(_pre_forward_watched, group.pre_forward, forward_begins)
        group.post_backward = partial(
            _post_backward_watched,
            group,
            group.post_backward,
            reduction_begins=reduction_begins,
            backward_ends=backward_ends,
        )


def _pre_forward_watched(pre_forward: Callable[..., Any], forward_begins: Callable[[], None], *args: Any) -> Any:
    forward_begins()
    return pre_forward(*args)


def _post_backward_watched(
    group: Any,
    post_backward: Callable[..., None],
    *args: Any,
    reduction_begins: Callable[[], None],
    backward_ends: Callable[[bool], None],
) -> None:
    is_reduced = group.reduce_grads
    if is_reduced:
        reduction_begins()
    post_backward(*args)
    backward_ends(is_reduced)


def wait_for_sums(module: FSDPModule) -> None:
    """Makes the current stream wait for the reduced gradients of a module, as torch does when a backward ends."""
    for group in _groups_of(module):
        # None if torch has waited already. Gradients offloaded to the host are copied synchronously, because they are
        # added to existing ones.
        if group._post_reduce_event is not None:
            group.device_handle.current_stream().wait_event(group._post_reduce_event)


def _wait_for_streams_sync(state: Any) -> None:
    state._device_handle.synchronize()


def reset_passes(root: nn.Module) -> None:
    """Makes torch discard a forward or backward that an error interrupted, after its collectives have completed."""
    module = as_fsdp(root)
    state: Any = module._get_fsdp_state()
    if state._is_root is None:
        # No forward has run yet.
        return
    if "reset_iter_state" in vars(FSDPModule):
        module.reset_iter_state()
        return
    # This is torch 2.13's reset_iter_state, with a wait for all streams instead of its events.
    _wait_for_streams_sync(state)
    context = state._comm_ctx
    context.all_gather_state = context.reduce_scatter_state = None
    context.post_forward_order.clear()
    for inside in fsdp_modules(root):
        inside._get_fsdp_state()._training_state = TrainingState.IDLE
        for group in _groups_of(inside):
            if group._all_gather_result is not None and (work := group._all_gather_result.all_gather_work) is not None:
                work.wait()
            group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
            group._reshard_after_forward_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


# Gathered parameters.


class GatheredParams:
    """Frees gathered parameters that an update has made stale. shards: all shards of the module, including frozen ones.

    [Note: kept gathered] Between microbatches, and after a forward without backward, parameters may stay gathered. The
    root's parameters do, as do parameters with reshard_after_forward=False or after set_reshard_after_backward(False).
    With an integer reshard_after_forward, copies that are sharded over fewer ranks remain; here they are treated as
    gathered. If shards change in the meantime, modules would compute with old values. Therefore, before each forward of
    the module, or of a submodule that is called directly, all gathered parameters are freed if a torch optimizer has
    stepped since, or if shards were written to (loaded weights, a custom optimizer). The wrapper also calls `drop` at
    its own updates, for kernels whose writes autograd does not see. After a forward without autograd no parameter stays
    gathered, because code that handles parameters next, such as the construction of an optimizer, must see the shards.
    """

    def __init__(self, module: nn.Module, shards: Sequence[ParamShard]) -> None:
        self._module, self._shards = module, shards
        self._is_stale, self._is_in_forward = False, False
        self._versions = self._current_versions()
        # Runs before fully_shard's own hook, which gathers the parameters.
        module.register_forward_pre_hook(self._before_forward, prepend=True)
        module.register_forward_hook(self._after_forward, always_call=True)
        inside = [owner for shard in shards for owner, _ in shard.places]
        for other in dict.fromkeys([*fsdp_modules(module), *inside]):
            if other is not module:
                other.register_forward_pre_hook(self._before_one, prepend=True)
        # Registered on all torch optimizers, because the optimizers that a script builds are not known here. The hook
        # must not keep the model alive.
        hook = register_optimizer_step_post_hook(_StepHook(weakref.ref(self)))
        weakref.finalize(self, hook.remove)

    def drop(self) -> None:
        """Frees all gathered parameters."""
        reshard_all(self._module)
        self._is_stale, self._versions = False, self._current_versions()

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Records that a torch optimizer has stepped."""
        # Parameters are freed later, because the optimizer may step inside a backward that still reads some of them.
        self._is_stale = True

    def _before_forward(self, *unused: Any) -> None:
        self._before_one()
        self._is_in_forward = True

    def _before_one(self, *unused: Any) -> None:
        # Inside a backward, a forward recomputes activations. None of the parameters that it reads were updated.
        if self._is_in_forward or is_in_backward():
            return
        if self._is_stale or self._versions != self._current_versions():
            self.drop()

    def _after_forward(self, *unused: Any) -> None:
        self._is_in_forward = False
        if not torch.is_grad_enabled() and not is_in_backward():
            self.drop()

    def _current_versions(self) -> list[int]:
        # A version counts writes to the parameter and to the flat tensor that holds its rows.
        return [shard.version for shard in self._shards]


class _StepHook:
    def __init__(self, gathered: "weakref.ref[GatheredParams]") -> None:
        self._gathered = gathered

    def __call__(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        gathered = self._gathered()
        if gathered is not None:
            gathered.note_step(optimizer)


# Changes of the module.


class WrappedShards:
    """Detects changes to a wrapped module, and copies the values of parameters that load_state_dict has assigned.

    shards: all shards of the module, including frozen ones.
    """

    def __init__(self, module: nn.Module, shards: Sequence[ParamShard]) -> None:
        self._module, self._shards = module, shards
        self._own = {shard.param for shard in shards}
        by_place = {place: shard for shard in shards for place in shard.places}
        self._by_name = {name: by_place[place] for name, place in _places(module) if place in by_place}
        of_module: dict[nn.Module, dict[str, ParamShard]] = {}
        for (owner, name), shard in by_place.items():
            of_module.setdefault(owner, {})[name] = shard
        for owner, by_name in of_module.items():
            owner.register_load_state_dict_pre_hook(partial(_check_loaded, list(by_name)))
            # Runs after torch's own hook, which records new parameters.
            owner.register_load_state_dict_post_hook(partial(_take_in, list(by_name.values())))

    def sharded(self, param: nn.Parameter) -> nn.Parameter:
        """Returns the sharded parameter of a gathered parameter; other parameters are returned unchanged."""
        if param in self._own:
            return param
        found = (shard.param for shard in self._shards if shard.whole is param or shard.after_forward is param)
        return next(found, param)

    def find_change(self) -> str | None:
        """Describes the first change that would exclude a parameter from reduction or update; None if there is none.

        _module_change_finder (distributed_data_parallel.py) is its counterpart for modules in DistributedDataParallel.
        """
        now = dict(self._module.named_parameters(remove_duplicate=False))
        for name, param in now.items():
            shard = self._by_name.get(name)
            if shard is None:
                if param.requires_grad:
                    return _changed(name, "added")
            elif all(param is not known for known in (shard.param, shard.whole, shard.after_forward)):
                return _changed(name, "replaced")
            elif shard.is_trained != param.requires_grad or shard.is_trained != shard.param.requires_grad:
                return _changed(name, "frozen" if shard.is_trained else "unfrozen")
            elif shard.is_elsewhere:
                return _changed(name, "moved or assigned other data")
        return next((_changed(name, "removed") for name in self._by_name if name not in now), None)


def _places(module: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    for prefix, inside in module.named_modules(remove_duplicate=False):
        for name, _ in inside.named_parameters(recurse=False, remove_duplicate=False):
            yield (f"{prefix}.{name}" if prefix else name), (inside, name)


def _check_loaded(names: Sequence[str], *of_load: Any) -> None:
    _, state_dict, prefix, *_ = of_load
    for name in names:
        given = state_dict.get(f"{prefix}{name}")
        if isinstance(given, torch.Tensor) and not isinstance(given, DTensor):
            raise ValueError(
                f"load_state_dict was given {prefix}{name} as a plain tensor of shape {tuple(given.shape)} with "
                "TorchFullyShardedDataParallel: must be a DTensor, as in its state_dict. Load whole tensors before "
                "the module is wrapped, or load a checkpoint"
            )


def _take_in(shards: Sequence[ParamShard], *unused: Any) -> None:
    for shard in shards:
        shard.take_in()
