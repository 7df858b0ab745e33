"""The process groups that components receive as an argument; building them is parallel_state.py's work."""

from dataclasses import dataclass

from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class ProcessGroupCollection:
    """One process group per kind of parallelism, under the names Megatron users know.

    None stands for a group of this rank alone. tp tensor, pp pipeline, dp data, cp context, ep expert,
    expt_tp and expt_dp the expert layers' tensor and data groups, mp tensor x pipeline, embd the stages that
    share embedding weights.
    """

    tp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    dp_cp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    expt_tp: ProcessGroup | None = None
    expt_dp: ProcessGroup | None = None
    mp: ProcessGroup | None = None
    tp_cp: ProcessGroup | None = None
    embd: ProcessGroup | None = None
