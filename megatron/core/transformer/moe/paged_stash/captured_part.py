"""CapturedPart: what a CUDA graph of a single layer's forward, and one of its backward, share with the stash.

[Note: captured parts] Under capture a context does what it always does, once: pages are planned and filled at the end
of the forward's graph, come back and are given back in the backward's. Replays run none of this code. So a captured
group has room in the page tables of its own, and what a group's place in the step decides is read from memory that the
host fills before each replay: how many pages it has to leave free. What is the same in each step is part of the graph:
whether the group is stashed at all, or stays as its backward comes next. Nothing is prefetched across graphs. Side
streams start from the main stream and end there within each graph, so that on the main stream a replay is one piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.core.transformer.moe.paged_stash.page_layout import TensorSpec
from megatron.core.transformer.moe.paged_stash.stash_order import StashEvent


@dataclass(frozen=True)
class CapturedGroup:
    """specs: none for a group that is not stashed. kept: what only the graphs refer to otherwise."""

    name: str
    specs: Sequence[TensorSpec] = ()
    max_rows: int = 0
    kept: tuple[Any, ...] = ()


@dataclass(eq=False)
class CapturedPart:
    """A part of a layer, and the group in it, None until that is captured. Must live as long as the graphs.

    reserve: [3], int64, on the device: pages that the group's plan leaves free.
    """

    reserve: Tensor
    group: CapturedGroup | None = None


@dataclass(frozen=True)
class ReplayedForward:
    """A forward that a graph has run, for its backward. generation: number of the stash's resets before it."""

    event: StashEvent
    generation: int
