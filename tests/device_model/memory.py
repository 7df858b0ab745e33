"""Memory of the modelled device: blocks with the last accesses of their bytes, and rules for their reuse.

[Note: allocator] Torch's caching allocator returns freed memory to the stream that allocated it, in the order of that
stream. The block that is reused depends on sizes and on history. The model assumes the worst case: the next allocation
on a stream may receive any memory that the stream freed before. So a block is safe if, at the next allocation on its
stream, that stream is ordered after each access by other streams, or if those streams were declared with record_stream.
A wait between an allocation and its first launch counts as too late, which is stricter than CUDA. Captures allocate
from pools, and later captures of a pool may reuse memory that is free at that time. Pinned memory is reused in the
order of the host. Torch itself waits for copies from and to pinned memory, but not for kernels. Memory that the program
registers with CUDA is pinned without torch: nothing keeps it alive for a copy, and once it is unregistered it may be
returned to the operating system.
"""

import weakref
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch

from tests.device_model.alarms import AlarmList, Kind, site
from tests.device_model.timeline import HOST, Clock

Access = tuple[int, int, str]  # stream, number of the launch, site


class Use(Enum):
    """Kinds of accesses. [Note: atomic accesses] in access_sets.py explains ATOMIC and HAND_OVER."""

    READ = "reads"
    WRITE = "writes"
    ATOMIC = "reads and writes atomically"
    HAND_OVER = "releases"


class Usage(NamedTuple):
    """An access of one kind to the bytes start to end of a block."""

    block: "Block"
    start: int
    end: int
    use: Use


class Segment:
    """A range of bytes with the same last accesses. written: sequence number of the write, 0 if there was none."""

    __slots__ = ("start", "end", "writer", "readers", "atomics", "written")

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end, self.written = start, end, 0
        self.writer: Access | None = None
        self.readers: dict[int, Access] = {}
        self.atomics: dict[int, Access] = {}

    def part(self, start: int, end: int) -> "Segment":
        """Returns the segment of a part of the bytes, with the same accesses."""
        made = Segment(start, end)
        made.writer, made.written = self.writer, self.written
        made.readers, made.atomics = dict(self.readers), dict(self.atomics)
        return made


@dataclass(eq=False)
class Pool:
    """A memory pool of graphs. now: number of allocations and frees so far, which serves as a clock."""

    number: int
    now: int = 0
    blocks: "list[Block]" = field(default_factory=list)


@dataclass(eq=False)
class Block:
    """Memory of one storage.

    storage: contains the bytes; the storage that the program sees has the same size and is never read.
    stream: the stream that allocated the block, HOST for pinned memory.
    others: last launch of each other stream that used the block.
    born, died: values of Pool.now when the block was allocated and freed.
    overwritten: sequence number of the last replay that may have overwritten the block, and the name of that graph.
    """

    storage: torch.UntypedStorage
    stream: int
    place: str
    pool: Pool | None = None
    segments: list[Segment] = field(default_factory=list)
    others: dict[int, Access] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)
    is_alive: bool = True
    born: int = 0
    died: float = float("inf")
    overwritten: tuple[int, str] = (0, "")
    pending: list[tuple[Any, bool]] = field(default_factory=list)  # gloo collectives and whether they write
    reference: Any = None
    is_registered: bool = False  # pinned by the program itself

    @property
    def is_pinned(self) -> bool:
        """Whether the block is pinned host memory."""
        return self.stream == HOST

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.storage.nbytes()


class Ledger:
    """Records accesses by work that has run on the device, and reports accesses without an order."""

    def __init__(self, alarms: AlarmList) -> None:
        self._alarms = alarms
        self.sequence = 0

    def access(self, block: Block, start: int, end: int, *, by: Access, clock: Clock, use: Use, name: str) -> None:
        """Records an access of bytes start to end, and reports earlier accesses that are not ordered before it."""
        if start >= end:
            return
        if by[0] != block.stream:
            block.others[by[0]] = by
        if use is not Use.WRITE and block.overwritten[0]:
            self._check_overwritten(block, start, end, by=by, name=name)
        self._note(block.segments, block, start, end, by=by, clock=clock, use=use, name=name)

    def _note(
        self,
        segments: list[Segment],
        block: Block,
        start: int,
        end: int,
        *,
        by: Access,
        clock: Clock,
        use: Use,
        name: str,
    ) -> bool:
        """Checks and records an access. Returns whether it reads bytes that nothing in this ledger has written."""
        if not segments:
            segments.append(Segment(0, max(block.num_bytes, end)))
        if len(segments) == 1 and segments[0].start == start and segments[0].end == end:
            touched = segments
        else:
            touched = _split(segments, start, end)
        for one in touched:
            self._check(one, by=by, clock=clock, use=use, name=name)
        if use is Use.READ or use is Use.ATOMIC:
            for one in touched:
                (one.readers if use is Use.READ else one.atomics)[by[0]] = by
            return any(one.writer is None for one in touched)
        self.sequence += 1
        first = touched[0]
        first.start, first.end = start, end
        first.writer, first.readers, first.atomics, first.written = by, {}, {}, self.sequence
        if use is Use.HAND_OVER:
            first.writer = None
        if len(touched) > 1:
            dropped = set(map(id, touched[1:]))
            segments[:] = [one for one in segments if id(one) not in dropped]
        return False

    def _check(self, segment: Segment, *, by: Access, clock: Clock, use: Use, name: str) -> None:
        writer = segment.writer
        if writer is not None and clock.get(writer[0], 0) < writer[1]:
            self._alarms.add(Kind.RACE, f"{name} {use.value} bytes that another stream writes", by[2], writer[2])
        others = [segment.readers] if use is not Use.READ else []
        others += [segment.atomics] if use is not Use.ATOMIC else []
        for accesses in others:
            for one in accesses.values():
                if clock.get(one[0], 0) < one[1]:
                    self._alarms.add(Kind.RACE, f"{name} {use.value} bytes that another stream uses", by[2], one[2])

    def _check_overwritten(self, block: Block, start: int, end: int, *, by: Access, name: str) -> None:
        sequence, graph = block.overwritten
        for one in block.segments or [Segment(start, end)]:
            if one.start < end and start < one.end and one.written < sequence:
                self._alarms.add(Kind.OVERWRITTEN, f"{name} reads after a replay of {graph}", by[2], block.place)
                return


