"""pretrain() and the training loop: what happens in a run, in order.

The parts are built in setup.py; schedules, optimizer and checkpoints are called, not implemented, here.
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
from torch import nn

from megatron.core.device.trace_ranges import trace_range
from megatron.core.enums import ModelType
from megatron.core.optimizer.param_groups import ConfigOverrides
from megatron.training.arguments import config_from_args
from megatron.training.callbacks import Callback, RunStart, StepReport
from megatron.training.config import TrainingConfig
from megatron.training.console import print_rank_0
from megatron.training.errors import message_for_other_ranks
from megatron.training.evaluation import evaluate_test, evaluate_validation
from megatron.training.exit_conditions import ExitConditions, ExitReason
from megatron.training.failure_board import FailureBoard
from megatron.training.flops import num_floating_point_operations
from megatron.training.initialize import initialize_megatron, leave_process_group, read_arguments
from megatron.training.recovery import (
    NON_FINITE,
    check_weight_hashes,
    go_back_from_non_finite,
    leave_out_batches,
    skip_step,
    watch_loss,
)
from megatron.training.run import TrainingRun
from megatron.training.setup import get_model, setup_data, setup_model_and_optimizer, setup_run
from megatron.training.step_statistics import raise_non_finite_loss

__all__ = ["get_model", "num_floating_point_operations", "pretrain", "setup_model_and_optimizer", "train", "train_step"]


def pretrain(
    train_valid_test_dataset_provider: Callable[[list[int]], Sequence[Any]],
    model_provider: Callable[..., nn.Module],
    model_type: ModelType,
    forward_step_func: Callable[..., Any],
    *,
    extra_args_provider: Callable[[Any], Any] | None = None,
    args_defaults: dict[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    config_overrides: ConfigOverrides | None = None,
    argv: Sequence[str] | None = None,
    print_plan: Callable[..., None] | None = None,
) -> None:
    """Trains, or under --skip-train only evaluates, the model of the command line; the main program of a script.

    train_valid_test_dataset_provider: maps the numbers of train, valid and test samples to as many datasets.
    model_provider: maps (pre_process, post_process) to a module. forward_step_func: maps (data_iterator, model) to
    (output, loss function). config_overrides: learning rates and weight decays that differ for some parameters.
    print_plan: megatron.planner.print_plan, which --dry-run calls instead of training; without it the script has no
    --dry-run, and the flag raises ValueError.
    """
    if model_type is not ModelType.encoder_or_decoder:
        raise ValueError(f"model_type is {model_type}: only ModelType.encoder_or_decoder is available")
    # Looked for in the words themselves: a plan joins no group of processes.
    if "--dry-run" in (sys.argv[1:] if argv is None else argv):
        words = sys.argv[1:] if argv is None else argv
        if print_plan is None:
            raise ValueError(
                "--dry-run: this script gives pretrain() no planner; must be "
                "pretrain(..., print_plan=megatron.planner.print_plan)"
            )

        def read(further: Sequence[str] = ()) -> argparse.Namespace:
            return read_arguments(extra_args_provider, args_defaults, argv=[*words, *further])

        print_plan(
            read(), model_provider, reread=read, forward_step_func=forward_step_func, config_overrides=config_overrides
        )
        return
    with ExitStack() as afterwards, FailureBoard(describe=message_for_other_ranks, leave=leave_process_group) as board:
        args = initialize_megatron(extra_args_provider, args_defaults, argv=argv, board=board)
        exits = ExitConditions(config_from_args(TrainingConfig, args))
        # To the end: a signal after the last save must not end ranks that wait for each other in an evaluation.
        afterwards.enter_context(exits.listening())
        run = setup_run(
            args,
            model_provider,
            forward_step_func=forward_step_func,
            callbacks=callbacks,
            config_overrides=config_overrides,
        )
        run.exit_conditions = exits
        # When the other ranks know of an error: what a thread still writes takes a while.
        afterwards.callback(run.saves.abandon)
        setup_data(run, train_valid_test_dataset_provider, num_workers=args.num_workers)
        run.callbacks.on_train_start(RunStart(iteration=run.state.iteration, train_iters=run.train_iters))
        try:
            reason = None if run.training.skip_train else train(run)
            if reason is not ExitReason.SIGNAL and evaluate_validation(run, final=True):
                evaluate_test(run)  # who sends a signal does not wait for an evaluation
        finally:
            if run.steps.graph is not None:
                # The communicators of NCCL, which end next, would wait for graphs with their collectives for ever.
                run.steps.graph.drop_graphs()
            run.callbacks.on_run_end()


def train(run: TrainingRun) -> ExitReason | None:
    """Steps from the current iteration to the last, or to an exit condition, which it returns."""
    state, exits = run.state, run.exit_conditions
    started_at = state.iteration
    reason: ExitReason | None = None
    with exits.listening():
        # One that came while the run was set up, or with the evaluation that the run before owed.
        if exits.signalled_anywhere_sync() or (run.owes_evaluation and not evaluate_validation(run)):
            reason = ExitReason.SIGNAL
        while state.iteration < run.train_iters and reason is None:
            run.callbacks.on_step_start(state.iteration)
            step = _step_or_go_back(run)
            if step is None:
                continue
            reason = _end_step(run, step[0], reason=step[1])
            if run.is_due(run.checkpoint.save_interval):
                run.save_checkpoint()
            run.saves.poll()
            exits.warn_of_slow_save(step_seconds=step[0].seconds, save_seconds=run.saves.seconds)
        if state.iteration != started_at:
            run.save_last_checkpoint()
    run.callbacks.on_train_end()
    if started_at >= run.train_iters:
        print_rank_0(f"  nothing to train: iteration {started_at} of --train-iters {run.train_iters} is reached")
    if reason is not None:
        print_rank_0(f"  exiting at iteration {state.iteration}: {reason.value}")
    return reason


def _step_or_go_back(run: TrainingRun) -> tuple[StepReport, ExitReason | None] | None:
    """A training step; None where it was so bad that the run has gone back to a checkpoint."""
    leave_out_batches(run)
    try:
        report, reason = train_step(run)
    except NON_FINITE as error:
        if run.faults.non_finite_policy != "rewind":
            raise
        go_back_from_non_finite(run, error)
        return None
    return None if watch_loss(run, report) else (report, reason)


def _end_step(run: TrainingRun, report: StepReport, *, reason: ExitReason | None) -> ExitReason | None:
    """Finishes a step before its checkpoint; returns why the run is to end, if it is."""
    if run.exit_conditions.at_interval(run.state.iteration):
        reason = reason or ExitReason.INTERVAL
    is_last = reason is not None or run.state.iteration == run.train_iters
    run.callbacks.on_step_end(run.measured(replace(report, is_last=is_last)))
    if run.owes_evaluation and reason is not ExitReason.SIGNAL and not evaluate_validation(run):
        reason = ExitReason.SIGNAL
    interval, is_last = run.faults.check_weight_hash_across_dp_replicas_interval, is_last or reason is not None
    # Also before a save: what a run goes on from must not be weights that have come apart.
    if run.is_due(interval) or (interval is not None and (is_last or run.is_due(run.checkpoint.save_interval))):
        check_weight_hashes(run)
    return reason


@trace_range("train_step")
def train_step(run: TrainingRun) -> tuple[StepReport, ExitReason | None]:
    """One optimizer step over a global batch; returns what it did and why any rank wants to stop.

    Raises NonFiniteLossError or NonFiniteGradientError on every rank, before anything is updated, unless the check is
    off or the step may be left out.
    """
    start = time.perf_counter()
    assert run.optimizer is not None and run.scheduler is not None, "--skip-train never steps"
    # Of this step: the schedule moves the rates on, and counting the step the batch size.
    rates, batch_size = dict(run.optimizer.param_groups[0]), run.global_batch_size
    decoupled_learning_rate = run.optimizer.decoupled_learning_rate
    run.optimizer.zero_grad()

    # Runs that are void are over when this returns, and have left nothing behind.
    reports, statistics = run.steps.train_sync(
        run.train_iterator,
        num_microbatches=run.num_microbatches,
        iteration=run.state.iteration + 1,
        exit_reasons=run.exit_conditions.local_reasons,
    )
    loss_scale = run.optimizer.get_loss_scale()
    try:
        # The losses first: a bad one names its microbatch, which the gradients it spoils cannot.
        if statistics.nan and run.training.check_for_nan_in_loss_and_grad:
            raise_non_finite_loss(reports, dist.group.WORLD, iteration=run.state.iteration + 1)
        updated, grad_norm, num_zeros = run.steps.update_sync()
    except NON_FINITE as error:
        skip_step(run, error)
        updated, grad_norm, num_zeros = False, math.nan, None
    if updated:
        run.scheduler.step(increment=batch_size)
    run.count_step(updated=updated, nan=statistics.nan)

    report = StepReport(
        iteration=run.state.iteration,
        losses=statistics.losses,
        grad_norm=grad_norm,
        num_zeros=None if num_zeros is None else int(num_zeros),
        learning_rate=rates["lr"],
        loss_scale=float(loss_scale),
        global_batch_size=batch_size,
        consumed_samples=run.state.consumed_train_samples,
        tokens=batch_size * run.args.seq_length,
        seconds=time.perf_counter() - start,
        skipped=not updated,
        nan=statistics.nan,
        weight_decay=rates["weight_decay"],
        per_layer=statistics.per_layer,
        expert_load=statistics.expert_load,
        decoupled_learning_rate=decoupled_learning_rate,
    )
    return report, statistics.exit_reason
