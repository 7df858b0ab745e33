"""Holds this process's arguments, timers, tokenizer and writers, for scripts that import megatron.training.global_vars.

Inside megatron/, only the functions for scripts read them (scripts.py and checkpointing/scripts.py). pretrain() also
passes the result of get_tensorboard_writer to a script's process_non_loss_data_func.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron.core.timers import Timers


@dataclass
class _Holder:
    args: argparse.Namespace | None = None
    timers: Timers | None = None
    tokenizer: Any = None
    tensorboard: Any = None
    wandb: Any = None


_HOLDER = _Holder()


def publish_run(args: argparse.Namespace | None) -> None:
    """Publishes the arguments of a run, or None after its end, and clears all other published objects."""
    if _HOLDER.tensorboard is not None:
        _HOLDER.tensorboard.close()
    _HOLDER.args, _HOLDER.tokenizer, _HOLDER.timers, _HOLDER.tensorboard = args, None, None, None


def publish_timers(timers: Timers) -> None:
    """Makes the run's timers available to get_timers()."""
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
    """Returns the run's timers. Raises RuntimeError before pretrain() or initialize_megatron() has created them."""
    if _HOLDER.timers is None:
        raise RuntimeError("timers do not exist yet: pretrain() or initialize_megatron() creates them")
    return _HOLDER.timers


def get_tokenizer() -> Any:
    """Returns the run's tokenizer. Raises RuntimeError before pretrain() or initialize_megatron() has created it."""
    if _HOLDER.tokenizer is None:
        raise RuntimeError("the tokenizer does not exist yet: pretrain() or initialize_megatron() creates it")
    return _HOLDER.tokenizer


def get_tensorboard_writer() -> Any:
    """Returns a SummaryWriter for the --tensorboard-dir folder on the last rank, as in Megatron-LM; else None.

    The first call opens the writer. The run's own scalars are written by the first rank, with a separate writer.
    """
    args = get_args()
    is_last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    if args.tensorboard_dir is None or not is_last:
        return None
    if _HOLDER.tensorboard is None:
        # An optional package that takes a second to import.
        from torch.utils.tensorboard import SummaryWriter

        _HOLDER.tensorboard = SummaryWriter(args.tensorboard_dir, max_queue=args.tensorboard_queue_size)
    return _HOLDER.tensorboard


def get_wandb_writer() -> Any:
    """Returns the module `wandb` on the last rank while the run logs to Weights & Biases, as in Megatron-LM; else None.

    Its function `log` adds points to the run.
    """
    get_args()
    return _HOLDER.wandb


def publish_wandb(writer: Any) -> None:
    """Publishes the module `wandb` after it has started a run, or None after the run has ended."""
    _HOLDER.wandb = writer
