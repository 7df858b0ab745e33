"""Global arguments, timers and tokenizer for scripts written for Megatron-LM. Nothing inside megatron/ reads them."""

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
    """Publishes the arguments of a run that starts; None when it has ended."""
    _HOLDER.args, _HOLDER.tokenizer, _HOLDER.timers = args, None, None


def publish_timers(timers: Timers) -> None:
    """Publishes the timers of the run."""
    _HOLDER.timers = timers


def publish_tokenizer(tokenizer: Any) -> None:
    """Publishes the tokenizer of the run."""
    _HOLDER.tokenizer = tokenizer


def get_args() -> argparse.Namespace:
    """Returns the run's arguments. Raises RuntimeError before initialize_megatron."""
    if _HOLDER.args is None:
        raise RuntimeError("arguments do not exist yet: call initialize_megatron() first")
    return _HOLDER.args


def get_timers() -> Timers:
    """Returns the run's timers. Raises RuntimeError before pretrain() has created them."""
    if _HOLDER.timers is None:
        raise RuntimeError("timers do not exist yet: pretrain() makes them, before it calls a provider")
    return _HOLDER.timers


def get_tokenizer() -> Any:
    """Returns the run's tokenizer. Raises RuntimeError before pretrain() has created it."""
    if _HOLDER.tokenizer is None:
        raise RuntimeError("the tokenizer does not exist yet: pretrain() makes it, before it calls a provider")
    return _HOLDER.tokenizer
