"""Arithmetic of boxes: axis-aligned windows of a tensor, as a checkpoint stores and reads them.

Pure functions of integers; no tensors, ranks or files.
"""

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple


class Box(NamedTuple):
    """The window that starts at `offset` and spans `shape`; a 0-dim box holds one element."""

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
        """Whether every element lies in `other`; sizes below zero are never inside."""
        return all(
            o >= other_o and n >= 0 and e <= other_e
            for o, n, e, other_o, other_e in zip(
                self.offset, self.shape, self.end, other.offset, other.end, strict=True
            )
        )

    def relative_to(self, outer: "Box") -> tuple[slice, ...]:
        """Slices that select this box from a tensor that holds `outer`."""
        starts = (o - outer_o for o, outer_o in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + n) for start, n in zip(starts, self.shape, strict=True))


def whole(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def intersection(a: Box, b: Box) -> Box | None:
    """The common window, None if the boxes share no element."""
    offset = tuple(map(max, a.offset, b.offset))
    shape = tuple(end - o for end, o in zip(map(min, a.end, b.end), offset, strict=True))
    # A side of zero length shares no element; boxes without dimensions always share their one.
    return None if any(n <= 0 for n in shape) else Box(offset, shape)


def subtract(box: Box, hole: Box) -> list[Box]:
    """At most 2d disjoint boxes that make up `box` without `hole`."""
    common = intersection(box, hole)
    if common is None:
        return [box]
    parts = []
    for dim in range(len(box.shape)):
        # Cut what lies before and after the hole in this dimension; what remains shrinks to the hole's extent.
        for start, stop in ((box.offset[dim], common.offset[dim]), (common.end[dim], box.end[dim])):
            if stop > start:
                parts.append(_with_extent(box, dim, start=start, length=stop - start))
        box = _with_extent(box, dim, start=common.offset[dim], length=common.shape[dim])
    return parts


class BoxIndex:
    """Finds those of many boxes that share elements with one, in a time that hardly depends on how many there are.

    Boxes of about the same shape are in a grid of cells of that shape, its sides rounded up to powers of two: each is
    in at most two cells a dimension. Shapes of that kind are few, whatever the layout.
    """

    def __init__(self, boxes: Iterable[Box] = ()) -> None:
        self._boxes: list[Box] = []
        # By the exponents of a cell's sides, then by the cell: positions in _boxes.
        self._grids: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
        for box in boxes:
            self.add(box)

    def add(self, box: Box) -> None:
        """Puts one more at the end."""
        if box.volume:
            exponents = tuple((n - 1).bit_length() for n in box.shape)
            grid = self._grids.setdefault(exponents, {})
            for cell in itertools.product(*_cells(box, exponents)):
                grid.setdefault(cell, []).append(len(self._boxes))
        self._boxes.append(box)

    def touching(self, box: Box) -> list[int]:
        """Positions of the boxes that share an element with `box`, in the order in which they were added."""
        found: set[int] = set()
        for exponents, grid in self._grids.items():
            cells = _cells(box, exponents)
            # A box of many cells looks at those that hold anything.
            if math.prod(map(len, cells)) <= len(grid):
                near = [grid.get(cell, []) for cell in itertools.product(*cells)]
            else:
                near = [held for cell, held in grid.items() if all(c in side for c, side in zip(cell, cells))]
            found.update(itertools.chain.from_iterable(near))
        return [position for position in sorted(found) if intersection(self._boxes[position], box) is not None]


def disjoint_parts(boxes: list[Box]) -> list[tuple[int, Box]]:
    """Disjoint boxes with the same union: (index of the box it was cut from, part); equal boxes give one part.

    Larger boxes keep their form and smaller ones are cut, so few parts come out.
    """
    parts: list[tuple[int, Box]] = []
    taken = BoxIndex()
    for index in sorted(range(len(boxes)), key=lambda i: -boxes[i].volume):
        rest = [boxes[index]] if boxes[index].volume else []
        for position in taken.touching(boxes[index]):
            rest = [part for piece in rest for part in subtract(piece, parts[position][1])]
            # Replicas, by far the most frequent case, end here at once.
            if not rest:
                break
        for part in rest:
            parts.append((index, part))
            taken.add(part)
    return parts


def _cells(box: Box, exponents: tuple[int, ...]) -> list[range]:
    """In each dimension, the cells of side 2^exponent that the box lies in."""
    return [range(o >> b, ((e - 1) >> b) + 1) for o, e, b in zip(box.offset, box.end, exponents, strict=True)]


def _with_extent(box: Box, dim: int, *, start: int, length: int) -> Box:
    offset, shape = list(box.offset), list(box.shape)
    offset[dim], shape[dim] = start, length
    return Box(tuple(offset), tuple(shape))
