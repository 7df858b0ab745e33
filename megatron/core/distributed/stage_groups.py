"""Which bucket groups the ranks of a pipeline stage have together, so that all number them alike. Launches nothing.

Ranks with other experts may have other groups: experts of some may be frozen.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import ProcessGroup

from megatron.core.distributed.synced_group import SyncedGroup
from megatron.core.group_collectives import gather_objects
from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True)
class StageGroups:
    """names: of the groups of any rank, in the order of the first rank that has each. everywhere: of those that are the
    same on all ranks.
    """

    names: list[str]
    everywhere: frozenset[str]


def stage_group_of(groups: ProcessGroupCollection) -> ProcessGroup | None:
    """The ranks whose collectives are to be in one order; None is this rank alone."""
    return groups.dp_cp if groups.tp_dp_cp is None else groups.tp_dp_cp


def groups_of_stage(groups: Sequence[SyncedGroup], stage_group: ProcessGroup | None) -> StageGroups:
    """What all ranks of the stage have, from this rank's groups of one chunk. Collective."""
    per_rank = gather_objects([(group.name, _fingerprint(group)) for group in groups], stage_group)
    names = dict.fromkeys(name for of_rank in per_rank for name, _ in of_rank)
    same = frozenset.intersection(*(frozenset(of_rank) for of_rank in per_rank))
    return StageGroups(list(names), frozenset(name for name, _ in same))


def _fingerprint(group: SyncedGroup) -> int:
    buckets = [
        (bucket.layout.span.numel, str(bucket.grad_data.dtype), [entry.name for entry in bucket.entries])
        for bucket in group.buckets
    ]
    return zlib.crc32(repr(buckets).encode())
