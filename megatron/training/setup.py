"""Builds the components of a run from its arguments: tokenizer, model, optimizer, schedule, data.

training.py contains the loop that uses them.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core import parallel_state
from megatron.core.datasets.data_iterators import BatchPlan, build_data_iterators, validation_sets
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.device import default_device
from megatron.core.distributed import check_weights_agree
from megatron.core.graphs.capture import GraphDevice
from megatron.core.group_collectives import all_ranks_agree, gather_objects
from megatron.core.num_microbatches_calculator import NumMicroBatches, init_num_microbatches_calculator
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.param_groups import ConfigOverrides
from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    OptimizerParamSchedulerConfig,
    get_optimizer_param_scheduler,
)
from megatron.core.parallel_state import get_process_groups
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.timers import Timers
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer, vocab_size_with_padding
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training.callbacks import Callback
from megatron.training.callbacks.build import setup_callbacks
from megatron.training.callbacks.lines import print_rank_0
from megatron.training.callbacks.wandb_log import wandb_folder
from megatron.training.checkpointing import check_save_folder, refuse_checkpoints_of_another_run
from megatron.training.checkpointing.rng_state import seed_ranks
from megatron.training.checkpointing.saving import RunSaves
from megatron.training.checkpointing.train_state import TrainState
from megatron.training.command_line.config_builder import config_from_args, with_flag_names
from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.flags import flag_table
from megatron.training.command_line.published import publish_timers, publish_tokenizer
from megatron.training.command_line.validation import batch_sizes
from megatron.training.compute.flops import count_parameters
from megatron.training.config import CheckpointConfig, FaultConfig, LoggingConfig, TrainingConfig
from megatron.training.data_order import build_datasets, split_sizes
from megatron.training.data_parallel import join_schedule, wrap_chunks
from megatron.training.meters.memory import persistent_fit
from megatron.training.meters.meters import build_meters
from megatron.training.run import EvaluationSet, NonLossData, Recovery, TrainingRun
from megatron.training.step.exit_conditions import ExitConditions
from megatron.training.step.expert_memory import ExpertMemory, build_expert_memory
from megatron.training.step.graph import build_step_graph, build_step_update, graph_device
from megatron.training.step.statistics import StatisticsExchange
from megatron.training.step.step_runner import StepRunner
from megatron.training.step.update import DeferredFinalizer


def setup_run(
    args: argparse.Namespace,
    model_provider: Callable[..., nn.Module],
    *,
    forward_step_func: Callable[..., Any],
    callbacks: Sequence[Callback] = (),
    config_overrides: ConfigOverrides | None = None,
    graphs: GraphDevice | None = None,
    exits: ExitConditions | None = None,
    non_loss_data: NonLossData | None = None,
) -> TrainingRun:
    """Builds all components of a run except the data, and loads the checkpoint, which sets the data position.

    graphs: device that captures CUDA graphs instead of this process's GPU, if the flags request graphs. exits: exit
    conditions that already listen for the exit signal; None builds new ones. non_loss_data: the script's functions for
    evaluation data other than losses.
    """
    training, checkpoint = config_from_args(TrainingConfig, args), config_from_args(CheckpointConfig, args)
    logging, faults = config_from_args(LoggingConfig, args), config_from_args(FaultConfig, args)
    # Called first, because it raises an error for flags that need a GPU.
    graphs = None if args.cuda_graph_impl == "none" else graphs or graph_device()
    check_folders(args)
    publish_tokenizer(setup_tokenizer(args))
    timers = Timers(logging.timing_log_level, logging.timing_log_option, device=default_device())
    publish_timers(timers)
    batches = setup_batches(args)
    model = build_model(model_provider, args)
    fit = persistent_fit(model, args)
    if not (fit.fits and logging.is_compact):
        print_rank_0(f"  {fit.line}")
    optimizer = scheduler = None
    if not training.skip_train:
        optimizer, scheduler = setup_optimizer(model, args, config_overrides=config_overrides)
        optimizer.config.timers = timers
    size = count_parameters(model, args, mp_group=get_process_groups().mp)
    with all_ranks_agree():
        every_callback = setup_callbacks(args, callbacks, size=size)
    memory = build_expert_memory(model, args, groups=get_process_groups())
    steps = setup_steps(
        args,
        model,
        forward_step_func=forward_step_func,
        optimizer=optimizer,
        timers=timers,
        memory=memory,
        graphs=graphs,
    )
    run = TrainingRun(
        args=args,
        training=training,
        checkpoint=checkpoint,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=batches,
        steps=steps,
        expert_memory=memory,
        groups=get_process_groups(),
        device=default_device(),
        state=TrainState(),
        faults=faults,
        recovery=Recovery(faults),
        callbacks=every_callback,
        exit_conditions=exits or ExitConditions(training),
        saves=RunSaves(in_background=checkpoint.async_save, on_save=every_callback.on_save),
        timers=timers,
        non_loss_data=non_loss_data or NonLossData(),
        meters=build_meters(
            logging,
            args,
            model=model,
            optimizer=optimizer,
            timers=timers,
            device=default_device(),
            expert_memory=memory,
        ),
    )
    seed_ranks(args.seed, run.groups)
    run.load_checkpoint()
    prepare_expert_memory(run)
    return run


def setup_steps(
    args: argparse.Namespace,
    model: list[nn.Module],
    *,
    forward_step_func: Callable[..., Any],
    optimizer: MegatronOptimizer | None,
    timers: Timers,
    memory: ExpertMemory | None,
    graphs: GraphDevice | None,
) -> StepRunner:
    """Builds the runner that executes steps over the chunks of `model`, including gradient finalization and updates.

    graphs: device that captures CUDA graphs, if the flags request graphs.
    """
    finalize = DeferredFinalizer(get_model_config(model[0]).finalize_model_grads_func)
    for chunk in unwrap_model(model):
        chunk.config.timers = timers
        chunk.config.finalize_model_grads_func = finalize
    update = build_step_update(args, finalize, optimizer=optimizer, timers=timers, memory=memory)
    return StepRunner(
        args=args,
        model=model,
        forward_step=forward_step_func,
        groups=get_process_groups(),
        statistics=StatisticsExchange(dist.group.WORLD),
        timers=timers,
        update=update,
        memory=memory,
        graph=build_step_graph(
            args, model, device=graphs, finalize=finalize, update=update, timers=timers, memory=memory
        ),
    )


def prepare_expert_memory(run: TrainingRun) -> None:
    """Allocates expert buffers and pages, with sizes learned in the loaded checkpoint's run. Collective."""
    if run.expert_memory is None:
        return
    if run.optimizer is None:
        run.expert_memory.adopt(run.state.learned_sizes)
        return
    lines = run.expert_memory.prepare(
        run.state.learned_sizes, num_microbatches=run.batches.final_num_microbatches, pp_group=run.groups.pp
    )
    for line in lines:
        print_rank_0(f"  {with_flag_names(line, flag_table())}")


