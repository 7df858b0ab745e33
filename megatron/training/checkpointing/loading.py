"""Loads a training run: chooses a checkpoint, determines what the flags restore, and fills the run's objects.

saving.py defines the content of checkpoints. core/dist_checkpointing reads the tensors, folder.py finds the folders,
run_values.py checks the arguments, and partial_load.py handles models that differ on purpose.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import dist_checkpointing
from megatron.core.datasets.data_order import DataOrder
from megatron.core.dist_checkpointing import (
    ShardedTensor,
    VerifiedCheckpoint,
)
from megatron.core.dist_checkpointing.errors import one_error_everywhere
from megatron.core.group_collectives import RemoteRankError, all_ranks_agree, union_over_model
from megatron.core.optimizer.state_dict import is_state, parameter_key
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.callbacks.lines import print_rank_0
from megatron.training.checkpointing import legacy, megatron_core
from megatron.training.checkpointing.folder import (
    CheckpointFormat,
    FoundCheckpoint,
    carry_companions,
    find_checkpoint,
    is_same_folder,
    write_tracker,
)
from megatron.training.checkpointing.legacy_files import LegacyFiles
from megatron.training.checkpointing.megatron_core_files import MegatronCoreFiles
from megatron.training.checkpointing.megatron_objects import MEGATRON
from megatron.training.checkpointing.partial_load import (
    EMBEDDING,
    OUTPUT,
    PartialLoadPlan,
    Strictness,
    Tying,
    check_unused,
    lacking_keys,
    require_same_two,
)
from megatron.training.checkpointing.rng_state import load_rng, rng_sharded_state, seed_ranks
from megatron.training.checkpointing.run_state import (
    CheckpointedOptimizer,
    CheckpointedScheduler,
    ModelWeights,
    RunState,
    is_rank_0,
)
from megatron.training.checkpointing.run_values import (
    check_same_optimizer,
    checked_run_values,
    describe_schedule,
    load_run_values,
    model_arguments,
    noted_differences,
    order_of_arguments,
)
from megatron.training.checkpointing.train_state import TrainState
from megatron.training.config import CheckpointConfig, RunConfig


def load_run(
    model: Sequence[torch.nn.Module],
    optimizer: CheckpointedOptimizer | None,
    opt_param_scheduler: CheckpointedScheduler | None,
    *,
    train_state: TrainState,
    run_config: RunConfig,
    config: CheckpointConfig,
    pg_collection: ProcessGroupCollection | None = None,
    build_parts: legacy.BuildParts | None = None,
) -> int:
    """Restores a run from config.load: fills all objects in place and returns the iteration.

    Collective over all ranks. Call it after building the optimizer. If the folder contains no checkpoint, loads the
    weights of config.pretrained_checkpoint. Without either, prints one line on rank 0, changes nothing and returns 0,
    or raises ValueError under --exit-on-missing-checkpoint. Raises on every rank, with no tensor changed, if the
    checkpoint is damaged, belongs to a different model, or lacks requested state. build_parts: builds the model parts
    of any rank in any layout on the meta device; required for checkpoints in Megatron's formats.
    """
    open_found = partial(_open, run_config=run_config, config=config, build_parts=build_parts)
    found, verified = _find(config, open_found)
    adopts_schedule = bool(run_config.scheduler.use_checkpoint_opt_param_scheduler)
    if found is None and config.pretrained_checkpoint is not None:
        # The same command adopts the schedule once it finds its own checkpoint.
        config, adopts_schedule = _pretrained(config), False
        found, verified = _find(config, open_found, flag="--pretrained-checkpoint")
    if found is None or verified is None:
        return 0
    # Arguments are checked before tensors, because "--hidden-size is 128 here" is clearer than a shape mismatch.
    with all_ranks_agree():
        common = checked_run_values(found.path, verified.common)
        plan = PartialLoadPlan.of(run_config, common["args"], may_upcycle=config.moe_use_upcycling)
        scope = _load_scope(
            found, common, config=config, has_optimizer=optimizer is not None, weights_alone=plan.experts
        )
        plan.check_position(restored=scope.position)
        if scope.optimizer:
            check_same_optimizer(run_config.values, common["args"])
        # Loaded before the tensors, because a schedule mismatch is a frequent mistake and quick to detect.
        if opt_param_scheduler is not None:
            _load_schedule(
                opt_param_scheduler,
                common.get("scheduler"),
                scope=scope,
                adopts=adopts_schedule,
            )
    run = RunState(model, optimizer, opt_param_scheduler, pg_collection or existing_process_groups())
    replicas = run.groups.dp_cp if config.ckpt_fully_parallel_load else None
    tying = Tying.between(common["args"], run_config.values)
    source = _Source(verified, replicas, Strictness(config.dist_ckpt_strictness), plan, tying)
    _load_tensors(run, source, scope=scope, frozen=set(common["frozen"]))
    if scope.rng and not source.holds(rng_sharded_state(run.groups)):
        _reseed(run.groups, seed=run_config.training.seed, iteration=found.iteration)
    if scope.optimizer and optimizer is not None:
        optimizer.load_state_dict(common["optimizer"])
    if scope.position:
        train_state.load_state_dict(common["train_state"])
        if train_state.data_order is None and train_state.iteration:
            train_state.data_order = _order_without_record(run_config, common)
        if optimizer is not None:
            _set_tracker_back(config, found.iteration)
    with all_ranks_agree():
        if config.save is not None and config.load is not None and is_rank_0():
            carry_companions(config.load, config.save)
    continues = optimizer is not None and scope.position
    noted = noted_differences(run_config.values, common["args"], trains=continues, optimizer=scope.optimizer)
    if noted:
        print_rank_0(f"  note: this run has other settings than the checkpoint's run: {', '.join(noted)}")
    weights_alone = "" if scope.position else ": weights only, training starts at iteration 0"
    print_rank_0(f"  successfully loaded checkpoint from {config.load} at iteration {found.iteration}{weights_alone}")
    return train_state.iteration


def _order_without_record(run_config: RunConfig, common: Mapping[str, Any]) -> DataOrder | None:
    """Returns the data order that follows from the arguments of a checkpoint's run, or None if they do not fix it."""
    stored = common["args"]
    # Versions that stored no order of the data read a step schedule as numbers of samples.
    is_older = "data_order" not in common["train_state"] and common.get("origin") != MEGATRON
    if is_older and stored.get("step_batch_size_schedule") is not None:
        print_rank_0(
            "  note: --step-batch-size-schedule counted samples in the version that wrote this checkpoint, and counts "
            f"tokens now: multiply thresholds without a suffix by --seq-length ({stored.get('seq_length')}) to "
            "continue its batch sizes"
        )
        return None
    return order_of_arguments(run_config.values, stored)


