"""Recovers from bad steps (non-finite losses or gradients, loss spikes): stops, skips or rewinds.

step/statistics.py detects non-finite losses, core/distributed/consistency.py non-finite gradients, and watch_loss loss
spikes.

[Note: rewinding] A run that rewinds loads its last checkpoint in place, like a resumed run, and repeats the steps up
to the bad step with bit-identical results. Skipped samples count as consumed: they advance the batch-size schedule and
--train-samples, but not the learning rate.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron.core.distributed import DistributedDataParallel, NonFiniteGradientError
from megatron.core.distributed.consistency import check_weight_hashes_sync
from megatron.core.group_collectives import any_rank_sync
from megatron.training.callbacks import StepReport
from megatron.training.callbacks.lines import print_rank_0
from megatron.training.checkpointing.folder import complete_iterations
from megatron.training.config import CONTINUE_RUN
from megatron.training.data_parallel import restore_params
from megatron.training.run import TrainingRun
from megatron.training.setup import reposition_data
from megatron.training.step.statistics import NonFiniteLossError

# Number of recent losses in the median, and the minimum number for detecting spikes.
WINDOW, _MIN_LOSSES = 100, 20

NON_FINITE = (NonFiniteLossError, NonFiniteGradientError)


class LossSpikeError(RuntimeError):
    """Raised on every rank after a loss spike if the run cannot rewind."""


def check_weight_hashes(run: TrainingRun) -> None:
    """Raises WeightMismatchError on every rank if replicas of the weights differ. Collective."""
    for chunk in run.model:
        if isinstance(chunk, DistributedDataParallel):
            # Sharded parameters may not have been gathered since the update.
            chunk.wait_params(chunk.module.parameters())
    restore_params(run.model)
    check_weight_hashes_sync(run.model, run.groups, iteration=run.state.iteration)


def skip_batches(run: TrainingRun) -> None:
    """Reads and discards batches at the current data position, as long as they are marked to be skipped."""
    while run.state.consumed_train_samples in run.recovery.skipped_positions:
        if run.train_iterator is not None:
            for _ in range(run.num_microbatches):
                next(run.train_iterator)
        run.move_position(run.state.consumed_train_samples + run.global_batch_size)


def skip_step(run: TrainingRun, error: RuntimeError) -> None:
    """Discards the gradients of a non-finite step and counts it as skipped. Raises `error` if that is not allowed."""
    run.recovery.num_skipped_in_a_row += 1
    if not run.recovery.may_skip():
        raise error
    run.steps.discard_gradients()
    print_rank_0(f"  iteration {run.state.iteration + 1} is skipped: {error}")


def rewind_from_non_finite(run: TrainingRun, error: RuntimeError) -> None:
    """Rewinds to the last checkpoint and marks this step's batch to be skipped. Raises `error` if it cannot rewind."""
    run.recovery.skipped_positions.add(run.state.consumed_train_samples)
    _rewind(run, error, skips="skipping the data of that step")


def watch_loss(run: TrainingRun, report: StepReport) -> bool:
    """Records the loss of a step. If it is a spike, rewinds and returns True. Collective if it rewinds."""
    if not report.skipped:
        run.recovery.num_skipped_in_a_row = 0
    factor, recent = run.recovery.config.loss_spike_rewind, run.state.recent_losses
    if factor is None or report.skipped or not report.losses:
        return False
    name, loss = next(iter(report.losses.items()))
    if not is_spike(loss, recent, factor=factor):
        run.state.recent_losses = [*recent, loss][-WINDOW:]
        return False
    error = LossSpikeError(
        f"{name} {loss:.6g} at iteration {report.iteration} is more than --loss-spike-rewind {factor:g} times the "
        f"median of the last {len(recent)} steps, {statistics.median(recent):.6g}"
    )
    _rewind(run, error, skips="skipping the data since then", position=run.state.consumed_train_samples)
    return True


def is_spike(loss: float, recent: Sequence[float], *, factor: float) -> bool:
    """Returns whether a loss exceeds `factor` times the median of recent losses. False for too few recent losses."""
    return len(recent) >= _MIN_LOSSES and loss > factor * statistics.median(recent)


def _positions_until(run: TrainingRun, end: int) -> set[int]:
    """Returns the first sample of each batch from the run's data position to `end`, to mark the batches as skipped."""
    positions, position = set(), run.state.consumed_train_samples
    while position < end:
        positions.add(position)
        position += run.batches.running.size_at(position)
    return positions


def _rewind(run: TrainingRun, error: RuntimeError, *, skips: str, position: int | None = None) -> None:
    """Loads the last checkpoint of --save. Raises `error` if that is not allowed or impossible. Collective.

    skips: words for the log about skipped data. position: data position at which to continue, in samples; None means
    the checkpoint's position.
    """
    recovery, save = run.recovery, run.checkpoint.save
    assert save is not None, "checked with the flags"
    if not recovery.may_rewind():
        raise type(error)(f"{error}. The run has already rewound {recovery.num_rewinds} times (--max-rewinds)")
    # A pending save may become the latest checkpoint.
    run.saves.finish()
    if not any(any_rank_sync(bool(complete_iterations(Path(save))))):
        raise type(error)(f"{error}. The run cannot rewind: it has not saved a checkpoint in --save {save} yet")
    recovery.num_rewinds += 1
    came_from, order = run.state.iteration, run.state.data_order
    run.steps.discard_gradients()
    run.load_checkpoint(replace(run.checkpoint, load=save, **CONTINUE_RUN))
    if position is not None:
        recovery.skipped_positions |= _positions_until(run, position)
        run.move_position(position)
    # The checkpoint may be that of an earlier process, from which this one has started a new order.
    run.state.data_order = order
    reposition_data(run)
    run.callbacks.on_rewind(run.state.iteration)
    print_rank_0(
        f"  {error}: rewinding from iteration {came_from} to {run.state.iteration}, {skips} (rewind "
        f"{recovery.num_rewinds} of at most {recovery.config.max_rewinds})"
    )
