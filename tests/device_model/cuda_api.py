"""Functions and classes of torch.cuda that the device model replaces, and `install`, which puts them in place.

torch.Stream, torch.Event, torch.accelerator and the autograd engine call engine_streams.cpp and need no replacement.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # imported before anything is replaced, since it builds tables of torch's functions

from megatron.core.device import CudaGraphs
from tests.device_model.alarms import Kind, site
from tests.device_model.device import Device, Recorded
from tests.device_model.library import LIBRARY
from tests.device_model.memory import Pool
from tests.device_model.operators import DeviceMode

TOTAL_BYTES = 80 << 30


class Stream(torch.Stream):
    """Replacement of torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> "Stream":
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, torch.device("cuda", 0), priority=priority)

    @property
    def cuda_stream(self) -> int:
        """Number of the stream, in place of CUDA's address."""
        return self.stream_id


class CudaEvent(torch.Event):
    """Replacement of torch.cuda.Event."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> "CudaEvent":
        return super().__new__(cls, torch.device("cuda", 0), enable_timing=enable_timing)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Makes a stream, by default the current one, wait for the event."""
        (current_stream() if stream is None else stream).wait_event(self)


class Generator(torch.Generator):
    """Replacement of torch.Generator. A device generator has an identity, but draws no numbers itself.

    [Note: random numbers] The modelled device draws from the CPU's default generator, so that a run draws the same
    numbers as on the CPU. The state of a device generator is only a number, which must be registered with each capture
    that draws from it.
    """

    def __new__(cls, device: Any = "cpu") -> "Generator":
        made = super().__new__(cls, "cpu")
        made.place = torch.device(device)
        made.number = next(_NUMBERS) if made.place.type == "cuda" else -1
        return made

    def __init__(self, device: Any = "cpu") -> None:
        pass

    @property
    def device(self) -> torch.device:
        """Device of the generator."""
        return torch.device("cuda", 0) if self.place.type == "cuda" else self.place

    def get_state(self) -> torch.Tensor:
        """Returns the state's bytes; not allowed in a capture."""
        self._touch()
        return super().get_state()

    def set_state(self, state: torch.Tensor) -> "Generator":
        """Sets the state's bytes; not allowed in a capture."""
        self._touch()
        super().set_state(state)
        return self

    def graphsafe_get_state(self) -> "Generator":
        """Returns a generator that shares the state."""
        other = type(self)(self.place)
        other.number = self.number
        return other

    def graphsafe_set_state(self, other: "Generator") -> "Generator":
        """Shares the state of another generator."""
        self.number = other.number
        if self is DEFAULT_GENERATOR:
            _device().drawn_state = other.number
        return self

    def _touch(self) -> None:
        if self.place.type == "cuda" and _device().capture is not None:
            _device().alarms.add(Kind.FORBIDDEN, "the state of a generator is read or written", site())


_NUMBERS = iter(range(1, 1 << 62))
_DEVICES: list[Device] = []


def _device() -> Device:
    return _DEVICES[0]


class _DefaultGenerators:
    def __getitem__(self, _: Any) -> Generator:
        return DEFAULT_GENERATOR


GRAPHS: "weakref.WeakSet[CUDAGraph]" = weakref.WeakSet()


class CUDAGraph:
    """Replacement of torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._recorded: Recorded | None = None
        self._generators: set[int] = set()
        GRAPHS.add(self)

    @property
    def is_captured(self) -> bool:
        """Whether the graph contains captured work, which keeps memory allocated."""
        return self._recorded is not None

    def register_generator_state(self, generator: Generator) -> None:
        """Registers a generator that captured work may draw from."""
        self._generators.add(generator.number)

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        """Starts a capture on the current stream."""
        _device().begin_capture(pool or _device().memory.new_pool(), self._generators)

    def capture_end(self) -> None:
        """Ends the capture."""
        self._recorded = _device().end_capture()

    def replay(self) -> None:
        """Launches the captured work on the current stream."""
        assert self._recorded is not None, "no capture"
        _device().replay(self._recorded)

    def reset(self) -> None:
        """Drops the captured work."""
        self._recorded = None

    def pool(self) -> Pool:
        """Returns the memory pool."""
        assert self._recorded is not None, "no capture"
        return self._recorded.pool


def current_stream(device: Any = None) -> Stream:
    """Replacement of torch.cuda.current_stream."""
    return Stream(stream_id=int(LIBRARY.get_current_stream()), device_index=0, device_type=1)


class _StreamContext:
    """Replacement of torch.cuda.stream and StreamContext."""

    def __init__(self, value: torch.Stream | None) -> None:
        self.stream, self._before = value, 0

    def __enter__(self) -> None:
        self._before = int(LIBRARY.get_current_stream())
        if self.stream is not None:
            LIBRARY.set_current_stream(self.stream.stream_id)

    def __exit__(self, *_: Any) -> None:
        LIBRARY.set_current_stream(self._before)


@contextmanager
def _capturing_together(self: CudaGraphs) -> Iterator[None]:
    """Replacement of CudaGraphs.capturing_together. Undoes captures at its end, as later ones use earlier values."""
    device = _device()
    device.together = []
    try:
        yield
    finally:
        captures, device.together = device.together, None
        device.undo(captures)


def _memory_stats(device: Any = None) -> dict[str, int]:
    """Replacement of torch.cuda.memory_stats. Reserved equals allocated, and peaks are of the whole process."""
    memory = _device().memory
    return {
        f"{kind}_bytes.all.{what}": value
        for kind in ("allocated", "reserved")
        for what, value in (("current", memory.num_bytes), ("peak", memory.peak_bytes))
    }


def _synchronize(device: Any = None) -> None:
    _device().synchronize_device()


def _empty_cache() -> None:
    if _device().capture is not None:
        _device().alarms.add(Kind.FORBIDDEN, "the allocator waits for the device", site())


def _get_rng_state(device: Any = None) -> torch.Tensor:
    return DEFAULT_GENERATOR.get_state()


def _set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    DEFAULT_GENERATOR.set_state(state)


def _is_capturing() -> bool:
    capture = _device().capture
    return capture is not None and _device().stream in capture.streams


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        total_memory=TOTAL_BYTES, multi_processor_count=132, major=9, minor=0, name="modelled GPU", warp_size=32
    )


class _Cudart:
    """Replacement of the CUDA runtime that torch.cuda.cudart returns; only the calls that the project makes."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        _device().register(address, num_bytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if _device().unregister(address) else 1

    def cudaGetErrorString(self, status: int) -> str:
        return "a graph uses the memory"


