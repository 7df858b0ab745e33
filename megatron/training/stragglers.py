"""Ranks that stay slower than the others: which, by how much, and how long the others wait. Times are the timers'."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Slower than the median by this factor, in so many log intervals one after the other: not the noise of a moment.
_SLOW_FACTOR, _INTERVALS = 1.1, 3


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A slow rank. work_ms: a step of its own work; median_ms: that of the median rank, which waits_ms for others.

    intervals: for how many log intervals it has been the slowest.
    """

    rank: int
    work_ms: float
    median_ms: float
    waits_ms: float
    intervals: int

    def __str__(self) -> str:
        return (
            f"straggler: rank {self.rank} works {self.work_ms:.1f} ms a step, {self.work_ms / self.median_ms:.2f} "
            f"times the median of {self.median_ms:.1f} ms, for {self.intervals} log intervals; the median rank waits "
            f"{self.waits_ms:.1f} ms a step"
        )


class StragglerWatch:
    """Remembers which rank was slow in the last intervals."""

    def __init__(self) -> None:
        self._rank: int | None = None
        self._intervals = 0

    def observe(self, work_ms: Sequence[float], *, step_ms: float) -> Straggler | None:
        """Takes the mean times of an interval, by rank; the rank that has been slow for long enough, if there is one.

        work_ms: waits for other ranks left out. step_ms: with them.
        """
        # The lower of two, or the slow one of two ranks would be compared with itself.
        median, slowest = statistics.median_low(work_ms), max(range(len(work_ms)), key=work_ms.__getitem__)
        if work_ms[slowest] <= _SLOW_FACTOR * median:
            self._intervals = 0
            return None
        self._intervals = self._intervals + 1 if slowest == self._rank else 1
        self._rank = slowest
        if self._intervals < _INTERVALS:
            return None
        return Straggler(
            rank=slowest,
            work_ms=work_ms[slowest],
            median_ms=median,
            waits_ms=max(0.0, step_ms - median),
            intervals=self._intervals,
        )
