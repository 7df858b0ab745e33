"""Start and end of a run's processes: arguments, torch.distributed, process groups, seeds.

Builds no model and reads no data; training.py does.
"""

import argparse
import warnings
from collections.abc import Callable, Sequence
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
from megatron.training.arguments import config_from_args, parse_args, validate_args
from megatron.training.checkpointing.rng_state import seed_copies
from megatron.training.checkpointing.run_values import load_args_from_checkpoint
from megatron.training.config import DistributedConfig
from megatron.training.console import print_rank_0
from megatron.training.failure_board import FailureBoard
from megatron.training.global_vars import publish_run
from megatron.training.joining import common_settings, join_process_group
from megatron.training.restarts import continue_after_restart, keep_global_batch_size


def initialize_megatron(
    extra_args_provider: Callable[[Any], Any] | None = None,
    args_defaults: dict[str, Any] | None = None,
    *,
    ignore_unknown_args: bool = False,
    argv: Sequence[str] | None = None,
    board: FailureBoard | None = None,
) -> argparse.Namespace:
    """Parses and checks the arguments, joins the process group and seeds every generator.

    Works under torchrun and in a plain process, which becomes a group of one. board: where ranks tell each other of
    failures from the moment that they have met. Raises ValueError for bad arguments, and for ranks whose differ.
    """
    notices: list[str | None] = []
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
        board=board,
    )
    groups = build_groups(args)
    for notice in filter(None, notices):
        print_rank_0(notice)
    # All copies draw the same weights; seed_ranks parts them once that is done.
    seed_copies(args.seed, groups)
    publish_run(args)
    return args


def read_arguments(
    extra_args_provider: Callable[[Any], Any] | None = None,
    args_defaults: dict[str, Any] | None = None,
    *,
    ignore_unknown_args: bool = False,
    argv: Sequence[str] | None = None,
    notices: list[str | None] | None = None,
) -> argparse.Namespace:
    """The arguments of the run, with those of its checkpoint where flags ask for them, checked on this rank alone.

    notices: takes what the first rank is to say of them, or None. Raises ValueError for bad arguments.
    """
    args = parse_args(extra_args_provider, ignore_unknown_args, argv=None if argv is None else list(argv))
    found = [continue_after_restart(args), keep_global_batch_size(args)]
    if notices is not None:
        notices.extend(found)
    if args.use_checkpoint_args and args.load is not None:
        load_args_from_checkpoint(args)
    return validate_args(args, args_defaults or {})


def build_groups(args: argparse.Namespace) -> ProcessGroupCollection:
    """The process groups of the layout that args say, over all ranks that there are. Collective.

    Raises ValueError for sizes that do not fit.
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
    """Ends what initialize_megatron began; safe where it never got that far."""
    publish_run(None)
    destroy_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def silence_library_notices() -> None:
    """Hides notices of libraries that no user can act on."""
    # torch 2.13 renames the tensor collectives; collectives.py chooses by version, torch's own wrappers do not.
    warnings.filterwarnings("ignore", message=".*_tensor.*deprecated", category=FutureWarning)
