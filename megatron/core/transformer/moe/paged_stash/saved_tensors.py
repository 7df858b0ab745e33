"""Tensors that autograd saves inside one stash context, and the memory blocks that contain their rows.

group_memory.py moves the blocks into pages and back. stash.py opens and ends the contexts.

A *row tensor* has a dimension of max_rows rows, and this dimension is the outermost in memory: row r starts `pitch`
bytes after row r - 1, and its values lie within `extent` <= pitch bytes. Views of one storage that have the same pitch
and fit into one row become one Block, e.g. the halves of gate_up, or a tensor that two operators save.

[Note: guessed rows] Autograd reports which tensors it saves, but not their meaning. A tensor whose outermost size is
max_rows may contain rows, or it may be a weight whose size happens to be max_rows. Its autograd graph decides. A tensor
computed only from parameters is a weight. A tensor whose graph reaches an embedding, or a plain tensor that requires
grad, is an activation. `weight * mask`, and `x @ weight` for an x without grad, have graphs of the same kind, with
parameters and tensors without grad. Such a tensor is treated as rows, unless the leading size of one of those
parameters is max_rows or an operation on them could have produced that size. The tensor is then ambiguous, and only the
user can decide.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.device.torch_internals import Hooks, active_hooks, storage_id
from megatron.core.transformer.moe.paged_stash.page_layout import Priority, TensorSpec
from megatron.core.transformer.moe.paged_stash.row_encoding import encoded_bytes, encoded_width

# Nodes that look up rows of their input. Their output is an activation, even if the input is a weight.
_EMBEDDINGS = {"EmbeddingBackward0", "EmbeddingBagBackward0"}
_PICKS = {"IndexBackward0", "IndexSelectBackward0", "GatherBackward0"}
# Nodes whose output may have a leading size that none of their inputs has.
_JOINS = {"StackBackward0", "CatBackward0", "RepeatBackward0", "ViewBackward0", "UnsafeViewBackward0"}
# Depth limit for searching a graph that contains more than parameters. Weights are computed in fewer operations, and
# the search from an activation of a deep model would otherwise reach its embedding.
_DEPTH = 64


class RowTensors(enum.Enum):
    """Rule by which a context decides which saved tensors contain rows."""

    DECLARED = "tensors that `rows` or `mark` declared before autograd saved them"
    GUESSED = "declared tensors, and others with max_rows rows unless they are weights; see [Note: guessed rows]"


class StashGroup:
    """Collects the saved tensors of one context, whose meaning the caller can declare. Invalid after the context.

    1. `rows`, `keep` and `mark` declare the meaning of tensors before autograd saves them.
    2. `pack` receives each tensor that autograd saves and decides whether it contains rows.
    3. `blocks` merges the row tensors into the blocks to stash, when the context ends.

    group: owner of the saved tensors, passed on to each SavedTensor and not read here. It is None if the context is
    inactive; `mark` then has no effect. takes_rows: whether row tensors will be stashed; if not, they are saved like
    other tensors. hooks: saved-tensor hooks around the context. has_rungs: whether tensors that can be recomputed are
    dropped if pages run out. takes: rule that decides which tensors contain rows. encodes: whether declared rows of
    bf16 are stored in 8 bits. Others remain exact, because the backward of many functions fails for rounded values: a
    maximum is compared with its input, and a logarithm divides by it.
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
        encodes: bool = False,
    ) -> None:
        self._encodes = encodes
        self._device, self._max_rows, self._group, self._hooks = device, max_rows, group, hooks
        self._takes_rows, self._has_rungs, self._takes = takes_rows, has_rungs, takes
        self._with_rows: list[SavedTensor] = []
        self._others: list[SavedTensor] = []
        self._marks: list[Mark] = []
        self._elsewhere: set[str] = set()  # devices other than the pool's on which autograd saved rows
        self._declared: dict[int, torch.UntypedStorage] = {}  # by address of the storage object
        self._kept: dict[int, torch.UntypedStorage] = {}
        # Whether max_rows is also the outermost size of a weight, and whether any saved tensor has it as another size.
        self._has_weights = self._has_such_sizes = False

    def keep(self, *tensors: Tensor) -> None:
        """Declares that tensors are not rows although their outermost size is max_rows. Call it before their use.

        Use it for weights that autograd's graph cannot distinguish from activations: buffers, plain tensors, casts of
        frozen weights. tensors: any shape and dtype; the declaration includes their views.
        """
        if self._group is not None:
            self._kept |= _storages(tensors)
            weights = [tensor for tensor in tensors if tensor.dim() > 1 and tensor.is_floating_point()]
            self._has_weights = self._has_weights or any(row_view(weight, self._max_rows) for weight in weights)

    def rows(self, *tensors: Tensor) -> None:
        """Declares that tensors contain rows, even if other tensors have the same size. Call it before their use.

        tensors: any shape and dtype; the declaration includes their views. Parameters are never rows.
        """
        if self._group is not None:
            self._declared |= _storages(tensors)

    def mark(
        self,
        tensor: Tensor,
        *,
        priority: Priority = Priority.INPUT,
        recompute: Callable[..., None] | None = None,
        sources: Sequence[Tensor] = (),
        tokens_per_row: int = 1,
    ) -> None:
        """Annotates a tensor that autograd saves inside this context. Has no effect if the tensor is not saved.

        tensor: any width and dtype, with max_rows rows as its outermost dimension in memory, or with ceil(max_rows /
        tokens_per_row), as for scales of 32 tokens each. priority: importance of its pages; ACT is dropped first.
        recompute(out, needed, *sources): writes the live rows of a dropped GATE_UP or ACT tensor into `out`, on the
        current stream, and returns None. It is always called: needed, [1], int64, on the device, is 0 if the tensor was
        not dropped, and recompute must then change nothing. sources: row tensors that recompute reads, each more
        important than `tensor`. Sources that autograd does not save are stashed too. recompute may read other tensors
        from its closure. Raises ValueError for tensors without such rows, and for combinations of priority, recompute
        and sources that do not match.
        """
        if self._group is None:
            return
        self.rows(tensor, *sources)
        droppable = priority is not Priority.INPUT
        if droppable != (recompute is not None) or droppable != bool(sources):
            raise ValueError(
                f"priority is {priority.name} with {'a' if recompute else 'no'} recompute and {len(sources)} sources: "
                "GATE_UP and ACT require both for their recomputation, and INPUT accepts neither"
            )
        if tokens_per_row < 1:
            raise ValueError(f"tokens_per_row ({tokens_per_row}) must be at least 1")
        if droppable and not self._has_rungs:
            return  # unmarked tensors are as important as inputs
        snapshot = self._snapshot(tensor, tokens_per_row=tokens_per_row)
        needed = tuple(self._snapshot(source, tokens_per_row=1) for source in sources)
        self._marks.append(Mark(snapshot, priority, tokens_per_row, recompute, needed))

    def pack(self, tensor: Tensor) -> "SavedTensor":
        """Pack hook for autograd. Collects row tensors; saves other tensors or passes them to outer hooks.

        tensor: any shape and dtype.
        """
        assert self._group is not None, "hooks without a group"
        origin = self._origin(tensor)
        may_have_rows = type(tensor) is Tensor and tensor.device == self._device and origin is not Origin.NOT_ROWS
        rows = row_view(tensor, self._max_rows) if may_have_rows else None
        if tensor.device != self._device and origin is not Origin.NOT_ROWS and row_view(tensor, self._max_rows):
            self._elsewhere.add(str(tensor.device))
        saved = SavedTensor(self._group, tensor, may_have_rows=may_have_rows)
        if self._takes is RowTensors.GUESSED:
            is_matrix = tensor.dim() > 1 and tensor.is_floating_point() and tensor.layout is torch.strided
            sizes = tensor.shape if is_matrix else ()
            self._has_such_sizes = self._has_such_sizes or sizes.count(self._max_rows) > int(rows is not None)
            saved.is_unclear = origin is Origin.UNCLEAR or (tensor.is_leaf and not tensor.requires_grad)
        is_taken = rows is not None and self._takes_rows
        if is_taken or self._hooks is None:
            saved.snapshot = Snapshot.of(tensor, rows)
        else:
            saved.hand_on(tensor, self._hooks)
        (self._with_rows if is_taken else self._others).append(saved)
        return saved

    @property
    def has_saved(self) -> bool:
        """Whether autograd saved any tensor."""
        return bool(self._with_rows or self._others)

    def blocks(self) -> list["Block"]:
        """Returns the memory blocks to stash. The list is empty if autograd saved only weights.

        Raises the errors of blocks_of, and ValueError if autograd saved activations, but none with max_rows rows on the
        pool's device.
        """
        for mark in self._marks:
            if mark.tokens_per_row > 1:
                self._with_rows += [saved for saved in self._others if saved.take_late(mark)]
        if self._elsewhere and not self._with_rows:
            raise ValueError(
                f"autograd saved rows only on {sorted(self._elsewhere)}, but the pool is on {self._device}: the pool "
                "must be on the device of the experts"
            )
        if self._takes is RowTensors.DECLARED:
            return self._merged()
        self._refuse_unclear()
        if not self._with_rows:
            shapes = sorted({tuple(saved.shape) for saved in self._others if saved.may_have_rows})
            if shapes:
                raise ValueError(
                    f"max_rows is {self._max_rows}, but none of the tensors that autograd saved on {self._device} has "
                    f"this size as its outermost dimension in memory; their shapes are {shapes}"
                )
        return self._merged()

    def _merged(self) -> list["Block"]:
        blocks = blocks_of(self._with_rows, self._marks)
        for block in blocks if self._encodes else ():
            if storage_id(block.storage) in self._declared:
                block.encode_if_smaller()
        return blocks

    def forget(self) -> None:
        """Drops all saved tensors, even if autograd still references them. Backward through them then raises."""
        for saved in (*self._with_rows, *self._others):
            saved.snapshot = saved.packed = None

    def close(self) -> None:
        """Stops collecting and drops all references, because autograd keeps `pack` and thereby this object alive."""
        self._group = self._hooks = None
        self._with_rows, self._others, self._marks, self._kept, self._declared = [], [], [], {}, {}

    def _origin(self, tensor: Tensor) -> "Origin":
        """Returns the declared origin of a saved tensor, or, without a declaration, its origin in autograd's graph.

        With RowTensors.DECLARED, undeclared tensors are not rows.
        """
        if _is_among(tensor, self._kept):
            return Origin.NOT_ROWS
        # Searching a graph takes the host a millisecond, during which a GPU would be idle.
        if _is_among(tensor, self._declared) and not is_parameter(tensor):
            return Origin.ROWS
        if self._takes is RowTensors.DECLARED:
            return Origin.NOT_ROWS
        origin = origin_of(tensor, self._max_rows)
        if origin is Origin.NOT_ROWS:
            self._has_weights = self._has_weights or row_view(tensor, self._max_rows) is not None
        return origin

    def _refuse_unclear(self) -> None:
        """Raises ValueError for undeclared tensors that may be rows or weights."""
        for saved in self._with_rows:
            assert saved.snapshot is not None, "accepted without a snapshot"
            tensor = saved.snapshot.tensor
            # A tensor without history is ambiguous only if a weight or a dimension has the same size.
            is_wide = tensor.is_floating_point() and tensor.numel() > self._max_rows
            is_doubtful = saved.has_history or self._has_weights or (is_wide and self._has_such_sizes)
            if saved.is_unclear and is_doubtful and not _is_among(tensor, self._declared):
                raise ValueError(
                    f"autograd saved a tensor of shape {list(tensor.shape)}, {tensor.dtype}, whose outermost size "
                    f"is max_rows ({self._max_rows}): it may contain rows or be a weight, such as a parameter times a "
                    "buffer. Before it is used, call group.keep(tensor) for a weight or an index of experts, "
                    "group.rows(tensor) for rows, or choose a max_rows that is not a size of a weight"
                )

    def _snapshot(self, tensor: Tensor, *, tokens_per_row: int) -> "Snapshot":
        rows = -(-self._max_rows // tokens_per_row)
        is_activation = type(tensor) is Tensor and tensor.device == self._device and not is_parameter(tensor)
        view = row_view(tensor, rows) if is_activation and not _is_among(tensor, self._kept) else None
        if view is None:
            found = f"{list(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
            raise ValueError(
                f"a tensor of shape {found} is not a row tensor of this context: it must be an activation on "
                f"{self._device} with {rows} rows as its outermost dimension in memory (max_rows {self._max_rows}, "
                f"tokens_per_row {tokens_per_row}); scales that are not in token order cannot be stashed"
            )
        return Snapshot.of(tensor, view)


@dataclass(frozen=True)
class Mark:
    """Annotation that StashGroup.mark adds to a tensor."""

    snapshot: "Snapshot"
    priority: Priority
    tokens_per_row: int
    recompute: Callable[..., None] | None
    sources: tuple["Snapshot", ...]


class Origin(enum.Enum):
    """Kind of data that a tensor was computed from."""

    NOT_ROWS = "only parameters; or declared as not rows, or undeclared where only declared tensors are rows"
    ROWS = "activations; or no parameter in its graph can be the source of its size; or declared as rows"
    UNCLEAR = "parameters and tensors without grad, either of which may be the source of its size"


def is_parameter(tensor: Tensor) -> bool:
    """Returns whether a tensor is a module's parameter or a view of a parameter.

    tensor: any shape and dtype.
    """
    # The check of nn.Parameter runs Python code, which the host can skip for most tensors.
    return any(type(one) is not Tensor and isinstance(one, nn.Parameter) for one in (tensor, tensor._base))


def origin_of(tensor: Tensor, max_rows: int) -> Origin:
    """Determines from autograd's graph what a tensor was computed from. See [Note: guessed rows].

    tensor: any shape and dtype, with outermost size max_rows.
    """
    if is_parameter(tensor):
        return Origin.NOT_ROWS
    if tensor.grad_fn is None:
        return Origin.ROWS
    level: list[torch.autograd.graph.Node] = [tensor.grad_fn]
    seen, depth = set(level), 0
    has_constants = may_be_weight = False
    while level:
        if has_constants and depth == _DEPTH:
            return Origin.ROWS
        below: list[torch.autograd.graph.Node] = []
        for node in level:
            name = node.name()
            if name in _EMBEDDINGS:
                return Origin.ROWS
            if name == "torch::autograd::AccumulateGrad":
                leaf: Tensor = node.variable  # type: ignore[attr-defined]
                if not isinstance(leaf, nn.Parameter):
                    return Origin.ROWS
                may_be_weight = may_be_weight or leaf.shape[:1] == (max_rows,)
                continue
            earlier = [(one, index) for one, index in node.next_functions if one is not None]
            # A node without inputs, such as a node of a different framework, hides its inputs.
            has_constants = has_constants or name in _PICKS or len(earlier) < max(len(node.next_functions), 1)
            may_be_weight = may_be_weight or _makes(node, name, earlier, max_rows)
            below += [one for one, _ in earlier if one not in seen]
            seen.update(below)
        level, depth = list(dict.fromkeys(below)), depth + 1
    if not has_constants:
        return Origin.NOT_ROWS
    return Origin.UNCLEAR if may_be_weight else Origin.ROWS


def _makes(
    node: torch.autograd.graph.Node,
    name: str,
    earlier: list[tuple[torch.autograd.graph.Node, int]],
    max_rows: int,
) -> bool:
    """Returns whether the node produced a leading size of max_rows by joining, splitting or transposing its inputs."""
    if name in ("TBackward0", "TransposeBackward0", "PermuteBackward0"):
        # The leading size of a transposed parameter is another dimension of the parameter.
        turned = [_leaf_of(one) for one, _ in earlier]
        return any(isinstance(variable, nn.Parameter) and max_rows in variable.shape for variable in turned)
    if name not in _JOINS or len(earlier) < len(node.next_functions) or _leading_size(node, 0) != max_rows:
        return False
    return all(_leading_size(one, index) != max_rows for one, index in earlier)


def _leaf_of(node: torch.autograd.graph.Node) -> Tensor | None:
    """Returns the leaf tensor whose gradient the node accumulates, or None for an operator's node."""
    # Matched by name, because torch's types of nodes do not declare the attribute.
    return getattr(node, "variable", None)


def _leading_size(node: torch.autograd.graph.Node, index: int) -> int | None:
    """Returns the leading size of a node's output, or None if it is unknown."""
    variable = _leaf_of(node)
    if variable is not None:
        return int(variable.shape[0]) if variable.dim() else None
    metadata = node._input_metadata
    if index >= len(metadata) or not metadata[index].shape:
        return None
    return int(metadata[index].shape[0])


class RowView(NamedTuple):
    """Byte positions of a tensor's rows in its storage. Row r occupies extent bytes from byte start + r * pitch on."""

    start: int
    pitch: int
    extent: int
    num_rows: int

    @property
    def end(self) -> int:
        """Byte after the last byte of the first row."""
        return self.start + self.extent


def row_view(tensor: Tensor, num_rows: int) -> RowView | None:
    """Returns the byte positions of a tensor's rows; None unless its outermost dimension in memory has num_rows rows.

    tensor: any shape and dtype.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    if num_rows < 2 or tensor.numel() == 0:
        return None
    size = tensor.element_size()
    if tensor.shape[:1] == (num_rows,) and tensor.is_contiguous():
        row_bytes = tensor.nbytes // num_rows
        return RowView(int(tensor.storage_offset()) * size, row_bytes, row_bytes, num_rows)
    wide = [
        (stride, size == num_rows, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    ]
    if not wide:
        return None
    pitch, has_rows, _ = max(wide)
    extent = 1 + sum((size - 1) * stride for stride, _, size in wide) - (num_rows - 1) * pitch
    if not has_rows or not 1 <= extent <= pitch:
        return None  # no rows, or rows that share bytes
    return RowView(int(tensor.storage_offset()) * size, pitch * size, extent * size, num_rows)


class StorageView(NamedTuple):
    """Describes how a tensor views its storage, to rebuild it over a copy of the storage. offset: in elements."""

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> "StorageView":
        """Describes how a tensor views its storage. Sparse tensors have offset 0 and strides ().

        tensor: any shape and dtype.
        """
        if tensor.layout is not torch.strided:
            return StorageView(tensor.dtype, 0, tensor.size(), ())
        return StorageView(tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def over(self, memory: Tensor, first_byte: int) -> Tensor:
        """Rebuilds the tensor over a copy of its storage.

        memory: [N], uint8, copy of the storage's bytes from first_byte on. Returns any shape and dtype.
        """
        offset = self.offset - first_byte // self.dtype.itemsize
        return memory.new_empty(0, dtype=self.dtype).set_(memory.untyped_storage(), offset, self.size, self.stride)


class Snapshot(NamedTuple):
    """A tensor and its version counter when it was saved or marked. rows: None if it is not a row tensor."""

    tensor: Tensor
    version: int
    rows: RowView | None

    @staticmethod
    def of(tensor: Tensor, rows: RowView | None) -> "Snapshot":
        """Takes a snapshot of a tensor at its current version.

        tensor: any shape and dtype.
        """
        # Detached, because an operator's output keeps the operator's node alive, and the node would keep its output
        # alive. A leaf has no node, and backward must receive the same object.
        return Snapshot(tensor if tensor.is_leaf else tensor.detach(), tensor._version, rows)

    def check_unchanged(self) -> None:
        """Raises RuntimeError if the tensor was changed in place since the snapshot. torch skips this under hooks."""
        if self.tensor._version != self.version:
            raise RuntimeError(changed_in_place(self.tensor.shape, found=self.tensor._version, expected=self.version))


def changed_in_place(shape: torch.Size, *, found: int, expected: int) -> str:
    """Returns the error message for a tensor that was changed before its backward, in torch's wording."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
        f"of shape {list(shape)} that an expert group saved was changed in place after it was saved; it is at "
        f"version {found}, expected {expected}"
    )


