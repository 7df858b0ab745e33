"""What torch's fully_shard keeps to itself and we need: where the shards of a module's parameters lie, and their state.

The one place that knows torch's private names; a torch without them is refused, by name.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from megatron.core.device import default_device

__all__ = [
    "ParamShard",
    "PassWatcher",
    "ReduceScatter",
    "check_torch",
    "fsdp_modules",
    "mesh_of",
    "reduce_unused_params",
    "refresh_dtypes",
    "reset_passes",
    "reshard_all",
    "shards_of",
    "wait_for_sums",
    "watch_passes",
]

_NEEDED = ("_get_fsdp_state", "set_custom_reduce_scatter", "set_force_sum_reduction_for_comms")


def check_torch() -> None:
    """Raises ValueError where this torch has another fully_shard than the one that is known here."""
    missing = [name for name in _NEEDED if name not in vars(FSDPModule)]
    if missing:
        raise ValueError(
            f"torch is {torch.__version__}, whose FSDPModule has no {', '.join(missing)}: use_torch_fsdp2 needs torch "
            "2.11 to 2.13; other data-parallel modes, such as use_distributed_optimizer, do not"
        )


def mesh_of(group: dist.ProcessGroup | None, device: torch.device) -> DeviceMesh:
    """The ranks of a group as fully_shard takes them; None: this rank alone. Collective where that has no group yet."""
    if group is None:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    # Named, or it would equal that of an earlier group of these ranks, which torch's caches may still have.
    # torch asks a mesh's device which of its kind is current; in a plan, on the meta device, there is none to ask.
    kind = "cpu" if device.type == "meta" else device.type
    return DeviceMesh.from_group(group, kind, mesh_dim_names=(f"shards {group.group_name}",))


class ParamShard:
    """This rank's rows of a parameter that fully_shard has cut along its first dimension.

    param: what its module has between passes, a DTensor [*parameter shape]. start, numel: the rows are elements
    [start, start + numel) of the flattened parameter. padded_numel: what is sent of them, as many on all ranks; behind
    the rows it is zero. owner: the module that has it, and its name there; places: all of these, where it is shared.
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
        """The rows: [n, *], the parameter's dtype."""
        return _local_of(self.param)

    @property
    def device(self) -> torch.device:
        """The device of the rows; for rows on the meta device, the one they will be on."""
        if not self.local.is_meta or default_device().type == "meta":
            return self.local.device
        return torch.device("cpu") if self._state.offload_to_cpu else torch.device(self._state.device)

    @property
    def whole(self) -> nn.Parameter | None:
        """The gathered parameter, [*parameter shape], with or without memory; None before the first gather."""
        return vars(self._state).get("_unsharded_param")

    @property
    def version(self) -> int:
        """Changes with every write that autograd sees, to the parameter or to the memory behind it."""
        return int(self._memory._version) + self.param._version

    @property
    def is_elsewhere(self) -> bool:
        """Whether somebody has given the parameter other data."""
        return self.local.data_ptr() != self._address or self.param.untyped_storage()._cdata != self._storage

    def note_converted(self) -> None:
        """Records that torch has replaced the storage of the parameter."""
        self._memory: torch.Tensor = self._state._sharded_param_data
        self._address, self._storage = self.local.data_ptr(), self.param.untyped_storage()._cdata

    def take_in(self) -> None:
        """Lets a parameter that was put in the place of `param`, as by load_state_dict(assign=True), give its values;
        `param` is the module's again: whoever holds it, or has hooks on it, goes on.
        """
        self.move_to(self._memory)

    @torch.no_grad()
    def move_to(self, place: torch.Tensor) -> None:
        """Lets the rows lie in `place`, [padded_numel], their dtype, zero behind them; nothing if they do."""
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
        """Gives rows that are on the meta device memory of their own, zeros."""
        is_pinned = self._state.pin_memory
        self.move_to(torch.zeros(self.padded_numel, dtype=self.param.dtype, device=self.device, pin_memory=is_pinned))

    def _exchange_for(self, rows: torch.Tensor) -> None:
        # A DTensor's own device cannot be changed. The object stays the one that others have, and keeps its hooks.
        marks = vars(self.param).copy()
        other = nn.Parameter(self._state.to_sharded_dtensor(rows), requires_grad=self.param.requires_grad)
        torch.utils.swap_tensors(self.param, other)
        vars(self.param).update(marks)

    def grad_in(self, place: torch.Tensor) -> DTensor:
        """`place`, [numel], the parameter's dtype, as torch takes a gradient of the rows: [*parameter shape]."""
        grad: DTensor = self._state.to_sharded_dtensor(place.view(self._state.sharded_size))
        return grad

    @property
    def has_unreduced_grad(self) -> bool:
        """Whether there are gradients that no rank but this one has."""
        whole = self.whole
        return self._state.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)

    def drop_unreduced_grad(self) -> None:
        """Forgets these."""
        self._state.unsharded_accumulated_grad = None
        if (whole := self.whole) is not None:
            whole.grad = None


def _local_of(param: torch.Tensor) -> torch.Tensor:
    assert isinstance(param, DTensor), "fully_shard has made it one"
    return param._local_tensor


