"""The bytes that the stash's operators actually read and write, where their schemas name whole tensors.

Each function is called before its operator runs, and returns a function that is called afterwards. Both calls are
required because `plan` writes the page ids that it uses, and `release` clears them.

[Note: atomic accesses] `plan` and `release` may run at the same time. Both use the free page ids (ring, tails), which
their kernels read and write with acquire and release operations. Such accesses need no order among each other, but
must be ordered with all other accesses. A page is handed over as follows: the new owner observes that the page is free,
and therefore runs after everything that preceded the page's release. So a release has to be ordered after all accesses
of its pages. Later checks then ignore those accesses.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron.core.transformer.moe.paged_stash.page_layout import EncodedTensor, Held, split_tensors
from tests.device_model.alarms import Kind, site
from tests.device_model.memory import Block, Usage, Use

if TYPE_CHECKING:
    from tests.device_model.device import Device
    from tests.device_model.operators import Range

_TABLE_ITEM = _HELD_ITEM = 8  # bytes, int64
_RECORD = _HELD_ITEM * len(Held)


class _Operands:
    """A snapshot of the records and page ids of one call's tensors, taken on construction.

    host_only: only pages on the host. skipped: the number of pages of each tensor that precede these.
    """

    def __init__(
        self,
        device: "Device",
        table: Tensor,
        held: Tensor,
        layout: list[int],
        tensors: list[int],
        *,
        host_only: bool = False,
    ) -> None:
        self._device, self._page_bytes, self._device_pages = device, layout[0], layout[1]
        self.encoded = split_tensors(tensors)
        self._table, self._held = table, held
        self._records, ids = device.bytes_of(held).clone(), device.bytes_of(table)
        counts = [self._records[one.slot].tolist() for one in self.encoded]
        self.skipped = [one[Held.PAGES] - one[Held.ON_HOST] if host_only else 0 for one in counts]
        self.pages = [
            ids[one.table_start + skipped : one.table_start + count[Held.PAGES]].tolist()
            for one, skipped, count in zip(self.encoded, self.skipped, counts)
        ]

    def records(self, use: Use) -> list[Usage]:
        """Returns the bytes of the tensors' records."""
        block, start, _ = self._device.range_of(self._held)
        return [Usage(block, start + one.slot * _RECORD, start + (one.slot + 1) * _RECORD, use) for one in self.encoded]

    def table(self, use: Use) -> list[Usage]:
        """Returns the bytes of the page table entries that store the tensors' page ids."""
        block, start, _ = self._device.range_of(self._table)
        return [
            Usage(
                block,
                start + (one.table_start + skipped) * _TABLE_ITEM,
                start + (one.table_start + skipped + len(pages)) * _TABLE_ITEM,
                use,
            )
            for one, pages, skipped in zip(self.encoded, self.pages, self.skipped)
        ]

    def places(self, places: Tensor, use: Use) -> list[Usage]:
        """Returns the bytes of the entries that say where kernels find the tensors' rows, also those without pages."""
        block, start, _ = self._device.range_of(places)
        found = []
        for one in self.encoded:
            rows = int(self._records[one.slot, Held.ROWS])
            first, needed = start + one.table_start * _TABLE_ITEM, -(-rows * one.row_bytes // self._page_bytes)
            found.append(Usage(block, first, first + needed * _TABLE_ITEM, use))
        return found

    def live_bytes(self, tensor: Tensor, one: EncodedTensor, skipped: int, use: Use) -> Usage:
        """Returns the bytes of the live rows of a tensor, from the first page that is copied."""
        block, start, end = self._device.range_of(tensor)
        rows = int(self._records[one.slot, Held.ROWS])
        return Usage(block, start + skipped * self._page_bytes, min(end, start + rows * one.pitch_bytes), use)

    def _tier(self, pages: Tensor) -> "Range | None":
        """Returns the bytes of a tier; None for host memory that a GPU cannot reach, and for a tier without pages."""
        is_reached = pages.numel() > 0 and (pages.is_cuda or self._device.is_pinned(pages))
        return self._device.range_of(pages) if is_reached else None

    def bytes_of_pages(self, device_pages: Tensor, host_pages: Tensor, use: Use) -> list[Usage]:
        """Returns the bytes of the tensors' pages on both tiers."""
        tiers = [self._tier(device_pages), self._tier(host_pages)]
        found = []
        for page in (page for pages in self.pages for page in pages):
            on_host = page >= self._device_pages
            tier = tiers[on_host]
            if tier is None:
                self._device.alarms.add(Kind.PAGEABLE, "a page of the host", site())
                continue
            start = tier[1] + (page - self._device_pages * on_host) * self._page_bytes
            found.append(Usage(tier[0], start, start + self._page_bytes, use))
        return found


def plan(
    device: "Device",
    num_rows: Tensor,
    reserve: Tensor,
    *,
    heads: Tensor,
    tails: Tensor,
    ring: Tensor,
    table: Tensor,
    held: Tensor,
    counters: Tensor,
    layout: list[int],
    tensors: list[int],
    places: Tensor | None = None,
    scratch: Sequence[int] = (),
) -> Callable[[], list[Usage]]:
    """Accesses of `plan`, which allocates free pages. Returns a function that lists them after the operator has run."""

    def used() -> list[Usage]:
        operands = _Operands(device, table, held, layout, tensors)
        return [
            *(Usage(*device.range_of(one), Use.READ) for one in (num_rows, reserve)),
            *(Usage(*device.range_of(one), Use.WRITE) for one in (heads, counters)),
            *(Usage(*device.range_of(one), Use.ATOMIC) for one in (ring, tails)),
            *operands.records(Use.WRITE),
            *operands.table(Use.WRITE),
            *([] if places is None else operands.places(places, Use.WRITE)),
        ]

    return used


def stash(
    device: "Device",
    sources: Sequence[Tensor],
    device_pages: Tensor,
    *,
    host_pages: Tensor,
    table: Tensor,
    held: Tensor,
    layout: list[int],
    tensors: list[int],
    num_programs: int,
    host_only: bool = False,
) -> Callable[[], list[Usage]]:
    """Accesses of `stash`, which copies rows into pages. Returns a function that lists them."""
    operands = _Operands(device, table, held, layout, tensors, host_only=host_only)
    return lambda: _copy(device, operands, sources, Use.READ, device_pages, host_pages)


def restore(
    device: "Device",
    device_pages: Tensor,
    host_pages: Tensor,
    *,
    table: Tensor,
    held: Tensor,
    targets: Sequence[Tensor],
    layout: list[int],
    tensors: list[int],
    num_programs: int,
    host_only: bool = False,
) -> Callable[[], list[Usage]]:
    """Accesses of `restore`, which copies rows out of pages. Returns a function that lists them."""
    operands = _Operands(device, table, held, layout, tensors, host_only=host_only)
    return lambda: _copy(device, operands, targets, Use.WRITE, device_pages, host_pages)


def _copy(
    device: "Device",
    operands: "_Operands",
    rows: Sequence[Tensor],
    use: Use,
    device_pages: Tensor,
    host_pages: Tensor,
) -> list[Usage]:
    opposite = Use.WRITE if use is Use.READ else Use.READ
    return [
        *(
            operands.live_bytes(tensor, one, skipped, use)
            for tensor, one, pages, skipped in zip(rows, operands.encoded, operands.pages, operands.skipped)
            if pages
        ),
        *operands.bytes_of_pages(device_pages, host_pages, opposite),
        *operands.records(Use.READ),
        *operands.table(Use.READ),
    ]


def release(
    device: "Device",
    ring: Tensor,
    tails: Tensor,
    *,
    table: Tensor,
    held: Tensor,
    layout: list[int],
    tensors: list[int],
) -> Callable[[], list[Usage]]:
    """Accesses of `release`, which frees pages. Returns a function that lists them.

    The operator does not receive the pages, so their pool is looked up by its ring.
    """
    operands = _Operands(device, table, held, layout, tensors)
    reference = device.page_pools.get(device.block_of(ring))
    pool = None if reference is None else reference()

    def used() -> list[Usage]:
        found = [
            *(Usage(*device.range_of(one), Use.ATOMIC) for one in (ring, tails)),
            *operands.records(Use.WRITE),
            *operands.table(Use.READ),
        ]
        if pool is not None:
            found += operands.bytes_of_pages(pool.device_pages, pool.host_pages, Use.HAND_OVER)
        return found

    return used


def paged_operands(device: "Device", given: Mapping[str, Any], writes: Collection[str]) -> tuple[set[int], list[Usage]]:
    """Returns the ids of an operator's operands that are arenas of pages, and the bytes of their live rows.

    given: the operator's arguments by name. writes: names of arguments that it changes. Reports pages that are free.
    """
    arenas, found = set[int](), list[Usage]()
    for name, table in given.items():
        operand = name.removesuffix("_table")
        if operand == name or table is None:
            continue
        memory, (page_bytes, max_rows, width) = given[operand], given[f"{operand}_sizes"]
        counts = given["offsets"] if "offsets" in given else given["num_rows"]
        rows = min(int(device.bytes_of(counts)[-1]), max_rows)
        block, start, _ = device.range_of(memory)
        arenas.add(id(memory))
        free = _free_pages(device, block)
        # Operators change `rows` in place, and write other results without reading them.
        uses = [
            use
            for use, is_made in ((Use.READ, operand not in writes or operand == "rows"), (Use.WRITE, operand in writes))
            if is_made
        ]
        for use in uses:
            left = rows * width * memory.element_size()
            for place in device.bytes_of(table)[: -(-left // page_bytes)].tolist():
                first = start + place * page_bytes
                found.append(Usage(block, first, first + min(left, page_bytes), use))
                if place in free:
                    device.alarms.add(Kind.RELEASED, f"{operand} in the stash", site())
                left -= page_bytes
    return arenas, found


def _free_pages(device: "Device", arena: Block) -> set[int]:
    """Returns the ids of the free pages on the device of the pool that has this arena."""
    pools = (pool for pool in (reference() for reference in device.page_pools.values()) if pool is not None)
    pool = next((pool for pool in pools if pool.arena.numel() and device.block_of(pool.arena) is arena), None)
    if pool is None:
        return set()
    ring, size = device.bytes_of(pool.ring), pool.layout.device_pages
    head, tail = (int(device.bytes_of(ends)[0]) for ends in (pool.heads, pool.tails))
    return {int(ring[place % size]) for place in range(head, tail)}


ACCESS_SETS = {f"paged_stash::{one.__name__}": one for one in (plan, stash, restore, release)}
