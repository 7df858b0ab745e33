"""pretrain_gpt.py with a fault on one rank in its second step. The environment variable FAULT selects the fault."""

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.errors import exit_on_user_error
from tests.functional_tests import doomed_program

FAULTY_RANK, MESSAGE = 1, "the model is on fire"


def main(argv: list[str]) -> None:
    """Runs the command line. With FAULT=settings, the faulty rank uses a different learning rate, and a different
    folder, which is allowed."""
    if os.environ["FAULT"] == "settings" and os.environ["RANK"] == str(FAULTY_RANK):
        argv = [*argv, "--lr", "0.5", "--data-cache-path", "elsewhere"]
    if os.environ["FAULT"] in ("killed", "chain"):
        doomed_program.wait_for_no_silent_rank()
    with doomed_program.short_timeouts(), exit_on_user_error():
        pretrain(
            pretrain_gpt.train_valid_test_datasets_provider,
            pretrain_gpt.model_provider,
            ModelType.encoder_or_decoder,
            _ForwardStep(),
            argv=argv,
        )


class _ForwardStep:
    """The forward step of pretrain_gpt, with the fault in the second backward pass."""

    def __init__(self) -> None:
        self._num_calls = 0

    def __call__(self, data_iterator: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
        losses, loss_func = pretrain_gpt.forward_step(data_iterator, model)
        self._num_calls += 1
        if self._num_calls == 2:
            losses.register_hook(lambda _: _spoil(os.environ["FAULT"]))
        return losses, loss_func


def _spoil(fault: str) -> None:
    if fault == "chain":
        # Each rank waits only for the next rank, and the last rank is killed.
        _wait_for(dist.get_rank() + 1) if dist.get_rank() + 1 < dist.get_world_size() else _die()
    elif dist.get_rank() == FAULTY_RANK:
        {"exception": _raise, "killed": _die, "hang": _hang}[fault]()


def _raise() -> None:
    raise RuntimeError(MESSAGE)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    signal.pause()


def _wait_for(rank: int) -> None:
    dist.recv(torch.zeros(1), src=rank)


if __name__ == "__main__":
    main(sys.argv[1:])
