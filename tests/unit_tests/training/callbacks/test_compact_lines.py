"""Tests of the short log lines: fields, additions in unusual steps, and width."""

import math
from dataclasses import replace
from typing import Any

import pytest

from megatron.training.callbacks.base import RunStart, StepReport
from megatron.training.callbacks.console import CompactLines, ConsoleLog
from tests.unit_tests.training.small_reports import EVALUATION, STEP, pool_report, stash_report


def compact_lines(**options: Any) -> CompactLines:
    return CompactLines(micro_batch_size=4, **options)


def line(*reports: StepReport, train_iters: int = 2000, **options: Any) -> str:
    return compact_lines(**options).training(reports, train_iters)


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
    lines = compact_lines(minutes=4, clock=lambda: now[0])
    now[0] += 20
    assert lines.training([replace(STEP, iteration=20)], 2000).endswith("  ETA 3:40")
    now[0] += 400
    assert lines.training([replace(STEP, iteration=20)], 2000).endswith("  ETA 0:00")


def test_unusual_steps_are_told() -> None:
    skipped = replace(STEP, skipped=True, nan=True, losses={"lm loss": float("nan")}, loss_scale=1024.0)
    assert line(skipped, STEP).endswith("  nan 1  skipped 1  loss scale 1")
    # No step has a loss.
    assert line(skipped).startswith("step    3/2000  loss -  1,024 tokens/s  ")
    pool = pool_report(dropped_gate_up=15, spilled_pages=7)
    report = replace(STEP, nan=True, skipped=True, stash=stash_report(void_steps=2, pool=pool))
    assert line(report).endswith("  1024 tok/s  norm 1.2  ETA 16:38  disc 2  nan 1  skip 1  spill 7  recomp 15")
    assert line(replace(report, nan=False, skipped=False)).endswith("  discarded 2  spilled 7  recomputed 15")
    assert line(replace(STEP, stash=stash_report())) == line(STEP)


def test_a_loss_scale_is_told_when_it_changes() -> None:
    lines = compact_lines()
    scales = [1024.0, 1024.0, 512.0, 512.0]
    shown = [lines.training([replace(STEP, loss_scale=scale)], 2000) for scale in scales]
    assert ["loss scale" in text for text in shown] == [False, False, True, False]
    assert shown[2].endswith("  loss scale 512")


@pytest.mark.parametrize(("gate_ups", "is_told"), [(0, False), (3, False), (4, True)])
def test_recomputation_is_told_if_it_exceeds_a_tenth_of_the_tensors(gate_ups: int, is_told: bool) -> None:
    pool = pool_report(dropped_gate_up=gate_ups)
    # 8 steps, 2 layers, 2 microbatches, a gate_up each: 32 tensors.
    report = replace(STEP, stash=stash_report(steps=8, rows={1: 70, 2: 80}, pool=pool))
    assert ("recomputed" in line(report)) == is_told


@pytest.mark.parametrize(
    ("loss", "words"),
    [(2.0, "2.000"), (4e-4, "0.0004"), (1e38, "1e+38"), (12345.0, "1.234e+04"), (math.inf, "inf"), (math.nan, "nan")],
)
def test_losses_have_about_four_significant_digits(loss: float, words: str) -> None:
    assert f"  loss {words}  " in line(replace(STEP, losses={"lm loss": loss}))
    evaluated = compact_lines().evaluation(replace(EVALUATION, losses={"lm loss": loss}))
    assert evaluated.startswith(f"validation at step 4: loss {words}, perplexity ")
    assert evaluated.endswith("perplexity nan") == math.isnan(loss)


@pytest.mark.parametrize("factor", [1, 1000, 10**6, 10**9])
@pytest.mark.parametrize("seconds", [1e-3, 0.5, 1e6])
def test_no_event_is_dropped_and_no_line_is_wider_than_110_columns(factor: int, seconds: float) -> None:
    pool = pool_report(dropped_gate_up=126 * factor, spilled_pages=1_234 * factor)
    lines = compact_lines()
    lines.training([STEP], 1)
    report = replace(
        STEP,
        iteration=1_234_567,
        losses={"lm loss": -1.2345e38},
        grad_norm=1.2345e38,
        loss_scale=2.0**32 / 3,
        tokens=10**9,
        seconds=seconds,
        skipped=True,
        nan=True,
        stash=stash_report(void_steps=7 * factor, pool=pool),
    )
    told = lines.training([report, replace(report, skipped=False)], 10_000_000)
    assert len(told) <= CompactLines.WIDTH and told.startswith("step  1234567/10000000  loss -1.234e+38  ")
    positions = [told.find(f"  {name}") for name in ("disc", "nan", "skip", "spill", "recomp", "scale")]
    assert -1 not in positions and positions == sorted(positions)


def test_evaluations_are_not_wider_than_110_columns() -> None:
    lines = compact_lines()
    many = lines.evaluation(replace(EVALUATION, losses={f"loss of part {number}": 1.0 for number in range(20)}))
    assert len(many) <= CompactLines.WIDTH and many.endswith("  ...")
    long = lines.evaluation(replace(EVALUATION, set_name="/data/first" + "x" * 200 + "last"))
    assert len(long) == CompactLines.WIDTH
    assert long.startswith("validation-/data/first") and long.endswith("last at step 4: loss 1.500, perplexity 4.482")
    longer = lines.evaluation(replace(EVALUATION, losses={"x" * 200: 1.5}, set_name="y" * 200))
    assert len(longer) <= CompactLines.WIDTH
    assert lines.evaluation(replace(EVALUATION, losses={})) == "validation at step 4: no values"


def test_evaluations_and_checkpoints_are_a_line_each() -> None:
    lines: list[str] = []
    log = ConsoleLog(10, write=lines.append, lines=compact_lines())
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
