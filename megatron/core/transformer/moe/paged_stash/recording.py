"""StashGroup: what one context collects while experts run inside it: what autograd saves and what users mark.
What becomes of it when the context ends is in stash_manager.py.
"""

import enum
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.core.transformer.moe.paged_stash.page_layout import Priority
from megatron.core.transformer.moe.paged_stash.row_origins import Origin, is_parameter, origin_of
from megatron.core.transformer.moe.paged_stash.saved_tensors import (
    Block,
    Hooks,
    Mark,
    SavedTensor,
    Snapshot,
    blocks_of,
    outer_hooks,
    row_view,
)

# References to a tensor inside `pack` that nobody else refers to: the call's, the parameter's and getrefcount's own.
_OWN_REFERENCES = 3


class RowTensors(enum.Enum):
    """Which saved tensors a context takes for rows."""

    DECLARED = "those that `rows` or `mark` named before autograd saved them"
    GUESSED = "also others of max_rows rows, unless they are weights; see [Note: guessed rows]"


class StashGroup:
    """What `with stash.context(...) as group` gives. Of no use after the context.

    group: the owner of the saved tensors, handed to each SavedTensor and not looked at here; None if the context does
    nothing, and then `mark` does nothing either. takes_rows: whether row tensors will be stashed; if not, they are saved
    as all others. hooks: those around the context.
    has_rungs: whether what can be computed again is dropped where pages are lacking. takes: which tensors are rows.
    """

    def __init__(
        self,
        device: torch.device,
        max_rows: int,
        *,
        group: object | None,
        hooks: Hooks | None,
        takes_rows: bool = True,
        has_rungs: bool = True,
        takes: RowTensors = RowTensors.GUESSED,
    ) -> None:
        self._device, self._max_rows, self._group, self._hooks = device, max_rows, group, hooks
        self._takes_rows, self._has_rungs, self._takes = takes_rows, has_rungs, takes
        self._with_rows: list[SavedTensor] = []
        self._others: list[SavedTensor] = []
        self._marks: list[Mark] = []
        self._elsewhere: set[str] = set()  # devices other than the pool's on which autograd saved rows
        self._declared: list[torch.UntypedStorage] = []
        self._kept: list[torch.UntypedStorage] = []
        # Whether max_rows is also the outermost size of a weight, and whether it is another size of anything saved.
        self._has_weights = self._has_such_sizes = False

    def keep(self, *tensors: Tensor) -> None:
        """Leaves tensors alone that are no rows although their outermost size is max_rows; call it before their use.

        For weights that autograd's graph cannot tell from activations: buffers, plain tensors, casts of frozen weights.
        tensors: any shape and dtype; views of them count too.
        """
        if self._group is not None:
            self._kept += [tensor.untyped_storage() for tensor in tensors]
            weights = [tensor for tensor in tensors if tensor.dim() > 1 and tensor.is_floating_point()]
            self._has_weights = self._has_weights or any(row_view(weight, self._max_rows) for weight in weights)

    def rows(self, *tensors: Tensor) -> None:
        """Says that tensors hold rows, whatever else has as many; call it before they are used.

        tensors: any shape and dtype; views of them count too. Parameters are never rows.
        """
        if self._group is not None:
            self._declared += [tensor.untyped_storage() for tensor in tensors]

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
        self.rows(tensor, *sources)
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
        # What an operator saves of its output is a new object; what it was given belongs to somebody.
        is_given = tensor._base is not None or sys.getrefcount(tensor) > _OWN_REFERENCES
        origin = self._origin(tensor)
        may_have_rows = type(tensor) is Tensor and tensor.device == self._device and origin is not Origin.WEIGHTS
        rows = row_view(tensor, self._max_rows) if may_have_rows else None
        if tensor.device != self._device and origin is not Origin.WEIGHTS and row_view(tensor, self._max_rows):
            self._elsewhere.add(str(tensor.device))
        is_matrix = tensor.dim() > 1 and tensor.is_floating_point() and tensor.layout is torch.strided
        sizes = tensor.shape if is_matrix else ()
        self._has_such_sizes = self._has_such_sizes or sizes.count(self._max_rows) > (rows is not None)
        saved = SavedTensor(self._group, tensor, may_have_rows=may_have_rows)
        saved.is_unclear = origin is Origin.UNCLEAR or (is_given and tensor.is_leaf and not tensor.requires_grad)
        is_taken = rows is not None and self._takes_rows
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
        self._refuse_unclear()
        if not self._with_rows and self._takes is RowTensors.GUESSED:
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
        self._with_rows, self._others, self._marks, self._kept, self._declared = [], [], [], [], []

    def _origin(self, tensor: Tensor) -> Origin:
        """What a saved tensor is taken for, by what was said of its memory, or else by autograd's graph."""
        if _is_among(tensor, self._kept):
            return Origin.WEIGHTS
        origin = origin_of(tensor, self._max_rows)
        if origin is Origin.WEIGHTS:
            self._has_weights = self._has_weights or row_view(tensor, self._max_rows) is not None
        elif _is_among(tensor, self._declared):
            return Origin.ROWS
        elif self._takes is RowTensors.DECLARED:
            return Origin.WEIGHTS
        return origin

    def _refuse_unclear(self) -> None:
        """Raises ValueError for tensors that may be rows or weights, of which no one said what they are."""
        for saved in self._with_rows:
            assert saved.snapshot is not None, "taken without a snapshot"
            tensor = saved.snapshot.tensor
            # A tensor without history is unclear only where something else has its size.
            is_wide = tensor.is_floating_point() and tensor.numel() > self._max_rows
            is_doubtful = saved.has_history or self._has_weights or (is_wide and self._has_such_sizes)
            if saved.is_unclear and is_doubtful and not _is_among(tensor, self._declared):
                raise ValueError(
                    f"autograd saved a tensor of shape {list(tensor.shape)}, {tensor.dtype}, whose outermost size is "
                    f"max_rows ({self._max_rows}): it may hold rows or be a weight, such as a parameter times a "
                    "buffer. Before it is used, call group.keep(tensor) for a weight or an index of experts, "
                    "group.rows(tensor) for rows, or choose a max_rows that is no size of a weight"
                )

    def _snapshot(self, tensor: Tensor, *, tokens_per_row: int) -> Snapshot:
        rows = -(-self._max_rows // tokens_per_row)
        is_activation = type(tensor) is Tensor and tensor.device == self._device and not is_parameter(tensor)
        view = row_view(tensor, rows) if is_activation and not _is_among(tensor, self._kept) else None
        if view is None:
            found = f"{list(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
            raise ValueError(
                f"a tensor of shape {found} is no row tensor of this context: it must be an activation on "
                f"{self._device} with {rows} rows as its outermost dimension in memory (max_rows {self._max_rows}, "
                f"tokens_per_row {tokens_per_row}); scales that are not in the order of the tokens cannot be stashed"
            )
        return Snapshot.of(tensor, view)


@torch.compiler.disable
def say_rows_and_others(rows: Sequence[Tensor], others: Sequence[Tensor | None]) -> None:
    """Tells the context around an operator of ours, if there is one, which of its tensors are rows and which are not.

    rows, others: any shape and dtype; others: weights and offsets, which are left alone whatever their sizes.
    """
    hooks = outer_hooks()
    group = None if hooks is None else getattr(hooks[0], "__self__", None)
    if isinstance(group, StashGroup):
        group.rows(*rows)
        group.keep(*(tensor for tensor in others if tensor is not None))


def _is_among(tensor: Tensor, storages: Sequence[torch.UntypedStorage]) -> bool:
    if not storages or tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage()._cdata in [storage._cdata for storage in storages]
