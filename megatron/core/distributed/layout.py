"""Places of parameters in flat buffers, and the cuts of these buffers into buckets and shards.

`lay_out` is a pure function of sizes. All modes share its layout: parameters start, and shards start and end, at
multiples of ALIGNMENT elements. ParamSlot is a parameter's place in a buffer; ParamRange is the part of a parameter in
any flat tensor; FlatBuffer is what optimizers and hooks see of a buffer.
"""

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

# Elements. Vectorised kernels give an element the same bits wherever its tensor starts on this grid. States in fp16
# have one exponent for as many numbers (BLOCK of stored_floats.py), so another value changes their last digits.
ALIGNMENT = 64
# Two blocks, also with one rank, so that one rank and two cut buckets at the same places.
_BUCKET_GRAIN = 2 * ALIGNMENT
# Bus bandwidth of NCCL's rings drops for messages that do not divide into whole chunks of its channels.
_HIGH_BUSBW_GRAIN = 1 << 16
_DEFAULT_BUCKET_SIZE, _DEFAULT_BUCKET_SIZE_PER_RANK = 40_000_000, 1_000_000


def round_up(size: int, grain: int) -> int:
    """The least multiple of `grain` that is not below `size`."""
    return -(-size // grain) * grain


@dataclass(frozen=True)
class Span:
    """Elements in a flat tensor; the padding behind a parameter's belongs to no parameter."""

    start: int
    numel: int

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.start + self.numel

    @property
    def padded_end(self) -> int:
        """Where the next parameter may start."""
        return round_up(self.end, ALIGNMENT)

    def intersection(self, other: "Span") -> "Span":
        """The elements that both have; numel 0 where there are none."""
        start = max(self.start, other.start)
        return Span(start, max(0, min(self.end, other.end) - start))


def locate(part: Span, spans: Sequence[Span]) -> tuple[int, slice]:
    """Returns the index of the one of sorted `spans` that holds `part`, and `part` counted from its start."""
    # The last that begins there or before: an empty one may begin at the same place.
    index = bisect_right(spans, part.start, key=lambda span: span.start) - 1
    start = part.start - spans[index].start
    return index, slice(start, start + part.numel)


@dataclass(frozen=True, eq=False)
class ParamSlot:
    """The place of a parameter in a flat buffer.

    name: the parameter's name in the model. span: its elements in the buffer. main_grad: [*parameter shape], the tensor
    in which its gradients accumulate, `param.main_grad`. comm_view: [*parameter shape], the view of grad_data that is
    reduced; it is main_grad itself unless main_grad has a wider dtype. start: the element of the flattened parameter
    with which the span begins. In a slot of a sharded parameter, main_grad and comm_view are flat and hold the shard's
    elements only.
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
    """A parameter, or a range of it, in some flat tensor.

    span: its elements in the flat tensor. start: the element of the flattened parameter with which the span begins.
    """

    name: str
    param: nn.Parameter
    span: Span
    start: int

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its elements of the flat tensor: [N], any dtype -> [span.numel], the same dtype, a view."""
        return flat[self.span.start : self.span.end]


@dataclass(frozen=True)
class BucketLayout:
    """Neighbours that are reduced together. span: with padding, so that it divides into aligned shards.

    numel_unpadded: elements before the padding at its end. params: indices into the sizes, in the order of places.
    """

    index: int
    span: Span
    numel_unpadded: int
    params: tuple[int, ...]


@dataclass(frozen=True)
class BufferLayout:
    """spans: one a parameter, in the order of the sizes. buckets: back to back from 0. num_shards: ranks that share
    each bucket equally.
    """

    spans: tuple[Span, ...]
    buckets: tuple[BucketLayout, ...]
    num_shards: int

    @property
    def numel(self) -> int:
        """Elements of the buffer, with all padding."""
        return self.buckets[-1].span.end if self.buckets else 0

    def shard(self, bucket_index: int, rank: int) -> Span:
        """Returns the shard of a rank, 0 to num_shards - 1: perhaps padding alone, never less than ALIGNMENT."""
        span = self.buckets[bucket_index].span
        size = span.numel // self.num_shards
        return Span(span.start + rank * size, size)

    def owned(self, rank: int) -> list[Span]:
        """A rank's shards of all buckets, in their order."""
        return [self.shard(bucket.index, rank) for bucket in self.buckets]


class FlatBuffer(Protocol):
    """An optimizer's view of a wrapper's buffer: parameters and gradients of one dtype each, at the same places.

    param_data, grad_data: [N]; parameters are views of the first, and what is padding in both is zero. Each span that
    this rank owns, sorted, starts and ends on the grid of 64 elements. data_parallel_group: if the buffer is sharded,
    the ranks that own the rest. model_dtype: what modules compute in, perhaps narrower than what is stepped.
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
        """Memory of their gradients that persists between steps: [N] each, grad_data's dtype."""
        ...

    def owned_spans(self) -> list[Span]:
        """Returns the spans that this rank's optimizer steps, bucket by bucket, in order."""
        ...

    def owned_grads(self, slot: ParamSlot) -> list[torch.Tensor]:
        """Returns the parts of a parameter's gradient whose sum this rank gets: [N] each, grad_data's dtype, views."""
        ...

    def grad_of(self, span: Span) -> torch.Tensor:
        """Returns the reduced gradients of one owned span, a view: [span.numel], grad_data's dtype."""
        ...

    def is_attached(self, param: nn.Parameter, *, start: int, address: int) -> bool:
        """Returns whether element `start` of a flattened parameter, any shape, lies at an address."""
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
    """Places parameters of `sizes` elements, the last first, which is about the order of their gradients.

    bucket_size: elements from which on a bucket is closed; None for a single bucket. own_bucket: indices of parameters
    that share theirs with no other. num_buckets: so many of about equal size instead, or as near to it as one parameter
    a bucket, and own_bucket, allow. high_busbw: bucket ends on a coarser grid. split: buckets are of `bucket_size`
    elements each, rounded up, but for the last, which has what is left, and cut parameters where they end.
    """
    _check_numbers(sizes, num_shards=num_shards, bucket_size=bucket_size, num_buckets=num_buckets)
    _check_own_bucket(own_bucket, num_params=len(sizes))
    if split and (own_bucket or num_buckets is not None):
        raise ValueError(
            "own_bucket or num_buckets is given with split: where bucket_size cuts, buckets are no parameter's"
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
    """A layout in the making."""

    def __init__(self, sizes: list[int], grain: int) -> None:
        self._sizes, self._grain = sizes, grain
        self.spans = [Span(0, size) for size in sizes]
        self.buckets: list[BucketLayout] = []
        self._start = self._end = 0
        self._members: list[int] = []

    @property
    def size(self) -> int:
        """Elements of the open bucket; the gap behind its last parameter does not count."""
        return self._end - self._start

    def add(self, index: int) -> None:
        self.spans[index] = Span(round_up(self._end, ALIGNMENT), self._sizes[index])
        self._end = self.spans[index].end
        self._members.append(index)

    def close(self) -> None:
        if not self._members:
            return
        # An empty parameter alone in its bucket needs no elements, but every bucket has a shard for each rank.
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
            # The last ends with the parameters: a small model must not take the memory of a large bucket.
            span = Span(start, round_up(size, self._grain))
            members = tuple(index for index in placed if self.spans[index].intersection(span).numel)
            self.buckets.append(BucketLayout(len(self.buckets), span, size, members))
        return BufferLayout(tuple(self.spans), tuple(self.buckets), num_shards)


def _check_numbers(sizes: Sequence[int], **named: int | None) -> None:
    for name, value in {**named, **{f"sizes[{index}]": size for index, size in enumerate(sizes)}}.items():
        least = 0 if name.startswith("sizes") else 1
        if value is None and name != "num_shards" and least:
            continue
        # A bool is an int to Python; for a user it is a mistake.
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}: must be an integer")
        if value < least:
            raise ValueError(f"{name} is {value}: must be at least {least}")


def _check_own_bucket(own_bucket: Collection[int], *, num_params: int) -> None:
    for index in own_bucket:
        if not 0 <= index < num_params:
            raise ValueError(f"own_bucket has {index}: must be an index into the {num_params} sizes")


def _even_ends(sizes: Sequence[int], num_buckets: int, *, own_bucket: Collection[int]) -> set[int]:
    """The indices after which, from the last down, a bucket is closed for there to be `num_buckets`."""
    # Of the parameters below each index: the buckets that they need at least.
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
    """Elements of a bucket for lay_out, from what a user gave; None for a single bucket, or where their number counts.

    num_ranks: of the data-parallel group; larger groups need larger messages. single_bucket: nothing is overlapped,
    whatever the user gave.
    """
    if single_bucket or num_buckets is not None:
        return None
    return bucket_size or max(_DEFAULT_BUCKET_SIZE, _DEFAULT_BUCKET_SIZE_PER_RANK * num_ranks)
