"""Starts and ends a run's processes: arguments, restarts, torch.distributed, process groups, seeds.

pretrain() calls start_processes, and scripts call initialize_megatron. setup.py builds the model and the data.
"""

import argparse
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron import untested_torch
from megatron.core import parallel_state
from megatron.core.config_field import require_defaults
from megatron.core.device import (
    default_device,
    lone_process_notice,
    prepare_device,
    use_deterministic_kernels,
)
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.parallel_state import DEFAULT_ORDER
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.timers import Timers
from megatron.training.arguments import parse_args, validate_args
from megatron.training.callbacks.lines import print_rank_0
from megatron.training.checkpointing.folder import complete_iterations, find_checkpoint
from megatron.training.checkpointing.rng_state import seed_generators
from megatron.training.checkpointing.run_values import load_args_from_checkpoint, load_run_values
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.command_line.published import publish_run, publish_timers, publish_tokenizer
from megatron.training.config import CONTINUE_RUN, RunConfig
from megatron.training.error_broadcast import ErrorBroadcast
from megatron.training.setup import setup_batches, setup_tokenizer
from megatron.training.startup_handshake import common_settings, join_process_group

# Set by torchrun for its ranks, and by examples/supervise.py, which restarts torchrun.
RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SUPERVISOR_RESTART_COUNT")


def initialize_megatron(
    allow_no_cuda: bool | Callable[[Any], Any] | None = False,
    skip_mpu_initialization: bool | dict[str, Any] | None = False,
    get_embedding_ranks: None = None,
    get_position_embedding_ranks: None = None,
    store: None = None,
    skip_model_parallel_init: bool = False,
    seed_pp_group: None = None,
    seed_dp_group: None = None,
    seed_tp_group: None = None,
    seed_ep_group: None = None,
    seed_etp_group: None = None,
    skip_random_seed: bool = False,
    *,
    extra_args_provider: Callable[[Any], Any] | None = None,
    args_defaults: dict[str, Any] | None = None,
    ignore_unknown_args: bool = False,
    parsed_args: argparse.Namespace | None = None,
    argv: Sequence[str] | None = None,
) -> argparse.Namespace:
    """Starts the processes of a custom training loop, and builds tokenizer, timers and the microbatch calculator.

    Also accepts the call of released versions, `initialize_megatron(extra_args_provider, args_defaults)`.
    allow_no_cuda: no effect, because a process without a GPU runs on the CPU. skip_model_parallel_init: use the process
    groups that the script has initialized. skip_random_seed: do not seed the random-number generators. parsed_args: the
    result of parse_args, used instead of the command line. Raises ValueError for invalid arguments, and for arguments
    that differ between ranks. See start_processes.
    """
    if callable(allow_no_cuda):
        extra_args_provider = allow_no_cuda
    if isinstance(skip_mpu_initialization, dict):
        args_defaults, skip_mpu_initialization = skip_mpu_initialization, False
    require_defaults(
        "initialize_megatron",
        "ranks, groups and seeds follow from the launcher and the flags",
        skip_mpu_initialization=(bool(skip_mpu_initialization), False),
        get_embedding_ranks=(get_embedding_ranks, None),
        get_position_embedding_ranks=(get_position_embedding_ranks, None),
        store=(store, None),
        seed_pp_group=(seed_pp_group, None),
        seed_dp_group=(seed_dp_group, None),
        seed_tp_group=(seed_tp_group, None),
        seed_ep_group=(seed_ep_group, None),
        seed_etp_group=(seed_etp_group, None),
    )
    args = start_processes(
        extra_args_provider,
        args_defaults,
        ignore_unknown_args=ignore_unknown_args,
        parsed_args=parsed_args,
        argv=argv,
        skip_model_parallel_init=skip_model_parallel_init,
        skip_random_seed=skip_random_seed,
    )
    run_config = run_config_of(args)
    logging = run_config.logging
    publish_tokenizer(setup_tokenizer(run_config))
    publish_timers(Timers(logging.timing_log_level, logging.timing_log_option, device=default_device()))
    setup_batches(run_config)
    return args


def start_processes(
    extra_args_provider: Callable[[Any], Any] | None = None,
    args_defaults: dict[str, Any] | None = None,
    *,
    ignore_unknown_args: bool = False,
    parsed_args: argparse.Namespace | None = None,
    argv: Sequence[str] | None = None,
    broadcast: ErrorBroadcast | None = None,
    skip_model_parallel_init: bool = False,
    skip_random_seed: bool = False,
) -> argparse.Namespace:
    """Parses and validates the arguments, joins the process group and seeds every generator.

    Works under torchrun, Slurm and MPI, and in a plain process, which becomes a group of one rank. broadcast: connected
    here, so that ranks exchange errors. Other parameters: as for initialize_megatron. Raises ValueError for invalid
    arguments, and for arguments that differ between ranks.
    """
    notices: list[str] = []
    args = read_arguments(
        extra_args_provider,
        args_defaults,
        ignore_unknown_args=ignore_unknown_args,
        parsed_args=parsed_args,
        argv=argv,
        notices=notices,
    )
    silence_library_notices()
    run_config = run_config_of(args)
    if run_config.transformer.deterministic_mode:
        use_deterministic_kernels()
    device = default_device()
    prepare_device(device)
    join_process_group(
        run_config.distributed,
        run_config.launch,
        device,
        settings=partial(common_settings, run_config),
        broadcast=broadcast,
    )
    groups = groups_of_script(run_config) if skip_model_parallel_init else build_groups(run_config)
    notices += filter(None, (untested_torch(torch.__version__), lone_process_notice(os.environ)))
    for notice in notices:
        print_rank_0(notice)
    if not skip_random_seed:
        # Equal on all replicas, so that they draw equal weights. seed_ranks later gives each rank its own stream.
        seed_generators(run_config.training.seed, groups)
    publish_run(args)
    return args


