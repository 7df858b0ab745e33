"""The process groups that components receive as an argument. parallel_state.py builds them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch.distributed import GroupMember, ProcessGroup


@dataclass(frozen=True, kw_only=True)
class ProcessGroupCollection:
    """One process group per kind of parallelism, under Megatron's names.

    None means a group of this rank alone, as group_size and group_rank interpret it. Groups of parallel_state are never
    None except embd and inter_dist_opt, because torch.distributed interprets None as all ranks. Kinds with the same
    ranks may share one group.
    Dense layers: tp tensor, cp context, dp data, pp pipeline; dp_cp, tp_cp, tp_dp, tp_dp_cp their products, mp tensor x
    pipeline. Expert layers, over the same ranks: expt_tp tensor, ep expert, expt_dp data; tp_ep and tp_ep_pp their
    products with expt_tp first. embd: the first and last stage, which share embedding weights; None on other stages.
    Instances of the distributed optimizer: intra_dp_cp and intra_expt_dp are the part of dp_cp and expt_dp inside this
    rank's instance, intra_dist_opt all of its ranks. inter_dist_opt has the ranks with equal shards in all instances;
    None if there is one instance.
    tp_dp_cp_host and pp_host: the ranks of tp_dp_cp and pp, for messages between hosts; None without a CPU backend.
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
            # new_group returns this placeholder on ranks outside the new group.
            if group is GroupMember.NON_GROUP_MEMBER:
                raise ValueError(
                    f"ProcessGroupCollection.{name} is GroupMember.NON_GROUP_MEMBER, a group without this rank: pass a "
                    "group that includes this rank, or None for this rank alone"
                )


class _Alone(ProcessGroup):
    """A process group of one rank, which sends nothing. Copies of a model share it."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Alone":
        return self

    def __reduce__(self) -> str:
        return "ALONE"


# This rank alone, for functions in which None means a group of parallel_state; see parallel_state.group_or_existing.
ALONE: Final[ProcessGroup] = _Alone()


def or_alone(group: ProcessGroup | None) -> ProcessGroup:
    """Maps None to ALONE. None means this rank alone only within a ProcessGroupCollection."""
    return ALONE if group is None else group


def require_group_sizes(groups: ProcessGroupCollection, sizes: Mapping[str, tuple[str, int]]) -> None:
    """Raises ValueError unless groups have the sizes in the configuration, whose divisibility has been checked.

    sizes: (name in the configuration, value) by field of the collection.
    """
    for field, (name, size) in sizes.items():
        ranks = group_size(vars(groups)[field])
        if ranks != size:
            raise ValueError(
                f"{name} is {size}, but pg_collection.{field} has {ranks} ranks: pass the groups of a layout of that "
                "size, or set that size in the configuration"
            )


def group_size(group: ProcessGroup | None) -> int:
    """Returns the number of ranks in `group`: 1 for None and ALONE."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """Returns the index of this rank in `group`: 0 for None and ALONE."""
    return 0 if group is None else group.rank()
