"""Statistics derived from bucket times, in small examples that can be checked by hand."""

import pytest

from megatron.core.distributed.bucket_group import Traffic
from megatron.core.distributed.event_log import (
    StepTimes,
    Transfer,
    exposed_seconds,
    hidden_seconds,
    hidden_share,
    launched_before_next_was_ready,
)


def transfer(ready, launched, done, *, waits=(), traffic=Traffic.REDUCE):
    return Transfer("bucket", traffic, 64, ready, launched, done, tuple(waits))


@pytest.mark.parametrize(
    "times, backward_end, share, in_order",
    [
        # All launched immediately: two seconds of each of the first two could overlap backward, and did.
        ([(1, 1, 3), (3, 3, 5), (6, 6, 8)], 6, 1.0, [True, True]),
        # The second queues behind the first, as it would in the ideal schedule.
        ([(1, 1, 4), (2, 2, 7), (6, 6, 8)], 6, 1.0, [True, True]),
        # The first is launched 4 seconds late and hides 1 of 2 possible seconds. The second could not overlap at all.
        ([(1, 5, 7), (6, 6, 8)], 6, 0.5, [True]),
        # All launches happen at the end of backward.
        ([(1, 6, 8), (3, 6, 9), (6, 6, 10)], 6, 0.0, [False, False]),
        # One bucket, ready at the end of backward.
        ([(6, 6, 8)], 6, None, []),
    ],
)
def test_hidden_share_and_order_of_launches(times, backward_end, share, in_order):
    gather = transfer(0, 0, 100, traffic=Traffic.GATHER)
    step = StepTimes((gather, *(transfer(*one) for one in times)), backward_end)
    assert hidden_share(step) == (None if share is None else pytest.approx(share))
    assert launched_before_next_was_ready(step) == in_order


def test_exposed_seconds_are_those_in_which_someone_waited():
    assert exposed_seconds(transfer(0, 1, 5)) == 0
    assert exposed_seconds(transfer(0, 1, 5, waits=[(3, 4), (4.5, 6)])) == 2.5


def test_hidden_seconds_are_those_under_way_in_which_nobody_waited():
    early = transfer(0, 1, 5, waits=[(3, 4), (4.5, 6)])
    # Launched while the first is in flight, so it runs from 5 to 9. It is waited for from 8 on.
    queued = transfer(0, 2, 9, waits=[(8, 10)])
    gather = transfer(0, 0, 100, traffic=Traffic.GATHER)
    step = StepTimes((gather, early, queued), 6)
    assert hidden_seconds(step, Traffic.REDUCE) == (4 - 1 - 0.5) + (4 - 1)
    assert hidden_seconds(step, Traffic.GATHER) == 100
