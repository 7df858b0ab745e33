"""Races between the stash's streams on a GPU: with any of the streams delayed, and with freed memory reused and
overwritten, gradients are equal to those of a run that waits after each operation.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.graph_step import Case, build, check_graph
from benchmarks.gpu.shapes import GRAPH, ROUTINGS, SMALL, sides_of
from benchmarks.stash_step import PAGE_BYTES, Bench, Rows, Sizes, Way
from megatron.core.device.streams import SideStream
from megatron.core.transformer.moe.paged_stash import Counter, PagedStash, PagePool, PoolLayout
from megatron.training.training import run_step
from tests.harness import run_on_ranks

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SIZES = Sizes(tokens=512, hidden=256, ffn=384)
LAYERS, STEPS = 6, 3
CYCLES = (0, 20_000, 500_000)  # up to a third of a millisecond, in which the other streams complete a whole layer


@dataclass
class LateStream:
    """A side stream that runs `delay` before its work."""

    stream: SideStream
    delay: Callable[[], None]

    @contextmanager
    def behind_main(self, *events: torch.Event | None) -> Iterator[None]:
        with self.stream.behind_main(*events):
            self.delay()
            yield

    def record(self) -> torch.Event | None:
        return self.stream.record()


class WaitAlways(TorchDispatchMode):
    """Makes the host wait for the GPU after each operation, also in backward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        torch.cuda.synchronize()
        return result


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Enables deterministic algorithms, which also fill newly allocated memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def sleeper(seed: int) -> Callable[[], None]:
    rng = random.Random(seed)
    return lambda: torch.cuda._sleep(rng.choice(CYCLES))


def way_of(bench: Bench, share: float, *, prefetch: int, num_programs: int) -> Way:
    """Builds a stash whose pool has this share of the required pages, half of them on the host."""
    pages = int(share * bench.pages_needed())
    pool = PagePool(bench.device, PoolLayout(PAGE_BYTES, pages - pages // 2, pages // 2))
    return Way("stash", stash=PagedStash(pool, prefetch_groups=prefetch, num_programs=num_programs), pool=pool)


def make_late(way: Way, bench: Bench, *, delays: dict[str, Callable[[], None]], seed: int) -> None:
    """Delays streams, and overwrites memory that autograd has freed after each layer, in forward and backward."""
    assert way.stash is not None
    keeper, rng = way.stash._keeper, random.Random(seed)
    for name in ("stash", "restore"):
        if name in delays:
            vars(keeper)[f"_{name}_stream"] = LateStream(vars(keeper)[f"_{name}_stream"], delays[name])
    held: list[Tensor] = []

    def disturb() -> None:
        delays.get("main", lambda: None)()
        # Equal in size to stashed tensors, so that the allocator first reuses the free blocks of those tensors.
        for width in rng.sample(SIZES.widths, 3) * 2:
            size = SIZES.capacity * width
            held.append(torch.full((size,), torch.nan, device=bench.device, dtype=bench.hidden.dtype))
        del held[: rng.randint(3, len(held))]

    def behind(layer: Any, inputs: Any, output: Tensor) -> None:
        disturb()
        output.register_hook(lambda grad: disturb())

    for layer in bench.layers:
        layer.register_forward_hook(behind)


def gradients_of(
    routings: list[list[Rows]], *, share: float, seed: int, late: tuple[str, ...] | None
) -> tuple[list[list[Tensor]], Way]:
    """Returns each step's gradients. late: streams to delay; None makes the host wait after each operation."""
    bench = Bench(LAYERS, torch.device(DEVICE), sizes=SIZES)
    way = way_of(bench, share, prefetch=1 + seed % 2, num_programs=(0, 3)[seed % 2])
    around: AbstractContextManager[Any] = WaitAlways()
    if late is not None:
        around = nullcontext()
        make_late(way, bench, delays={name: sleeper(seed + number) for number, name in enumerate(late)}, seed=seed)
    with around:
        return [bench.step(way, routing) for routing in routings], way


@pytest.mark.parametrize("share", [0.55, 1.2])
@pytest.mark.parametrize("late", [(), ("main",), ("stash",), ("restore",), ("stash", "restore"), ("main", "stash")])
@pytest.mark.parametrize("seed", range(2))
def test_gradients_are_those_of_a_run_that_waits(seed: int, late: tuple[str, ...], share: float) -> None:
    draws = Bench(LAYERS, torch.device(DEVICE), sizes=SIZES)
    routings = [draws.draw() for _ in range(STEPS)]
    expected, _ = gradients_of(routings, share=share, seed=seed, late=None)
    found, way = gradients_of(routings, share=share, seed=seed, late=late)
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert all(not right.isnan().any() for right in theirs)
        assert [index for index, pair in enumerate(zip(ours, theirs)) if not torch.equal(*pair)] == [], f"step {step}"
    assert way.pool is not None
    way.pool.check_integrity_sync()
    totals = [sum(column) for column in zip(*way.counters)]
    assert totals[Counter.VOID] == 0
    # Ensures that the test is meaningful: rows were in pages, and with few pages, tensors were recomputed.
    assert totals[Counter.PLANNED_PAGES] > 0 and totals[Counter.SPILLED_PAGES] > 0
    assert share > 1 or totals[Counter.DROPPED_ACT] > 0


def train(side: str, *, is_late: bool, has_graph: bool) -> list[tuple[float, float | None]]:
    """Returns losses and gradient norms of steps with skewed routing, with delayed streams or with waits everywhere."""
    flags = sides_of(ROUTINGS["skewed"])[side].flags
    # With more layers, so that rows of several layers are in pages at the same time.
    case, graph = Case("small", replace(SMALL, layers=4), "skewed"), GRAPH if has_graph else ""
    run, routing = build(case, f"{flags.replace(GRAPH, graph)} --deterministic-mode")
    behind_main, delay = SideStream.behind_main, sleeper(1)

    @contextmanager
    def late_behind_main(stream: SideStream, *events: torch.Event | None) -> Iterator[None]:
        with behind_main(stream, *events):
            delay()  # in a capture, the delay becomes a node of the graph
            yield

    if is_late:
        SideStream.behind_main = late_behind_main  # type: ignore[method-assign]
    found = []
    with nullcontext() if is_late else WaitAlways():
        for _ in range(6):
            routing.advance()
            report, _ = run_step(run)
            found.append((report.losses["lm loss"], report.grad_norm))
    check_graph(run)
    assert run.expert_memory is not None and run.expert_memory.stash is not None
    return found


@pytest.mark.parametrize("has_graph", [False, True])
@pytest.mark.parametrize("side", ["graph + stash", "graph + stash, spill", "graph + stash, 60% of pages"])
def test_training_on_late_streams_is_training_that_waits(side: str, has_graph: bool) -> None:
    (found,) = run_on_ranks(partial(train, is_late=True, has_graph=has_graph), 1, side, backend=None)
    (expected,) = run_on_ranks(partial(train, is_late=False, has_graph=False), 1, side, backend=None)
    assert found == expected
