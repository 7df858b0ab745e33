"""The training program: pretrain(), and the names that scripts written for Megatron-LM import from this package."""

from megatron.training.callbacks.lines import print_rank_0
from megatron.training.global_vars import get_args, get_tensorboard_writer, get_timers, get_tokenizer, get_wandb_writer
from megatron.training.initialize import initialize_megatron
from megatron.training.training import pretrain
from megatron.training.utils import is_last_rank, print_rank_last

__all__ = [
    "get_args",
    "get_tensorboard_writer",
    "get_timers",
    "get_tokenizer",
    "get_wandb_writer",
    "initialize_megatron",
    "is_last_rank",
    "pretrain",
    "print_rank_0",
    "print_rank_last",
]
