"""RankGrid: which ranks share the states of an optimizer, and which hold copies of the same. No collective here."""

from dataclasses import dataclass

import torch.distributed as dist

from megatron.core.process_groups_config import group_size


@dataclass(frozen=True)
class RankGrid:
    """The ranks of an optimizer: `shards` share each state, and `replicas` hold the same; all of them are `ranks`.

    None is this rank alone.
    """

    ranks: dist.ProcessGroup | None
    shards: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None

    @classmethod
    def of(
        cls,
        process_group: dist.ProcessGroup | None,
        *,
        distributed: dist.ProcessGroup | None,
        redundant: dist.ProcessGroup | None,
    ) -> "RankGrid":
        """From what a user gives; raises ValueError where it is no grid."""
        given = {
            "process_group": process_group,
            "distributed_process_group": distributed,
            "redundant_process_group": redundant,
        }
        for name, group in given.items():
            if group is not None and not isinstance(group, dist.ProcessGroup):
                raise TypeError(f"{name} is {group!r}: must be a torch.distributed.ProcessGroup, or None")
        if not dist.is_initialized():
            return cls(None, None, None)
        ranks = process_group or dist.group.WORLD
        shards = distributed or (ranks if redundant is None else None)
        sizes = group_size(ranks), group_size(shards), group_size(redundant)
        if sizes[0] != sizes[1] * sizes[2]:
            raise ValueError(
                f"process_group has {sizes[0]} ranks, distributed_process_group {sizes[1]} and redundant_process_group "
                f"{sizes[2]}: the first must have as many as the other two multiplied"
            )
        assert ranks is not None
        inside = set(dist.get_process_group_ranks(ranks))
        for name, group in (("distributed_process_group", distributed), ("redundant_process_group", redundant)):
            if group is not None and not inside.issuperset(dist.get_process_group_ranks(group)):
                raise ValueError(
                    f"{name} has ranks {dist.get_process_group_ranks(group)}: all must be in process_group, which has "
                    f"{sorted(inside)}"
                )
        return cls(ranks, shards, redundant)
