"""From a flat range of a parameter to boxes of stored tensors: how a shard enters a checkpoint, or gets initial values.

Pure arithmetic and views. What a parameter is stored as, its module says (logical.py).
"""

import math
from collections.abc import Iterator, Sequence

import torch

from megatron.core.dist_checkpointing.boxes import Box
from megatron.core.dist_checkpointing.logical import LogicalPiece
from megatron.core.dist_checkpointing.mapping import ShardedTensor


def range_tensors(
    pieces: Sequence[LogicalPiece], flat: torch.Tensor, *, start: int, prefix: str = "", allow_cast: bool = False
) -> list[ShardedTensor]:
    """The boxes that hold the range of a parameter which begins at its element `start`: at most 2d - 1 a piece.

    pieces: all of the parameter. flat: [N], any dtype, contiguous; the boxes are views of it, so that loading them
    fills it. Elements of no piece (padding rows) are in no box, nor are empty boxes. prefix goes before each key.
    """
    return [
        ShardedTensor(prefix + piece.key, view, piece.global_shape, offset, allow_cast=allow_cast)
        for piece in pieces
        for offset, view in _boxes_and_views(piece, flat, start=start)
    ]


def range_views(pieces: Sequence[LogicalPiece], flat: torch.Tensor, *, start: int) -> list[torch.Tensor]:
    """Views of what is no padding in a range as range_tensors takes it: flat: [N], any dtype -> any shapes, same."""
    return [view for piece in pieces for _, view in _boxes_and_views(piece, flat, start=start)]


def boxes_of_range(piece: LogicalPiece, *, start: int, end: int) -> list[Box]:
    """Boxes of the window's own indices, disjoint, that lie in elements [start, end) of the flattened parameter.

    Raises ValueError for a window whose elements do not lie in the order of some permutation of its dimensions.
    """
    if math.prod(piece.shape) == 0:
        return []
    order = _outermost_first(piece)
    shape = tuple(piece.shape[dim] for dim in order)
    stride = tuple(piece.stride[dim] for dim in order)
    first = _count_before(shape, stride, position=start - piece.storage_offset)
    last = _count_before(shape, stride, position=end - piece.storage_offset)
    # Back from the order of memory to that of the window.
    place = {dim: index for index, dim in enumerate(order)}
    dims = range(len(order))
    return [
        Box(tuple(box.offset[place[dim]] for dim in dims), tuple(box.shape[place[dim]] for dim in dims))
        for box in _boxes_in_order(shape, first, last=last)
    ]


def _boxes_and_views(
    piece: LogicalPiece, flat: torch.Tensor, *, start: int
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Each box's offset in the stored tensor, and its elements in `flat`."""
    assert flat.dim() == 1 and flat.is_contiguous(), "a range of a parameter is one piece of memory"
    base = flat.storage_offset() + piece.storage_offset - start
    for box in boxes_of_range(piece, start=start, end=start + flat.numel()):
        inside = sum(o * s for o, s in zip(box.offset, piece.stride, strict=True))
        offset = tuple(g + o for g, o in zip(piece.global_offset, box.offset, strict=True))
        yield offset, flat.as_strided(box.shape, piece.stride, base + inside)


def _outermost_first(piece: LogicalPiece) -> list[int]:
    """The dimensions by falling stride; one index of each is then beyond all of those that follow."""
    # A dimension of one element moves nowhere, whatever its stride.
    order = sorted(range(len(piece.shape)), key=lambda dim: (piece.shape[dim] > 1, -piece.stride[dim]))
    reach = 0
    for dim in reversed(order):
        if piece.shape[dim] > 1:
            if piece.stride[dim] <= reach:
                raise ValueError(f"logical piece {piece.key}: no order of dimensions is that of memory: {piece}")
            reach += (piece.shape[dim] - 1) * piece.stride[dim]
    return order


def _count_before(shape: tuple[int, ...], stride: tuple[int, ...], *, position: int) -> int:
    """How many elements of a window lie before `position`, counted from its first; dimensions as in memory."""
    if position <= 0:
        return 0
    count = 0
    for dim, (length, step) in enumerate(zip(shape, stride, strict=True)):
        if length == 1:
            continue
        inner = math.prod(shape[dim + 1 :])
        index, position = divmod(position, step)
        # Nothing inside one index reaches the next one.
        if index >= length:
            return count + length * inner
        count += index * inner
    return count + (position > 0)


def _boxes_in_order(shape: tuple[int, ...], first: int, *, last: int) -> Iterator[Box]:
    """Disjoint boxes of the elements [first, last) of a tensor in row-major order."""
    if first >= last:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    row, end = first // inner, last // inner
    if first > row * inner or row == end:
        # The rest of a row that was begun, or all of it that there is.
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
