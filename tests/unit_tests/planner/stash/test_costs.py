"""Times and bytes of three published shapes, and whether a stash saves memory."""

import pytest

from megatron.core.transformer.moe.paged_stash.arithmetic import Footprint, footprint
from megatron.core.transformer.moe.paged_stash.page_layout import PoolLayout
from megatron.core.transformer.moe.paged_stash.stash_order import EventKind, StashEvent
from megatron.planner.stash.costs import ExpertShape, Machine

MACHINE = Machine(flops=790e12, copied_bytes=4.3e12, host_bytes=55e9)
# Hidden, ffn, rows, layers. GB: dropless, static at c = 1.5, 2 and 4, stashed at the same factors, and at best.
# Compute and copies in ms, copies over compute in %, a whole spill in ms, its share that forward overlaps in %, and the
# share of x in a row in %.
SHAPES = {
    "DeepSeek-V3": (7168, 2048, 32768, 58, 42.8, (64.2, 85.6, 171), (49.3, 50.1, 53.0), 43.9)
    + (10.96, 0.69, 6.3, 13.4, 27, 64),
    "Qwen3-30B-A3B": (2048, 768, 131072, 48, 45.1, (67.6, 90.2, 180), (52.4, 53.4, 57.1), 46.5)
    + (4.70, 0.87, 18.6, 17.1, 9, 57),
    "Mixtral-8x7B": (4096, 14336, 16384, 32, 34.4, (51.5, 68.7, 137), (41.0, 42.1, 46.4), 36.0)
    + (21.92, 1.00, 4.6, 19.5, 37, 13),
}


def step(
    expert: ExpertShape,
    num_rows: int,
    num_groups: int,
    capacity_factor: float,
    *,
    arena_factor: float = 1.1,
    prefetch_groups: int = 1,
) -> Footprint:
    """Returns the footprint of a step with num_groups saved groups at its peak, as in a run's log line."""
    names = [f"layer{number}" for number in range(num_groups)]
    # No backward directly follows its forward, as in the first stage of a pipeline.
    events = [StashEvent(kind, name, 0) for kind in (EventKind.FORWARD, EventKind.BACKWARD) for name in names]
    live_bytes = num_rows * expert.row_bytes
    pages = round(arena_factor * num_groups * live_bytes / 4096)
    return footprint(
        events,
        lambda group: round(capacity_factor * live_bytes),
        layout=PoolLayout(4096, pages),
        prefetch_groups=prefetch_groups,
    )


def stashed(own: Footprint) -> float:
    return (own.arena_bytes + own.working_set_bytes) / 1e9


@pytest.mark.parametrize("name", SHAPES)
def test_published_shapes(name: str) -> None:
    hidden, ffn, rows, layers, dropless, static, with_stash, best, *times = SHAPES[name]
    expert = ExpertShape(hidden, ffn)
    steps = [step(expert, rows, layers, factor) for factor in (1.5, 2, 4)]
    assert layers * rows * expert.row_bytes / 1e9 == pytest.approx(dropless, abs=0.06)
    assert [one.static_bytes / 1e9 for one in steps] == pytest.approx(list(static), rel=0.006)
    assert [stashed(one) for one in steps] == pytest.approx(list(with_stash), abs=0.06)
    assert stashed(step(expert, rows, layers, 1.5, arena_factor=1, prefetch_groups=0)) == pytest.approx(best, abs=0.06)
    compute, copies = MACHINE.compute_seconds(expert, rows), MACHINE.copy_seconds(rows * expert.row_bytes)
    spill = MACHINE.host_seconds(rows * expert.row_bytes)
    figures = [compute * 1e3, copies * 1e3, copies / compute * 100, spill * 1e3]
    figures += [100 * compute / 3 / spill, 100 * expert.input_bytes / expert.row_bytes]
    last_digits = [0.01, 0.01, 0.1, 0.1, 1, 1]  # of the published values
    assert all(abs(own - one) < 0.6 * digit for own, one, digit in zip(figures, times, last_digits))
    assert MACHINE.gate_up_seconds(expert, rows) == pytest.approx(compute * 4 / 18)


def test_saving_grows_with_capacity_and_may_be_negative() -> None:
    expert = ExpertShape(7168, 2048)
    savings = [step(expert, 32768, 58, factor).saving for factor in (1.2, 1.5, 2, 4)]
    assert savings == pytest.approx([0.05, 0.23, 0.42, 0.69], abs=0.006)
    assert step(expert, 32768, 58, 1.0).saving < 0 and step(expert, 32768, 2, 4.0).saving < 0


def test_an_expert_without_a_gate_has_two_matrices() -> None:
    gated, plain = ExpertShape(64, 32), ExpertShape(64, 32, is_gated=False)
    assert (gated.flops, plain.flops) == (18 * 64 * 32, 12 * 64 * 32)
    assert gated.row_bytes - plain.row_bytes == plain.gate_up_bytes == 32 * 2
