"""Loading"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import dist_checkpointing
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
from megatron.training.checkpointing.folder import (
    FoundCheckpoint,
    carry_companions,
    find_checkpoint,
    is_same_folder,
    write_tracker,
)
from megatron.training.checkpointing.partial_load import (
    EMBEDDING,
    OUTPUT,
    NewParts,
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
)
from megatron.training.checkpointing.run_values import check_same_optimizer, load_run_values
from megatron.training.checkpointing.train_state import TrainState
from megatron.training.config import CheckpointConfig


def load_checkpoint(
    model: Sequence[torch.nn.Module],
    optimizer: CheckpointedOptimizer | None,
    opt_param_scheduler: CheckpointedScheduler | None,
    *,
    train_state: TrainState,
    args: argparse.Namespace,
    config: CheckpointConfig,
    pg_collection: ProcessGroupCollection | None = None,
) -> int:
    """Continues from config.load: fills all objects in place; returns the iteration.

    Collective over all ranks, after the optimizer is built. A folder without checkpoints gives 0, one line on rank 0
    and nothing changed, or ValueError under --exit-on-missing-checkpoint. Raises on every rank, with no tensor
    changed, if the checkpoint is damaged, of another model, or lacks what is asked for.
    """
    found, verified = _find(config)
    if found is None or verified is None:
        return 0
    # Arguments before tensors: "--hidden-size is 128 here" says more than two shapes.
    with all_ranks_agree():
        common = load_run_values(found.path)
        new_parts = NewParts.of(args, common["args"], may_upcycle=config.moe_use_upcycling)
        taken = _what_to_take(
            found, common, config=config, has_optimizer=optimizer is not None, weights_alone=new_parts.experts
        )
        new_parts.check_position(taken=taken.position)
        if taken.optimizer:
            check_same_optimizer(args, common["args"])
            # Before the tensors: a schedule that differs is a frequent mistake, and this is quick.
            _load_schedule(opt_param_scheduler, common["scheduler"])
    parts = RunState(model, optimizer, opt_param_scheduler, pg_collection or existing_process_groups())
    replicas = parts.groups.dp_cp if config.ckpt_fully_parallel_load else None
    tying = Tying.between(common["args"], vars(args))
    source = _Source(verified, replicas, Strictness(config.dist_ckpt_strictness), new_parts, tying)
    _load_tensors(parts, source, taken=taken, frozen=set(common["frozen"]))
    if taken.rng and not source.holds(rng_sharded_state(parts.groups)):
        _reseed(parts.groups, seed=args.seed, iteration=found.iteration)
    if taken.optimizer and optimizer is not None:
        optimizer.load_state_dict(common["optimizer"])
    if taken.position:
        train_state.load_state_dict(common["train_state"])
        if optimizer is not None:
            _set_tracker_back(config, found.iteration)
    _carry_companions(config)
    weights_alone = "" if taken.position else ": its weights alone, training starts at iteration 0"
    print_rank_0(f"  successfully loaded checkpoint from {config.load} at iteration {found.iteration}{weights_alone}")
    return train_state.iteration


def _carry_companions(config: CheckpointConfig) -> None:
    """What came with the model goes where the run saves. Collective."""
    with all_ranks_agree():
        if config.save is not None and config.load is not None and _rank() == 0:
            carry_companions(config.load, config.save)


@dataclass(frozen=True)
class _Taken:
    """What a load takes besides the weights."""

    position: bool
    optimizer: bool
    rng: bool


def _find(config: CheckpointConfig) -> tuple[FoundCheckpoint | None, VerifiedCheckpoint | None]:
    """What to load, as rank 0 sees it and after all ranks have verified it; None to start from scratch."""
    damaged: dict[int, str] = {}
    while config.load is not None:
        found = _found_by_rank_0(config, damaged)
        if found is None:
            print_rank_0(f"There is no checkpoint in {config.load}: starting from scratch.")
            break
        try:
            verified = dist_checkpointing.verify(found.path)
        except (ValueError, OSError, RemoteRankError) as error:
            # Who names a checkpoint wants that one. Every rank is here, whoever has found the damage.
            if config.ckpt_step is not None or found.is_release:
                raise
            damaged[found.iteration] = str(error)
            continue
        if found.notice is not None:
            print_rank_0(found.notice)
        return found, verified
    return None, None


def _found_by_rank_0(config: CheckpointConfig, damaged: dict[int, str]) -> FoundCheckpoint | None:
    found: list[FoundCheckpoint | None] = [None]
    with all_ranks_agree():
        if _rank() == 0:
            assert config.load is not None, "there is nothing to find without --load"
            found[0] = find_checkpoint(config.load, step=config.ckpt_step, damaged=damaged)
        # To finetune what is not there would be to train from scratch.
        needed_by = next((name for name in ("exit_on_missing_checkpoint", "finetune") if vars(config)[name]), None)
        if _rank() == 0 and found[0] is None and needed_by is not None:
            raise ValueError(f"--{needed_by.replace('_', '-')}: there is no checkpoint in --load {config.load}")
    # Rank 0's answer for all: a tracker that changes meanwhile must not split the ranks.
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    return found[0]


def _set_tracker_back(config: CheckpointConfig, iteration: int) -> None:
    """Names the checkpoint of --ckpt-step as the latest where the run saves into the same folder. Collective.

    Restarts, and steps that go back, load the latest: not one that came later in a run that this one leaves. Not for
    a run that only evaluates, which goes nowhere from here.
    """
    if config.ckpt_step is None:
        return
    with one_error_everywhere(f"cannot name iteration {iteration} in --save {config.save} as the latest", None):
        if _rank() == 0 and config.save is not None and is_same_folder(config.load, config.save):
            write_tracker(config.save, iteration)


def _what_to_take(
    found: FoundCheckpoint,
    common: dict[str, Any],
    *,
    config: CheckpointConfig,
    has_optimizer: bool,
    weights_alone: bool,
) -> _Taken:
    if config.finetune or found.is_release or weights_alone:
        return _Taken(position=False, optimizer=False, rng=False)
    # A run that only evaluates has no optimizer to fill and draws no random numbers.
    with_optimizer = has_optimizer and not config.no_load_optim
    taken = _Taken(position=True, optimizer=with_optimizer, rng=has_optimizer and not config.no_load_rng)
    for name, wanted, flag in (("optimizer", taken.optimizer, "optim"), ("rng", taken.rng, "rng")):
        if wanted and not common["contents"][name]:
            raise ValueError(f"the checkpoint holds no {name} state: add --no-load-{flag}, or --finetune")
    return taken


@dataclass(frozen=True)
class _Source:
    """A checkpoint and how it is read: by which ranks together, and what becomes of keys that are not shared.

    tying: tensors have the keys that it gives them.
    """

    checkpoint: VerifiedCheckpoint
    replicas: dist.ProcessGroup | None
    strictness: Strictness
    new_parts: NewParts
    tying: Tying

    def load(self, tensors: list[ShardedTensor]) -> None:
        """Fills `tensors`: any shape and dtype. Collective."""
        taken, fill_rest = self.new_parts.loadable(tensors, self.checkpoint)
        dist_checkpointing.load(taken, self.checkpoint, replicas=self.replicas)
        fill_rest()

    def holds(self, tensors: list[ShardedTensor]) -> bool:
        """Whether it has all of `tensors` in that shape and dtype."""
        stored = self.checkpoint.tensors
        return all(stored.get(tensor.key) == (tensor.global_shape, tensor.data.dtype) for tensor in tensors)


def _load_tensors(parts: RunState, source: _Source, *, taken: _Taken, frozen: set[str]) -> None:
    """Fills weights, optimizer and generators from the checkpoint, in that order of importance."""
    # With its optimizer a run continues exactly or not at all; weights alone may change precision.
    weights = ModelWeights(parts.model, allow_cast=not taken.optimizer)
    rng = rng_sharded_state(parts.groups) if taken.rng else []
    rng = rng if source.holds(rng) else []
    # Experts are lacking in a dense checkpoint, as is to be.
    lacking = set() if source.new_parts.experts else _lacking(parts, source, weights=weights, taken=taken)
    wanted = [tensor for tensor in source.tying.in_checkpoint(weights.tensors) if tensor.key not in lacking] + rng
    if source.tying is not Tying.SAME:
        frozen = _change_of_tying(parts, source, weights=weights, taken=taken, frozen=frozen)
    if parts.optimizer is None or not taken.optimizer:
        source.load(wanted)
        weights.take_loaded()
        # Masters still hold the weights that the model was initialised with.
        if parts.optimizer is not None:
            parts.optimizer.reload_model_params()
    else:
        fresh = frozen | {parameter_key(key) if is_state(key) else key for key in lacking}
        trained = set(map(source.tying.key_in_checkpoint, parts.trained_keys()))
        # Rank 0 speaks for all of them, and may have none of these itself.
        if union_over_model(frozen & trained, parts.groups):
            print_rank_0("Parameters that were frozen in the checkpoint's run start with fresh optimizer state.")
        _load_with_optimizer(parts, wanted, weights=weights, source=source, fresh=fresh)
    if rng:
        load_rng(rng)


def _change_of_tying(
    parts: RunState, source: _Source, *, weights: ModelWeights, taken: _Taken, frozen: set[str]
) -> set[str]:
    """Says what becomes of the vocabulary's weights, or refuses it by ValueError. Collective.

    Returns `frozen`, keys of parameters without state, with what has no state as one weight.
    """
    if source.tying is Tying.SPLIT:
        state = ", with its optimizer state" if taken.optimizer else ""
        print_rank_0(f"The checkpoint has one weight for embedding and output layer: both begin as it is{state}.")
        return frozen
    wanted = weights.tensors
    if parts.optimizer is not None and taken.optimizer:
        wanted = wanted + parts.optimizer.sharded_state(parts.pieces())
    require_same_two(wanted, source.checkpoint)
    print_rank_0(
        "The checkpoint has two weights for embedding and output layer, which are the same: one begins as they."
    )
    return frozen | {EMBEDDING} if OUTPUT in frozen else frozen


def _lacking(parts: RunState, source: _Source, *, weights: ModelWeights, taken: _Taken) -> set[str]:
    """Keys without which the load goes on. Raises ValueError for what --dist-ckpt-strictness forbids."""
    wanted = list(weights.tensors)
    asks = source.strictness.lets_lack or source.strictness.looks_for_unused
    if asks and parts.optimizer is not None and taken.optimizer:
        wanted += parts.optimizer.sharded_state(parts.pieces())
    wanted = source.tying.in_checkpoint(wanted)
    check_unused(wanted, source.checkpoint, strictness=source.strictness, optimizer=taken.optimizer)
    return lacking_keys(wanted, source.checkpoint, strictness=source.strictness)


def _load_schedule(scheduler: CheckpointedScheduler | None, state: dict[str, Any] | None) -> None:
    if scheduler is not None and state is not None:
        scheduler.load_state_dict(state)


def _load_with_optimizer(
    parts: RunState, wanted: list[ShardedTensor], *, weights: ModelWeights, source: _Source, fresh: set[str]
) -> None:
    """Loads `wanted` and the optimizer's tensors, but for parameters whose state begins anew."""
    assert parts.optimizer is not None
    # The checkpoint decides, not this rank's share of the state: loading is collective.
    if fresh:
        # Masters of these must come from the loaded weights.
        source.load(wanted)
        weights.take_loaded()
        parts.optimizer.reload_model_params()
    with parts.optimizer.loading(parts.pieces()) as state:
        known = [tensor for tensor in source.tying.in_checkpoint(state) if parameter_key(tensor.key) not in fresh]
        source.load([*wanted, *known])


def _reseed(groups: ProcessGroupCollection, *, seed: int, iteration: int) -> None:
    """Fresh seeds, other ones at each resume, where the saved generators belong to other ranks."""
    print_rank_0(
        "The checkpoint holds the random-number state of another layout of ranks or of other devices: "
        "dropout continues with fresh seeds."
    )
    # As a run starts, moved on by the iteration: the masks of step 0 must not come again.
    seed_ranks(seed + 7_919 * iteration, groups)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