class VersionOf:
    """Tracks a tensor's version without its memory, through an empty alias that shares the version counter."""

    __slots__ = ("_alias", "_shape", "_expected")

    def __init__(self, snapshot: Snapshot) -> None:
        self._alias = snapshot.tensor.detach()
        self._shape, self._expected = snapshot.tensor.shape, snapshot.version
        # set_() would be counted as a change of the tensor itself.
        self._alias.data = snapshot.tensor.new_empty(0)

    def change(self) -> str | None:
        """Returns an error message if the tensor was changed in place since the snapshot, else None."""
        if self._alias._version == self._expected:
            return None
        return changed_in_place(self._shape, found=self._alias._version, expected=self._expected)


class SavedTensor:
    """Object that autograd saves in place of a tensor.

    Until the context ends, either `snapshot` contains the tensor, or `packed` the result of the outer hooks. Both
    remain unchanged if the tensor is not stashed. The bytes of a stashed tensor are restored into `memory`, and `view`
    describes the tensor there.
    """

    __slots__ = (
        "group",
        "snapshot",
        "packed",
        "outer_unpack",
        "memory",
        "shape",
        "view",
        "may_have_rows",
        "is_unclear",
        "has_history",
    )

    def __init__(self, group: Any, tensor: Tensor, *, may_have_rows: bool) -> None:
        """Describes a tensor that autograd saves.

        tensor: any shape and dtype. may_have_rows: False for weights and for tensors of other devices or types.
        """
        self.group, self.shape, self.may_have_rows = group, tensor.shape, may_have_rows
        self.snapshot: Snapshot | None = None
        self.view: StorageView | None = None
        self.packed: Any = None
        self.outer_unpack: Callable[[Any], Tensor] | None = None
        self.memory: Any = None
        self.is_unclear = False  # whether it may be a weight; see [Note: guessed rows]
        self.has_history = tensor.grad_fn is not None

    def hand_on(self, tensor: Tensor, hooks: Hooks) -> None:
        """Packs a tensor with the outer hooks, which the hooks of the context override.

        tensor: any shape and dtype.
        """
        pack, self.outer_unpack = hooks
        self.packed = pack(tensor)

    def take_late(self, mark: Mark) -> bool:
        """Records the rows of this tensor if `mark`, which was made later, covers it. Returns whether it does."""
        if self.snapshot is None or not self.may_have_rows or mark.snapshot.rows is None:
            return False
        rows = row_view(self.snapshot.tensor, mark.snapshot.rows.num_rows)
        if rows is None or not Block.of(mark.snapshot).overlaps(Block.of(Snapshot(self.snapshot.tensor, 0, rows))):
            return False
        self.snapshot = Snapshot(self.snapshot.tensor, self.snapshot.version, rows)
        return True

    def kept(self) -> Tensor:
        """Returns the original tensor, any shape and dtype. Must not be called if the tensor was stashed."""
        if self.outer_unpack is not None:
            return self.outer_unpack(self.packed)
        assert self.snapshot is not None, "neither kept nor stashed"
        self.snapshot.check_unchanged()
        return self.snapshot.tensor


