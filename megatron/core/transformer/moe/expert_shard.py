"""Which of a layer's experts a rank holds, and which part of each."""

from dataclasses import dataclass

from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size


@dataclass(frozen=True)
class ExpertShard:
    """What a rank holds of a layer's experts: the local ones from first_expert on, of each one part of num_parts."""

    num_experts: int
    first_expert: int
    part: int
    num_parts: int

    @classmethod
    def of(cls, groups: ProcessGroupCollection, num_local_experts: int) -> "ExpertShard":
        """This rank's, of the expert and expert-tensor groups."""
        return cls(
            num_experts=num_local_experts * group_size(groups.ep),
            first_expert=num_local_experts * group_rank(groups.ep),
            part=group_rank(groups.expt_tp),
            num_parts=group_size(groups.expt_tp),
        )
