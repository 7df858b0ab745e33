"""RunState"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
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
    """What a checkpoint needs of an optimizer: tensors by logical piece, the rest as JSON."""

    def sharded_state(self, model_pieces: dict[str, list[LogicalPiece]]) -> list[ShardedTensor]: ...
    def loading(self, model_pieces: dict[str, list[LogicalPiece]]) -> AbstractContextManager[list[ShardedTensor]]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
    def reload_model_params(self) -> None: ...


class CheckpointedScheduler(Protocol):
    """What a checkpoint needs of a scheduler: its state as JSON."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class RunState:
    """The objects whose state a checkpoint holds."""

    model: Sequence[torch.nn.Module]
    optimizer: CheckpointedOptimizer | None
    scheduler: CheckpointedScheduler | None
    groups: ProcessGroupCollection

    def pieces(self) -> dict[str, list[LogicalPiece]]:
        """Logical pieces of all parameters."""
        return {name: pieces for chunk in self.model for name, pieces in model_logical_pieces(chunk).items()}

    def frozen_keys(self) -> set[str]:
        """Keys of the parameters that the optimizer does not step, on any rank or stage. Collective."""
        # By name: a rank may hold nothing of a parameter but rows of padding, and has to know of it all the same.
        return union_over_model(self._keys(trained=False), self.groups)

    def trained_keys(self) -> set[str]:
        """Keys of this stage's parameters that the optimizer steps, whoever owns their state."""
        return self._keys(trained=True)

    def _keys(self, *, trained: bool) -> set[str]:
        pieces = self.pieces()
        named = (item for chunk in self.model for item in chunk.named_parameters())
        names = (canonical_name(name) for name, parameter in named if parameter.requires_grad == trained)
        return {piece.key for name in names for piece in pieces[name]}


class ModelWeights:
    """tensors: to save, or to load in place; all in the dtype that modules compute in.

    Where shards are kept in more digits than that, the boxes are copies: those of the optimizer's masters, which are
    the shards, count for a run that goes on. For others, `take_loaded`.
    """

    def __init__(self, chunks: Sequence[nn.Module], *, allow_cast: bool = False) -> None:
        self.tensors: list[ShardedTensor] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for chunk in chunks:
            if isinstance(chunk, TorchFullyShardedDataParallel):
                self._add_ranges(chunk, allow_cast=allow_cast)
            else:
                self.tensors += model_sharded_tensors(chunk, allow_cast=allow_cast)

    def take_loaded(self) -> None:
        """Makes shards what was loaded into copies of them."""
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
    """The parameters of this rank that no optimizer steps, any shape and dtype, as views."""
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
