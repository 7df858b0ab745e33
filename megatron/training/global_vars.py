"""What scripts written for Megatron fetch by name: arguments, timers, tokenizer. Nothing inside megatron/ reads it."""

import argparse
from dataclasses import dataclass
from typing import Any

from megatron.core.timers import Timers


@dataclass
class _Holder:
    args: argparse.Namespace | None = None
    timers: Timers | None = None
    tokenizer: Any = None


_HOLDER = _Holder()


def publish_run(args: argparse.Namespace | None) -> None:
    """Makes the run that is starting known to scripts; None when it has ended."""
    _HOLDER.args, _HOLDER.tokenizer, _HOLDER.timers = args, None, None


def publish_timers(timers: Timers) -> None:
    """Makes the timers of the run known to scripts."""
    _HOLDER.timers = timers


def publish_tokenizer(tokenizer: Any) -> None:
    """Makes the run's tokenizer known to scripts."""
    _HOLDER.tokenizer = tokenizer


def get_args() -> argparse.Namespace:
    """The run's arguments; RuntimeError before initialize_megatron."""
    if _HOLDER.args is None:
        raise RuntimeError("arguments do not exist yet: call initialize_megatron() first")
    return _HOLDER.args


def get_timers() -> Timers:
    """The run's timers; RuntimeError before pretrain() has made them."""
    if _HOLDER.timers is None:
        raise RuntimeError("timers do not exist yet: pretrain() makes them, before it calls a provider")
    return _HOLDER.timers


def get_tokenizer() -> Any:
    """The run's tokenizer; RuntimeError before pretrain() has made it."""
    if _HOLDER.tokenizer is None:
        raise RuntimeError("the tokenizer does not exist yet: pretrain() makes it, before it calls a provider")
    return _HOLDER.tokenizer
