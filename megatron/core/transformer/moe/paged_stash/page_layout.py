"""Sizes, priorities and records that the stash's host code shares with its kernels. Contains no tensors.

[Note: pages] A page is page_bytes bytes of one arena. Ids 0 .. device_pages - 1 are device pages, the next host_pages
ids are host pages, so a kernel infers the tier from the id. A tensor with R live rows occupies
ceil(R * row_bytes / page_bytes) pages. Its rows are stored in them without gaps and may straddle pages. Copies move
bytes, so rows may have any dtype and width.
"""

import enum
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Bytes of the widest word that kernels copy, where sizes and addresses allow it.
ALIGNMENT = 16
MAX_TENSORS = 16  # per operator call, because kernels unroll their loop over tensors


class Priority(enum.IntEnum):
    """Order in which the tensors of an expert group receive pages, and the consequence if a tensor receives none."""

    INPUT = 0  # x and its routing weights; if one receives no pages, the step is discarded (stash overflow)
    GATE_UP = 1  # recomputed from x if dropped
    ACT = 2  # recomputed from gate_up if dropped


# Tensors up to this priority are all tensors.
LEAST_IMPORTANT = max(Priority)


class Tier(enum.Enum):
    """Kind of memory that contains a page. Kernels infer it from the page id; see [Note: pages]."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class PoolLayout:
    """Sizes of a pool's two tiers.

    page_bytes: a positive multiple of 16. device_pages, host_pages: at least 0, and at least 1 in total. Raises
    ValueError for other values.
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
            raise ValueError("device_pages (0) + host_pages (0) must be at least 1: a pool needs at least one page")

    @property
    def num_pages(self) -> int:
        """Number of pages of both tiers."""
        return self.device_pages + self.host_pages

    def pages_for(self, num_bytes: int) -> int:
        """Returns the number of pages required for num_bytes bytes."""
        return -(-num_bytes // self.page_bytes)

    @functools.cached_property
    def numbers(self) -> list[int]:
        """The layout as the list of integers that operators expect."""
        return [self.page_bytes, self.device_pages, self.host_pages]


@dataclass(frozen=True)
class TensorSpec:
    """Memory layout of one tensor of a group: max_rows rows of row_bytes bytes each, pitch_bytes apart.

    tokens_per_row: number of tokens that share one row, which is 1 except for block scales (e.g. 32). With num_rows
    live tokens, ceil(num_rows / tokens_per_row) rows are live. Raises ValueError for impossible sizes.
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
        """Number of bytes of all rows, live or not, without gaps."""
        return self.max_rows * self.row_bytes

    @property
    def max_tokens(self) -> int:
        """Largest number of live tokens that fit in the tensor."""
        return self.max_rows * self.tokens_per_row


@functools.cache
def row_spec(row_bytes: int, max_rows: int, priority: Priority = Priority.INPUT) -> TensorSpec:
    """Returns the spec of a contiguous tensor. Layers have few sizes, so that specs are built only once."""
    return TensorSpec(row_bytes, row_bytes, max_rows, priority)


class PagesByPriority(NamedTuple):
    """Page counts of one group's tensors by priority."""

    inputs: int = 0
    gate_up: int = 0
    act: int = 0

    def up_to(self, priority: Priority) -> int:
        """Returns the number of pages of all tensors that are at least as important as `priority`."""
        return sum(self[: priority + 1])


def live_rows(spec: TensorSpec, num_rows: int) -> int:
    """Returns the number of rows occupied by `num_rows` tokens."""
    return -(-num_rows // spec.tokens_per_row)


def pages_for(specs: Sequence[TensorSpec], num_rows: int, *, layout: PoolLayout) -> PagesByPriority:
    """Returns the number of pages that a group's tensors require for `num_rows` live tokens, by priority."""
    pages = [0] * len(Priority)
    for spec in specs:
        pages[spec.priority] += layout.pages_for(live_rows(spec, num_rows) * spec.row_bytes)
    return PagesByPriority(*pages)


def page_bytes(page_size: int, *, hidden_size: int, itemsize: int) -> int:
    """Returns the size in bytes of a page for page_size tokens of hidden_size elements, rounded up to ALIGNMENT."""
    return -(-page_size * hidden_size * itemsize // ALIGNMENT) * ALIGNMENT


def is_whole(number: object) -> bool:
    """Returns whether a value is an int; True and False do not count as ints."""
    return isinstance(number, int) and not isinstance(number, bool)


class Counter(enum.IntEnum):
    """Indices into a pool's counters, int64: sums and maxima since the last reset, written by `plan`."""

    VOID = 0  # tensors of Priority.INPUT without pages, plus BAD_COUNT; above 0 the step is discarded
    BAD_COUNT = 1  # groups, or calls of plan, whose number of rows is below 0 or above max_rows
    HIGH_WATER_DEVICE = 2  # peak number of allocated pages on the device
    HIGH_WATER_HOST = 3  # peak number of allocated pages on the host
    PLANNED_PAGES = 4  # pages allocated on both tiers
    SPILLED_PAGES = 5  # the part of PLANNED_PAGES on the host
    LIVE_BYTES = 6  # bytes of live rows in PLANNED_PAGES; the rest of these pages is unused tails
    DROPPED_GATE_UP = 7  # tensors of this priority without pages
    DROPPED_ACT = 8


# The counter that a tensor without pages increments.
COUNTER_OF_DROPPED = {
    Priority.INPUT: Counter.VOID,
    Priority.GATE_UP: Counter.DROPPED_GATE_UP,
    Priority.ACT: Counter.DROPPED_ACT,
}


# Programs of a copy kernel that fill a streaming multiprocessor. See [Note: copies during GEMMs] in triton_kernels.py.
COPIES_PER_PROCESSOR = 6


class Held(enum.IntEnum):
    """Columns of `held`, int64, which has one row per tensor of a page table."""

    PAGES = 0  # number of pages that the tensor holds
    ROWS = 1  # live rows when it was planned
    DROPPED = 2  # 1 if it received no pages and must be recomputed
    ON_HOST = 3  # pages on the host, which follow those on the device


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor and the position of its record: page ids in the table from table_start on, and row `slot` of `held`."""

    spec: TensorSpec
    table_start: int
    slot: int

    def encode(self) -> "EncodedTensor":
        """Returns the integers that describe the tensor to operators."""
        spec = self.spec
        sizes = spec.row_bytes, spec.pitch_bytes, spec.max_rows, spec.tokens_per_row, int(spec.priority)
        return EncodedTensor(*sizes, self.table_start, self.slot)


class EncodedTensor(NamedTuple):
    """Integers that describe a PlacedTensor, in the order that operators expect."""

    row_bytes: int
    pitch_bytes: int
    max_rows: int
    tokens_per_row: int
    priority: int
    table_start: int
    slot: int


INTS_PER_TENSOR = len(EncodedTensor._fields)


def encode_tensors(tensors: Iterable[PlacedTensor]) -> list[int]:
    """Encodes a group's tensors as the list of integers that operators expect."""
    return [number for tensor in tensors for number in tensor.encode()]


def split_tensors(numbers: list[int]) -> list[EncodedTensor]:
    """Splits the result of encode_tensors into tensors."""
    starts = range(0, len(numbers), INTS_PER_TENSOR)
    return [EncodedTensor(*numbers[start : start + INTS_PER_TENSOR]) for start in starts]
