"""StashGroup: what one context collects while experts run inside it, which is what autograd saves and what users mark.
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
    Seen,
    blocks_of,
    is_made_of_parameters,
    row_view,
)
from megatron.core.transformer.moe.paged_stash.stash_group import Phase, StashedGroup


class StashGroup:
    """What `with stash.context(...) as group` gives. Of no use after the context.

    group: None where the context leaves everything as it is. hooks: those around the context.
    """

    def __init__(self, device: torch.device, max_rows: int, *, group: StashedGroup | None, hooks: Hooks | None) -> None:
        self._device, self._max_rows, self._group, self._hooks = device, max_rows, group, hooks
        self._with_rows: list[SavedTensor] = []
        self._others: list[SavedTensor] = []
        self._marks: list[Mark] = []
        self._elsewhere: set[str] = set()  # devices other than the pool's on which autograd saved rows
        self._kept: list[torch.UntypedStorage] = []

    def keep(self, *tensors: Tensor) -> None:
        """Says that tensors are no rows though max_rows may be their outermost size; call it before they are used.

        For weights that autograd's graph does not tell from activations: buffers, plain tensors, casts of frozen ones.
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
        """Says more about a tensor that autograd saves inside this context; without effect if it does not.

        tensor: max_rows rows as its outermost dimension in memory, or ceil(max_rows / tokens_per_row), as scales of 32
        tokens each have; any width and dtype. priority: what may be dropped first if pages run out.
        recompute(out, needed, *sources): writes the live rows of a dropped tensor, of GATE_UP or ACT, into `out`, on
        the current stream, and returns None. It is called in any case: needed, [1], int64, on the device, is 0 if the
        tensor was not dropped, and then it must change nothing. sources: row tensors of higher importance that it
        reads; those that autograd does not save are stashed too. Other tensors belong in its closure.
        Raises ValueError for tensors without such rows, and where priority, recompute and sources do not fit.
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
        seen = self._seen(tensor, tokens_per_row=tokens_per_row)
        needed = tuple(self._seen(source, tokens_per_row=1) for source in sources)
        self._marks.append(Mark(seen, priority, tokens_per_row, recompute, needed))

    def pack(self, tensor: Tensor) -> SavedTensor:
        """Autograd's hook: takes row tensors, keeps others or hands them on; tensor: any shape and dtype."""
        assert self._group is not None, "hooks without a group"
        may_have_rows = self._may_have_rows(tensor)
        rows = row_view(tensor, self._max_rows) if may_have_rows else None
        if tensor.device != self._device and not is_made_of_parameters(tensor) and row_view(tensor, self._max_rows):
            self._elsewhere.add(str(tensor.device))
        saved = SavedTensor(self._group, tensor, may_have_rows=may_have_rows)
        is_taken = rows is not None and self._group.phase is Phase.RECORDING
        if is_taken or self._hooks is None:
            saved.seen = Seen.now(tensor, rows)
        else:
            saved.hand_on(tensor, self._hooks)
        (self._with_rows if is_taken else self._others).append(saved)
        return saved

    @property
    def has_saved(self) -> bool:
        """Whether autograd saved anything."""
        return bool(self._with_rows or self._others)

    def blocks(self) -> list[Block]:
        """The memory to be stashed; none if autograd saved nothing but weights.

        Raises ValueError if it saved other tensors, but none with max_rows rows on the pool's device; and as
        blocks_of does.
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
            shapes = sorted({tuple(saved.typed.size) for saved in self._others if saved.may_have_rows})
            if shapes:
                raise ValueError(
                    f"max_rows ({self._max_rows}): none of the tensors that autograd saved has as many rows, outermost "
                    f"in memory, on {self._device}; their shapes: {shapes}"
                )
        return blocks_of(self._with_rows, self._marks)

    def forget(self) -> None:
        """Lets go of what was saved, although autograd may still hold it: backward through it raises."""
        for saved in (*self._with_rows, *self._others):
            saved.seen = saved.packed = None

    def close(self) -> None:
        """Ends collecting. Autograd keeps `pack`, and with it this object, as long as what was saved."""
        self._group = self._hooks = None
        self._with_rows, self._others, self._marks, self._kept = [], [], [], []

    def _may_have_rows(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.device != self._device or is_made_of_parameters(tensor):
            return False
        return not self._kept or tensor.untyped_storage()._cdata not in [storage._cdata for storage in self._kept]

    def _seen(self, tensor: Tensor, *, tokens_per_row: int) -> Seen:
        rows = -(-self._max_rows // tokens_per_row)
        view = row_view(tensor, rows) if self._may_have_rows(tensor) else None
        if view is None:
            found = f"{list(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
            raise ValueError(
                f"a tensor of shape {found} is no row tensor of this context: it must be an activation on "
                f"{self._device} with {rows} rows as its outermost dimension in memory (max_rows {self._max_rows}, "
                f"tokens_per_row {tokens_per_row}); scales that are not in the order of the tokens cannot be stashed"
            )
        return Seen.now(tensor, view)
