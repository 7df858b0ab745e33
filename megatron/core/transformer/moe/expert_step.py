"""ExpertStep: device-side record of one step, shared by all expert layers with static buffers.

It records whether any buffer dropped rows and how many rows each layer received, and it begins the experts' groups
in the stash. training/ begins and ends steps, reads the record, and discards a step that dropped rows. The stash
itself is in paged_stash/.

[Note: captured experts]
A CUDA graph replays a layer's device work but not its host work. Each captured part of a layer therefore has a
CapturedForward. During capture it collects the records that the host would have made: the rows of each layer, as
tensors in the graph's memory, and the stash's record of the part. `replaying`, `replayed` and `replaying_backward` then
perform the host work of each replay.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.core.device.torch_internals import current_backward_id
from megatron.core.tensor_parallel.random import is_recomputing
from megatron.core.transformer.cuda_graphs import PartParticipant
from megatron.core.transformer.moe.dispatch import RowDemand
from megatron.core.transformer.moe.paged_stash import (
    CapturedPart,
    PagedStash,
    ReplayedForward,
    StashedRows,
    StashGroup,
    layer_name,
)

# Numbers of steps, over all instances: a copy of weights that was made in one of them is not taken for another's.
_NUMBERS = itertools.count(1)


@dataclass
class CapturedForward:
    """Host-side record of a captured part of a layer. See [Note: captured experts].

    stashed: the stash's record of the part; None without a stash. rows: pairs of a layer number and the layer's live
    rows, [1], int64, on the device, in the graph's memory.
    """

    stashed: CapturedPart | None
    rows: list[tuple[int, Tensor]] = field(default_factory=list)


class ExpertStep(torch.nn.Module):
    """Records the demand and the live rows of a step's expert layers, and begins their groups in the stash.

    Each layer creates an instance; a trainer replaces them with one instance for all layers of its rank. Live rows are
    recorded only after the first `begin`.

    rows_missing: [1], int64, the largest number of rows by which any buffer was too small; above 0 if rows were
    dropped. factor_needed: [1], fp32, the smallest moe_expert_rank_capacity_factor that would have dropped no rows.
    passes: layer numbers of the forwards, in order; rows: [n], int64, the live rows of each forward. Neither includes
    recomputed forwards or forwards without gradients. stash: None if autograd saves whole buffers for backward. number:
    of the step, unlike that of any other; None before the first `begin`.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        # Persistent memory, to which CUDA graphs write. Plain attributes, because casts of the model would convert
        # buffers.
        self.rows_missing = torch.zeros(1, dtype=torch.int64, device=device)
        self.factor_needed = torch.zeros(1, dtype=torch.float32, device=device)
        self.rows = torch.zeros(0, dtype=torch.int64, device=device)
        self.passes: list[int] = []
        self.stash: PagedStash | None = None
        self.number: int | None = None
        self._part: CapturedForward | None = None  # set during capture

    def __reduce__(self) -> Any:
        """Makes deepcopy and pickle create a new, empty record."""
        return ExpertStep, (self.rows.device,)

    def begin(self) -> None:
        """Clears the record. Call it before the first forward of each step."""
        self.rows_missing.zero_()
        self.factor_needed.zero_()
        self.passes, self.number = [], next(_NUMBERS)

    def record_demand(self, demand: RowDemand) -> None:
        """Records a dispatcher's demand. Raises RuntimeError if rows could be dropped and no step has begun."""
        if demand.can_lose and self.number is None:
            raise RuntimeError(
                "the buffers sized by moe_expert_rank_capacity_factor may be too small for the routing, and dropped "
                "rows would go unnoticed: train with megatron.training, or call expert_step.begin() before each step "
                "and, if rows_missing is above 0 on any rank, retry the step after increasing the factor with "
                "token_dispatcher.set_capacity_factor(); see docs/library.md"
            )
        torch.maximum(self.rows_missing, demand.rows_missing, out=self.rows_missing)
        torch.maximum(self.factor_needed, demand.factor_needed, out=self.factor_needed)

    @contextmanager
    def around_experts(self, layer_number: int, num_rows: Tensor, *, max_rows: int) -> Iterator[StashGroup | None]:
        """Context manager around experts other than GroupedMLP. Records their live rows and enters a stash context.

        num_rows: [1], int64, on the device: live rows out of max_rows. Yields the stash's group; None without a stash.
        """
        self._record_rows(layer_number, num_rows)
        if self.stash is None:
            yield None
            return
        with self.stash.context(layer_name(layer_number), num_rows, max_rows=max_rows) as group:
            yield group

    def begin_experts(self, layer_number: int, num_rows: Tensor, *, max_rows: int) -> StashedRows | None:
        """Records the live rows of a layer's experts; returns the stash of their row tensors, if they are stashed.

        num_rows: [1], int64, on the device: live rows out of max_rows.
        """
        self._record_rows(layer_number, num_rows)
        if self.stash is None:
            return None
        return self.stash.begin(layer_name(layer_number), num_rows, max_rows=max_rows)

    def _record_rows(self, layer_number: int, num_rows: Tensor) -> None:
        if (
            self.number is not None
            and torch.is_grad_enabled()
            and not (current_backward_id() != -1 and is_recomputing())
        ):
            self._count(layer_number, num_rows)

    # Parts in CUDA graphs. See [Note: captured experts].

    def new_part(self) -> CapturedForward:
        """Creates the record of a part that is about to be captured."""
        return CapturedForward(None if self.stash is None else self.stash.new_part())

    @contextmanager
    def capturing(self, part: CapturedForward) -> Iterator[None]:
        """Context manager for capturing a part's forward, then its backward. Redirects records to `part`."""
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
        """Prepares a replay of the part's forward; returns the argument of replaying_backward."""
        return None if self.stash is None or part.stashed is None else self.stash.replaying(part.stashed)

    def replayed(self, part: CapturedForward) -> None:
        """Records the numbers of live rows of a replayed forward."""
        for layer_number, num_rows in part.rows:
            self._count(layer_number, num_rows)

    def replaying_backward(self, forward: ReplayedForward) -> None:
        """Prepares a replay of that forward's backward."""
        if self.stash is not None:
            self.stash.join()
            self.stash.replaying_backward(forward)

    def _count(self, layer_number: int, num_rows: Tensor) -> None:
        if self._part is not None:
            # The index into `rows` is a host number, so a graph would write to the same entry in each replay.
            self._part.rows.append((layer_number, num_rows))
            return
        place = len(self.passes)
        if place == len(self.rows):
            # Doubles the size. Steps have the same number of forwards, so only the first step grows it.
            self.rows = torch.cat([self.rows, self.rows.new_zeros(max(place, 64))])
        self.rows[place].copy_(num_rows[0])
        self.passes.append(layer_number)


