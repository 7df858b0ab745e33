"""What host code and kernels agree on: sizes of pages, priorities, records of tensors, counters. No tensors here.

A page is page_bytes bytes of one arena; ids 0 .. device_pages - 1 are device pages, the next host_pages ids host pages.
A tensor of R live rows takes ceil(R * row_bytes / page_bytes) pages: rows follow each other in them without gaps and
may straddle pages, whatever the dtype or width.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

# Kernels copy words of this many bytes where sizes and addresses allow it.
ALIGNMENT = 16


class Priority(enum.IntEnum):
    """Which tensors of an expert group get pages first, and what happens to those that get none."""

    INPUT = 0  # x and the routing weights of its rows: without them the step is void
    GATE_UP = 1  # computed again from x
    ACT = 2  # computed again from gate_up


class Tier(enum.Enum):
    """Where pages lie; kernels know a tier by the page's id."""

    DEVICE = "device"
    HOST = "host"


class Counter(enum.IntEnum):
    """Indices into a pool's counters, int64: sums and maxima since the last reset, written by the planning kernel."""

    VOID = 0  # tensors of Priority.INPUT without pages, and BAD_COUNT; above 0 the step is void
    BAD_COUNT = 1  # calls of plan, each for up to 16 tensors, with a number of rows below 0 or above the maximum
    HIGH_WATER_DEVICE = 2  # most pages held at once
    HIGH_WATER_HOST = 3  # most pages held at once
    PLANNED_PAGES = 4  # pages given out, on both tiers
    SPILLED_PAGES = 5  # those of them on the host tier
    LIVE_BYTES = 6  # of live rows in these pages; the other bytes are page tails
    DROPPED_GATE_UP = 7  # tensors of this priority without pages
    DROPPED_ACT = 8


# What counts a tensor that got no pages.
COUNTER_OF_DROPPED = {
    Priority.INPUT: Counter.VOID,
    Priority.GATE_UP: Counter.DROPPED_GATE_UP,
    Priority.ACT: Counter.DROPPED_ACT,
}


class Held(enum.IntEnum):
    """Columns of `held`, int64, which has a row for each tensor of a page table."""

    PAGES = 0  # that the tensor holds now
    ROWS = 1  # its live rows when it was planned
    DROPPED = 2  # 1: it got no pages and must be computed again


def page_bytes(page_size: int, *, hidden_size: int, itemsize: int) -> int:
    """Bytes of a page that holds page_size tokens of hidden_size elements, in whole words of ALIGNMENT bytes."""
    return -(-page_size * hidden_size * itemsize // ALIGNMENT) * ALIGNMENT


def is_whole(number: object) -> bool:
    """Whether it is an int; True and False do not count."""
    return isinstance(number, int) and not isinstance(number, bool)


@dataclass(frozen=True)
class PoolLayout:
    """Sizes of a pool's two tiers.

    page_bytes: a positive multiple of 16. device_pages, host_pages: at least 0, together at least 1. All integers.
    Raises ValueError otherwise.
    """

    page_bytes: int
    device_pages: int
    host_pages: int = 0

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            if not is_whole(number):
                raise ValueError(f"{name} ({number}) must be an integer")
        if self.page_bytes <= 0 or self.page_bytes % ALIGNMENT:
            raise ValueError(f"page_bytes ({self.page_bytes}) must be a positive multiple of {ALIGNMENT}")
        for name, pages in (("device_pages", self.device_pages), ("host_pages", self.host_pages)):
            if not 0 <= pages < 2**31:
                raise ValueError(f"{name} ({pages}) must be between 0 and 2**31 - 1")
        if self.num_pages == 0:
            raise ValueError("device_pages (0) + host_pages (0) must be at least 1: a pool needs a page")

    @property
    def num_pages(self) -> int:
        """Pages of both tiers."""
        return self.device_pages + self.host_pages

    def pages_for(self, num_bytes: int) -> int:
        """Pages that hold this many bytes."""
        return -(-num_bytes // self.page_bytes)

    def encode(self) -> list[int]:
        """The layout as operators take it."""
        return [self.page_bytes, self.device_pages, self.host_pages]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a group: max_rows rows of row_bytes bytes each, pitch_bytes apart in memory.

    tokens_per_row: tokens that one row stands for, as a rule 1; for scales that 32 tokens share, 32. With num_rows live
    tokens, ceil(num_rows / tokens_per_row) rows are live. Raises ValueError for impossible sizes.
    """

    row_bytes: int
    pitch_bytes: int
    max_rows: int
    priority: Priority = Priority.INPUT
    tokens_per_row: int = 1

    def __post_init__(self) -> None:
        if self.row_bytes < 1 or self.max_rows < 0 or self.tokens_per_row < 1:
            raise ValueError(f"{self}: row_bytes and tokens_per_row must be at least 1, max_rows at least 0")
        if self.pitch_bytes < self.row_bytes:
            raise ValueError(f"pitch_bytes ({self.pitch_bytes}) must be at least row_bytes ({self.row_bytes})")

    @property
    def max_bytes(self) -> int:
        """Bytes of all its rows, live or not, without gaps."""
        return self.max_rows * self.row_bytes

    @property
    def max_tokens(self) -> int:
        """The largest number of live tokens that it has room for."""
        return self.max_rows * self.tokens_per_row


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor and where the page table keeps its record: page ids from table_start on, and row `slot` of `held`."""

    spec: TensorSpec
    table_start: int
    slot: int

    def encode(self) -> "EncodedTensor":
        """The tensor as operators take it."""
        spec = self.spec
        sizes = spec.row_bytes, spec.pitch_bytes, spec.max_rows, spec.tokens_per_row, int(spec.priority)
        return EncodedTensor(*sizes, self.table_start, self.slot)


class EncodedTensor(NamedTuple):
    """A PlacedTensor as the integers that operators take."""

    row_bytes: int
    pitch_bytes: int
    max_rows: int
    tokens_per_row: int
    priority: int
    table_start: int
    slot: int


INTS_PER_TENSOR = len(EncodedTensor._fields)


def encode_tensors(tensors: Iterable[PlacedTensor]) -> list[int]:
    """All tensors of a group, one after the other, as operators take them."""
    return [number for tensor in tensors for number in tensor.encode()]


def split_tensors(numbers: list[int]) -> list[EncodedTensor]:
    """What encode_tensors joined."""
    starts = range(0, len(numbers), INTS_PER_TENSOR)
    return [EncodedTensor(*numbers[start : start + INTS_PER_TENSOR]) for start in starts]
