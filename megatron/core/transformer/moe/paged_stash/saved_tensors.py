"""Which of the tensors that autograd saves hold rows of tokens, and which bytes of their memory these are; plus what
autograd gets instead of them. What is done with the bytes is in stash_group.py.

A *row tensor* has one dimension of as many rows as the context was told, and it is the outermost in memory: so row r
lies `pitch` bytes behind row r - 1, and its values within `extent` <= pitch bytes. Views of one memory, such as
the halves of gate_up, or a tensor that two operators save, have one pitch and lie in one row: they become one Block.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.transformer.moe.paged_stash.page_layout import Priority, TensorSpec

# Nodes that pick rows of their one input: what they make of a weight is an activation.
_PICKS = {"EmbeddingBackward0", "IndexBackward0", "IndexSelectBackward0", "GatherBackward0"}
_LONGEST_CHAIN = 32  # nodes between a weight and what is saved of it: casts, transposes, stacks

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


@dataclass(frozen=True)
class RowView:
    """Where the rows of a tensor lie in its storage: numbers of bytes, except the number of rows."""

    start: int
    pitch: int
    extent: int
    rows: int

    @property
    def end(self) -> int:
        """Of its first row."""
        return self.start + self.extent


def row_view(tensor: Tensor, rows: int) -> RowView | None:
    """Where `rows` rows of a tensor of any shape and dtype lie; None where it does not have that many, outermost."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    wide = [
        (stride, size == rows, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    ]
    if rows < 2 or tensor.numel() == 0 or not wide:
        return None
    pitch, has_rows, _ = max(wide)
    extent = 1 + sum((size - 1) * stride for stride, _, size in wide) - (rows - 1) * pitch
    if not has_rows or not 1 <= extent <= pitch:
        return None  # no rows, or rows that share bytes
    size = tensor.element_size()
    return RowView(int(tensor.storage_offset()) * size, pitch * size, extent * size, rows)


def is_made_of_parameters(tensor: Tensor) -> bool:
    """Whether a tensor, of any shape and dtype, is a module's parameter, a view or cast of one, or a stack of these.

    Its leading size may be that of the rows by chance, but all of it is live.
    """
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return True
    todo = [tensor.grad_fn]
    for node in todo:  # grows
        if node is None or node.name() in _PICKS or len(todo) > _LONGEST_CHAIN:
            return False
        if node.name() == "torch::autograd::AccumulateGrad":
            if not isinstance(node.variable, nn.Parameter):  # type: ignore[attr-defined]
                return False
        elif not node.next_functions:
            return False
        todo.extend(earlier for earlier, _ in node.next_functions)
    return True


@torch.compiler.disable  # it asks autograd, which no compiled code can
def outer_hooks() -> Hooks | None:
    """The innermost (pack, unpack) of torch.autograd.graph.saved_tensors_hooks now, which hooks pushed next will hide.

    pack takes a tensor of any shape and dtype, unpack gives the same again.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@dataclass(frozen=True)
class Typed:
    """How a tensor looks at its storage; offset in elements."""

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> "Typed":
        """tensor: any shape and dtype; without offset and strides if it has none, as sparse ones."""
        if tensor.layout is not torch.strided:
            return Typed(tensor.dtype, 0, tensor.size(), ())
        return Typed(tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def over(self, memory: Tensor, first_byte: int) -> Tensor:
        """The same view over a copy of the storage's bytes from first_byte on.

        memory: [N], uint8. Returns any shape and dtype.
        """
        offset = self.offset - first_byte // self.dtype.itemsize
        return memory.new_empty(0, dtype=self.dtype).set_(memory.untyped_storage(), offset, self.size, self.stride)


@dataclass(frozen=True)
class Seen:
    """A tensor of any shape and dtype as it was at one moment; rows: None where it is no row tensor."""

    tensor: Tensor
    version: int
    rows: RowView | None

    @staticmethod
    def now(tensor: Tensor, rows: RowView | None) -> "Seen":
        """tensor: any shape and dtype."""
        # An output would keep its node alive and the node its output. A leaf is given back as the very object.
        return Seen(tensor if tensor.is_leaf else tensor.detach(), tensor._version, rows)

    def check_unchanged(self) -> None:
        """Raises RuntimeError if it was changed in place since. torch looks at that only where there are no hooks."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} that backward needs was changed in place after it was "
                f"saved: it is at version {self.tensor._version}, and was at {self.version}"
            )


class SavedTensor:
    """What autograd holds instead of a tensor.

    Until its context ends, and for good if the stash does not take it, `seen` is what was saved (or `packed` what the
    outer hooks made of it); for a stashed one `memory` is where its bytes come back.
    """

    __slots__ = ("group", "seen", "packed", "outer_unpack", "memory", "typed", "may_have_rows")

    def __init__(self, group: Any, tensor: Tensor, *, may_have_rows: bool) -> None:
        """tensor: any shape and dtype. may_have_rows: False for weights and tensors of other devices or kinds."""
        self.group, self.typed, self.may_have_rows = group, Typed.of(tensor), may_have_rows
        self.seen: Seen | None = None
        self.packed: Any = None
        self.outer_unpack: Callable[[Any], Tensor] | None = None
        self.memory: Any = None

    def hand_on(self, tensor: Tensor, hooks: Hooks) -> None:
        """Gives the tensor, any shape and dtype, to hooks around the context, which the context's own hide it from."""
        pack, self.outer_unpack = hooks
        self.packed = pack(tensor)

    def take_late(self, mark: "Mark") -> bool:
        """Whether this is a part of a tensor that was marked after it was saved: its rows are known from now on."""
        if self.seen is None or not self.may_have_rows or mark.seen.rows is None:
            return False
        rows = row_view(self.seen.tensor, mark.seen.rows.rows)
        if rows is None or not Block.of(mark.seen).overlaps(Block.of(Seen(self.seen.tensor, 0, rows))):
            return False
        self.seen = Seen(self.seen.tensor, self.seen.version, rows)
        return True

    def kept(self) -> Tensor:
        """The tensor as it was saved: any shape and dtype."""
        if self.outer_unpack is not None:
            return self.outer_unpack(self.packed)
        assert self.seen is not None, "neither kept nor stashed"
        self.seen.check_unchanged()
        return self.seen.tensor


