"""DeferredValues: initial values of parameters and buffers that are on the meta device when a module is sharded.

torch_fsdp2_shards.py contains the flat tensors in which shards are stored.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from megatron.core.device import default_device
from megatron.core.distributed.torch_fsdp2_state import ParamShard
from megatron.core.logical_tensors import canonical_name

InitFn = Callable[[nn.Module], object]
_Place = tuple[nn.Module, str]

# Fills memory of non-floating dtypes before its values are set; floating dtypes are filled with NaN.
_UNSET_BYTE = 0xA5


class KnownValues(Protocol):
    """Initial values of parameters, by name, such as InitialValues of the transformer."""

    def covers(self, name: str) -> bool: ...
    def fill(self, ranges: Iterable[tuple[str, int, torch.Tensor]]) -> None:
        """Sets ranges of parameters to their initial values.

        ranges: for each range, the parameter's name, the range's first element in the flattened parameter, and the
        destination: [n], any float dtype.
        """
        ...


@runtime_checkable
class KnowsInitialValues(Protocol):
    """A model that can set any range of its parameters to their initial values, such as GPTModel."""

    def initial_values(self) -> KnownValues: ...


@runtime_checkable
class Resets(Protocol):
    """A module that initializes its parameters and buffers in reset_parameters(), like torch's layers."""

    def reset_parameters(self) -> object: ...


