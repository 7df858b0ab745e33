"""The model's figures for three published shapes, and signs of what it says."""

import pytest

from megatron.core.transformer.moe.paged_stash.cost_model import ExpertShape, GroupCosts, Machine, StepShape

MACHINE = Machine(flops=790e12, copied_bytes=4.3e12, host_bytes=55e9)
# Hidden, ffn, rows, layers; GB dropless, static at c = 1.5, 2, 4, stashed at the same, at best; ms of compute, of
# copies; rho and without act in %, ms of a whole spill, share of it that forward hides in %, of x in a row in %.
SHAPES = {
    "DeepSeek-V3": (7168, 2048, 32768, 58, 50.6, (75.9, 101, 202), (58.3, 59.1, 62.6), 51.9)
    + (10.96, 0.81, 7.4, 6.3, 15.9, 23, 54),
    "Qwen3-30B-A3B": (2048, 768, 131072, 48, 54.8, (82.1, 110, 219), (63.7, 64.8, 69.4), 56.5)
    + (4.70, 1.06, 22.6, 18.6, 20.7, 8, 47),
    "Mixtral-8x7B": (4096, 14336, 16384, 32, 49.4, (74.1, 98.8, 198), (59.0, 60.5, 66.7), 51.7)
    + (21.92, 1.44, 6.6, 4.6, 28.1, 26, 9),
}


@pytest.mark.parametrize("name", SHAPES)
def test_published_shapes(name: str) -> None:
    hidden, ffn, rows, layers, dropless, static, stashed, best, *costs = SHAPES[name]
    expert = ExpertShape(hidden, ffn)
    steps = [StepShape(expert, rows, layers, factor) for factor in (1.5, 2, 4)]
    assert steps[0].dropless_bytes / 1e9 == pytest.approx(dropless, abs=0.06)
    assert [step.static_bytes / 1e9 for step in steps] == pytest.approx(list(static), rel=0.006)
    assert [step.stashed_bytes() / 1e9 for step in steps] == pytest.approx(list(stashed), abs=0.06)
    assert steps[0].stashed_bytes(arena_factor=1, prefetch_groups=0) / 1e9 == pytest.approx(best, abs=0.06)
    group = GroupCosts(expert, rows, MACHINE)
    without_act = group.rho - group.copy_seconds(expert.act_bytes) / group.compute_seconds
    figures = [group.compute_seconds * 1e3, group.copy_seconds(expert.row_bytes) * 1e3, group.rho * 100]
    figures += [without_act * 100, group.spill_seconds(1) * 1e3, group.hidden_share * 100]
    figures.append(100 * expert.input_bytes / expert.row_bytes)
    last_digits = [0.01, 0.01, 0.1, 0.1, 0.1, 1, 1]  # of the published figures
    assert all(abs(own - one) < 0.6 * digit for own, one, digit in zip(figures, costs, last_digits))
    assert group.act_rung_seconds < group.copy_seconds(expert.act_bytes) and group.gate_up_rung_seconds > 0


def test_saving_grows_with_capacity_and_may_be_negative() -> None:
    expert = ExpertShape(7168, 2048)
    savings = [StepShape(expert, 32768, 58, factor).saving() for factor in (1.2, 1.5, 2, 4)]
    assert savings == pytest.approx([0.05, 0.23, 0.42, 0.69], abs=0.006)
    assert StepShape(expert, 32768, 58, 1.0).saving() < 0 and StepShape(expert, 32768, 2, 4.0).saving() < 0
