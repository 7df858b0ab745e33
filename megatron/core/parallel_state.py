"""Process groups: rank grids, and the registry of this process's groups.

RankGenerator computes ranks on a grid. initialize_model_parallel builds the groups once. Model builders read the
registry and pass a ProcessGroupCollection to components. No forward reads the registry.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.config_field import require_defaults
from megatron.core.device import default_device
from megatron.core.pipeline_placement import V_SCHEDULES, Placement, check_chunks, placement_of
from megatron.core.process_groups_config import (
    EXISTING,
    ProcessGroupCollection,
    group_rank,
    group_size,
    or_alone,
)

# All axes of a grid, from the fastest-varying to the slowest.
DEFAULT_ORDER = "tp-cp-ep-dp-pp"


class RankGenerator:
    """Rank grid of dense layers or of expert layers.

    Dense layers use the axes tp, cp, dp and pp. Expert layers use the axes tp, ep, dp and pp, with separate sizes of tp
    and dp. order: axes joined by "-", from the fastest-varying to the slowest; neighbors on the fastest axis have
    consecutive ranks. Axes of size 1 may be omitted. Raises ValueError for a missing, repeated or unknown axis.
    """

    def __init__(
        self,
        tp: int,
        ep: int,
        dp: int,
        pp: int,
        cp: int,
        order: str = DEFAULT_ORDER,
        rank_offset: int = 0,
        gtp_remat: int = 1,
    ) -> None:
        require_defaults("RankGenerator", _NO_GTP, gtp_remat=(gtp_remat, 1))
        self.name_to_size = {"tp": tp, "cp": cp, "ep": ep, "dp": dp, "pp": pp}
        self.rank_offset = rank_offset
        self.world_size = math.prod(self.name_to_size.values())
        self.axes = _checked_axes(order, self.name_to_size)
        self.order = "-".join(self.axes)

    def rank_table(self, token: str) -> Tensor:
        """Returns the ranks of all groups along the axes in `token`, for example "tp" or "tp-cp".

        Returns [groups, ranks], int64, ascending, on the CPU. Raises ValueError for an unknown axis.
        """
        wanted = token.split("-")
        unknown = [axis for axis in wanted if axis not in self.name_to_size]
        if unknown:
            raise ValueError(f"token is {token!r}: {unknown[0]!r} is not one of {', '.join(self.name_to_size)}")
        # The last dimension of a tensor varies fastest.
        slowest_first = self.axes[::-1]
        outside = [dim for dim, axis in enumerate(slowest_first) if axis not in wanted]
        inside = [dim for dim, axis in enumerate(slowest_first) if axis in wanted]
        size = math.prod(self.name_to_size[axis] for axis in set(wanted))
        return self.rank_tensor().permute(*outside, *inside).reshape(-1, size)

    def rank_tensor(self) -> Tensor:
        """Returns all ranks as a grid: [size of the slowest axis, ..., size of the fastest axis], int64, on the CPU."""
        shape = [self.name_to_size[axis] for axis in reversed(self.axes)]
        return torch.arange(self.rank_offset, self.rank_offset + self.world_size).view(shape)

    def get_ranks(self, token: str) -> list[list[int]]:
        """Returns one list of ranks for each group along the axes in `token`."""
        ranks: list[list[int]] = self.rank_table(token).tolist()
        return ranks


def default_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Returns the ranks of the pipeline stages with embedding weights: the first and the last stage."""
    return pp_ranks if len(pp_ranks) <= 2 else [pp_ranks[0], pp_ranks[-1]]


