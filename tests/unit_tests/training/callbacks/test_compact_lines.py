"""Tests of the short log lines: their fields, what they add in unusual steps, and their width."""

from dataclasses import replace
from typing import Any

import pytest

from megatron.training.callbacks.base import RunStart, StepReport
from megatron.training.callbacks.console import CompactLines, ConsoleLog
from tests.unit_tests.training.small_reports import EVALUATION, STEP, pool_report, stash_report


def line(*reports: StepReport, train_iters: int = 2000, **options: Any) -> str:
    return CompactLines(**options).training(reports, train_iters)


def test_a_normal_line_has_five_fields() -> None:
    step = replace(STEP, iteration=20, losses={"lm loss": 7.0462, "z_loss": 3.66}, tokens=4096, seconds=0.5)
    after = replace(step, iteration=21, losses={"lm loss": 7.0, "z_loss": 3.6})
    expected = "step   21/2000  loss 7.023  8,192 tokens/s  grad norm 1.23  ETA 16:30"
    assert line(step, after) == expected


@pytest.mark.parametrize(
    ("seconds", "remaining"), [(0.001, "0:02"), (1.0, "33:00"), (4.0, "2:12:00"), (400.0, "9d 4h")]
)
def test_the_remaining_time_is_that_of_the_steps(seconds: float, remaining: str) -> None:
    assert line(replace(STEP, iteration=20, seconds=seconds)).endswith(f"  ETA {remaining}")


def test_the_time_limit_of_the_run_counts_if_it_comes_first() -> None:
    now = [100.0]
    lines = CompactLines(minutes=4, clock=lambda: now[0])
    now[0] += 20
    assert lines.training([replace(STEP, iteration=20)], 2000).endswith("  ETA 3:40")
    now[0] += 400
    assert lines.training([replace(STEP, iteration=20)], 2000).endswith("  ETA 0:00")


def test_unusual_steps_are_told() -> None:
    skipped = replace(STEP, skipped=True, nan=True, losses={"lm loss": float("nan")}, loss_scale=1024.0)
    assert "  skipped 1  nan 1" in line(skipped, STEP)
    # No loss is finite, so none is shown.
    assert line(skipped).startswith("step    3/2000  1,024 tokens/s  ")
    assert line(skipped).endswith("  loss scale 1024  skipped 1  nan 1")
    pool = pool_report(dropped_act=12, dropped_gate_up=3, spilled_pages=7)
    report = replace(STEP, stash=stash_report(void_steps=2, pool=pool))
    assert line(report).endswith("  discarded 2  spilled 7  recomputed 15")
    assert line(replace(STEP, stash=stash_report())) == line(STEP)


def test_no_line_is_wider_than_110_columns() -> None:
    pool = pool_report(dropped_act=123_456, dropped_gate_up=3, spilled_pages=1_234_567)
    report = replace(
        STEP,
        iteration=1_234_567,
        loss_scale=2.0**32,
        tokens=10**9,
        skipped=True,
        stash=stash_report(void_steps=1000, pool=pool),
    )
    wide = line(report, train_iters=10_000_000)
    assert len(wide) <= CompactLines.WIDTH and wide.endswith("  ...")
    many = replace(EVALUATION, losses={f"loss of part {number}": 1.0 for number in range(20)})
    assert len(CompactLines().evaluation(many)) <= CompactLines.WIDTH


def test_evaluations_and_checkpoints_are_a_line_each() -> None:
    lines: list[str] = []
    log = ConsoleLog(10, write=lines.append, lines=CompactLines())
    log.on_train_start(RunStart(iteration=0, train_iters=100))
    log.on_evaluation_end(replace(EVALUATION, losses={"lm loss": 1.5, "accuracy": 0.5}))
    log.on_evaluation_end(replace(EVALUATION, losses={"lm loss": 1.5}, final=True, split="test"))
    log.on_save(4)
    log.on_step_end(STEP)
    log.on_run_end()
    assert lines[0] == f"validation at step {EVALUATION.iteration}: loss 1.500, perplexity 4.482  accuracy 0.500"
    assert lines[1] == "test after training: loss 1.500, perplexity 4.482"
    assert lines[2] == "saved the checkpoint of step 4"
    assert lines[3].startswith("step   3/100  loss ")