class CaptureLedger(Ledger):
    """Records the accesses of a captured region, without accesses from before the capture.

    inputs: bytes that the region reads before it writes them, with their sites. outputs: bytes that it writes.
    """

    def __init__(self, alarms: AlarmList, pool: Pool) -> None:
        super().__init__(alarms)
        self._pool, self._begun = pool, pool.now
        self._segments: dict[Block, list[Segment]] = {}
        self.inputs: dict[Usage, str] = {}
        self.outputs: dict[Usage, str] = {}

    def access(self, block: Block, start: int, end: int, *, by: Access, clock: Clock, use: Use, name: str) -> None:
        """Records an access as Ledger.access does, and collects the region's inputs and outputs."""
        if start >= end:
            return
        segments = self._segments.setdefault(block, [])
        is_input = self._note(segments, block, start, end, by=by, clock=clock, use=use, name=name)
        if by[0] != block.stream and block.pool is self._pool:
            block.others[by[0]] = by
        if block.pool is self._pool and block.born > self._begun:
            # Memory that the capture allocated is not an input, although kernels may read unwritten bytes there, such
            # as rows that are not live.
            is_input = False
        if is_input or use is Use.ATOMIC:
            self.inputs.setdefault(Usage(block, start, end, use), by[2])
        elif use is Use.WRITE:
            self.outputs.setdefault(Usage(block, start, end, use), by[2])

    def blocks(self) -> set[Block]:
        """Returns the set of blocks that the region uses."""
        return set(self._segments)


def _split(segments: list[Segment], start: int, end: int) -> list[Segment]:
    """Splits segments at start and end, and returns those between."""
    found, result = [], []
    for one in segments:
        if one.end <= start or one.start >= end:
            result.append(one)
            continue
        if one.start < start:
            result.append(one.part(one.start, start))
        if one.end > end:
            after = one.part(end, one.end)
        else:
            after = None
        one.start, one.end = max(one.start, start), min(one.end, end)
        result.append(one)
        found.append(one)
        if after is not None:
            result.append(after)
    segments[:] = result
    return found


class Memory:
    """Allocates and frees blocks. Live blocks are stored by the address of the program's storage object."""

    def __init__(self, alarms: AlarmList) -> None:
        self._alarms = alarms
        self.blocks: dict[int, Block] = {}
        self._freed: dict[tuple[int, int], list[Block]] = {}
        self._pools: list[Pool] = []
        self.num_bytes = self.peak_bytes = 0

    def new_pool(self) -> Pool:
        """Returns an empty pool for graphs."""
        self._pools.append(Pool(len(self._pools) + 1))
        return self._pools[-1]

    def allocate(
        self,
        program: torch.UntypedStorage,
        storage: torch.UntypedStorage,
        *,
        stream: int,
        clock: Clock,
        pool: Pool | None,
    ) -> Block:
        """Allocates a block for the program's storage. stream: HOST for pinned memory. clock: clock of this stream."""
        place = site()
        self._hand_out(stream, clock, pool, place)
        block = Block(storage, stream, place, pool)
        if pool is not None:
            pool.now += 1
            block.born = pool.now
            pool.blocks.append(block)
        key = program._cdata
        if not block.is_pinned:
            self.num_bytes += block.num_bytes
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        self.blocks[key] = block
        block.reference = weakref.ref(program, lambda _: self._died(key, block))
        return block

    def free(self, block: Block) -> None:
        """Records that the program has released a block."""
        if not block.is_alive:
            return
        block.is_alive = False
        if not block.is_pinned:
            self.num_bytes -= block.num_bytes
        if block.pool is not None:
            block.pool.now += 1
            block.died = block.pool.now
        # Registered memory is checked when it is unregistered, and torch never allocates from it.
        if not block.is_registered and any(stream not in block.recorded for stream in block.others):
            self._freed.setdefault((block.stream, block.pool.number if block.pool else 0), []).append(block)

    def _died(self, key: int, block: Block) -> None:
        if self.blocks.get(key) is block:
            del self.blocks[key]
        self.free(block)

    def _hand_out(self, stream: int, clock: Clock, pool: Pool | None, place: str) -> None:
        freed = self._freed.pop((stream, pool.number if pool else 0), None)
        for block in freed or ():
            for other, access in block.others.items():
                if other not in block.recorded and clock.get(other, 0) < access[1]:
                    self._alarms.add(Kind.HANDED_OUT, f"memory of {block.place}", place, access[2])


def overwrite(pool: Pool, own: "set[Block]", *, sequence: int, name: str) -> None:
    """Marks all blocks of a pool that may share memory with the blocks of a replayed graph.

    Two blocks may share memory if one was freed before the other was allocated.
    """
    if not own:
        return
    last_born, first_died = max(one.born for one in own), min(one.died for one in own)
    for block in pool.blocks:
        if block not in own and (block.died < last_born or block.born > first_died):
            block.overwritten = sequence, name
