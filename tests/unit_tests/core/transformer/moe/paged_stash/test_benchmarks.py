"""What the stash's benchmarks show holds for small sizes too."""

import pytest
import torch

from benchmarks.stash_copy import build, measure_cpu
from benchmarks.stash_step import PAGE_BYTES, Bench, Sizes, figures_of, measure, ways_of


@pytest.mark.slow
def test_a_pool_at_60_percent_of_need_finds_pages_for_every_x_at_little_cost() -> None:
    bench = Bench(8, torch.device("cpu"), sizes=Sizes(256, 512, 256))
    ways = {way.name: way for way in ways_of(bench)}
    measure(bench, list(ways.values()), rounds=5)  # raises for gradients other than those without a stash
    short, full = (figures_of(ways[name], ways) for name in ("60%", "full"))
    assert short["void"] == 0 < short["dropped_act"] + short["dropped_gate_up"]
    assert short["device_page_bytes"] <= 0.6 * bench.pages_needed() * PAGE_BYTES < full["device_page_bytes"]
    assert short["time_of_full"] <= 1.3


@pytest.mark.parametrize("order", ["new", "step", "shuffled"])
def test_copies_allocate_nothing_whatever_the_order_of_pages(order: str) -> None:
    bench = build(256, torch.bfloat16, num_bytes=2**20, order=order, device="cpu", tier="device")
    figures = measure_cpu(bench, 2)  # raises if a copy allocates
    assert figures["live_bytes"] == 4 * 256 * (1024 - 3) and figures["stash_x"] > 0
