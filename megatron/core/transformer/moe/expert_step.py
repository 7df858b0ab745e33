"""ExpertStep: what expert layers with buffers of a fixed size share during a step, all of it on the device.

When a step begins, what a verdict is and what follows from it is training's matter; the stash is paged_stash's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.moe.dispatch import RowDemand
from megatron.core.transformer.moe.paged_stash import (
    CapturedPart,
    PagedStash,
    ReplayedForward,
    RowTensors,
    StashGroup,
    layer_name,
)
from megatron.core.transformer.recompute import Recorder


@dataclass
class CapturedForward:
    """stashed: the stash's part. rows: of each layer its number and [1], int64, on the device, in memory of a graph."""

    stashed: CapturedPart | None
    rows: list[tuple[int, Tensor]] = field(default_factory=list)


class ExpertStep(Recorder, torch.nn.Module):
    """Whether the rows of a step found room, how many each expert layer had, and where they wait for backward.

    A layer outside a trainer has one of its own; a trainer gives one to all layers of its rank. Until the first
    `begin` nobody takes rows and passes, and none are kept.
    Attributes: rows_missing [1], int64: the most rows that a buffer lacked, above 0 if any were lost. factor_needed
    [1], fp32: the smallest moe_expert_rank_capacity_factor that would have been enough. rows [n], int64: live rows of
    the layers' forwards in the order of `passes`, numbers of layers; second forwards, for backward, and those without
    gradients are left out. stash: None where buffers wait for backward as they are.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        # Memory that stays in place, as a CUDA graph writes to it. Not buffers: a cast of the model is not meant.
        self.rows_missing = torch.zeros(1, dtype=torch.int64, device=device)
        self.factor_needed = torch.zeros(1, dtype=torch.float32, device=device)
        self.rows = torch.zeros(0, dtype=torch.int64, device=device)
        self.passes: list[int] = []
        self.stash: PagedStash | None = None
        self._recording, self._has_begun = True, False
        self._part: CapturedForward | None = None  # while it is being captured

    def __reduce__(self) -> Any:
        """A copy of a model has no part in the original's steps."""
        return ExpertStep, (self.rows.device,)

    def begin(self) -> None:
        """Begins a step, before its forwards."""
        self.rows_missing.zero_()
        self.factor_needed.zero_()
        self.passes, self._has_begun = [], True

    def note(self, demand: RowDemand) -> None:
        """Takes what a dispatcher says. Raises RuntimeError where rows could be lost and nobody has begun a step."""
        if demand.can_lose and not self._has_begun:
            raise RuntimeError(
                "buffers of moe_expert_rank_capacity_factor may be too small for the routing, and nobody would see it: "
                "train with megatron.training, or call begin() of the layers' expert_step before each step and run the "
                "step again with set_capacity_factor of their token_dispatcher where rows_missing is above 0 on any "
                "rank; see docs/library.md"
            )
        torch.maximum(self.rows_missing, demand.rows_missing, out=self.rows_missing)
        torch.maximum(self.factor_needed, demand.factor_needed, out=self.factor_needed)

    @contextmanager
    def around_experts(self, layer_number: int, num_rows: Tensor, *, max_rows: int) -> Iterator[StashGroup | None]:
        """Surrounds the experts of a layer; num_rows: [1], int64, on the device: live rows out of max_rows."""
        if self._has_begun and self._recording and torch.is_grad_enabled():
            self._count(layer_number, num_rows)
        if self.stash is None:
            yield None
            return
        name, takes = layer_name(layer_number), RowTensors.DECLARED
        with self.stash.context(name, num_rows, max_rows=max_rows, takes=takes) as group:
            yield group

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Stops counting rows inside the block, where a layer's forward is recomputed for its backward."""
        recorded, self._recording = self._recording, False
        try:
            yield
        finally:
            self._recording = recorded

    # Of a forward that is captured as a part of a layer, which a CUDA graph runs from then on.

    def new_part(self) -> CapturedForward:
        """Returns the record of a part that is about to be captured."""
        return CapturedForward(None if self.stash is None else self.stash.new_part())

    @contextmanager
    def capturing(self, part: CapturedForward) -> Iterator[None]:
        """Surrounds a part's forward, then its backward, while they are captured."""
        self._part = part
        try:
            if self.stash is None or part.stashed is None:
                yield
            else:
                with self.stash.capturing(part.stashed):
                    yield
        finally:
            self._part = None

    def replaying(self, part: CapturedForward) -> ReplayedForward | None:
        """Called before each replay; returns the argument of replaying_backward."""
        return None if self.stash is None or part.stashed is None else self.stash.replaying(part.stashed)

    def replayed(self, part: CapturedForward) -> None:
        """Called after each replay."""
        for layer_number, num_rows in part.rows:
            self._count(layer_number, num_rows)

    def replaying_backward(self, forward: ReplayedForward) -> None:
        """Called before each replay of the backward."""
        if self.stash is not None:
            self.stash.join()
            self.stash.replaying_backward(forward)

    def _count(self, layer_number: int, num_rows: Tensor) -> None:
        if self._part is not None:
            # Its place is a number of the host, which a graph would write to each time.
            self._part.rows.append((layer_number, num_rows))
            return
        place = len(self.passes)
        if place == len(self.rows):
            # Room for twice as many: steps are alike, so that this ends with the first.
            self.rows = torch.cat([self.rows, self.rows.new_zeros(max(place, 64))])
        self.rows[place].copy_(num_rows[0])
        self.passes.append(layer_number)