@dataclass(frozen=True)
class _Scope:
    """Selects the state that a load restores in addition to the weights."""

    position: bool
    optimizer: bool
    rng: bool


def _pretrained(config: CheckpointConfig) -> CheckpointConfig:
    """Returns settings that load only the weights of --pretrained-checkpoint, ignoring --ckpt-step."""
    step = config.ckpt_step if config.load is None else None
    return replace(config, load=config.pretrained_checkpoint, finetune=True, ckpt_step=step)


def _open(
    found: FoundCheckpoint,
    *,
    run_config: RunConfig,
    config: CheckpointConfig,
    build_parts: legacy.BuildParts | None,
) -> VerifiedCheckpoint:
    """Verifies and opens a checkpoint. Presents checkpoints in Megatron's formats under native keys. Collective."""
    if found.format is CheckpointFormat.OURS:
        return dist_checkpointing.verify(found.path)
    with all_ranks_agree():
        if build_parts is None:
            raise ValueError(
                f"{found.path} is in {found.format.value}: load it with pretrain(), or convert it (docs/checkpoints.md)"
            )
    config_of_model = partial(_config_of_model, run_config, may_upcycle=config.moe_use_upcycling)
    if found.format is CheckpointFormat.LEGACY:
        return _open_legacy(found.path, config_of_model, build_parts)
    return _open_megatron_core(found.path, config_of_model, build_parts)


def _config_of_model(run_config: RunConfig, values: Mapping[str, Any], *, may_upcycle: bool) -> RunConfig:
    """Returns the run's settings with the model arguments of the checkpoint. values: the checkpoint's values."""
    PartialLoadPlan.of(run_config, values["args"], may_upcycle=may_upcycle)
    # The checkpoint may lack experts or adapters on purpose, or tie its embeddings.
    return run_config.changed(**model_arguments(values["args"], here={}))


