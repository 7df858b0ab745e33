"""A page pool in plain Python, and random operations that compare an implementation with it.

RandomOperations(1).run(2000)                   # the operators paged_stash::*
RandomOperations(1, ops=launchers).run(2000)    # any plan, stash, restore and release with the same signatures
"""

import random
from collections import Counter as Tally
from typing import Any

import torch

from megatron.core.transformer.moe.paged_stash.page_layout import (
    Counter,
    Held,
    PlacedTensor,
    PoolLayout,
    Priority,
    TensorSpec,
)
from megatron.core.transformer.moe.paged_stash.page_pool import PageGroup, PagePool, TableSlab

PAGE_BYTES = (16, 32, 48, 64, 256, 1024)
ROW_BYTES = (1, 7, 8, 16, 24, 32, 64, 100, 256, 1000)
GAPS = (0, 0, 0, 1, 8, 16, 40)  # bytes between rows
POSITIONS = (0, 7, 2**31 - 3, 2**31 + 5, 2**32 - 1, 2**62)  # initial positions of the rings' heads
POISON = 0xA5


class ModelTables:
    """Page table and records of a slab."""

    def __init__(self, slab: TableSlab) -> None:
        self.table = [0] * len(slab.table)
        self.held = [[0] * len(Held) for _ in slab.held]

    def pages(self, one: PlacedTensor) -> list[int]:
        return self.table[one.table_start : one.table_start + self.held[one.slot][0]]


