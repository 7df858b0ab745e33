"""Evaluation: mean losses over a fixed number of batches, without gradients and with dropout off."""

from collections.abc import Iterator
from typing import Any

from torch.profiler import record_function

from megatron.training.callbacks import EvaluationReport
from megatron.training.run import TrainingRun
from megatron.training.step_statistics import total_reports


@record_function("evaluate")
def evaluate(run: TrainingRun, iterator: Iterator[Any], *, iterations: int) -> dict[str, float]:
    """Mean of each loss over `iterations` global batches; the model is left in training mode."""
    reports = []
    for chunk in run.model:
        chunk.eval()
    with run.timers.paused():
        for _ in range(iterations):
            reports += run.steps.evaluate_sync(
                iterator, num_microbatches=run.batches.final_num_microbatches, iteration=run.state.iteration
            )
    for chunk in run.model:
        chunk.train()
    return run.steps.statistics.reduce_sync(total_reports(reports)).losses


def evaluate_validation(run: TrainingRun, *, final: bool = False) -> None:
    """Evaluates the validation split and reports it; nothing happens for a run without one."""
    iterations = run.training.eval_iters
    if run.valid_iterator is None or iterations == 0:
        return
    run.callbacks.on_evaluation_start(run.state.iteration)
    losses = evaluate(run, run.valid_iterator, iterations=iterations)
    run.state.consumed_valid_samples += iterations * run.evaluation_batch_size
    run.state.evaluated_iteration = run.state.iteration
    _report(run, "validation", losses=losses, final=final)


def evaluate_test(run: TrainingRun) -> None:
    """Evaluates the test split and reports it; nothing happens for a run without one."""
    iterations = run.training.eval_iters
    if run.test_iterator is None or iterations == 0:
        return
    run.callbacks.on_evaluation_start(run.state.iteration)
    losses = evaluate(run, run.test_iterator, iterations=iterations)
    _report(run, "test", losses=losses, final=True)


def _report(run: TrainingRun, split: str, *, losses: dict[str, float], final: bool) -> None:
    report = EvaluationReport(iteration=run.state.iteration, split=split, losses=losses, final=final)
    run.callbacks.on_evaluation_end(report)