def shards_of(module: FSDPModule) -> list[ParamShard]:
    """Returns the shards of the parameters that fully_shard manages with this module, not with modules inside it."""
    return [ParamShard(state) for group in _groups_of(module) for state in group.fsdp_params]


def _groups_of(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    # One at most in 2.11.
    found = vars(state).get("_fsdp_param_groups", [vars(state).get("_fsdp_param_group")])
    return [group for group in found if group is not None]


def fsdp_modules(root: nn.Module) -> Iterator[FSDPModule]:
    """All modules of `root` that fully_shard was given, from the outside in."""
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def refresh_dtypes(root: nn.Module) -> None:
    """Lets torch look at the dtypes of shards again, after these were converted."""
    for module in fsdp_modules(root):
        for group in _groups_of(module):
            group._init_mp_dtypes()
            for state in group.fsdp_params:
                # Those of the first gather, which torch keeps and fills anew.
                state.all_gather_outputs, state._unsharded_inner_tensors = [], []
                vars(state).pop("_unsharded_param", None)


def reshard_all(root: nn.Module) -> None:
    """Lets go of all gathered parameters: the next that asks for them gets what the shards are now."""
    for module in fsdp_modules(root):
        for group in _groups_of(module):
            group._to_sharded()


def reduce_unused_params(module: FSDPModule) -> None:
    """Lets zeros be reduced for parameters that backward did not reach, so that ranks need not reach the same ones."""
    is_known = "set_reduce_scatter_unused_params" in vars(FSDPModule)
    if is_known:
        module.set_reduce_scatter_unused_params(True, recurse=False)
    for group in _groups_of(module):
        # Torch 2.11 and 2.12 leave them out of the message.
        post_backward = group.post_backward if is_known else partial(_post_backward_of_all, group, group.post_backward)
        group.post_backward = partial(_post_backward_if_run, group, post_backward)


def _post_backward_if_run(group: Any, post_backward: Callable[..., None], *args: Any) -> None:
    # In no_sync torch looks for gradients of what was never gathered, and there is nothing to look at.
    if group.reduce_grads or all("_unsharded_param" in vars(state) for state in group.fsdp_params):
        post_backward(*args)


def _post_backward_of_all(group: Any, post_backward: Callable[..., None], *args: Any) -> None:
    for state in group.fsdp_params if group.reduce_grads else ():
        whole = vars(state).get("_unsharded_param")
        if whole is not None and whole.requires_grad and whole.grad is None:
            if state.unsharded_accumulated_grad is None:
                whole.grad = torch.zeros_like(whole)
    post_backward(*args)


class PassWatcher(Protocol):
    """An observer of the forwards and backwards of one module that fully_shard was applied to."""

    def forward_begins(self) -> None:
        """Called when parameters are about to be used, in a forward or in one that backward recomputes."""
        ...

    def reduction_begins(self) -> None:
        """Called when gradients are about to be reduced."""
        ...

    def backward_ends(self, *, is_reduced: bool) -> None:
        """Called when the backward of one forward or more is over; is_reduced: gradients are reduced, or in flight."""
        ...


def watch_passes(module: FSDPModule, watcher: PassWatcher) -> None:
    """Tells a watcher of each forward and backward from now on."""
    for group in _groups_of(module):
        group.pre_forward = partial(_pre_forward_watched, watcher, group.pre_forward)
        group.post_backward = partial(_post_backward_watched, group, group.post_backward, watcher=watcher)


def _pre_forward_watched(watcher: PassWatcher, pre_forward: Callable[..., Any], *args: Any) -> Any:
    watcher.forward_begins()
    return pre_forward(*args)


def _post_backward_watched(group: Any, post_backward: Callable[..., None], *args: Any, watcher: PassWatcher) -> None:
    is_reduced = group.reduce_grads
    if is_reduced:
        watcher.reduction_begins()
    post_backward(*args)
    watcher.backward_ends(is_reduced=is_reduced)


def wait_for_sums(module: FSDPModule) -> None:
    """Lets the current stream wait until the gradients of a module are reduced, as torch does when a backward ends."""
    for group in _groups_of(module):
        # None where that has waited. What goes to the host is copied at once, as it is added to what is there.
        if group._post_reduce_event is not None:
            group.device_handle.current_stream().wait_event(group._post_reduce_event)


def _wait_for_streams_sync(state: Any) -> None:
    state._device_handle.synchronize()


def reset_passes(root: nn.Module) -> None:
    """Makes torch forget a forward or backward that an error ended; what was on its way is waited for."""
    assert isinstance(root, FSDPModule), "fully_shard has made it one"
    state: Any = root._get_fsdp_state()
    if state._is_root is None:
        # No forward has begun.
        return
    if "reset_iter_state" in vars(FSDPModule):
        root.reset_iter_state()
        return
    # torch 2.13 does the same in its reset; waiting for all streams takes the place of its events.
    _wait_for_streams_sync(state)
    context = state._comm_ctx
    context.all_gather_state = context.reduce_scatter_state = None
    context.post_forward_order.clear()
    for module in fsdp_modules(root):
        module._get_fsdp_state()._training_state = TrainingState.IDLE
        for group in _groups_of(module):
            if group._all_gather_result is not None and (work := group._all_gather_result.all_gather_work) is not None:
                work.wait()
            group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
            group._reshard_after_forward_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
