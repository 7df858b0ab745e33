"""Predictions of a StashOrder are correct for every schedule, and wrong predictions do no harm."""

import random
from itertools import product

import pytest

from megatron.core.transformer.moe.paged_stash.stash_order import EventKind, StashEvent, StashOrder
from tests.unit_tests.core.transformer.moe.paged_stash.group_schedules import (
    SCHEDULES,
    one_forward_one_backward,
    stash_events,
)

SIZES = [*product((1, 2, 3), (1, 2, 3, 4, 7, 16)), (8, 3), (8, 16), (5, 8)]
Said = tuple[bool, list[StashEvent], int | None]


def follow(order: StashOrder, events: list[StashEvent]) -> list[Said]:
    """Returns the order's predictions at each event; the step ends after the last event."""
    said: list[Said] = []
    for event in events:
        order.observe(event)
        said.append((order.is_backward_next(event), order.upcoming_backwards(event, 2), order.forward_index(event)))
    order.finish_step()
    return said


def read_off(events: list[StashEvent]) -> list[Said]:
    """Returns the correct predictions, derived from the whole list of events."""
    said: list[Said] = []
    forward_groups = [one.group for one in events if one.kind is EventKind.FORWARD]
    for now, event in enumerate(events):
        own_next = (
            events[now + 1 : now + 2] == [StashEvent(EventKind.BACKWARD, *event.group)] and event not in events[:now]
        )
        later = list(
            dict.fromkeys(one for one in events[now + 1 :] if one not in events[: now + 1])
        )  # only the first part of a split backward
        coming = [one for one in later if one.kind is EventKind.BACKWARD][:2]
        possible = [StashEvent(EventKind.FORWARD, *one.group) not in later for one in coming]
        said.append((own_next, coming[: [*possible, False].index(False)], forward_groups.index(event.group)))
    return said


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__)
def test_given_and_learned_lists_predict_every_event(schedule) -> None:
    for (stages, microbatches), layers in product(SIZES, (1, 2)):
        for stage in {0, stages // 2, stages - 1}:
            events = stash_events(schedule(stage, stages, microbatches), layers)
            learning, expected = StashOrder(), read_off(events)
            assert all(row is None for _, _, row in follow(learning, events))
            for order in (StashOrder(events), learning, learning):
                assert follow(order, events) == expected


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_without_a_list_a_microbatch_goes_backward_through_its_own_groups(stages: int) -> None:
    events = stash_events(one_forward_one_backward(0, stages, 6), layers=3)
    said = follow(StashOrder(), events)
    for now, (event, (own_next, coming, _)) in enumerate(zip(events, said)):
        layer = int(event.name[-1]) if event.kind is EventKind.BACKWARD else 0
        assert not own_next and coming == events[now + 1 : now + 1 + min(layer, 2)]


def test_changed_numbers_of_microbatches_are_learned_and_evaluations_are_not() -> None:
    order, steps = StashOrder(), [stash_events(one_forward_one_backward(0, 2, m), layers=2) for m in (4, 2, 5)]
    evaluation = [event for event in steps[2] if event.kind is EventKind.FORWARD]
    for events in steps:
        follow(order, events)
        follow(order, evaluation)
        before = order.events
        assert follow(order, events) == read_off(events)
        assert order.events is before and list(before) == events
    given = StashOrder(steps[0])
    for events in (steps[1], steps[2], steps[0]):
        said = follow(given, events)
    assert said == read_off(steps[0]) and given.events == tuple(steps[0])


def test_departure_lasts_for_the_step_alone() -> None:
    events = stash_events(one_forward_one_backward(0, 1, 2), layers=3)
    order = StashOrder(events)
    for event in [*events[:2], events[4], events[5]]:
        order.observe(event)
    assert order.departed and order.forward_index(events[0]) is None and not order.is_backward_next(events[2])
    assert order.upcoming_backwards(events[5], 5) == []  # the backwards of both groups that ran forward are done
    order.abandon_step()
    assert follow(order, events) == read_off(events)


def test_no_sequence_of_events_raises() -> None:
    choose = random.Random(7)
    groups = [(name, instance) for name in "abc" for instance in range(3)]
    for _ in range(300):
        order = StashOrder()
        for _ in range(3):
            events = [
                StashEvent(choose.choice(list(EventKind)), *choose.choice(groups)) for _ in range(choose.randrange(12))
            ]
            for own_next, coming, _ in follow(order, events):
                assert own_next in (True, False) and len(coming) <= 2
