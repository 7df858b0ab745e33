"""Saves a training run: the content of its checkpoints, the tracker, and saves that fail or run in the background.

core/dist_checkpointing writes the tensors, loading.py restores them, and folder.py names and finds the folders.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import (
    CheckpointError,
    PendingSave,
    ReplicaWriters,
    ShardedTensor,
    StagingMemory,
)
from megatron.core.dist_checkpointing.errors import one_error_everywhere
from megatron.core.group_collectives import gather_objects, union_over_model
from megatron.core.optimizer.state_dict import fresh_state, parameter_key
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.callbacks.lines import print_rank_0
from megatron.training.checkpointing.folder import (
    clean_save_folder,
    iteration_folder,
    prune,
    write_tracker,
)
from megatron.training.checkpointing.rng_state import rng_sharded_state
from megatron.training.checkpointing.run_state import (
    CheckpointedOptimizer,
    CheckpointedScheduler,
    ModelWeights,
    RunState,
    frozen_tensors,
    is_rank_0,
)
from megatron.training.checkpointing.run_values import args_to_json
from megatron.training.checkpointing.train_state import TrainState
from megatron.training.config import CheckpointConfig, RunConfig

# Seconds that a failing rank waits for its own write and the other ranks' parts of the same checkpoint.
_ABANDON_SECONDS = 30.0


def save_run(
    iteration: int,
    model: Sequence[torch.nn.Module],
    optimizer: CheckpointedOptimizer | None,
    opt_param_scheduler: CheckpointedScheduler | None,
    *,
    train_state: TrainState,
    run_config: RunConfig,
    config: CheckpointConfig,
    pg_collection: ProcessGroupCollection | None = None,
) -> Path:
    """Writes config.save/iter_NNNNNNN and then the tracker. Returns the folder once it is complete on disk.

    Collective over all ranks. pg_collection: None means the groups of parallel_state. A failure raises on every rank
    and leaves earlier checkpoints and the tracker unchanged.
    """
    begin_save_checkpoint(
        iteration,
        model,
        optimizer=optimizer,
        opt_param_scheduler=opt_param_scheduler,
        train_state=train_state,
        run_config=run_config,
        config=config,
        pg_collection=pg_collection,
    ).finish()
    assert config.save is not None, "begin_save_checkpoint has checked it"
    return iteration_folder(config.save, iteration)


def begin_save_checkpoint(
    iteration: int,
    model: Sequence[torch.nn.Module],
    *,
    optimizer: CheckpointedOptimizer | None,
    opt_param_scheduler: CheckpointedScheduler | None,
    train_state: TrainState,
    run_config: RunConfig,
    config: CheckpointConfig,
    pg_collection: ProcessGroupCollection | None = None,
    staging: StagingMemory | None = None,
) -> PendingSave:
    """Starts the same save as save_run, and returns a pending save. Collective over all ranks.

    With `staging`, the state may change as soon as this function returns. Without `staging`, nothing is written before
    PendingSave.finish, and the state must not change until then. When the checkpoint is complete, the tracker is
    written and older checkpoints are deleted (see prune).
    """
    if config.save is None:
        raise ValueError("saving a checkpoint requires --save: give the folder for the checkpoints")
    save: str = config.save
    run = RunState(model, optimizer, opt_param_scheduler, pg_collection or existing_process_groups())
    tensors, values = _content(run, config)
    common = {
        "iteration": iteration,
        "train_state": train_state.state_dict(),
        "args": args_to_json(run_config.values),
        **values,
    }
    folder = iteration_folder(save, iteration)
    with one_error_everywhere(f"cannot save checkpoint {folder}", None):
        if is_rank_0():
            clean_save_folder(save)

    def make_latest() -> None:
        # Called on completion, because a tracker must never name an incomplete checkpoint.
        write_tracker(save, iteration)
        try:
            prune(save, latest=iteration, interval=config.save_retain_interval)
        except OSError as error:
            print_rank_0(f"WARNING: cannot delete an old checkpoint (--save-retain-interval): {error}")

    return dist_checkpointing.begin_save(
        tensors,
        folder,
        common=common,
        staging=staging,
        on_commit=make_latest,
        replicas=ReplicaWriters.SPREAD if config.ckpt_fully_parallel_save else ReplicaWriters.FIRST,
    )


def _content(run: RunState, config: CheckpointConfig) -> tuple[list[ShardedTensor], dict[str, Any]]:
    """Returns the tensors of the checkpoint, and the JSON values of its common file."""
    tensors, frozen = ModelWeights(run.model).tensors, run.frozen_keys()
    with_optimizer = run.optimizer is not None and not config.no_save_optim
    # Records which state is omitted, so that a load can name the required flag instead of missing tensors.
    values: dict[str, Any] = {"contents": {"optimizer": with_optimizer, "rng": not config.no_save_rng}}
    if run.optimizer is not None and with_optimizer:
        stepped, with_state = _optimizer_tensors(run, run.optimizer, has_frozen=bool(frozen))
        tensors += stepped
        frozen -= with_state
        values["optimizer"] = run.optimizer.common_state()
        values["scheduler"] = None if run.scheduler is None else run.scheduler.state_dict()
    if not config.no_save_rng:
        tensors += rng_sharded_state(run.groups)
    return tensors, {**values, "frozen": sorted(frozen)}


def _optimizer_tensors(
    run: RunState, optimizer: CheckpointedOptimizer, *, has_frozen: bool
) -> tuple[list[ShardedTensor], set[str]]:
    """Returns the optimizer's state tensors, and the keys of the parameters with state. Collective if has_frozen.

    Frozen parameters that share a stored tensor with trained parameters, such as experts, contribute fresh state,
    because the tensor is stored as a whole.
    """
    tensors = optimizer.sharded_state(run.pieces())
    if not has_frozen:
        return tensors, set()
    own = {(tensor.key, tensor.data.dtype) for tensor in tensors}
    # Includes the shards of all experts, on any rank.
    with_state = union_over_model(set().union(*gather_objects(own, run.groups.expt_dp)), run.groups)
    return tensors + fresh_state(frozen_tensors(run.model), with_state), {parameter_key(key) for key, _ in with_state}


class RunSaves:
    """Manages the saves of a run: at most one is pending, and a failed periodic save does not end training.

    All methods except `abandon` are collective. `save` and `save_last` first finish a pending save. on_save: called
    with the iteration on every rank, once the checkpoint is complete on disk.
    """

    def __init__(self, *, in_background: bool, on_save: Callable[[int], None]) -> None:
        self._staging = StagingMemory() if in_background else None
        self._on_save = on_save
        # Iteration, save, and start time.
        self._pending: tuple[int, PendingSave, float] | None = None
        # Iteration of the newest checkpoint that this run has written.
        self.latest: int | None = None
        # Seconds from the start of the last periodic save until it was on disk, including steps that ran meanwhile.
        self.seconds: float | None = None

    def save(self, iteration: int, begin: Callable[[StagingMemory | None], PendingSave]) -> None:
        """Writes or starts writing a periodic checkpoint. After a failure, prints a warning and training continues.

        begin: starts the save, with staging memory for saves in the background.
        """
        self.finish()
        start = time.perf_counter()
        try:
            self._pending = iteration, begin(self._staging), start
        except CheckpointError as error:
            _warn(error)
            return
        if self._staging is None:
            self.finish()
        else:
            print_rank_0(f"  scheduled an async checkpoint save at iteration {iteration:7d}")

    def save_last(self, iteration: int, begin: Callable[[StagingMemory | None], PendingSave]) -> None:
        """Writes the final checkpoint of a run. Raises CheckpointError on every rank if the save fails."""
        self.finish()
        # No staging copy, because no training remains that could overlap with the write.
        begin(None).finish()
        self._complete(iteration)

    def poll(self) -> None:
        """Finishes a pending save if its files are complete. Call it after each step; free if no save is pending."""
        if self._pending is not None and self._pending[1].ranks_are_done():
            self.finish()

    def finish(self) -> None:
        """Waits until a pending save is complete or has failed."""
        if self._pending is None:
            return
        (iteration, pending, start), self._pending = self._pending, None
        try:
            pending.finish()
        except CheckpointError as error:
            _warn(error)
        else:
            self.seconds = time.perf_counter() - start
            self._complete(iteration)

    def abandon(self) -> None:
        """Waits a limited time for a background save when an error ends the run. Not collective."""
        if self._pending is not None:
            self._pending[1].abandon(seconds=_ABANDON_SECONDS)

    def _complete(self, iteration: int) -> None:
        self.latest = iteration
        self._on_save(iteration)


def _warn(error: CheckpointError) -> None:
    print_rank_0(f"WARNING: {error}: earlier checkpoints are unchanged, and the next save will try again")
