"""Evaluation: mean losses over a fixed number of batches, without gradients and with dropout off."""

from collections.abc import Iterator
from typing import Any

from megatron.core.device.trace_ranges import trace_range
from megatron.training.callbacks import EvaluationReport
from megatron.training.run import TrainingRun
from megatron.training.step_statistics import total_reports


@trace_range("evaluate")
def evaluate(run: TrainingRun, iterator: Iterator[Any], *, iterations: int) -> dict[str, float] | None:
    """Mean of each loss over `iterations` global batches; the model is left in training mode.

    None where the exit signal came meanwhile, on any rank: the rest of the batches is not read.
    """
    reports, is_broken_off = [], False
    for chunk in run.model:
        chunk.eval()
    with run.timers.paused():
        for _ in range(iterations):
            if is_broken_off := run.exit_conditions.signalled_anywhere_sync():
                break
            reports += run.steps.evaluate_sync(
                iterator, num_microbatches=run.batches.final_num_microbatches, iteration=run.state.iteration
            )
    for chunk in run.model:
        chunk.train()
    if is_broken_off:
        return None
    return run.steps.statistics.reduce_sync(total_reports(reports)).losses


def evaluate_validation(run: TrainingRun, *, final: bool = False) -> bool:
    """Evaluates the validation split and reports it; nothing happens for a run without one.

    False where the exit signal broke it off: it is then as if it had not begun, for the run that resumes.
    """
    iterations = run.training.eval_iters
    if run.valid_iterator is None or iterations == 0:
        return True
    run.callbacks.on_evaluation_start(run.state.iteration)
    losses = evaluate(run, run.valid_iterator, iterations=iterations)
    if losses is None:
        return False
    run.state.consumed_valid_samples += iterations * run.evaluation_batch_size
    run.state.evaluated_iteration = run.state.iteration
    _report(run, "validation", losses=losses, final=final)
    return True


def evaluate_test(run: TrainingRun) -> None:
    """Evaluates the test split and reports it; nothing happens for a run without one, or that gets the exit signal."""
    iterations = run.training.eval_iters
    if run.test_iterator is None or iterations == 0:
        return
    run.callbacks.on_evaluation_start(run.state.iteration)
    losses = evaluate(run, run.test_iterator, iterations=iterations)
    if losses is not None:
        _report(run, "test", losses=losses, final=True)


def _report(run: TrainingRun, split: str, *, losses: dict[str, float], final: bool) -> None:
    report = EvaluationReport(iteration=run.state.iteration, split=split, losses=losses, final=final)
    run.callbacks.on_evaluation_end(report)