def _open_legacy(
    folder: Path,
    config_of_model: Callable[[Mapping[str, Any]], RunConfig],
    build_parts: legacy.BuildParts,
) -> VerifiedCheckpoint:
    """Opens a checkpoint in Megatron-LM's older format. Collective.

    config_of_model: maps the checkpoint's values to the settings of its model.
    """
    with all_ranks_agree():
        run_config = config_of_model(load_run_values(folder))
        files = LegacyFiles.open(folder)
    _note_unknown(folder, files.first.unknown)
    return legacy.as_checkpoint(files, run_config, build_parts)


def _open_megatron_core(
    folder: Path,
    config_of_model: Callable[[Mapping[str, Any]], RunConfig],
    build_parts: legacy.BuildParts,
) -> VerifiedCheckpoint:
    """Opens a checkpoint that Megatron-Core wrote. Collective.

    config_of_model: maps the checkpoint's values to the settings of its model.
    """
    with all_ranks_agree():
        files = MegatronCoreFiles.open(folder)
        values = checked_run_values(folder, megatron_core.values_of_files(files))
        run_config = config_of_model(values)
        rows = megatron_core.vocabulary_rows(files, num_tokens=run_config.gpt.unpadded_vocab_size)
        [model] = build_parts(run_config, padded_vocab_size=rows)
    _note_unknown(folder, files.unknown)
    has_masters = run_config.transformer.bf16 or run_config.transformer.fp16
    return megatron_core.as_checkpoint(files, model, values=values, with_masters=has_masters)


def _note_unknown(folder: Path, names: Sequence[str]) -> None:
    if names:
        print_rank_0(f"  note: {folder} also holds {megatron_core.named(names)}, which is not read")


def _find(
    config: CheckpointConfig, open_found: Callable[[FoundCheckpoint], VerifiedCheckpoint], *, flag: str = "--load"
) -> tuple[FoundCheckpoint | None, VerifiedCheckpoint | None]:
    """Finds the checkpoint in config.load on rank 0, and opens and verifies it on all ranks.

    flag: the flag that names the folder, for errors. Returns (None, None) if there is no checkpoint.
    """
    damaged: dict[int, str] = {}
    while config.load is not None:
        found = _found_by_rank_0(config, damaged, flag=flag)
        if found is None:
            weights = config.pretrained_checkpoint
            begin = "from scratch" if weights is None else f"with the weights of {weights}"
            print_rank_0(f"No checkpoint found in {config.load}: starting {begin}.")
            break
        try:
            verified = open_found(found)
        except (ValueError, OSError, RemoteRankError) as error:
            # A checkpoint that the user chose is never replaced with another. All ranks raise if any rank finds damage.
            if config.ckpt_step is not None or found.is_release or found.format is not CheckpointFormat.OURS:
                raise
            damaged[found.iteration] = str(error)
            continue
        if found.notice is not None:
            print_rank_0(found.notice)
        return found, verified
    return None, None


def _found_by_rank_0(config: CheckpointConfig, damaged: dict[int, str], *, flag: str) -> FoundCheckpoint | None:
    found: list[FoundCheckpoint | None] = [None]
    with all_ranks_agree():
        if is_rank_0():
            assert config.load is not None, "without --load there is no folder to search"
            found[0] = find_checkpoint(config.load, step=config.ckpt_step, damaged=damaged, flag=flag)
        # Under --finetune, ignoring a missing checkpoint would mean training from scratch.
        needed_by = next((name for name in ("exit_on_missing_checkpoint", "finetune") if vars(config)[name]), None)
        if is_rank_0() and found[0] is None and flag != "--load":
            raise ValueError(f"{flag} {config.load} holds no checkpoint: give the folder that a run wrote with --save")
        if is_rank_0() and found[0] is None and needed_by is not None and config.pretrained_checkpoint is None:
            raise ValueError(f"--{needed_by.replace('_', '-')}: no checkpoint found in --load {config.load}")
    # All ranks use rank 0's result, because the tracker may change in the meantime.
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    return found[0]


def _set_tracker_back(config: CheckpointConfig, iteration: int) -> None:
    """Resets the tracker to the checkpoint of --ckpt-step if the run saves to the folder it loads from. Collective.

    Restarts and rewinds load the latest checkpoint, which must not come from the abandoned part of the run. Not called
    by runs that only evaluate.
    """
    if config.ckpt_step is None:
        return
    with one_error_everywhere(f"cannot name iteration {iteration} in --save {config.save} as the latest", None):
        if is_rank_0() and config.save is not None and is_same_folder(config.load, config.save):
            write_tracker(config.save, iteration)


