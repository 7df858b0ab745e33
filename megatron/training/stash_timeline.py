"""When a pool held how many pages, pass by pass of a step; which step is logged, stash_meter.py says."""

from typing import Any

from megatron.core.transformer.moe.paged_stash import EventKind, Priority
from megatron.core.transformer.moe.paged_stash.arithmetic import PoolModel, page_moves
from megatron.core.transformer.moe.paged_stash.page_layout import pages_for
from megatron.core.transformer.moe.paged_stash.stash_order import GroupKey, layer_of
from megatron.training.stash_figures import StepFigures, rows_by_group


def stash_timeline(step: StepFigures) -> dict[str, Any]:
    """Which pages a step took and gave back when: counted from its live rows by the rules of the pool.

    "passes": in order, the number of the layer that ran forward, or minus the number of the one that ran backward.
    "changes": [place in passes, layer, pages of the device, pages of the host] each, below 0 where they were given
    back, as page_moves has them.
    """
    assert step.layout is not None, "without a pool there are no pages"
    pool, rows, changes = PoolModel(step.layout), rows_by_group(step.passes, step.rows), []
    for move in page_moves(step.events, prefetch_groups=step.prefetch_groups):
        group = move.group
        if move.is_taken:
            reserve = step.reserve[move.forward_index] if step.reserve else (0, 0, 0)
            pool.plan(group, step.specs, num_rows=rows.get(group, 0), reserve=reserve)
            changes.append([move.place, *_pages_of(group, pool, sign=1)])
        else:
            changes.append([move.place, *_pages_of(group, pool, sign=-1)])
            pool.release(group)
    signs = {EventKind.FORWARD: 1, EventKind.BACKWARD: -1}
    return {"passes": [signs[event.kind] * layer_of(event.name) for event in step.events], "changes": changes}


def pages_to_keep_all(step: StepFigures) -> int:
    """Returns the size of the smallest pool, in pages of both tiers, with which the step recomputes nothing.

    It may be more than pages_wanted, because gate_up and act leave the pages of the reserve free.
    """
    assert step.layout is not None, "without a pool there are no pages"
    rows = rows_by_group(step.passes, step.rows)
    held: dict[GroupKey, int] = {}
    num_held = most = 0
    for move in page_moves(step.events, prefetch_groups=step.prefetch_groups):
        if not move.is_taken:
            num_held -= held.pop(move.group)
            continue
        reserve = step.reserve[move.forward_index] if step.reserve else (0, 0, 0)
        own = pages_for(step.specs, rows.get(move.group, 0), layout=step.layout)
        most = max([most, *(num_held + own.up_to(kind) + reserve[kind] for kind in Priority if own[kind])])
        held[move.group] = sum(own)
        num_held += held[move.group]
    return most


def _pages_of(group: GroupKey, pool: PoolModel, *, sign: int) -> tuple[int, int, int]:
    tensors = pool.held[group]
    return layer_of(group[0]), sign * sum(one.device for one in tensors), sign * sum(one.host for one in tensors)
