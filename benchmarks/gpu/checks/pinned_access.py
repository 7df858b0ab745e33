"""Kernels that read and write pinned memory of the host by its address, as those of host pages do."""

import torch

from benchmarks.gpu.checks.reporting import checked_device, expect, report
from megatron.core.device import mark_time, seconds_between, synchronize

DEVICE = checked_device()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from megatron.core.transformer.moe.paged_stash.page_layout import PoolLayout, TensorSpec  # noqa: E402
from megatron.core.transformer.moe.paged_stash.page_pool import PagePool  # noqa: E402

NUMEL, WIDTH = 1024, 4096
ROWS = 16384 if DEVICE.type == "cuda" else 64


@triton.jit
def double_kernel(source_address, target_address, SIZE: tl.constexpr):
    """Reads fp32 at one address and writes twice the values to another."""
    lane = tl.arange(0, SIZE)
    source = source_address.to(tl.pointer_type(tl.float32))
    target = target_address.to(tl.pointer_type(tl.float32))
    tl.store(target + lane, 2 * tl.load(source + lane))


def access_by_address() -> None:
    """From pinned memory to the device and back."""
    pinned = torch.arange(NUMEL, dtype=torch.float32, pin_memory=True)
    on_device, back = torch.zeros(NUMEL, device=DEVICE), torch.zeros(NUMEL, pin_memory=True)
    double_kernel[(1,)](pinned.data_ptr(), on_device.data_ptr(), SIZE=NUMEL)
    double_kernel[(1,)](on_device.data_ptr(), back.data_ptr(), SIZE=NUMEL)
    synchronize(DEVICE)
    expect(torch.equal(on_device.cpu(), 2 * pinned), "a kernel reads pinned memory")
    expect(torch.equal(back, 4 * pinned), "a kernel writes pinned memory, and the host sees it")


def stash_on_the_host() -> None:
    """A group whose pages are all on the host, there and back, with its rate."""
    spec, page = TensorSpec(WIDTH, WIDTH, ROWS), 64 * WIDTH
    pool = PagePool(DEVICE, PoolLayout(page, device_pages=0, host_pages=-(-ROWS * WIDTH // page)))
    expect(DEVICE.type == "cpu" or pool.host_pages.is_pinned(), "host pages are pinned")
    source = torch.randint(256, (ROWS * WIDTH,), dtype=torch.uint8, device=DEVICE)
    target, count = torch.zeros_like(source), torch.tensor([ROWS], device=DEVICE)
    group = pool.open_group([spec])
    seconds = []
    for _ in range(3):
        pool.plan(group, count)
        start = mark_time(DEVICE)
        pool.stash(group, [source])
        middle = mark_time(DEVICE)
        pool.restore(group, [target])
        end = mark_time(DEVICE)
        pool.release(group)
        seconds.append((seconds_between(start, middle), seconds_between(middle, end)))
    expect(torch.equal(source, target), "host pages keep their bytes")
    pool.check_integrity_sync()
    to_host, from_host = (min(column) for column in zip(*seconds, strict=True))
    moved = ROWS * WIDTH / 1e9
    report(mib=ROWS * WIDTH / 2**20, stash_gb_s=moved / to_host, restore_gb_s=moved / from_host)


if __name__ == "__main__":
    if DEVICE.type == "cuda":
        access_by_address()
    stash_on_the_host()
