"""Paged stash: stores the live rows that experts save for backward in pages. Needs torch, NumPy, and Triton on GPUs.

The definitions below are Megatron-LM's names, as thin wrappers of PagedStash. There is no process-wide manager:
functions take the manager as a keyword argument.
"""

from contextlib import AbstractContextManager

from torch import Tensor

from megatron.core.transformer.moe.paged_stash.activations import ActivationForm
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
from megatron.core.transformer.moe.paged_stash.page_layout import Counter, PoolLayout, Priority, TensorSpec
from megatron.core.transformer.moe.paged_stash.page_pool import PagePool
from megatron.core.transformer.moe.paged_stash.saved_tensors import RowTensors, StashGroup
from megatron.core.transformer.moe.paged_stash.stash import CapturedPart, PagedStash, ReplayedForward
from megatron.core.transformer.moe.paged_stash.stash_order import EventKind, StashEvent, StashOrder, layer_name

__all__ = [
    "ActivationForm",
    "CapturedPart",
    "Counter",
    "EventKind",
    "PagePool",
    "PagedStash",
    "PagedStashManager",
    "PoolLayout",
    "Priority",
    "Recompute",
    "ReplayedForward",
    "RowTensors",
    "StashEvent",
    "StashGroup",
    "StashOrder",
    "StashStreams",
    "TensorSpec",
    "add_expert_bias",
    "add_low_rank",
    "check_paged_stash_overflow",
    "gated_activation",
    "get_paged_stash_context",
    "grouped_gemm",
    "layer_name",
    "paged_stash_group_commit",
    "paged_stash_group_start",
    "paged_stash_reset",
    "recompute_act",
    "recompute_gate_up",
]


class PagedStashManager(PagedStash):
    """A PagedStash over a pool, under the name that scripts know."""

    def __init__(self, pool: PagePool, *, prefetch_groups: int = 1) -> None:
        super().__init__(pool, prefetch_groups=prefetch_groups)


def paged_stash_reset(enabled: bool = True, *, manager: PagedStash) -> None:
    """Prepares the next step; enabled: False for a step that stashes nothing, such as an evaluation."""
    manager.reset(enabled=enabled)


def get_paged_stash_context(
    name: str | None = None,
    max_num_tokens: int | None = None,
    *,
    num_tokens_tensor: Tensor | int | None = None,
    avg_num_tokens: int | None = None,
    manager: PagedStash,
) -> AbstractContextManager[StashGroup]:
    """Wraps an expert group's forward.

    num_tokens_tensor: [1] or scalar, int64 or int32, on the device. avg_num_tokens: ignored, as the pool has its size.
    Raises ValueError if max_num_tokens or num_tokens_tensor is missing.
    """
    if max_num_tokens is None or num_tokens_tensor is None:
        raise ValueError(
            f"max_num_tokens ({max_num_tokens}), num_tokens_tensor ({num_tokens_tensor}): both must be given"
        )
    return manager.context(name or "experts", num_tokens_tensor, max_rows=max_num_tokens)


def paged_stash_group_start(tensor: Tensor, *, manager: PagedStash) -> Tensor:
    """Waits for copies of earlier groups, before a group's context. Returns the tensor, any shape and dtype."""
    manager.join()
    return tensor


def paged_stash_group_commit(tensor: Tensor, name: str | None = None) -> Tensor:
    """Returns the tensor, any shape and dtype, and does nothing: the end of the context stashes the group."""
    return tensor


def check_paged_stash_overflow(*, manager: PagedStash) -> Tensor:
    """Returns PagedStash.void: above 0 if the step's gradients are wrong; scalar, int64, on the device."""
    return manager.void