class GraphedExperts(PartParticipant):
    """Keeps the row counts and the stash of static experts correct while their part runs from CUDA graphs."""

    def __init__(self, step_of_layer: Callable[[], ExpertStep | None], *, quantize: Callable[[], None]) -> None:
        """quantize: quantizes the weights of experts in 8 bits, unless that was done in this step."""
        self._step_of_layer, self._quantize = step_of_layer, quantize

    def prepare(self) -> None:
        """Quantizes weights in 8 bits, and makes the current stream wait for the copies of groups that ran eagerly."""
        self._quantize()
        if self._step.stash is not None:
            self._step.stash.join()

    def new_account(self) -> CapturedForward:
        """Creates the record of a forward that is about to be captured."""
        return self._step.new_part()

    def capturing(self, account: CapturedForward) -> AbstractContextManager[None]:
        """Context manager that records rows and pages in `account` instead of in the current step."""
        return self._step.capturing(account)

    def replaying(self, account: CapturedForward) -> Any:
        """Adds the forward to the stash's order of the step; returns the argument of replaying_backward."""
        return self._step.replaying(account)

    def replayed(self, account: CapturedForward) -> None:
        """Records the numbers of live rows of the replayed forward."""
        self._step.replayed(account)

    def replaying_backward(self, forward: Any) -> None:
        """Adds the forward's backward to the stash's order of the step."""
        if forward is not None:
            self._step.replaying_backward(forward)

    @property
    def _step(self) -> ExpertStep:
        # Read on each call, because a trainer replaces the layer's ExpertStep with one for all layers.
        step = self._step_of_layer()
        assert step is not None, "only layers with static buffers use this participant"
        return step