@dataclass(eq=False)
class Block:
    """Rows of one storage that are stashed together, as one TensorSpec.

    start, end: byte bounds of the first row. encoded_width: elements of a row that is stored in 8 bits; 0 if rows are
    stored as they are. See [Note: compressed stash] in row_encoding.py.
    """

    storage: torch.UntypedStorage
    start: int
    end: int
    pitch: int
    num_rows: int
    mark: Mark | None = None
    saved: list[SavedTensor] = field(default_factory=list)
    sources: list["Block"] = field(default_factory=list)  # of the mark's sources, if the tensor is needed
    is_source: bool = False  # whether a tensor that backward uses can be recomputed from it
    encoded_width: int = 0

    @staticmethod
    def of(snapshot: Snapshot, mark: Mark | None = None) -> "Block":
        """Builds a Block from a snapshot of one row tensor."""
        assert snapshot.rows is not None, "not a row tensor"
        rows = snapshot.rows
        return Block(snapshot.tensor.untyped_storage(), rows.start, rows.end, rows.pitch, rows.num_rows, mark)

    @staticmethod
    def whole(tensor: Tensor) -> "Block":
        """Builds the Block of a tensor whose first dimension has the rows: [C, *], any dtype, contiguous, offset 0."""
        row_bytes = tensor.nbytes // tensor.shape[0]
        return Block(tensor.untyped_storage(), 0, row_bytes, row_bytes, tensor.shape[0])

    def encode_if_smaller(self, dtype: torch.dtype | None = None) -> None:
        """Stores rows in 8 bits if all their bytes belong to saved bf16 tensors, and this saves bytes.

        dtype: of a tensor that has all bytes of the rows; None for a block of saved tensors with snapshots.
        """
        snapshots = [one.snapshot for one in self.saved if one.snapshot is not None]
        if self.mark is not None:
            snapshots.append(self.mark.snapshot)
        found = {one.tensor.dtype for one in snapshots} if dtype is None else {dtype}
        is_row = self.mark is None or self.mark.tokens_per_row == 1
        if len(found) == 1 and is_row and (dtype is not None or _covers(snapshots, self.start, self.end)):
            self.encoded_width = encoded_width(self.end - self.start, *found)

    @property
    def priority(self) -> Priority:
        """Importance of the block's pages."""
        return Priority.INPUT if self.mark is None else self.mark.priority

    @property
    def stored_bytes(self) -> int:
        """Number of bytes of a row in pages."""
        return encoded_bytes(self.encoded_width) if self.encoded_width else self.end - self.start

    @property
    def spec(self) -> TensorSpec:
        """TensorSpec that describes the block to the pool, a new one in each call."""
        if self.encoded_width:
            return TensorSpec(self.stored_bytes, self.stored_bytes, self.num_rows, self.priority)
        tokens_per_row = 1 if self.mark is None else self.mark.tokens_per_row
        return TensorSpec(self.end - self.start, self.pitch, self.num_rows, self.priority, tokens_per_row)

    @property
    def max_bytes(self) -> int:
        """Number of bytes of all rows before they are encoded, without gaps."""
        return self.num_rows * 2 * self.encoded_width or self.spec.max_bytes

    @property
    def num_bytes(self) -> int:
        """Number of bytes from the start of the first row to the end of the last, including gaps."""
        return (self.num_rows - 1) * self.pitch + self.end - self.start

    def bytes_of_rows(self, device: torch.device) -> Tensor:
        """Views the storage from the start of the first row to the end of the last row: [num_bytes], uint8."""
        return torch.empty(0, dtype=torch.uint8, device=device).set_(self.storage, self.start, (self.num_bytes,), (1,))

    def is_cut_like(self, other: "Block") -> bool:
        """Returns whether both blocks have the same storage, pitch and number of rows."""
        is_same_storage = storage_id(self.storage) == storage_id(other.storage)
        return is_same_storage and (self.pitch, self.num_rows) == (other.pitch, other.num_rows)

    def holds(self, other: "Block") -> bool:
        """Returns whether this block contains all bytes of `other`."""
        return self.is_cut_like(other) and self.start <= other.start and other.end <= self.end

    def overlaps(self, other: "Block") -> bool:
        """Returns whether the blocks have bytes in common."""
        return self.is_cut_like(other) and self.start < other.end and other.start < self.end


