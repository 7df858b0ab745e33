"""Which of the tensors that autograd saves hold rows of tokens, which bytes of memory these are, and what autograd gets
instead of them. What is done with the bytes is in stash_group.py.

A *row tensor* has a dimension of max_rows rows, as the context was told, and this dimension is the outermost in memory:
row r starts `pitch` bytes after row r - 1, and its values lie within `extent` <= pitch bytes. Views of one memory that
have the same pitch and fit into one row, such as the halves of gate_up or a tensor that two operators save, become one
Block.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.moe.paged_stash.page_layout import Priority, TensorSpec

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


@dataclass(frozen=True)
class RowView:
    """The places of a tensor's rows in its storage: numbers of bytes, except the number of rows."""

    start: int
    pitch: int
    extent: int
    num_rows: int

    @property
    def end(self) -> int:
        """The end of the first row."""
        return self.start + self.extent


def row_view(tensor: Tensor, num_rows: int) -> RowView | None:
    """Returns the places of a tensor's rows, any shape and dtype; None unless its outermost dimension has num_rows."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    wide = [
        (stride, size == num_rows, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    ]
    if num_rows < 2 or tensor.numel() == 0 or not wide:
        return None
    pitch, has_rows, _ = max(wide)
    extent = 1 + sum((size - 1) * stride for stride, _, size in wide) - (num_rows - 1) * pitch
    if not has_rows or not 1 <= extent <= pitch:
        return None  # no rows, or rows that share bytes
    size = tensor.element_size()
    return RowView(int(tensor.storage_offset()) * size, pitch * size, extent * size, num_rows)


@torch.compiler.disable  # it asks autograd, which no compiled code can
def outer_hooks() -> Hooks | None:
    """The innermost saved_tensors_hooks (pack, unpack) that are active now; hooks pushed next will hide them.

    pack takes a tensor of any shape and dtype, unpack gives the same again.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@dataclass(frozen=True)
