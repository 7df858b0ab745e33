"""The stash's kernels on a GPU agree with their model, also on two streams and in a graph. Skipped without a GPU."""

import random

import pytest
import torch

from megatron.core.transformer.moe.paged_stash.page_layout import Counter, PoolLayout, Priority, TensorSpec
from megatron.core.transformer.moe.paged_stash.page_pool import PageGroup, PagePool
from tests.counts import long_count
from tests.unit_tests.core.transformer.moe.paged_stash.copy_cases import copy_there_and_back
from tests.unit_tests.core.transformer.moe.paged_stash.pool_model import RandomOperations

pytestmark = pytest.mark.gpu

MAX_ROWS = 96
# Two dtypes, one scale per 32 tokens, rows with gaps, and an odd width. 96 rows of all occupy 56 pages of 1 KiB.
SPECS = [
    TensorSpec(256, 256, MAX_ROWS),
    TensorSpec(4, 4, MAX_ROWS),
    TensorSpec(256, 320, MAX_ROWS, Priority.GATE_UP),
    TensorSpec(33, 33, MAX_ROWS, Priority.ACT),
    TensorSpec(16, 16, MAX_ROWS // 32, Priority.ACT, tokens_per_row=32),
]


def random_memories() -> list[torch.Tensor]:
    return [torch.randint(256, (spec.max_rows, spec.pitch_bytes), dtype=torch.uint8, device="cuda") for spec in SPECS]


def differences(
    group: PageGroup, pool: PagePool, sources: list[torch.Tensor], targets: list[torch.Tensor], tokens: int
) -> torch.Tensor:
    """Returns the number of wrong bytes in the live rows of stashed tensors: [1], int64, on the device."""
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    for index, (spec, source, target) in enumerate(zip(SPECS, sources, targets)):
        rows = -(-tokens // spec.tokens_per_row)
        unlike = (source != target)[:rows, : spec.row_bytes].sum()
        wrong += unlike * (1 - pool.dropped(group, index))
    return wrong


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_agree_with_the_model(seed: int) -> None:
    RandomOperations(seed, device="cuda").run(long_count(500, soak=20000))


@pytest.mark.parametrize(
    ("row_bytes", "pitch_bytes", "max_rows", "offset"),
    [
        (2**20, 2**20, 2200, 0),  # more than 2**31 bytes in one run
        (80000, 80016, 30000, 16),
        (1000, 1008, 30000, 8),
        (100, 108, 30000, 4),
        (6, 14, 30000, 2),
        (7, 15, 30000, 1),
        (7, 7, 300001, 1),
        (4096, 2**31 + 16, 2, 0),
    ],
)
def test_any_width_and_address_is_copied(row_bytes: int, pitch_bytes: int, max_rows: int, offset: int) -> None:
    triton_kernels = pytest.importorskip("megatron.core.transformer.moe.paged_stash.triton_kernels")
    spec = TensorSpec(row_bytes, pitch_bytes, max_rows)
    layout = PoolLayout(page_bytes=2**18, device_pages=2**14, host_pages=5)
    copy_there_and_back(triton_kernels, spec, rows=max_rows - 1, layout=layout, offset=offset, device="cuda")


@pytest.mark.parametrize("num_programs", [0, 1, 7])
def test_two_streams_with_delays_lose_nothing(num_programs: int) -> None:
    """Runs plan and stash on one stream, and restore and release on another, with a pool that is nearly always full."""
    rng = random.Random(num_programs)
    pool = PagePool("cuda", PoolLayout(1024, device_pages=60, host_pages=40))
    stashing, restoring = torch.Stream("cuda"), torch.Stream("cuda")
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    memories = [random_memories() for _ in range(8)]
    counts = torch.arange(MAX_ROWS + 1, device="cuda")
    torch.cuda.synchronize()
    waiting: list[tuple[PageGroup, int, int, torch.Event]] = []
    for step in range(500):
        tokens, number = rng.randint(0, MAX_ROWS), step % len(memories)
        with stashing:
            # Opened on this stream, so that zeroing a new page table is ordered before the table's first plan.
            group = pool.open_group(SPECS)
            torch.cuda._sleep(rng.choice((0, 0, 20000, 200000)))
            for event in group.waits:
                stashing.wait_event(event)
            pool.plan(group, counts[tokens : tokens + 1])
            pool.stash(group, [memory.flatten() for memory in memories[number]], num_programs=num_programs)
            waiting.append((group, tokens, number, stashing.record_event()))
        while len(waiting) > rng.randint(0, 4):
            group, tokens, number, stashed = waiting.pop(rng.randrange(len(waiting)))
            with restoring:
                torch.cuda._sleep(rng.choice((0, 0, 20000, 200000)))
                restoring.wait_event(stashed)
                targets = [torch.zeros_like(memory) for memory in memories[number]]
                pool.restore(group, [target.flatten() for target in targets], num_programs=num_programs)
                wrong += differences(group, pool, memories[number], targets, tokens)
                pool.release(group)
                pool.close_group(group, after=restoring.record_event())
    torch.cuda.synchronize()
    for group, *_ in waiting:
        pool.release(group)
        pool.close_group(group)
    pool.check_integrity_sync()
    occupancy = pool.occupancy_sync()
    assert wrong.item() == 0
    assert (occupancy.device_free, occupancy.host_free) == (60, 40)
    # Ensures that the test is meaningful: pages were spilled to the host, and some tensors found no pages.
    assert occupancy.counters[Counter.SPILLED_PAGES] > 0 and occupancy.counters[Counter.DROPPED_ACT] > 0


def test_a_captured_group_replays_as_eager_code() -> None:
    layout = PoolLayout(1024, device_pages=30, host_pages=10)
    captured, eager = PagePool("cuda", layout), PagePool("cuda", layout)
    sources, reserve = random_memories(), torch.tensor([0, 2, 5], device="cuda")
    targets = {pool: [torch.zeros_like(source) for source in sources] for pool in (captured, eager)}
    groups = {pool: pool.open_group(SPECS) for pool in (captured, eager)}
    count = torch.zeros(1, dtype=torch.int64, device="cuda")

    def run(pool: PagePool) -> None:
        pool.plan(groups[pool], count, reserve=reserve)
        pool.stash(groups[pool], [source.flatten() for source in sources])
        pool.restore(groups[pool], [target.flatten() for target in targets[pool]])
        pool.release(groups[pool])

    for pool in (captured, eager):  # Compiles the kernels, which is not possible during a capture.
        run(pool)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(captured)
    rng = random.Random(1)
    for _ in range(100):
        count.fill_(rng.choice((0, 1, 31, 32, 33, MAX_ROWS, MAX_ROWS + 1, -1, rng.randint(0, MAX_ROWS))))
        for target in targets[captured] + targets[eager]:
            target.zero_()
        graph.replay()
        run(eager)
        for found, expected in zip(targets[captured], targets[eager]):
            assert torch.equal(found, expected)
    for name in ("heads", "tails", "ring", "counters", "device_pages"):
        assert torch.equal(vars(captured)[name], vars(eager)[name]), name
    captured.check_integrity_sync()
