"""Implements pretrain(), the training loop, a training step, and evaluation: the events of a run in order.

setup.py builds the components. Schedules, optimizer and checkpoints are implemented elsewhere.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron.core.config_field import require_defaults
from megatron.core.device.trace_ranges import trace_range
from megatron.core.enums import ModelType
from megatron.core.optimizer.param_groups import ConfigOverrides
from megatron.training.callbacks import Callback, EvaluationReport, RunStart, StepReport
from megatron.training.callbacks.lines import print_rank_0
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.published import get_tensorboard_writer
from megatron.training.compute.flops import num_floating_point_operations
from megatron.training.config import RunConfig
from megatron.training.error_broadcast import ErrorBroadcast
from megatron.training.errors import message_for_other_ranks
from megatron.training.initialize import leave_process_group, read_arguments, start_processes
from megatron.training.recovery import (
    NON_FINITE,
    check_weight_hashes,
    rewind_from_non_finite,
    skip_batches,
    skip_step,
    watch_loss,
)
from megatron.training.run import EvaluationSet, NonLossData, TrainingRun
from megatron.training.scripts import (
    DatasetsProvider,
    ModelProvider,
    Script,
    get_model,
    get_optimizer_param_scheduler,
    script_of_call,
    setup_model_and_optimizer,
    train_step,
    update_train_iters,
)
from megatron.training.setup import setup_data, setup_run
from megatron.training.step.exit_conditions import ExitConditions, ExitReason
from megatron.training.step.statistics import raise_non_finite_loss, total_reports

__all__ = [
    "get_model",
    "get_optimizer_param_scheduler",
    "num_floating_point_operations",
    "pretrain",
    "run_step",
    "setup_model_and_optimizer",
    "train",
    "train_step",
    "update_train_iters",
]


def pretrain(
    cfg_container: argparse.Namespace | DatasetsProvider | None = None,
    train_valid_test_dataset_provider: DatasetsProvider | ModelProvider | None = None,
    model_type: ModelType | None = None,
    forward_step_func: Callable[..., Any] | None = None,
    model_provider: ModelProvider | None = None,
    process_non_loss_data_func: Callable[..., Any] | None = None,
    get_embedding_ranks: None = None,
    get_position_embedding_ranks: None = None,
    non_loss_data_func: Callable[..., Any] | None = None,
    store: None = None,
    inprocess_call_wrapper: None = None,
    p2p_communicator: None = None,
    pg_collection: None = None,
    skip_model_parallel_init: bool = False,
    *,
    extra_args_provider: Callable[[Any], Any] | None = None,
    args_defaults: dict[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    config_overrides: ConfigOverrides | None = None,
    argv: Sequence[str] | None = None,
    print_plan: Callable[..., None] | None = None,
) -> None:
    """Trains the model that the command line describes, or only evaluates it with --skip-train.

    The first five arguments may be those of a released Megatron-LM, `pretrain(datasets_provider, model_provider,
    model_type, forward_step_func, process_non_loss_data_func)`, or those of its main branch (see script_of_call).

    cfg_container: parsed arguments; None means that the command line is parsed. train_valid_test_dataset_provider: maps
    the numbers of train, valid and test samples to three datasets, or to three iterators with --dataloader-type
    external; called on every rank. model_provider: maps (pre_process, post_process) to a module. forward_step_func:
    maps (data_iterator, model) to (output, loss function).
    process_non_loss_data_func, non_loss_data_func: see NonLossData. skip_model_parallel_init: use the process groups
    that the script has initialized. config_overrides: learning rates and weight decays for selected parameters.
    print_plan: megatron.planner.print_plan, which --dry-run calls instead of training; without it, --dry-run raises
    CommandLineError.
    """
    require_defaults(
        "pretrain",
        "processes and groups follow from the launcher and the flags",
        get_embedding_ranks=(get_embedding_ranks, None),
        get_position_embedding_ranks=(get_position_embedding_ranks, None),
        store=(store, None),
        inprocess_call_wrapper=(inprocess_call_wrapper, None),
        p2p_communicator=(p2p_communicator, None),
        pg_collection=(pg_collection, None),
    )
    script = script_of_call(
        cfg_container,
        train_valid_test_dataset_provider,
        model_type,
        forward_step_func,
        model_provider,
        process_non_loss_data_func,
    )
    words = sys.argv[1:] if argv is None else argv
    # Checked before the arguments are parsed, because a dry run joins no process group.
    if "--dry-run" in words:

        def read(further: Sequence[str] = ()) -> RunConfig:
            return run_config_of(read_arguments(extra_args_provider, args_defaults, argv=[*words, *further]))

        _plan(script, read, print_plan, config_overrides=config_overrides)
        return
    with (
        ExitStack() as afterwards,
        ErrorBroadcast(describe=message_for_other_ranks, leave=leave_process_group) as broadcast,
    ):
        args = start_processes(
            extra_args_provider,
            args_defaults,
            skip_model_parallel_init=skip_model_parallel_init,
            parsed_args=script.args,
            argv=argv,
            broadcast=broadcast,
        )
        run_config = run_config_of(args)
        exits = ExitConditions(run_config.training)
        # Active until the end, because a signal after the last save must not kill ranks that wait for each other.
        afterwards.enter_context(exits.listening())
        run = setup_run(
            run_config,
            script.model_provider,
            forward_step_func=script.forward_step_func,
            callbacks=callbacks,
            config_overrides=config_overrides,
            exits=exits,
            non_loss_data=NonLossData(collect=non_loss_data_func, process=script.process_non_loss_data_func),
        )
        # Runs after an error has been sent to the other ranks, because finishing a pending save takes a while.
        afterwards.callback(run.saves.abandon)
        setup_data(run, script.datasets_provider, num_workers=run_config.data.num_workers)
        run.callbacks.on_train_start(
            RunStart(
                iteration=run.state.iteration,
                train_iters=run.train_iters,
                consumed_padding=run.state.consumed_padding,
            )
        )
        try:
            reason = None if run.training.skip_train else train(run)
            if reason is not ExitReason.SIGNAL and evaluate_validation(run, final=True):
                evaluate_test(run)  # not after an exit signal, because its sender does not wait for an evaluation
        finally:
            if run.steps.graph is not None:
                # Destroying an NCCL communicator hangs while a graph that captured its collectives exists.
                run.steps.graph.drop_graphs()
            run.callbacks.on_run_end()


def _plan(
    script: Script,
    read: Callable[..., RunConfig],
    print_plan: Callable[..., None] | None,
    *,
    config_overrides: ConfigOverrides | None,
) -> None:
    """Prints the plan of a run instead of training. read: parses the command line, with extra arguments if given."""
    if print_plan is None:
        raise CommandLineError(
            "--dry-run is given, but this script passes no planner to pretrain(): call it with "
            "print_plan=megatron.planner.print_plan"
        )
    print_plan(
        read(),
        script.model_provider,
        reread=read,
        forward_step_func=script.forward_step_func,
        config_overrides=config_overrides,
    )


def train(run: TrainingRun) -> ExitReason | None:
    """Trains from the current iteration to the last, or until an exit condition. Returns the exit reason, if any."""
    state, exits = run.state, run.exit_conditions
    started_at = state.iteration
    reason: ExitReason | None = None
    with exits.listening():
        # The signal may arrive during setup, or during an evaluation left over from before a restart.
        if exits.signalled_anywhere_sync() or (run.owes_evaluation and not evaluate_validation(run)):
            reason = ExitReason.SIGNAL
        while state.iteration < run.train_iters and reason is None:
            run.callbacks.on_step_start(state.iteration)
            report = None
            if state.iteration in run.training.iterations_to_skip:
                reason = _skip_iteration(run)
            else:
                step = _step_or_rewind(run)
                if step is None:
                    continue
                report, reason = step
            reason = _end_step(run, report, reason=reason)
            if run.is_due(run.checkpoint.save_interval):
                run.save_checkpoint()
            run.saves.poll()
            if report is not None:
                exits.warn_of_slow_save(step_seconds=report.seconds, save_seconds=run.saves.seconds)
        if state.iteration != started_at:
            run.save_last_checkpoint()
    run.callbacks.on_train_end()
    if started_at >= run.train_iters:
        print_rank_0(f"  nothing to train: iteration {started_at} has already reached --train-iters {run.train_iters}")
    if reason is not None:
        print_rank_0(f"  exiting at iteration {state.iteration}: {reason.value}")
    return reason


def _step_or_rewind(run: TrainingRun) -> tuple[StepReport, ExitReason | None] | None:
    """Runs a training step like run_step. Returns None if the step was bad and the run has rewound to a checkpoint."""
    skip_batches(run)
    try:
        report, reason = run_step(run)
    except NON_FINITE as error:
        if run.faults.non_finite_policy != "rewind":
            raise
        rewind_from_non_finite(run, error)
        return None
    return None if watch_loss(run, report) else (report, reason)


def _skip_iteration(run: TrainingRun) -> ExitReason | None:
    """Reads the batches of a step of --iterations-to-skip without training on them.

    The step and the data position advance, but the learning rate does not. Returns the reason to end the run, if any.
    """
    skip_batches(run)
    run.steps.skip(run.train_iterator, num_microbatches=run.num_microbatches)
    run.count_iteration()
    print_rank_0(
        f"  iteration {run.state.iteration} is skipped, because --iterations-to-skip contains {run.state.iteration - 1}"
    )
    return ExitReason.SIGNAL if run.exit_conditions.signalled_anywhere_sync() else None


def _end_step(run: TrainingRun, report: StepReport | None, *, reason: ExitReason | None) -> ExitReason | None:
    """Reports a step, and evaluates if due, before its checkpoint is saved.

    report: None for a skipped step. reason: exit reason observed in the step. Returns the exit reason, if any.
    """
    if run.exit_conditions.at_interval(run.state.iteration):
        reason = reason or ExitReason.INTERVAL
    is_last = reason is not None or run.state.iteration == run.train_iters
    if report is not None:
        run.callbacks.on_step_end(run.measured(replace(report, is_last=is_last)))
    if run.owes_evaluation and reason is not ExitReason.SIGNAL and not evaluate_validation(run):
        reason = ExitReason.SIGNAL
    interval, is_last = run.faults.check_weight_hash_across_dp_replicas_interval, is_last or reason is not None
    # Also checked before a save, so that a checkpoint never contains weights that differ between replicas.
    if run.is_due(interval) or (interval is not None and (is_last or run.is_due(run.checkpoint.save_interval))):
        check_weight_hashes(run)
    return reason


@trace_range("run_step")
def run_step(run: TrainingRun) -> tuple[StepReport, ExitReason | None]:
    """Runs an optimizer step over a global batch. Returns its report, and an exit reason if any rank has one.

    Raises NonFiniteLossError or NonFiniteGradientError on every rank, before any update, unless the check is off or the
    step may be skipped.
    """
    start = time.perf_counter()
    assert run.optimizer is not None and run.scheduler is not None, "--skip-train never steps"
    # Read before the step, because scheduler.step and count_step advance these values.
    rates, batch_size = dict(run.optimizer.param_groups[0]), run.global_batch_size
    decoupled_learning_rate = run.optimizer.decoupled_learning_rate
    run.optimizer.zero_grad()

    # Retries attempts that overflowed. Discarded attempts leave no trace.
    reports, statistics = run.steps.train_sync(
        run.train_iterator,
        num_microbatches=run.num_microbatches,
        iteration=run.state.iteration + 1,
        exit_reasons=run.exit_conditions.local_reasons,
    )
    loss_scale = run.optimizer.get_loss_scale()
    try:
        # Checks losses before gradients, because the error about a loss names its microbatch.
        if statistics.nan and run.training.check_for_nan_in_loss_and_grad:
            raise_non_finite_loss(reports, dist.group.WORLD, iteration=run.state.iteration + 1)
        updated, grad_norm, num_zeros = run.steps.update_sync()
        logs_logit = run.config.transformer.log_max_attention_logit
        max_attention_logit = run.optimizer.largest_attention_logit_sync() if logs_logit else None
    except NON_FINITE as error:
        skip_step(run, error)
        updated, grad_norm, num_zeros, max_attention_logit = False, math.nan, None, None
    if updated:
        run.scheduler.step(increment=batch_size)
    run.count_step(updated=updated, nan=statistics.nan, padding=statistics.padding)

    report = StepReport(
        iteration=run.state.iteration,
        losses=statistics.losses,
        grad_norm=grad_norm,
        num_zeros=None if num_zeros is None else int(num_zeros),
        max_attention_logit=max_attention_logit,
        learning_rate=rates["lr"],
        loss_scale=float(loss_scale),
        global_batch_size=batch_size,
        consumed_samples=run.state.consumed_train_samples,
        tokens=batch_size * run.steps.seq_length - statistics.padding.tokens,
        padding=statistics.padding,
        consumed_padding=run.state.consumed_padding,
        seconds=time.perf_counter() - start,
        skipped=not updated,
        nan=statistics.nan,
        weight_decay=rates["weight_decay"],
        per_layer=statistics.per_layer,
        expert_load=statistics.expert_load,
        decoupled_learning_rate=decoupled_learning_rate,
    )
    return report, statistics.exit_reason


@trace_range("evaluate")
def evaluate(run: TrainingRun, data: EvaluationSet) -> dict[str, float] | None:
    """Evaluates the next global batches of `data`, returns the mean of each loss, and restores training mode.

    If the exit signal arrives on any rank, returns None without reading the remaining batches.
    """
    reports, is_interrupted = [], False
    for chunk in run.model:
        chunk.eval()
    with run.timers.paused():
        for num_microbatches in data.num_microbatches:
            if is_interrupted := run.exit_conditions.signalled_anywhere_sync():
                break
            reports += run.steps.evaluate_sync(
                data.iterator, num_microbatches=num_microbatches, iteration=run.state.iteration
            )
    for chunk in run.model:
        chunk.train()
    if is_interrupted:
        return None
    return run.steps.statistics.reduce_sync(total_reports(reports)).losses


def evaluate_validation(run: TrainingRun, *, final: bool = False) -> bool:
    """Evaluates the validation sets, if the run has any, and reports the losses.

    Returns False if the exit signal interrupted the evaluation. The resumed run then repeats it.
    """
    iterations = run.training.eval_iters
    if not run.valid_sets or iterations == 0:
        return True
    run.callbacks.on_evaluation_start(run.state.iteration)
    found = []
    for one in run.valid_sets:
        losses = evaluate(run, one)
        if losses is None:
            return False
        _process_non_loss_data(run, one)
        found.append((one.name, losses))
    if not run.config.data.full_validation:
        read = iterations + run.non_loss_data.reads_batch
        run.state.consumed_valid_samples += read * run.evaluation_batch_size
    run.state.evaluated_iteration = run.state.iteration
    # Reported after all sets are evaluated, so that a repeated evaluation reports each set once.
    for name, losses in found:
        _report(run, "validation", losses=losses, final=final, set_name=name)
    return True


def evaluate_test(run: TrainingRun) -> None:
    """Evaluates the test split, if the run has one, and reports the losses unless the exit signal interrupts it."""
    if run.test_set is None or run.training.eval_iters == 0:
        return
    run.callbacks.on_evaluation_start(run.state.iteration)
    losses = evaluate(run, run.test_set)
    if losses is not None:
        _process_non_loss_data(run, run.test_set)
        _report(run, "test", losses=losses, final=True)


def _process_non_loss_data(run: TrainingRun, evaluated: EvaluationSet) -> None:
    """Collects non-loss data in evaluation mode and passes it to the script's function. Collective."""
    functions = run.non_loss_data
    if functions.collect is None and functions.process is None:
        return
    for chunk in run.model:
        chunk.eval()
    with run.timers.paused():
        if functions.collect is not None:
            data = functions.collect(run.model)
        else:
            # The next evaluation continues after these batches. A full validation restarts at the first sample.
            batches = evaluated.num_microbatches if run.config.data.full_validation else evaluated.num_microbatches[-1:]
            data = []
            for num_microbatches in batches:
                data += run.steps.evaluate_sync(
                    evaluated.iterator,
                    num_microbatches=num_microbatches,
                    iteration=run.state.iteration,
                    collect_non_loss_data=True,
                )
        if functions.process is not None and dist.get_rank() == dist.get_world_size() - 1:
            functions.process(data, run.state.iteration, get_tensorboard_writer())
    for chunk in run.model:
        chunk.train()


def _report(
    run: TrainingRun, split: str, *, losses: dict[str, float], final: bool, set_name: str | None = None
) -> None:
    report = EvaluationReport(iteration=run.state.iteration, split=split, losses=losses, final=final, set_name=set_name)
    run.callbacks.on_evaluation_end(report)
