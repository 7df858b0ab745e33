"""Builds the parts of a run from its arguments: tokenizer, model, optimizer, schedule, data, callbacks.

The loop that uses them is training.py's.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from megatron.core.agreement import all_ranks_agree
from megatron.core.datasets.data_iterators import BatchPlan, build_data_iterators
from megatron.core.enums import ModelType
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, OptimizerParamSchedulerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer, vocab_size_with_padding
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.training.arguments import config_from_args
from megatron.training.callbacks import Callback, CallbackList
from megatron.training.callbacks.console_log import ConsoleLog
from megatron.training.callbacks.jsonl_log import JsonlLog
from megatron.training.callbacks.progress_bar import ProgressBar
from megatron.training.callbacks.tensorboard_log import TensorBoardLog
from megatron.training.config import LoggingConfig, TrainingConfig
from megatron.training.global_vars import print_rank_0
from megatron.training.run import TrainingRun


def setup_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """Builds the tokenizer and writes the vocabulary sizes that follow from it into `args`."""
    with all_ranks_agree():
        tokenizer = build_tokenizer(config_from_args(TokenizerConfig, args))
    args.unpadded_vocab_size = tokenizer.vocab_size
    args.padded_vocab_size = vocab_size_with_padding(
        tokenizer.vocab_size,
        divisible_by=args.make_vocab_size_divisible_by,
        tensor_parallel_size=args.tensor_model_parallel_size,
    )
    return tokenizer


def setup_data(
    run: TrainingRun, datasets_provider: Callable[[list[int]], Sequence[Any]], *, num_workers: int
) -> None:
    """Builds the datasets and puts iterators that start at the consumed samples into `run`."""
    train, valid, test = datasets_provider(split_sizes(run.training, run.global_batch_size))
    state = run.state
    plan = BatchPlan(
        micro_batch_size=run.training.micro_batch_size or 1,
        dp_rank=dist.get_rank(run.groups.dp),
        dp_size=dist.get_world_size(run.groups.dp),
        consumed_train_samples=state.consumed_train_samples,
        consumed_valid_samples=state.consumed_valid_samples,
        num_workers=num_workers,
        pin_memory=run.device.type == "cuda",
    )
    run.train_iterator, run.valid_iterator, run.test_iterator = build_data_iterators((train, valid, test), plan)


def split_sizes(training: TrainingConfig, global_batch_size: int) -> list[int]:
    """Samples that the run wants of train, valid and test; 0 where it never reads the split."""
    train_iters = training.train_iters or 0
    evaluations = 1 if training.eval_interval is None else train_iters // training.eval_interval + 1
    train = 0 if training.skip_train else train_iters * global_batch_size
    return [train, evaluations * training.eval_iters * global_batch_size, training.eval_iters * global_batch_size]


def setup_callbacks(args: argparse.Namespace, extra: Sequence[Callback] = ()) -> CallbackList:
    """Logs and display of rank 0; other ranks only run what the script adds."""
    if dist.get_rank() != 0:
        return CallbackList(tuple(extra))
    logging = config_from_args(LoggingConfig, args)
    console = Console(highlight=False, soft_wrap=True)
    write: Callable[[str], None] = print_rank_0
    callbacks: list[Callback] = []
    if sys.stdout.isatty():
        callbacks.append(ProgressBar(console))
        # Through the same console, so that lines scroll above the bar instead of through it.
        write = lambda line: console.print(line, markup=False)  # noqa: E731
    callbacks.append(ConsoleLog(logging.log_interval, train_iters=args.train_iters or 0, write=write))
    folder = logging.tensorboard_dir or args.save
    if folder is not None:
        callbacks.append(JsonlLog(Path(folder)))
    if logging.tensorboard_dir is not None:
        callbacks.append(TensorBoardLog(logging.tensorboard_dir, interval=logging.tensorboard_log_interval))
    return CallbackList((*callbacks, *extra))
