"""Paged stash: stores the live rows that experts save for backward in pages. Requires torch, NumPy, and Triton on GPUs.

manager.py provides Megatron-LM's names as thin wrappers of PagedStash.
"""

from megatron.core.fusions.gated_activation import ActivationForm
from megatron.core.transformer.moe.paged_stash.expert_ops import (
    Recompute,
    add_expert_bias,
    add_low_rank,
    gated_activation,
    grouped_gemm,
    recompute_act,
    recompute_gate_up,
)
from megatron.core.transformer.moe.paged_stash.group_memory import StashStreams
from megatron.core.transformer.moe.paged_stash.manager import (
    PagedStashBuffer,
    PagedStashContext,
    PagedStashManager,
    PagedStashRunner,
    PagedTensor,
    PipelinePostScheduleFunction,
    PipelinePreScheduleFunction,
    check_paged_stash_host_spill,
    check_paged_stash_overflow,
    get_paged_stash_context,
    paged_stash_group_commit,
    paged_stash_group_start,
    paged_stash_init_chunk_handler,
    paged_stash_reset,
)
from megatron.core.transformer.moe.paged_stash.page_layout import Counter, PoolLayout, Priority, TensorSpec
from megatron.core.transformer.moe.paged_stash.page_pool import PagePool
from megatron.core.transformer.moe.paged_stash.saved_tensors import RowTensors, StashGroup
from megatron.core.transformer.moe.paged_stash.stash import (
    CapturedPart,
    PagedStash,
    ReplayedForward,
    RowsReader,
    StashedRows,
)
from megatron.core.transformer.moe.paged_stash.stash_order import EventKind, StashEvent, StashOrder, layer_name

__all__ = [
    "ActivationForm",
    "CapturedPart",
    "Counter",
    "EventKind",
    "PagePool",
    "PagedStash",
    "PagedStashBuffer",
    "PagedStashContext",
    "PagedStashManager",
    "PagedStashRunner",
    "PagedTensor",
    "PipelinePostScheduleFunction",
    "PipelinePreScheduleFunction",
    "PoolLayout",
    "Priority",
    "Recompute",
    "ReplayedForward",
    "RowTensors",
    "StashEvent",
    "StashGroup",
    "StashOrder",
    "StashStreams",
    "RowsReader",
    "StashedRows",
    "TensorSpec",
    "add_expert_bias",
    "add_low_rank",
    "check_paged_stash_host_spill",
    "check_paged_stash_overflow",
    "gated_activation",
    "get_paged_stash_context",
    "grouped_gemm",
    "layer_name",
    "paged_stash_group_commit",
    "paged_stash_group_start",
    "paged_stash_init_chunk_handler",
    "paged_stash_reset",
    "recompute_act",
    "recompute_gate_up",
]
