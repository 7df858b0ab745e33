"""What hooks on reduced gradients get where torch's fully_shard reduces: units in the place of buckets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.distributed.flat_buffer import Entry
from megatron.core.distributed.fsdp_units import Unit
from megatron.core.distributed.hand_out import HandOut, not_wrapped
from megatron.core.distributed.layout import BucketLayout
from megatron.core.distributed.run_params import RunParam
from megatron.core.distributed.sharded_flat_buffer import ShardedFlatBuffer


@dataclass(frozen=True, eq=False)
class UnitBucket:
    """The part of a unit that lies in one buffer."""

    buffer: ShardedFlatBuffer
    layout: BucketLayout
    entries: list[Entry]


class UnitGroup:
    """A unit, or a part of it that is released separately, as a group of one bucket. name: the same on all ranks."""

    def __init__(self, bucket: UnitBucket, *, name: str) -> None:
        self.name, self.buckets, self.entries = name, [bucket], bucket.entries
        self._buffer, self._index = bucket.buffer, bucket.layout.index

    def open(self) -> None:
        """Lets torch reduce into the places of gradients, and moves there what it has reduced elsewhere."""
        self._buffer.open_grads(self._index)

    def close(self) -> None:
        """Releases the gradients."""
        self._buffer.close_grads(self._index)

    def named_grads(self) -> list[tuple[str, torch.Tensor]]:
        """Names of the parameters, and this rank's shards of their gradients: [n] each, fp32 or fp64, views."""
        return self._buffer.named_grads(self._index)

    def reduced_grad(self, bucket: UnitBucket) -> torch.Tensor:
        """This rank's shards of the unit's gradient: [n], fp32 or fp64, a view."""
        return bucket.buffer.grad_of(bucket.layout.span)

    def take_sums(self) -> None:
        """Moves gradients that hooks have replaced to their places."""
        self.close()


def unit_groups(buffers: Sequence[ShardedFlatBuffer], units: Sequence[Unit]) -> dict[Unit, list[UnitGroup]]:
    """Returns the groups of each trained unit, in the order of the units.

    A unit has one group, or two where a part of its gradients is completed later.
    """
    found: dict[str, list[UnitGroup]] = {}
    for buffer in buffers:
        for layout, name in zip(buffer.layout.buckets, buffer.unit_names, strict=True):
            bucket = UnitBucket(buffer, layout, [buffer.entries[index] for index in layout.params])
            of_unit = found.setdefault(name, [])
            rest = ", completed later" if of_unit else ""
            of_unit.append(UnitGroup(bucket, name=f"unit {name or 'root'}{rest}"))
    return {unit: found[unit.name] for unit in units if unit.name in found}


class ShardHandOut(HandOut):
    """The owner's part of a parameter is the sharded parameter itself, whose gradient torch has put there.

    sharded: the shard of a gathered parameter.
    """

    def __init__(
        self,
        groups: Sequence[UnitGroup],
        *,
        is_later: Callable[[nn.Parameter], bool],
        sharded: Callable[[nn.Parameter], nn.Parameter],
    ) -> None:
        super().__init__(groups, is_later=is_later)
        self._buffers = {entry.param: group.buckets[0].buffer for group in groups for entry in group.entries}
        self._sharded = sharded

    def owned_shard(self, param: nn.Parameter) -> nn.Parameter:
        """The parameter itself, a DTensor of any shape and dtype; of a gathered one, its shard."""
        owned = self._sharded(param)
        if owned not in self._buffers:
            raise not_wrapped(param)
        return owned

    def _fire_param(self, one: RunParam, flat: torch.Tensor) -> None:
        self.hooks.fire_param(one.name, one.param)
        # One that a hook has put in the place of the gradient is what others see.
        self._buffers[one.param].attach_grad_of(one.param)
