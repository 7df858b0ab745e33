"""Global arguments, timers, tokenizer and writers for scripts written for Megatron-LM; this module only re-exports."""

from megatron.training.command_line.published import (
    get_args,
    get_tensorboard_writer,
    get_timers,
    get_tokenizer,
    get_wandb_writer,
)

__all__ = ["get_args", "get_tensorboard_writer", "get_timers", "get_tokenizer", "get_wandb_writer"]
