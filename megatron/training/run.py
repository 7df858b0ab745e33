"""Defines TrainingRun, the components and counters of a run. setup.py builds it, and functions receive it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron.core.datasets.data_order import SplitSizes
from megatron.core.datasets.padding import PaddingCount
from megatron.core.dist_checkpointing import PendingSave, StagingMemory
from megatron.core.num_microbatches_calculator import NumMicroBatches, update_num_microbatches
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.timers import Timers
from megatron.training.callbacks import CallbackList, StepReport
from megatron.training.checkpointing import begin_save_checkpoint, load_run
from megatron.training.checkpointing.saving import RunSaves
from megatron.training.checkpointing.train_state import TrainState
from megatron.training.config import CheckpointConfig, FaultConfig, RunConfig, TrainingConfig
from megatron.training.data_parallel import restore_params
from megatron.training.gpt_builder import parts_of_gpt
from megatron.training.meters.meters import Meter
from megatron.training.step.exit_conditions import ExitConditions
from megatron.training.step.expert_memory import ExpertMemory
from megatron.training.step.step_runner import StepRunner

# More consecutive skipped steps than this indicate a broken model rather than bad data.
_MAX_SKIPPED_IN_A_ROW = 10


@dataclass
class Recovery:
    """Bad steps and rewinds since the start of the process, equal on all ranks. recovery.py updates them.

    skipped_positions: data positions, in samples, of batches to skip. num_skipped_in_a_row: number of bad steps since
    the last good step.
    """

    config: FaultConfig = field(default_factory=FaultConfig)
    num_rewinds: int = 0
    num_skipped_in_a_row: int = 0
    skipped_positions: set[int] = field(default_factory=set)

    def may_skip(self) -> bool:
        """Returns whether the latest bad step may be skipped. Call it after counting the step."""
        return self.config.non_finite_policy == "skip" and self.num_skipped_in_a_row <= _MAX_SKIPPED_IN_A_ROW

    def may_rewind(self) -> bool:
        """Returns whether the run may rewind to a checkpoint once more."""
        return self.num_rewinds < self.config.max_rewinds


@dataclass(frozen=True, kw_only=True)
class NonLossData:
    """A script's functions for evaluation data other than losses, as in Megatron-LM.

    collect: maps the model's chunks to data, on every rank. If only `process` is given, one more global batch runs
    forward (with --full-validation, all global batches), the loss function is called with non_loss_data=True, and the
    data are its results on the last pipeline stage. process: called on the last rank with the data, the iteration and
    get_tensorboard_writer().
    """

    collect: Callable[[Sequence[nn.Module]], Any] | None = None
    process: Callable[[Any, int, Any], object] | None = None

    @property
    def reads_batch(self) -> bool:
        """Whether an evaluation reads an additional global batch for non-loss data."""
        return self.collect is None and self.process is not None


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """A data set for evaluations.

    iterator: None on ranks that read no batches. name: shown in logs if there are several validation sets.
    num_microbatches: number of microbatches per rank, for each global batch of an evaluation.
    """

    iterator: Iterator[Any] | None
    num_microbatches: Sequence[int]
    name: str | None = None


@dataclass(kw_only=True)
class TrainingRun:
    """The components and counters of one run. The data iterators are set once the data position is known.

    config: all settings, which follow changes that a script makes to its arguments. training, checkpoint, faults:
    settings as they were when the run was set up, which determine its steps.
    """

    config: RunConfig
    training: TrainingConfig
    checkpoint: CheckpointConfig
    faults: FaultConfig
    model: list[nn.Module]  # the chunks of this rank's pipeline stage
    optimizer: MegatronOptimizer | None  # None for a run that only evaluates
    scheduler: OptimizerParamScheduler | None
    batches: NumMicroBatches
    steps: StepRunner
    expert_memory: ExpertMemory | None  # None unless expert buffers have a fixed size
    groups: ProcessGroupCollection
    device: torch.device
    state: TrainState
    callbacks: CallbackList
    exit_conditions: ExitConditions
    saves: RunSaves
    recovery: Recovery = field(default_factory=Recovery)
    timers: Timers = field(default_factory=Timers)
    meters: Sequence[Meter] = ()
    non_loss_data: NonLossData = field(default_factory=NonLossData)
    datasets: Sequence[Any] = ()  # train, valid and test
    datasets_provider: Callable[[Any], Sequence[Any]] | None = None  # None until the data are set up
    split_sizes: SplitSizes = field(default_factory=lambda: SplitSizes([]))  # of the datasets
    num_workers: int = 0  # worker processes that read the datasets
    train_iterator: Iterator[Any] | None = None
    valid_sets: Sequence[EvaluationSet] = ()
    test_set: EvaluationSet | None = None

    @property
    def global_batch_size(self) -> int:
        """Samples of the next training step over all ranks. May depend on the number of consumed samples."""
        return self.batches.running.size_at(self.state.consumed_train_samples)

    @property
    def num_microbatches(self) -> int:
        """Forward and backward passes of one rank in the next training step."""
        return self.batches.num_microbatches(self.state.consumed_train_samples)

    @property
    def evaluation_batch_size(self) -> int:
        """Samples per evaluation batch over all ranks; by default the final size of the training batches."""
        return self.training.eval_global_batch_size or self.batches.running.final_size

    @property
    def evaluation_microbatches(self) -> int:
        """Forward passes of one rank for an evaluation batch."""
        return self.evaluation_batch_size // self.batches.samples_per_round

    @property
    def train_iters(self) -> int:
        """Number of training steps, and therefore the number of the last step."""
        return self.training.train_iters or 0

    def is_due(self, interval: int | None) -> bool:
        """Returns whether an action that runs every `interval` steps is due after this step. False for None."""
        return interval is not None and self.state.iteration % interval == 0

    @property
    def owes_evaluation(self) -> bool:
        """Whether an evaluation is due but was not done, because a signal stopped the run before."""
        training, state = self.training, self.state
        is_due = self.is_due(training.eval_interval) and state.evaluated_iteration < state.iteration
        return is_due and state.iteration >= (training.start_eval_at_iter or 0)

    def count_step(self, *, updated: bool, nan: bool, padding: PaddingCount) -> None:
        """Advances the counters by one training step.

        updated, nan: whether it updated weights, or had a NaN loss. padding: padding of its global batch.
        """
        self.count_iteration()
        self.state.consumed_padding += padding
        self.state.skipped_iterations += not updated
        self.state.nan_iterations += nan

    def count_iteration(self) -> None:
        """Advances the step and the data position by one global batch, even if it was not trained on."""
        self.state.iteration += 1
        self.state.consumed_train_samples += self.global_batch_size
        update_num_microbatches(self.state.consumed_train_samples)

    def measured(self, report: StepReport) -> StepReport:
        """Adds the measurements that flags request to a report. Collective."""
        for meter in self.meters:
            report = meter.measure(report)
        return report

    def load_checkpoint(self, config: CheckpointConfig | None = None) -> None:
        """Loads the checkpoint of --load in place, if given. Collective.

        config: checkpoint settings to use instead of the run's settings.
        """
        load_run(
            self.model,
            self.optimizer,
            self.scheduler,
            train_state=self.state,
            run_config=self.config,
            config=config or self.checkpoint,
            pg_collection=self.groups,
            build_parts=parts_of_gpt,
        )
        self.move_position(self.state.consumed_train_samples)
        self.config.values["consumed_valid_samples"] = self.state.consumed_valid_samples

    def move_position(self, consumed_train_samples: int) -> None:
        """Sets the data position, in consumed samples, and updates batch size, train_iters and scripts' arguments."""
        self.state.consumed_train_samples = consumed_train_samples
        update_num_microbatches(consumed_train_samples)
        train_samples = self.training.train_samples
        if train_samples is not None:
            # Earlier steps may have used batch sizes that differ from this run's sizes.
            left = self.batches.running.iterations_within(train_samples, consumed=consumed_train_samples)
            self.training.train_iters = self.config.values["train_iters"] = self.state.iteration + left
        # Scripts read these from the arguments, as in Megatron-LM.
        self.config.values["iteration"] = self.state.iteration
        self.config.values["consumed_train_samples"] = consumed_train_samples

    def save_checkpoint(self) -> None:
        """Writes a checkpoint to --save, if given, or starts writing it with --async-save. Collective.

        If the checkpoint cannot be written, prints a warning and continues.
        """
        if self.checkpoint.save is not None:
            self.saves.save(self.state.iteration, self._begin_save)

    def save_last_checkpoint(self) -> None:
        """Writes a checkpoint to --save, unless the newest checkpoint contains the current state. Collective.

        Raises CheckpointError on every rank if the checkpoint cannot be written.
        """
        self.saves.finish()
        if self.checkpoint.save is not None and self.saves.latest != self.state.iteration:
            self.saves.save_last(self.state.iteration, self._begin_save)

    def _begin_save(self, staging: StagingMemory | None) -> PendingSave:
        if self.expert_memory is not None:
            self.state.learned_sizes = self.expert_memory.learned_sync()
        restore_params(self.model)
        return begin_save_checkpoint(
            self.state.iteration,
            self.model,
            optimizer=self.optimizer,
            opt_param_scheduler=self.scheduler,
            train_state=self.state,
            run_config=self.config,
            config=self.checkpoint,
            pg_collection=self.groups,
            staging=staging,
        )