def _covers(snapshots: list[Snapshot], start: int, end: int) -> bool:
    """Returns whether the tensors have all bytes of a row from `start` to `end`.

    Other bytes may have any value, even NaN, and a common scale would spread it.
    """
    reached = start
    parts = [(one.rows, one.tensor.nbytes) for one in snapshots if one.rows is not None]
    for rows, num_bytes in sorted(parts, key=lambda part: part[0].start):
        has_all = rows.extent * rows.num_rows == num_bytes
        if has_all and rows.start <= reached:
            reached = max(reached, rows.end)
    return reached >= end


def blocks_of(saved: list[SavedTensor], marks: list[Mark]) -> list[Block]:
    """Merges a group's saved row tensors, and the sources of their recomputations, into memory blocks.

    Raises RuntimeError if a tensor was changed in place since it was saved or marked, and ValueError if the marks
    contradict each other or the saved tensors.
    """
    blocks: list[Block] = []
    for mark in marks:
        block = Block.of(mark.snapshot, mark)
        if any(block.overlaps(other) for other in blocks):
            raise ValueError(f"a tensor of shape {list(mark.snapshot.tensor.shape)}, or a part of it, is marked twice")
        blocks.append(block)
    located = [(Block.of(one.snapshot), one) for one in saved if one.snapshot is not None]
    # Sorted by first byte, the longest first, so that one pass finds all tensors that fit into one row.
    for found, one in sorted(located, key=lambda pair: (pair[0].start, -pair[0].end)):
        assert one.snapshot is not None, "located by its snapshot"
        one.snapshot.check_unchanged()
        _place(found, blocks).saved.append(one)
    # The least important first, because the sources of a required tensor are required too.
    for block in sorted(blocks, key=lambda block: -block.priority):
        if block.mark is not None and (block.saved or block.is_source):
            block.mark.snapshot.check_unchanged()
            block.sources = [_needed(source, blocks, priority=block.mark.priority) for source in block.mark.sources]
    return [block for block in blocks if block.saved or block.is_source]


