"""Implements conditions that end training before its last iteration: a signal, a time limit, an iteration interval.

Each rank observes only its own reasons. The training step sums them over ranks, so that all ranks stop at the same
step.
"""

import enum
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from megatron.core.group_collectives import message_device
from megatron.core.process_groups_config import group_size
from megatron.training.callbacks.lines import print_rank_0
from megatron.training.config import TrainingConfig


class ExitReason(enum.Enum):
    """Reason why a run stops early. If several reasons apply, the first in this order counts."""

    SIGNAL = "the exit signal"
    DURATION = "--exit-duration-in-mins"
    INTERVAL = "--exit-interval"


# Reasons that ranks may observe at different steps, and which are therefore exchanged between ranks.
LOCAL_REASONS = (ExitReason.SIGNAL, ExitReason.DURATION)


class ExitConditions:
    """Checks this rank's reasons to stop, once per step."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self._signalled = False
        self._start = time.monotonic()
        # torchrun forwards only SIGTERM, and then kills ranks that take too long.
        handles_sigterm = config.exit_signal_handler and config.exit_signal == signal.SIGTERM
        self._shutdown_seconds = shutdown_seconds() if handles_sigterm else math.inf

    def local_reasons(self) -> list[bool]:
        """Returns whether each of LOCAL_REASONS holds on this rank."""
        limit = self.config.exit_duration_in_mins
        # 0 disables the limit, as in Megatron-LM.
        out_of_time = time.monotonic() - self._start > limit * 60 if limit else False
        return [self._signalled, out_of_time]

    def signalled_anywhere_sync(self) -> bool:
        """Returns whether any rank has received the exit signal. Collective, and free without --exit-signal-handler.

        NOTE: reads the reduced flag, which is in host memory if a group can communicate from there.
        """
        if not self.config.exit_signal_handler or group_size(dist.group.WORLD) == 1:
            return self._signalled
        flag = torch.tensor(int(self._signalled), dtype=torch.int64, device=message_device([dist.group.WORLD]))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def warn_of_slow_save(self, *, step_seconds: float, save_seconds: float | None) -> None:
        """Prints a warning once if torchrun would kill the ranks before they complete a step and a save."""
        if save_seconds is None or step_seconds + save_seconds <= self._shutdown_seconds:
            return
        print_rank_0(
            f"WARNING: a save took {save_seconds:.1f} s and a step {step_seconds:.1f} s, but torchrun kills the "
            f"ranks {self._shutdown_seconds:g} s after SIGTERM (--exit-signal-handler): set "
            f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT above {math.ceil(step_seconds + save_seconds)}"
        )
        self._shutdown_seconds = math.inf

    def at_interval(self, iteration: int) -> bool:
        """Returns whether --exit-interval ends the run after `iteration`."""
        interval = self.config.exit_interval
        return interval is not None and iteration % interval == 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catches the exit signal while the body runs, if --exit-signal-handler is given."""
        if not self.config.exit_signal_handler:
            yield
            return
        previous = signal.signal(self.config.exit_signal, self._receive)
        try:
            yield
        finally:
            signal.signal(self.config.exit_signal, previous)

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled = True


def shutdown_seconds() -> float:
    """Returns torchrun's grace period after SIGTERM, in seconds. Infinite without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return math.inf
    # 30 s is the default of torch.distributed.launcher.api.
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
