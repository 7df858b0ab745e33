"""Which pipeline stage of a group this rank is, under the path Megatron users import it from."""

from torch.distributed import ProcessGroup

from megatron.core.process_groups_config import group_rank, group_size


def is_pp_first_stage(pp_group: ProcessGroup | None) -> bool:
    """Whether this rank is the first stage of the group; None is this rank alone."""
    return group_rank(pp_group) == 0


def is_pp_last_stage(pp_group: ProcessGroup | None) -> bool:
    """Whether this rank is the last stage of the group; None is this rank alone."""
    return group_rank(pp_group) == group_size(pp_group) - 1
