"""Many pools at once, in numbers: what the planning kernel would decide in each of S steps on each of N ranks.

What one pool decides is arithmetic.py's PoolModel, which says the same of each of these pools. Which rows come is told
from outside.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.core.transformer.moe.paged_stash import Counter, Priority, TensorSpec
from megatron.core.transformer.moe.paged_stash.arithmetic import PageMove
from megatron.core.transformer.moe.paged_stash.page_layout import COUNTER_OF_DROPPED
from megatron.core.transformer.moe.paged_stash.stash_order import GroupKey

# Of a group: live rows [S, N], int64.
RowsOf = Callable[[GroupKey], np.ndarray]
_COUNTED = (
    Counter.VOID,
    Counter.HIGH_WATER_DEVICE,
    Counter.HIGH_WATER_HOST,
    Counter.PLANNED_PAGES,
    Counter.SPILLED_PAGES,
    Counter.LIVE_BYTES,
    Counter.DROPPED_GATE_UP,
    Counter.DROPPED_ACT,
)


@dataclass(frozen=True)
class PoolSizes:
    """Pages of each pool: device_pages, host_pages: [N], int64."""

    page_bytes: int
    device_pages: np.ndarray
    host_pages: np.ndarray


@dataclass(frozen=True)
class Reserves:
    """Pages that forwards leave free. tables: [K, forwards, 3], int64, as reserve_table gives them; which: [S, N],
    int64: the table of each step and rank.
    """

    tables: np.ndarray
    which: np.ndarray

    def of(self, forward_index: int) -> np.ndarray:
        """[3, S, N], int64: of each priority, what stays free in that forward."""
        rows: np.ndarray = np.moveaxis(self.tables[:, forward_index][self.which], -1, 0)
        return rows


@dataclass(frozen=True)
class PoolOutcomes:
    """Outcome of each step on each rank.

    counters: those of a pool, [S, N], int64. dropped_rows: live rows of the groups that dropped their gate_up, or their
    act, [S, N], int64.
    """

    counters: dict[Counter, np.ndarray]
    dropped_rows: dict[Priority, np.ndarray]


def simulate_pools(
    moves: Sequence[PageMove],
    rows: RowsOf,
    *,
    specs: Sequence[TensorSpec],
    sizes: PoolSizes,
    num_steps: int,
    reserves: Reserves | None = None,
) -> PoolOutcomes:
    """Simulates S = num_steps steps of these moves, each of which starts with empty pools.

    Counts as arithmetic.py's PoolModel, where no group has more rows than its buffers.
    """
    pools = _Pools(sizes, num_steps)
    held: dict[GroupKey, tuple[np.ndarray, np.ndarray]] = {}
    by_priority = sorted(specs, key=lambda spec: spec.priority)
    for move in moves:
        if move.is_taken:
            left_free = None if reserves is None else reserves.of(move.forward_index)
            held[move.group] = pools.take(rows(move.group), by_priority, left_free=left_free)
        else:
            pools.give_back(*held.pop(move.group))
    return pools.outcomes()


@dataclass
class _Pools:
    sizes: PoolSizes
    num_steps: int
    free_device: np.ndarray = field(init=False)
    free_host: np.ndarray = field(init=False)
    counters: dict[Counter, np.ndarray] = field(init=False)
    dropped_rows: dict[Priority, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        shape = self.num_steps, len(self.sizes.device_pages)
        self.free_device = np.broadcast_to(self.sizes.device_pages, shape).astype(np.int64)
        self.free_host = np.broadcast_to(self.sizes.host_pages, shape).astype(np.int64)
        self.counters = {counter: np.zeros(shape, dtype=np.int64) for counter in _COUNTED}
        self.dropped_rows = {priority: np.zeros(shape, dtype=np.int64) for priority in (Priority.GATE_UP, Priority.ACT)}

    def take(
        self, live: np.ndarray, specs: Sequence[TensorSpec], *, left_free: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Pages of a group's tensors, the important ones first: of the device and of the host, [S, N], int64."""
        device, host = np.zeros_like(self.free_device), np.zeros_like(self.free_host)
        for spec in specs:
            tokens_rows = live if spec.tokens_per_row == 1 else -(-live // spec.tokens_per_row)
            num_bytes = tokens_rows * spec.row_bytes
            need = -(-num_bytes // self.sizes.page_bytes)
            asked = need if left_free is None or spec.priority is Priority.INPUT else need + left_free[spec.priority]
            admitted = (asked <= self.free_device + self.free_host) | (need == 0)
            got = need * admitted
            on_device = np.minimum(got, self.free_device)
            on_host = got - on_device
            self.free_device -= on_device
            self.free_host -= on_host
            device += on_device
            host += on_host
            self.counters[Counter.SPILLED_PAGES] += on_host
            self.counters[Counter.LIVE_BYTES] += num_bytes * admitted
            self._count_dropped(spec.priority, ~admitted, live=live)
        self.counters[Counter.PLANNED_PAGES] += device + host
        self._raise_high_water()
        return device, host

    def give_back(self, device: np.ndarray, host: np.ndarray) -> None:
        """Frees pages that `take` returned."""
        self.free_device += device
        self.free_host += host

    def outcomes(self) -> PoolOutcomes:
        return PoolOutcomes(self.counters, self.dropped_rows)

    def _count_dropped(self, priority: Priority, dropped: np.ndarray, *, live: np.ndarray) -> None:
        if not dropped.any():
            return
        self.counters[COUNTER_OF_DROPPED[priority]] += dropped
        if priority in self.dropped_rows:
            self.dropped_rows[priority] += live * dropped

    def _raise_high_water(self) -> None:
        for counter, pages, free in (
            (Counter.HIGH_WATER_DEVICE, self.sizes.device_pages, self.free_device),
            (Counter.HIGH_WATER_HOST, self.sizes.host_pages, self.free_host),
        ):
            np.maximum(self.counters[counter], pages - free, out=self.counters[counter])
