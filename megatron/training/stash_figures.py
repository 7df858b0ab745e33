"""What a rank knows of its expert buffers and its paged stash once a step is done: numbers on the host, of this rank
alone. They are gathered over ranks by stash_meter.py.
"""

from collections import Counter as Multiset
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.transformer.moe.paged_stash import Counter, PoolLayout, StashEvent, TensorSpec
from megatron.core.transformer.moe.paged_stash.arithmetic import ReserveRow
from megatron.core.transformer.moe.paged_stash.stash_order import GroupKey, layer_name


@dataclass(frozen=True)
class StepFigures:
    """One step of one rank.

    layout, counters, tail_bytes: of the pool, counters as at the end of the step; None, empty and 0 without a stash.
    tail_bytes: of the pages given out in the step, what no row fills. rows: live rows of each expert forward, in order;
    passes: their layers, from 1 over the whole model. balanced_rows: live rows of a pass if all experts were chosen
    equally often. pages_wanted: the step's peak of held pages, had every tensor got its own; balanced_pages: the same
    of the longest step planned so far, if every pass had balanced_rows. capacity_factor: that of this step's buffers;
    buffer_rows: C, 0 on a stage without experts; factor_needed: the least that its most demanding dispatch would have
    done with. voids: how often the step ran anew because rows or pages were lacking. events: the stage's passes of
    expert groups in order; specs: what one group stashes; reserve: pages that each forward leaves free, () for none;
    prefetch_groups: how many groups give their pages back ahead of their backward. Empty and 0 without a stash.
    """

    layout: PoolLayout | None
    counters: dict[Counter, int]
    tail_bytes: int
    rows: tuple[int, ...]
    passes: tuple[int, ...]
    balanced_rows: int
    pages_wanted: int
    balanced_pages: int
    capacity_factor: float
    factor_needed: float
    voids: int
    events: tuple[StashEvent, ...]
    specs: tuple[TensorSpec, ...]
    buffer_rows: int
    reserve: tuple[ReserveRow, ...]
    prefetch_groups: int


def rows_by_group(passes: Sequence[int], rows: Sequence[int]) -> dict[GroupKey, int]:
    """Live rows of each expert forward of a step. passes: layers of the forwards, in order; rows: as many, or more."""
    forwards: Multiset[int] = Multiset()
    found = {}
    for layer, count in zip(passes, rows):
        found[layer_name(layer), forwards[layer]] = count
        forwards[layer] += 1
    return found
