"""Device: one modelled GPU. It computes on the CPU and checks the order, lifetime and capture of memory accesses.

`Device.run` (operators.py) is called for each operator of torch. The callbacks of engine_streams.cpp call `record`,
`block` and the `synchronize` functions, for the program's own streams and events and for those of the autograd engine.
"""

import ctypes
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.moe.paged_stash import PagePool
from tests.device_model import operators
from tests.device_model.access_sets import ACCESS_SETS
from tests.device_model.alarms import AlarmList, Kind, site
from tests.device_model.library import LIBRARY
from tests.device_model.memory import Block, CaptureLedger, Ledger, Memory, Pool, Usage, Use, overwrite
from tests.device_model.operators import OperatorRunner
from tests.device_model.timeline import HOST, Clock, Event, Timeline, join

_NAN_BYTE = 0xFF
_RESIZE = torch.UntypedStorage.resize_


@dataclass(frozen=True)
class Step:
    """A step of a graph, run on the CPU. reads, writes: storage addresses. run: returns collective work, or None."""

    reads: frozenset[int]
    writes: frozenset[int]
    run: Callable[[], Any]

    def meets(self, other: "Step") -> bool:
        """Returns whether one of the two steps writes storage that the other uses."""
        return bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)


@dataclass(eq=False)
class Recorded:
    """Captured work of a graph: the steps that a replay runs, and the bytes that they use."""

    number: int
    pool: Pool
    steps: "list[Step]" = field(default_factory=list)
    inputs: list[tuple[Usage, str]] = field(default_factory=list)
    outputs: list[tuple[Usage, str]] = field(default_factory=list)
    generators: set[int] = field(default_factory=set)
    born: tuple[int, int] = (0, 0)  # values of Pool.now at the begin and the end of the capture

    @property
    def name(self) -> str:
        """The graph's name in alarms."""
        return f"graph {self.number}"


