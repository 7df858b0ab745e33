"""This rank's pipeline stage in a group, under the path that Megatron users import."""

from torch.distributed import ProcessGroup

from megatron.core.parallel_state import group_or_existing
from megatron.core.process_groups_config import group_rank, group_size


def is_pp_first_stage(pp_group: ProcessGroup | None) -> bool:
    """Whether this rank is the first stage of the group; None is parallel_state's, or this rank alone without it."""
    return group_rank(group_or_existing(pp_group, "pp")) == 0


def is_pp_last_stage(pp_group: ProcessGroup | None) -> bool:
    """Whether this rank is the last stage of the group; None is parallel_state's, or this rank alone without it."""
    group = group_or_existing(pp_group, "pp")
    return group_rank(group) == group_size(group) - 1
