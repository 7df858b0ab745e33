"""Layout-independent checkpoints in the format of torch.distributed.checkpoint. This module only re-exports."""

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedState,
    ShardedTensor,
    buffer_sharded_tensors,
    model_sharded_tensors,
    sharded_tensors,
)
from megatron.core.dist_checkpointing.planner import ReplicaWriters
from megatron.core.dist_checkpointing.saving import PendingSave, StagingMemory, begin_save, save_stream
from megatron.core.dist_checkpointing.serialization import (
    StreamReader,
    VerifiedCheckpoint,
    list_tensors,
    load,
    load_common,
    load_common_state_dict,
    load_content_metadata,
    load_items,
    save,
    save_items,
    verify,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.logical_tensors import (
    HasLogicalPieces,
    LogicalPiece,
    canonical_name,
    identity_piece,
    model_logical_pieces,
)

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
    "StrictHandling",
    "VerifiedCheckpoint",
    "begin_save",
    "buffer_sharded_tensors",
    "canonical_name",
    "identity_piece",
    "list_tensors",
    "load",
    "load_common",
    "load_common_state_dict",
    "load_content_metadata",
    "load_items",
    "model_logical_pieces",
    "model_sharded_tensors",
    "save",
    "save_items",
    "save_stream",
    "sharded_tensors",
    "verify",
]
