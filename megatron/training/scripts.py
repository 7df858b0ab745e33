"""Provides functions for scripts written for Megatron-LM, with Megatron-LM's arguments.

They read get_args(), and nothing inside megatron/ calls them. training.py re-exports them, and interprets the arguments
of pretrain() with script_of_call.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.config_field import require_defaults
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import get_current_global_batch_size, get_num_microbatches
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parallel_state import get_process_groups, model_parallel_is_initialized
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training.checkpointing.rng_state import seed_ranks
from megatron.training.checkpointing.scripts import load_checkpoint
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.command_line.published import get_args
from megatron.training.gpt_builder import build_gpt
from megatron.training.setup import build_model, build_scheduler, setup_optimizer
from megatron.training.step.statistics import total_reports

DatasetsProvider = Callable[[list[int]], Sequence[Any]]
ModelProvider = Callable[..., nn.Module]


@dataclass(frozen=True, kw_only=True)
class Script:
    """The parts of a training program that a script passes to pretrain().

    args: parsed arguments; None means that the command line is parsed. process_non_loss_data_func: see NonLossData.
    """

    datasets_provider: DatasetsProvider
    model_provider: ModelProvider
    forward_step_func: Callable[..., Any]
    args: argparse.Namespace | None
    process_non_loss_data_func: Callable[..., Any] | None


def script_of_call(
    cfg_container: argparse.Namespace | DatasetsProvider | None,
    train_valid_test_dataset_provider: DatasetsProvider | ModelProvider | None,
    model_type: ModelType | None,
    forward_step_func: Callable[..., Any] | None,
    model_provider: ModelProvider | None,
    process_non_loss_data_func: Callable[..., Any] | None,
) -> Script:
    """Interprets pretrain()'s first arguments, which differ between versions of Megatron-LM.

    In released versions, the first two arguments are functions, the providers of datasets and of the model, and a fifth
    positional argument is process_non_loss_data_func. In the main branch, the first argument is the configuration of
    the run, and the fifth is the model provider, which may be omitted for the GPT that the arguments describe. A call
    with keywords may omit cfg_container. Raises ValueError naming an invalid argument.
    """
    args: argparse.Namespace | None = None
    datasets_provider: Any = train_valid_test_dataset_provider
    provider: Any = model_provider
    if callable(cfg_container):
        datasets_provider = cfg_container
        # A released call that passes model_provider by keyword has no second positional function.
        if train_valid_test_dataset_provider is not None:
            process_non_loss_data_func = process_non_loss_data_func or model_provider
            provider = train_valid_test_dataset_provider
    elif isinstance(cfg_container, argparse.Namespace):
        args, provider = cfg_container, model_provider or _provide_gpt
    elif cfg_container is not None:
        raise ValueError(
            f"cfg_container is a {type(cfg_container).__name__}: must be the result of parse_args, None to parse "
            "the command line or, as in released versions, the dataset provider function"
        )
    _check_model_type(model_type)
    functions: dict[str, Any] = {
        "train_valid_test_dataset_provider": datasets_provider,
        "model_provider": provider,
        "forward_step_func": forward_step_func,
    }
    for name, function in functions.items():
        if not callable(function):
            raise ValueError(f"pretrain: {name} is {function!r}: must be a function")
    assert forward_step_func is not None, "it is a function"
    return Script(
        datasets_provider=datasets_provider,
        model_provider=provider,
        forward_step_func=forward_step_func,
        args=args,
        process_non_loss_data_func=process_non_loss_data_func,
    )


def _provide_gpt(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
    return build_gpt(get_args(), pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)


def update_train_iters(args: argparse.Namespace) -> None:
    """Sets args.train_iters if --train-samples limits the run. Otherwise does nothing."""
    if args.train_samples is not None:
        args.train_iters = run_config_of(args).batch_sizes().running.iterations_within(args.train_samples, consumed=0)


def get_model(
    model_provider_func: ModelProvider,
    model_type: ModelType = ModelType.encoder_or_decoder,
    wrap_with_ddp: bool = True,
    config: Any = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> list[nn.Module]:
    """Builds this rank's model chunks from the arguments, on its device. Collective (see build_model).

    wrap_with_ddp: whether to wrap the chunks for data parallelism. config, pg_collection: passed to model_provider_func
    unless they are None. pg_collection must contain parallel_state's groups.
    """
    _check_model_type(model_type)
    _check_groups("get_model", pg_collection)
    given = {"config": config, "pg_collection": pg_collection}
    further = {name: value for name, value in given.items() if value is not None}

    def provide(**position: Any) -> nn.Module:
        return model_provider_func(**position, **further)

    return build_model(provide if further else model_provider_func, run_config_of(get_args()), wrap=wrap_with_ddp)


def get_optimizer_param_scheduler(optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Builds the schedule of learning rate and weight decay from the arguments."""
    return build_scheduler(optimizer, run_config_of(get_args()))


