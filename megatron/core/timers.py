"""Named timers with log levels, as in Megatron, and reports of their times on all ranks.

megatron/training/meters/meters.py selects the timers that are logged.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.device import TimeMark, mark_time, seconds_between

MAX_LEVEL = 2


class Timer:
    """Accumulates the time between start and stop; `with timer:` calls both.

    On a GPU it records events in the stream, and only `elapsed` waits for them. barrier: waits for all ranks first, so
    that the measured time excludes the delay of late ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total = 0.0
        self._started: TimeMark | None = None
        # Intervals that the device may not have completed yet.
        self._open: list[tuple[TimeMark, TimeMark]] = []

    def start(self, barrier: bool = False) -> None:
        """Starts the timer, which must not be running."""
        assert self._started is None, "timer is already running"
        _wait_for_ranks(barrier)
        self._started = mark_time(self._device)

    def stop(self, barrier: bool = False) -> None:
        """Stops the timer and adds the time since start."""
        assert self._started is not None, "timer is not running"
        _wait_for_ranks(barrier)
        self._open.append((self._started, mark_time(self._device)))
        self._started = None

    def reset(self) -> None:
        """Discards all measured time."""
        self._total, self._started = 0.0, None
        self._open.clear()

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Returns the seconds measured so far, including a running interval.

        Waits for the GPU. reset: restarts the sum from zero.
        """
        running = self._started is not None
        if running:
            self.stop(barrier)
        self._total += sum(seconds_between(start, end) for start, end in self._open)
        self._open.clear()
        total = self._total
        if reset:
            self._total = 0.0
        if running:
            self.start()
        return total

    def __enter__(self) -> None:
        self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _OffTimer(Timer):
    """Timer that measures nothing, because its level is above the log level of the run."""

    def __init__(self, name: str, log_level: int) -> None:
        self._name, self._log_level = name, log_level

    def start(self, barrier: bool = False) -> None:
        pass

    def stop(self, barrier: bool = False) -> None:
        pass

    def reset(self) -> None:
        pass

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        raise ValueError(f"timer {self._name} is disabled: requires --timing-log-level {self._log_level}")


class Timers:
    """Collection of named timers, created on first use: `timers("forward-backward", log_level=1).start()`.

    Timers above `log_level` measure nothing. log_option: whether `log` prints the maximum over ranks ("max"), the
    minimum and maximum ("minmax") or the times of all ranks ("all").
    """

    def __init__(self, log_level: int = 0, log_option: str = "minmax", *, device: torch.device | None = None) -> None:
        self.log_level = log_level
        self.log_option = log_option
        self._device = device or torch.device("cpu")
        self._timers: dict[str, Timer] = {}
        self._paused = False

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """Returns the timer called `name`. The first call sets its level; None means the highest level."""
        if self._paused:
            return _OffTimer(name, MAX_LEVEL)
        if name not in self._timers:
            level = MAX_LEVEL if log_level is None else log_level
            if level > self.log_level:
                return _OffTimer(name, level)
            self._timers[name] = Timer(self._device)
        return self._timers[name]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Disables all timers inside the block. Used for evaluation, which shares code with the training step."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def seconds_by_rank(self, names: Sequence[str], *, reset: bool = True) -> dict[str, list[float]]:
        """Returns the seconds of every rank, by timer name; 0 if a timer does not exist on a rank.

        Collective: all ranks must pass the same names.
        """
        own = [self._timers[name].elapsed(reset) if name in self._timers else 0.0 for name in names]
        rows = _gather_rows_sync(torch.tensor(own, dtype=torch.float64, device=self._device))
        return {name: [row[index] for row in rows] for index, name in enumerate(names)}

    def log(
        self,
        names: Sequence[str],
        rank: int | None = None,
        *,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Prints the times of the timers in `names` over all ranks, divided by `normalizer`. Collective.

        rank: the rank that prints; None means 0.
        """
        _wait_for_ranks(barrier)
        text = format_times(self.seconds_by_rank(names, reset=reset), self.log_option, normalizer=normalizer)
        if text and (not dist.is_initialized() or dist.get_rank() == (rank or 0)):
            print(text, flush=True)

    def write(
        self,
        names: Sequence[str],
        writer: Any,
        *,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Writes the slowest rank's seconds to TensorBoard as `NAME-time`. Collective.

        writer: None on ranks that do not write.
        """
        _wait_for_ranks(barrier)
        for name, seconds in self.seconds_by_rank(names, reset=reset).items():
            if writer is not None:
                writer.add_scalar(f"{name}-time", max(seconds) / normalizer, iteration)


def format_times(seconds: dict[str, list[float]], log_option: str, *, normalizer: float = 1.0) -> str:
    """Formats the times of timers that ran on any rank, in milliseconds, as `Timers.log` prints them.

    seconds: seconds of every rank, by timer name. Returns "" if no timer ran.
    """
    ran = {name: [1000.0 * value / normalizer for value in values] for name, values in seconds.items() if any(values)}
    if not ran:
        return ""
    if log_option == "all":
        lines = ["times across ranks (ms):"]
        for name, values in ran.items():
            lines += [f"  {name}:", *(f"     rank {rank:2d}: {value:.2f}" for rank, value in enumerate(values))]
        return "\n".join(lines)
    lines = ["max time across ranks (ms):" if log_option == "max" else "(min, max) time across ranks (ms):"]
    for name, values in ran.items():
        times = f"{max(values):.2f}" if log_option == "max" else f"({min(values):.2f}, {max(values):.2f})"
        lines.append(f"    {(name + ' ').ljust(48, '.')}: {times}")
    return "\n".join(lines)


def _wait_for_ranks(barrier: bool) -> None:
    if barrier and dist.is_initialized():
        dist.barrier()


def _gather_rows_sync(own: torch.Tensor) -> list[list[float]]:
    """Gathers one row of times from each rank. own: [timers], fp64. NOTE: reads the device once per log interval."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rows = [own]
    if ranks > 1:
        rows = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(rows, own)
    return [row.tolist() for row in rows]
