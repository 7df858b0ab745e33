"""The memory law and the simulation agree with the real pool under skewed routing and pipeline schedules."""

import random

import pytest
import torch

from megatron.core.transformer.moe.paged_stash import arithmetic, page_layout
from megatron.core.transformer.moe.paged_stash.page_layout import Counter, PoolLayout, Priority, TensorSpec
from megatron.core.transformer.moe.paged_stash.page_pool import PageGroup, PagePool
from megatron.core.transformer.moe.paged_stash.stash_order import EventKind, GroupKey
from tests.counts import long_count
from tests.unit_tests.core.transformer.moe.paged_stash.group_schedules import SCHEDULES, stash_events

PAGE, TOKENS = 256, 400
SPECS = [TensorSpec(width, width, TOKENS, priority) for width, priority in zip((33, 66, 20), Priority)]
SPECS.append(TensorSpec(4, 4, TOKENS // 8, tokens_per_row=8))


@pytest.mark.parametrize("seed", range(long_count(12, soak=600)))
def test_pool_obeys_the_memory_law_and_counts_as_simulated(seed: int) -> None:
    choose = random.Random(seed)
    stages = choose.randrange(1, 5)
    passes = choose.choice(SCHEDULES)(choose.randrange(stages), stages, choose.randrange(1, 6))
    events = stash_events(passes, layers=choose.randrange(1, 4))
    rows = {}
    for name in sorted({event.group for event in events}):  # a rank's share of Dirichlet(0.3) over 4 ranks
        shares = [choose.gammavariate(0.3, 1) for _ in range(4)]
        rows[name] = int(TOKENS * shares[0] / sum(shares))
    layout = PoolLayout(PAGE, device_pages=choose.choice([60, 300, 10_000]), host_pages=choose.choice([0, 40]))
    reserve = arithmetic.reserve_table(events, lambda group: page_layout.pages_for(SPECS, TOKENS // 2, layout=layout))
    pool, bound, forwards = PagePool("cpu", layout), 0, iter(reserve)
    held: dict[GroupKey, tuple[PageGroup, int, int]] = {}
    for event in events:
        if event.kind is EventKind.FORWARD:
            group = pool.open_group(SPECS)
            pool.plan(group, torch.tensor([rows[event.group]]), reserve=torch.tensor(next(forwards)))
            kept = [spec for index, spec in enumerate(SPECS) if not pool.dropped(group, index)]
            live = sum(page_layout.live_rows(spec, rows[event.group]) * spec.row_bytes for spec in kept)
            held[event.group] = (group, live, len(kept))
        elif event.group in held:
            pool.release(held.pop(event.group)[0])
        live, tensors = sum(one[1] for one in held.values()), sum(one[2] for one in held.values())
        # The last page of each tensor may contain as little as one byte; all other pages are full.
        now = live // layout.page_bytes + tensors
        bound, used = max(bound, now), pool.occupancy_sync()
        assert used.device_held + used.host_held <= now
    assert max(used.counters[Counter.HIGH_WATER_DEVICE], used.counters[Counter.HIGH_WATER_HOST]) <= bound
    own = {name: arithmetic.GroupRows(SPECS, count) for name, count in rows.items()}
    assert used.counters == arithmetic.simulate(events, own.__getitem__, layout=layout, reserve=reserve).counters