def check_folders(args: argparse.Namespace) -> None:
    """Raises ValueError if a folder is not writable, or if --save contains checkpoints of another run. Collective."""
    if args.save is not None:
        check_save_folder(args.save, flag="--save")
    if args.tensorboard_dir is not None:
        check_save_folder(args.tensorboard_dir, flag="--tensorboard-dir")
    if args.wandb_project is not None:
        check_save_folder(str(wandb_folder(args)), flag="--wandb-save-dir")
    if args.save is not None and not args.skip_train:
        refuse_checkpoints_of_another_run(args.save, continued_from=None if args.finetune else args.load)


def setup_batches(args: argparse.Namespace) -> NumMicroBatches:
    """Builds the batch sizes of the run, and sets the process-wide microbatch calculator that scripts read."""
    return init_num_microbatches_calculator(
        dist.get_rank(),
        args.rampup_batch_size,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size,
        decrease_batch_size_if_needed=args.decrease_batch_size_if_needed,
        step_batch_size_schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )


def build_model_and_optimizer(
    model_provider: Callable[..., nn.Module],
    args: argparse.Namespace,
    *,
    config_overrides: ConfigOverrides | None = None,
) -> tuple[list[nn.Module], MegatronOptimizer, OptimizerParamScheduler]:
    """Builds model chunks, optimizer and schedule, and sets the callables in the model's configuration.

    config_overrides: learning rates and weight decays for selected parameters.
    """
    model = build_model(model_provider, args)
    return model, *setup_optimizer(model, args, config_overrides=config_overrides)


