"""pretrain_gpt.py with a fault on one rank in its second step, named by FAULT in the environment; tests start it."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.errors import exit_on_user_error

FAULTY_RANK, MESSAGE = 1, "the model is on fire"


def main(argv: list[str]) -> None:
    """Runs the command line; the faulty rank's own under FAULT=settings has another learning rate,
    and another folder, as machines may have."""
    if os.environ["FAULT"] == "settings" and os.environ["RANK"] == str(FAULTY_RANK):
        argv = [*argv, "--lr", "0.5", "--data-cache-path", "elsewhere"]
    with exit_on_user_error():
        pretrain(
            pretrain_gpt.train_valid_test_datasets_provider,
            pretrain_gpt.model_provider,
            ModelType.encoder_or_decoder,
            _forward_step,
            argv=argv,
        )


def _forward_step(data_iterator: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
    losses, loss_func = pretrain_gpt.forward_step(data_iterator, model)
    losses.register_hook(_spoil_second_backward(model))
    return losses, loss_func


def _spoil_second_backward(model: nn.Module) -> Any:
    def hook(_: Tensor) -> None:
        if not all(grad.any() for _, grad in model.named_main_grads()):  # type: ignore[operator]
            return
        _spoil(os.environ["FAULT"])

    return hook


def _spoil(fault: str) -> None:
    if fault == "chain":
        # Each rank but the last waits for the next one alone, and the last is killed.
        _wait_for(dist.get_rank() + 1) if dist.get_rank() + 1 < dist.get_world_size() else _die()
    elif dist.get_rank() == FAULTY_RANK:
        {"exception": _raise, "killed": _die, "hang": _hang}[fault]()


def _raise() -> None:
    raise RuntimeError(MESSAGE)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    time.sleep(600)


def _wait_for(rank: int) -> None:
    dist.recv(torch.zeros(1), src=rank)


if __name__ == "__main__":
    main(sys.argv[1:])
