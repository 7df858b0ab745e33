"""Saving"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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
)
from megatron.training.checkpointing.run_values import args_to_json
from megatron.training.checkpointing.train_state import TrainState
from megatron.training.config import CheckpointConfig

# Of a rank that ends by an error: for what it is writing, and for the other ranks' parts of the same checkpoint.
_ABANDON_SECONDS = 30.0


def save_checkpoint(
    iteration: int,
    model: Sequence[torch.nn.Module],
    optimizer: CheckpointedOptimizer | None,
    opt_param_scheduler: CheckpointedScheduler | None,
    *,
    train_state: TrainState,
    args: argparse.Namespace,
    config: CheckpointConfig,
    pg_collection: ProcessGroupCollection | None = None,
) -> Path:
    """Writes config.save/iter_NNNNNNN and then the tracker; returns the folder, complete and on disk.

    Collective over all ranks. pg_collection: None is parallel_state's. After a failure, which every rank raises,
    earlier checkpoints and the tracker are as they were.
    """
    begin_save_checkpoint(
        iteration,
        model,
        optimizer=optimizer,
        opt_param_scheduler=opt_param_scheduler,
        train_state=train_state,
        args=args,
        config=config,
        pg_collection=pg_collection,
    ).finish()
    assert config.save is not None, "begin_save_checkpoint has asked"
    return iteration_folder(config.save, iteration)


def begin_save_checkpoint(
    iteration: int,
    model: Sequence[torch.nn.Module],
    *,
    optimizer: CheckpointedOptimizer | None,
    opt_param_scheduler: CheckpointedScheduler | None,
    train_state: TrainState,
    args: argparse.Namespace,
    config: CheckpointConfig,
    pg_collection: ProcessGroupCollection | None = None,
    staging: StagingMemory | None = None,
) -> PendingSave:
    """As save_checkpoint, up to where the state may change again with `staging`; else to where nothing is written.

    The tracker is written, and older checkpoints go, when this one is complete.
    """
    if config.save is None:
        raise ValueError("a checkpoint needs --save: give the folder for the checkpoints")
    save: str = config.save
    parts = RunState(model, optimizer, opt_param_scheduler, pg_collection or existing_process_groups())
    tensors, values = _content(parts, config)
    common = {"iteration": iteration, "train_state": train_state.state_dict(), "args": args_to_json(args), **values}
    folder = iteration_folder(save, iteration)
    with one_error_everywhere(f"cannot save checkpoint {folder}", None):
        if _rank() == 0:
            clean_save_folder(save)

    def make_latest() -> None:
        # Only when it is complete: a tracker must never name what is not.
        write_tracker(save, iteration)
        try:
            prune(save, latest=iteration, interval=config.save_retain_interval)
        except OSError as error:
            print_rank_0(f"WARNING: a checkpoint that --save-retain-interval does not keep cannot be deleted: {error}")

    return dist_checkpointing.begin_save(
        tensors,
        folder,
        common=common,
        staging=staging,
        on_commit=make_latest,
        replicas=ReplicaWriters.SPREAD if config.ckpt_fully_parallel_save else ReplicaWriters.FIRST,
    )


def _content(parts: RunState, config: CheckpointConfig) -> tuple[list[ShardedTensor], dict[str, Any]]:
    """All tensors of the checkpoint, and the JSON state of the same objects."""
    tensors, frozen = ModelWeights(parts.model).tensors, parts.frozen_keys()
    with_optimizer = parts.optimizer is not None and not config.no_save_optim
    # What is left out is written down, so that a load can say which flag it needs instead of naming tensors.
    values: dict[str, Any] = {"contents": {"optimizer": with_optimizer, "rng": not config.no_save_rng}}
    if parts.optimizer is not None and with_optimizer:
        stepped, with_state = _optimizer_tensors(parts, parts.optimizer, has_frozen=bool(frozen))
        tensors += stepped
        frozen -= with_state
        values["optimizer"] = parts.optimizer.state_dict()
        values["scheduler"] = None if parts.scheduler is None else parts.scheduler.state_dict()
    if not config.no_save_rng:
        tensors += rng_sharded_state(parts.groups)
    return tensors, {**values, "frozen": sorted(frozen)}


def _optimizer_tensors(
    parts: RunState, optimizer: CheckpointedOptimizer, *, has_frozen: bool
) -> tuple[list[ShardedTensor], set[str]]:
    """The optimizer's state, and the keys of the parameters that have some. Collective where has_frozen.

    With fresh state of frozen parameters that share a stored tensor with trained ones, as experts do: of a tensor for
    all of them, which is stored whole, some may be frozen.
    """
    tensors = optimizer.sharded_state(parts.pieces())
    if not has_frozen:
        return tensors, set()
    own = {(tensor.key, tensor.data.dtype) for tensor in tensors}
    # Of every expert's shards, wherever they are.
    of_all = union_over_model(set().union(*gather_objects(own, parts.groups.expt_dp)), parts.groups)
    return tensors + fresh_state(frozen_tensors(parts.model), of_all), {parameter_key(key) for key, _ in of_all}


class RunSaves:
    """Its methods are collective but for `abandon`; each of them first ends the save under way, if any.

    on_save: called with the iteration on every rank, once its checkpoint is complete and on disk.
    """

    def __init__(self, *, in_background: bool, on_save: Callable[[int], None]) -> None:
        self._staging = StagingMemory() if in_background else None
        self._on_save = on_save
        # Iteration, save, and when it began.
        self._pending: tuple[int, PendingSave, float] | None = None
        # The newest checkpoint that this run has written.
        self.latest: int | None = None
        # From the start of the last periodic save until it was on disk; in the background, steps ran meanwhile.
        self.seconds: float | None = None

    def save(self, iteration: int, begin: Callable[[StagingMemory | None], PendingSave]) -> None:
        """A checkpoint from which the run goes on: where it cannot be written, training does, and a line says why."""
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
        """The checkpoint that a run leaves behind: raises CheckpointError on every rank where it cannot be written."""
        self.finish()
        # Nothing is left to do meanwhile: no copy.
        begin(None).finish()
        self._note(iteration)

    def poll(self) -> None:
        """After each step: ends a save whose files are complete. Costs nothing where none is under way."""
        if self._pending is not None and self._pending[1].ranks_are_done():
            self.finish()

    def finish(self) -> None:
        """Waits until the save under way, if any, is complete, or has failed."""
        if self._pending is None:
            return
        (iteration, pending, start), self._pending = self._pending, None
        try:
            pending.finish()
        except CheckpointError as error:
            _warn(error)
        else:
            self.seconds = time.perf_counter() - start
            self._note(iteration)

    def abandon(self) -> None:
        """At the end of a run that an error has ended: what the threads are about to complete is not lost. Local."""
        if self._pending is not None:
            self._pending[1].abandon(seconds=_ABANDON_SECONDS)

    def _note(self, iteration: int) -> None:
        self.latest = iteration
        self._on_save(iteration)


def _warn(error: CheckpointError) -> None:
    print_rank_0(f"WARNING: {error}: earlier checkpoints are as they were, and the next save tries again")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
