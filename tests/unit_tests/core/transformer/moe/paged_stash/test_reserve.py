"""In a pool with space for every x, no step lacks pages for one: without an order, in its first step, and later."""

import random

import pytest
import torch

from megatron.core.transformer.moe.paged_stash.arithmetic import (
    GroupRows,
    PoolModel,
    peak_pages,
    reserve_table,
    resident_groups,
    simulate,
)
from megatron.core.transformer.moe.paged_stash.page_layout import (
    Counter,
    PagesByPriority,
    PoolLayout,
    Priority,
    TensorSpec,
)
from megatron.core.transformer.moe.paged_stash.stash import Reserve
from megatron.core.transformer.moe.paged_stash.stash_order import EventKind, GroupKey
from tests.counts import long_count
from tests.unit_tests.core.transformer.moe.paged_stash.group_schedules import SCHEDULES, stash_events

PAGE, ROWS = 16, 4
CPU = torch.device("cpu")
Sizes = dict[GroupKey, list[TensorSpec]]


def random_sizes(choose: random.Random, groups: list[GroupKey]) -> Sizes:
    """Draws one tensor per priority for each group, of up to ROWS rows. x is at most as large as the first group's."""
    inputs = choose.randrange(1, 4)
    widths = [
        (choose.randrange(1, inputs + 1) if rank else inputs, *choose.choices((1, 2), k=2))
        for rank in range(len(groups))
    ]
    return {
        group: [TensorSpec(PAGE * one, PAGE * one, ROWS, kind) for one, kind in zip(width, Priority)]
        for group, width in zip(groups, widths)
    }


