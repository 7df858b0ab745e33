"""Memory of the modelled device: blocks with the last accesses of their bytes, and what an allocator may do with them.

[Note: allocator] Torch's caching allocator hands freed memory out again to the stream that allocated it, in the order
of that stream. Which block it hands out depends on sizes and on history. The model assumes the worst: the next
allocation of a stream may get any memory that was freed for it before. So a block is safe if, at the next allocation of
its own stream, that stream is ordered after each access by other streams, or if those were declared with record_stream.
A wait between an allocation and its first launch comes too late, which is stricter than CUDA. Memory of captures comes
from pools: later captures of a pool may reuse what is free at that time. Pinned memory is handed out in the order of
the host; torch waits for copies from and to it by itself, but not for kernels. Memory that the program registers with
CUDA is pinned without torch: nothing keeps it for a copy, and once it is unregistered the operating system has it.
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
    """Kinds of accesses. ATOMIC, HAND_OVER: see [Note: atomic accesses] in access_sets.py."""

    READ = "reads"
    WRITE = "writes"
    ATOMIC = "reads and writes atomically"
    HAND_OVER = "releases"


class Usage(NamedTuple):
    """Bytes start to end of a block, and what is done with them."""

    block: "Block"
    start: int
    end: int
    use: Use


class Segment:
    """Bytes with the same last accesses. written: sequence number of the write, 0 if there was none."""

    __slots__ = ("start", "end", "writer", "readers", "atomics", "written")

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end, self.written = start, end, 0
        self.writer: Access | None = None
        self.readers: dict[int, Access] = {}
        self.atomics: dict[int, Access] = {}

    def part(self, start: int, end: int) -> "Segment":
        """Returns a part of it with the same history."""
        made = Segment(start, end)
        made.writer, made.written = self.writer, self.written
        made.readers, made.atomics = dict(self.readers), dict(self.atomics)
        return made


@dataclass(eq=False)
class Pool:
    """Memory pool of graphs. now: number of allocations and frees so far."""

    number: int
    now: int = 0
    blocks: "list[Block]" = field(default_factory=list)


@dataclass(eq=False)
class Block:
    """Memory of one storage.

    storage: holds the bytes; the storage that the program sees has the same size and is never read. stream: the one
    that allocated it, HOST for pinned memory.
    others: last launch of each other stream that used it. born, died: times of its pool. overwritten: sequence number
    of the last replay that may have overwritten it, and the name of that graph.
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
    pending: list[tuple[Any, bool]] = field(default_factory=list)  # collectives of gloo that use it, and if they write
    reference: Any = None
    is_registered: bool = False  # pinned by the program itself

    @property
    def is_pinned(self) -> bool:
        """Whether it is memory of the host."""
        return self.stream == HOST

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.storage.nbytes()


class Ledger:
    """Last accesses of blocks that have run on the device."""

    def __init__(self, alarms: AlarmList) -> None:
        self._alarms = alarms
        self.sequence = 0

    def access(self, block: Block, start: int, end: int, *, by: Access, clock: Clock, use: Use, name: str) -> None:
        """Notes an access of bytes start to end, and reports accesses that have no order with it."""
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
        """Checks and notes an access. Returns whether it reads bytes that nothing in this ledger has written."""
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
    """Accesses of a region that a capture records, without those that happened before it.

    inputs, outputs: bytes that the region reads before it has written them, and bytes that it writes, with their sites.
    """

    def __init__(self, alarms: AlarmList, pool: Pool) -> None:
        super().__init__(alarms)
        self._pool, self._begun = pool, pool.now
        self._segments: dict[Block, list[Segment]] = {}
        self.inputs: dict[Usage, str] = {}
        self.outputs: dict[Usage, str] = {}

    def access(self, block: Block, start: int, end: int, *, by: Access, clock: Clock, use: Use, name: str) -> None:
        """Notes an access; see Ledger."""
        if start >= end:
            return
        segments = self._segments.setdefault(block, [])
        is_input = self._note(segments, block, start, end, by=by, clock=clock, use=use, name=name)
        if by[0] != block.stream and block.pool is self._pool:
            block.others[by[0]] = by
        if block.pool is self._pool and block.born > self._begun:
            # Memory that the capture allocated is no input, though kernels may read what nobody has written there, such
            # as rows that are not live.
            is_input = False
        if is_input or use is Use.ATOMIC:
            self.inputs.setdefault(Usage(block, start, end, use), by[2])
        elif use is Use.WRITE:
            self.outputs.setdefault(Usage(block, start, end, use), by[2])

    def blocks(self) -> set[Block]:
        """Returns all blocks that the region uses."""
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
    """All blocks that are alive, by the address of the program's storage object, and those that were freed lately."""

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
        """Gives the program's storage a block. stream: HOST for pinned memory. clock: that of this stream."""
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
        """Notes that the program has released a block."""
        if not block.is_alive:
            return
        block.is_alive = False
        if not block.is_pinned:
            self.num_bytes -= block.num_bytes
        if block.pool is not None:
            block.pool.now += 1
            block.died = block.pool.now
        # The end of a registration checks registered memory, and no allocation of torch gets it.
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
    """Marks all blocks of a pool that may share memory with the blocks of a graph that is replayed.

    Two blocks may share memory if one was freed before the other was allocated.
    """
    if not own:
        return
    last_born, first_died = max(one.born for one in own), min(one.died for one in own)
    for block in pool.blocks:
        if block not in own and (block.died < last_born or block.born > first_died):
            block.overwritten = sequence, name