class DeferredValues:
    """Records meta parameters and buffers before a module is sharded; initializes them once shards have memory.

    [Note: values of meta parameters] A model that knows its initial values (KnowsInitialValues) sets only this rank's
    rows. All other parameters and buffers, and with a param_init_fn all parameters and buffers, are set module by
    module in the order of `modules()`. The module's meta tensors are replaced by whole tensors, which
    param_init_fn(module) or its reset_parameters() sets. Then this rank's rows are kept and the rest is freed. Each
    rank thus draws whole tensors, so that a seed gives the same values on any number of ranks. 16-bit parameters are
    set in fp32 and rounded, as if the module were cast after construction.
    """

    def __init__(self, module: nn.Module, param_init_fn: InitFn | None = None) -> None:
        self._param_init_fn = param_init_fn
        # A plan allocates no memory, so it sets no values.
        self._is_planned = default_device().type == "meta"
        self._names = {inside: canonical_name(name) for name, inside in module.named_modules()}
        self._dtypes = {
            (inside, name): param.dtype
            for inside in self._names
            for name, param in inside.named_parameters(recurse=False, remove_duplicate=False)
            if param.is_meta
        }
        self._known: list[tuple[KnownValues, dict[_Place, str]]] = []
        if param_init_fn is None:
            self._ask(module)
        known = {place[0].get_parameter(place[1]) for _, places in self._known for place in places}
        turns: dict[nn.Module, list[str]] = {inside: [] for inside in self._names}
        for inside, name in self._dtypes:
            if inside.get_parameter(name) not in known:
                turns[inside].append(name)
        self._turns = {inside: names for inside, names in turns.items() if names or _meta_buffers(inside)}

    def check(self) -> None:
        """Raises ValueError if a parameter or buffer on the meta device has no known initial value."""
        if self._param_init_fn is not None or self._is_planned:
            return
        for inside, names in self._turns.items():
            first = self._name(inside, [*names, *_meta_buffers(inside)][0])
            kind = type(inside).__name__
            can_reset = isinstance(inside, Resets)
            if not can_reset:
                raise ValueError(
                    f"{first} is on the meta device and its {kind} has no reset_parameters() that would initialize "
                    "it: define it, or pass a param_init_fn to TorchFullyShardedDataParallel"
                )
            others = [name for name, param in inside.named_parameters(recurse=False) if not param.is_meta]
            if others:
                raise ValueError(
                    f"{first} is on the meta device and {self._name(inside, others[0])} of the same {kind} is not: "
                    "reset_parameters() would initialize both; put all on the meta device, or none"
                )

    def fill(self, shards: Sequence[ParamShard]) -> None:
        """Sets parameters and buffers that were on the meta device to their initial values.

        shards: all shards; trained shards must already have memory.
        """
        if self._is_planned:
            return
        for shard in shards:
            if shard.local.is_meta:
                shard.leave_meta()
        by_place = {place: shard for shard in shards for place in shard.places}
        for values, names in self._known:
            values.fill((name, by_place[place].start, _rows(by_place[place])) for place, name in names.items())
            for place in names:
                _round(_rows(by_place[place]), self._dtypes[place])
        for inside, own in self._turns.items():
            self._set(inside, {name: by_place[inside, name] for name in own})

    def _ask(self, module: nn.Module) -> None:
        """Finds the outermost modules that know their initial values, and the meta parameters they cover."""
        if not isinstance(module, KnowsInitialValues):
            for child in module.children():
                self._ask(child)
            return
        values, places = module.initial_values(), {}
        seen = set()
        for prefix, inside in module.named_modules():
            for name, param in inside.named_parameters(recurse=False):
                full = canonical_name(f"{prefix}.{name}" if prefix else name)
                if param.is_meta and param not in seen and values.covers(full):
                    seen.add(param)
                    places[inside, name] = full
        self._known.append((values, places))

    @torch.no_grad()
    def _set(self, inside: nn.Module, own: dict[str, ParamShard]) -> None:
        """Allocates whole tensors for one module, initializes them, and keeps this rank's part."""
        for name, shard in own.items():
            dtype = torch.promote_types(self._dtypes[inside, name], torch.float32)
            whole = nn.Parameter(self._memory(shard.param.shape, dtype), shard.param.requires_grad)
            # The code that sets a parameter may need to know how it is split.
            vars(whole).update(vars(shard.param))
            inside._parameters[name] = whole
        buffers = _meta_buffers(inside)
        for name, buffer in buffers.items():
            inside._buffers[name] = memory = self._memory(buffer.shape, buffer.dtype)
            vars(memory).update(vars(buffer))
        try:
            if self._param_init_fn is not None:
                self._param_init_fn(inside)
            elif isinstance(inside, Resets):
                inside.reset_parameters()
            for name, shard in own.items():
                self._keep_rows(shard, (inside, name))
        finally:
            for name, shard in own.items():
                inside._parameters[name] = shard.param
        for name in buffers:
            if (value := inside._buffers.get(name)) is not None:
                inside._buffers[name] = self._checked(value, inside, name=name).to(default_device())

    def _keep_rows(self, shard: ParamShard, place: _Place) -> None:
        """Copies this rank's rows of the module's current tensor, which may have been replaced."""
        inside, name = place
        whole = self._checked(inside.get_parameter(name), inside, name=name)
        if whole.shape != shard.param.shape:
            raise ValueError(
                f"{self._name(inside, name)} has shape {tuple(whole.shape)} after it was initialized, and was built "
                f"with {tuple(shard.param.shape)}: must keep its shape"
            )
        # A shared parameter receives the values of its first place, to which its other places are tied.
        if shard.owner == place:
            rows = whole.reshape(-1)[shard.start : shard.start + shard.numel]
            _rows(shard).copy_(rows.to(self._dtypes[place]))

    def _memory(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        memory = torch.zeros(shape, dtype=dtype, device=default_device())
        # A param_init_fn may leave zeros, for example if a checkpoint is loaded later.
        if self._param_init_fn is None:
            if _has_nan(dtype):
                memory.fill_(float("nan"))
            else:
                memory.view(-1).view(torch.uint8).fill_(_UNSET_BYTE)
        return memory

    def _checked(self, tensor: torch.Tensor, inside: nn.Module, *, name: str) -> torch.Tensor:
        if tensor.is_meta or (self._param_init_fn is None and _is_unset_sync(tensor)):
            who = "param_init_fn" if self._param_init_fn is not None else f"{type(inside).__name__}.reset_parameters()"
            raise ValueError(
                f"{self._name(inside, name)} was on the meta device, and {who} has left it without values: it must "
                "set all of the module's own parameters and buffers"
            )
        return tensor

    def _name(self, inside: nn.Module, name: str) -> str:
        prefix = self._names[inside]
        return f"{prefix}.{name}" if prefix else name


def _meta_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}


def _rows(shard: ParamShard) -> torch.Tensor:
    return shard.local.detach().view(-1)


def _round(rows: torch.Tensor, dtype: torch.dtype) -> None:
    if dtype != rows.dtype:
        rows.copy_(rows.to(dtype))


def _has_nan(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point and dtype.itemsize > 1) or dtype.is_complex


def _is_unset_sync(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor still contains the fill value of new memory. Waits for the device before training."""
    if not tensor.numel():
        return False
    if _has_nan(tensor.dtype):
        # The minimum is NaN if any number is NaN. Computing it requires no mask as large as the tensor.
        parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return bool(parts.amin().isnan())
    return bool((tensor.contiguous().view(-1).view(torch.uint8) == _UNSET_BYTE).all())