def _place(found: Block, blocks: list[Block]) -> Block:
    """Returns the block for these bytes: one that contains them, one that they extend, or a new one."""
    for block in blocks:
        if block.holds(found):
            return block
        if block.mark is not None and block.overlaps(found):
            shape = list(block.mark.snapshot.tensor.shape)
            raise ValueError(
                f"a tensor of shape {shape} is marked, but autograd saved a larger part of its memory: mark that tensor"
            )
        if block.mark is None and block.is_cut_like(found) and found.end - block.start <= block.pitch:
            block.end = found.end  # the next columns of the same rows
            return block
    blocks.append(found)
    return found


def _needed(source: Snapshot, blocks: list[Block], *, priority: Priority) -> Block:
    """Returns the block that contains the source of a tensor with this priority, a new one if no block does."""
    source.check_unchanged()
    wanted = Block.of(source)
    for block in blocks:
        if block.holds(wanted):
            break
    else:
        block = wanted
        blocks.append(block)
    block.is_source = True
    if block.priority >= priority:
        raise ValueError(
            f"a source of shape {list(source.tensor.shape)} has priority {block.priority.name}, and the "
            f"tensor recomputed from it has priority {priority.name}: a source must be more important"
        )
    return block


outer_hooks = torch.compiler.disable(active_hooks)  # compiled code cannot query autograd


@torch.compiler.disable
def say_rows_and_others(rows: Sequence[Tensor], others: Sequence[Tensor | None]) -> None:
    """Declares an expert operator's tensors to the enclosing stash context, if there is one.

    rows: row tensors, any shape and dtype. others: weights and offsets, which are never rows, regardless of their
    sizes.
    """
    hooks = active_hooks()
    pack = None if hooks is None else hooks[0]
    group = pack.__self__ if isinstance(pack, MethodType) else None
    if isinstance(group, StashGroup):
        group.rows(*rows)
        group.keep(*(tensor for tensor in others if tensor is not None))


def _storages(tensors: Sequence[Tensor]) -> dict[int, torch.UntypedStorage]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage_id(storage): storage for storage in storages}


def _is_among(tensor: Tensor, storages: Mapping[int, torch.UntypedStorage]) -> bool:
    return bool(storages) and tensor.layout is torch.strided and storage_id(tensor.untyped_storage()) in storages
