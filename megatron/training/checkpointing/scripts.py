"""Provides the checkpoint functions for scripts written for Megatron-LM, which rely on get_args().

Nothing inside megatron/ calls them. A run uses the functions of saving.py and loading.py.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from megatron.core.config_field import require_defaults
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.parallel_state import (
    get_expert_model_parallel_rank,
    get_expert_model_parallel_world_size,
    get_pipeline_model_parallel_rank,
    get_pipeline_model_parallel_world_size,
    get_tensor_model_parallel_rank,
)
from megatron.training.checkpointing.folder import RELEASE, iteration_folder
from megatron.training.checkpointing.loading import load_run
from megatron.training.checkpointing.partial_load import Strictness
from megatron.training.checkpointing.run_state import CheckpointedOptimizer, CheckpointedScheduler
from megatron.training.checkpointing.saving import save_run
from megatron.training.checkpointing.train_state import TrainState
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.command_line.published import get_args

_WHOLE_RUN = "a checkpoint holds the state of the whole run, over the groups of parallel_state"


def save_checkpoint(
    iteration: int,
    model: nn.Module | Sequence[nn.Module],
    optimizer: CheckpointedOptimizer | None,
    opt_param_scheduler: CheckpointedScheduler | None,
    num_floating_point_operations_so_far: float,
    checkpointing_context: dict[str, Any] | None = None,
    pipeline_rank: None = None,
    expert_rank: None = None,
    tensor_rank: None = None,
    pipeline_parallel: None = None,
    expert_parallel: None = None,
    non_persistent_ckpt: bool = False,
    train_data_iterator: object = None,
    preprocess_common_state_dict_fn: None = None,
    release: bool = False,
    tp_group: None = None,
    pp_group: None = None,
    dp_cp_group: None = None,
    dp_group: None = None,
    expt_dp_group: None = None,
    rng_state_key_prefix: str = "",
) -> None:
    """Writes a checkpoint of a custom training loop to --save, and then the tracker. Collective over all ranks.

    Stores args.consumed_train_samples and args.consumed_valid_samples as the data position. The loop must advance them.
    train_data_iterator: no effect, because the position is a number of samples. A failure raises on every rank and
    leaves earlier checkpoints and the tracker unchanged.
    """
    require_defaults(
        "save_checkpoint",
        _WHOLE_RUN,
        checkpointing_context=(checkpointing_context or None, None),
        pipeline_rank=(pipeline_rank, None),
        expert_rank=(expert_rank, None),
        tensor_rank=(tensor_rank, None),
        pipeline_parallel=(pipeline_parallel, None),
        expert_parallel=(expert_parallel, None),
        non_persistent_ckpt=(non_persistent_ckpt, False),
        preprocess_common_state_dict_fn=(preprocess_common_state_dict_fn, None),
        release=(release, False),
        tp_group=(tp_group, None),
        pp_group=(pp_group, None),
        dp_cp_group=(dp_cp_group, None),
        dp_group=(dp_group, None),
        expt_dp_group=(expt_dp_group, None),
        rng_state_key_prefix=(rng_state_key_prefix, ""),
    )
    args = get_args()
    state = TrainState(
        iteration=iteration,
        consumed_train_samples=_count(args, "consumed_train_samples"),
        consumed_valid_samples=_count(args, "consumed_valid_samples"),
        num_floating_point_operations_so_far=float(num_floating_point_operations_so_far),
    )
    run_config = run_config_of(args)
    save_run(
        iteration,
        _chunks(model),
        optimizer,
        opt_param_scheduler,
        train_state=state,
        run_config=run_config,
        config=run_config.checkpoint,
    )


def load_checkpoint(
    ddp_model: nn.Module | Sequence[nn.Module],
    optimizer: CheckpointedOptimizer | None,
    opt_param_scheduler: CheckpointedScheduler | None,
    load_arg: str = "load",
    strict: bool = True,
    checkpointing_context: dict[str, Any] | None = None,
    skip_load_to_model_and_opt: bool = False,
    tp_group: None = None,
    pp_group: None = None,
    dp_cp_group: None = None,
    dp_group: None = None,
    expt_dp_group: None = None,
    rng_state_key_prefix: str = "",
) -> tuple[int, float]:
    """Loads the checkpoint of --load into a script's objects. Returns its iteration and its number of operations.

    Sets args.consumed_train_samples and args.consumed_valid_samples. load_arg: the argument that names the folder.
    strict: False keeps the values of parameters that the checkpoint lacks, and prints their names. Returns (0, 0) if
    there is no checkpoint. Collective over all ranks. Raises the same errors as load_run.
    """
    require_defaults(
        "load_checkpoint",
        _WHOLE_RUN,
        checkpointing_context=(checkpointing_context or None, None),
        skip_load_to_model_and_opt=(skip_load_to_model_and_opt, False),
        tp_group=(tp_group, None),
        pp_group=(pp_group, None),
        dp_cp_group=(dp_cp_group, None),
        dp_group=(dp_group, None),
        expt_dp_group=(expt_dp_group, None),
        rng_state_key_prefix=(rng_state_key_prefix, ""),
    )
    args = get_args()
    run_config = run_config_of(args)
    config = replace(run_config.checkpoint, load=vars(args)[load_arg])
    if not strict:
        config = replace(config, dist_ckpt_strictness=Strictness.LOG_ALL.value)
    state = TrainState()
    iteration = load_run(
        _chunks(ddp_model), optimizer, opt_param_scheduler, train_state=state, run_config=run_config, config=config
    )
    args.consumed_train_samples = state.consumed_train_samples
    args.consumed_valid_samples = state.consumed_valid_samples
    update_num_microbatches(state.consumed_train_samples)
    return iteration, state.num_floating_point_operations_so_far


def get_checkpoint_name(
    checkpoints_path: str,
    iteration: int,
    release: bool = False,
    pipeline_parallel: bool | None = None,
    tensor_rank: int | None = None,
    pipeline_rank: int | None = None,
    expert_parallel: bool | None = None,
    expert_rank: int | None = None,
    return_base_dir: bool = False,
    basename: str = "model_optim_rng.pt",
) -> str:
    """Returns the path of a rank's file in an iteration's folder, as in Megatron-LM's format `torch`.

    release: selects the folder of a release instead of an iteration. Parameters that are None are determined by
    parallel_state. return_base_dir: return the path of the folder instead. Files of a native checkpoint have different
    names, so scripts should use the folder.
    """
    folder = os.path.join(checkpoints_path, RELEASE) if release else str(iteration_folder(checkpoints_path, iteration))
    if return_base_dir:
        return folder
    if pipeline_parallel is None:
        pipeline_parallel = get_pipeline_model_parallel_world_size() > 1
    if expert_parallel is None:
        expert_parallel = get_expert_model_parallel_world_size() > 1
    rank = f"mp_rank_{get_tensor_model_parallel_rank() if tensor_rank is None else tensor_rank:02d}"
    if pipeline_parallel:
        rank += f"_{get_pipeline_model_parallel_rank() if pipeline_rank is None else pipeline_rank:03d}"
    if expert_parallel:
        rank += f"_{get_expert_model_parallel_rank() if expert_rank is None else expert_rank:03d}"
    return os.path.join(folder, rank, basename)


def _chunks(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    return [model] if isinstance(model, nn.Module) else list(model)


def _count(args: argparse.Namespace, name: str) -> int:
    # The loop sets this argument once it has consumed samples.
    return int(vars(args).get(name) or 0)
