"""Builds the callbacks of a run from its settings: logs and progress bar on rank 0, profiles on the selected ranks."""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from megatron.core.device import default_device
from megatron.training.callbacks import Callback, CallbackList
from megatron.training.callbacks.console import CompactLines, ConsoleLog, ProgressBar
from megatron.training.callbacks.lines import print_rank_0
from megatron.training.callbacks.process import CpuMemoryHistory, CudaMemoryHistory, ManualGC, NsysProfile, TorchProfile
from megatron.training.callbacks.routing_trace import RoutingHeader, RoutingLog
from megatron.training.callbacks.run_files import JsonlLog, ProgressFile, RunFile, describe_run
from megatron.training.callbacks.tensorboard import TensorBoardLog
from megatron.training.callbacks.wandb_log import WandbLog
from megatron.training.config import ProfilingConfig, RunConfig


def setup_callbacks(run_config: RunConfig, extra: Sequence[Callback] = (), *, size: tuple[int, int]) -> CallbackList:
    """Builds all callbacks of this rank, and appends the script's callbacks. size: the result of count_parameters."""
    own = (
        *_first_rank_callbacks(run_config, size),
        *_last_rank_callbacks(run_config),
        *_every_rank_callbacks(run_config),
    )
    return CallbackList((*own, *extra))


def _last_rank_callbacks(run_config: RunConfig) -> list[Callback]:
    """Builds the Weights & Biases logger, on the last rank only, where Megatron-LM's scripts expect it."""
    if run_config.logging.wandb_project is None or dist.get_rank() != dist.get_world_size() - 1:
        return []
    return [WandbLog(run_config)]


def _every_rank_callbacks(run_config: RunConfig) -> list[Callback]:
    collection, profiling = run_config.garbage_collection, run_config.profiling
    log_interval = run_config.logging.log_interval
    callbacks: list[Callback] = []
    if collection.manual_gc:
        callbacks.append(ManualGC(collection))
    if profiling.profile and dist.get_rank() in (profiling.profile_ranks or [0]):
        callbacks.append(_profile(profiling, run_config, device=default_device()))
    if profiling.record_memory_history and dist.get_rank() in (profiling.profile_ranks or [0]):
        callbacks.append(_memory_history(profiling, log_interval=log_interval, device=default_device()))
    return callbacks


def _memory_history(config: ProfilingConfig, *, log_interval: int, device: torch.device) -> Callback:
    path = Path(config.memory_snapshot_path)
    if len(config.profile_ranks) > 1:
        path = path.with_name(f"{path.stem}_rank{dist.get_rank()}{path.suffix}")
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(
            f"--memory-snapshot-path is {config.memory_snapshot_path}: must be a file in a writable folder"
        )
    if device.type == "cuda":
        return CudaMemoryHistory(path, log_interval=log_interval)
    if config.profile:
        raise ValueError(
            "--record-memory-history and --profile cannot be combined without a GPU, because both use torch's profiler"
        )
    return CpuMemoryHistory(path, config)


def _profile(config: ProfilingConfig, run_config: RunConfig, *, device: torch.device) -> Callback:
    if not config.use_pytorch_profiler:
        if device.type == "cuda":
            return NsysProfile(config)
        print_rank_0("note: --profile without a GPU uses torch's profiler, like --use-pytorch-profiler")
    folder = run_config.logging.tensorboard_dir or run_config.checkpoint.save
    if folder is None:
        raise ValueError("--profile needs --tensorboard-dir or --save: the trace is written to that folder")
    return TorchProfile(config, Path(folder) / "profile", rank=dist.get_rank(), device=device)


def _first_rank_callbacks(run_config: RunConfig, size: tuple[int, int]) -> list[Callback]:
    if dist.get_rank() != 0:
        return []
    training, logging, save = run_config.training, run_config.logging, run_config.checkpoint.save
    console = Console(highlight=False, soft_wrap=True)
    write: Callable[[str], None] = print_rank_0
    callbacks: list[Callback] = []
    # stdout is None if the launcher has closed it.
    if sys.stdout is not None and sys.stdout.isatty():
        callbacks.append(ProgressBar(console))
        # Writes through the bar's console, so that lines scroll above the bar.
        write = functools.partial(console.print, markup=False)
    lines = None
    if logging.is_compact:
        lines = CompactLines(micro_batch_size=training.micro_batch_size, minutes=training.exit_duration_in_mins or None)
    callbacks.append(ConsoleLog(logging.log_interval, write=write, lines=lines))
    folder = logging.tensorboard_dir or save
    if folder is not None:
        callbacks += [RunFile(Path(folder), record=describe_run(run_config, size)), JsonlLog(Path(folder))]
    if logging.tensorboard_dir is not None:
        callbacks.append(TensorBoardLog(logging.tensorboard_dir, logging))
    if logging.log_progress and save is not None:
        callbacks.append(ProgressFile(Path(save), run_config))
    if logging.record_routing is not None and not training.skip_train:
        callbacks.append(RoutingLog(Path(logging.record_routing), RoutingHeader.of(run_config)))
    return callbacks
