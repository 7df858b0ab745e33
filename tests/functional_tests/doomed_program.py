"""pretrain_gpt.py whose attempts end by signals: FAULTS in the environment says which rank, when; tests start it.

FAULTS is JSON: attempt, as "starts by the supervisor.restarts by torchrun", to [rank, step, signal, whom].
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.callbacks import Callback
from megatron.training.errors import exit_on_user_error

TIMEOUT_SECONDS = 4.0


def attempt_name(*, starts: int = 0, restarts: int = 0) -> str:
    """As FAULTS has it."""
    return f"{starts}.{restarts}"


def main(argv: list[str]) -> None:
    """Runs the command line; a minute of --distributed-timeout-minutes takes TIMEOUT_SECONDS."""
    counts = [int(os.environ.get(f"{who}_RESTART_COUNT", "0")) for who in ("SUPERVISOR", "TORCHELASTIC")]
    fault = json.loads(os.environ["FAULTS"]).get(attempt_name(starts=counts[0], restarts=counts[1]))
    doom = _Doom(*fault) if fault is not None and str(fault[0]) == os.environ["RANK"] else None
    with (
        patch("megatron.training.joining.timedelta", _shorter),
        patch("megatron.core.parallel_state.timedelta", _shorter),
        exit_on_user_error(),
    ):
        pretrain(
            pretrain_gpt.train_valid_test_datasets_provider,
            pretrain_gpt.model_provider,
            ModelType.encoder_or_decoder,
            pretrain_gpt.forward_step if doom is None else doom.forward_step,
            callbacks=[] if doom is None else [doom],
            argv=argv,
        )


def _shorter(*, minutes: float) -> timedelta:
    return timedelta(seconds=minutes * TIMEOUT_SECONDS)


class _Doom(Callback):
    """Sends the signal in the first backward of the step, to this process or to the one that started it."""

    def __init__(self, _rank: int, step: int, signal_name: str, whom: str) -> None:
        self._step, self._signal, self._whom = step, signal.Signals[signal_name], whom
        self._is_due = False

    def on_step_start(self, iteration: int) -> None:
        self._is_due = iteration + 1 == self._step

    def forward_step(self, data_iterator: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
        losses, loss_func = pretrain_gpt.forward_step(data_iterator, model)
        if self._is_due and losses.requires_grad:
            losses.register_hook(
                lambda _: os.kill({"self": os.getpid(), "agent": os.getppid()}[self._whom], self._signal)
            )
        return losses, loss_func


if __name__ == "__main__":
    main(sys.argv[1:])
