"""A rank is reported as a straggler if it stays slow, but not for a single slow interval."""

from megatron.training.meters.meters import StragglerWatch


def test_a_rank_that_is_slow_in_three_intervals_is_named_with_what_it_costs() -> None:
    watch = StragglerWatch()
    assert watch.observe([10.0, 10.5, 13.0], step_ms=15.0) is None
    assert watch.observe([10.0, 10.5, 13.0], step_ms=15.0) is None
    found = watch.observe([10.0, 10.5, 21.0], step_ms=22.0)
    assert found is not None and (found.rank, found.intervals) == (2, 3)
    assert (found.work_ms, found.median_ms, found.waits_ms) == (21.0, 10.5, 11.5)
    assert "rank 2 works 21.0 ms per step, 2.00 times the median of 10.5 ms, for 3 log intervals" in str(found)
    assert watch.observe([10.0, 10.5, 10.6], step_ms=11.0) is None


def test_of_two_ranks_the_slow_one_is_compared_with_the_other() -> None:
    watch = StragglerWatch()
    assert [watch.observe([20.0, 10.0], step_ms=21.0) is not None for _ in range(3)] == [False, False, True]


def test_ranks_that_take_turns_are_no_stragglers() -> None:
    watch = StragglerWatch()
    assert not any(watch.observe([10.0, *slow], step_ms=20.0) for slow in ([20.0, 10.0], [10.0, 20.0]) * 4)
