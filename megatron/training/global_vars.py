"""Provides Megatron-LM's global arguments, timers, tokenizer and writers to scripts; wraps published.py."""

import argparse

from megatron.training.command_line.published import (
    get_args,
    get_tensorboard_writer,
    get_timers,
    get_tokenizer,
    get_wandb_writer,
    publish_run,
)


def set_args(args: argparse.Namespace | None) -> None:
    """Publishes arguments to get_args, and clears timers, tokenizer and writers of an earlier run."""
    publish_run(args)


def destroy_global_vars() -> None:
    """Clears all published objects and closes the TensorBoard writer."""
    publish_run(None)


__all__ = [
    "destroy_global_vars",
    "get_args",
    "get_tensorboard_writer",
    "get_timers",
    "get_tokenizer",
    "get_wandb_writer",
    "set_args",
]
