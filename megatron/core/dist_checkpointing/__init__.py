"""Canonical checkpoints on torch.distributed.checkpoint; re-exports only."""

from megatron.core.dist_checkpointing.logical import (
    HasLogicalPieces,
    LogicalPiece,
    canonical_name,
    identity_piece,
    model_logical_pieces,
)
from megatron.core.dist_checkpointing.mapping import Box, ShardedObject, ShardedTensor, sharded_tensors

__all__ = [
    "Box",
    "HasLogicalPieces",
    "LogicalPiece",
    "ShardedObject",
    "ShardedTensor",
    "canonical_name",
    "identity_piece",
    "model_logical_pieces",
    "sharded_tensors",
]