@dataclass(frozen=True)
class Mark:
    """What the user said about a tensor; see StashGroup.mark."""

    seen: Seen
    priority: Priority
    tokens_per_row: int
    recompute: Callable[..., None] | None
    sources: tuple[Seen, ...]


@dataclass
class Block:
    """Rows of one memory that are stashed together: one TensorSpec. start, end: of the first row, in bytes."""

    storage: torch.UntypedStorage
    start: int
    end: int
    pitch: int
    rows: int
    mark: Mark | None = None
    saved: list[SavedTensor] = field(default_factory=list)
    is_source: bool = False  # of a needed tensor that can be computed again

    @staticmethod
    def of(seen: Seen, mark: Mark | None = None) -> "Block":
        """The block of one row tensor."""
        assert seen.rows is not None, "no row tensor"
        rows = seen.rows
        return Block(seen.tensor.untyped_storage(), rows.start, rows.end, rows.pitch, rows.rows, mark)

    @property
    def spec(self) -> TensorSpec:
        """As the pool takes it."""
        priority, tokens_per_row = Priority.INPUT, 1
        if self.mark is not None:
            priority, tokens_per_row = self.mark.priority, self.mark.tokens_per_row
        return TensorSpec(self.end - self.start, self.pitch, self.rows, priority, tokens_per_row)

    def bytes_of_rows(self, device: torch.device) -> Tensor:
        """From the first row's first byte to the last row's last: [N], uint8."""
        num_bytes = (self.rows - 1) * self.pitch + self.end - self.start
        return torch.empty(0, dtype=torch.uint8, device=device).set_(self.storage, self.start, (num_bytes,), (1,))

    def cuts_like(self, other: "Block") -> bool:
        """Whether both are rows of one memory with one pitch."""
        return (self.storage._cdata, self.pitch, self.rows) == (other.storage._cdata, other.pitch, other.rows)

    def holds(self, other: "Block") -> bool:
        """Whether all bytes of the other are bytes of this one."""
        return self.cuts_like(other) and self.start <= other.start and other.end <= self.end

    def overlaps(self, other: "Block") -> bool:
        """Whether they share bytes."""
        return self.cuts_like(other) and self.start < other.end and other.start < self.end


def blocks_of(saved: list[SavedTensor], marks: list[Mark]) -> list[Block]:
    """The memory that a group's saved row tensors lie in, and that of the sources which recomputing them needs.

    Raises RuntimeError where a tensor was changed in place since it was saved or marked; ValueError where marks do not
    fit what was saved or each other.
    """
    blocks: list[Block] = []
    for mark in marks:
        block = Block.of(mark.seen, mark)
        if any(block.overlaps(other) for other in blocks):
            raise ValueError(f"a tensor of shape {list(mark.seen.tensor.shape)} is marked twice, or a part of it is")
        blocks.append(block)
    located = [(Block.of(one.seen), one) for one in saved if one.seen is not None]
    # From the first byte on, the longest first: so that one pass finds what fits into one row.
    for found, one in sorted(located, key=lambda pair: (pair[0].start, -pair[0].end)):
        _check(one.seen)
        _place(found, blocks).saved.append(one)
    # The least important first: a tensor that is needed makes its sources needed.
    for block in sorted(blocks, key=lambda block: -block.spec.priority):
        if block.mark is not None and (block.saved or block.is_source):
            _check(block.mark.seen)
            for source in block.mark.sources:
                _need(source, blocks, priority=block.mark.priority)
    return [block for block in blocks if block.saved or block.is_source]


def block_with(seen: Seen, blocks: list[Block]) -> int | None:
    """Index of the block that holds a row tensor."""
    wanted = Block.of(seen)
    return next((index for index, block in enumerate(blocks) if block.holds(wanted)), None)


def _place(found: Block, blocks: list[Block]) -> Block:
    """The block that has or gets these bytes."""
    for block in blocks:
        if block.holds(found):
            return block
        if block.mark is not None and block.overlaps(found):
            shape = list(block.mark.seen.tensor.shape)
            raise ValueError(f"a tensor of shape {shape} is marked, but more of its memory is saved: mark the whole")
        if block.mark is None and block.cuts_like(found) and found.end - block.start <= block.pitch:
            block.end = found.end  # the next columns of the same rows
            return block
    blocks.append(found)
    return found


def _need(source: Seen, blocks: list[Block], *, priority: Priority) -> None:
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


def _check(seen: Seen | None) -> None:
    if seen is not None:
        seen.check_unchanged()
