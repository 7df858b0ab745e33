"""Pinned memory with a GPU is pinned for torch, has exactly the requested size, and is freed. Not yet run on a GPU."""

import gc
import mmap

import pytest
import torch

from megatron.core.device import default_device
from megatron.core.device.pinned_memory import _take_pending_error, pinned_bytes
from megatron.core.transformer.moe.paged_stash.page_layout import PoolLayout
from megatron.core.transformer.moe.paged_stash.page_pool import PagePool

pytestmark = pytest.mark.gpu

# Slightly more than 65 MiB, for which torch's allocator would allocate 128 MiB.
NUM_BYTES = 65 * 2**20 + 4097


def mapped_bytes(address: int) -> tuple[int, int]:
    """Returns size and resident bytes of the memory mapping that begins at an address; zeros if there is none."""
    with open("/proc/self/smaps", encoding="ascii") as stream:
        lines = stream.read().splitlines()
    for number, line in enumerate(lines):
        if line.startswith(f"{address:x}-"):
            fields = dict(one.split(":", 1) for one in lines[number + 1 : number + 5])
            return 1024 * int(fields["Size"].split()[0]), 1024 * int(fields["Rss"].split()[0])
    return 0, 0


def test_memory_is_pinned_at_its_size_and_returned():
    device = default_device()
    memory = pinned_bytes(NUM_BYTES, device)
    address, size = memory.data_ptr(), -(-NUM_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
    assert memory.is_pinned() and memory[4096:].view(-1).is_pinned()
    assert mapped_bytes(address) == (size, size)
    del memory
    gc.collect()
    assert mapped_bytes(address) == (0, 0)


def test_copies_of_memory_that_dies_are_complete():
    device = default_device()
    target = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=device)
    for value in range(1, 5):
        memory = pinned_bytes(NUM_BYTES, device).fill_(value)
        target.copy_(memory, non_blocking=True)
        del memory  # waits for the copy
        assert bool((target == value).all())


def test_a_copy_from_it_does_not_wait():
    device = default_device()
    memory, target = pinned_bytes(4096, device), torch.zeros(4096, dtype=torch.uint8, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        target.copy_(memory, non_blocking=True)
        memory.copy_(target, non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_larger_pool_takes_the_place_of_a_closed_one():
    device, page = default_device(), 1 << 16
    addresses = []
    for pages in (1000, 1500):
        pool = PagePool(device, PoolLayout(page, 0, pages))
        addresses.append(pool.host_pages.data_ptr())
        assert pool.host_pages.is_pinned() and mapped_bytes(addresses[-1]) == (pages * page, pages * page)
        pool.close_sync()
        assert mapped_bytes(addresses[-1]) == (0, 0)


def test_a_failed_registration_leaves_torch_usable():
    device = default_device()
    runtime = torch.cuda.cudart()
    memory = pinned_bytes(4096, device)
    # A second registration, which CUDA rejects.
    assert int(runtime.cudaHostRegister(memory.data_ptr(), 4096, 1)) != 0
    _take_pending_error(device)
    assert torch.ones(3, device=device).sum() == 3
