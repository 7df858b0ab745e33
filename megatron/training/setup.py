"""Builds the components of a run from its settings: tokenizer, model, optimizer, schedule, data.

training.py contains the loop that uses them.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core import parallel_state
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.data_iterators import BatchPlan, build_data_iterators, validation_sets
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.device import default_device
from megatron.core.distributed import check_weights_agree
from megatron.core.graphs.capture import GraphDevice
from megatron.core.group_collectives import all_ranks_agree, gather_objects
from megatron.core.num_microbatches_calculator import NumMicroBatches, init_num_microbatches_calculator
from megatron.core.optimizer import (
    MegatronOptimizer,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.param_groups import ConfigOverrides
from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    get_optimizer_param_scheduler,
)
from megatron.core.parallel_state import get_process_groups
from megatron.core.pipeline_placement import configured_placement
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.timers import Timers
from megatron.core.tokenizers import build_tokenizer, vocab_size_with_padding
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig, precision_lines
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training.callbacks import Callback
from megatron.training.callbacks.build import setup_callbacks
from megatron.training.callbacks.lines import print_rank_0
from megatron.training.callbacks.wandb_log import wandb_folder
from megatron.training.checkpointing import check_save_folder, refuse_checkpoints_of_another_run
from megatron.training.checkpointing.rng_state import seed_ranks
from megatron.training.checkpointing.saving import RunSaves
from megatron.training.checkpointing.train_state import TrainState
from megatron.training.command_line.config_builder import with_flag_names
from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.flags import flag_table
from megatron.training.command_line.published import publish_timers, publish_tokenizer
from megatron.training.compute.flops import count_parameters
from megatron.training.config import RunConfig
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
    run_config: RunConfig,
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
    training, logging, faults = run_config.training, run_config.logging, run_config.faults
    checkpoint = run_config.checkpoint
    # Called first, because it raises an error for flags that need a GPU.
    graphs = None if run_config.transformer.cuda_graph_impl == "none" else graphs or graph_device()
    check_folders(run_config)
    publish_tokenizer(setup_tokenizer(run_config))
    timers = Timers(logging.timing_log_level, logging.timing_log_option, device=default_device())
    publish_timers(timers)
    batches = setup_batches(run_config)
    model = build_model(model_provider, run_config)
    _print_model_lines(model, run_config)
    optimizer = scheduler = None
    if not training.skip_train:
        optimizer, scheduler = setup_optimizer(model, run_config, config_overrides=config_overrides)
        optimizer.config.timers = timers
    size = count_parameters(model, run_config.transformer, mp_group=get_process_groups().mp)
    with all_ranks_agree():
        every_callback = setup_callbacks(run_config, callbacks, size=size)
    memory = build_expert_memory(
        model,
        seq_length=run_config.data.seq_length,
        micro_batch_size=run_config.training.micro_batch_size,
        groups=get_process_groups(),
    )
    steps = setup_steps(
        run_config,
        model,
        forward_step_func=forward_step_func,
        optimizer=optimizer,
        timers=timers,
        memory=memory,
        graphs=graphs,
    )
    run = TrainingRun(
        config=run_config,
        training=training,
        checkpoint=checkpoint,
        faults=faults,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=batches,
        steps=steps,
        expert_memory=memory,
        groups=get_process_groups(),
        device=default_device(),
        state=TrainState(),
        recovery=Recovery(faults),
        callbacks=every_callback,
        exit_conditions=exits or ExitConditions(training),
        saves=RunSaves(in_background=checkpoint.async_save, on_save=every_callback.on_save),
        timers=timers,
        non_loss_data=non_loss_data or NonLossData(),
        meters=build_meters(
            logging,
            run_config,
            model=model,
            optimizer=optimizer,
            timers=timers,
            device=default_device(),
            expert_memory=memory,
        ),
    )
    seed_ranks(training.seed, run.groups)
    run.load_checkpoint()
    prepare_expert_memory(run)
    return run


def _print_model_lines(model: list[nn.Module], run_config: RunConfig) -> None:
    """Prints whether the model fits this machine, and which experts compute in 8 bits."""
    fit = persistent_fit(model, run_config)
    if not (fit.fits and run_config.logging.is_compact):
        print_rank_0(f"  {fit.line}")
    for line in precision_lines(run_config.transformer):
        print_rank_0(f"  {line}")


def setup_steps(
    run_config: RunConfig,
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
    update = build_step_update(run_config, finalize, optimizer=optimizer, timers=timers, memory=memory)
    return StepRunner(
        seq_length=run_config.data.seq_length,
        micro_batch_size=run_config.training.micro_batch_size,
        log_interval=run_config.logging.log_interval,
        has_experts=run_config.transformer.num_moe_experts is not None,
        resets_attention_mask=run_config.data.reset_attention_mask,
        model=model,
        forward_step=forward_step_func,
        groups=get_process_groups(),
        statistics=StatisticsExchange(dist.group.WORLD),
        timers=timers,
        update=update,
        memory=memory,
        graph=build_step_graph(
            run_config, model, device=graphs, finalize=finalize, update=update, timers=timers, memory=memory
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


def check_folders(run_config: RunConfig) -> None:
    """Raises ValueError if a folder is not writable, or if --save contains checkpoints of another run. Collective."""
    logging, checkpoint = run_config.logging, run_config.checkpoint
    if checkpoint.save is not None:
        check_save_folder(checkpoint.save, flag="--save")
    if logging.tensorboard_dir is not None:
        check_save_folder(logging.tensorboard_dir, flag="--tensorboard-dir")
    if logging.wandb_project is not None:
        check_save_folder(str(wandb_folder(run_config)), flag="--wandb-save-dir")
    if checkpoint.save is not None and not run_config.training.skip_train:
        refuse_checkpoints_of_another_run(
            checkpoint.save, continued_from=None if checkpoint.finetune else checkpoint.load
        )


def setup_batches(run_config: RunConfig) -> NumMicroBatches:
    """Builds the batch sizes of the run, and sets the process-wide microbatch calculator that scripts read."""
    schedule, training = run_config.batch_schedule, run_config.training
    return init_num_microbatches_calculator(
        dist.get_rank(),
        schedule.rampup_batch_size,
        global_batch_size=training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        data_parallel_size=run_config.launch.data_parallel_size,
        decrease_batch_size_if_needed=schedule.decrease_batch_size_if_needed,
        step_batch_size_schedule=schedule.step_batch_size_schedule,
        seq_length=run_config.data.seq_length,
    )


def build_model_and_optimizer(
    model_provider: Callable[..., nn.Module],
    run_config: RunConfig,
    *,
    config_overrides: ConfigOverrides | None = None,
) -> tuple[list[nn.Module], MegatronOptimizer, OptimizerParamScheduler]:
    """Builds model chunks, optimizer and schedule, and sets the callables in the model's configuration.

    config_overrides: learning rates and weight decays for selected parameters.
    """
    model = build_model(model_provider, run_config)
    return model, *setup_optimizer(model, run_config, config_overrides=config_overrides)


def setup_optimizer(
    model: list[nn.Module], run_config: RunConfig, *, config_overrides: ConfigOverrides | None
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Builds the optimizer and the schedule for a model."""
    # A copy, because it will hold the run's timers.
    config = copy.copy(run_config.optimizer)
    if config_overrides is not None:
        config_overrides = {**get_standard_config_overrides(config), **config_overrides}
    optimizer = get_megatron_optimizer(config, model, config_overrides=config_overrides)
    scheduler = build_scheduler(optimizer, run_config)
    join_schedule(model, align_grad_reduce=run_config.gradient_reduction.align_grad_reduce)
    for chunk in unwrap_model(model):
        chunk.config.grad_scale_func = optimizer.scale_loss
    return optimizer, scheduler