def read_arguments(
    extra_args_provider: Callable[[Any], Any] | None = None,
    args_defaults: dict[str, Any] | None = None,
    *,
    ignore_unknown_args: bool = False,
    parsed_args: argparse.Namespace | None = None,
    argv: Sequence[str] | None = None,
    notices: list[str] | None = None,
) -> argparse.Namespace:
    """Parses and validates the arguments on this rank. Before validation, applies values of the checkpoint to load.

    parsed_args: the result of parse_args, used instead of `argv` or sys.argv. notices: list to which lines are
    appended that the first rank should print. Raises ValueError for invalid arguments.
    """
    args = parsed_args or parse_args(
        extra_args_provider, ignore_unknown_args, argv=None if argv is None else list(argv)
    )
    lines = (continue_after_restart(args), keep_global_batch_size(args))
    if notices is not None:
        notices.extend(line for line in lines if line is not None)
    if args.use_checkpoint_args and (args.load is not None or args.pretrained_checkpoint is not None):
        load_args_from_checkpoint(args)
    return validate_args(args, args_defaults or {})


def continue_after_restart(args: argparse.Namespace) -> str | None:
    """After a restart, sets --load to the run's own checkpoints in --save, and returns a line to print.

    Returns None and changes nothing at the first start, without --save, or before the run's first checkpoint. In the
    last case, the restart begins where the first start began. Called between parse_args and validate_args, on each rank
    separately.
    """
    count = sum(int(os.environ.get(name, "0")) for name in RESTART_COUNTS)
    if count == 0 or args.save is None or args.skip_train or not complete_iterations(Path(args.save)):
        return None
    first_start = [name for name, value in CONTINUE_RUN.items() if vars(args)[name] != value]
    first_start += ["load"] if args.load not in (None, args.save) else []
    args.load = args.save
    vars(args).update(CONTINUE_RUN)
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in first_start)
    only = f"; {flags} applied to the first start only" if flags else ""
    return f"  restart {count}: continuing from --save {args.save}{only}"


def keep_global_batch_size(args: argparse.Namespace) -> str | None:
    """Sets an unset --global-batch-size to the value in the checkpoint of --load, and then returns a line to print.

    Its default depends on the number of ranks, so a run resumed with fewer ranks would train on different batches.
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


def build_groups(run_config: RunConfig) -> ProcessGroupCollection:
    """Builds the process groups of the parallel layout over all ranks. Collective.

    Raises ValueError if the parallel sizes do not divide the number of ranks.
    """
    transformer = run_config.transformer
    parallel_state.initialize_model_parallel(
        transformer.tensor_model_parallel_size,
        transformer.pipeline_model_parallel_size,
        transformer.virtual_pipeline_model_parallel_size,
        context_parallel_size=transformer.context_parallel_size,
        hierarchical_context_parallel_sizes=transformer.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=transformer.expert_model_parallel_size,
        expert_tensor_parallel_size=transformer.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=run_config.ddp.num_distributed_optimizer_instances,
        order="tp-cp-ep-pp-dp" if run_config.distributed.use_tp_pp_dp_mapping else DEFAULT_ORDER,
        distributed_timeout_minutes=run_config.distributed.distributed_timeout_minutes,
        pipeline_schedule=transformer.pipeline_schedule,
    )
    return parallel_state.get_process_groups()


def groups_of_script(run_config: RunConfig) -> ProcessGroupCollection:
    """Returns the process groups that a script has initialized.

    Raises ValueError, with a line for each size, if their sizes differ from the settings.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise ValueError("skip_model_parallel_init is True: call parallel_state.initialize_model_parallel first")
    groups = parallel_state.get_process_groups()
    sizes = {
        "tensor_model_parallel_size": group_size(groups.tp),
        "pipeline_model_parallel_size": group_size(groups.pp),
        "context_parallel_size": group_size(groups.cp),
        "hierarchical_context_parallel_sizes": [group_size(group) for group in groups.hcp] or None,
        "expert_model_parallel_size": group_size(groups.ep),
    }
    given = {name: run_config.values[name] for name in sizes}
    lines = [
        f"{name} is {given[name]}: the script has initialized {size}"
        for name, size in sizes.items()
        if given[name] != size
    ]
    if lines:
        raise ValueError("\n".join(lines))
    return groups


def leave_process_group() -> None:
    """Undoes initialize_megatron, even if it failed halfway: destroys process groups and published objects."""
    publish_run(None)
    destroy_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
