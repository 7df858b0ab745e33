"""WrappedShards: what was done to a module that fully_shard has cut which its shards do not know of.

Where other parameters were put in their place by load_state_dict, it takes their values over; else it only tells.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.dist_checkpointing.logical import canonical_name
from megatron.core.distributed.fully_shard_state import ParamShard


class WrappedShards:
    """All shards of a module, frozen ones too, by each place that a parameter has in it."""

    def __init__(self, module: nn.Module, shards: Sequence[ParamShard]) -> None:
        self._module, self._shards = module, shards
        by_place = {place: shard for shard in shards for place in shard.places}
        self._by_name = {name: by_place[place] for name, place in _places(module) if place in by_place}
        of_module: dict[nn.Module, dict[str, ParamShard]] = {}
        for (owner, name), shard in by_place.items():
            of_module.setdefault(owner, {})[name] = shard
        for owner, by_name in of_module.items():
            owner.register_load_state_dict_pre_hook(partial(_check_loaded, list(by_name)))
            # After torch's own, which takes note of new parameters.
            owner.register_load_state_dict_post_hook(partial(_take_in, list(by_name.values())))

    def sharded(self, param: nn.Parameter) -> nn.Parameter:
        """The shard of a gathered parameter, any shape and dtype; of any other, itself."""
        if isinstance(param, DTensor):
            return param
        return next((shard.param for shard in self._shards if shard.whole is param), param)

    def find_problem(self) -> str | None:
        """The first change after which gradients or updates would miss a parameter; None: there is none."""
        now = dict(self._module.named_parameters(remove_duplicate=False))
        for name, param in now.items():
            shard = self._by_name.get(name)
            if shard is None:
                if param.requires_grad:
                    return _changed(name, "added")
            elif param is not shard.param and param is not shard.whole:
                return _changed(name, "replaced")
            elif shard.is_trained != param.requires_grad or shard.is_trained != shard.param.requires_grad:
                return _changed(name, "frozen" if shard.is_trained else "unfrozen")
            elif shard.is_elsewhere:
                return _changed(name, "moved or given other data")
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
                "TorchFullyShardedDataParallel: must be a DTensor, as its state_dict gives; load whole tensors into "
                "the module before it is wrapped, or a checkpoint"
            )


def _take_in(shards: Sequence[ParamShard], *unused: Any) -> None:
    for shard in shards:
        shard.take_in()


def _changed(name: str, what: str) -> str:
    return (
        f"parameter {canonical_name(name)} was {what} after the module was wrapped in TorchFullyShardedDataParallel: "
        "make such changes before it is wrapped, and build its optimizer after that"
    )
