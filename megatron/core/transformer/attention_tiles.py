"""Causal attention between parts of a sequence as a list of rectangles: which rows see which columns; pure.

What is computed for a rectangle is tile_kernels.py's; who holds which part is context_parallel.py's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from megatron.core.packed_seq_params import PackedSeqParams

# Rows of a block for narrow windows: fewer would make matrix products too small.
_MIN_ROWS = 64


@dataclass(frozen=True)
class Stretch:
    """Neighbouring tokens of a sequence that also lie side by side in a tensor: places in tensor and sequence."""

    local_start: int
    start: int
    stop: int

    def local(self, start: int, stop: int) -> slice:
        """Where the tokens from `start` to `stop` of the sequence lie in the tensor."""
        return slice(start - self.start + self.local_start, stop - self.start + self.local_start)


@dataclass(frozen=True)
class Tile:
    """Rows of queries against columns of keys, in their own tensors; each row sees at least one of the columns.

    Row i sees column j if i + first <= j <= i + last, None being no limit. batch: of these samples.
    """

    queries: slice
    keys: slice
    first: int | None = None
    last: int | None = None
    batch: slice = field(default_factory=lambda: slice(None))

    @property
    def is_full(self) -> bool:
        """Whether every row sees every column."""
        return self.first is None and self.last is None

    @property
    def is_causal_square(self) -> bool:
        """Whether row i sees columns 0 to i, of as many as there are rows."""
        same = self.queries.stop - self.queries.start == self.keys.stop - self.keys.start
        return self.first is None and self.last == 0 and same


def stretches(chunks: Sequence[slice]) -> list[Stretch]:
    """The chunks of a sequence as they lie one behind the other in a tensor."""
    found: list[Stretch] = []
    place = 0
    for chunk in chunks:
        found.append(Stretch(place, chunk.start, chunk.stop))
        place += chunk.stop - chunk.start
    return found


def tiles_of_batch(
    queries: Sequence[Stretch], keys: Sequence[Stretch], *, segments: Sequence[Sequence[slice]], window: int | None
) -> list[Tile]:
    """causal_tiles of each sample, for as many samples as `segments` has entries; a single entry holds for all."""
    if len(segments) == 1:
        return causal_tiles(queries, keys, segments=segments[0], window=window)
    return [
        replace(tile, batch=slice(sample, sample + 1))
        for sample, its_segments in enumerate(segments)
        for tile in causal_tiles(queries, keys, segments=its_segments, window=window)
    ]


def segments_of_samples(packed: PackedSeqParams | None, *, batch: int, seq_length: int) -> list[list[slice]]:
    """The segments of each sample by their places in it; without borders one entry for all, the whole sequence."""
    if packed is None:
        return [[slice(0, seq_length)]]
    samples: list[list[slice]] = [[] for _ in range(batch)]
    position = 0
    for length in packed.segment_lengths:
        sample, start = divmod(position, seq_length)
        samples[sample].append(slice(start, start + length))
        position += length
    return samples


def causal_tiles(
    queries: Sequence[Stretch], keys: Sequence[Stretch], *, segments: Sequence[slice], window: int | None
) -> list[Tile]:
    """Each pair of tokens that see each other in exactly one tile: of one segment, the key not behind the query and,
    where there is a window, at most `window` tokens before it.

    A stretch of keys must hold all of a stretch of queries, or none of it. segments: of the whole sequence, in order.
    """
    found: list[Tile] = []
    for own in queries:
        for segment in segments:
            for begin, end in _row_blocks(max(own.start, segment.start), min(own.stop, segment.stop), window=window):
                for other in keys:
                    start, stop = max(other.start, segment.start), min(other.stop, end)
                    if window is None:
                        found += _before_and_on_diagonal(own, other, rows=(begin, end), columns=(start, stop))
                    else:
                        found += _in_band(
                            own, other, rows=(begin, end), columns=(max(start, begin - window), stop), window=window
                        )
    return _joined(found)


def _row_blocks(start: int, stop: int, *, window: int | None) -> Iterator[tuple[int, int]]:
    # Of about the window's width: most of a wider block would be masked.
    width = stop - start if window is None else max(window + 1, _MIN_ROWS)
    return ((begin, min(begin + width, stop)) for begin in range(start, stop, max(width, 1)))


def _before_and_on_diagonal(
    own: Stretch, other: Stretch, *, rows: tuple[int, int], columns: tuple[int, int]
) -> Iterator[Tile]:
    (begin, end), (start, stop) = rows, columns
    if start < min(stop, begin):
        yield Tile(own.local(begin, end), other.local(start, min(stop, begin)))
    if max(start, begin) < stop:
        yield Tile(own.local(begin, end), other.local(begin, end), last=0)


def _in_band(
    own: Stretch, other: Stretch, *, rows: tuple[int, int], columns: tuple[int, int], window: int
) -> Iterator[Tile]:
    start, stop = columns
    # Only rows that see something: the others would have a softmax over nothing.
    begin, end = max(rows[0], start), min(rows[1], stop + window)
    if start >= stop or begin >= end:
        return
    first = begin - window - start if start < end - 1 - window else None
    last = begin - start if begin < stop - 1 else None
    yield Tile(own.local(begin, end), other.local(start, stop), first=first, last=last)


def _joined(tiles: Sequence[Tile]) -> list[Tile]:
    """Merges full neighbouring tiles into one."""
    joined: list[Tile] = []
    for tile in tiles:
        before = joined[-1] if joined else tile
        if joined and before.is_full and tile.is_full:
            if before.keys == tile.keys and before.queries.stop == tile.queries.start:
                joined[-1] = replace(tile, queries=slice(before.queries.start, tile.queries.stop))
                continue
            if before.queries == tile.queries and before.keys.stop == tile.keys.start:
                joined[-1] = replace(tile, keys=slice(before.keys.start, tile.keys.stop))
                continue
        joined.append(tile)
    return joined
