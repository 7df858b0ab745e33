"""Collects the state of a run for checkpoints as boxes of tensors: model weights, optimizer and scheduler.

rng_state.py handles random-number generators, and train_state.py the counters. Optimizers provide their own state.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.dist_checkpointing import (
    LogicalPiece,
    ShardedTensor,
    buffer_sharded_tensors,
    canonical_name,
    model_logical_pieces,
    model_sharded_tensors,
    sharded_tensors,
)
from megatron.core.dist_checkpointing.mapping import range_tensors
from megatron.core.distributed import TorchFullyShardedDataParallel
from megatron.core.group_collectives import union_over_model
from megatron.core.process_groups_config import ProcessGroupCollection


class CheckpointedOptimizer(Protocol):
    """Interface of optimizers for checkpoints: tensors by logical piece, and the remaining state as JSON values."""

    def sharded_state(self, model_pieces: dict[str, list[LogicalPiece]]) -> list[ShardedTensor]: ...
    def loading(self, model_pieces: dict[str, list[LogicalPiece]]) -> AbstractContextManager[list[ShardedTensor]]: ...
    def common_state(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
    def reload_model_params(self) -> None: ...


class CheckpointedScheduler(Protocol):
    """Interface of schedulers for checkpoints: state as JSON values."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class RunState:
    """The objects whose state a checkpoint stores, and their process groups."""

    model: Sequence[torch.nn.Module]
    optimizer: CheckpointedOptimizer | None
    scheduler: CheckpointedScheduler | None
    groups: ProcessGroupCollection

    def pieces(self) -> dict[str, list[LogicalPiece]]:
        """Returns the logical pieces of all parameters."""
        return {name: pieces for chunk in self.model for name, pieces in model_logical_pieces(chunk).items()}

    def frozen_keys(self) -> set[str]:
        """Returns the keys of all parameters in the model that the optimizer does not update. Collective."""
        # Determined by name, because ranks that hold only padding rows of a parameter must also know its key.
        return union_over_model(self._keys(trained=False), self.groups)

    def trained_keys(self) -> set[str]:
        """Returns the keys of this stage's parameters that the optimizer updates on at least one rank."""
        return self._keys(trained=True)

    def _keys(self, *, trained: bool) -> set[str]:
        pieces = self.pieces()
        named = (item for chunk in self.model for item in chunk.named_parameters())
        names = (canonical_name(name) for name, parameter in named if parameter.requires_grad == trained)
        return {piece.key for name in names for piece in pieces[name]}


class ModelWeights:
    """Parameters and buffers of model chunks, as the boxes that a checkpoint stores, in the dtype of the modules.

    tensors: boxes to save, or to load in place. If FSDP2 shards have a wider dtype than the modules, the boxes are
    copies. A load with the optimizer restores the shards themselves as its master weights. A load without the optimizer
    must call `copy_to_shards`.
    """

    def __init__(self, chunks: Sequence[nn.Module], *, allow_cast: bool = False) -> None:
        self.tensors: list[ShardedTensor] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for chunk in chunks:
            if isinstance(chunk, TorchFullyShardedDataParallel):
                self._add_ranges(chunk, allow_cast=allow_cast)
            else:
                self.tensors += model_sharded_tensors(chunk, allow_cast=allow_cast)

    def copy_to_shards(self) -> None:
        """Copies loaded boxes back to the FSDP2 shards that they were copied from."""
        for copy, flat in self._copies:
            flat.copy_(copy)

    def _add_ranges(self, chunk: TorchFullyShardedDataParallel, *, allow_cast: bool) -> None:
        pieces = model_logical_pieces(chunk)
        for weights in chunk.shard_weights():
            values, held = weights.values, weights.range
            if weights.model_dtype != values.dtype:
                values = values.to(weights.model_dtype)
                self._copies.append((values, weights.values))
            self.tensors += range_tensors(pieces[held.name], values, start=held.start, allow_cast=allow_cast)
        self.tensors += buffer_sharded_tensors(chunk, allow_cast=allow_cast)


def frozen_tensors(chunks: Sequence[nn.Module]) -> list[ShardedTensor]:
    """Returns views of this rank's parameters that no optimizer updates, of any shape and dtype."""
    tensors = []
    for chunk in chunks:
        pieces = model_logical_pieces(chunk)
        if isinstance(chunk, TorchFullyShardedDataParallel):
            for weights in chunk.shard_weights():
                if weights.is_frozen:
                    held = weights.range
                    tensors += range_tensors(pieces[held.name], weights.values, start=held.start)
            continue
        for name, param in chunk.named_parameters():
            if not param.requires_grad:
                tensors += sharded_tensors(pieces[canonical_name(name)], param.detach())
    return tensors


def is_rank_0() -> bool:
    """Returns whether this rank writes trackers and common files: rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0
