"""pretrain_gpt.py whose attempts are ended by signals, as the environment variable FAULTS specifies. For tests.

FAULTS is a JSON object. A key is an attempt, "STARTS.RESTARTS": starts by the supervisor, restarts by torchrun. A value
is [rank, when, signal, whom]. when: a step, "setup" or "evaluation". whom: "self"; "agent"; "save N" for a SIGKILL at
the Nth file operation of the saves from that step on; or "MOMENT", where the test sends the signal as soon as the rank
has written to the pipe of that variable.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

import pretrain_gpt
from megatron.core.dist_checkpointing import disk
from megatron.core.enums import ModelType
from megatron.training import error_broadcast, pretrain
from megatron.training.callbacks import Callback
from megatron.training.errors import exit_on_user_error
from tests.killing_os import KillingOs

TIMEOUT_SECONDS = 4.0
IN_A_SAVE = "save "


def attempt_name(*, starts: int = 0, restarts: int = 0) -> str:
    """Returns the key of an attempt in FAULTS."""
    return f"{starts}.{restarts}"


def main(argv: list[str]) -> None:
    """Trains with the fault of this attempt. A minute of --distributed-timeout-minutes lasts TIMEOUT_SECONDS."""
    counts = [int(os.environ.get(f"{who}_RESTART_COUNT", "0")) for who in ("SUPERVISOR", "TORCHELASTIC")]
    fault = json.loads(os.environ["FAULTS"]).get(attempt_name(starts=counts[0], restarts=counts[1]))
    doom = _Doom(*fault) if fault is not None and str(fault[0]) == os.environ["RANK"] else None
    if fault is not None and fault[0] == 0 and fault[2] == "SIGSTOP":
        # Rank 0 hosts the store, which therefore hangs too. Shorter timeouts make its clients give up sooner.
        vars(error_broadcast).update(_ANSWER_SECONDS=3.0, _PATIENCE_SECONDS=1.0)
    if fault is not None and fault[2] in ("SIGKILL", "SIGSTOP"):
        wait_for_no_silent_rank()
    with short_timeouts(), exit_on_user_error():
        pretrain(
            pretrain_gpt.train_valid_test_datasets_provider if doom is None else doom.datasets,
            pretrain_gpt.model_provider,
            ModelType.encoder_or_decoder,
            pretrain_gpt.forward_step if doom is None else doom.forward_step,
            callbacks=[] if doom is None else [doom],
            argv=argv,
        )


@contextmanager
def short_timeouts() -> Iterator[None]:
    """Makes a minute of --distributed-timeout-minutes last TIMEOUT_SECONDS while the context is active."""
    with (
        patch("megatron.training.startup_handshake.timedelta", _shorter),
        patch("megatron.core.parallel_state.timedelta", _shorter),
    ):
        yield


def wait_for_no_silent_rank() -> None:
    """Makes the host of the store exit soon after a rank falls silent, since such a rank was killed or stopped."""
    vars(error_broadcast).update(_SILENT_SECONDS=0.5)


def _shorter(*, minutes: float) -> timedelta:
    return timedelta(seconds=minutes * TIMEOUT_SECONDS)


class _Doom(Callback):
    """Sends the signal to this process or to its parent at the time given, such as the backward pass of a step."""

    def __init__(self, _rank: int, when: int | str, signal_name: str, whom: str) -> None:
        self._when, self._signal, self._whom = when, signal.Signals[signal_name], whom
        self._is_due = False

    def on_step_start(self, iteration: int) -> None:
        is_here = iteration + 1 == self._when
        if is_here and self._whom.startswith(IN_A_SAVE):
            # Only saves write through disk.os.
            vars(disk)["os"] = KillingOs(int(self._whom.removeprefix(IN_A_SAVE)))
        else:
            self._is_due = is_here

    def datasets(self, sizes: list[int]) -> Any:
        if self._when == "setup":
            self._send()
        return pretrain_gpt.train_valid_test_datasets_provider(sizes)

    def forward_step(self, data_iterator: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
        losses, loss_func = pretrain_gpt.forward_step(data_iterator, model)
        if self._is_due and losses.requires_grad:
            losses.register_hook(lambda _: self._send())
        if self._when == "evaluation" and not losses.requires_grad:
            self._send()
        return losses, loss_func

    def _send(self) -> None:
        if self._whom == "self":
            os.kill(os.getpid(), self._signal)
        elif self._whom == "agent":
            _ask_and_wait(lambda: os.kill(os.getppid(), self._signal))
        else:
            # Only once, since nobody reads the pipe during later micro-batches.
            self._is_due = False
            _ask_and_wait(lambda: Path(os.environ[self._whom]).write_text("waits"))


def _ask_and_wait(ask: Callable[[], object]) -> None:
    """Calls `ask`, and returns once this process has received a signal. It may also be killed instead."""
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    before = signal.set_wakeup_fd(sender)
    ask()
    os.read(receiver, 1)
    signal.set_wakeup_fd(before)


if __name__ == "__main__":
    main(sys.argv[1:])
