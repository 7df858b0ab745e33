"""What a run does about a step that went wrong in its numbers: it ends, leaves the step out, or goes back.

How such a step is found: step_statistics.py (losses), core/distributed/consistency.py (gradients), and LossWatch here.

[Note: going back] A run that goes back loads its last checkpoint in place, as a resumed run does, and so computes the
steps up to the bad one again, bit for bit. Samples that are left out count as consumed: schedules by samples of
batches, and the end of a run in samples, move on with them; the learning rate does not.
"""

import statistics
from dataclasses import replace
from pathlib import Path

from megatron.core.distributed import DistributedDataParallel, NonFiniteGradientError
from megatron.core.distributed.consistency import check_weight_hashes_sync
from megatron.core.group_collectives import any_rank_sync
from megatron.training.callbacks import StepReport
from megatron.training.checkpointing.folder import complete_iterations
from megatron.training.console import print_rank_0
from megatron.training.recovery_state import WINDOW, LossSpikeError, is_spike
from megatron.training.run import TrainingRun
from megatron.training.setup import position_data
from megatron.training.step_statistics import NonFiniteLossError

NON_FINITE = (NonFiniteLossError, NonFiniteGradientError)


def check_weight_hashes(run: TrainingRun) -> None:
    """Raises WeightMismatchError on every rank where replicas of the weights have come apart. Collective."""
    for chunk in run.model:
        if isinstance(chunk, DistributedDataParallel):
            # Of sharded ones some may not have been gathered since the update.
            chunk.wait_params(chunk.module.parameters())
    check_weight_hashes_sync(run.model, run.groups, iteration=run.state.iteration)


def leave_out_batches(run: TrainingRun) -> None:
    """Reads past the batches that are next and are to be left out."""
    while run.state.consumed_train_samples in run.recovery.left_out:
        if run.train_iterator is not None:
            for _ in range(run.num_microbatches):
                next(run.train_iterator)
        run.move_position(run.state.consumed_train_samples + run.global_batch_size)


def skip_step(run: TrainingRun, error: RuntimeError) -> None:
    """Drops what a step with a loss or gradient that is not finite has computed; raises `error` where it may not."""
    run.recovery.num_skipped_in_a_row += 1
    if not run.recovery.may_skip():
        raise error
    run.steps.forget_gradients()
    print_rank_0(f"  iteration {run.state.iteration + 1} is skipped: {error}")


def go_back_from_non_finite(run: TrainingRun, error: RuntimeError) -> None:
    """Goes back to the last checkpoint, to leave out the batch of this step; raises `error` where it cannot."""
    run.recovery.left_out.add(run.state.consumed_train_samples)
    _go_back(run, error, leaves_out="the data of that step is left out")


def watch_loss(run: TrainingRun, report: StepReport) -> bool:
    """Notes the loss of a step; True where it is a spike, and the run has gone back. Collective then."""
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
    _go_back(run, error, leaves_out="the data since then is left out", position=run.state.consumed_train_samples)
    return True


def _positions_until(run: TrainingRun, end: int) -> set[int]:
    """Where the batches from the run's position to `end` begin, in samples: for a later return to this checkpoint."""
    found, position = set(), run.state.consumed_train_samples
    while position < end:
        found.add(position)
        position += run.batches.running.size_at(position)
    return found


def _go_back(run: TrainingRun, error: RuntimeError, *, leaves_out: str, position: int | None = None) -> None:
    """Loads the last checkpoint of --save; raises `error` if that may not be. Collective.

    position: where data goes on, in samples; None: as the checkpoint says.
    """
    recovery, save = run.recovery, run.checkpoint.save
    assert save is not None, "checked with the flags"
    if not recovery.may_go_back():
        raise type(error)(f"{error}. The run has gone back {recovery.num_rewinds} times already (--max-rewinds)")
    # One that is still being written is the one to load.
    run.saves.finish()
    if not any(any_rank_sync(bool(complete_iterations(Path(save))))):
        raise type(error)(f"{error}. The run cannot go back: it has saved no checkpoint in --save {save} yet")
    recovery.num_rewinds += 1
    came_from = run.state.iteration
    run.steps.forget_gradients()
    run.load_checkpoint(
        replace(run.checkpoint, load=save, finetune=False, ckpt_step=None, no_load_optim=False, no_load_rng=False)
    )
    if position is not None:
        recovery.left_out |= _positions_until(run, position)
        run.move_position(position)
    position_data(run)
    run.callbacks.on_rewind(run.state.iteration)
    print_rank_0(
        f"  {error}: going back from iteration {came_from} to {run.state.iteration}, {leaves_out} "
        f"(rewind {recovery.num_rewinds} of at most {recovery.config.max_rewinds})"
    )
