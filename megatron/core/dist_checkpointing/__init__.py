"""Canonical checkpoints on torch.distributed.checkpoint; re-exports only."""

from megatron.core.dist_checkpointing.group_errors import CheckpointError
from megatron.core.dist_checkpointing.logical import (
    HasLogicalPieces,
    LogicalPiece,
    canonical_name,
    identity_piece,
    model_logical_pieces,
)
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedState,
    ShardedTensor,
    buffer_sharded_tensors,
    model_sharded_tensors,
    sharded_tensors,
)
from megatron.core.dist_checkpointing.planner import ReplicaWriters
from megatron.core.dist_checkpointing.saving import PendingSave, begin_save
from megatron.core.dist_checkpointing.serialization import (
    VerifiedCheckpoint,
    list_tensors,
    load,
    load_common,
    save,
    verify,
)
from megatron.core.dist_checkpointing.staging import StagingMemory
from megatron.core.dist_checkpointing.streaming import StreamReader, save_stream

__all__ = [
    "CheckpointError",
    "HasLogicalPieces",
    "LogicalPiece",
    "PendingSave",
    "ReplicaWriters",
    "ShardedObject",
    "ShardedState",
    "ShardedTensor",
    "StagingMemory",
    "StreamReader",
    "VerifiedCheckpoint",
    "begin_save",
    "buffer_sharded_tensors",
    "canonical_name",
    "identity_piece",
    "list_tensors",
    "load",
    "load_common",
    "model_logical_pieces",
    "model_sharded_tensors",
    "save",
    "save_stream",
    "sharded_tensors",
    "verify",
]
