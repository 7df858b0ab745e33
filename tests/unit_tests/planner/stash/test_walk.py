"""Pools that are simulated together make the same decisions and have the same counters as single pools."""

import random
from collections.abc import Sequence
from itertools import product

import numpy as np

from megatron.core.transformer.moe.paged_stash import Counter, PoolLayout, Priority, TensorSpec
from megatron.core.transformer.moe.paged_stash.arithmetic import PageMove, PoolModel, page_moves, reserve_table
from megatron.core.transformer.moe.paged_stash.page_layout import pages_for
from megatron.core.transformer.moe.paged_stash.stash_order import GroupKey
from megatron.planner.stash.walk import PoolOutcomes, PoolSizes, Reserves, simulate_pools
from tests.counts import long_count
from tests.unit_tests.core.transformer.moe.paged_stash.group_schedules import random_events

PAGE = 32
MOST = 20
TIERS = ("device_pages", "host_pages")
SPECS = tuple(
    TensorSpec(width, width, MOST, priority, tokens)
    for width, priority, tokens in (
        (16, Priority.INPUT, 1),
        (4, Priority.INPUT, 1),
        (48, Priority.GATE_UP, 1),
        (24, Priority.GATE_UP, 4),
    )
)


def test_simulated_pools_equal_single_pools() -> None:
    choose, lacked = random.Random(3), dict.fromkeys(Counter, 0)
    for _ in range(long_count(60, soak=2000)):
        events, steps, ranks = random_events(choose, choose.randrange(1, 9)), choose.randrange(1, 4), 2
        moves = page_moves(events, prefetch_groups=choose.randrange(3))
        groups = sorted({event.group for event in events})
        random_rows = np.random.default_rng(choose.randrange(1 << 30))
        rows = {group: random_rows.integers(0, MOST + 1, (steps, ranks)) for group in groups}
        layouts = [PoolLayout(PAGE, choose.randrange(80), choose.randrange(1, 40)) for _ in range(ranks)]
        expected = [pages_for(SPECS, choose.randrange(MOST), layout=layouts[0]) for _ in range(choose.randrange(1, 3))]
        tables = np.array([reserve_table(events, lambda group, own=own: own) for own in expected])
        which = random_rows.integers(0, len(tables), (steps, ranks))
        sizes = PoolSizes(PAGE, *(np.array([vars(one)[name] for one in layouts]) for name in TIERS))
        found = simulate_pools(
            moves,
            rows.__getitem__,
            specs={name: SPECS for name, _ in groups},
            sizes=sizes,
            num_steps=steps,
            reserves=Reserves(tables, which),
        )
        for step, rank in product(range(steps), range(ranks)):
            own = {group: int(of_group[step, rank]) for group, of_group in rows.items()}
            alone = _alone(moves, own, layout=layouts[rank], table=tables[which[step, rank]])
            assert _at(found, step, rank) == alone
            for counter in found.counters:
                lacked[counter] += alone[0][counter]
    assert min(lacked[counter] for counter in found.counters) > 0


def _at(found: PoolOutcomes, step: int, rank: int) -> tuple[dict[Counter, int], int]:
    counters = {name: int(of[step, rank]) for name, of in found.counters.items()}
    return {**dict.fromkeys(Counter, 0), **counters}, int(found.dropped_rows[step, rank])


def _alone(
    moves: Sequence[PageMove], rows: dict[GroupKey, int], *, layout: PoolLayout, table: np.ndarray
) -> tuple[dict[Counter, int], int]:
    pool, dropped = PoolModel(layout), 0
    for move in moves:
        if not move.is_taken:
            pool.release(move.group)
            continue
        first, second, third = (int(pages) for pages in table[move.forward_index])
        got = pool.plan(move.group, SPECS, num_rows=rows[move.group], reserve=(first, second, third))
        for spec, tensor in zip(SPECS, got):
            if tensor.dropped and spec.priority is Priority.GATE_UP:
                dropped += rows[move.group]
    return pool.counters, dropped
