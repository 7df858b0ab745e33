"""ProcessGroupCollection, the process groups that components receive as an argument. parallel_state.py builds them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from torch.distributed import GroupMember, ProcessGroup

from megatron.core.config_field import require_defaults

# Megatron's groups for unsupported features. These names accept only None.
_NO_GTP = "generalized tensor parallelism is not supported"
_ONE_GROUP = "all-gathers use the same group as reductions here"
_LACKING = {
    **dict.fromkeys(
        ("gtp_remat", "dp_cp_gtp_remat", "expt_gtp_remat", "expt_dp_gtp_remat", "tp_ep_pp_with_egtp_remat"), _NO_GTP
    ),
    **dict.fromkeys(("dp_cp_ag", "expt_dp_ag"), _ONE_GROUP),
}


@dataclass(init=False)
class ProcessGroupCollection:
    """One process group per kind of parallelism, under Megatron's names.

    None means a group of this rank alone, as in group_size and group_rank. parallel_state sets every group except embd,
    pos_embd and inter_dist_opt, because torch.distributed interprets None as all ranks. Kinds with the same ranks may
    share one group.

    Dense layers use tp (tensor), cp (context), dp (data) and pp (pipeline). dp_cp, tp_cp, tp_dp and tp_dp_cp combine
    them, and mp is tensor x pipeline. Expert layers divide the same ranks into expt_tp (tensor), ep (expert) and
    expt_dp (data). tp_ep and tp_ep_pp combine them, where tp is expt_tp.

    embd: the first and last stage, which share embedding weights; None on other stages. pos_embd: the first stage,
    which stores the position embeddings; None on other stages. hcp: this rank's groups on the levels into which cp is
    divided, from the innermost; empty without hierarchical_context_parallel_sizes. intra_dp_cp and intra_expt_dp: the
    parts of dp_cp and expt_dp inside this rank's distributed-optimizer instance. intra_dist_opt: all ranks of the
    instance. inter_dist_opt: the ranks with equal shards in all instances; None if there is one instance.
    tp_dp_cp_host and pp_host: the ranks of tp_dp_cp and pp, for collectives on the CPU; None without a CPU backend.

    Groups are passed by keyword and may be replaced later. Raises ValueError for a group that does not contain this
    rank, and AttributeError for unknown names.
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
    pos_embd: ProcessGroup | None = None
    hcp: Sequence[ProcessGroup] = ()
    intra_dp_cp: ProcessGroup | None = None
    intra_expt_dp: ProcessGroup | None = None
    intra_dist_opt: ProcessGroup | None = None
    inter_dist_opt: ProcessGroup | None = None
    tp_dp_cp_host: ProcessGroup | None = None
    pp_host: ProcessGroup | None = None

    def __init__(self, **kwargs: Any) -> None:
        # Every field is an attribute of the instance, so that vars() lists them all.
        vars(self).update({one.name: one.default for one in fields(self)})
        if unknown := kwargs.keys() - vars(self).keys() - _LACKING.keys():
            raise ValueError(
                f"ProcessGroupCollection got unknown groups {', '.join(sorted(unknown))}: must be among "
                f"{', '.join(vars(self))}"
            )
        for name, group in kwargs.items():
            self.__setattr__(name, group)

    def __setattr__(self, name: str, group: Any) -> None:
        if name in _LACKING:
            require_defaults("ProcessGroupCollection", _LACKING[name], **{name: (group, None)})
            return
        if name not in vars(self):
            raise AttributeError(
                f"ProcessGroupCollection has no group {name!r}: must be one of {', '.join(vars(self))}"
            )
        # new_group returns this placeholder on ranks outside the new group.
        if group is GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"ProcessGroupCollection.{name} is GroupMember.NON_GROUP_MEMBER: must be a group that includes this "
                "rank, or None for this rank alone"
            )
        super().__setattr__(name, group)

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: Iterable[str] | None = None) -> "ProcessGroupCollection":
        """Builds a collection of parallel_state's groups, or of this rank alone if there are no groups.

        required_pgs: names of the groups to include; None means all. Raises ValueError for unknown names.
        """
        existing = vars(EXISTING.groups or cls())
        wanted = list(existing if required_pgs is None else required_pgs)
        if unknown := [name for name in wanted if name not in existing and name not in _LACKING]:
            raise ValueError(f"required_pgs contains {', '.join(unknown)}: must be among {', '.join(existing)}")
        return cls(**{name: existing.get(name) for name in wanted})


@dataclass
class _Existing:
    """The groups most recently built by parallel_state.

    hosts: maps each device group to the group with the same ranks and a CPU backend. On CPU ranks both are the same.
    """

    groups: ProcessGroupCollection | None = None
    hosts: dict[ProcessGroup, ProcessGroup] = field(default_factory=dict)


# Only parallel_state writes to it. Builders read it through parallel_state, or through use_mpu_process_groups.
EXISTING: Final = _Existing()


class _Alone(ProcessGroup):
    """Process group of one rank, which sends nothing. Copying or pickling it returns the same object."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Alone":
        return self

    def __reduce__(self) -> str:
        return "ALONE"


# Group of this rank alone, for functions where None means a parallel_state group; see parallel_state.group_or_existing.
ALONE: Final[ProcessGroup] = _Alone()


def or_alone(group: ProcessGroup | None) -> ProcessGroup:
    """Maps None to ALONE. None means this rank alone only within a ProcessGroupCollection."""
    return ALONE if group is None else group


def require_group_sizes(groups: ProcessGroupCollection, sizes: Mapping[str, tuple[str, int]]) -> None:
    """Raises ValueError unless the groups have the configured sizes.

    sizes: maps a field of the collection to (configuration field, configured size).
    """
    for kind, (name, size) in sizes.items():
        ranks = group_size(vars(groups)[kind])
        if ranks != size:
            raise ValueError(
                f"{name} is {size}, but pg_collection.{kind} has {ranks} ranks: the group and the configuration must "
                "have the same size"
            )


def levels_of_context(groups: ProcessGroupCollection, sizes: Sequence[int] | None) -> Sequence[ProcessGroup]:
    """Returns this rank's groups on the levels of hierarchical context parallelism, from the innermost.

    sizes: hierarchical_context_parallel_sizes. Raises ValueError unless the groups in hcp have these sizes.
    """
    found = [group_size(group) for group in groups.hcp]
    if sizes is None or found != list(sizes):
        raise ValueError(
            f"hierarchical_context_parallel_sizes is {sizes}, but the groups of pg_collection.hcp have {found} ranks: "
            "the sizes must be equal"
        )
    return groups.hcp


def group_size(group: ProcessGroup | None) -> int:
    """Returns the number of ranks in `group`, which is 1 for None and ALONE."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """Returns the index of this rank in `group`, which is 0 for None and ALONE."""
    return 0 if group is None else group.rank()
