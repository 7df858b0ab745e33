"""Named stopwatches for scripts, as `get_timers()` gives them; host time only, nothing waits for the device."""

import time


class Timer:
    """A stopwatch that adds up the seconds between start and stop."""

    def __init__(self) -> None:
        self._total = 0.0
        self._started: float | None = None

    def start(self) -> None:
        """Starts; an error if it runs already."""
        assert self._started is None, "timer is running already"
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Stops and adds the time since start."""
        assert self._started is not None, "timer is not running"
        self._total += time.perf_counter() - self._started
        self._started = None

    def elapsed(self, *, reset: bool = True) -> float:
        """Seconds measured so far, including a running interval; `reset` starts again from zero."""
        now = time.perf_counter()
        running = 0.0 if self._started is None else now - self._started
        total = self._total + running
        if reset:
            self._total = 0.0
            self._started = None if self._started is None else now
        return total


class Timers:
    """Timers by name, made on first use: `timers("forward-backward").start()`."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """The timer of that name; log_level is Megatron's, and every level is timed here."""
        return self._timers.setdefault(name, Timer())
