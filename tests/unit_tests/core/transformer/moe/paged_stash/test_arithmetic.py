"""The reserve table's guarantees in random steps, the memory law, peaks, and decisions of planning."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.transformer.moe.paged_stash.arithmetic import (
    GroupRows,
    PoolModel,
    TensorPages,
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
    live_rows,
    pages_for,
)
from megatron.core.transformer.moe.paged_stash.stash_order import EventKind, GroupKey, StashEvent
from tests.counts import long_count
from tests.unit_tests.core.transformer.moe.paged_stash.group_schedules import (
    interleaved,
    one_forward_one_backward,
    random_events,
    stash_events,
)

PAGE = 16


def one_page_rows(pages: PagesByPriority) -> GroupRows:
    """Returns a group with these page counts: one tensor per priority, except for two of gate_up where possible."""
    sizes = [(pages.inputs, Priority.INPUT), (pages.act, Priority.ACT)]
    sizes += [(pages.gate_up // 2, Priority.GATE_UP), (pages.gate_up - pages.gate_up // 2, Priority.GATE_UP)]
    return GroupRows([TensorSpec(PAGE * size, PAGE * size, 1, kind) for size, kind in sizes if size], num_rows=1)


def kinds(rows: GroupRows, tensors: list[TensorPages]) -> set[tuple[Priority, bool]]:
    """Returns (priority, whether it was dropped) of each tensor in a group."""
    return {(spec.priority, one.dropped) for spec, one in zip(rows.specs, tensors)}


@pytest.mark.parametrize("exact", [False, True])
def test_reserve_table_keeps_inputs_safe_and_gives_up_act_first(exact: bool) -> None:
    choose = random.Random(11 + exact)
    dropped = dict.fromkeys(Counter, 0)
    for _ in range(long_count(1500, soak=40000)):
        events = random_events(choose, choose.randrange(1, 9))
        groups = {event.group for event in events}
        most = {group: PagesByPriority(*(choose.randrange(6) for _ in range(3))) for group in sorted(groups)}
        true = {
            group: own if exact else PagesByPriority(*map(choose.randrange, (pages + 1 for pages in own)))
            for group, own in most.items()
        }
        least = choose.choice([None, lambda group, true=true: PagesByPriority(true[group].inputs)])
        reserve = reserve_table(events, most.__getitem__, at_least=least)
        smallest = max(1, peak_pages(events, most.__getitem__, up_to=Priority.INPUT))
        device = choose.randrange(smallest + 1)
        layout = PoolLayout(PAGE, device, smallest - device + choose.randrange(8))
        rows = {group: one_page_rows(pages) for group, pages in true.items()}
        result = simulate(events, rows.__getitem__, layout=layout, reserve=reserve)
        assert result.counters[Counter.VOID] == 0
        got = [kinds(rows[group], tensors) for group, tensors in result.placements.items()]
        first_act = next((index for index, one in enumerate(got) if (Priority.ACT, False) in one), len(got))
        assert not any((Priority.GATE_UP, True) in one for one in got[first_act + 1 :])
        dropped = {counter: count + dropped[counter] for counter, count in result.counters.items()}
        dropped[Counter.VOID] += simulate(events, rows.__getitem__, layout=layout).counters[Counter.VOID]
    # The cases are difficult: both recompute levels occur often, and without the table inputs run out of pages.
    assert min(dropped[one] for one in (Counter.DROPPED_ACT, Counter.DROPPED_GATE_UP, Counter.VOID)) > 200


def test_where_all_rows_are_expected_the_reserve_is_what_is_held_later() -> None:
    choose = random.Random(13)
    for _ in range(300):
        events = random_events(choose, choose.randrange(1, 9))
        most = {("g", n): PagesByPriority(*(choose.randrange(6) for _ in range(3))) for n in range(9)}
        held = [
            [sum(map(priority, map(most.__getitem__, open_groups(events[: end + 1])))) for end in range(len(events))]
            for priority in (lambda pages: pages.inputs, lambda pages: pages.up_to(Priority.GATE_UP))
        ]
        starts = [place for place, event in enumerate(events) if event.kind is EventKind.FORWARD]
        for_gate_up = [max([0, *(held[0][t] - held[0][s] for t in starts if t > s)]) for s in starts]
        for_act = [
            max([0, *(held[1][t] - held[1][s] + above for t, above in zip(starts, for_gate_up) if t > s)])
            for s in starts
        ]
        table = reserve_table(events, most.__getitem__, at_least=most.__getitem__)
        assert table == [(0, first, max(first, second)) for first, second in zip(for_gate_up, for_act)]


def open_groups(events: list[StashEvent]) -> set[GroupKey]:
    ran = {kind: {event.group for event in events if event.kind is kind} for kind in EventKind}
    return ran[EventKind.FORWARD] - ran[EventKind.BACKWARD]


@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_peaks_of_pipeline_schedules(microbatches: int) -> None:
    def pages(group: GroupKey) -> PagesByPriority:
        return PagesByPriority(3, 2, 1)

    for stage in range(4):
        events = stash_events(one_forward_one_backward(stage, 4, microbatches), layers=5)
        alive = 5 * min(4 - stage, microbatches)
        assert peak_pages(events, pages) == 6 * alive
        assert peak_pages(events, pages, up_to=Priority.INPUT) == 3 * alive
        assert len(resident_groups(events)) == (microbatches if stage == 3 else int(microbatches == 1))
    # Nothing follows the last event, so its row reserves nothing.
    assert reserve_table(events, pages)[-1] == (0, 0, 0)
    first = stash_events(interleaved(0, 2, microbatches), layers=1)
    assert peak_pages(first, pages) == 6 * min(2 * 2 + 1, 2 * microbatches)


def test_a_full_pool_reserves_nothing_it_lacks_and_ladders_down() -> None:
    events = stash_events(one_forward_one_backward(0, 1, 1), layers=3)
    own = PagesByPriority(4, 2, 1)
    assert reserve_table(events, lambda group: own) == [(0, 8, 12), (0, 4, 6), (0, 0, 0)]
    drops = []
    for pages in (21, 18, 12):
        table = reserve_table(events, lambda group: own)
        result = simulate(events, lambda group: one_page_rows(own), layout=PoolLayout(PAGE, pages), reserve=table)
        drops.append([result.counters[Counter.DROPPED_GATE_UP], result.counters[Counter.DROPPED_ACT]])
    assert drops == [[0, 0], [0, 3], [6, 3]]


specs = st.builds(
    lambda row_bytes, priority, per: TensorSpec(row_bytes, row_bytes, -(-12 // per), priority, per),
    st.integers(1, 50), st.sampled_from(Priority), st.sampled_from([1, 4]),
)  # fmt: skip


@given(st.lists(st.tuples(st.lists(specs, max_size=4), st.integers(0, 12)), max_size=5), st.integers(1, 30))
def test_memory_law_and_exact_counts(groups: list[tuple[list[TensorSpec], int]], device: int) -> None:
    pool = PoolModel(PoolLayout(PAGE, device, host_pages=3))
    for instance, (tensors, rows) in enumerate(groups):
        got = pool.plan(("g", instance), tensors, num_rows=rows)
        num_bytes = sum(live_rows(spec, rows) * spec.row_bytes for spec in tensors)
        needs = sum(pages_for(tensors, rows, layout=pool.layout))
        assert sum(one.device + one.host for one in got) <= needs
        # The last page of each tensor may contain as little as one byte; all other pages are full.
        assert needs <= num_bytes // pool.layout.page_bytes + len(tensors)
        assert all(pages >= 0 for pages in pool.free)
    assert sum(pool.free) == 3 + device - pool.counters[Counter.PLANNED_PAGES]
    num_tensors = sum(len(tensors) for tensors, _ in groups)
    live_bytes = pool.counters[Counter.LIVE_BYTES]
    assert pool.counters[Counter.PLANNED_PAGES] <= live_bytes // pool.layout.page_bytes + num_tensors


def test_counts_out_of_range_and_straddling_tensors() -> None:
    pool, spec = PoolModel(PoolLayout(PAGE, 2, 2)), TensorSpec(PAGE, PAGE, max_rows=3)
    assert pool.plan(("g", 0), [spec], num_rows=9) == [TensorPages(2, 1)]
    assert pool.plan(("g", 1), [spec], num_rows=-1) == [TensorPages(0, 0)]
    assert pool.plan(("g", 2), [spec], num_rows=2) == [TensorPages(0, 0, dropped=True)]
    assert [pool.counters[one] for one in (Counter.VOID, Counter.BAD_COUNT, Counter.SPILLED_PAGES)] == [3, 2, 1]