def build_scheduler(optimizer: MegatronOptimizer, run_config: RunConfig) -> OptimizerParamScheduler:
    """Builds the schedule of learning rate and weight decay for an optimizer."""
    optimizer_config, training = run_config.optimizer, run_config.training
    return get_optimizer_param_scheduler(
        optimizer,
        run_config.scheduler,
        max_lr=optimizer_config.lr,
        min_lr=optimizer_config.lowest_lr,
        weight_decay=optimizer_config.weight_decay,
        train_iters=training.train_iters or 0,
        train_samples=training.train_samples,
        batches=run_config.batch_sizes().running,
    )


def build_model(
    model_provider: Callable[..., nn.Module], run_config: RunConfig, *, wrap: bool = True
) -> list[nn.Module]:
    """Builds this rank's model chunks on its device, in the precision of the flags, wrapped for data parallelism.

    model_provider: called for each chunk with pre_process and post_process, and with vp_stage if a stage has several
    chunks. wrap: whether to add the data-parallel wrapper. Raises ValueError on every rank if replicas start from
    different weights, or train different weights.
    """
    on_meta = run_config.transformer.init_model_with_meta_device
    build = partial(_build_on_meta_device if on_meta else _build_on_device, model_provider)
    parts = [
        _check_and_wrap_precision(part, run_config.transformer, post_process=has_output)
        for part, has_output in model_parts(build, run_config.transformer)
    ]
    # All chunks are checked first, because wrapping is collective over the first and the last stage.
    return wrap_chunks(parts, run_config) if wrap else parts


