"""Logical tensors: the unsharded, unpadded tensors of the model, and how the memory of parameters maps to them.

Checkpoints store logical tensors, and initialization draws their values, so both are independent of the parallel
layout. A module whose parameters have inner structure describes them through `logical_pieces`. Ranks, optimizers and
checkpoint files are handled elsewhere.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from megatron.core.dense_memory import dense_strides

WRAPPER_PREFIX = "module."


# Boxes.


class Box(NamedTuple):
    """An axis-aligned window of a tensor, given by its first index and its shape. A 0-dim box contains one element."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """First index beyond the box in each dimension."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def is_inside(self, other: "Box") -> bool:
        """Returns whether every element of this box is in `other`. A box with a negative size is never inside."""
        return all(
            o >= other_o and n >= 0 and e <= other_e
            for o, n, e, other_o, other_e in zip(
                self.offset, self.shape, self.end, other.offset, other.end, strict=True
            )
        )

    def relative_to(self, outer: "Box") -> tuple[slice, ...]:
        """Returns the slices that select this box from a tensor that stores the box `outer`."""
        starts = (o - outer_o for o, outer_o in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + n) for start, n in zip(starts, self.shape, strict=True))


def whole(shape: tuple[int, ...]) -> Box:
    """Returns the box that covers a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def intersection(a: Box, b: Box) -> Box | None:
    """Returns the intersection of two boxes, or None if they share no element."""
    offset = tuple(map(max, a.offset, b.offset))
    shape = tuple(end - o for end, o in zip(map(min, a.end, b.end), offset, strict=True))
    # A side of length zero shares no element; 0-dim boxes always share their single element.
    return None if any(n <= 0 for n in shape) else Box(offset, shape)


def subtract(box: Box, hole: Box) -> list[Box]:
    """Splits the elements of `box` outside `hole` into at most 2d disjoint boxes, for d dimensions."""
    common = intersection(box, hole)
    if common is None:
        return [box]
    parts = []
    for dim in range(len(box.shape)):
        # Split off the parts before and after the hole in this dimension, and shrink the rest to the hole's extent.
        for start, stop in ((box.offset[dim], common.offset[dim]), (common.end[dim], box.end[dim])):
            if stop > start:
                parts.append(_with_extent(box, dim, start=start, length=stop - start))
        box = _with_extent(box, dim, start=common.offset[dim], length=common.shape[dim])
    return parts


class BoxIndex:
    """Spatial index that finds the boxes overlapping a given box without comparing all of them.

    Boxes of similar shape share a grid whose cell sides are their side lengths rounded up to powers of two. Each box
    therefore occupies at most two cells in each dimension. Sharded layouts produce few such shapes, so there are few
    grids.
    """

    def __init__(self, boxes: Iterable[Box] = ()) -> None:
        self._boxes: list[Box] = []
        # Exponents of the cell sides -> cell -> positions in _boxes.
        self._grids: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
        for box in boxes:
            self.add(box)

    def add(self, box: Box) -> None:
        """Adds a box at the next position."""
        if box.volume:
            exponents = tuple((n - 1).bit_length() for n in box.shape)
            grid = self._grids.setdefault(exponents, {})
            for cell in itertools.product(*_cells(box, exponents)):
                grid.setdefault(cell, []).append(len(self._boxes))
        self._boxes.append(box)

    def overlapping(self, box: Box) -> list[int]:
        """Returns the positions of the boxes that share an element with `box`, in insertion order."""
        found: set[int] = set()
        for exponents, grid in self._grids.items():
            cells = _cells(box, exponents)
            # A box that covers many cells scans the occupied cells instead.
            if math.prod(map(len, cells)) <= len(grid):
                near = [grid.get(cell, []) for cell in itertools.product(*cells)]
            else:
                near = [held for cell, held in grid.items() if all(c in side for c, side in zip(cell, cells))]
            found.update(itertools.chain.from_iterable(near))
        return [position for position in sorted(found) if intersection(self._boxes[position], box) is not None]


def disjoint_parts(boxes: list[Box]) -> list[tuple[int, Box]]:
    """Splits boxes into disjoint parts with the same union and returns (index of the source box, part) pairs.

    Equal boxes yield one part. Large boxes remain whole and smaller ones are split, which keeps the number of parts
    low.
    """
    parts: list[tuple[int, Box]] = []
    taken = BoxIndex()
    for index in sorted(range(len(boxes)), key=lambda i: -boxes[i].volume):
        rest = [boxes[index]] if boxes[index].volume else []
        for position in taken.overlapping(boxes[index]):
            rest = [part for piece in rest for part in subtract(piece, parts[position][1])]
            # Replicas, by far the most frequent case, stop here.
            if not rest:
                break
        for part in rest:
            parts.append((index, part))
            taken.add(part)
    return parts


def _cells(box: Box, exponents: tuple[int, ...]) -> list[range]:
    """Returns the range of grid cells with side 2^exponent that the box covers in each dimension."""
    return [range(o >> b, ((e - 1) >> b) + 1) for o, e, b in zip(box.offset, box.end, exponents, strict=True)]


def _with_extent(box: Box, dim: int, *, start: int, length: int) -> Box:
    offset, shape = list(box.offset), list(box.shape)
    offset[dim], shape[dim] = start, length
    return Box(tuple(offset), tuple(shape))


# Logical pieces.


@dataclasses.dataclass(frozen=True)
class LogicalPiece:
    """A strided window of a parameter's memory and the box of the logical tensor that it fills.

    shape, stride, storage_offset: the window, as in torch.as_strided; the offset counts from the parameter's first
    element. key, global_shape: name and shape of the logical tensor. global_offset: index of the window's first element
    in the logical tensor. The box has the window's shape. The same piece describes a parameter, its fp32 master weight
    and its optimizer moments.
    """

    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = {len(self.shape), len(self.stride), len(self.global_shape), len(self.global_offset)}
        if len(lengths) != 1:
            raise ValueError(
                f"logical piece {self.key}: shape, stride, global_shape and global_offset must have the same number of "
                f"dimensions: {self}"
            )
        # Checked on construction rather than on save, because here the key still identifies the faulty module.
        if not Box(self.global_offset, self.shape).is_inside(whole(self.global_shape)):
            raise ValueError(f"logical piece {self.key}: the box must be inside the logical tensor: {self}")

    def view_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the window as a view of `tensor`.

        tensor: [*parameter's shape], any dtype. It must be contiguous or have the strides of the piece, as for pieces
        from `memory_piece`. Returns [*shape], same dtype.
        """
        if not (tensor.is_contiguous() or tensor.stride() == self.stride):
            raise ValueError(f"logical piece {self.key}: requires a contiguous tensor, got strides {tensor.stride()}")
        # as_strided checks only against the whole storage, which a flat buffer shares with neighboring parameters.
        reach = self.storage_offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        if math.prod(self.shape) > 0 and reach >= tensor.numel():
            raise ValueError(
                f"logical piece {self.key}: reaches element {reach} of a tensor of {tensor.numel()} elements"
            )
        # torch counts from the start of the storage. A piece counts from the tensor, which may be part of a buffer.
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.storage_offset)


