"""Reports of a step and of an evaluation, for tests that replace their fields. Contains no tests."""

from dataclasses import replace
from typing import Any

from megatron.training.callbacks import EvaluationReport, StepReport
from megatron.training.callbacks.base import PoolReport, StashReport

STEP = StepReport(
    iteration=3,
    losses={"lm loss": 2.0, "z_loss": 0.25},
    grad_norm=1.23456,
    num_zeros=None,
    learning_rate=3e-4,
    loss_scale=1.0,
    global_batch_size=8,
    consumed_samples=24,
    tokens=512,
    seconds=0.5,
    skipped=False,
    nan=False,
)
EVALUATION = EvaluationReport(iteration=4, split="validation", losses={"lm loss": 1.5})


def pool_report(**fields: Any) -> PoolReport:
    """Returns the report of a pool with ample pages, with these fields replaced."""
    pool = PoolReport(
        rank=0,
        device_pages=100,
        host_pages=0,
        page_bytes=1024,
        device_high_water=90,
        host_high_water=0,
        planned_pages=400,
        spilled_pages=0,
        live_bytes=400_000,
        tail_bytes=9_600,
        dropped_gate_up=0,
        factor=1.1,
        factors_needed=(1.0,),
    )
    return replace(pool, **fields)


def stash_report(**fields: Any) -> StashReport:
    """Returns the report of expert buffers with spare capacity, with these fields replaced."""
    stash = StashReport(
        steps=1,
        void_steps=0,
        capacity_factor=2.0,
        factors_needed=(1.2,),
        balanced_rows=64,
        buffer_rows=128,
        rows={1: 70},
        rungs={},
        pool=None,
    )
    return replace(stash, **fields)