def setup_optimizer(
    model: list[nn.Module], args: argparse.Namespace, *, config_overrides: ConfigOverrides | None
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Builds the optimizer and the schedule for a model."""
    config = config_from_args(OptimizerConfig, args)
    if config_overrides is not None:
        config_overrides = {**get_standard_config_overrides(config), **config_overrides}
    optimizer = get_megatron_optimizer(config, model, config_overrides=config_overrides)
    scheduler = build_scheduler(optimizer, args)
    join_schedule(model, args)
    for chunk in unwrap_model(model):
        chunk.config.grad_scale_func = optimizer.scale_loss
    return optimizer, scheduler


def build_scheduler(optimizer: MegatronOptimizer, args: argparse.Namespace) -> OptimizerParamScheduler:
    """Builds the schedule of learning rate and weight decay for an optimizer."""
    return get_optimizer_param_scheduler(
        optimizer,
        config_from_args(OptimizerParamSchedulerConfig, args),
        max_lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        train_iters=args.train_iters,
        train_samples=args.train_samples,
        batches=batch_sizes(args).running,
    )


def build_model(
    model_provider: Callable[..., nn.Module], args: argparse.Namespace, *, wrap: bool = True
) -> list[nn.Module]:
    """Builds this rank's model chunks on its device, in the precision of the flags, wrapped for data parallelism.

    model_provider: called for each chunk with pre_process and post_process, and with vp_stage if a stage has several
    chunks. wrap: whether to add the data-parallel wrapper. Raises ValueError on every rank if replicas start from
    different weights, or train different weights.
    """
    build = partial(_build_on_meta_device if args.init_model_with_meta_device else _build_on_device, model_provider)
    parts = [
        _check_and_wrap_precision(part, args, post_process=has_output) for part, has_output in model_parts(build, args)
    ]
    # All chunks are checked first, because wrapping is collective over the first and the last stage.
    return wrap_chunks(parts, args) if wrap else parts


def model_parts(model_provider: Callable[..., nn.Module], args: argparse.Namespace) -> Iterator[tuple[nn.Module, bool]]:
    """Yields this rank's model chunks, each with whether it contains the output layer."""
    stage, last = parallel_state.get_pipeline_model_parallel_rank(), args.pipeline_model_parallel_size - 1
    num_chunks = args.virtual_pipeline_model_parallel_size or 1
    for chunk in range(num_chunks):
        ends = {"pre_process": stage == chunk == 0, "post_process": stage == last and chunk == num_chunks - 1}
        # Model providers of scripts without virtual stages may lack the parameter vp_stage.
        yield model_provider(**ends, **({"vp_stage": chunk} if num_chunks > 1 else {})), ends["post_process"]


def _build_on_device(model_provider: Callable[..., nn.Module], **position: Any) -> nn.Module:
    return model_provider(**position).to(default_device())


def _build_on_meta_device(model_provider: Callable[..., nn.Module], **position: Any) -> nn.Module:
    """Builds a chunk with parameters on the meta device, and other tensors (rotary tables) on the device."""
    with torch.device("meta"):
        model = model_provider(**position)
    return model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(default_device()))


def _check_and_wrap_precision(model: nn.Module, args: argparse.Namespace, *, post_process: bool) -> nn.Module:
    """Checks that replicas start from equal weights. With --bf16 or --fp16, wraps the model in that precision."""
    groups = get_process_groups()
    check_weights_agree(model, groups.dp_cp, expert_group=groups.expt_dp)
    if args.fp16 or args.bf16:
        return Float16Module(get_model_config(model), model, post_process=post_process)
    return model


def setup_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """Builds the tokenizer, and sets the padded and the unpadded vocabulary size in `args`."""
    with all_ranks_agree():
        tokenizer = build_tokenizer(config_from_args(TokenizerConfig, args))
    # Published models may have more ids than their tokenizers. build_tokenizer has validated --vocab-size, if given.
    args.unpadded_vocab_size = args.vocab_size or tokenizer.vocab_size
    if args.padded_vocab_size is None:
        args.padded_vocab_size = vocab_size_with_padding(
            args.unpadded_vocab_size,
            divisible_by=args.make_vocab_size_divisible_by,
            tensor_parallel_size=args.tensor_model_parallel_size,
        )
    elif args.padded_vocab_size < args.unpadded_vocab_size:
        minimum = "the tokenizer's" if args.vocab_size is None else "--vocab-size,"
        raise CommandLineError(
            f"--padded-vocab-size is {args.padded_vocab_size}: must be at least {minimum} {args.unpadded_vocab_size}"
        )
    return tokenizer