@runtime_checkable
class HasLogicalPieces(Protocol):
    """Module whose parameters have inner structure, such as gate and up, grouped q/k/v, stacked experts or padding."""

    def logical_pieces(self, prefix: str) -> dict[str, list[LogicalPiece]]:
        """Returns the pieces of the parameters whose layout in checkpoints differs from their layout in memory.

        prefix: the module's full name with a trailing dot, empty at the root. The key of every piece starts with it.
        The returned names are relative to the module and may refer to submodules ("linear_fc1.weight"). A parameter
        that is not included is stored unchanged, or as its submodule describes. If both a module and its submodule
        describe a parameter, the outer module takes precedence.
        """
        ...


def canonical_name(name: str) -> str:
    """Strips the prefixes of wrappers such as DDP from a parameter name: "module.module.x.weight" -> "x.weight"."""
    # Wrappers can be nested, for example a precision wrapper inside DDP.
    while name.startswith(WRAPPER_PREFIX):
        name = name.removeprefix(WRAPPER_PREFIX)
    return name


def identity_piece(key: str, shape: tuple[int, ...]) -> LogicalPiece:
    """Returns the piece of a contiguous tensor that is stored whole."""
    # Contiguous strides even in dimensions of size 1, because the piece must not depend on how the tensor was created.
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return LogicalPiece(key, tuple(shape), stride, 0, tuple(shape), (0,) * len(shape))