def model_parts(
    model_provider: Callable[..., nn.Module], config: TransformerConfig
) -> Iterator[tuple[nn.Module, bool]]:
    """Yields this rank's model chunks, each with whether it contains the output layer."""
    stage, placement = parallel_state.get_pipeline_model_parallel_rank(), configured_placement(config)
    for chunk in range(placement.num_chunks):
        has_loss = placement.has_loss(stage, chunk)
        ends = {"pre_process": placement.has_embedding(stage, chunk), "post_process": has_loss}
        # Model providers of scripts without virtual stages may lack the parameter vp_stage.
        yield model_provider(**ends, **({"vp_stage": chunk} if placement.num_chunks > 1 else {})), has_loss


def _build_on_device(model_provider: Callable[..., nn.Module], **position: Any) -> nn.Module:
    return model_provider(**position).to(default_device())


def _build_on_meta_device(model_provider: Callable[..., nn.Module], **position: Any) -> nn.Module:
    """Builds a chunk with parameters on the meta device, and other tensors (rotary tables) on the device."""
    with torch.device("meta"):
        model = model_provider(**position)
    return model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(default_device()))


def _check_and_wrap_precision(model: nn.Module, config: TransformerConfig, *, post_process: bool) -> nn.Module:
    """Checks that replicas start from equal weights. With --bf16 or --fp16, wraps the model in that precision."""
    groups = get_process_groups()
    check_weights_agree(model, groups.dp_cp, expert_group=groups.expt_dp)
    if config.fp16 or config.bf16:
        return Float16Module(get_model_config(model), model, post_process=post_process)
    return model


def setup_tokenizer(run_config: RunConfig) -> Tokenizer:
    """Builds the tokenizer, and sets the padded and the unpadded vocabulary size."""
    with all_ranks_agree():
        tokenizer = build_tokenizer(run_config.tokenizer)
    # Published models may have more ids than their tokenizers. build_tokenizer has validated --vocab-size, if given.
    unpadded = run_config.tokenizer.vocab_size or tokenizer.vocab_size
    padded = run_config.gpt.padded_vocab_size
    if padded is None:
        padded = vocab_size_with_padding(
            unpadded,
            divisible_by=run_config.gpt.make_vocab_size_divisible_by,
            tensor_parallel_size=run_config.transformer.tensor_model_parallel_size,
        )
    run_config.values.update(unpadded_vocab_size=unpadded, padded_vocab_size=padded)
    if padded < unpadded:
        minimum = "the tokenizer's" if run_config.tokenizer.vocab_size is None else "--vocab-size,"
        raise CommandLineError(f"--padded-vocab-size is {padded}: must be at least {minimum} {unpadded}")
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
    state, data = run.state, run.config.data
    plan = BatchPlan(
        micro_batch_size=run.training.micro_batch_size,
        dp_rank=group_rank(run.groups.dp),
        dp_size=group_size(run.groups.dp),
        consumed_train_samples=state.consumed_train_samples,
        consumed_valid_samples=state.consumed_valid_samples,
        num_workers=run.num_workers,
        pin_memory=run.device.type == "cuda",
        create_attention_mask=data.create_attention_mask_in_dataloader,
        dataloader_type=data.dataloader_type,
        seed=run.training.seed,
        data_order=state.data_order or {},
        full_validation=data.full_validation,
    )
    train, valid, test = run.datasets
    run.train_iterator, valid_iterators, test_iterator = build_data_iterators((train, valid, test), plan)
    sets = validation_sets(valid)
    names = _names_of_sets(sets, data)
    plain = [run.evaluation_microbatches] * run.training.eval_iters
    run.valid_sets = [
        EvaluationSet(
            iterator=iterator,
            num_microbatches=_full_batches(plan.full_rounds(one), run) if data.full_validation else plain,
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


def _names_of_sets(sets: Sequence[Any], data: DataConfig) -> Sequence[str | None]:
    """Returns the names of validation sets: from the flags, else from their file names, else numbers.

    A single set has no name, unless a flag specifies it.
    """
    given = data.validation_set_names
    if len(sets) > 1 and not data.multiple_validation_sets:
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
