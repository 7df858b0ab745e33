"""StashGroup: what one context collects while experts run inside it: what autograd saves and what users mark.
What becomes of it when the context ends is in stash_manager.py.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.core.transformer.moe.paged_stash.page_layout import Priority
from megatron.core.transformer.moe.paged_stash.saved_tensors import (
    Block,
    Hooks,
    Mark,
    SavedTensor,
    Snapshot,
    blocks_of,
    is_made_of_parameters,
    row_view,
)
from megatron.core.transformer.moe.paged_stash.stash_group import Phase, StashedGroup


class StashGroup:
    """What `with stash.context(...) as group` gives. Of no use after the context.

    group: None if the context does nothing; `mark` then does nothing either. hooks: those around the context.
    has_rungs: whether what can be computed again is dropped where pages are lacking.
    """

    def __init__(
        self,
        device: torch.device,
        max_rows: int,
        *,
        group: StashedGroup | None,
        hooks: Hooks | None,
        has_rungs: bool = True,
    ) -> None:
        self._device, self._max_rows, self._group, self._hooks = device, max_rows, group, hooks
        self._has_rungs = has_rungs
        self._with_rows: list[SavedTensor] = []
        self._others: list[SavedTensor] = []
        self._marks: list[Mark] = []
        self._elsewhere: set[str] = set()  # devices other than the pool's on which autograd saved rows
        self._kept: list[torch.UntypedStorage] = []

    def keep(self, *tensors: Tensor) -> None:
        """Leaves tensors alone that are no rows although their outermost size is max_rows; call it before their use.

        For weights that autograd's graph cannot tell from activations: buffers, plain tensors, casts of frozen weights.
        tensors: any shape and dtype; views of them count too.
        """
        self._kept += [tensor.untyped_storage() for tensor in tensors]

    def mark(
        self,
        tensor: Tensor,
        *,
        priority: Priority = Priority.INPUT,
        recompute: Callable[..., None] | None = None,
        sources: Sequence[Tensor] = (),
        tokens_per_row: int = 1,
    ) -> None:
        """Says more about a tensor that autograd saves inside this context; no effect on one that it does not save.

        tensor: any width and dtype, with max_rows rows as its outermost dimension in memory, or with
        ceil(max_rows / tokens_per_row), as scales of 32 tokens each have. priority: how important its pages are; ACT is
        dropped first. recompute(out, needed, *sources): writes the live rows of a dropped GATE_UP or ACT tensor into
        `out`, on the current stream, and returns None. It is always called: needed, [1], int64, on the device, is 0 if
        the tensor was not dropped, and then recompute must change nothing. sources: the row tensors that it reads, each
        more important than `tensor`; those that autograd does not save are stashed too. It may read other tensors from
        its closure. Raises ValueError for tensors without such rows, and if priority, recompute and sources do not fit.
        """
        if self._group is None:
            return
        droppable = priority is not Priority.INPUT
        if droppable != (recompute is not None) or droppable != bool(sources):
            raise ValueError(
                f"priority {priority.name} with {'a' if recompute else 'no'} recompute and {len(sources)} sources: "
                "GATE_UP and ACT need both to be computed again, INPUT takes neither"
            )
        if tokens_per_row < 1:
            raise ValueError(f"tokens_per_row ({tokens_per_row}) must be at least 1")
        if droppable and not self._has_rungs:
            return  # what no mark speaks of is as important as inputs
        snapshot = self._snapshot(tensor, tokens_per_row=tokens_per_row)
        needed = tuple(self._snapshot(source, tokens_per_row=1) for source in sources)
        self._marks.append(Mark(snapshot, priority, tokens_per_row, recompute, needed))

    def pack(self, tensor: Tensor) -> SavedTensor:
        """Autograd's pack hook: takes row tensors, keeps others or hands them on. tensor: any shape and dtype."""
        assert self._group is not None, "hooks without a group"
        may_have_rows = self._may_have_rows(tensor)
        rows = row_view(tensor, self._max_rows) if may_have_rows else None
        if tensor.device != self._device and not is_made_of_parameters(tensor) and row_view(tensor, self._max_rows):
            self._elsewhere.add(str(tensor.device))
        saved = SavedTensor(self._group, tensor, may_have_rows=may_have_rows)
        is_taken = rows is not None and self._group.phase is Phase.RECORDING
        if is_taken or self._hooks is None:
            saved.snapshot = Snapshot.of(tensor, rows)
        else:
            saved.hand_on(tensor, self._hooks)
        (self._with_rows if is_taken else self._others).append(saved)
        return saved

    @property
    def has_saved(self) -> bool:
        """Whether autograd saved anything."""
        return bool(self._with_rows or self._others)

    def blocks(self) -> list[Block]:
        """The memory to stash; none if autograd saved only weights.

        Raises what blocks_of raises, and ValueError if autograd saved activations, but none with max_rows rows on the
        pool's device.
        """
        for mark in self._marks:
            if mark.tokens_per_row > 1:
                self._with_rows += [saved for saved in self._others if saved.take_late(mark)]
        if self._elsewhere and not self._with_rows:
            raise ValueError(
                f"autograd saved rows on {sorted(self._elsewhere)} alone, but the pool is on {self._device}: it must "
                "be on the device of the experts"
            )
        if not self._with_rows:
            shapes = sorted({tuple(saved.view.size) for saved in self._others if saved.may_have_rows})
            if shapes:
                raise ValueError(
                    f"max_rows ({self._max_rows}): none of the tensors that autograd saved has as many rows, outermost "
                    f"in memory, on {self._device}; their shapes: {shapes}"
                )
        return blocks_of(self._with_rows, self._marks)

    def forget(self) -> None:
        """Lets go of what was saved even if autograd still refers to it: backward through it then raises."""
        for saved in (*self._with_rows, *self._others):
            saved.snapshot = saved.packed = None

    def close(self) -> None:
        """Ends collecting and drops references: autograd keeps `pack`, and so this object, as long as what it saved."""
        self._group = self._hooks = None
        self._with_rows, self._others, self._marks, self._kept = [], [], [], []

    def _may_have_rows(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.device != self._device or is_made_of_parameters(tensor):
            return False
        return not self._kept or tensor.untyped_storage()._cdata not in [storage._cdata for storage in self._kept]

    def _snapshot(self, tensor: Tensor, *, tokens_per_row: int) -> Snapshot:
        rows = -(-self._max_rows // tokens_per_row)
        view = row_view(tensor, rows) if self._may_have_rows(tensor) else None
        if view is None:
            found = f"{list(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
            raise ValueError(
                f"a tensor of shape {found} is no row tensor of this context: it must be an activation on "
                f"{self._device} with {rows} rows as its outermost dimension in memory (max_rows {self._max_rows}, "
                f"tokens_per_row {tokens_per_row}); scales that are not in the order of the tokens cannot be stashed"
            )
        return Snapshot.of(tensor, view)
