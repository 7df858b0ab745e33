"""The process groups that components receive as an argument; building them is parallel_state.py's work."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class ProcessGroupCollection:
    """One process group per kind of parallelism, under the names Megatron users know.

    None stands for a group of this rank alone: ask group_size and group_rank. Groups of parallel_state are never None,
    but for embd: torch.distributed would take None for all ranks. Kinds of equal ranks may be one group.
    Dense layers: tp tensor, cp context, dp data, pp pipeline; dp_cp, tp_cp, tp_dp, tp_dp_cp their products, mp tensor x
    pipeline. Expert layers, over the same ranks: expt_tp tensor, ep expert, expt_dp data; tp_ep and tp_ep_pp their
    products with expt_tp first. embd: the first and last stage, which share embedding weights; None on other stages.
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


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks in `group`; None is this rank alone, so 1."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    """This rank's index in `group`; None is this rank alone, so 0."""
    return 0 if group is None else dist.get_rank(group)
