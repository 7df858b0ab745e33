"""What scripts written for Megatron fetch by name: arguments, timers, tokenizer. Nothing inside megatron/ reads it."""

import argparse
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron.training.timers import Timers


@dataclass
class _Holder:
    args: argparse.Namespace | None = None
    timers: Timers | None = None
    tokenizer: Any = None


_HOLDER = _Holder()


def publish_run(args: argparse.Namespace | None, timers: Timers | None) -> None:
    """Makes the run that is starting known to scripts; None and None when it has ended."""
    _HOLDER.args, _HOLDER.timers, _HOLDER.tokenizer = args, timers, None


def publish_tokenizer(tokenizer: Any) -> None:
    """Makes the run's tokenizer known to scripts."""
    _HOLDER.tokenizer = tokenizer


def get_args() -> argparse.Namespace:
    """The run's arguments; RuntimeError before initialize_megatron."""
    if _HOLDER.args is None:
        raise RuntimeError("arguments do not exist yet: call initialize_megatron() first")
    return _HOLDER.args


def get_timers() -> Timers:
    """The run's timers; RuntimeError before initialize_megatron."""
    if _HOLDER.timers is None:
        raise RuntimeError("timers do not exist yet: call initialize_megatron() first")
    return _HOLDER.timers


def get_tokenizer() -> Any:
    """The run's tokenizer; RuntimeError before initialize_megatron."""
    if _HOLDER.tokenizer is None:
        raise RuntimeError("the tokenizer does not exist yet: call initialize_megatron() first")
    return _HOLDER.tokenizer


def print_rank_0(message: str) -> None:
    """Prints on the first rank only, at once."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)
