"""The one registry of process groups: built once from the parallel sizes, read by builders, never in a forward.

No policy lives here; components receive a ProcessGroupCollection. Which ranks form a group: rank_generator.py.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.device import default_device
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size, or_alone

# Every axis of a grid, in the order of the shape below: the fastest one comes first.
DEFAULT_ORDER = "tp-cp-ep-dp-pp"


class RankGenerator:
    """The grid of one kind of layer. `order` names its axes, joined by "-", from the one whose neighbours have
    consecutive ranks to the one whose neighbours are furthest apart.

    Dense layers have tp, cp, dp and pp, expert layers tp (their own), ep, dp (their own) and pp. Axes of size 1 may be
    left out of `order`. Raises ValueError for an order that misses an axis, repeats one or has an unknown one.
    """

    def __init__(
        self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str = DEFAULT_ORDER, rank_offset: int = 0
    ) -> None:
        self.name_to_size = {"tp": tp, "cp": cp, "ep": ep, "dp": dp, "pp": pp}
        self.rank_offset = rank_offset
        self.world_size = math.prod(self.name_to_size.values())
        self.axes = _checked_axes(order, self.name_to_size)
        self.order = "-".join(self.axes)

    def rank_table(self, token: str) -> Tensor:
        """All groups along the axes in `token` ("tp", "tp-cp"): [groups, ranks of a group], int64, rising, on the CPU.

        Raises ValueError for an axis that the grid does not have.
        """
        wanted = token.split("-")
        unknown = [axis for axis in wanted if axis not in self.name_to_size]
        if unknown:
            raise ValueError(f"token is {token!r}: {unknown[0]!r} is not one of {', '.join(self.name_to_size)}")
        # The last dimension of a tensor is its fastest one.
        slowest_first = self.axes[::-1]
        outside = [dim for dim, axis in enumerate(slowest_first) if axis not in wanted]
        inside = [dim for dim, axis in enumerate(slowest_first) if axis in wanted]
        size = math.prod(self.name_to_size[axis] for axis in set(wanted))
        return self.rank_tensor().permute(*outside, *inside).reshape(-1, size)

    def rank_tensor(self) -> Tensor:
        """The grid itself: [size of the slowest axis, ..., size of the fastest axis], int64, on the CPU."""
        shape = [self.name_to_size[axis] for axis in reversed(self.axes)]
        return torch.arange(self.rank_offset, self.rank_offset + self.world_size).view(shape)

    def get_ranks(self, token: str) -> list[list[int]]:
        """The ranks of all groups along the axes in `token`, as `rank_table`."""
        ranks: list[list[int]] = self.rank_table(token).tolist()
        return ranks


def check_optional_size(name: str, size: int | None) -> None:
    """Raises ValueError for a size below 1; name: of the argument."""
    if size is not None and size < 1:
        raise ValueError(f"{name} is {size}: must be at least 1, or None")


def check_virtual_size(virtual_size: int | None, pipeline_size: int) -> None:
    """Raises ValueError for virtual stages that cannot be; None is no virtual stages."""
    check_optional_size("virtual_pipeline_model_parallel_size", virtual_size)
    if pipeline_size == 1 and (virtual_size or 1) > 1:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size is {virtual_size}: "
            f"needs pipeline_model_parallel_size ({pipeline_size}) of at least 2"
        )


def rank_grids(world_size: int, sizes: dict[str, int], *, order: str) -> tuple[RankGenerator, RankGenerator]:
    """The grid of the dense and that of the expert layers over the same ranks; sizes: by argument name, all five.

    Raises ValueError, naming what does not fit, where a size is below 1, the ranks are not a multiple of a grid's
    product, or a pipeline stage would have other ranks for its expert layers.
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
                f"world size is {world_size}: must be a multiple of {names} ({product}); start another number of ranks "
                "or change these sizes"
            )
    dense = RankGenerator(tp, 1, world_size // (tp * cp * pp), pp, cp, order)
    expert = RankGenerator(etp, ep, world_size // (etp * ep * pp), pp, 1, order)
    if not torch.equal(dense.rank_table("pp"), expert.rank_table("pp")):
        raise ValueError(
            f"order is {order!r}: dense layers (tp {tp}, cp {cp}) and expert layers (tp {etp}, ep {ep}) would have "
            "different pipeline stages; must have pp last"
        )
    return dense, expert


def instance_tables(dense: RankGenerator, expert: RankGenerator, *, num_instances: int) -> dict[str, Tensor]:
    """Groups of ranks where the data-parallel ranks form several optimizer instances, each with a whole optimizer.

    Returns tables as RankGenerator.rank_table does, [groups, ranks of a group], int64, on the CPU: "intra_dp_cp" and
    "intra_expt_dp", an instance's part of the data-parallel groups; "inter_dist_opt", ranks of equal shards in all
    instances; "intra_dist_opt", all ranks of an instance.
    Raises ValueError, naming it, where the number does not divide the groups or instances would differ between layers.
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
            f"num_distributed_optimizer_instances is {num_instances}: with order {dense.order!r} the instances of "
            "dense and of expert layers would be of different ranks; must be 1, or dp come after tp, cp and ep"
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
            raise ValueError(f"order is {order!r}: {axis!r} is missing and its size is {name_to_size[axis]}")
    return (*axes, *absent)


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
# Which there are once more for what is on the host.
_HOST_GROUPS = ("tp_dp_cp", "pp")
_EXPERT_GROUPS = {"expt_tp": "tp", "ep": "ep", "expt_dp": "dp", "tp_ep": "tp-ep", "tp_ep_pp": "tp-ep-pp"}


@dataclass
class _Registry:
    """The result of initialize_model_parallel. world: the group of all ranks then. virtual_size: None if not given.

    senders: see add_sender, in the order of its calls.
    """

    world: ProcessGroup | None = None
    groups: ProcessGroupCollection | None = None
    meshes: dict[str, DeviceMesh] = field(default_factory=dict)
    made: list[ProcessGroup] = field(default_factory=list)
    virtual_size: int | None = None
    virtual_rank: int | None = None
    senders: WeakKeyDictionary[Any, frozenset[ProcessGroup]] = field(default_factory=WeakKeyDictionary)


_REGISTRY = _Registry()


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    num_distributed_optimizer_instances: int = 1,
    order: str = DEFAULT_ORDER,
    distributed_timeout_minutes: int = 30,
    **rest: Any,
) -> None:
    """Builds the process groups over all ranks; torch.distributed must be initialised. Collective.

    expert_tensor_parallel_size: None is the tensor size of the dense layers. order: see RankGenerator; one for both
    kinds of layers. rest: other keywords of Megatron, see _check_rest. Raises ValueError for sizes that do not fit,
    before any group is made; RuntimeError when called twice.
    """
    _check_rest(rest)
    if _REGISTRY.groups is not None:
        raise RuntimeError("model parallel groups exist already: call destroy_model_parallel() first")
    check_optional_size("expert_tensor_parallel_size", expert_tensor_parallel_size)
    check_virtual_size(virtual_pipeline_model_parallel_size, pipeline_model_parallel_size)
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
    instances = instance_tables(dense, expert, num_instances=num_distributed_optimizer_instances)
    if num_distributed_optimizer_instances == 1:
        del instances["inter_dist_opt"]  # a group for each rank, to which nothing is ever sent
    _REGISTRY.world = dist.group.WORLD
    backends = _backends()
    timeout = timedelta(minutes=distributed_timeout_minutes)
    maker = _GroupMaker(timeout, _REGISTRY.made, backend=backends[default_device().type])
    groups = {name: maker.own_group(dense.rank_table(axes), name) for name, axes in _DENSE_GROUPS.items()}
    groups |= {name: maker.own_group(expert.rank_table(axes), name) for name, axes in _EXPERT_GROUPS.items()}
    groups |= {name: maker.own_group(table, name) for name, table in instances.items()}
    groups |= _host_groups(dense, maker, backend=backends.get("cpu"))
    groups["embd"] = maker.own_group(_first_and_last(dense.rank_table("pp")), "embd")
    _REGISTRY.groups = ProcessGroupCollection(**groups)
    _REGISTRY.meshes = {
        "dense": _mesh(dense, {"tp": groups["tp"], "cp": groups["cp"], "dp": groups["dp"], "pp": groups["pp"]}),
        "expert": _mesh(
            expert, {"tp": groups["expt_tp"], "ep": groups["ep"], "dp": groups["expt_dp"], "pp": groups["pp"]}
        ),
    }
    _REGISTRY.virtual_size = virtual_pipeline_model_parallel_size
    _REGISTRY.virtual_rank = None if virtual_pipeline_model_parallel_size is None else 0


def _check_rest(rest: dict[str, Any]) -> None:
    """Raises TypeError for unknown keywords, ValueError for settings that could not be honoured.

    create_gloo_process_groups has no effect: groups are made for the ranks' device, and some for the host as well if
    the group of all ranks serves it.
    """
    off = dict.fromkeys(("use_sharp", "hybrid_context_parallel"), False) | dict.fromkeys(
        (
            "pipeline_model_parallel_comm_backend",
            "hierarchical_context_parallel_sizes",
            "nccl_communicator_config_path",
            "get_embedding_ranks",
            "get_position_embedding_ranks",
            "high_priority_stream_groups",
            "sharp_enabled_group",
        )
    )
    if unknown := sorted(rest.keys() - off.keys() - {"create_gloo_process_groups"}):
        raise TypeError(f"unexpected keyword arguments: {', '.join(unknown)}")
    for name, value in rest.items():
        if name in off and value != off[name]:
            raise ValueError(f"{name} is {value!r}: not available here, must be {off[name]}")


def _first_and_last(pipelines: Tensor) -> Tensor:
    """pipelines: [pipelines, stages]. Returns [pipelines, 1 or 2]: the stages that hold embedding weights."""
    return pipelines if pipelines.shape[1] <= 2 else pipelines[:, [0, -1]]


def _host_groups(dense: RankGenerator, maker: "_GroupMaker", *, backend: str | None) -> dict[str, ProcessGroup | None]:
    """Builds the process groups of the host's backend. On CPU ranks they are the device's groups."""
    if backend is None:
        return {}
    on_host = maker.for_backend(backend)
    return {f"{name}_host": on_host.own_group(dense.rank_table(_DENSE_GROUPS[name]), name) for name in _HOST_GROUPS}


class _GroupMaker:
    """Makes groups, one for equal ranks: kinds that differ only in axes of size 1 share their connections."""

    def __init__(self, timeout: timedelta, made: list[ProcessGroup], *, backend: str) -> None:
        self._timeout = timeout
        self._made = made
        self._backend = backend
        self._known: list[tuple[Tensor, ProcessGroup | None]] = []

    def for_backend(self, backend: str) -> "_GroupMaker":
        """One for groups over `backend`: itself if its own are."""
        return self if backend == self._backend else _GroupMaker(self._timeout, self._made, backend=backend)

    def own_group(self, table: Tensor, name: str) -> ProcessGroup | None:
        """This rank's of the groups in `table`, [groups, ranks of a group]; None where it is in none. Collective."""
        for known, group in self._known:
            if torch.equal(known, table):
                return group
        own = None
        # Every rank makes every group, as DeviceMesh does too: torch then numbers them alike on all ranks, and never
        # uses a number twice, so that groups made after destroy_model_parallel do not meet stale addresses.
        for ranks in table.tolist():
            group = dist.new_group(ranks, timeout=self._timeout, backend=self._backend, group_desc=name)
            if isinstance(group, ProcessGroup):
                own = group
                self._made.append(group)
        self._known.append((table, own))
        return own


def _backends() -> dict[str, str]:
    """The library of each type of device, as for the group of all ranks."""
    return dict(pair.split(":") for pair in dist.get_backend_config().split(","))


def _mesh(grid: RankGenerator, groups: dict[str, ProcessGroup | None]) -> DeviceMesh:
    """The grid as torch sees it; groups: by axis. The meshes' groups are the collection's."""
    axes = [axis for axis in reversed(grid.axes) if axis in groups]
    ranks = grid.rank_tensor().view([grid.name_to_size[axis] for axis in axes])
    own = [group for axis in axes if (group := groups[axis]) is not None]
    return DeviceMesh.from_group(own, default_device().type, mesh=ranks, mesh_dim_names=tuple(axes))


def destroy_model_parallel() -> None:
    """Destroys the groups; the process group of torch.distributed stays. Safe where there are none."""
    # destroy_process_group() without a group has destroyed these too, and destroys nothing twice.
    if dist.is_initialized() and dist.group.WORLD is _REGISTRY.world:
        for group in reversed(_REGISTRY.made):
            dist.destroy_process_group(group)
    # Whoever sends over groups of their own goes on.
    vars(_REGISTRY).update(vars(_Registry(senders=_REGISTRY.senders)))


def model_parallel_is_initialized() -> bool:
    """Whether initialize_model_parallel has run."""
    return _REGISTRY.groups is not None


def get_process_groups() -> ProcessGroupCollection:
    """All groups of this rank, for builders to hand down."""
    if _REGISTRY.groups is None:
        raise RuntimeError("process groups do not exist: call initialize_model_parallel() first")
    return _REGISTRY.groups


def existing_process_groups() -> ProcessGroupCollection:
    """All groups of this rank; without model parallel groups, those of a rank alone."""
    return _REGISTRY.groups or ProcessGroupCollection()


def group_or_existing(group: ProcessGroup | None, kind: str = "tp") -> ProcessGroup:
    """`group`; for None what users of Megatron mean by it: the existing one of that field of ProcessGroupCollection.

    Without model parallel groups None is this rank alone, as ALONE always is. Names that users call ask this;
    inside, groups arrive as arguments, and a group of None in a collection is handed on by or_alone.
    """
    return or_alone(vars(existing_process_groups())[kind]) if group is None else group


def add_sender(sender: Any, groups: Iterable[ProcessGroup | None]) -> None:
    """Registers, by weak reference, an object that launches collectives over groups.

    None and groups of one rank are ignored.
    """
    _REGISTRY.senders[sender] = frozenset(group for group in groups if group is not None and group_size(group) > 1)


def remove_sender(sender: Any) -> None:
    """Registers that it launches nothing any more."""
    _REGISTRY.senders.pop(sender, None)


def senders_beside(sender: Any, *, earlier: bool = False) -> list[Any]:
    """Other senders that have a group in common with this one; earlier: those alone that were registered before it."""
    found, own = [], _REGISTRY.senders.get(sender, frozenset())
    for other, groups in _REGISTRY.senders.items():
        if other is sender:
            if earlier:
                break
        elif not own.isdisjoint(groups):
            found.append(other)
    return found


def get_device_mesh(kind: str) -> DeviceMesh:
    """The grid of the "dense" (pp, dp, cp, tp) or "expert" (pp, dp, ep, tp) layers; its groups are the collection's."""
    get_process_groups()
    return _REGISTRY.meshes[kind]


def _group(name: str) -> ProcessGroup:
    group: ProcessGroup | None = vars(get_process_groups())[name]
    if group is None:
        raise RuntimeError(f"this rank is in no {name} group")
    return group


def _checked(name: str, check_initialized: bool) -> ProcessGroup | None:
    return _group(name) if check_initialized else vars(existing_process_groups())[name]


# Getters that users know, by kind of parallelism: the group, this rank's index in it, and how many ranks it has.
# check_initialized: raise RuntimeError where there is no such group, instead of returning None. partial_...: only the
# ranks of this rank's instance of the distributed optimizer.


def get_tensor_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The ranks that share one dense layer's weights."""
    return _checked("tp", check_initialized)


def get_tensor_model_parallel_rank() -> int:
    """This rank's index in its tensor-parallel group."""
    return group_rank(_group("tp"))


def get_tensor_model_parallel_world_size() -> int:
    """Number of ranks that share one dense layer's weights."""
    return group_size(_group("tp"))


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first rank of this tensor-parallel group."""
    return dist.get_global_rank(_group("tp"), 0)


def get_context_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The ranks that hold parts of the same sequences."""
    return _checked("cp", check_initialized)


def get_context_parallel_rank() -> int:
    """This rank's index in its context-parallel group."""
    return group_rank(_group("cp"))


def get_context_parallel_world_size() -> int:
    """Number of parts of a sequence."""
    return group_size(_group("cp"))


def get_data_parallel_group(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> ProcessGroup:
    """The ranks that hold copies of the same dense weights; `with_context_parallel` also counts sequence parts.

    partial_data_parallel goes with with_context_parallel: shards are spread over sequence parts, too.
    """
    if partial_data_parallel and not with_context_parallel:
        raise ValueError("partial_data_parallel is set: needs with_context_parallel as well")
    if partial_data_parallel:
        return _group("intra_dp_cp")
    return _group("dp_cp" if with_context_parallel else "dp")


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """This rank's index in its data-parallel group."""
    return group_rank(get_data_parallel_group(with_context_parallel, partial_data_parallel))


def get_data_parallel_world_size(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Number of data-parallel copies."""
    return group_size(get_data_parallel_group(with_context_parallel, partial_data_parallel))


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first rank of this data-parallel group."""
    return dist.get_global_rank(get_data_parallel_group(with_context_parallel), 0)


def get_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The ranks that together hold one copy of the dense weights: tensor x pipeline."""
    return _checked("mp", check_initialized)


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Tensor x context."""
    return _checked("tp_cp", check_initialized)


def get_tensor_and_context_parallel_rank() -> int:
    """This rank's index among those that hold parts of the same micro-batch."""
    return group_rank(_group("tp_cp"))


def get_tensor_and_context_parallel_world_size() -> int:
    """Number of ranks that hold parts of the same micro-batch."""
    return group_size(_group("tp_cp"))


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup | None:
    """Tensor x data: a whole pipeline stage, with the sequence parts if `with_context_parallel`."""
    return _checked("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


def get_expert_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The ranks that hold different experts of the same layers."""
    return _checked("ep", check_initialized)


def get_expert_model_parallel_rank() -> int:
    """This rank's index in its expert-parallel group."""
    return group_rank(_group("ep"))


def get_expert_model_parallel_world_size() -> int:
    """Number of ranks that the experts are spread over."""
    return group_size(_group("ep"))


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The ranks that share one expert's weights."""
    return _checked("expt_tp", check_initialized)


def get_expert_tensor_parallel_rank() -> int:
    """This rank's index among those that share one expert's weights."""
    return group_rank(_group("expt_tp"))


def get_expert_tensor_parallel_world_size() -> int:
    """Number of ranks that share one expert's weights."""
    return group_size(_group("expt_tp"))


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup | None:
    """The ranks that hold copies of the same expert weights."""
    return _checked("intra_expt_dp" if partial_expert_data_parallel else "expt_dp", check_initialized)


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """This rank's index among those that hold copies of the same expert weights."""
    return group_rank(get_expert_data_parallel_group(True, partial_expert_data_parallel))


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Number of copies of the expert weights."""
    return group_size(get_expert_data_parallel_group(True, partial_expert_data_parallel))


def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup | None:
    """All ranks that together hold one whole distributed optimizer."""
    return _checked("intra_dist_opt", check_initialized)


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The ranks of equal shards in all instances of the distributed optimizer. RuntimeError where there is one."""
    return _checked("inter_dist_opt", check_initialized)


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Expert tensor x expert: the ranks that together hold all experts of a layer."""
    return _checked("tp_ep", check_initialized)


def get_expert_tensor_model_pipeline_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Expert tensor x expert x pipeline: the ranks that together hold one copy of all expert weights."""
    return _checked("tp_ep_pp", check_initialized)


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The stages of this rank's pipeline."""
    return _checked("pp", check_initialized)


def get_pipeline_model_parallel_rank() -> int:
    """This rank's pipeline stage."""
    return group_rank(_group("pp"))


def get_pipeline_model_parallel_world_size() -> int:
    """Number of pipeline stages."""
    return group_size(_group("pp"))


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the first stage of this rank's pipeline."""
    return dist.get_global_rank(_group("pp"), 0)


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last stage of this rank's pipeline."""
    return dist.get_global_rank(_group("pp"), get_pipeline_model_parallel_world_size() - 1)


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the following stage; of the first one for the last."""
    return _stage_at_distance(1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the stage before; of the last one for the first."""
    return _stage_at_distance(-1)


def _stage_at_distance(steps: int) -> int:
    stage = (get_pipeline_model_parallel_rank() + steps) % get_pipeline_model_parallel_world_size()
    return dist.get_global_rank(_group("pp"), stage)


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Number of model chunks per stage; None without virtual stages."""
    return _REGISTRY.virtual_size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Number of the model chunk that set_virtual_pipeline_model_parallel_rank named; None without virtual stages."""
    return _REGISTRY.virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Sets which model chunk of this stage is being built, for code that calls the getters."""
    _REGISTRY.virtual_rank = rank


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank reads the input tokens; with ignore_virtual=False, whether its chunk `vp_stage` does.

    vp_stage: None is the chunk of set_virtual_pipeline_model_parallel_rank.
    """
    chunk = _chunk(vp_stage)
    return get_pipeline_model_parallel_rank() == 0 and (ignore_virtual or chunk in (None, 0))


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank computes the loss; with ignore_virtual=False, whether its chunk `vp_stage` does, as above."""
    chunk = _chunk(vp_stage)
    is_last_chunk = chunk is None or chunk + 1 == _REGISTRY.virtual_size
    last = get_pipeline_model_parallel_world_size() - 1
    return get_pipeline_model_parallel_rank() == last and (ignore_virtual or is_last_chunk)


def _chunk(vp_stage: int | None) -> int | None:
    if _REGISTRY.virtual_size is None:
        return None
    return _REGISTRY.virtual_rank if vp_stage is None else vp_stage


def get_embedding_group(check_initialized: bool = True) -> ProcessGroup | None:
    """The first and last stage, which share embedding weights. RuntimeError on the stages between."""
    return _checked("embd", check_initialized)


def is_rank_in_embedding_group() -> bool:
    """Whether this rank is on a stage that may hold embedding weights."""
    return get_process_groups().embd is not None
