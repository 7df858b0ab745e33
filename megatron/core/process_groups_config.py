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

    @staticmethod
    def setup_process_groups_for_ddp(
        pg_collection: "ProcessGroupCollection | None", config: Any, ddp_config: Any
    ) -> dict[str, ProcessGroup | None]:
        """Returns the groups for gradient reductions, by field name with `_group` appended.

        pg_collection: None means parallel_state's groups. config: a ModelParallelConfig. ddp_config: a
        DistributedDataParallelConfig. Raises ValueError if a group's size differs from the configuration, or if groups
        of optimizer instances are missing.
        """
        groups = pg_collection or EXISTING.groups or ProcessGroupCollection()
        sizes = {
            "cp": ("context_parallel_size", config.context_parallel_size),
            "pp": ("pipeline_model_parallel_size", config.pipeline_model_parallel_size),
            "ep": ("expert_model_parallel_size", config.expert_model_parallel_size),
        }
        # Megatron-LM scripts often leave this at 1, because Megatron's layers read the size from their groups.
        if config.tensor_model_parallel_size > 1:
            sizes["tp"] = "tensor_model_parallel_size", config.tensor_model_parallel_size
        require_group_sizes(groups, sizes)
        found = {name: vars(groups)[name] for name in ("dp", "dp_cp", "expt_dp", "tp", "pp", "ep")}
        found |= _instance_groups(groups, num_instances=ddp_config.num_distributed_optimizer_instances)
        return {f"{name}_group": group for name, group in found.items()}

    @staticmethod
    def setup_process_groups_for_optimizer(
        pg_collection: "ProcessGroupCollection | None",
        model_chunks: Sequence[Any],
        use_gloo_process_groups: bool = True,
    ) -> dict[str, ProcessGroup | None]:
        """Returns the groups of an optimizer, by Megatron's names.

        These are dp_group, dp_cp_group, the groups of optimizer instances (intra_dp_cp_group, intra_expt_dp_group,
        intra_dist_opt_group, inter_dist_opt_group), and the groups whose ranks together store one copy of the weights
        (mp_group, and expt_tp_pp_group for experts). intra_dp_cp_group_gloo and intra_expt_dp_group_gloo have a CPU
        backend, and are None unless use_gloo_process_groups is set. pg_collection: None means parallel_state's groups.
        model_chunks: modules wrapped in DistributedDataParallel. Raises ValueError if groups of optimizer instances are
        missing, or if a required group with a CPU backend does not exist.
        """
        groups = pg_collection or EXISTING.groups or ProcessGroupCollection()
        num_instances = model_chunks[0].ddp_config.num_distributed_optimizer_instances
        found = {"dp": groups.dp, "dp_cp": groups.dp_cp, "mp": groups.mp, "expt_tp_pp": groups.tp_ep_pp}
        found |= _instance_groups(groups, num_instances=num_instances)
        named = {f"{name}_group": group for name, group in found.items()}
        for name in ("intra_dp_cp", "intra_expt_dp"):
            named[f"{name}_group_gloo"] = host_group(found[name], name) if use_gloo_process_groups else None
        return named


def _instance_groups(groups: ProcessGroupCollection, *, num_instances: int) -> dict[str, ProcessGroup | None]:
    """Returns the groups of optimizer instances. With one instance, dp_cp and expt_dp replace missing groups."""
    found = {name: vars(groups)[name] for name in ("intra_dp_cp", "intra_expt_dp", "intra_dist_opt", "inter_dist_opt")}
    if num_instances == 1:
        whole = {"intra_dp_cp": groups.dp_cp, "intra_expt_dp": groups.expt_dp}
        return found | {name: found[name] or group for name, group in whole.items()}
    if missing := [name for name in found if found[name] is None]:
        raise ValueError(
            f"num_distributed_optimizer_instances is {num_instances}: requires the groups {', '.join(missing)} in "
            "pg_collection"
        )
    return found


@dataclass
class _Existing:
    """The groups most recently built by parallel_state.

    hosts: maps each device group to the group with the same ranks and a CPU backend. On CPU ranks both are the same.
    """

    groups: ProcessGroupCollection | None = None
    hosts: dict[ProcessGroup, ProcessGroup] = field(default_factory=dict)


# Only parallel_state writes to it. Builders read it through parallel_state, or through use_mpu_process_groups.
EXISTING: Final = _Existing()


def host_group(group: ProcessGroup | None, name: str) -> ProcessGroup | None:
    """Returns the group with the same ranks as `group` and a CPU backend, or None for None.

    name: name of the group, for the error message. Raises ValueError if no group with a CPU backend was built.
    """
    if group is None or group in EXISTING.hosts:
        return group and EXISTING.hosts[group]
    if group is ALONE or "cpu" in {device.type for device in group._device_types}:
        return group
    raise ValueError(
        f"group {name} has no counterpart with a CPU backend: set create_gloo_process_groups in "
        "initialize_model_parallel and give torch.distributed a CPU backend (cpu:gloo,cuda:nccl), or set "
        "use_gloo_process_groups to False"
    )


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