def _load_scope(
    found: FoundCheckpoint,
    common: dict[str, Any],
    *,
    config: CheckpointConfig,
    has_optimizer: bool,
    weights_alone: bool,
) -> _Scope:
    if config.finetune or found.is_release or weights_alone:
        return _Scope(position=False, optimizer=False, rng=False)
    # A run that only evaluates has no optimizer and draws no random numbers.
    with_optimizer = has_optimizer and not config.no_load_optim
    scope = _Scope(position=True, optimizer=with_optimizer, rng=has_optimizer and not config.no_load_rng)
    for name, wanted, flag in (("optimizer", scope.optimizer, "optim"), ("rng", scope.rng, "rng")):
        gets_fresh_seeds = name == "rng" and common.get("origin") == MEGATRON
        if wanted and not common["contents"][name] and not gets_fresh_seeds:
            reason = common.get("not_read", {}).get(name)
            why = f"the checkpoint holds no {name} state" if reason is None else f"{found.path}: {reason}"
            if found.format is CheckpointFormat.LEGACY:
                why = f"{found.path} is in {found.format.value}, from which {name} state is not read"
            raise ValueError(f"{why}: add --no-load-{flag}, or --finetune")
    return scope


def _load_schedule(
    scheduler: CheckpointedScheduler, stored: dict[str, Any] | None, *, scope: _Scope, adopts: bool
) -> None:
    """Restores the schedules of learning rate and weight decay with the optimizer, or alone if the run adopts them.

    stored: the checkpoint's schedule; None if it has none. adopts: --use-checkpoint-opt-param-scheduler. Raises
    ValueError if the run adopts a schedule that is not in the checkpoint, or does not continue its position.
    """
    if adopts and not scope.position:
        raise ValueError(
            "--use-checkpoint-opt-param-scheduler: only weights are loaded and training starts at iteration 0, where "
            "the checkpoint's schedule cannot continue; give the schedule's own flags instead"
        )
    if adopts and stored is None:
        raise ValueError(
            "--use-checkpoint-opt-param-scheduler: the checkpoint has no schedule (saved with --no-save-optim, or in a "
            "format from which it is not read); give the schedule's own flags instead"
        )
    if stored is not None and (scope.optimizer or adopts):
        given = scheduler.state_dict()
        scheduler.load_state_dict(stored)
        used = scheduler.state_dict()
        for whose, differences in (
            ("the checkpoint's (--use-checkpoint-opt-param-scheduler)", describe_schedule(given, used)),
            ("the command line's", describe_schedule(used, stored)),
        ):
            if differences:
                print_rank_0(f"  note: the schedule is {whose}: {', '.join(differences)}")
    elif scope.position:
        why = "the checkpoint has none" if scope.optimizer else "--no-load-optim"
        print_rank_0(f"  note: the schedules of learning rate and weight decay start at step 0 ({why})")


@dataclass(frozen=True)
class _Source:
    """A checkpoint, the group of ranks that reads it, and the handling of differences between the two models.

    Methods accept tensors under the run's keys, which `tying` maps to the checkpoint's keys.
    """

    checkpoint: VerifiedCheckpoint
    replicas: dist.ProcessGroup | None
    strictness: Strictness
    plan: PartialLoadPlan
    tying: Tying

    def load(self, tensors: list[ShardedTensor]) -> None:
        """Fills `tensors`, of any shape and dtype. Collective."""
        available, fill_rest = self.plan.substitute(tensors, self.checkpoint)
        dist_checkpointing.load_items(available, self.checkpoint, replicas=self.replicas)
        fill_rest()

    def holds(self, tensors: list[ShardedTensor]) -> bool:
        """Returns whether the checkpoint contains all of `tensors`, with equal shapes and dtypes."""
        stored = self.checkpoint.tensors
        return all(stored.get(tensor.key) == (tensor.global_shape, tensor.data.dtype) for tensor in tensors)


