"""When training ends before its last iteration: a signal, a time limit, an iteration interval.

Each rank only notes its own reason; the training step sums the notes over ranks, so that all stop at the same step.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from megatron.training.config import TrainingConfig


class ExitConditions:
    """This rank's wish to stop: asked once a step with `requested`, told apart afterwards by `reason`."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self.signal_received: int | None = None
        self._start = time.monotonic()

    def requested(self) -> bool:
        """Whether a signal arrived or the time limit has passed on this rank."""
        return self.signal_received is not None or self._out_of_time()

    def at_interval(self, iteration: int) -> bool:
        """Whether --exit-interval ends the run after `iteration`."""
        interval = self.config.exit_interval
        return interval is not None and iteration % interval == 0

    def reason(self) -> str:
        """Why the run stopped early, in words for the log."""
        if self.signal_received is not None:
            return f"signal {signal.Signals(self.signal_received).name}"
        if self._out_of_time():
            return f"--exit-duration-in-mins {self.config.exit_duration_in_mins}"
        return "another rank's request"

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catches the exit signal while the body runs, where --exit-signal-handler asks for it."""
        if not self.config.exit_signal_handler:
            yield
            return
        previous = signal.signal(self.config.exit_signal, self._receive)
        try:
            yield
        finally:
            signal.signal(self.config.exit_signal, previous)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.signal_received = number

    def _out_of_time(self) -> bool:
        limit = self.config.exit_duration_in_mins
        return limit is not None and time.monotonic() - self._start > limit * 60
