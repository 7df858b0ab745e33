"""Groups of ranks: pure arithmetic on a grid of ranks with one axis per kind of parallelism.

Makes no process group; parallel_state.py does.
"""

import math

import torch
from torch import Tensor

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
