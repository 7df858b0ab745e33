"""Which rank makes which matrices orthogonal, where a sharded optimizer cuts them over ranks. Pure.

How it is done, and what is sent for it, is muon_rule.py.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron.core.distributed.layout import BufferLayout
from megatron.core.weight_matrices import MatrixWindow


@dataclass(frozen=True)
class MatrixUnit:
    """Matrices that one rank processes together: elements [start, end) of a flattened parameter.

    No matrix crosses these ends. place: of the parameter's first element in its buffer.
    """

    name: str
    place: int
    start: int
    end: int
    windows: tuple[MatrixWindow, ...]

    @property
    def cost(self) -> int:
        """Approximate multiplications of one Newton-Schulz step of these matrices."""
        shapes = [window.matrix_shape for window in self.windows]
        return sum(min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes)


def units_of(name: str, windows: Iterable[MatrixWindow], *, place: int) -> list[MatrixUnit]:
    """The matrices of a parameter, those that lie between each other in one unit, in the order of their places."""
    units: list[MatrixUnit] = []
    for window in sorted(windows, key=lambda window: window.offset):
        reach = sum((n - 1) * s for n, s in zip(window.shape, window.stride, strict=True))
        start, end = window.offset, window.offset + reach + 1
        inside: tuple[MatrixWindow, ...] = (window,)
        if units and units[-1].end > start:
            last = units.pop()
            start, end, inside = last.start, max(end, last.end), (*last.windows, window)
        units.append(MatrixUnit(name, place, start, end, inside))
    return units


def owners_of(units: Sequence[MatrixUnit], num_ranks: int) -> list[int]:
    """A rank for each unit: the costliest first, each to the rank that has least so far."""
    loads = [(0, rank) for rank in range(num_ranks)]
    owners = [0] * len(units)
    for index in sorted(range(len(units)), key=lambda index: -units[index].cost):
        load, rank = heapq.heappop(loads)
        owners[index] = rank
        heapq.heappush(loads, (load + units[index].cost, rank))
    return owners


def batches_of(units: Sequence[MatrixUnit], *, max_elements: int) -> Iterator[list[MatrixUnit]]:
    """Neighbouring units whose elements are sent together: at least one, and no more than that many elements."""
    batch: list[MatrixUnit] = []
    size = 0
    for unit in units:
        if batch and size + unit.end - unit.start > max_elements:
            yield batch
            batch, size = [], 0
        batch.append(unit)
        size += unit.end - unit.start
    if batch:
        yield batch


def ranges_of(unit: MatrixUnit, layout: BufferLayout, *, is_sharded: bool) -> list[tuple[int, int, int]]:
    """Returns each rank's range of a unit: (rank, first and last element of the flattened parameter), in order."""
    if not is_sharded:
        return [(0, unit.start, unit.end)]
    first, last = unit.place + unit.start, unit.place + unit.end
    bucket = next(bucket for bucket in layout.buckets if bucket.span.start <= first < bucket.span.end)
    size = bucket.span.numel // layout.num_shards
    ranks = range((first - bucket.span.start) // size, (last - 1 - bucket.span.start) // size + 1)
    shards = [(rank, layout.shard(bucket.index, rank)) for rank in ranks]
    return [(rank, max(shard.start, first) - unit.place, min(shard.end, last) - unit.place) for rank, shard in shards]