class Steps:
    """Repeats one list of events in a pool with space for every x."""

    def __init__(self, choose: random.Random) -> None:
        stages = choose.randrange(1, 4)
        passes = choose.choice(SCHEDULES)(choose.randrange(stages), stages, choose.randrange(1, 6))
        self.events = tuple(stash_events(passes, layers=choose.randrange(1, 4)))
        self.forwards = [event for event in self.events if event.kind is EventKind.FORWARD]
        self.sizes = random_sizes(choose, [event.group for event in self.forwards])
        self.reserve, self.choose = Reserve(PoolLayout(PAGE, 1), CPU, share=1), choose

    def run(self, *, is_known: bool, is_kept_back: bool = True) -> dict[Counter, int]:
        """Returns the counters after a step. is_known: the order is known. is_kept_back: the reserve is used."""
        kept = resident_groups(self.events) if is_known else set()
        enough = peak_pages(self.events, lambda group: PagesByPriority() if group in kept else self.inputs(group))
        pool = PoolModel(PoolLayout(PAGE, max(1, enough)))
        self.reserve.begin_step(self.events if is_known else ())
        for event in (event for event in self.events if event.group not in kept):
            specs = self.sizes[event.group]
            if event.kind is EventKind.BACKWARD:
                pool.release(event.group)
                continue
            self.reserve.learn(event.group, specs, max_rows=ROWS)
            row = self.reserve.row(event.group, self.forwards.index(event) if is_known else None)
            assert row is not None
            for_gate_up, for_act = row.tolist()[1:] if is_kept_back else (0, 0)
            num_rows = self.choose.choice((0, 1, ROWS, ROWS))
            pool.plan(event.group, specs, num_rows=num_rows, reserve=(0, for_gate_up, for_act))
        return pool.counters

    def inputs(self, group: GroupKey) -> PagesByPriority:
        return PagesByPriority(self.sizes[group][0].max_bytes // PAGE)


@pytest.mark.parametrize("is_given", [False, True])
def test_no_step_makes_an_input_lack_pages(is_given: bool) -> None:
    choose, lacking = random.Random(3), 0
    for _ in range(long_count(150, soak=5000)):
        steps = Steps(choose)
        for is_known in (is_given, True, False):
            assert steps.run(is_known=is_known)[Counter.VOID] == 0
        lacking += steps.run(is_known=True, is_kept_back=False)[Counter.VOID]
    assert lacking > 100


def test_rows_of_a_first_step_are_the_table_where_groups_are_alike() -> None:
    events = tuple(stash_events(SCHEDULES[0](0, 2, 4), layers=3))
    forwards = [event for event in events if event.kind is EventKind.FORWARD]
    specs = [TensorSpec(PAGE * width, PAGE * width, ROWS, kind) for width, kind in zip((2, 3, 1), Priority)]
    table = [list(row) for row in reserve_table(events, lambda group: PagesByPriority(8, 12, 4))]
    reserve = Reserve(PoolLayout(PAGE, 1), CPU, share=1)
    for step in range(2):
        with torch.device("meta"):  # the reserve must not use this default device
            reserve.begin_step(events)
        places = set()
        for index, event in enumerate(forwards):
            reserve.learn(event.group, specs, max_rows=ROWS)
            row = reserve.row(event.group, index)
            assert row is not None and row.tolist()[:2] == table[index][:2]
            assert row[2] == table[index][2] or step == 0, "not all sizes are known in step 0"
            places.add(row.data_ptr())
        assert len(places) == len(forwards), "plans may still read the rows of other events"


def test_a_share_counts_on_what_open_groups_give_back() -> None:
    events = tuple(stash_events(SCHEDULES[0](0, 4, 12), layers=2))
    sizes = {event.group: [TensorSpec(PAGE, PAGE, 2 * ROWS, kind) for kind in Priority] for event in events}
    group, dropped = GroupRows(sizes[events[0].group], ROWS), {}
    for share in (0.5, 1.0):
        reserve = Reserve(PoolLayout(PAGE, 1), CPU, share=share)
        for key, specs in sizes.items():
            reserve.learn(key, specs, max_rows=2 * ROWS)
        reserve.begin_step(events)
        rows = [
            reserve.row(event.group, index)
            for index, event in enumerate(one for one in events if one.kind is EventKind.FORWARD)
        ]
        table = [(0, int(row[1]), int(row[2])) for row in rows if row is not None]
        found = simulate(events, lambda _: group, layout=PoolLayout(PAGE, 3 * 8 * ROWS), reserve=table)
        dropped[share] = [found.counters[one] for one in (Counter.VOID, Counter.DROPPED_GATE_UP, Counter.DROPPED_ACT)]
    assert dropped[0.5] == [0, 0, 0] and dropped[1.0][0] == 0 < dropped[1.0][2]


def test_rows_follow_sizes_that_change_in_a_later_step_of_the_same_order() -> None:
    events = tuple(stash_events(SCHEDULES[0](0, 2, 4), layers=3))
    groups = [event.group for event in events if event.kind is EventKind.FORWARD]
    grown, other = (Reserve(PoolLayout(PAGE, 1), CPU, share=1) for _ in range(2))
    for reserve, rows_of_steps in ((grown, (ROWS, 2 * ROWS)), (other, (2 * ROWS,))):
        for max_rows in rows_of_steps:
            reserve.begin_step(events)
            for group in groups:
                specs = [TensorSpec(PAGE, PAGE, max_rows, kind) for kind in Priority]
                reserve.learn(group, specs, max_rows=max_rows)
        reserve.begin_step(events)
    rows = [grown.row(group, index) for index, group in enumerate(groups)]
    assert [tuple(row.tolist()) for row in rows if row is not None] == list(other.table) == list(grown.table)


@pytest.mark.parametrize("share", [0.25, 0.75, 1.0])
def test_another_share_is_written_to_the_same_memory_when_the_next_step_begins(share: float) -> None:
    events = tuple(stash_events(SCHEDULES[0](0, 4, 12), layers=2))
    changed, other = (Reserve(PoolLayout(PAGE, 1), CPU, share=one) for one in (0.5, share))
    for reserve in (changed, other):
        for event in events:
            reserve.learn(event.group, [TensorSpec(PAGE, PAGE, 2 * ROWS, kind) for kind in Priority], max_rows=2 * ROWS)
        reserve.begin_step(events)
    rows = [changed.row(events[0].group, index) for index in range(len(events) // 2)]
    before = [row.tolist() for row in rows if row is not None]
    changed.set_share(share)
    assert [row.tolist() for row in rows if row is not None] == before
    changed.begin_step(events)
    after = [row.tolist() for row in rows if row is not None]
    assert after == [list(row) for row in other.table] != before


def test_unknown_orders_keep_everything_back_and_no_share_nothing() -> None:
    specs = [TensorSpec(PAGE, PAGE, ROWS, kind) for kind in Priority]
    for share, kept in ((1.0, [0, 2**62, 2**62]), (0.1, [0, 2**62, 2**62]), (0.0, None)):
        reserve = Reserve(PoolLayout(PAGE, 1), CPU, share=share)
        reserve.learn(("a", 0), specs, max_rows=ROWS)
        for index in (None, 0):
            row = reserve.row(("a", 0), index)
            assert (row if row is None else row.tolist()) == kept
