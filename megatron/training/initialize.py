"""Starts and ends a run's processes: arguments, restarts, torch.distributed, process groups, seeds.

setup.py builds the model and reads data.
"""

import argparse
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.device import (
    default_device,
    prepare_device,
    use_deterministic_kernels,
)
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.parallel_state import DEFAULT_ORDER
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.arguments import parse_args, validate_args
from megatron.training.callbacks.lines import print_rank_0
from megatron.training.checkpointing.folder import complete_iterations, find_checkpoint
from megatron.training.checkpointing.rng_state import seed_generators
from megatron.training.checkpointing.run_values import load_args_from_checkpoint, load_run_values
from megatron.training.command_line.config_builder import config_from_args
from megatron.training.config import CONTINUE_RUN, DistributedConfig
from megatron.training.error_broadcast import ErrorBroadcast
from megatron.training.global_vars import publish_run
from megatron.training.startup_handshake import common_settings, join_process_group

# Set by torchrun on its ranks, and by examples/supervise.py, which restarts torchrun itself.
RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SUPERVISOR_RESTART_COUNT")


def initialize_megatron(
    extra_args_provider: Callable[[Any], Any] | None = None,
    args_defaults: dict[str, Any] | None = None,
    *,
    ignore_unknown_args: bool = False,
    argv: Sequence[str] | None = None,
    broadcast: ErrorBroadcast | None = None,
) -> argparse.Namespace:
    """Parses and checks the arguments, joins the process group and seeds every generator.

    Works under torchrun and in a plain process, which becomes a group of one. broadcast: gets connected, so
    that ranks send each other their errors. Raises ValueError for bad arguments, and for ones that differ by rank.
    """
    notices: list[str] = []
    args = read_arguments(
        extra_args_provider, args_defaults, ignore_unknown_args=ignore_unknown_args, argv=argv, notices=notices
    )
    silence_library_notices()
    if args.deterministic_mode:
        use_deterministic_kernels()
    device = default_device()
    prepare_device(device)
    join_process_group(
        config_from_args(DistributedConfig, args),
        device,
        rank=args.rank,
        settings=common_settings(args),
        broadcast=broadcast,
    )
    groups = build_groups(args)
    for notice in notices:
        print_rank_0(notice)
    # Equal on all replicas, so that they draw equal weights. seed_ranks later gives each rank its own stream.
    seed_generators(args.seed, groups)
    publish_run(args)
    return args


def read_arguments(
    extra_args_provider: Callable[[Any], Any] | None = None,
    args_defaults: dict[str, Any] | None = None,
    *,
    ignore_unknown_args: bool = False,
    argv: Sequence[str] | None = None,
    notices: list[str] | None = None,
) -> argparse.Namespace:
    """Parses and validates the arguments on this rank, after applying those of the checkpoint if flags request it.

    notices: collects lines for the first rank to print. Raises ValueError for bad arguments.
    """
    args = parse_args(extra_args_provider, ignore_unknown_args, argv=None if argv is None else list(argv))
    lines = (continue_after_restart(args), keep_global_batch_size(args))
    if notices is not None:
        notices.extend(line for line in lines if line is not None)
    if args.use_checkpoint_args and (args.load is not None or args.pretrained_checkpoint is not None):
        load_args_from_checkpoint(args)
    return validate_args(args, args_defaults or {})


def continue_after_restart(args: argparse.Namespace) -> str | None:
    """In a restart, sets --load of `args` to the run's own checkpoints in --save; returns a line to print.

    Changes nothing in a first start, without --save, or before the run's first checkpoint. In the last case the restart
    begins where the first start began. Called between parse_args and validate_args, on each rank separately.
    """
    count = sum(int(os.environ.get(name, "0")) for name in RESTART_COUNTS)
    if count == 0 or args.save is None or args.skip_train or not complete_iterations(Path(args.save)):
        return None
    args.load = args.save
    vars(args).update(CONTINUE_RUN)
    return f"  restart {count}: going on from --save {args.save}"


def keep_global_batch_size(args: argparse.Namespace) -> str | None:
    """Sets an unset --global-batch-size to the value of the checkpoint in --load; returns a line to print if it does.

    Otherwise it would depend on the number of ranks, and a run resumed with fewer ranks would train on other batches.
    Called at the same point as continue_after_restart. Ignores an unreadable checkpoint, which loading reports.
    """
    schedules = (args.global_batch_size, args.step_batch_size_schedule, args.rampup_batch_size)
    if args.load is None or args.finetune or any(value is not None for value in schedules):
        return None
    try:
        found = find_checkpoint(args.load, step=args.ckpt_step)
        stored = None if found is None or found.is_release else load_run_values(found.path)["args"]
    except (ValueError, OSError):
        return None
    if stored is None or stored.get("global_batch_size") is None:
        return None
    args.global_batch_size = stored["global_batch_size"]
    return f"  --global-batch-size {args.global_batch_size}: as in the checkpoint of --load"


def silence_library_notices() -> None:
    """Hides library warnings that users cannot act on."""
    # torch 2.13 renames the tensor collectives; collectives.py chooses by version, torch's own wrappers do not.
    warnings.filterwarnings("ignore", message=".*_tensor.*deprecated", category=FutureWarning)


def build_groups(args: argparse.Namespace) -> ProcessGroupCollection:
    """Builds the process groups of the parallel layout in `args` over all ranks. Collective.

    Raises ValueError for sizes that do not fit the number of ranks.
    """
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else DEFAULT_ORDER,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
    )
    return parallel_state.get_process_groups()


def leave_process_group() -> None:
    """Reverts initialize_megatron, even if it failed halfway."""
    publish_run(None)
    destroy_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
