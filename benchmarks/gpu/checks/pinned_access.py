"""Checks that kernels read and write pinned host memory by its address, as for host pages.

Also compares torch's pinned allocator with ours: bytes allocated for an odd size, bytes kept afterwards, allocation
time, and rates of copies to and from the device.
"""

import time
from collections.abc import Callable

import torch

from benchmarks.gpu.checks.reporting import checked_device, expect, report
from megatron.core.device import mark_time, seconds_between, synchronize

DEVICE = checked_device()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from megatron.core.device.pinned_memory import pinned_bytes  # noqa: E402
from megatron.core.transformer.moe.paged_stash.page_layout import PoolLayout, TensorSpec  # noqa: E402
from megatron.core.transformer.moe.paged_stash.page_pool import PagePool  # noqa: E402

NUMEL, WIDTH = 1024, 4096
# Neither a power of two nor a multiple of a page. torch's allocator rounds it up to 2 GiB.
ODD_BYTES = (1 << 30) + 4097
ROWS = 16384 if DEVICE.type == "cuda" else 64


@triton.jit
def double_kernel(source_address, target_address, SIZE: tl.constexpr):
    """Reads fp32 values at one address and writes twice the values to another address."""
    lane = tl.arange(0, SIZE)
    source = source_address.to(tl.pointer_type(tl.float32))
    target = target_address.to(tl.pointer_type(tl.float32))
    tl.store(target + lane, 2 * tl.load(source + lane))


def access_by_address(pinned: torch.Tensor, back: torch.Tensor) -> None:
    """Copies from pinned memory to the device and back by address, doubling values. Both are [NUMEL], fp32."""
    pinned.copy_(torch.arange(NUMEL))
    on_device = torch.zeros(NUMEL, device=DEVICE)
    double_kernel[(1,)](pinned.data_ptr(), on_device.data_ptr(), SIZE=NUMEL)
    double_kernel[(1,)](on_device.data_ptr(), back.data_ptr(), SIZE=NUMEL)
    synchronize(DEVICE)
    expect(torch.equal(on_device.cpu(), 2 * pinned), "a kernel reads pinned memory")
    expect(torch.equal(back, 4 * pinned), "a kernel writes pinned memory, and the host reads the result")


def resident_bytes() -> int:
    """Returns the size of this process's resident host memory, which includes pinned pages."""
    with open("/proc/self/status", encoding="ascii") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return sum(1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem", "RssFile"))


def available_bytes() -> int:
    """Returns the size of the host's available memory, which also reflects the driver's allocations for the process."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def allocation(allocate: Callable[[int], torch.Tensor]) -> dict[str, float]:
    """Measures one allocator: GiB requested, used and kept, seconds, and GB/s. allocate: returns [n], uint8."""
    before, before_resident, start = available_bytes(), resident_bytes(), time.perf_counter()
    memory = allocate(ODD_BYTES)
    seconds = time.perf_counter() - start
    expect(memory.is_pinned(), "memory is pinned")
    taken, resident = before - available_bytes(), resident_bytes() - before_resident
    on_device = torch.zeros(ODD_BYTES, dtype=torch.uint8, device=DEVICE)
    rates = {}
    for name, target, source in (("to_device", on_device, memory), ("to_host", memory, on_device)):
        found = []
        for _ in range(3):
            begin = mark_time(DEVICE)
            target.copy_(source, non_blocking=True)
            found.append(seconds_between(begin, mark_time(DEVICE)))
        rates[f"{name}_gb_s"] = ODD_BYTES / 1e9 / min(found)
    synchronize(DEVICE)
    end = time.perf_counter()
    del memory, source, target
    return_seconds = time.perf_counter() - end
    kept = before - available_bytes()
    sizes = {"asked": ODD_BYTES, "taken": taken, "resident": resident, "kept": kept}
    return {f"{name}_gib": size / 2**30 for name, size in sizes.items()} | {
        "allocate_s": seconds,
        "return_s": return_seconds,
        **rates,
    }


def compare_allocators() -> None:
    """Compares torch's pinned memory, which was used earlier, with ours."""

    def by_torch(num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def by_us(num_bytes: int) -> torch.Tensor:
        return pinned_bytes(num_bytes, DEVICE)

    for allocate in (by_torch, by_us):
        access_by_address(*(allocate(4 * NUMEL).view(torch.float32) for _ in range(2)))
    ours, torchs = allocation(by_us), allocation(by_torch)
    expect(ours["kept_gib"] < 0.25, "our memory is returned to the system")
    report(allocators=[{"allocator": "torch", **torchs}, {"allocator": "ours", **ours}])


def stash_on_the_host() -> None:
    """Stashes and restores a group whose pages are all on the host, and measures the rates."""
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
    expect(torch.equal(source, target), "host pages preserve their bytes")
    pool.check_integrity_sync()
    to_host, from_host = (min(column) for column in zip(*seconds, strict=True))
    moved = ROWS * WIDTH / 1e9
    report(mib=ROWS * WIDTH / 2**20, stash_gb_s=moved / to_host, restore_gb_s=moved / from_host)


def main() -> None:
    """Compares the allocators if there is a GPU, and checks host pages."""
    if DEVICE.type == "cuda":
        compare_allocators()
    stash_on_the_host()


if __name__ == "__main__":
    main()