def _load_tensors(run: RunState, source: _Source, *, scope: _Scope, frozen: set[str]) -> None:
    """Restores weights and, depending on scope, optimizer state and random-number generators.

    frozen: keys of the parameters that were frozen in the checkpoint's run.
    """
    # A run that restores its optimizer must continue with bit-identical results. Weights alone may change precision.
    weights = ModelWeights(run.model, allow_cast=not scope.optimizer)
    rng = rng_sharded_state(run.groups) if scope.rng else []
    rng = rng if source.holds(rng) else []
    # A dense checkpoint lacks experts by design.
    lacking = set() if source.plan.experts else _lacking(run, source, weights=weights, scope=scope)
    wanted = [tensor for tensor in source.tying.with_stored_keys(weights.tensors) if tensor.key not in lacking] + rng
    if source.tying is not Tying.SAME:
        frozen = _change_tying(run, source, weights=weights, scope=scope, frozen=frozen)
    if run.optimizer is None or not scope.optimizer:
        source.load(wanted)
        weights.copy_to_shards()
        # The master weights still hold the model's initial values.
        if run.optimizer is not None:
            run.optimizer.reload_model_params()
    else:
        fresh = frozen | {parameter_key(key) if is_state(key) else key for key in lacking}
        trained = set(map(source.tying.stored_key, run.trained_keys()))
        # Rank 0 prints, although it may own none of these parameters.
        if union_over_model(frozen & trained, run.groups):
            print_rank_0("Parameters that were frozen in the checkpoint's run start with fresh optimizer state.")
        _load_with_optimizer(run, wanted, weights=weights, source=source, fresh=fresh)
    if rng:
        load_rng(rng)


def _change_tying(
    run: RunState, source: _Source, *, weights: ModelWeights, scope: _Scope, frozen: set[str]
) -> set[str]:
    """Checks and reports the conversion between tied and untied vocabulary weights. Collective.

    Raises ValueError if the two weights to be tied differ. Returns the keys of parameters that start with fresh
    optimizer state: `frozen`, and the tied weight if either of the two weights was frozen.
    """
    if source.tying is Tying.SPLIT:
        state = ", with its optimizer state" if scope.optimizer else ""
        print_rank_0(
            f"The checkpoint has one weight for embedding and output layer: both are initialized from it{state}."
        )
        return frozen
    wanted = weights.tensors
    if run.optimizer is not None and scope.optimizer:
        wanted = wanted + run.optimizer.sharded_state(run.pieces())
    require_same_two(wanted, source.checkpoint)
    print_rank_0(
        "The checkpoint has two equal weights for embedding and output layer: the tied weight is initialized from them."
    )
    return frozen | {EMBEDDING} if OUTPUT in frozen else frozen


def _lacking(run: RunState, source: _Source, *, weights: ModelWeights, scope: _Scope) -> set[str]:
    """Returns the keys that the checkpoint lacks and the load may skip. Raises ValueError if none may be skipped."""
    wanted = list(weights.tensors)
    asks = source.strictness.tolerates_lacking or source.strictness.checks_unused
    if asks and run.optimizer is not None and scope.optimizer:
        wanted += run.optimizer.sharded_state(run.pieces())
    wanted = source.tying.with_stored_keys(wanted)
    check_unused(wanted, source.checkpoint, strictness=source.strictness, optimizer=scope.optimizer)
    return lacking_keys(wanted, source.checkpoint, strictness=source.strictness)


def _load_with_optimizer(
    run: RunState, wanted: list[ShardedTensor], *, weights: ModelWeights, source: _Source, fresh: set[str]
) -> None:
    """Loads `wanted` and the optimizer state, except for the parameters in `fresh`, which start with fresh state."""
    assert run.optimizer is not None
    # The decision depends on the checkpoint alone, not on this rank's share of the state, because loading is
    # collective.
    if fresh:
        # The master weights of these parameters must be set from the loaded weights.
        source.load(wanted)
        weights.copy_to_shards()
        run.optimizer.reload_model_params()
    with run.optimizer.loading(run.pieces()) as state:
        known = [tensor for tensor in source.tying.with_stored_keys(state) if parameter_key(tensor.key) not in fresh]
        source.load([*wanted, *known])


def _reseed(groups: ProcessGroupCollection, *, seed: int, iteration: int) -> None:
    """Seeds the generators from the iteration, because the saved states belong to a different layout of ranks."""
    print_rank_0(
        "The checkpoint holds the random-number state of a different layout of ranks or of different devices: dropout "
        "continues with fresh seeds."
    )
    # Depends on the iteration, so that the dropout masks of step 0 do not repeat.
    seed_ranks(seed + 7_919 * iteration, groups)