def memory_piece(key: str, tensor: torch.Tensor) -> LogicalPiece:
    """Returns the piece of a dense tensor that is stored whole, in logical order.

    tensor: any shape and dtype.
    """
    piece = identity_piece(key, tuple(tensor.shape))
    return piece if tensor.is_contiguous() else dataclasses.replace(piece, stride=dense_strides(tensor))


def model_logical_pieces(model: torch.nn.Module) -> dict[str, list[LogicalPiece]]:
    """Returns the pieces of each parameter of `model`, by canonical name, in named_parameters order.

    A parameter with two names (tied embeddings) appears once, under its first name. Raises ValueError if a module
    describes a parameter that does not exist in the model.
    """
    described = _described_pieces(model)
    pieces = {}
    for name, parameter in model.named_parameters():
        name = canonical_name(name)
        pieces[name] = described.pop(name, []) or [memory_piece(name, parameter)]
    # A module may also describe a buffer, or a tied parameter under its second name. Any other name is a mistake.
    others = {canonical_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    others.update(canonical_name(name) for name, _ in model.named_buffers(remove_duplicate=False))
    # A misspelled name would silently store the parameter unconverted, in a layout that no other model can read.
    unknown = sorted(described.keys() - others)
    if unknown:
        raise ValueError(f"logical_pieces describes parameters that are not in the model: {', '.join(unknown)}")
    return pieces


def pieces_of_tensor(name: str, tensor: torch.Tensor, logical: Mapping[str, list[LogicalPiece]]) -> list[LogicalPiece]:
    """Returns the pieces of a parameter or buffer. A tensor without pieces is stored whole under its name.

    tensor: any shape and dtype, on any device. logical: the result of `model_logical_pieces`.
    """
    return logical.get(name) or [identity_piece(name, tuple(tensor.shape))]


def _described_pieces(model: torch.nn.Module) -> dict[str, list[LogicalPiece]]:
    described: dict[str, list[LogicalPiece]] = {}
    for prefix, module in _structured_modules(model):
        for local_name, pieces in module.logical_pieces(prefix).items():
            # named_modules yields parents first, so setdefault keeps the outer description.
            described.setdefault(prefix + local_name, pieces)
    return described


def _structured_modules(model: torch.nn.Module) -> Iterator[tuple[str, HasLogicalPieces]]:
    for name, module in model.named_modules():
        if isinstance(module, HasLogicalPieces):
            yield canonical_name(name + ".") if name else "", module


# Flat ranges of parameters.


def range_views(pieces: Sequence[LogicalPiece], flat: torch.Tensor, *, start: int) -> list[torch.Tensor]:
    """Returns views of the non-padding elements in a flat range of a parameter.

    flat: [N], any dtype, contiguous: the elements [start, start + N) of the flattened parameter. Returns views of any
    shape, same dtype.
    """
    return [view for piece in pieces for _, view in views_of_range(piece, flat, start=start)]


def boxes_of_range(piece: LogicalPiece, *, start: int, end: int) -> list[Box]:
    """Returns disjoint boxes that cover the window's elements in the range [start, end) of the flattened parameter.

    The boxes use the indices of the window. Raises ValueError if no permutation of the window's dimensions is row-major
    in memory.
    """
    if math.prod(piece.shape) == 0:
        return []
    order = _outermost_first(piece)
    shape = tuple(piece.shape[dim] for dim in order)
    stride = tuple(piece.stride[dim] for dim in order)
    first = _count_before(shape, stride, position=start - piece.storage_offset)
    last = _count_before(shape, stride, position=end - piece.storage_offset)
    # Convert from memory order back to the window's order of dimensions.
    place = {dim: index for index, dim in enumerate(order)}
    dims = range(len(order))
    return [
        Box(tuple(box.offset[place[dim]] for dim in dims), tuple(box.shape[place[dim]] for dim in dims))
        for box in _boxes_in_order(shape, first, last=last)
    ]


def views_of_range(
    piece: LogicalPiece, flat: torch.Tensor, *, start: int
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yields (offset in the logical tensor, view) for each box of a flat range: at most 2d - 1 boxes per piece.

    flat: [N], any dtype, contiguous: the elements [start, start + N) of the flattened parameter. The views alias
    `flat`.
    """
    assert flat.dim() == 1 and flat.is_contiguous(), "a flat range of a parameter must be contiguous"
    base = flat.storage_offset() + piece.storage_offset - start
    for box in boxes_of_range(piece, start=start, end=start + flat.numel()):
        inside = sum(o * s for o, s in zip(box.offset, piece.stride, strict=True))
        offset = tuple(g + o for g, o in zip(piece.global_offset, box.offset, strict=True))
        yield offset, flat.as_strided(box.shape, piece.stride, base + inside)


def _outermost_first(piece: LogicalPiece) -> list[int]:
    """Returns the dimensions in order of decreasing stride, so that each stride spans all later dimensions."""
    # The stride of a dimension of size 1 is meaningless.
    order = sorted(range(len(piece.shape)), key=lambda dim: (piece.shape[dim] > 1, -piece.stride[dim]))
    reach = 0
    for dim in reversed(order):
        if piece.shape[dim] > 1:
            if piece.stride[dim] <= reach:
                raise ValueError(f"logical piece {piece.key}: no order of dimensions is row-major in memory: {piece}")
            reach += (piece.shape[dim] - 1) * piece.stride[dim]
    return order


def _count_before(shape: tuple[int, ...], stride: tuple[int, ...], *, position: int) -> int:
    """Counts the window's elements before `position`, which is relative to the window's first element.

    shape, stride: the window's dimensions in memory order.
    """
    if position <= 0:
        return 0
    count = 0
    for dim, (length, step) in enumerate(zip(shape, stride, strict=True)):
        if length == 1:
            continue
        inner = math.prod(shape[dim + 1 :])
        index, position = divmod(position, step)
        # The elements of one index never extend into the next index.
        if index >= length:
            return count + length * inner
        count += index * inner
    return count + (position > 0)


def _boxes_in_order(shape: tuple[int, ...], first: int, *, last: int) -> Iterator[Box]:
    """Yields disjoint boxes that cover the elements [first, last) of a tensor in row-major order."""
    if first >= last:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    row, end = first // inner, last // inner
    if first > row * inner or row == end:
        # The remainder of a partial row, or the range itself if it ends within this row.
        stop = min(last, (row + 1) * inner)
        yield from _in_row(row, _boxes_in_order(shape[1:], first - row * inner, last=stop - row * inner))
        row += 1
    if end > row:
        yield Box((row, *(0,) * (len(shape) - 1)), (end - row, *shape[1:]))
    if end >= row:
        yield from _in_row(end, _boxes_in_order(shape[1:], 0, last=last - end * inner))


def _in_row(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    for box in boxes:
        yield Box((row, *box.offset), (1, *box.shape))
