"""Pinned memory has its exact size, and is registered and released once. Uses a mock of the CUDA runtime."""

import gc
import mmap
import resource
import weakref
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from megatron.core.device import host_bytes, pinned_memory
from megatron.core.device.pinned_memory import PinnedMemoryError, pinned_bytes
from megatron.core.transformer.moe.paged_stash.page_layout import PoolLayout, TensorSpec
from megatron.core.transformer.moe.paged_stash.page_pool import PagePool, TierMemoryError, _host_memory

GPU = torch.device("cuda", 0)
PAGE = mmap.PAGESIZE


class Runtime:
    """A mock of torch.cuda.cudart() that records registered bytes by address. status: result of the next calls."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.calls: list[str] = []
        self.status = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls.append("register")
        if self.status == 0:
            assert flags == 1 and address not in self.registered
            self.registered[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unregister")
        if self.status == 0:
            del self.registered[address]
        return self.status

    def cudaGetErrorString(self, status: int) -> str:
        return "out of memory"

    def synchronize(self) -> None:
        self.calls.append("wait")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    made = Runtime()
    for name, value in {
        "is_available": lambda: True,
        "cudart": lambda: made,
        "synchronize": made.synchronize,
        "device": lambda device: nullcontext(),
        "is_current_stream_capturing": lambda: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(pinned_memory, "_take_pending_error", lambda device: "")
    yield made
    gc.collect()


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps", encoding="ascii") as lines:
        ranges = [line.partition(" ")[0].split("-") for line in lines]
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


@pytest.mark.parametrize("num_bytes", [1, PAGE, PAGE + 1, 5 * 2**20 + 3])
def test_memory_takes_whole_pages_and_no_power_of_two(runtime: Runtime, num_bytes: int) -> None:
    memory = pinned_bytes(num_bytes, GPU)
    assert memory.shape == (num_bytes,) and memory.dtype == torch.uint8 and not memory.any()
    assert runtime.registered == {memory.data_ptr(): -(-num_bytes // PAGE) * PAGE}
    memory.fill_(7)
    assert memory.sum() == 7 * num_bytes


def test_the_last_view_returns_it_after_a_wait(runtime: Runtime) -> None:
    memory = pinned_bytes(3 * PAGE, GPU)
    address = memory.data_ptr()
    view = memory[PAGE:].view(torch.float32)
    del memory
    assert runtime.calls == ["register"] and is_mapped(address)
    del view
    assert runtime.calls == ["register", "wait", "unregister"]
    assert not runtime.registered and not is_mapped(address)


def test_no_memory_is_registered_for_no_bytes(runtime: Runtime) -> None:
    assert pinned_bytes(0, GPU).shape == (0,) and runtime.calls == []


def test_a_failed_registration_says_what_was_asked_and_holds_nothing(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[mmap.mmap]] = []
    mapped = pinned_memory._mapped

    def noting(num_bytes: int) -> mmap.mmap:
        mapping = mapped(num_bytes)
        made.append(weakref.ref(mapping))
        return mapping

    monkeypatch.setattr(pinned_memory, "_mapped", noting)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * 2**20, resource.RLIM_INFINITY))
    runtime.status = 2
    with pytest.raises(PinnedMemoryError) as error:
        pinned_bytes(2**30, GPU)
    text = str(error.value)
    assert "1073741824 bytes (1.00 GiB) of host memory cannot be registered with cuda:0: out of memory (2)" in text
    assert "ulimit -l) is 8388608 bytes" in text
    # The error's frames are still referenced.
    mapping = made[0]()
    assert mapping is None or mapping.closed
    assert runtime.calls == ["register"]


def test_memory_that_cannot_be_mapped_is_named(runtime: Runtime) -> None:
    with pytest.raises(PinnedMemoryError, match=r"1152921504606846976 bytes .* of host memory cannot be mapped"):
        pinned_bytes(2**60, GPU)
    assert runtime.calls == []


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_memory_that_dies_in_a_capture_stays(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pinned_bytes(PAGE, GPU)
    address = memory.data_ptr()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr("warnings.warn", lambda text, *_, **__: runtime.calls.append(text))
    del memory
    assert runtime.calls[0] == "register" and "graph capture" in runtime.calls[1] and len(runtime.calls) == 2
    assert is_mapped(address) and runtime.registered


def test_buffers_for_copies_are_pinned_at_their_size(runtime: Runtime) -> None:
    buffer = host_bytes(20 * PAGE, GPU)
    assert runtime.registered == {buffer.data_ptr(): 20 * PAGE}
    assert host_bytes(4, torch.device("meta")).is_meta
    del buffer
    assert not runtime.registered


def test_a_tier_that_cannot_be_pinned_is_named(runtime: Runtime) -> None:
    runtime.status = 2
    with pytest.raises(TierMemoryError, match="host_pages: 4096 bytes of page-locked host memory cannot be allocated"):
        _host_memory(4096, GPU)


def test_closing_a_pool_returns_its_pages_whoever_holds_it(runtime: Runtime) -> None:
    pool = PagePool("cpu", PoolLayout(64, 4, 64))
    pool.host_pages = _host_memory(4096, GPU)
    group = pool.open_group([TensorSpec(64, 64, 2)])
    pool.plan(group, torch.tensor([2]))
    pool.close_sync()
    assert runtime.calls == ["register", "wait", "unregister"]
    assert pool.num_bytes["device_pages"] == pool.num_bytes["host_pages"] == 0
    with pytest.raises(RuntimeError, match="closed"):
        pool.open_group([TensorSpec(64, 64, 2)])
    with pytest.raises(RuntimeError, match="closed"):
        pool.plan(group, torch.tensor([2]))


def test_a_pool_keeps_its_pages_while_a_graph_that_uses_them_is_alive(runtime: Runtime) -> None:
    pool = PagePool("cpu", PoolLayout(64, 4, 64))
    pool.host_pages = _host_memory(4096, GPU)
    group = pool.open_group([TensorSpec(64, 64, 2)], is_fixed=True)
    with pytest.raises(RuntimeError, match="a CUDA graph that uses its pages is alive"):
        pool.close_sync()
    assert runtime.calls == ["register"]
    del group
    pool.close_sync()
    assert not runtime.registered
