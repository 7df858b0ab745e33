"""The layout of flat buffers: positions of parameters, buckets and shards.

`lay_out` is a pure function of sizes. All modes share its layout: parameters start, and shards start and end, at
multiples of ALIGNMENT elements. ParamSlot is a parameter's place in a buffer, ParamRange is a range of a parameter in
any flat tensor, and FlatBuffer is the interface of a buffer for optimizers and hooks.
"""

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

# In elements. Vectorised kernels round identically at any multiple of it. States in fp16 share one exponent for this
# many numbers (BLOCK of stored_floats.py), so a different value would change these states.
ALIGNMENT = 64
# Bucket ends are multiples of two blocks, even with one rank, so that one rank has the same bucket ends as two.
_BUCKET_GRAIN = 2 * ALIGNMENT
# The bus bandwidth of NCCL's rings drops if a message is not a multiple of its channels' chunks.
_HIGH_BUSBW_GRAIN = 1 << 16
_DEFAULT_BUCKET_SIZE, _DEFAULT_BUCKET_SIZE_PER_RANK = 40_000_000, 1_000_000


def round_up(size: int, grain: int) -> int:
    """Returns the smallest multiple of `grain` that is at least `size`."""
    return -(-size // grain) * grain


@dataclass(frozen=True)
class Span:
    """A range of elements in a flat tensor; the padding after a parameter's span belongs to no parameter."""

    start: int
    numel: int

    @property
    def end(self) -> int:
        """Index after the last element."""
        return self.start + self.numel

    @property
    def padded_end(self) -> int:
        """First index at which the next parameter may start."""
        return round_up(self.end, ALIGNMENT)

    def intersection(self, other: "Span") -> "Span":
        """Returns the elements that both spans contain; numel is 0 if there are none."""
        start = max(self.start, other.start)
        return Span(start, max(0, min(self.end, other.end) - start))

    def within(self, whole: "Span") -> slice:
        """Returns the place of these elements in a tensor of the elements of `whole`, which contains them."""
        return slice(self.start - whole.start, self.end - whole.start)


def locate(part: Span, spans: Sequence[Span]) -> tuple[int, slice]:
    """Returns the index of the span that contains `part`, in sorted `spans`, and the slice of `part` within it."""
    # The last span that begins at or before the part, because an empty span may begin at the same index.
    index = bisect_right(spans, part.start, key=lambda span: span.start) - 1
    return index, part.within(spans[index])


@dataclass(frozen=True, eq=False)
class ParamSlot:
    """Place of a parameter in a flat buffer.

    name: the parameter's name in the model. span: its elements in the buffer. main_grad: `param.main_grad`, in which
    gradients accumulate, [*parameter shape]. comm_view: the view of grad_data that is reduced, [*parameter shape];
    identical to main_grad unless main_grad has a wider dtype. start: the element of the flattened parameter with which
    the span begins. In a slot of a sharded parameter, main_grad and comm_view are flat and contain only the shard's
    elements.
    """

    name: str
    param: nn.Parameter
    span: Span
    main_grad: torch.Tensor
    comm_view: torch.Tensor
    start: int = 0

    def copy_from_comm(self) -> None:
        """Copies comm_view into main_grad, if they are different tensors."""
        if self.comm_view is not self.main_grad:
            self.main_grad.copy_(self.comm_view)


@dataclass(frozen=True)
class ParamRange:
    """A range of a parameter, perhaps all of it, in a flat tensor.

    span: its elements in the flat tensor. start: the element of the flattened parameter with which the span begins.
    """

    name: str
    param: nn.Parameter
    span: Span
    start: int

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the range's elements of a flat tensor: [N], any dtype -> [span.numel], the same dtype, a view."""
        return flat[self.span.start : self.span.end]


@dataclass(frozen=True)
class BucketLayout:
    """Layout of a bucket, that is, of adjacent parameters that are reduced together.

    span: the bucket's elements in the buffer, padded so that they divide into aligned shards. numel_unpadded: number of
    elements before the padding at the end. params: indices into the sizes, in buffer order.
    """

    index: int
    span: Span
    numel_unpadded: int
    params: tuple[int, ...]


@dataclass(frozen=True)
class BufferLayout:
    """Layout of a flat buffer.

    spans: one for each parameter, in the order of lay_out's `sizes`. buckets: contiguous, starting at element 0.
    num_shards: number of equal shards of each bucket.
    """

    spans: tuple[Span, ...]
    buckets: tuple[BucketLayout, ...]
    num_shards: int

    @property
    def numel(self) -> int:
        """Number of elements in the buffer, including all padding."""
        return self.buckets[-1].span.end if self.buckets else 0

    def shard(self, bucket_index: int, rank: int) -> Span:
        """Returns a rank's shard of a bucket: at least ALIGNMENT elements, perhaps only padding.

        rank: 0 to num_shards - 1.
        """
        span = self.buckets[bucket_index].span
        size = span.numel // self.num_shards
        return Span(span.start + rank * size, size)

    def owned(self, rank: int) -> list[Span]:
        """Returns a rank's shards of all buckets, in order."""
        return [self.shard(bucket.index, rank) for bucket in self.buckets]


class FlatBuffer(Protocol):
    """An optimizer's view of a wrapper's buffer: parameters and gradients, of one dtype each, at the same positions.

    param_data, grad_data: [N], one dtype each; parameters are views of param_data, and padding is zero in both. The
    spans that this rank owns are sorted, and start and end at multiples of ALIGNMENT. data_parallel_group: the ranks
    over which a sharded buffer is distributed. model_dtype: the dtype in which modules compute, perhaps narrower than
    param_data's.
    """

    param_data: torch.Tensor
    grad_data: torch.Tensor

    @property
    def slots(self) -> Sequence[ParamSlot]: ...
    @property
    def layout(self) -> BufferLayout: ...
    @property
    def model_dtype(self) -> torch.dtype: ...
    @property
    def is_expert(self) -> bool: ...
    @property
    def is_sharded(self) -> bool: ...
    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None: ...
    @property
    def persistent_params(self) -> list[torch.Tensor]:
        """Memory of parameters that persists between steps: [N] each, param_data's dtype."""
        ...

    @property
    def persistent_grads(self) -> list[torch.Tensor]:
        """Memory of gradients that persists between steps: [N] each, grad_data's dtype."""
        ...

    def owned_spans(self) -> list[Span]:
        """Returns the spans that this rank's optimizer updates, bucket by bucket, in order."""
        ...

    def owned_grads(self, slot: ParamSlot) -> list[torch.Tensor]:
        """Returns views of the parts of a parameter's reduced gradient that this rank owns: [N], grad_data's dtype."""
        ...

    def grad_of(self, bucket: int) -> torch.Tensor:
        """Returns the reduced gradients of a bucket's owned span, a view: [elements of the span], grad_data's dtype."""
        ...

    def is_attached(self, param: nn.Parameter, *, start: int, address: int) -> bool:
        """Returns whether element `start` of the flattened parameter is stored at memory address `address`."""
        ...


def lay_out(
    sizes: Sequence[int],
    *,
    num_shards: int,
    bucket_size: int | None,
    own_bucket: Collection[int] = (),
    num_buckets: int | None = None,
    high_busbw: bool = False,
    split: bool = False,
) -> BufferLayout:
    """Lays out parameters of `sizes` elements in reverse order, approximately the order of their gradients.

    bucket_size: closes a bucket when it has this many elements; None means a single bucket. own_bucket: indices of
    parameters that are placed in a separate bucket each. num_buckets: number of buckets of about equal size, replacing
    bucket_size. There are fewer buckets if there are too few parameters, and more if own_bucket requires them.
    high_busbw: rounds bucket ends up to multiples of a larger number. split: every bucket but the last has
    `bucket_size` elements, rounded up, and its end may split a parameter.

    Raises TypeError for a number that is not an integer. Raises ValueError for a number that is too small, for an index
    out of range, and if own_bucket or num_buckets is combined with split.
    """
    _check_integer("num_shards", num_shards, at_least=1)
    if bucket_size is not None:
        _check_integer("bucket_size", bucket_size, at_least=1)
    if num_buckets is not None:
        _check_integer("num_buckets", num_buckets, at_least=1)
    for index, size in enumerate(sizes):
        _check_integer(f"sizes[{index}]", size, at_least=0)
    _check_own_bucket(own_bucket, num_params=len(sizes))
    if split and (own_bucket or num_buckets is not None):
        raise ValueError(
            "own_bucket or num_buckets is given with split: buckets that split parameters are sized by bucket_size only"
        )
    grain = math.lcm(ALIGNMENT * num_shards, _HIGH_BUSBW_GRAIN if high_busbw else _BUCKET_GRAIN)
    place = _Placement(list(sizes), grain)
    if split:
        return place.cut_every(bucket_size, num_shards=num_shards)
    ends = None if num_buckets is None else _even_ends(sizes, num_buckets, own_bucket=own_bucket)
    for index in reversed(range(len(sizes))):
        if index in own_bucket:
            place.close()
        place.add(index)
        is_full = index in ends if ends is not None else bucket_size is not None and place.size >= bucket_size
        if index in own_bucket or is_full:
            place.close()
    place.close()
    return BufferLayout(tuple(place.spans), tuple(place.buckets), num_shards)


class _Placement:
    """A layout under construction."""

    def __init__(self, sizes: list[int], grain: int) -> None:
        self._sizes, self._grain = sizes, grain
        self.spans = [Span(0, size) for size in sizes]
        self.buckets: list[BucketLayout] = []
        self._start = self._end = 0
        self._members: list[int] = []

    @property
    def size(self) -> int:
        """Number of elements in the open bucket, without the padding after its last parameter."""
        return self._end - self._start

    def add(self, index: int) -> None:
        self.spans[index] = Span(round_up(self._end, ALIGNMENT), self._sizes[index])
        self._end = self.spans[index].end
        self._members.append(index)

    def close(self) -> None:
        if not self._members:
            return
        # Even a bucket of one empty parameter needs a shard for each rank.
        span = Span(self._start, round_up(max(self.size, 1), self._grain))
        self.buckets.append(BucketLayout(len(self.buckets), span, self.size, tuple(self._members)))
        self._start = self._end = span.end
        self._members = []

    def cut_every(self, bucket_size: int | None, *, num_shards: int) -> BufferLayout:
        for index in reversed(range(len(self._sizes))):
            self.add(index)
        length = round_up(max(1, self._end if bucket_size is None else bucket_size), self._grain)
        placed = self._members
        for start in range(0, self._end if placed else 0, length):
            size = min(length, self._end - start)
            # The last bucket ends with the parameters, so that a small model does not need a large bucket's memory.
            span = Span(start, round_up(size, self._grain))
            members = tuple(index for index in placed if self.spans[index].intersection(span).numel)
            self.buckets.append(BucketLayout(len(self.buckets), span, size, members))
        return BufferLayout(tuple(self.spans), tuple(self.buckets), num_shards)


def _check_integer(name: str, value: object, *, at_least: int) -> None:
    # Python accepts a bool as an int, but for a user it is a mistake.
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: must be an integer")
    if value < at_least:
        raise ValueError(f"{name} is {value}: must be at least {at_least}")


def _check_own_bucket(own_bucket: Collection[int], *, num_params: int) -> None:
    for index in own_bucket:
        if not 0 <= index < num_params:
            raise ValueError(f"own_bucket contains {index}: must be an index into the {num_params} sizes")


def _even_ends(sizes: Sequence[int], num_buckets: int, *, own_bucket: Collection[int]) -> set[int]:
    """Returns the indices of the parameters that end a bucket, so that there are `num_buckets` buckets."""
    # The minimum number of buckets that the parameters below each index need.
    needed = [0]
    for index in range(len(sizes)):
        alone = index in own_bucket or index - 1 in own_bucket or index == 0
        needed.append(needed[-1] + alone)
    ends: set[int] = set()
    closed, size, rest = 0, 0, sum(sizes)
    for index in reversed(range(len(sizes))):
        size += sizes[index]
        others = num_buckets - closed - 1
        is_forced = index in own_bucket or index - 1 in own_bucket or index <= others
        if is_forced or (size * (others + 1) >= rest and needed[index] <= others):
            ends.add(index)
            closed, size, rest = closed + 1, 0, rest - size
    return ends


def resolve_bucket_size(
    bucket_size: int | None, num_buckets: int | None, *, num_ranks: int, single_bucket: bool
) -> int | None:
    """Returns lay_out's bucket_size for a user's settings; None for a single bucket, or if num_buckets is given.

    num_ranks: size of the data-parallel group; larger groups require larger buckets. single_bucket: overrides the
    settings if no communication is overlapped.
    """
    if single_bucket or num_buckets is not None:
        return None
    return bucket_size or max(_DEFAULT_BUCKET_SIZE, _DEFAULT_BUCKET_SIZE_PER_RANK * num_ranks)