def setup_model_and_optimizer(
    model_type: ModelType | ModelProvider,
    model_provider_func: ModelProvider | ModelType | None = None,
    checkpointing_context: None = None,
    *,
    cfg_container: None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> tuple[list[nn.Module], MegatronOptimizer, OptimizerParamScheduler]:
    """Builds model chunks, optimizer and schedule, and loads the checkpoint of --load, which sets args.iteration.

    The first two arguments may also be in the order of released versions, with the provider first. model_provider_func:
    None means the GPT that the arguments describe. Collective.
    """
    if not isinstance(model_type, ModelType) and isinstance(model_provider_func, ModelType):
        model_type, model_provider_func = model_provider_func, model_type
    _check_model_type(model_type)
    if isinstance(model_provider_func, ModelType):
        raise ValueError(f"model_provider_func is {model_provider_func}: must be a function, or None")
    require_defaults(
        "setup_model_and_optimizer",
        "the run's arguments are those of get_args(), and its checkpoints have no context",
        checkpointing_context=(checkpointing_context or None, None),
        cfg_container=(cfg_container, None),
    )
    args = get_args()
    model = get_model(model_provider_func or _provide_gpt, pg_collection=pg_collection)
    optimizer, scheduler = setup_optimizer(model, run_config_of(args), config_overrides=None)
    for chunk in unwrap_model(model):
        # The schedule calls it after the last backward of a step, unless the provider has set another function.
        chunk.config.finalize_model_grads_func = chunk.config.finalize_model_grads_func or finalize_model_grads
    # As in pretrain(), replicas start from equal weights and then draw different dropout masks.
    seed_ranks(args.seed, get_process_groups())
    args.iteration = args.num_floating_point_operations_so_far = 0
    args.consumed_train_samples = args.consumed_valid_samples = 0
    if args.load is not None:
        loaded = load_checkpoint(model, optimizer, scheduler)
        args.iteration, args.num_floating_point_operations_so_far = loaded
    return model, optimizer, scheduler


def train_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any] | list[Iterator[Any] | None] | None,
    model: list[nn.Module],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
    config: Any,
    forward_backward_func: Callable[..., Any],
    iteration: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    p2p_communicator: None = None,
) -> tuple[dict[str, Tensor], int, bool, bool, int, float | None, float | None]:
    """Runs one step of a custom training loop over a global batch. Collective over all ranks.

    Returns the losses, whether the update was skipped (0 or 1), whether to save and whether to exit (both False), an
    exit code (0), and the norm and the number of zeros of the gradients, None if not computed. Losses: on the last
    pipeline stage, the mean of each loss over the global batch, [], fp64; empty on other stages. config: the
    configuration of the model. iteration: no effect. Only pretrain() can retry a step that overflowed an expert buffer.
    Raises ValueError for models with fixed-size expert buffers, and for the config of a different model.
    """
    args = get_args()
    _check_groups("train_step", pg_collection)
    require_defaults(
        "train_step", "all stages exchange tensors in the same way", p2p_communicator=(p2p_communicator, None)
    )
    if config is not None and config is not get_model_config(model[0]):
        raise ValueError("train_step: config does not belong to the model: pass get_model_config(model[0])")
    if args.moe_expert_rank_capacity_factor is not None:
        raise ValueError(
            f"--moe-expert-rank-capacity-factor is {args.moe_expert_rank_capacity_factor}: only pretrain() can "
            "retry a step that overflows these buffers; call it, or leave the flag out"
        )
    optimizer.zero_grad()
    reports = forward_backward_func(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    updated, grad_norm, num_zeros = optimizer.step()
    if updated:
        opt_param_scheduler.step(increment=get_current_global_batch_size())
    return _mean_losses(reports), int(not updated), False, False, 0, grad_norm, num_zeros


def _mean_losses(reports: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Returns the mean of each reported loss over the data- and context-parallel ranks: [], fp64, on the device."""
    totals = total_reports(reports)
    if totals and group_size(get_process_groups().dp_cp) > 1:
        together = torch.stack(list(totals.values()))
        dist.all_reduce(together, group=get_process_groups().dp_cp)
        totals = dict(zip(totals, together))
    return {name: total[0] / total[1].clamp(min=1) for name, total in totals.items()}


def _check_model_type(model_type: object) -> None:
    if model_type is not ModelType.encoder_or_decoder:
        raise ValueError(f"model_type is {model_type}: only ModelType.encoder_or_decoder is available")


def _check_groups(call: str, pg_collection: ProcessGroupCollection | None) -> None:
    if pg_collection is not None and not (
        model_parallel_is_initialized() and pg_collection.tp is get_process_groups().tp
    ):
        raise ValueError(
            f"{call}: pg_collection has other groups than parallel_state: pass None, or parallel_state's groups"
        )
