"""The training program: pretrain() and the names that scripts written for Megatron-LM import from here."""

from megatron.training.callbacks.lines import print_rank_0
from megatron.training.global_vars import get_args, get_tensorboard_writer, get_timers, get_tokenizer, get_wandb_writer
from megatron.training.training import pretrain

__all__ = [
    "get_args",
    "get_tensorboard_writer",
    "get_timers",
    "get_tokenizer",
    "get_wandb_writer",
    "pretrain",
    "print_rank_0",
]
