"""The process groups that components receive as an argument; building them is parallel_state.py's work."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch.distributed import GroupMember, ProcessGroup


@dataclass(frozen=True, kw_only=True)
class ProcessGroupCollection:
    """One process group per kind of parallelism, under the names Megatron users know.

    None means a group of this rank alone, as group_size and group_rank interpret it. Groups of parallel_state are never
    None except embd and inter_dist_opt, because torch.distributed interprets None as all ranks. Kinds with the same
    ranks may share one group.
    Dense layers: tp tensor, cp context, dp data, pp pipeline; dp_cp, tp_cp, tp_dp, tp_dp_cp their products, mp tensor x
    pipeline. Expert layers, over the same ranks: expt_tp tensor, ep expert, expt_dp data; tp_ep and tp_ep_pp their
    products with expt_tp first. embd: the first and last stage, which share embedding weights; None on other stages.
    Instances of the distributed optimizer: intra_dp_cp and intra_expt_dp are the part of dp_cp and expt_dp inside this
    rank's instance, intra_dist_opt all of its ranks; inter_dist_opt those of equal shards in all instances, None where
    there is one.
    tp_dp_cp_host and pp_host: the ranks of tp_dp_cp and pp, for numbers that are on the host; None where only devices
    can send.
    """

    tp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    dp_cp: ProcessGroup | None = None
    tp_cp: ProcessGroup | None = None
    tp_dp: ProcessGroup | None = None
    tp_dp_cp: ProcessGroup | None = None
    mp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    expt_tp: ProcessGroup | None = None
    expt_dp: ProcessGroup | None = None
    tp_ep: ProcessGroup | None = None
    tp_ep_pp: ProcessGroup | None = None
    embd: ProcessGroup | None = None
    intra_dp_cp: ProcessGroup | None = None
    intra_expt_dp: ProcessGroup | None = None
    intra_dist_opt: ProcessGroup | None = None
    inter_dist_opt: ProcessGroup | None = None
    tp_dp_cp_host: ProcessGroup | None = None
    pp_host: ProcessGroup | None = None

    def __post_init__(self) -> None:
        for name, group in vars(self).items():
            # new_group returns it, a number, on ranks outside the new group.
            if group is GroupMember.NON_GROUP_MEMBER:
                raise ValueError(
                    f"ProcessGroupCollection.{name} is GroupMember.NON_GROUP_MEMBER, a group without this rank: pass a "
                    "group that includes this rank, or None for this rank alone"
                )


class _Alone(ProcessGroup):
    """Process group of a single rank, over which nothing is sent. Copies of a model share it."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Alone":
        return self

    def __reduce__(self) -> str:
        return "ALONE"


# This rank alone, for functions in which None means parallel_state's group: see parallel_state.group_or_existing.
ALONE: Final[ProcessGroup] = _Alone()


def or_alone(group: ProcessGroup | None) -> ProcessGroup:
    """Maps None, which in a collection means this rank alone, to ALONE, which means so in every function."""
    return ALONE if group is None else group


def require_group_sizes(groups: ProcessGroupCollection, sizes: Mapping[str, tuple[str, int]]) -> None:
    """Raises ValueError unless groups have the sizes that a configuration says, which is what was checked to divide.

    sizes: by field of the collection, the configuration's name for it and its value.
    """
    for field, (name, size) in sizes.items():
        ranks = group_size(vars(groups)[field])
        if ranks != size:
            raise ValueError(
                f"{name} is {size}, but pg_collection.{field} has {ranks} ranks: pass the groups of a layout of that "
                "size, or say that size in the configuration"
            )


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks in `group`; None and ALONE are this rank alone, so 1."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """This rank's index in `group`; None and ALONE are this rank alone, so 0."""
    return 0 if group is None else group.rank()