def _alive_graphs() -> list[Recorded]:
    return [graph._recorded for graph in GRAPHS if graph._recorded is not None]


def _replace_storage_methods(device: Device) -> None:
    """Replaces the methods by which FSDP2 and recomputed outputs change storages without an operator."""
    resize, copy = torch.UntypedStorage.resize_, torch.UntypedStorage.copy_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        block = device.memory.blocks.get(storage._cdata)
        if block is None or block.is_pinned:
            return resize(storage, size)
        device.resize(storage, size)
        return storage

    def copy_(storage: torch.UntypedStorage, source: Any, non_blocking: bool | None = None) -> Any:
        blocks = [device.memory.blocks.get(one._cdata) for one in (storage, source)]
        if any(block is None or block.is_pinned for block in blocks):
            return copy(storage, source, non_blocking)
        device.copy_storage(storage, source)
        return storage

    torch.UntypedStorage.resize_, torch.UntypedStorage.copy_ = resize_, copy_  # type: ignore[method-assign]


def install() -> Device:
    """Makes this process see one modelled GPU until it ends, and returns the device."""
    if _DEVICES:
        return _DEVICES[0]
    device = Device()
    _DEVICES.append(device)
    device.alive_graphs = _alive_graphs
    cuda, runtime = torch.cuda, _Cudart()
    replaced = {
        "_lazy_init": _nothing,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _nothing,
        "get_device_name": lambda _=None: "modelled GPU",
        "get_device_properties": _properties,
        "get_device_capability": lambda _=None: (9, 0),
        "is_bf16_supported": lambda *_: True,
        "synchronize": _synchronize,
        "empty_cache": _empty_cache,
        "memory_stats": _memory_stats,
        "memory_allocated": lambda _=None: device.memory.num_bytes,
        "max_memory_allocated": lambda _=None: device.memory.peak_bytes,
        "reset_peak_memory_stats": _nothing,
        "mem_get_info": lambda _=None: (TOTAL_BYTES - device.memory.num_bytes, TOTAL_BYTES),
        "Stream": Stream,
        "Event": CudaEvent,
        "stream": _StreamContext,
        "StreamContext": _StreamContext,
        "current_stream": current_stream,
        "default_stream": lambda _=None: Stream(stream_id=0, device_index=0, device_type=1),
        "set_stream": lambda value: LIBRARY.set_current_stream(value.stream_id),
        "CUDAGraph": CUDAGraph,
        "graph_pool_handle": device.memory.new_pool,
        "is_current_stream_capturing": _is_capturing,
        "default_generators": _DefaultGenerators(),
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "manual_seed": _nothing,
        "manual_seed_all": _nothing,
        "device": lambda _: _StreamContext(None),
        "cudart": lambda: runtime,
    }
    for name, value in replaced.items():
        setattr(cuda, name, value)
    torch.Generator = Generator  # type: ignore[misc]
    _replace_storage_methods(device)
    torch._C._cuda_endAllocateToPool = _nothing  # type: ignore[attr-defined]
    torch._C._cuda_releasePool = _nothing  # type: ignore[attr-defined]
    CudaGraphs.capturing_together = _capturing_together  # type: ignore[method-assign,assignment]
    # torch.tensor copies host data to the device with an operator that the mode intercepts.
    torch._C._set_only_lift_cpu_tensors(True)
    DeviceMode().__enter__()
    return device


DEFAULT_GENERATOR = Generator("cuda")
DEFAULT_GENERATOR.number = 0