class ModelPool:
    """Reference for the operators, one page and one row at a time.

    gives_lowest: whether plan allocates the lowest free pages, as on a CPU, or the pages that were released first.
    """

    def __init__(self, layout: PoolLayout, *, gives_lowest: bool = False) -> None:
        self.gives_lowest = gives_lowest
        self.page_bytes, self.sizes = layout.page_bytes, (layout.device_pages, layout.host_pages)
        self.memory = [bytearray([POISON] * layout.page_bytes) for _ in range(layout.num_pages)]
        self.reset()

    def reset(self) -> None:
        self.rings = [list(range(self.sizes[0])), [self.sizes[0] + index for index in range(self.sizes[1])]]
        self.heads, self.tails = [0, 0], list(self.sizes)
        self.counters = dict.fromkeys(Counter, 0)

    def plan(self, tables: ModelTables, tensors: list[PlacedTensor], count: int, reserve: list[int]) -> None:
        for ring, head, tail in zip(self.rings, self.heads, self.tails) if self.gives_lowest else ():
            for place, page in zip(range(head, tail), sorted(ring[place % len(ring)] for place in range(head, tail))):
                ring[place % len(ring)] = page
        limit = min(one.spec.max_tokens for one in tensors)
        if count < 0 or count > limit:
            self.counters[Counter.BAD_COUNT] += 1
            self.counters[Counter.VOID] += 1
        for one in tensors:
            rows = -(-sorted((0, count, limit))[1] // one.spec.tokens_per_row)
            need = len(range(0, rows * one.spec.row_bytes, self.page_bytes))
            if need > 0 and need + reserve[one.spec.priority] > sum(self.tails) - sum(self.heads):
                self.counters[(Counter.VOID, Counter.DROPPED_GATE_UP, Counter.DROPPED_ACT)[one.spec.priority]] += 1
                tables.held[one.slot] = [0, rows, 1, 0]
                continue
            on_host = 0
            for index in range(need):
                tier = 0 if self.tails[0] > self.heads[0] else 1
                tables.table[one.table_start + index] = self.rings[tier][self.heads[tier] % self.sizes[tier]]
                self.heads[tier] += 1
                on_host += tier
            self.counters[Counter.PLANNED_PAGES] += need
            self.counters[Counter.LIVE_BYTES] += rows * one.spec.row_bytes
            self.counters[Counter.SPILLED_PAGES] += on_host
            tables.held[one.slot] = [need, rows, 0, on_host]
        for tier, counter in enumerate((Counter.HIGH_WATER_DEVICE, Counter.HIGH_WATER_HOST)):
            used = self.sizes[tier] - self.tails[tier] + self.heads[tier]
            self.counters[counter] = max(self.counters[counter], used)

    def stash(self, tables: ModelTables, one: PlacedTensor, source: bytearray) -> None:
        starts = range(0, tables.held[one.slot][1] * one.spec.pitch_bytes, one.spec.pitch_bytes)
        live = b"".join(source[start : start + one.spec.row_bytes] for start in starts)
        for index, page in enumerate(tables.pages(one)):
            part = live[index * self.page_bytes :][: self.page_bytes]
            self.memory[page][: len(part)] = part

    def restore(self, tables: ModelTables, one: PlacedTensor, target: bytearray) -> None:
        live = b"".join(self.memory[page] for page in tables.pages(one))
        for row in range(tables.held[one.slot][1] if live else 0):
            part = live[row * one.spec.row_bytes :][: one.spec.row_bytes]
            start = row * one.spec.pitch_bytes
            target[start : start + len(part)] = part

    def release(self, tables: ModelTables, tensors: list[PlacedTensor]) -> None:
        for one in tensors:
            for page in tables.pages(one):
                tier = int(page >= self.sizes[0])
                self.rings[tier][self.tails[tier] % self.sizes[tier]] = page
                self.tails[tier] += 1
            tables.held[one.slot][Held.PAGES] = tables.held[one.slot][Held.ON_HOST] = 0

    def free_pages(self) -> list[int]:
        ends = zip(self.rings, self.heads, self.tails)
        return [ring[place % len(ring)] for ring, head, tail in ends for place in range(head, tail)]


class RandomOperations:
    """Random operations on random pools. Bytes, tables, rings and counters must equal the model's after each operation.

    Pools start with shuffled rings and advanced heads. counts: number of occurrences of each operation and event.
    """

    def __init__(self, seed: int, *, ops: Any = None, device: str = "cpu") -> None:
        self.random = random.Random(seed)
        self.ops = torch.ops.paged_stash if ops is None else ops
        self.gives_lowest = ops is None and device == "cpu"
        self.device = device
        self.counts: Tally[Any] = Tally()
        self.new_pool()

    def run(self, count: int) -> "RandomOperations":
        verbs = {"open": 3, "plan": 6, "stash": 6, "restore": 6, "release": 6, "close": 3}
        rare = {"reset": 0.1, "new_pool": 0.03}
        weights = verbs | rare
        while self.counts["operations"] < count:
            verb = self.random.choices(list(weights), list(weights.values()))[0]
            if verb in rare:
                getattr(self, verb)()
            elif verb == "open" and len(self.groups) < self.most_groups:
                self.open()
            elif verb != "open" and self.groups:
                getattr(self, verb)(self.random.choice(list(self.groups)))
            else:
                continue
            self.counts.update((verb, "operations"))
            self.compare()
        return self

    def new_pool(self) -> None:
        pages = self.random.choice((1, 2, 5, 9, 30))
        on_host = self.random.choice((0, 0, pages, self.random.randint(0, pages)))
        self.layout = PoolLayout(self.random.choice(PAGE_BYTES), pages - on_host, on_host)
        self.pool = PagePool(self.device, self.layout)
        self.model = ModelPool(self.layout, gives_lowest=self.gives_lowest)
        for memory in (self.pool.device_pages, self.pool.host_pages):
            memory.fill_(POISON)
        self.most_groups = self.random.choice((1, 4, 24))
        self.tables: dict[TableSlab, ModelTables] = {}
        self.groups: dict[PageGroup, ModelTables] = {}
        self.disturb()

    def reset(self) -> None:
        before = [tensor.data_ptr() for tensor in self.state().values()]
        stale = list(self.groups)
        self.pool.reset()
        self.model.reset()
        self.groups.clear()
        for tables in self.tables.values():
            tables.held = [[0] * len(Held) for _ in tables.held]
        self.compare()
        for group in stale:
            self.pool.release(group)
            self.pool.close_group(group)
        assert before == [tensor.data_ptr() for tensor in self.state().values()]
        if self.random.random() < 0.5:
            self.disturb()

    def disturb(self) -> None:
        """Puts the pool in the state of one that has been in use for a long time."""
        for tier, ring in enumerate(self.model.rings):
            self.random.shuffle(ring)
            self.model.heads[tier] = self.random.choice(POSITIONS)
            self.model.tails[tier] = self.model.heads[tier] + len(ring)
        self.pool.ring.copy_(torch.tensor(sum(self.model.rings, []), dtype=torch.int32))
        self.pool.heads.copy_(torch.tensor(self.model.heads))
        self.pool.tails.copy_(torch.tensor(self.model.tails))

    def open(self) -> None:
        largest = self.random.choice((1, 3, 12))
        specs = [self.spec(largest) for _ in range(self.random.choice((1, 1, 2, 3, 5, 18)))]
        group = self.pool.open_group(specs)
        assert [one.spec for one in group.tensors] == specs and group.waits == []
        self.groups[group] = self.tables.setdefault(group.slab, ModelTables(group.slab))
        rooms = [one for other in self.groups if other.slab is group.slab for one in other.tensors]
        taken = sorted((one.table_start, self.layout.pages_for(one.spec.max_bytes), one.slot) for one in rooms)
        assert all(start + length <= after for (start, length, _), (after, *_) in zip(taken, taken[1:]))
        assert len({slot for *_, slot in taken}) == len(taken)

    def spec(self, largest: int) -> TensorSpec:
        row_bytes, tokens = self.random.choice(ROW_BYTES), self.random.choice((1, 1, 1, 32))
        pitch, rows = row_bytes + self.random.choice(GAPS), self.random.randint(0 if tokens == 1 else 1, largest)
        return TensorSpec(row_bytes, pitch, rows, self.random.choice(list(Priority)), tokens)

    def plan(self, group: PageGroup) -> None:
        if any(self.groups[group].pages(one) for one in group.tensors):
            self.release(group)
        most = min(one.spec.max_tokens for one in group.tensors)
        count = self.random.choice((0, 1, most, most, self.random.randint(0, most), most + 1, -1, 2**40))
        reserve = [0, *self.random.choice(((0, 0), (0, 0), (2, 0), (3, 7), (0, 2**40)))]
        rows, kept = (torch.tensor(value, device=self.device) for value in ([count], reserve))
        for tensors, named in self.calls(group):
            ends = {"heads": self.pool.heads, "tails": self.pool.tails, "ring": self.pool.ring}
            self.ops.plan(rows, kept, **ends, counters=self.pool.counters, **named)
            before = dict(self.model.counters)
            self.model.plan(self.groups[group], tensors, count, reserve)
            self.counts.update(name for name, value in self.model.counters.items() if value != before[name])

    def stash(self, group: PageGroup) -> None:
        sources = self.memories(group, random_bytes=True)
        for (tensors, named), call in zip(self.calls(group), group.calls):
            pages = {"host_pages": self.pool.host_pages, "num_programs": self.random.choice((0, 1, 3))}
            self.ops.stash([sources[index][1] for index in call.indices], self.pool.device_pages, **pages, **named)
            for one, index in zip(tensors, call.indices):
                self.model.stash(self.groups[group], one, sources[index][0])

    def restore(self, group: PageGroup) -> None:
        targets = self.memories(group, random_bytes=False)
        for (tensors, named), call in zip(self.calls(group), group.calls):
            chosen = [targets[index][1] for index in call.indices]
            pages = self.pool.device_pages, self.pool.host_pages
            self.ops.restore(*pages, targets=chosen, num_programs=self.random.choice((0, 1, 3)), **named)
            for one, index in zip(tensors, call.indices):
                self.model.restore(self.groups[group], one, targets[index][0])
        for expected, found in targets:
            assert expected == found.cpu().numpy().tobytes()

    def release(self, group: PageGroup) -> None:
        for tensors, named in self.calls(group):
            self.ops.release(self.pool.ring, self.pool.tails, **named)
            self.model.release(self.groups[group], tensors)

    def close(self, group: PageGroup) -> None:
        self.release(group)
        self.pool.close_group(group)
        del self.groups[group]

    def calls(self, group: PageGroup) -> list[tuple[list[PlacedTensor], dict[str, Any]]]:
        records = {"table": group.slab.table, "held": group.slab.held, "layout": self.layout.numbers}
        return [
            ([group.tensors[index] for index in call.indices], {**records, "tensors": call.tensors})
            for call in group.calls
        ]

    def memories(self, group: PageGroup, *, random_bytes: bool) -> list[tuple[bytearray, torch.Tensor]]:
        """Creates each tensor's memory twice: for the model, and at any address for the operators."""
        pairs = []
        for spec in (one.spec for one in group.tensors):
            size, offset = spec.max_rows * spec.pitch_bytes, self.random.choice((0, 0, 0, 1, 4, 8))
            data = bytearray(self.random.randbytes(size) if random_bytes else [POISON] * size)
            memory = torch.frombuffer(bytearray(offset) + data, dtype=torch.uint8) if offset + size else torch.empty(0)
            pairs.append((data, memory.to(self.device, torch.uint8)[offset:]))
        return pairs

    def state(self) -> dict[str, torch.Tensor]:
        pool = self.pool
        named = {"heads": pool.heads, "tails": pool.tails, "ring": pool.ring, "counters": pool.counters}
        return named | {"device pages": pool.device_pages, "host pages": pool.host_pages}

    def compare(self) -> None:
        """Asserts that the state equals the model's, and that each page is either free or held."""
        model, found = self.model, {name: tensor.cpu() for name, tensor in self.state().items()}
        assert found["heads"].tolist() == model.heads and found["tails"].tolist() == model.tails
        assert found["ring"].tolist() == sum(model.rings, [])
        assert dict(zip(Counter, found["counters"].tolist())) == model.counters
        pages = found["device pages"].numpy().tobytes() + found["host pages"].numpy().tobytes()
        assert pages == b"".join(model.memory)
        for slab, tables in self.tables.items():
            assert slab.table.tolist() == tables.table and slab.held.tolist() == tables.held
        held = [page for group, tables in self.groups.items() for one in group.tensors for page in tables.pages(one)]
        assert sorted(held + model.free_pages()) == list(range(self.layout.num_pages))
