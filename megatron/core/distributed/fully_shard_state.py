"""What torch's fully_shard keeps to itself and we need: where the shards of a module's parameters lie, and their state.

The one place that knows torch's private names; a torch without them is refused, by name.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor

__all__ = [
    "ParamShard",
    "ReduceScatter",
    "check_torch",
    "fsdp_modules",
    "mesh_of",
    "refresh_dtypes",
    "reshard_all",
    "shards_of",
]

# Of 2.13; of the first, 2.11 and 2.12 have one group a module, and they lack the second and third.
_NEEDED = ("_get_fsdp_state", "reset_iter_state", "set_reduce_scatter_unused_params", "set_custom_reduce_scatter")


def check_torch() -> None:
    """Raises ValueError where this torch has another fully_shard than the one that is known here."""
    missing = [name for name in _NEEDED if name not in vars(FSDPModule)]
    if missing:
        raise ValueError(
            f"torch is {torch.__version__}, whose FSDPModule has no {', '.join(missing)}: use_torch_fsdp2 needs torch "
            "2.13; other data-parallel modes, such as use_distributed_optimizer, do not"
        )


def mesh_of(group: dist.ProcessGroup | None, device: torch.device) -> DeviceMesh:
    """The ranks of a group as fully_shard takes them; None: this rank alone. Collective where that has no group yet."""
    if group is None:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    # Named, or it would equal that of an earlier group of these ranks, which torch's caches may still have.
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(f"shards {group.group_name}",))


class ParamShard:
    """This rank's rows of a parameter that fully_shard has cut along its first dimension.

    param: what its module has between passes, a DTensor [*parameter shape]. start, numel: the rows are elements
    [start, start + numel) of the flattened parameter. padded_numel: what is sent of them, as many on all ranks; behind
    the rows it is zero. owner: the module that has it, and its name there.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self.param: nn.Parameter = state.sharded_param
        self.owner: tuple[nn.Module, str] = (state._module_info.module, state._module_info.param_name)
        self.padded_numel: int = state.padded_sharded_param_size.numel()
        self.numel: int = state.sharded_size.numel()
        whole, rows = state._orig_size, state.padded_sharded_param_size[0]
        per_row = whole.numel() // whole[0] if whole.numel() else 0
        self.start: int = min(state.shard_mesh.get_local_rank() * rows, whole[0]) * per_row

    @property
    def local(self) -> torch.Tensor:
        """The rows: [n, *], the parameter's dtype."""
        return _local_of(self.param)

    @torch.no_grad()
    def move_to(self, place: torch.Tensor) -> None:
        """Lets the rows lie in `place`, [padded_numel], their dtype, zero behind them; nothing if they do.

        A parameter that was put in the place of `param` gives its values, and `param` is the module's again: whoever
        holds it, or has hooks on it, goes on.
        """
        module, name = self.owner
        now = self._state.sharded_param
        if module._parameters[name] is not now and module._parameters[name] is not vars(self._state).get(
            "_unsharded_param"
        ):
            now = module._parameters[name]
        rows = place.view(self._state.padded_sharded_param_size).narrow(0, 0, self.local.shape[0])
        given = _local_of(now)
        if given.numel() and given.data_ptr() != rows.data_ptr() and not given.is_meta:
            rows.copy_(given)
        if now is not self.param:
            self._state.sharded_param = self.param
            if module._parameters[name] is now:
                module._parameters[name] = self.param
        self._state._sharded_param_data = place
        self.param._local_tensor = rows  # type: ignore[attr-defined]

    def grad_in(self, place: torch.Tensor) -> DTensor:
        """`place`, [numel], the parameter's dtype, as torch takes a gradient of the rows: [*parameter shape]."""
        grad: DTensor = self._state.to_sharded_dtensor(place.view(self._state.sharded_size))
        return grad

    @property
    def has_unreduced_grad(self) -> bool:
        """Whether there are gradients that no rank but this one has."""
        whole = vars(self._state).get("_unsharded_param")
        return self._state.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def _local_of(param: nn.Parameter) -> torch.Tensor:
    assert isinstance(param, DTensor), "fully_shard has made it one"
    return param._local_tensor


def shards_of(module: FSDPModule) -> list[ParamShard]:
    """Those of the parameters that fully_shard was given with this module, not with modules inside it."""
    return [ParamShard(state) for group in module._get_fsdp_state()._fsdp_param_groups for state in group.fsdp_params]


def fsdp_modules(root: nn.Module) -> Iterator[FSDPModule]:
    """All modules of `root` that fully_shard was given, from the outside in."""
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def refresh_dtypes(root: nn.Module) -> None:
    """Lets torch look at the dtypes of shards again, after these were converted."""
    for module in fsdp_modules(root):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            group._init_mp_dtypes()
            for state in group.fsdp_params:
                # Those of the first gather, which torch keeps and fills anew.
                state.all_gather_outputs, state._unsharded_inner_tensors = [], []
                vars(state).pop("_unsharded_param", None)


def reshard_all(root: nn.Module) -> None:
    """Lets go of all gathered parameters: the next that asks for them gets what the shards are now."""
    for module in fsdp_modules(root):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            group._to_sharded()
