"""Sizes, priorities and records that the stash's host code shares with its kernels, and the rules of a pool.

Contains no tensors.

[Note: pages] A page is page_bytes bytes of one arena. Ids 0 .. device_pages - 1 are device pages, the next host_pages
ids are host pages, so a kernel infers the tier from the id. A tensor with R live rows occupies
ceil(R * row_bytes / page_bytes) pages. Its rows are stored in them without gaps and may straddle pages. Copies move
bytes, so rows may have any dtype and width.

[Note: rules] How many pages a tensor receives is decided by PageAccount alone: the CPU operator (cpu_kernels.py), the
simulated pool (arithmetic.py) and the planner call it. The kernel for GPUs (triton_kernels.py) repeats it, and tests
compare both with a model of their own. Which page ids a tensor receives follows from the rings of a pool.
"""

import enum
import functools
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

# Bytes of the widest word that kernels copy, where sizes and addresses allow it.
ALIGNMENT = 16
DEFAULT_PAGE_SIZE = 64  # rows of hidden size, as in Megatron-LM
# Formats in which a stash can store rows of bf16, besides as they are. See row_encoding.py.
STASH_DTYPES = ("mxfp8",)
# Rows of every tensor in a page, as long as the tiles of kernels that compute in pages.
TILE_ROWS = 128
MAX_TENSORS = 16  # per operator call, because kernels unroll their loop over tensors


class Priority(enum.IntEnum):
    """Order in which the tensors of an expert group receive pages, and the consequence if a tensor receives none."""

    INPUT = 0  # x and its routing weights; if one receives no pages, the step is discarded (stash overflow)
    GATE_UP = 1  # recomputed from x if dropped
    ACT = 2  # recomputed from gate_up if dropped


NUM_PRIORITIES = len(Priority)
# With up_to=LEAST_IMPORTANT, a count includes all tensors.
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
    pages, page_bytes = [0] * NUM_PRIORITIES, layout.page_bytes
    for spec in specs:
        # As live_rows and PoolLayout.pages_for, which would be calls for each tensor of a step.
        pages[spec.priority] -= -(-num_rows // spec.tokens_per_row) * spec.row_bytes // -page_bytes
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


# The rules of a pool. See [Note: rules].

Number = Any  # an int, or an array, int64
Flag = Any  # a bool, or an array of bools


class Allocation(NamedTuple):
    """Numbers of live rows and pages of one tensor. on_host: number of its pages on the host.

    is_dropped: whether the tensor needs pages and received none.
    """

    rows: Number
    pages: Number
    on_host: Number
    is_dropped: Flag


@dataclass
class PageAccount:
    """Free pages and counters of one pool, or of several pools with arrays of numbers.

    sizes: pages of each tier, the device first. free: free pages of each tier. counters: indexed by Counter; contains
    at least the entries that the called methods update.
    """

    page_bytes: int
    sizes: tuple[Number, Number]
    free: list[Number]
    counters: "MutableMapping[Counter, Any] | list[Any]"

    def checked_count(self, num_rows: int, most: int) -> int:
        """Clamps the number of live tokens to 0 .. most. A number out of range discards the step."""
        if not 0 <= num_rows <= most:
            self._count(Counter.BAD_COUNT, 1)
            self._count(Counter.VOID, 1)
        return min(max(num_rows, 0), most)

    def allocate(
        self, tokens: Number, *, row_bytes: int, tokens_per_row: int, priority: Priority, reserve: Number = 0
    ) -> Allocation:
        """Allocates pages for one tensor, or drops it.

        The tensor needs pages for its live rows without gaps. It is admitted if at least `reserve` pages are free
        afterwards, on both tiers together; a tensor that needs none always is. It receives device pages first, and host
        pages for the rest, or none at all.
        """
        rows = tokens if tokens_per_row == 1 else -(-tokens // tokens_per_row)
        needed = -(-rows * row_bytes // self.page_bytes)
        device, host = self.free
        is_admitted = (needed + reserve <= device + host) | (needed == 0)
        pages = needed * is_admitted
        on_device = np.minimum(pages, device) if isinstance(pages, np.ndarray) else min(pages, device)
        on_host = pages - on_device
        self.free = [device - on_device, host - on_host]
        self._count(Counter.PLANNED_PAGES, pages)
        self._count(Counter.SPILLED_PAGES, on_host)
        self._count(Counter.LIVE_BYTES, rows * row_bytes * is_admitted)
        is_dropped = is_admitted ^ True  # `~` is -2 for True, and `not` rejects arrays
        self._count(COUNTER_OF_DROPPED[priority], is_dropped)
        return Allocation(rows, pages, on_host, is_dropped)

    def end_plan(self) -> None:
        """Updates the peaks; called after the tensors of each group."""
        for counter, size, free in zip((Counter.HIGH_WATER_DEVICE, Counter.HIGH_WATER_HOST), self.sizes, self.free):
            taken, before = size - free, self.counters[counter]
            self.counters[counter] = np.maximum(before, taken) if isinstance(taken, np.ndarray) else max(before, taken)

    def release(self, pages: Number, *, on_host: Number) -> None:
        """Frees the pages of an allocation."""
        self.free = [self.free[0] + pages - on_host, self.free[1] + on_host]

    def _count(self, counter: Counter, number: Number) -> None:
        self.counters[counter] += number


def planning_order(specs: Sequence[TensorSpec]) -> list[int]:
    """Returns the indices of a group's tensors in the order in which they receive pages: the most important first."""
    return sorted(range(len(specs)), key=lambda index: specs[index].priority)


# Records that operators read.

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
