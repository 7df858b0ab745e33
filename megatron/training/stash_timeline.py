"""When a pool held how many pages, pass by pass of a step; which step is logged, stash_meter.py says."""

from typing import Any

from megatron.core.transformer.moe.paged_stash import EventKind
from megatron.core.transformer.moe.paged_stash.arithmetic import PoolModel, resident_groups
from megatron.core.transformer.moe.paged_stash.stash_order import StashEvent, StashOrder, layer_of
from megatron.training.stash_figures import StepFigures, rows_by_group


def stash_timeline(step: StepFigures) -> dict[str, Any]:
    """Which pages a step took and gave back when: counted from its live rows by the rules of the pool.

    "passes": in order, the number of the layer that ran forward, or minus the number of the one that ran backward.
    "changes": [place in passes, layer, pages of the device, pages of the host] each, below 0 where they were given
    back. A backward gives back those of its own group, and of the groups whose rows then start on their way.
    """
    assert step.layout is not None, "without a pool there are no pages"
    pool, order = PoolModel(step.layout), StashOrder(step.events)
    rows, resident = rows_by_group(step.passes, step.rows), resident_groups(step.events)
    reserve, changes = iter(step.reserve), []
    for place, event in enumerate(step.events):
        order.observe(event)
        if event.kind is EventKind.FORWARD:
            row = next(reserve, (0, 0, 0))
            if event.group not in resident:
                pool.plan(event.group, step.specs, num_rows=rows.get(event.group, 0), reserve=row)
                changes.append([place, *_pages_of(event, pool, sign=1)])
            continue
        for done in (event, *order.upcoming_backwards(event, step.prefetch_groups)):
            if done.group in pool.held:
                changes.append([place, *_pages_of(done, pool, sign=-1)])
                pool.release(done.group)
    signs = {EventKind.FORWARD: 1, EventKind.BACKWARD: -1}
    return {"passes": [signs[event.kind] * layer_of(event.name) for event in step.events], "changes": changes}


def _pages_of(event: StashEvent, pool: PoolModel, *, sign: int) -> tuple[int, int, int]:
    tensors = pool.held[event.group]
    return layer_of(event.name), sign * sum(one.device for one in tensors), sign * sum(one.host for one in tensors)