class StorageView:
    """A tensor's view of its storage, from which it can be rebuilt over a copy. offset: in elements."""

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> "StorageView":
        """tensor: any shape and dtype. Sparse tensors have neither offset nor strides: 0 and ()."""
        if tensor.layout is not torch.strided:
            return StorageView(tensor.dtype, 0, tensor.size(), ())
        return StorageView(tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def over(self, memory: Tensor, first_byte: int) -> Tensor:
        """The same view over a copy of the storage's bytes from first_byte on.

        memory: [N], uint8. Returns any shape and dtype.
        """
        offset = self.offset - first_byte // self.dtype.itemsize
        return memory.new_empty(0, dtype=self.dtype).set_(memory.untyped_storage(), offset, self.size, self.stride)


@dataclass(frozen=True)
class Snapshot:
    """A tensor of any shape and dtype, not copied, and its version at one moment; rows: None if it is no row tensor."""

    tensor: Tensor
    version: int
    rows: RowView | None

    @staticmethod
    def of(tensor: Tensor, rows: RowView | None) -> "Snapshot":
        """tensor: any shape and dtype."""
        # Detached: an operator's output keeps the operator's node alive, and the node would keep its output. A leaf has
        # no node, and backward has to get the very same object.
        return Snapshot(tensor if tensor.is_leaf else tensor.detach(), tensor._version, rows)

    def check_unchanged(self) -> None:
        """Raises RuntimeError if the tensor was changed in place since. torch checks this only where hooks do not."""
        if self.tensor._version != self.version:
            raise RuntimeError(changed_in_place(self.tensor.shape, found=self.tensor._version, expected=self.version))


def changed_in_place(shape: torch.Size, *, found: int, expected: int) -> str:
    """The message for a tensor that backward needs, in torch's words."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {list(shape)} that an expert group saved was changed in place after it was saved; it is at version "
        f"{found}, and was at {expected}"
    )


class VersionOf:
    """The version of a tensor without its memory: an alias that shares the version counter and holds no bytes."""

    __slots__ = ("_alias", "_shape", "_version")

    def __init__(self, snapshot: Snapshot) -> None:
        self._alias = snapshot.tensor.detach()
        self._shape, self._version = snapshot.tensor.shape, snapshot.version
        # Not set_(), which would count as a change of the tensor itself.
        self._alias.data = snapshot.tensor.new_empty(0)

    def change(self) -> str | None:
        """What to say if the tensor was changed in place since the snapshot."""
        if self._alias._version == self._version:
            return None
        return changed_in_place(self._shape, found=self._alias._version, expected=self._version)


class SavedTensor:
    """The object that autograd saves instead of a tensor.

    Until its context ends, and for good if the stash does not take it, `snapshot` is what was saved, or `packed` what
    the outer hooks made of it. For a stashed tensor `memory` is where its bytes are restored.
    """

    __slots__ = (
        "group",
        "snapshot",
        "packed",
        "outer_unpack",
        "memory",
        "view",
        "may_have_rows",
        "is_unclear",
        "has_history",
    )

    def __init__(self, group: Any, tensor: Tensor, *, may_have_rows: bool) -> None:
        """tensor: any shape and dtype. may_have_rows: False for weights and tensors of other devices or kinds."""
        self.group, self.view, self.may_have_rows = group, StorageView.of(tensor), may_have_rows
        self.snapshot: Snapshot | None = None
        self.packed: Any = None
        self.outer_unpack: Callable[[Any], Tensor] | None = None
        self.memory: Any = None
        self.is_unclear = False  # whether it may be a weight; see [Note: guessed rows]
        self.has_history = tensor.grad_fn is not None

    def hand_on(self, tensor: Tensor, hooks: Hooks) -> None:
        """Gives the tensor, any shape and dtype, to the hooks around the context, which the context's own ones hide."""
        pack, self.outer_unpack = hooks
        self.packed = pack(tensor)

    def take_late(self, mark: "Mark") -> bool:
        """Whether this is part of a tensor that was marked after it was saved; if it is, its rows are known now."""
        if self.snapshot is None or not self.may_have_rows or mark.snapshot.rows is None:
            return False
        rows = row_view(self.snapshot.tensor, mark.snapshot.rows.num_rows)
        if rows is None or not Block.of(mark.snapshot).overlaps(Block.of(Snapshot(self.snapshot.tensor, 0, rows))):
            return False
        self.snapshot = Snapshot(self.snapshot.tensor, self.snapshot.version, rows)
        return True

    def kept(self) -> Tensor:
        """The tensor as it was saved: any shape and dtype."""
        if self.outer_unpack is not None:
            return self.outer_unpack(self.packed)
        assert self.snapshot is not None, "neither kept nor stashed"
        self.snapshot.check_unchanged()
        return self.snapshot.tensor


@dataclass(frozen=True)
class Mark:
    """The user's annotation of a tensor; see StashGroup.mark."""

    snapshot: Snapshot
    priority: Priority
    tokens_per_row: int
    recompute: Callable[..., None] | None
    sources: tuple[Snapshot, ...]


@dataclass
class Block:
    """Rows of one memory that are stashed together: one TensorSpec. start, end: of the first row, in bytes."""

    storage: torch.UntypedStorage
    start: int
    end: int
    pitch: int
    num_rows: int
    mark: Mark | None = None
    saved: list[SavedTensor] = field(default_factory=list)
    is_source: bool = False  # of a needed tensor that can be computed again

    @staticmethod
    def of(snapshot: Snapshot, mark: Mark | None = None) -> "Block":
        """The block of one row tensor."""
        assert snapshot.rows is not None, "no row tensor"
        rows = snapshot.rows
        return Block(snapshot.tensor.untyped_storage(), rows.start, rows.end, rows.pitch, rows.num_rows, mark)

    @property
    def spec(self) -> TensorSpec:
        """The block as a TensorSpec for the pool."""
        priority, tokens_per_row = Priority.INPUT, 1
        if self.mark is not None:
            priority, tokens_per_row = self.mark.priority, self.mark.tokens_per_row
        return TensorSpec(self.end - self.start, self.pitch, self.num_rows, priority, tokens_per_row)

    @property
    def num_bytes(self) -> int:
        """Bytes from the first row's first byte to the last row's last, gaps included."""
        return (self.num_rows - 1) * self.pitch + self.end - self.start

    def bytes_of_rows(self, device: torch.device) -> Tensor:
        """The storage from the first row's first byte to the last row's last: [num_bytes], uint8."""
        return torch.empty(0, dtype=torch.uint8, device=device).set_(self.storage, self.start, (self.num_bytes,), (1,))

    def is_cut_like(self, other: "Block") -> bool:
        """Whether both are rows of one memory with one pitch."""
        return (self.storage._cdata, self.pitch, self.num_rows) == (other.storage._cdata, other.pitch, other.num_rows)

    def holds(self, other: "Block") -> bool:
        """Whether all bytes of the other are bytes of this one."""
        return self.is_cut_like(other) and self.start <= other.start and other.end <= self.end

    def overlaps(self, other: "Block") -> bool:
        """Whether they share bytes."""
        return self.is_cut_like(other) and self.start < other.end and other.start < self.end


def blocks_of(saved: list[SavedTensor], marks: list[Mark]) -> list[Block]:
    """The memory that a group's saved row tensors lie in, and that of the sources which recomputing them needs.

    Raises RuntimeError if a tensor was changed in place since it was saved or marked, ValueError if the marks do not
    fit each other or what was saved.
    """
    blocks: list[Block] = []
    for mark in marks:
        block = Block.of(mark.snapshot, mark)
        if any(block.overlaps(other) for other in blocks):
            raise ValueError(
                f"a tensor of shape {list(mark.snapshot.tensor.shape)} is marked twice, or a part of it is"
            )
        blocks.append(block)
    located = [(Block.of(one.snapshot), one) for one in saved if one.snapshot is not None]
    # By first byte, the longest first: then one pass finds everything that fits into one row.
    for found, one in sorted(located, key=lambda pair: (pair[0].start, -pair[0].end)):
        _check(one.snapshot)
        _place(found, blocks).saved.append(one)
    # The least important first: a tensor that is needed makes its sources needed.
    for block in sorted(blocks, key=lambda block: -block.spec.priority):
        if block.mark is not None and (block.saved or block.is_source):
            _check(block.mark.snapshot)
            for source in block.mark.sources:
                _need(source, blocks, priority=block.mark.priority)
    return [block for block in blocks if block.saved or block.is_source]


def block_with(snapshot: Snapshot, blocks: list[Block]) -> int | None:
    """Index of the block that holds a row tensor."""
    wanted = Block.of(snapshot)
    return next((index for index, block in enumerate(blocks) if block.holds(wanted)), None)


def _place(found: Block, blocks: list[Block]) -> Block:
    """The block that these bytes belong to: one that has them, one that is extended by them, or a new one."""
    for block in blocks:
        if block.holds(found):
            return block
        if block.mark is not None and block.overlaps(found):
            shape = list(block.mark.snapshot.tensor.shape)
            raise ValueError(f"a tensor of shape {shape} is marked, but more of its memory is saved: mark the whole")
        if block.mark is None and block.is_cut_like(found) and found.end - block.start <= block.pitch:
            block.end = found.end  # the next columns of the same rows
            return block
    blocks.append(found)
    return found


def _need(source: Snapshot, blocks: list[Block], *, priority: Priority) -> None:
    _check(source)
    index = block_with(source, blocks)
    if index is None:
        blocks.append(Block.of(source))
        index = -1
    blocks[index].is_source = True
    if blocks[index].spec.priority >= priority:
        raise ValueError(
            f"a source of shape {list(source.tensor.shape)} has priority {blocks[index].spec.priority.name}, what is "
            f"computed from it {priority.name}: a source must be more important"
        )


def _check(snapshot: Snapshot | None) -> None:
    if snapshot is not None:
        snapshot.check_unchanged()
