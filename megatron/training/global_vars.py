"""Global arguments, timers, tokenizer and writers for scripts written for Megatron-LM: thin names for published.py."""

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
    """Publishes arguments to get_args; timers, tokenizer and writers of an earlier run are forgotten."""
    publish_run(args)


def destroy_global_vars() -> None:
    """Forgets all of them and closes the writer of TensorBoard."""
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
