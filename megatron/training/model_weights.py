"""ModelWeights: parameters and buffers of model chunks as the boxes that a checkpoint holds, however ranks share them.

Optimizer state is the optimizer's; files are dist_checkpointing's.
"""

from collections.abc import Sequence

import torch
from torch import nn

from megatron.core.dist_checkpointing import (
    ShardedTensor,
    buffer_sharded_tensors,
    canonical_name,
    model_logical_pieces,
    model_sharded_tensors,
    sharded_tensors,
)
from megatron.core.dist_checkpointing.flat_ranges import range_tensors
from megatron.core.distributed import TorchFullyShardedDataParallel


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
