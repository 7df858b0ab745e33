"""Timers accumulate, continue after being read, respect their level, and print times in Megatron's format."""

import pytest

from megatron.core.timers import Timers, format_times


def test_a_timer_adds_intervals_and_is_reset_by_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 3.0, 10.0, 14.0, 14.0, 20.0, 20.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    timers = Timers(log_level=2)
    with timers("batch", log_level=2):
        pass
    timers("batch").start()
    assert timers("batch").elapsed(reset=False) == 6.0
    assert timers("batch").elapsed() == 12.0
    timers("batch").reset()
    assert timers("batch").elapsed() == 0.0


def test_timers_above_the_level_and_paused_ones_measure_nothing() -> None:
    timers = Timers(log_level=1)
    for name, level in (("micro-batch", 2), ("without-level", None), ("step", 1)):
        timers(name, level).start()
        timers(name).stop()
    with timers.paused(), timers("step"):
        inner = timers("step")
    seconds = timers.seconds_by_rank(["step", "micro-batch", "never"])
    assert seconds["step"][0] > 0 and seconds["micro-batch"] == seconds["never"] == [0.0]
    for timer in (inner, timers("micro-batch")):
        with pytest.raises(ValueError, match="requires --timing-log-level 2"):
            timer.elapsed()


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("max", ["max time across ranks (ms):", "    step ...........................................: 3.00"]),
        ("minmax", ["(min, max) time across ranks (ms):", f"    step {'.' * 43}: (1.50, 3.00)"]),
        ("all", ["times across ranks (ms):", "  step:", "     rank  0: 1.50", "     rank  1: 3.00"]),
    ],
)
def test_times_are_shown_per_step_in_milliseconds(option: str, expected: list[str]) -> None:
    seconds = {"step": [0.003, 0.006], "never": [0.0, 0.0]}
    assert format_times(seconds, option, normalizer=2).splitlines() == expected
    assert format_times({"never": [0.0]}, option) == ""


def test_scripts_print_and_write_their_own_timers(capsys: pytest.CaptureFixture[str]) -> None:
    class Writer:
        def add_scalar(self, *point: object) -> None:
            points.append(point)

    points: list[tuple] = []
    timers = Timers(log_level=0)
    with timers("mine", log_level=0):
        pass
    timers.log(["mine"], reset=False)
    timers.write(["mine"], Writer(), iteration=7)
    assert "    mine ....." in capsys.readouterr().out
    assert points[0][0] == "mine-time" and points[0][1] > 0 and points[0][2] == 7
