"""The training program: pretrain() and the names that scripts written for Megatron-LM import from here."""

from megatron.training.callbacks.lines import print_rank_0
from megatron.training.global_vars import get_args, get_timers, get_tokenizer
from megatron.training.training import pretrain

__all__ = ["get_args", "get_timers", "get_tokenizer", "pretrain", "print_rank_0"]
