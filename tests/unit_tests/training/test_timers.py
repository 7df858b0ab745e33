"""Timers of scripts: they add up, run on across a reading, and are made on first use."""

import pytest

from megatron.training.timers import Timers


def test_a_timer_adds_intervals_and_is_reset_by_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 3.0, 10.0, 14.0, 20.0, 21.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    timers = Timers()
    timers("batch", log_level=2).start()
    timers("batch").stop()
    timers("batch").start()
    assert timers("batch").elapsed(reset=False) == 6.0
    assert timers("batch").elapsed() == 12.0
    assert timers("batch").elapsed() == 1.0
