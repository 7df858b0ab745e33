"""A page pool stores bytes exactly, loses no page, and reports invalid requests."""

import copy
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from megatron.core.transformer.moe.paged_stash import cpu_kernels
from megatron.core.transformer.moe.paged_stash.page_layout import Counter, PoolLayout, Priority, TensorSpec
from megatron.core.transformer.moe.paged_stash.page_pool import PageGroup, PagePool
from tests.unit_tests.core.transformer.moe.paged_stash.pool_model import RandomOperations

WIDE = [torch.float32, torch.float64, torch.int64]
NARROW = [torch.bfloat16, torch.float16, torch.int8, torch.bool]
NARROW += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory from the tensor's first byte to its last: [bytes], uint8."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.as_strided((extent,), (1,)).view(torch.uint8)


def round_trip(pool: PagePool, tensor: torch.Tensor, target: torch.Tensor, *, num_rows: int) -> None:
    """Stashes the first rows of [R, W], any dtype, and restores them to `target`."""
    row_bytes, pitch_bytes = tensor.shape[1] * tensor.itemsize, tensor.stride(0) * tensor.itemsize
    group = pool.open_group([TensorSpec(row_bytes, pitch_bytes, len(tensor))])
    pool.plan(group, torch.tensor([num_rows]))
    assert pool.dropped(group, 0).tolist() == [0]
    pool.stash(group, [as_bytes(tensor)])
    pool.check_integrity_sync()
    pool.restore(group, [as_bytes(target)])
    pool.release(group)
    pool.close_group(group)


