"""Paged stashing: the live rows of what expert backward needs, in pages; knows torch and Triton alone."""

from megatron.core.transformer.moe.paged_stash.page_layout import Counter, PoolLayout, Priority, TensorSpec
from megatron.core.transformer.moe.paged_stash.page_pool import PagePool
from megatron.core.transformer.moe.paged_stash.recording import StashGroup
from megatron.core.transformer.moe.paged_stash.stash_manager import PagedStash
from megatron.core.transformer.moe.paged_stash.stash_order import EventKind, StashEvent, StashOrder

__all__ = [
    "Counter",
    "EventKind",
    "PagePool",
    "PagedStash",
    "PoolLayout",
    "Priority",
    "StashEvent",
    "StashGroup",
    "StashOrder",
    "TensorSpec",
]
