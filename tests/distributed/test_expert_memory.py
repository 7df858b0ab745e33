"""Tests the memory of experts' activations in a training step, as measured by the benchmark."""

from dataclasses import replace

import pytest

from benchmarks.stash_memory import Case, Layout, train
from tests.harness import run_on_ranks


def fullest(case):
    ranks = run_on_ranks(train, 2, case, backend=None)
    for one in ranks:
        one.check_memory_law()
    return max(ranks, key=lambda one: one.peaks.held.activations)


@pytest.mark.slow
def test_the_memory_law_holds_for_a_hot_expert_and_half_of_the_pages_hold_every_x() -> None:
    static_case = Case(Layout(1, ranks=2), "one hot", "static", 2.0)
    static, stash, rungs = (fullest(replace(static_case, kind=kind)) for kind in ("static", "stash", "rungs"))
    # Without the stash every layer stores a full set: gate_up is 256 wide, x 64.
    rows = 2 * 128 * 2 * 2
    assert static.peaks.held.activations == 8 * rows * (64 + 256) * 4
    assert stash.peaks.working_set == rows * (64 + 256) * 4
    # Backward of one layer runs next; the live rows of the other layers are in pages.
    live = round(7 / 8 * static.peaks.held.activations * static_case.factor_needed / 2)
    assert stash.peaks.held.live == pytest.approx(live, rel=0.01)
    assert stash.dropped == 0 < rungs.dropped
    assert rungs.arena_bytes == pytest.approx(stash.arena_bytes * 0.5 / 1.1, rel=0.01)
