"""Start and end of a run's processes: arguments, torch.distributed, process groups, seeds.

Builds no model and reads no data; training.py does.
"""

import argparse
import os
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.agreement import all_ranks_agree
from megatron.core.device import (
    default_device,
    distributed_backend,
    prepare_device,
    seed_all,
    use_deterministic_kernels,
)
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.training.arguments import CommandLineError, config_from_args, config_values, parse_args, validate_args
from megatron.training.checkpoint_args import load_args_from_checkpoint
from megatron.training.command_line.config_builder import with_flag_names
from megatron.training.command_line.registry import flag_table
from megatron.training.config import DistributedConfig
from megatron.training.global_vars import publish_run

# What torch needs, besides the number of processes, for them to find each other.
_RENDEZVOUS = ("RANK", "MASTER_ADDR", "MASTER_PORT")

# Arguments that may differ between machines, or that each rank reads for itself.
_OF_ONE_MACHINE = frozenset(
    """
    config data_path train_data_path valid_data_path test_data_path data_args_path data_cache_path mmap_bin_files
    num_workers tokenizer_model vocab_file merge_file save load tensorboard_dir memory_snapshot_path
    """.split()
)


def initialize_megatron(
    extra_args_provider: Callable[[Any], Any] | None = None,
    args_defaults: dict[str, Any] | None = None,
    *,
    ignore_unknown_args: bool = False,
    argv: Sequence[str] | None = None,
) -> argparse.Namespace:
    """Parses and checks the arguments, joins the process group and seeds every generator.

    Works under torchrun and in a plain process, which becomes a group of one. Raises ValueError for bad arguments.
    """
    args = parse_args(extra_args_provider, ignore_unknown_args, argv=None if argv is None else list(argv))
    if args.use_checkpoint_args and args.load is not None:
        load_args_from_checkpoint(args)
    validate_args(args, args_defaults or {})
    silence_library_notices()
    if args.deterministic_mode:
        use_deterministic_kernels()
    device = default_device()
    prepare_device(device)
    join_process_group(config_from_args(DistributedConfig, args), device)
    check_same_settings(config_values(args))
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
    )
    groups = parallel_state.get_process_groups()
    # All copies draw the same weights; seed_ranks parts them once that is done.
    _seed(args.seed, groups)
    publish_run(args)
    return args


def join_process_group(config: DistributedConfig, device: torch.device) -> None:
    """Initialises torch.distributed from torchrun's environment; one process alone needs no address."""
    if dist.is_initialized():
        return
    backend = config.distributed_backend or distributed_backend(device)
    if backend == "nccl" and device.type != "cuda":
        raise ValueError("--distributed-backend is nccl: this process has no GPU, use gloo or leave the flag out")
    if backend == "nccl" and config.use_gloo_process_groups:
        # What is on the host, such as errors and file lists, then need not wait for the GPU's work.
        backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    if "WORLD_SIZE" in os.environ:
        missing = [name for name in _RENDEZVOUS if name not in os.environ]
        if missing:
            raise ValueError(f"WORLD_SIZE is set in the environment, but not {', '.join(missing)}: start with torchrun")
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def check_same_settings(settings: dict[str, Any]) -> None:
    """Raises on every rank, naming rank and flag, where one was started with another value than rank 0. Collective.

    settings: JSON values by name in the arguments. Files and folders may differ from machine to machine.
    """
    of_first: list[dict[str, Any]] = [settings]
    dist.broadcast_object_list(of_first, src=0)
    with all_ranks_agree():
        for name in (name for name in {**of_first[0], **settings} if name not in _OF_ONE_MACHINE):
            expected, given = of_first[0].get(name), settings.get(name)
            # Text, because NaN equals nothing.
            if repr(given) != repr(expected):
                text = f"{name} is {given} on this rank and {expected} on rank 0: start all ranks with the same flags"
                raise CommandLineError(with_flag_names(text, flag_table()))


def leave_process_group() -> None:
    """Ends what initialize_megatron began; safe where it never got that far."""
    publish_run(None)
    destroy_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def seed_ranks(seed: int, groups: ProcessGroupCollection) -> None:
    """Gives each copy of the model, and each part of sequences and layers, its own dropout.

    Tensor-parallel ranks go on sharing the default stream. Called once the weights, equal on all copies, are drawn.
    """
    _seed(seed + 1_000_003 * group_rank(groups.dp_cp) + 100_003 * group_rank(groups.pp), groups)


def _seed(seed: int, groups: ProcessGroupCollection) -> None:
    seed_all(seed)
    ranks = {"tp_rank": groups.tp, "ep_rank": groups.ep, "etp_rank": groups.expt_tp}
    model_parallel_cuda_manual_seed(seed, **{name: group_rank(group) for name, group in ranks.items()})


def silence_library_notices() -> None:
    """Hides notices of libraries that no user can act on."""
    # torch 2.13 renames the tensor collectives; collectives.py chooses by version, torch's own wrappers do not.
    warnings.filterwarnings("ignore", message=".*_tensor.*deprecated", category=FutureWarning)