@pytest.fixture(params=["as is best", "indexed"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs tests twice: as they are, and with indexed copies of all whole pages, which are rare in small pools."""
    if request.param == "indexed":
        monkeypatch.setattr(cpu_kernels, "FEW_RUNS", 0)


@pytest.mark.usefixtures("ways")
def test_random_operations_equal_the_model() -> None:
    counts = RandomOperations(0).run(2000).counts
    assert min(counts[event] for event in (*Counter, "reset")) > 0


@pytest.mark.soak  # more of the operations above
@pytest.mark.usefixtures("ways")
@settings(max_examples=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_very_many_random_operations_equal_the_model(seed: int) -> None:
    RandomOperations(seed).run(500)


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("dtype", [*WIDE, *NARROW], ids=str)
@pytest.mark.parametrize("layout", [PoolLayout(1024, 0, 300), PoolLayout(7168, 11, 60)], ids=["host", "both tiers"])
def test_every_bit_pattern_survives_on_any_tier(dtype: torch.dtype, layout: PoolLayout) -> None:
    # All two-byte patterns, which include NaN payloads, -0.0, infinities and subnormals of every narrow type.
    patterns = torch.arange(2**16).to(torch.uint16).view(torch.uint8)
    if dtype in WIDE:
        patterns = torch.randint(0, 256, (2**17,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
        special = torch.tensor([-0.0, float("nan"), float("inf"), 5e-324], dtype=torch.float64).view(torch.uint8)
        patterns[: len(special)] = special
    rows = patterns.view(dtype).view(256, -1)
    target = torch.zeros_like(patterns)
    round_trip(PagePool("cpu", layout), rows, target.view(dtype).view(256, -1), num_rows=256)
    assert torch.equal(target, patterns)


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("width", [1, 7, 1000, 7168])
@pytest.mark.parametrize("page_bytes", [16, 64, 1024, 65536])
def test_any_width_fits_any_page_and_dead_rows_stay(width: int, page_bytes: int) -> None:
    whole = torch.randint(0, 256, (9, 2 * width + 3), generator=torch.Generator().manual_seed(width)).to(torch.uint8)
    pages = -(-7 * width // page_bytes)
    pool = PagePool("cpu", PoolLayout(page_bytes, pages - pages // 3, pages // 3))
    target = torch.full_like(whole, 7)
    columns = slice(3, 3 + width)
    round_trip(pool, whole[:, columns], target[:, columns], num_rows=7)
    expected = torch.full_like(whole, 7)
    expected[:7, columns] = whole[:7, columns]
    assert torch.equal(target, expected)
    assert pool.occupancy_sync().tail_bytes == pages * page_bytes - 7 * width


def test_tensors_that_share_memory_are_stored_each_as_it_is() -> None:
    rows = torch.randint(0, 256, (9, 48), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    pool, sources = PagePool("cpu", PoolLayout(64, 30)), [as_bytes(rows), as_bytes(rows[:, 8:40]), as_bytes(rows)]
    group = pool.open_group([TensorSpec(48, 48, 9), TensorSpec(32, 48, 9), TensorSpec(48, 48, 9)])
    pool.plan(group, torch.tensor([7]))
    pool.stash(group, sources)
    target = [torch.zeros_like(rows) for _ in sources]
    pool.restore(group, [as_bytes(target[0]), as_bytes(target[1][:, 8:40]), as_bytes(target[2])])
    for one, columns in zip(target, (slice(0, 48), slice(8, 40), slice(0, 48))):
        expected = torch.zeros_like(rows)
        expected[:7, columns] = rows[:7, columns]
        assert torch.equal(one, expected)


def test_exactly_full_fits_and_one_page_more_is_dropped() -> None:
    pool = PagePool("cpu", PoolLayout(64, 5, 3))
    specs = [TensorSpec(64, 64, 9, priority) for priority in (Priority.ACT, Priority.INPUT, Priority.GATE_UP)]
    full, more, fits = (pool.open_group(chosen) for chosen in (specs[1:2], specs, specs[1:2]))
    pool.plan(full, torch.tensor([8]))
    assert pool.occupancy_sync().device_free == pool.occupancy_sync().host_free == 0
    pool.plan(more, torch.tensor([0]))
    assert [pool.dropped(more, index).item() for index in range(3)] == [0, 0, 0]
    pool.release(full)
    pool.plan(full, torch.tensor([5]))
    pool.plan(more, torch.tensor([2]))
    assert [pool.dropped(more, index).item() for index in range(3)] == [1, 0, 1]
    pool.plan(fits, torch.tensor([1]))
    occupancy = pool.occupancy_sync()
    assert occupancy.host_free == 0 and occupancy.counters[Counter.VOID] == 0
    assert occupancy.counters[Counter.DROPPED_ACT] == occupancy.counters[Counter.DROPPED_GATE_UP] == 1
    pool.check_integrity_sync()


def test_rows_and_pages_beyond_two_to_the_31_bytes_are_found() -> None:
    rows, pitch, page_bytes = 3, 2**31 + 16, 2**16
    live = torch.randint(0, 256, (rows, 4096), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    # Left uninitialized, so that most of it occupies no physical memory.
    source, target = (torch.empty((rows - 1) * pitch + 4096, dtype=torch.uint8) for _ in range(2))
    source.as_strided(live.shape, (pitch, 1)).copy_(live)
    pool = PagePool("cpu", PoolLayout(page_bytes, 2**15 + 8))
    # Occupies all but the last page.
    pool.plan(pool.open_group([TensorSpec(page_bytes, page_bytes, 2**15 + 7)]), torch.tensor([2**15 + 7]))
    round_trip(pool, source.as_strided(live.shape, (pitch, 1)), target.as_strided(live.shape, (pitch, 1)), num_rows=3)
    assert torch.equal(target.as_strided(live.shape, (pitch, 1)), live)
    assert torch.equal(pool.device_pages[-page_bytes:][: live.numel()], live.flatten())


@pytest.mark.parametrize("host_pages", [0, 6])
def test_pages_that_are_never_needed_are_never_touched(host_pages: int) -> None:
    pool, spec = PagePool("cpu", PoolLayout(64, 40, host_pages)), TensorSpec(64, 64, 8)
    pool.device_pages.fill_(7)
    generator, held = random.Random(1), list[PageGroup]()
    # Up to three groups of up to 8 pages each are held; in total the ring is used many times.
    for _ in range(200):
        if len(held) == 3:
            done = held.pop(generator.randrange(3))
            pool.release(done)
            pool.close_group(done)
        held.append(pool.open_group([spec]))
        pool.plan(held[-1], torch.tensor([generator.randint(0, 8)]))
        pool.stash(held[-1], [torch.zeros(8 * 64, dtype=torch.uint8)])
        pool.check_integrity_sync()
    high_water = pool.occupancy_sync().counters[Counter.HIGH_WATER_DEVICE]
    assert high_water <= 24 and (pool.device_pages[high_water * 64 :] == 7).all()


def test_restored_memory_is_kept_unless_the_heap_is() -> None:
    for keeps_restored, num_buffers in ((True, 1), (False, 0)):
        pool = copy.deepcopy(PagePool("cpu", PoolLayout(64, 8), keeps_restored=keeps_restored))
        first = pool.restored.take(1000)
        address = first.data_ptr()
        del first
        assert sum(map(len, pool.restored._persistent.values())) == num_buffers
        assert not keeps_restored or pool.restored.take(1000).data_ptr() == address


@pytest.mark.soak  # occupies 5 GiB, because rows and pages beyond 2**31 bytes are tested above
def test_a_tensor_of_more_than_two_to_the_31_bytes() -> None:
    width, page_bytes = 1024, 2**20
    rows = 2**21 + 2**16 + 1
    tensor = torch.empty(rows, width, dtype=torch.int8)
    for start in range(0, rows, 2**18):  # each row starts and ends with its index
        numbers = torch.arange(start, min(start + 2**18, rows), dtype=torch.int32).view(torch.int8).view(-1, 4)
        tensor[start : start + 2**18, :4] = numbers
        tensor[start : start + 2**18, -4:] = numbers
    pool = PagePool("cpu", PoolLayout(page_bytes, 2112, 1))
    group = pool.open_group([TensorSpec(width, width, rows)])
    pool.plan(group, torch.tensor([rows]))
    pool.stash(group, [as_bytes(tensor)])
    tensor.zero_()
    pool.restore(group, [as_bytes(tensor)])
    assert pool.occupancy_sync().counters[Counter.SPILLED_PAGES] == 1
    for columns in (slice(0, 4), slice(-4, None)):
        assert torch.equal(tensor[:, columns].contiguous().view(torch.int32)[:, 0], torch.arange(rows).int())


@pytest.mark.usefixtures("ways")
def test_steady_state_allocates_nothing() -> None:
    pool = PagePool("cpu", PoolLayout(4096, 600))
    specs = [TensorSpec(512, 512, 1000), TensorSpec(512, 528, 1000, Priority.GATE_UP), TensorSpec(7, 7, 999)]
    group = pool.open_group(specs)
    num_rows = torch.tensor([990])
    memories = [torch.zeros(spec.max_rows * spec.pitch_bytes, dtype=torch.uint8) for spec in specs]

    def step() -> None:
        pool.plan(group, num_rows)
        pool.stash(group, memories)
        pool.restore(group, memories)
        pool.release(group)

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    assert [event.name for event in seen.events() if event.cpu_memory_usage] == []


def test_room_in_page_tables_is_used_again_and_waits_for_its_last_owner() -> None:
    pool = PagePool("cpu", PoolLayout(64, 8))
    events = [torch.Event("cpu") for _ in range(20)]
    groups = [pool.open_group([TensorSpec(64, 64, 4), TensorSpec(4, 4, 4)]) for _ in range(20)]
    num_bytes = pool.num_bytes
    for group, event in zip(groups, events):
        pool.close_group(group, event)
    again = [pool.open_group([TensorSpec(64, 64, 4), TensorSpec(4, 4, 4)]) for _ in range(20)]
    assert [group.waits for group in again] == [[event] for event in events]
    for group in again:
        pool.close_group(group, None)
    larger = pool.open_group([TensorSpec(64, 64, 70)])
    assert set(larger.waits) <= set(events) and len(larger.waits) == 16
    pool.reset()
    assert pool.open_group([TensorSpec(64, 64, 4)]).waits == []
    assert pool.num_bytes == num_bytes and num_bytes["device_pages"] == 8 * 64


def test_a_stale_group_has_no_pages() -> None:
    pool = PagePool("cpu", PoolLayout(64, 8))
    group = pool.open_group([TensorSpec(64, 64, 4)])
    pool.plan(group, torch.tensor([3]))
    pool.reset()
    pool.release(group)
    pool.close_group(group)
    assert pool.occupancy_sync().device_free == 8
    with pytest.raises(RuntimeError, match="reset"):
        pool.restore(group, [torch.zeros(256, dtype=torch.uint8)])


@pytest.mark.parametrize(
    "broken, message",
    [
        (lambda pool, group: pool.heads[0].sub_(9), "device ring: tail 8 - head -6"),
        (lambda pool, group: pool.heads[0].add_(1), r"device pages \[3\] are neither free nor held"),
        (lambda pool, group: pool.ring[4].fill_(2), r"device pages \[2\] occur twice"),
        (lambda pool, group: pool.ring[4].fill_(9), "device ring: ids outside"),
        (lambda pool, group: group.slab.table[0].fill_(77), r"device pages \[0\] are neither"),
    ],
)
def test_integrity_names_what_broke(broken: Callable, message: str) -> None:
    pool = PagePool("cpu", PoolLayout(64, 8, 2))
    group = pool.open_group([TensorSpec(64, 64, 4)])
    pool.plan(group, torch.tensor([3]))
    pool.check_integrity_sync()
    broken(pool, group)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity_sync()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda pool, group, memory: pool.plan(group, torch.tensor(3)), r"num_rows \(\[\]"),
        (lambda pool, group, memory: pool.plan(group, torch.tensor([3.0])), "int64"),
        (lambda pool, group, memory: pool.plan(group, torch.tensor([3], device="meta")), "on cpu"),
        (lambda pool, group, memory: pool.plan(group, torch.tensor([3]), reserve=torch.zeros(2)), "reserve"),
        (lambda pool, group, memory: pool.stash(group, [memory[:-1]]), r"sources\[0\] has 255 bytes"),
        (lambda pool, group, memory: pool.stash(group, []), "contains 0 tensors: the group requires 1"),
        (lambda pool, group, memory: pool.restore(group, [memory.to("meta")]), r"targets\[0\] is on meta"),
        (lambda pool, group, memory: pool.restore(group, [memory.int()]), r"\(\[256\], torch.int32\)"),
        (lambda pool, group, memory: pool.restore(group, [memory[::2]]), "must be one-dimensional, contiguous"),
        (lambda pool, group, memory: pool.open_group([]), "at least one tensor"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable, message: str) -> None:
    pool = PagePool("cpu", PoolLayout(64, 8))
    group = pool.open_group([TensorSpec(64, 64, 4)])
    with pytest.raises(ValueError, match=message):
        call(pool, group, torch.zeros(256, dtype=torch.uint8))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="page-locked memory is available")
def test_memory_that_cannot_be_locked_is_named() -> None:
    with pytest.raises(ValueError, match="4096 bytes of page-locked"):
        PagePool("meta", PoolLayout(64, 8, 64))


def test_a_fixed_group_keeps_its_room_through_closing_and_resets() -> None:
    pool = PagePool("cpu", PoolLayout(64, 8))
    specs, num_rows = [TensorSpec(64, 64, 2)], torch.tensor([2])
    fixed = [pool.open_group(specs, is_fixed=True) for _ in range(2)]
    for _ in range(2):
        for group in [*fixed, pool.open_group(specs)]:
            pool.plan(group, num_rows)
        pool.check_integrity_sync()
        assert pool.occupancy_sync().device_held == 6
        pool.release(fixed[0])
        pool.close_group(fixed[0])
        later = pool.open_group(specs)
        pool.plan(later, num_rows)
        assert later.slab not in [group.slab for group in fixed] and fixed[0].slab is not fixed[1].slab
        pool.check_integrity_sync()
        pool.reset()
        pool.check_integrity_sync()
        # As in a graph, which is not aware of resets.
        for group in fixed:
            group.generation = pool.generation
    num_bytes = pool.num_bytes["tables"]
    del fixed, group
    assert pool.num_bytes["tables"] < num_bytes
