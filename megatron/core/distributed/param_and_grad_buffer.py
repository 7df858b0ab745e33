"""Names of buffers, buckets and bucket groups under the path Megatron users import them from; re-exports only."""

from megatron.core.distributed.bucket_group import _ParamAndGradBucketGroup
from megatron.core.distributed.flat_buffer import (
    BufferType,
    _ParamAndGradBucket,
    _ParamAndGradBuffer,
    partition_buckets,
    shard_buffer,
)

__all__ = [
    "BufferType",
    "_ParamAndGradBucket",
    "_ParamAndGradBucketGroup",
    "_ParamAndGradBuffer",
    "partition_buckets",
    "shard_buffer",
]