def default_position_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Returns the ranks of the pipeline stages with position embeddings: only the first stage."""
    return [pp_ranks[0]]


def check_optional_size(name: str, size: int | None) -> None:
    """Raises ValueError if a size is given and below 1. name: name of the argument."""
    if size is not None and size < 1:
        raise ValueError(f"{name} is {size}: must be at least 1, or None")


def check_virtual_size(virtual_size: int | None, pipeline_size: int) -> None:
    """Raises ValueError if the number of virtual stages is invalid. None means no virtual stages."""
    check_optional_size("virtual_pipeline_model_parallel_size", virtual_size)
    if pipeline_size == 1 and (virtual_size or 1) > 1:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size is {virtual_size}: requires a pipeline_model_parallel_size "
            f"({pipeline_size}) of at least 2"
        )


def rank_grids(world_size: int, sizes: dict[str, int], *, order: str) -> tuple[RankGenerator, RankGenerator]:
    """Returns the rank grids of dense and of expert layers over the same ranks.

    sizes: the five parallel sizes, by argument name of initialize_model_parallel. Raises ValueError if a size is below
    1, if the number of ranks is not a multiple of a grid's sizes, or if the two grids differ in the ranks of their
    pipeline stages.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}: must be at least 1")
    tp, cp, pp = (
        sizes[f"{name}_size"] for name in ("tensor_model_parallel", "context_parallel", "pipeline_model_parallel")
    )
    ep, etp = sizes["expert_model_parallel_size"], sizes["expert_tensor_parallel_size"]
    for names, product in (
        ("tensor_model_parallel_size x context_parallel_size x pipeline_model_parallel_size", tp * cp * pp),
        ("expert_tensor_parallel_size x expert_model_parallel_size x pipeline_model_parallel_size", etp * ep * pp),
    ):
        if world_size % product:
            raise ValueError(
                f"world size is {world_size}: must be a multiple of {names} ({product}); start that many ranks, "
                f"for example with torchrun --nproc-per-node {product}, or change these sizes"
            )
    dense = RankGenerator(tp, 1, world_size // (tp * cp * pp), pp, cp, order)
    expert = RankGenerator(etp, ep, world_size // (etp * ep * pp), pp, 1, order)
    if not torch.equal(dense.rank_table("pp"), expert.rank_table("pp")):
        raise ValueError(
            f"order is {order!r}: must end with pp, because dense layers (tp {tp}, cp {cp}) and expert layers "
            f"(tp {etp}, ep {ep}) would have different pipeline stages"
        )
    return dense, expert


def instance_tables(dense: RankGenerator, expert: RankGenerator, *, num_instances: int) -> dict[str, Tensor]:
    """Divides the data-parallel ranks among instances of the distributed optimizer and returns the rank tables.

    Each table is [groups, ranks], int64, on the CPU. "intra_dp_cp" and "intra_expt_dp" contain the parts of the
    data-parallel groups within an instance. "inter_dist_opt" contains the ranks with equal shards in all instances, and
    "intra_dist_opt" contains all ranks of an instance. Raises ValueError if the number of instances does not divide the
    groups, or if dense and expert layers would have different instances.
    """
    cut = {}
    for name, table in (("intra_dp_cp", dense.rank_table("dp-cp")), ("intra_expt_dp", expert.rank_table("dp"))):
        if num_instances < 1 or table.shape[1] % num_instances:
            kind = "expert-data-parallel" if name == "intra_expt_dp" else "data-parallel (with context)"
            raise ValueError(
                f"num_distributed_optimizer_instances is {num_instances}: must divide the {kind} size, {table.shape[1]}"
            )
        cut[name] = table.view(len(table), num_instances, -1)
    across = [_in_order(table.transpose(1, 2).reshape(-1, num_instances)) for table in cut.values()]
    whole = [_in_order(table.transpose(0, 1).reshape(num_instances, -1)) for table in cut.values()]
    if not torch.equal(*across) or not torch.equal(*whole):
        raise ValueError(
            f"num_distributed_optimizer_instances is {num_instances}: must be 1 with order {dense.order!r}, because "
            "the instances of dense and of expert layers would have different ranks; otherwise order must list dp "
            "after tp, cp and ep"
        )
    within = {name: table.reshape(-1, table.shape[2]) for name, table in cut.items()}
    return {**within, "inter_dist_opt": across[0], "intra_dist_opt": whole[0]}


def _in_order(table: Tensor) -> Tensor:
    rows = table.sort(dim=1).values
    return rows[rows[:, 0].argsort()]


def _checked_axes(order: str, name_to_size: dict[str, int]) -> tuple[str, ...]:
    axes = order.lower().split("-")
    if len(set(axes)) != len(axes) or not set(axes) <= set(name_to_size):
        raise ValueError(f"order is {order!r}: must be {', '.join(name_to_size)} joined by '-', each at most once")
    absent = [axis for axis in name_to_size if axis not in axes]
    for axis in absent:
        if name_to_size[axis] != 1:
            raise ValueError(f"order is {order!r}: must contain {axis!r}, whose size is {name_to_size[axis]}")
    return (*axes, *absent)


_NO_GTP = "generalized tensor parallelism is not supported"

# Field of ProcessGroupCollection -> axes of the grid that it spans.
_DENSE_GROUPS = {
    "tp": "tp",
    "cp": "cp",
    "dp": "dp",
    "pp": "pp",
    "dp_cp": "dp-cp",
    "tp_cp": "tp-cp",
    "tp_dp": "tp-dp",
    "tp_dp_cp": "tp-dp-cp",
    "mp": "tp-pp",
}
# Groups that are also built with a CPU backend.
_HOST_GROUPS = ("tp_dp_cp", "pp")
# Groups that are also built with a CPU backend for users, if create_gloo_process_groups is set.
_GLOO_GROUPS = ("dp", "dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp")
_EXPERT_GROUPS = {"expt_tp": "tp", "ep": "ep", "expt_dp": "dp", "tp_ep": "tp-ep", "tp_ep_pp": "tp-ep-pp"}


@dataclass
class _Registry:
    """State of initialize_model_parallel, except EXISTING.

    world: the default group at the time of the call. made: groups to destroy. others: groups from create_group, which
    users destroy. senders: see add_sender.
    """

    world: ProcessGroup | None = None
    meshes: dict[str, DeviceMesh] = field(default_factory=dict)
    made: list[ProcessGroup] = field(default_factory=list)
    others: list[ProcessGroup] = field(default_factory=list)
    virtual_size: int | None = None
    virtual_rank: int | None = None
    placement: Placement = Placement(1)
    senders: WeakKeyDictionary[Any, frozenset[ProcessGroup]] = field(default_factory=WeakKeyDictionary)


_REGISTRY = _Registry()


# Selects, from the ranks of a pipeline, the ranks of the stages that store a kind of weight.
ChooseStages = Callable[[list[int]], list[int]]


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    hybrid_context_parallel: bool = False,
    expert_model_parallel_size: int = 1,
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: int = 30,
    order: str = DEFAULT_ORDER,
    get_embedding_ranks: ChooseStages | None = None,
    get_position_embedding_ranks: ChooseStages | None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: Sequence[str] | None = None,
    sharp_enabled_group: str | None = None,
    rank_offset: int = 0,
    local_world_size: int | None = None,
    pipeline_schedule: str = "1f1b",
) -> None:
    """Builds the process groups over all ranks. torch.distributed must be initialized. Collective.

    expert_tensor_parallel_size: None means tensor_model_parallel_size. hierarchical_context_parallel_sizes: sizes of
    the levels into which context-parallel groups are divided, from the innermost. order: see RankGenerator; it applies
    to dense and expert layers. get_embedding_ranks, get_position_embedding_ranks: functions that return the ranks of
    the stages that share embedding weights, and of the stages with position embeddings; None means
    default_embedding_ranks and default_position_embedding_ranks. pipeline_schedule: as in ModelParallelConfig; it
    determines which parts of the model a stage holds. create_gloo_process_groups: also creates data-parallel
    groups with a CPU backend, if the default group has one.

    Other arguments belong to unsupported features and must be left at their defaults. Raises ValueError for these
    arguments and for incompatible sizes, before any group is built, and RuntimeError if called twice.
    """
    require_defaults(
        "initialize_model_parallel",
        "not available here",
        pipeline_model_parallel_comm_backend=(pipeline_model_parallel_comm_backend, None),
        use_sharp=(use_sharp, False),
        hybrid_context_parallel=(hybrid_context_parallel, False),
        gtp_remat_size=(gtp_remat_size, 1),
        expert_gtp_remat_size=(expert_gtp_remat_size, 1),
        nccl_communicator_config_path=(nccl_communicator_config_path, None),
        high_priority_stream_groups=(list(high_priority_stream_groups or ()), []),
        sharp_enabled_group=(sharp_enabled_group, None),
        rank_offset=(rank_offset, 0),
        local_world_size=(local_world_size or dist.get_world_size(), dist.get_world_size()),
    )
    if EXISTING.groups is not None:
        raise RuntimeError("model parallel groups already exist: call destroy_model_parallel() first")
    check_optional_size("expert_tensor_parallel_size", expert_tensor_parallel_size)
    virtual_size = virtual_pipeline_model_parallel_size
    check_virtual_size(virtual_size, pipeline_model_parallel_size)
    check_chunks(pipeline_schedule, pipeline_model_parallel_size, virtual_size)
    check_hierarchy(hierarchical_context_parallel_sizes, context_parallel_size)
    dense, expert = rank_grids(
        dist.get_world_size(),
        {
            "tensor_model_parallel_size": tensor_model_parallel_size,
            "context_parallel_size": context_parallel_size,
            "pipeline_model_parallel_size": pipeline_model_parallel_size,
            "expert_model_parallel_size": expert_model_parallel_size,
            "expert_tensor_parallel_size": expert_tensor_parallel_size or tensor_model_parallel_size,
        },
        order=order,
    )
    tables = _rank_tables(dense, expert, num_instances=num_distributed_optimizer_instances)
    placement = placement_of(pipeline_schedule, pipeline_model_parallel_size, virtual_size or 1)
    chosen = _embedding_ranks(tables["pp"], placement, get_embedding_ranks, get_position_embedding_ranks)
    levels = hierarchical_context_parallel_sizes and hierarchy_tables(tables["cp"], hierarchical_context_parallel_sizes)
    timeout = timedelta(minutes=distributed_timeout_minutes)
    groups = _make_groups(tables, chosen, levels or (), timeout=timeout, with_gloo=create_gloo_process_groups)
    _REGISTRY.meshes = _meshes(dense, expert, groups)
    _REGISTRY.placement, _REGISTRY.virtual_size = placement, virtual_size
    _REGISTRY.virtual_rank = None if virtual_size is None else 0


def _rank_tables(dense: RankGenerator, expert: RankGenerator, *, num_instances: int) -> dict[str, Tensor]:
    """Returns the ranks of the groups of each kind, by name: [groups, ranks], int64."""
    tables = {name: dense.rank_table(axes) for name, axes in _DENSE_GROUPS.items()}
    tables |= {name: expert.rank_table(axes) for name, axes in _EXPERT_GROUPS.items()}
    tables |= instance_tables(dense, expert, num_instances=num_instances)
    if num_instances == 1:
        del tables["inter_dist_opt"]  # its groups would have one rank each
    return tables


def _embedding_ranks(
    pipelines: Tensor, placement: Placement, choose: ChooseStages | None, choose_position: ChooseStages | None
) -> dict[str, Tensor]:
    """Returns the ranks of the groups embd and pos_embd of each pipeline: [pipelines, ranks], int64.

    pipelines: [pipelines, stages], int64. choose, choose_position: as in initialize_model_parallel.
    """
    # In a V, the first stage holds both ends of the model.
    by_default = default_embedding_ranks if placement.loss_stage else default_position_embedding_ranks
    return {
        "embd": _chosen_stages(pipelines, choose or by_default, "get_embedding_ranks"),
        "pos_embd": _chosen_stages(
            pipelines, choose_position or default_position_embedding_ranks, "get_position_embedding_ranks"
        ),
    }


def _make_groups(
    tables: Mapping[str, Tensor],
    chosen: Mapping[str, Tensor],
    levels: Sequence[Tensor],
    *,
    timeout: timedelta,
    with_gloo: bool,
) -> ProcessGroupCollection:
    """Builds and registers the groups of all kinds. Collective: all ranks build them in the same order.

    tables, chosen: ranks by kind, [groups, ranks], int64. levels: those of hierarchical context parallelism. with_gloo:
    whether to build data-parallel groups with a CPU backend.
    """
    _REGISTRY.world = dist.group.WORLD
    backends = _backends()
    maker = _GroupMaker(timeout, _REGISTRY.made, backend=backends[default_device().type])
    groups: dict[str, Any] = {name: maker.own_group(table, name) for name, table in tables.items()}
    on_host = maker.for_backend(backends["cpu"]) if "cpu" in backends else None
    groups |= {f"{name}_host": on_host and on_host.own_group(tables[name], name) for name in _HOST_GROUPS}
    groups |= {name: maker.own_group(table, name) for name, table in chosen.items()}
    groups["hcp"] = [maker.own_group(table, f"hcp_{level}") for level, table in enumerate(levels)]
    EXISTING.groups = collection = ProcessGroupCollection(**groups)
    if with_gloo and on_host is not None:
        EXISTING.hosts = {groups[name]: _built(on_host.own_group(tables[name], name)) for name in _GLOO_GROUPS}
    return collection


def _chosen_stages(pipelines: Tensor, choose: ChooseStages, name: str) -> Tensor:
    """Applies `choose` to each pipeline and returns the chosen ranks.

    pipelines: [pipelines, stages], int64. Returns [pipelines, chosen], int64. Raises ValueError if `choose` returns no
    ranks, ranks outside the pipeline, or a different number of ranks for different pipelines.
    """
    rows: list[list[int]] = []
    for stages in pipelines.tolist():
        chosen = choose(list(stages))
        if not chosen or not set(chosen) <= set(stages) or rows and len(chosen) != len(rows[0]):
            raise ValueError(
                f"{name} returned {chosen!r} for the pipeline {stages}: must be a subset of it, with the same "
                "number of ranks in every pipeline"
            )
        rows.append(sorted(chosen))
    return torch.tensor(rows, dtype=torch.int64)


def check_hierarchy(sizes: Sequence[int] | None, context_parallel_size: int) -> None:
    """Raises ValueError if level sizes are given and their product is not context_parallel_size."""
    if sizes is not None and (min(sizes, default=0) < 1 or math.prod(sizes) != context_parallel_size):
        raise ValueError(
            f"hierarchical_context_parallel_sizes is {list(sizes)}: must be sizes of at least 1 whose product is "
            f"context_parallel_size ({context_parallel_size})"
        )


def hierarchy_tables(table: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Divides each group in `table` into levels and returns the rank table of each level, from the innermost.

    table: [groups, ranks], int64. Returns one [groups, size], int64, for each of `sizes`. The ranks of a level's group
    differ only in their position on that level.
    """
    cut = table.view(len(table), *reversed(sizes))
    return [cut.movedim(cut.ndim - 1 - level, -1).reshape(-1, size) for level, size in enumerate(sizes)]


def _built(group: ProcessGroup | None) -> ProcessGroup:
    assert group is not None, "every rank is in one of the groups of a whole grid"
    return group


class _GroupMaker:
    """Builds process groups. Kinds of groups with the same ranks share one group, and therefore its connections."""

    def __init__(self, timeout: timedelta, made: list[ProcessGroup], *, backend: str) -> None:
        self._timeout = timeout
        self._made = made
        self._backend = backend
        self._known: list[tuple[Tensor, ProcessGroup | None]] = []

    def for_backend(self, backend: str) -> "_GroupMaker":
        """Returns a maker of groups with `backend`: this maker if it uses that backend, otherwise a new one."""
        return self if backend == self._backend else _GroupMaker(self._timeout, self._made, backend=backend)

    def own_group(self, table: Tensor, name: str) -> ProcessGroup | None:
        """Builds the groups in `table`, [groups, ranks], and returns this rank's group or None. Collective."""
        for known, group in self._known:
            if torch.equal(known, table):
                return group
        own = None
        # Every rank builds every group, as in DeviceMesh. Torch then numbers groups identically on all ranks and never
        # reuses a number, so groups built after destroy_model_parallel do not find stale addresses.
        for ranks in table.tolist():
            group = dist.new_group(ranks, timeout=self._timeout, backend=self._backend, group_desc=name)
            if isinstance(group, ProcessGroup):
                own = group
                self._made.append(group)
        self._known.append((table, own))
        return own


def _backends() -> dict[str, str]:
    """Returns the backend of the default group for each device type."""
    return dict(pair.split(":") for pair in dist.get_backend_config().split(","))


def _meshes(dense: RankGenerator, expert: RankGenerator, groups: ProcessGroupCollection) -> dict[str, DeviceMesh]:
    """Returns the DeviceMesh of dense and of expert layers."""
    return {
        "dense": _mesh(dense, {"tp": groups.tp, "cp": groups.cp, "dp": groups.dp, "pp": groups.pp}),
        "expert": _mesh(expert, {"tp": groups.expt_tp, "ep": groups.ep, "dp": groups.expt_dp, "pp": groups.pp}),
    }


def _mesh(grid: RankGenerator, groups: dict[str, ProcessGroup | None]) -> DeviceMesh:
    """Returns the DeviceMesh of a grid, built from existing groups. groups: group of each axis, by name."""
    axes = [axis for axis in reversed(grid.axes) if axis in groups]
    ranks = grid.rank_tensor().view([grid.name_to_size[axis] for axis in axes])
    own = [group for axis in axes if (group := groups[axis]) is not None]
    return DeviceMesh.from_group(own, default_device().type, mesh=ranks, mesh_dim_names=tuple(axes))


def destroy_model_parallel() -> None:
    """Destroys all groups from initialize_model_parallel, but not the default group of torch.distributed."""
    # destroy_process_group() without arguments also destroys these groups, which must not be destroyed twice.
    if dist.is_initialized() and dist.group.WORLD is _REGISTRY.world:
        for group in reversed(_REGISTRY.made):
            dist.destroy_process_group(group)
    # Keeps senders, because they may use groups that users built.
    vars(_REGISTRY).update(vars(_Registry(senders=_REGISTRY.senders)))
    EXISTING.groups, EXISTING.hosts = None, {}


def model_parallel_is_initialized() -> bool:
    """Returns whether initialize_model_parallel has run."""
    return EXISTING.groups is not None


def get_process_groups() -> ProcessGroupCollection:
    """Returns all groups of this rank, which builders pass to components. Raises RuntimeError if there are none."""
    if EXISTING.groups is None:
        raise RuntimeError("process groups do not exist: call initialize_model_parallel() first")
    return EXISTING.groups


def existing_process_groups() -> ProcessGroupCollection:
    """Returns all groups of this rank, or single-rank groups if initialize_model_parallel has not run."""
    return EXISTING.groups or ProcessGroupCollection()


def group_or_existing(group: ProcessGroup | None, kind: str = "tp") -> ProcessGroup:
    """Returns `group`, or for None the existing group of kind `kind`, as in Megatron.

    kind: field of ProcessGroupCollection. Without model parallel groups, None means this rank alone. Use this only in
    functions that users call. Internal code receives groups as arguments and converts None with or_alone.
    """
    return or_alone(vars(existing_process_groups())[kind]) if group is None else group


def add_sender(sender: Any, groups: Iterable[ProcessGroup | None]) -> None:
    """Registers `sender`, by weak reference, as an object that launches collectives over `groups`.

    Ignores None and groups of one rank.
    """
    _REGISTRY.senders[sender] = frozenset(group for group in groups if group is not None and group_size(group) > 1)


def remove_sender(sender: Any) -> None:
    """Unregisters an object that add_sender registered. Does nothing for other objects."""
    _REGISTRY.senders.pop(sender, None)


def senders_beside(sender: Any, *, earlier: bool = False) -> list[Any]:
    """Returns the registered senders that share a group with `sender`. earlier: only senders registered before it."""
    found, own = [], _REGISTRY.senders.get(sender, frozenset())
    for other, groups in _REGISTRY.senders.items():
        if other is sender:
            if earlier:
                break
        elif not own.isdisjoint(groups):
            found.append(other)
    return found


def get_device_mesh(kind: str) -> DeviceMesh:
    """Returns the mesh of the existing groups of "dense" (pp, dp, cp, tp) or "expert" (pp, dp, ep, tp) layers."""
    get_process_groups()
    return _REGISTRY.meshes[kind]


def _group(name: str) -> ProcessGroup:
    group: ProcessGroup | None = vars(get_process_groups())[name]
    if group is None:
        raise RuntimeError(f"this rank is not in any {name} group")
    return group


def _host_group(name: str) -> ProcessGroup:
    """Returns the group with the same ranks and a CPU backend. Raises ValueError if it was not built."""
    group = _group(name)
    if group in EXISTING.hosts:
        return EXISTING.hosts[group]
    if "cpu" in {device.type for device in group._device_types}:
        return group
    raise ValueError(
        f"group {name} has no counterpart with a CPU backend: set create_gloo_process_groups in "
        "initialize_model_parallel and give torch.distributed a CPU backend (cpu:gloo,cuda:nccl)"
    )


def _checked(name: str, check_initialized: bool) -> ProcessGroup | None:
    return _group(name) if check_initialized else vars(existing_process_groups())[name]


# Megatron's getters for each kind of parallelism: the group, the index of this rank in it, and its number of ranks.
# check_initialized: raises RuntimeError if the group does not exist, instead of returning None. partial_...: only the
# ranks of this rank's instance of the distributed optimizer. with_gtp_remat, with_egtp_remat: no effect, because
# generalized tensor parallelism is not supported.


def get_tensor_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Returns the group of ranks over which the weights of dense layers are split."""
    return _checked("tp", check_initialized)


def get_tensor_model_parallel_rank() -> int:
    """Returns this rank's index in its tensor-parallel group."""
    return group_rank(_group("tp"))


def get_tensor_model_parallel_world_size() -> int:
    """Returns the number of ranks over which the weights of dense layers are split."""
    return group_size(_group("tp"))


def get_tensor_model_parallel_src_rank() -> int:
    """Returns the global rank of the first rank in this rank's tensor-parallel group."""
    return dist.get_global_rank(_group("tp"), 0)


def get_context_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Returns the group of ranks over which each sequence is split."""
    return _checked("cp", check_initialized)


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[ProcessGroup] | None:
    """Returns this rank's group on each level of hierarchical_context_parallel_sizes, from the innermost."""
    groups = list((get_process_groups() if check_initialized else existing_process_groups()).hcp)
    if check_initialized and not groups:
        raise RuntimeError(
            "context-parallel groups have no levels: pass hierarchical_context_parallel_sizes to "
            "initialize_model_parallel"
        )
    return groups or None


def get_context_parallel_rank() -> int:
    """Returns this rank's index in its context-parallel group."""
    return group_rank(_group("cp"))


def get_context_parallel_world_size() -> int:
    """Returns the number of ranks over which each sequence is split."""
    return group_size(_group("cp"))


def get_data_parallel_group(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> ProcessGroup:
    """Returns the group of ranks with copies of the same dense weights.

    with_context_parallel: includes the context-parallel ranks, which process different parts of the same sequences.
    partial_data_parallel: includes only ranks of this rank's distributed-optimizer instance; requires
    with_context_parallel, because optimizer shards are also distributed over context-parallel ranks.
    """
    return _group(_data_kind(with_context_parallel, partial_data_parallel))


def _data_kind(with_context_parallel: bool, partial_data_parallel: bool) -> str:
    if partial_data_parallel and not with_context_parallel:
        raise ValueError("partial_data_parallel requires with_context_parallel")
    if partial_data_parallel:
        return "intra_dp_cp"
    return "dp_cp" if with_context_parallel else "dp"


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """Returns a group with a CPU backend and the same ranks as get_data_parallel_group."""
    return _host_group(_data_kind(with_context_parallel, partial_data_parallel))


def get_data_parallel_rank(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    """Returns this rank's index in its data-parallel group."""
    return group_rank(_group(_data_kind(with_context_parallel, partial_data_parallel)))


def get_data_parallel_world_size(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    """Returns the number of data-parallel replicas."""
    return group_size(_group(_data_kind(with_context_parallel, partial_data_parallel)))


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Returns the global rank of the first rank in this rank's data-parallel group."""
    return dist.get_global_rank(get_data_parallel_group(with_context_parallel), 0)


def get_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Returns the tensor x pipeline group, whose ranks together store one copy of the dense weights."""
    return _checked("mp", check_initialized)


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Returns the tensor x context group, whose ranks process the same microbatch."""
    return _checked("tp_cp", check_initialized)


def get_tensor_and_context_parallel_rank() -> int:
    """Returns this rank's index in its tensor x context group."""
    return group_rank(_group("tp_cp"))


def get_tensor_and_context_parallel_world_size() -> int:
    """Returns the number of ranks that process the same microbatch, which is tensor x context."""
    return group_size(_group("tp_cp"))


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup | None:
    """Returns the tensor x data group; with_context_parallel: tensor x context x data, a whole pipeline stage."""
    return _checked("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


def get_expert_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Returns the group of ranks over which the experts of each layer are distributed."""
    return _checked("ep", check_initialized)


def get_expert_model_parallel_rank() -> int:
    """Returns this rank's index in its expert-parallel group."""
    return group_rank(_group("ep"))


def get_expert_model_parallel_world_size() -> int:
    """Returns the number of ranks over which the experts of each layer are distributed."""
    return group_size(_group("ep"))


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Returns the group of ranks over which the weights of each expert are split."""
    return _checked("expt_tp", check_initialized)


def get_expert_tensor_parallel_rank() -> int:
    """Returns this rank's index in its expert-tensor-parallel group."""
    return group_rank(_group("expt_tp"))


def get_expert_tensor_parallel_world_size() -> int:
    """Returns the number of ranks over which the weights of each expert are split."""
    return group_size(_group("expt_tp"))


def get_expert_data_parallel_group(
    check_initialized: bool = True, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup | None:
    """Returns the group of ranks with copies of the same expert weights."""
    return _checked(_expert_data_kind(partial_expert_data_parallel), check_initialized)


def _expert_data_kind(partial_expert_data_parallel: bool) -> str:
    return "intra_expt_dp" if partial_expert_data_parallel else "expt_dp"


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """Returns a group with a CPU backend and the same ranks as get_expert_data_parallel_group."""
    return _host_group(_expert_data_kind(partial_expert_data_parallel))


def get_expert_data_parallel_rank(with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False) -> int:
    """Returns this rank's index in its expert-data-parallel group."""
    return group_rank(_group(_expert_data_kind(partial_expert_data_parallel)))


def get_expert_data_parallel_world_size(with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False) -> int:
    """Returns the number of ranks with copies of the same expert weights."""
    return group_size(_group(_expert_data_kind(partial_expert_data_parallel)))


def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Returns the group of all ranks of this rank's distributed-optimizer instance."""
    return _checked("intra_dist_opt", check_initialized)


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Returns the group of ranks that store the same shard in different distributed-optimizer instances.

    Raises RuntimeError if there is only one instance.
    """
    return _checked("inter_dist_opt", check_initialized)


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Returns the expert-tensor x expert group, whose ranks together store all experts of a layer."""
    return _checked("tp_ep", check_initialized)


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> ProcessGroup | None:
    """Returns the expert-tensor x expert x pipeline group, whose ranks together store one copy of the experts."""
    return _checked("tp_ep_pp", check_initialized)


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Returns the group of all stages of this rank's pipeline."""
    return _checked("pp", check_initialized)


def get_pipeline_model_parallel_rank() -> int:
    """Returns this rank's pipeline stage."""
    return group_rank(_group("pp"))


def get_pipeline_model_parallel_world_size() -> int:
    """Returns the number of pipeline stages."""
    return group_size(_group("pp"))


def get_pipeline_model_parallel_first_rank() -> int:
    """Returns the global rank of the first stage of this rank's pipeline."""
    return dist.get_global_rank(_group("pp"), 0)


def get_pipeline_model_parallel_last_rank() -> int:
    """Returns the global rank of the last stage of this rank's pipeline."""
    return dist.get_global_rank(_group("pp"), group_size(_group("pp")) - 1)


def get_pipeline_model_parallel_next_rank() -> int:
    """Returns the global rank of the next pipeline stage. The first stage follows the last."""
    return _stage_at_distance(1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Returns the global rank of the previous pipeline stage. The last stage precedes the first."""
    return _stage_at_distance(-1)


def _stage_at_distance(steps: int) -> int:
    pipeline = _group("pp")
    return dist.get_global_rank(pipeline, (group_rank(pipeline) + steps) % group_size(pipeline))


def check_placement(schedule: str) -> None:
    """Raises ValueError if the groups were built for another placement of chunks than that of a pipeline_schedule."""
    placement = _REGISTRY.placement
    if EXISTING.groups is not None and placement.num_stages > 1 and placement.is_v != (schedule in V_SCHEDULES):
        built = " or ".join(V_SCHEDULES) if placement.is_v else "1f1b or zb-h1"
        raise ValueError(
            f"pipeline_schedule is {schedule}, and initialize_model_parallel was called with a pipeline_schedule of "
            f"{built}: must be the same, because it determines which stage holds which part of the model"
        )


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Returns the number of model chunks per stage, or None without virtual stages."""
    return _REGISTRY.virtual_size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Returns the index of the model chunk that is being built, or None without virtual stages."""
    return _REGISTRY.virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Sets the index of the model chunk that is being built, which the getters return."""
    _REGISTRY.virtual_rank = rank


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Returns whether this rank holds the model's first part; with ignore_virtual=False, whether in chunk `vp_stage`.

    vp_stage: index of a model chunk; None means the chunk set by set_virtual_pipeline_model_parallel_rank.
    """
    return _holds_part(0, ignore_virtual=ignore_virtual, vp_stage=vp_stage)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Returns whether this rank holds the model's last part; with ignore_virtual=False, whether in chunk `vp_stage`.

    vp_stage: index of a model chunk; None means the chunk set by set_virtual_pipeline_model_parallel_rank.
    """
    return _holds_part(_REGISTRY.placement.num_parts - 1, ignore_virtual=ignore_virtual, vp_stage=vp_stage)


def _holds_part(part: int, *, ignore_virtual: bool, vp_stage: int | None) -> bool:
    place = _REGISTRY.placement.place_of(part)
    is_here = get_pipeline_model_parallel_rank() == place.stage
    return is_here and (ignore_virtual or _chunk(vp_stage) in (None, place.chunk))


def _chunk(vp_stage: int | None) -> int | None:
    if _REGISTRY.virtual_size is None:
        return None
    return _REGISTRY.virtual_rank if vp_stage is None else vp_stage


def get_embedding_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Returns the group of the stages that share embedding weights. Raises RuntimeError on other stages."""
    return _checked("embd", check_initialized)


def get_position_embedding_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Returns the group of the stages with position embeddings. Raises RuntimeError on other stages."""
    return _checked("pos_embd", check_initialized)


def create_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> Any:
    """Creates a group with torch.distributed.new_group and registers it for update_pg_timeout. Collective.

    All arguments are passed to new_group. Returns GroupMember.NON_GROUP_MEMBER on ranks outside the group. The caller
    must destroy the group.
    """
    group = dist.new_group(
        None if ranks is None else list(ranks),
        timeout=timeout,
        backend=backend,
        pg_options=pg_options,
        use_local_synchronization=use_local_synchronization,
        group_desc=group_desc,
    )
    if isinstance(group, ProcessGroup):
        _REGISTRY.others.append(group)
    return group


def create_hierarchical_groups(
    rank: int,
    ranks: Sequence[int],
    hierarchical_group_sizes: Sequence[int],
    create_gloo_process_groups: bool = False,
    pg_options: Sequence[Any] | None = None,
    timeout: timedelta | None = None,
    group_desc: str | None = None,
) -> tuple[list[ProcessGroup], list[ProcessGroup]]:
    """Builds the groups of all levels into which hierarchy_tables divides `ranks`. Collective.

    hierarchical_group_sizes: sizes of the levels, from the innermost. pg_options: options for each level. Returns a
    list with the group of `rank` on each level, and a list of the corresponding gloo groups, which is empty without
    create_gloo_process_groups. Both lists are empty if `rank` is not in `ranks`. Raises ValueError if the product of
    the sizes is not the number of ranks.
    """
    if math.prod(hierarchical_group_sizes) != len(ranks):
        raise ValueError(
            f"hierarchical_group_sizes is {list(hierarchical_group_sizes)}: the product must be the number of ranks, "
            f"{len(ranks)}"
        )
    tables = hierarchy_tables(torch.tensor([list(ranks)], dtype=torch.int64), hierarchical_group_sizes)
    of_device: list[ProcessGroup] = []
    of_host: list[ProcessGroup] = []
    for level, table in enumerate(tables):
        for members in table.tolist():
            options: dict[str, Any] = {"timeout": timeout, "group_desc": f"{group_desc or 'hierarchical'}_{level}"}
            group = create_group(members, pg_options=pg_options[level] if pg_options else None, **options)
            of_device += [group] if rank in members else []
            if create_gloo_process_groups:
                group = create_group(members, backend="gloo", **options)
                of_host += [group] if rank in members else []
    return of_device, of_host


def update_pg_timeout(timeout: timedelta, pg: ProcessGroup | None = None) -> None:
    """Sets the timeout of later collectives over `pg`.

    None means the default group and all groups from initialize_model_parallel and create_group.
    """
    default = [dist.group.WORLD] if dist.is_initialized() else []
    for group in [*default, *_REGISTRY.made, *_REGISTRY.others] if pg is None else [pg]:
        dist.distributed_c10d._set_pg_timeout(timeout, group)