def setup_data(run: TrainingRun, datasets_provider: Callable[[Any], Sequence[Any]], *, num_workers: int) -> None:
    """Builds the datasets and the data iterators of `run`. The iterators start after the consumed samples. Collective.

    datasets_provider: maps the numbers of train, valid and test samples, a SplitSizes, to three datasets.
    """
    run.datasets_provider, run.num_workers = datasets_provider, num_workers
    build_datasets(run)
    position_data(run)


def reposition_data(run: TrainingRun) -> None:
    """Rebuilds the iterators of `run` at another data position, and datasets with too few samples. Collective."""
    sizes = split_sizes(run)
    if any(new is not None and old is not None and new > old for new, old in zip(sizes, run.split_sizes)):
        build_datasets(run)
    position_data(run)


def position_data(run: TrainingRun) -> None:
    """Rebuilds the data iterators of `run`, so that they start after its consumed samples. Collective."""
    state, args = run.state, run.args
    plan = BatchPlan(
        micro_batch_size=run.training.micro_batch_size or 1,
        dp_rank=group_rank(run.groups.dp),
        dp_size=group_size(run.groups.dp),
        consumed_train_samples=state.consumed_train_samples,
        consumed_valid_samples=state.consumed_valid_samples,
        num_workers=run.num_workers,
        pin_memory=run.device.type == "cuda",
        create_attention_mask=args.create_attention_mask_in_dataloader,
        dataloader_type=args.dataloader_type,
        seed=args.seed,
        data_order=state.data_order or {},
        full_validation=args.full_validation,
    )
    train, valid, test = run.datasets
    run.train_iterator, valid_iterators, test_iterator = build_data_iterators((train, valid, test), plan)
    sets = validation_sets(valid)
    names = _names_of_sets(sets, args)
    plain = [run.evaluation_microbatches] * run.training.eval_iters
    run.valid_sets = [
        EvaluationSet(
            iterator=iterator,
            num_microbatches=_full_batches(plan.full_rounds(one), run) if args.full_validation else plain,
            name=name,
        )
        for one, iterator, name in zip(sets, valid_iterators, names)
    ]
    run.test_set = None if test_iterator is None else EvaluationSet(iterator=test_iterator, num_microbatches=plain)
    if dist.get_world_size() > 1:
        _agree_on_sets(run, plain)


def _full_batches(rounds: int, run: TrainingRun) -> list[int]:
    """Returns the number of microbatches per rank in each global batch of an evaluation over `rounds` rounds.

    The last batch may be smaller.
    """
    full, rest = divmod(rounds, run.evaluation_microbatches)
    return [run.evaluation_microbatches] * full + [rest] * (rest > 0)


def _names_of_sets(sets: Sequence[Any], args: argparse.Namespace) -> Sequence[str | None]:
    """Returns the names of validation sets: from the flags, else from their file names, else numbers.

    A single set has no name, unless a flag specifies it.
    """
    given = args.validation_set_names
    if len(sets) > 1 and not args.multiple_validation_sets:
        raise ValueError(
            f"the dataset provider returned {len(sets)} validation sets: add --multiple-validation-sets to "
            "evaluate each, or return one dataset"
        )
    if given is not None:
        if len(given) != len(sets):
            raise ValueError(
                f"--validation-set-names is {' '.join(given)}: must be {len(sets)} names, one for each set"
            )
        return given
    if len(sets) < 2:
        return [None] * len(sets)
    files = [Path(one.dataset_path).name if isinstance(one, GPTDataset) and one.dataset_path else "" for one in sets]
    return [
        name if name and files.count(name) == 1 else f"{name}-{index}" if name else str(index)
        for index, name in enumerate(files)
    ]


def _agree_on_sets(run: TrainingRun, num_microbatches: Sequence[int]) -> None:
    """Adds evaluation sets that exist only on other ranks, because all ranks take part in an evaluation. Collective.

    A script may provide datasets or iterators only on ranks that read batches.
    """
    own = [(one.name, list(one.num_microbatches)) for one in run.valid_sets]
    found = gather_objects((own, run.test_set is not None), dist.group.WORLD)
    most = max((sets for sets, _ in found), key=len)
    if len(own) < len(most):
        held = {one.name: one for one in run.valid_sets}
        absent = [EvaluationSet(iterator=None, num_microbatches=count, name=name) for name, count in most]
        run.valid_sets = [held.get(one.name, one) for one in absent]
    if run.test_set is None and any(has_test for _, has_test in found):
        run.test_set = EvaluationSet(iterator=None, num_microbatches=num_microbatches)