@dataclass(eq=False)
class Capture:
    """A capture in progress. streams: captured streams, with their earlier clocks. kept: bytes of older memory."""

    recorded: Recorded
    origin: int
    ledger: CaptureLedger
    streams: dict[int, Clock] = field(default_factory=dict)
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    made: dict[int, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class Registered:
    """Host memory that the program has registered with CUDA. blocks: one for each storage that was seen in it."""

    num_bytes: int
    place: str
    blocks: list[Block] = field(default_factory=list)


class Device(OperatorRunner):
    """A modelled GPU, one per process."""

    def __init__(self) -> None:
        super().__init__()
        self.alarms = AlarmList()
        self.timeline = Timeline()
        self.memory = Memory(self.alarms)
        self.ledger = Ledger(self.alarms)
        self.capture: Capture | None = None
        self.num_pinned = 0
        self.registered: dict[int, Registered] = {}  # by address
        self.num_launches = 0
        self.host_wait_sites: Counter[str] = Counter()
        self.generator_states = {0}  # of the default generator, and of the generator whose state it shares now
        self.drawn_state = 0
        self.together: list[Capture] | None = None
        self.access_sets = dict(ACCESS_SETS)
        # Page pools by the block of their ring. Replays of one graph use different pages of a pool.
        self.page_pools: dict[Block, weakref.ref[PagePool]] = {}
        self.num_captures = 0
        self.alive_graphs: Callable[[], Iterable[Recorded]] = list
        self.callback_error: BaseException | None = None
        self._callbacks = _callbacks_of(self)
        operators._DEVICE[:] = [self]

    def raise_callback_error(self) -> None:
        """Raises the first error that the model had in a callback from torch's C++ code."""
        if self.callback_error is not None:
            raise RuntimeError("the model failed in a callback") from self.callback_error

    # Streams and events.

    @property
    def stream(self) -> int:
        """Number of the current stream of this thread."""
        return int(LIBRARY.get_current_stream())

    def record(self, number: int, stream: int) -> int:
        """Records an event in a stream and returns its number. Event 0 creates an event."""
        if number == 0:
            self.timeline.last_event += 1
            number = self.timeline.last_event
        capture = self.capture
        is_captured = capture is not None and stream in capture.streams
        clock = dict(self.timeline.clock_of(stream))
        join(clock, self.timeline.clocks[HOST])
        self.timeline.events[number] = Event(clock, stream, capture.recorded.number if capture and is_captured else 0)
        return number

    def block(self, number: int, stream: int) -> None:
        """Makes a stream wait for an event."""
        event = self.timeline.events.get(number)
        if event is None:
            return  # an event that was never recorded: CUDA does not wait either
        capture = self.capture
        now = capture.recorded.number if capture is not None else 0
        if event.capture != 0 and event.capture != now:
            self.alarms.add(Kind.CAPTURE_WAIT, "a stream waits for an event of a capture that has ended", site())
            return
        if event.capture != 0 and capture is not None:
            if stream == 0:
                self.alarms.add(Kind.CAPTURE_WAIT, "the default stream waits for a captured event", site())
                return
            if stream not in capture.streams:
                capture.streams[stream] = dict(self.timeline.clock_of(stream))
        elif capture is not None and stream in capture.streams and event.stream != stream:
            self.alarms.add(Kind.CAPTURE_WAIT, "a captured stream waits for an event from before the capture", site())
            return
        join(self.timeline.clock_of(stream), event.clock)

    def host_waits(self, what: str, clock: Clock | None = None) -> None:
        """Makes the host wait for all launches in a clock, or for the current stream."""
        stream = self.stream
        if self.capture is not None:
            self.alarms.add(Kind.FORBIDDEN, f"the host waits ({what})", site())
        self.host_wait_sites[f"{what} at {site()}"] += 1
        self.timeline.host_waits(self.timeline.clock_of(stream) if clock is None else clock)

    def synchronize_event(self, number: int) -> None:
        """Makes the host wait for an event."""
        event = self.timeline.events.get(number)
        if event is not None:
            if event.capture != 0:
                self.alarms.add(Kind.CAPTURE_WAIT, "the host waits for an event of a capture", site())
            self.host_waits("event", event.clock)

    def synchronize_stream(self, stream: int) -> None:
        """Makes the host wait for a stream."""
        self.host_waits("stream", self.timeline.clock_of(stream))

    def synchronize_device(self) -> None:
        """Makes the host wait for all streams."""
        self.host_waits("device", {})
        self.timeline.host_waits_for_all()

    def query(self, number: int = 0) -> None:
        """Records that the host queries an event, or a stream if number is 0. The model's answer is always yes."""
        if self.capture is not None:
            self.alarms.add(Kind.FORBIDDEN, "the host queries the progress of the device", site())
        event = self.timeline.events.get(number)
        if event is not None and event.capture == 0:
            self.timeline.host_waits(event.clock)

    def use_address(self, address: int, stream: int) -> None:
        """Records that the autograd engine called record_stream for the program's memory at an address."""
        for block in list(self.memory.blocks.values()):
            storage = block.reference()
            if storage is not None and storage.data_ptr() == address and address:
                block.recorded.add(stream)
                return

    def use(self, tensor: Tensor, stream: int) -> None:
        """Models record_stream: memory is not reused before the work that is on the stream when the tensor is freed."""
        self.block_of(tensor).recorded.add(stream)

    # Memory.

    def allocate(self, program: torch.UntypedStorage, storage: torch.UntypedStorage) -> Block:
        """Allocates device memory for a storage of the program, in a capture from the capture's pool."""
        stream, capture = self.stream, self.capture
        pool = capture.recorded.pool if capture is not None and stream in capture.streams else None
        block = self.memory.allocate(program, storage, stream=stream, clock=self.timeline.present(stream), pool=pool)
        if pool is not None and capture is not None:
            capture.made[id(block)] = _all_bytes(storage)
        return block

    def allocate_pinned(self, storage: torch.UntypedStorage) -> Block:
        """Creates the block of a pinned host storage."""
        self.num_pinned += 1
        clock = self.timeline.clocks[HOST]
        # The block must not keep the program's storage alive, since the memory is freed with it.
        size = torch.UntypedStorage(storage.nbytes(), device="meta")
        return self.memory.allocate(storage, size, stream=HOST, clock=clock, pool=None)

    def register(self, address: int, num_bytes: int) -> None:
        """Pins host memory at an address."""
        if self.capture is not None:
            self.alarms.add(Kind.FORBIDDEN, "registration of host memory", site())
        self.num_pinned += 1
        self.registered[address] = Registered(num_bytes, site())

    def unregister(self, address: int) -> bool:
        """Unpins host memory and reports launches and graphs that may still use it. Returns False if a graph does."""
        if self.capture is not None:
            self.alarms.add(Kind.FORBIDDEN, "host memory is unregistered", site())
        memory = self.registered[address]
        known, is_used = self.timeline.clocks[HOST], False
        for block in memory.blocks:
            self.memory.free(block)
            for stream, access in block.others.items():
                if known.get(stream, 0) < access[1]:
                    self.alarms.add(Kind.RETURNED, f"memory of {memory.place}", site(), access[2])
            for recorded in self.alive_graphs():
                used = [where for usage, where in (*recorded.inputs, *recorded.outputs) if usage.block is block]
                if used:
                    self.alarms.add(Kind.RETURNED, f"memory of {memory.place} in {recorded.name}", site(), used[0])
                    is_used = True
        if not is_used:
            del self.registered[address]
        return not is_used

    def registered_block(self, storage: torch.UntypedStorage) -> Block | None:
        """Returns the block of a host storage that lies in registered memory, else None."""
        address = storage.data_ptr()
        for start, memory in self.registered.items():
            if start <= address < start + memory.num_bytes:
                block = self.allocate_pinned(storage)
                block.is_registered = True
                # Graphs refer to the bytes by this view, as they refer to an address on a GPU.
                view = (ctypes.c_ubyte * storage.nbytes()).from_address(address)
                block.storage = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
                memory.blocks.append(block)
                return block
        return None

    def resize(self, program: torch.UntypedStorage, num_bytes: int) -> None:
        """Resizes a storage of the program. Frees its old memory, and fills the part that is new with NaN."""
        block = self.memory.blocks[program._cdata]
        if self.capture is not None and block.pool is not self.capture.recorded.pool:
            self.alarms.add(Kind.FORBIDDEN, "memory from before the capture is resized", site())
        _RESIZE(program, num_bytes)
        if block.num_bytes != num_bytes:
            self.resized(program, block)

    def copy_storage(self, target: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
        """Copies all bytes of a storage into another, for storage methods that call no operator."""
        tensors = [operators.make_tensor(one, _all_bytes(one)) for one in (target, source)]
        with torch.no_grad():
            tensors[0].copy_(tensors[1])

    def resized(self, program: torch.UntypedStorage, block: Block) -> Block:
        """Allocates new memory for a storage whose size has changed, and copies the old bytes that fit."""
        self.memory.free(block)
        storage = torch.UntypedStorage(program.nbytes())
        if storage.nbytes():
            with operators.plainly():
                _all_bytes(storage).fill_(_NAN_BYTE)
        old = block.storage
        shared = min(old.nbytes(), storage.nbytes())
        if shared:
            _all_bytes(storage)[:shared] = _all_bytes(old)[:shared]
        return self.allocate(program, storage)

    # Work.

    def launch(
        self,
        name: str,
        usages: Sequence[Usage],
        *,
        random: bool = False,
        generator: int | None = None,
        copies: bool = False,
    ) -> None:
        """Records work on the current stream. copies: whether it is a torch copy, which keeps pinned memory alive."""
        stream, capture = self.stream, self.capture
        self.num_launches += 1
        ledger = self.ledger
        where = site()
        if capture is not None:
            if stream in capture.streams:
                ledger = capture.ledger
                drawn = self.drawn_state if generator is None else generator
                if random and drawn not in capture.recorded.generators | {0}:
                    self.alarms.add(Kind.UNREGISTERED, name, where)
            else:
                self.alarms.add(Kind.OUTSIDE, name, where)
        tick, clock = self.timeline.tick(stream)
        by = (stream, tick, where)
        for block, start, end, use in usages:
            ledger.access(block, start, end, by=by, clock=clock, use=use, name=name)
            if copies and block.is_pinned:
                block.recorded.add(stream)

    def run_kernel(
        self,
        name: str,
        *,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        run: Callable[[Callable[[Any], Any]], Any],
    ) -> None:
        """Runs a kernel that is not a torch operator. run: receives a function from a value to its plain form."""
        tensors = [*reads, *writes]
        on_device = [one for one in tensors if type(one) is operators.DeviceTensor]
        self.finish_collectives([one for one in reads if type(one) is operators.DeviceTensor], writes)
        plain = {id(one): self.bytes_of(one) for one in on_device}
        capture = self.capture
        if capture is not None and self.stream in capture.streams:
            for one in writes:
                self.keep(capture, plain[id(one)])
        usages = [Usage(*self.range_of(one), Use.READ) for one in reads if id(one) in plain]
        self.launch(name, [*usages, *(Usage(*self.range_of(one), Use.WRITE) for one in writes)])

        def again() -> None:
            run(lambda one: plain.get(id(one), one))

        with operators.plainly():
            again()
        self.add_step(plain.values(), [plain[id(one)] for one in writes], again)

    def host_accesses(self, name: str, pinned: Iterable[Tensor], written: Sequence[int]) -> None:
        """Records that the host reads or writes pinned memory, which happens immediately, even during a capture."""
        tick, clock = self.timeline.tick_host()
        by = (HOST, tick, site())
        for tensor in pinned:
            block, start, end = self.range_of(tensor)
            use = Use.WRITE if id(tensor) in written else Use.READ
            self.ledger.access(block, start, end, by=by, clock=clock, use=use, name=f"{name} on the host")

    def finish_collectives(self, reads: Iterable[Tensor], writes: Iterable[Tensor] = ()) -> None:
        """Waits on the CPU for collectives in flight that write a tensor of `reads` or use a tensor of `writes`.

        This wait only keeps the results correct. The model does not see it and still reports such an access.
        """
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                block = self.block_of(tensor)
                if block.pending:
                    for work, writes_too in block.pending:
                        if is_write or writes_too:
                            work.wait()
                    block.pending = [] if is_write else [one for one in block.pending if not one[1]]

    def _finish(self, block: Block) -> None:
        for work, _ in block.pending:
            work.wait()
        block.pending = []

    # Captures.

    def begin_capture(self, pool: Pool, generators: set[int]) -> None:
        """Starts capturing the work of the current stream into a graph."""
        if self.capture is not None:
            raise RuntimeError("a capture is under way already")
        stream = self.stream
        if stream == 0:
            raise RuntimeError("the default stream cannot be captured")
        self.num_captures += 1
        recorded = Recorded(self.num_captures, pool, generators=generators, born=(pool.now + 1, 0))
        capture = Capture(recorded, stream, CaptureLedger(self.alarms, pool))
        capture.streams[stream] = dict(self.timeline.clock_of(stream))
        self.capture = capture

    def end_capture(self) -> Recorded:
        """Ends the capture and returns the graph's work. Reports forked streams that were not joined."""
        capture = self.capture
        assert capture is not None, "no capture"
        self.capture = None
        known = self.timeline.clock_of(capture.origin)
        if self.stream != capture.origin:
            self.alarms.add(Kind.CAPTURE_WAIT, "a capture ends on another stream than it began on", site())
        for stream, before in capture.streams.items():
            clock = self.timeline.clock_of(stream)
            if clock.get(stream, 0) > max(before.get(stream, 0), known.get(stream, 0)):
                self.alarms.add(Kind.UNJOINED, f"stream {stream}", site())
        for stream, before in capture.streams.items():
            # None of the captured work has run, so nothing may rely on its order.
            launched = self.timeline.clock_of(stream).get(stream, 0)
            clock = self.timeline.clocks[stream] = before
            clock[stream] = launched
            self.timeline._host_seen.pop(stream, None)
        for block in capture.ledger.blocks():
            self._finish(block)
            if block.pool is capture.recorded.pool:
                block.others.clear()
        recorded = capture.recorded
        recorded.born = recorded.born[0], recorded.pool.now
        pools = [pool for pool in (reference() for reference in self.page_pools.values()) if pool is not None]
        tiers = [tier for pool in pools for tier in (pool.device_pages, pool.host_pages) if tier.numel()]
        # A pool of an earlier run, whose host pages a fault left unpinned, may still exist.
        whole = {self.block_of(tier) for tier in tiers if tier.is_cuda or self.is_pinned(tier)}

        def widened(usages: dict[Usage, str]) -> list[tuple[Usage, str]]:
            return [
                (Usage(one.block, 0, one.block.num_bytes, one.use) if one.block in whole else one, where)
                for one, where in usages.items()
            ]

        recorded.inputs, recorded.outputs = widened(capture.ledger.inputs), widened(capture.ledger.outputs)
        if self.together is None:
            self.undo([capture])
        else:
            self.together.append(capture)
        return recorded

    def undo(self, captures: Sequence[Capture]) -> None:
        """Restores memory to its state before these captures, and fills memory that they allocated with NaN.

        A capture has to compute, since the program needs shapes and values. On a GPU nothing runs before the first
        replay, so the program must not rely on the captured values. The model must not see the restoring writes either.
        A GPU does not make them, and the program has no reason to order them after earlier work.
        """
        with operators.plainly():
            for capture in reversed(captures):
                for current, before in capture.kept.values():
                    current.copy_(before)
            for capture in captures:
                for data in capture.made.values():
                    data.fill_(_NAN_BYTE)

    def before_launch(self, args: Sequence[Any], kwargs: dict[str, Any], writes: Sequence[Any]) -> None:
        """In a capture, saves the bytes that an operator will overwrite."""
        capture = self.capture
        if capture is None or self.stream not in capture.streams:
            return
        for plain in operators.written_by(writes, args, kwargs):
            self.keep(capture, plain)

    def keep(self, capture: Capture, plain: Tensor) -> None:
        """Saves the bytes of memory that is older than the capture."""
        storage = plain.untyped_storage()
        key = storage.data_ptr()
        if key in capture.kept or any(data.data_ptr() == key for data in capture.made.values()):
            return
        data = _all_bytes(storage)
        capture.kept[key] = (data, data.clone())

    def after_launch(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        results: Any,
        *,
        writes: Sequence[Any],
        is_free: bool,
    ) -> None:
        """In a capture, adds an operator to the graph."""
        capture = self.capture
        if capture is None or is_free or self.stream not in capture.streams:
            return
        given = operators._tensors([*args, *kwargs.values()])
        known = {id(one) for one in given}
        made = [(place, one) for place, one in enumerate(operators._tensors(results)) if id(one) not in known]

        def again() -> None:
            found = operators._tensors(func(*args, **kwargs))
            for place, one in made:
                one.copy_(found[place])

        written = operators.written_by(writes, args, kwargs)
        self.add_step(given, [*written, *(one for _, one in made)], again)

    def add_step(self, reads: Iterable[Tensor], writes: Iterable[Tensor], run: Callable[[], Any]) -> None:
        """In a capture, adds work to the graph. reads, writes: plain tensors."""
        if self.capture is not None and self.stream in self.capture.streams:
            used = (frozenset(one.untyped_storage()._cdata for one in tensors) for tensors in (reads, writes))
            self.capture.recorded.steps.append(Step(*used, run))

    def replay(self, recorded: Recorded) -> None:
        """Launches the work of a graph on the current stream, as one launch."""
        if self.capture is not None:
            self.alarms.add(Kind.FORBIDDEN, "a replay inside a capture", site())
        where, stream = site(), self.stream
        tick, clock = self.timeline.tick(stream)
        for (block, start, end, use), captured_at in recorded.inputs:
            if not block.is_alive and block.pool is not recorded.pool:
                self.alarms.add(Kind.FREED, recorded.name, f"{captured_at}", block.place)
            by = (stream, tick, f"{where}: {captured_at}")
            self.ledger.access(block, start, end, by=by, clock=clock, use=use, name=recorded.name)
        first, last = recorded.born
        own = {block for block in recorded.pool.blocks if first <= block.born <= last}
        self.ledger.sequence += 1
        overwrite(recorded.pool, own, sequence=self.ledger.sequence, name=recorded.name)
        for (block, start, end, use), captured_at in recorded.outputs:
            if not block.is_alive and block.pool is not recorded.pool:
                self.alarms.add(Kind.FREED, recorded.name, f"{captured_at}", block.place)
            by = (stream, tick, f"{where}: {captured_at}")
            self.ledger.access(block, start, end, by=by, clock=clock, use=use, name=recorded.name)
        for usage, _ in (*recorded.inputs, *recorded.outputs):
            self._finish(usage.block)
        flying: list[tuple[Step, Any]] = []
        with operators.plainly():
            for step in recorded.steps:
                for other, work in [one for one in flying if step.meets(one[0])]:
                    work.wait()
                    flying.remove((other, work))
                work = step.run()
                if work is not None:
                    flying.append((step, work))
            for _, work in flying:
                work.wait()


def _all_bytes(storage: torch.UntypedStorage) -> Tensor:
    with operators.plainly():
        return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]


class _Callbacks(ctypes.Structure):
    _fields_ = [
        ("record", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)),
        ("block", ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)),
        ("query", ctypes.CFUNCTYPE(None, ctypes.c_int64)),
        ("synchronize_event", ctypes.CFUNCTYPE(None, ctypes.c_int64)),
        ("synchronize_stream", ctypes.CFUNCTYPE(None, ctypes.c_int64)),
        ("synchronize_device", ctypes.CFUNCTYPE(None)),
        ("use", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)),
    ]


def _reported(device: Device, function: Callable[..., Any]) -> Callable[..., Any]:
    """Stores the first error of a callback for raise_callback_error, as ctypes discards exceptions of callbacks."""

    def run(*args: Any) -> Any:
        try:
            return function(*args)
        except BaseException as error:
            device.callback_error = device.callback_error or error
            raise

    return run


def _callbacks_of(device: Device) -> _Callbacks:
    """Registers a device's callbacks with the library. The returned objects must live as long as the device."""
    functions = {
        "record": device.record,
        "block": device.block,
        "query": device.query,
        "synchronize_event": device.synchronize_event,
        "synchronize_stream": device.synchronize_stream,
        "synchronize_device": device.synchronize_device,
        "use": lambda address, stream: device.use_address(address or 0, stream),
    }
    callbacks = _Callbacks(*(kind(_reported(device, functions[name])) for name, kind in _Callbacks._fields_))
    LIBRARY.set_callbacks.argtypes = [_Callbacks]
    LIBRARY.set_callbacks.restype = None
    LIBRARY.get_current_stream.restype = ctypes.c_int64
    LIBRARY.set_current_stream.argtypes = [ctypes.c_int64]
    LIBRARY.set_callbacks(callbacks)
    return callbacks
