"""Queries about this rank's pipeline stage, under the import path of Megatron."""

from torch.distributed import ProcessGroup

from megatron.core.parallel_state import group_or_existing
from megatron.core.process_groups_config import group_rank, group_size


def is_pp_first_stage(pp_group: ProcessGroup | None) -> bool:
    """Returns whether this rank is the first stage of the group.

    None means the group of parallel_state, or this rank alone if there is none.
    """
    return group_rank(group_or_existing(pp_group, "pp")) == 0


def is_pp_last_stage(pp_group: ProcessGroup | None) -> bool:
    """Returns whether this rank is the last stage of the group.

    None means the group of parallel_state, or this rank alone if there is none.
    """
    group = group_or_existing(pp_group, "pp")
    return group_rank(group) == group_size(group) - 1
