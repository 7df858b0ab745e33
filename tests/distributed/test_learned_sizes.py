"""A resumed run starts with the buffer sizes that the saved run grew to: equal in the same layout, else replanned."""

import json
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.paged_stash import PoolLayout
from megatron.core.transformer.moe.paged_stash.sizing import LearnedSizes
from megatron.training.checkpointing.folder import iteration_folder
from megatron.training.run import TrainingRun
from megatron.training.training import run_step
from tests.distributed.stash_runs import stash
from tests.distributed.tiny_runs import comparable, started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.fuzz.checkpoint_damage import vouch
from tests.harness import run_on_ranks

RANKS, SAVED_AT, STEPS = 2, 2, 4
FEW_PAGES = 4  # far fewer than a step needs
FLAGS: Flags = {
    **read_bases()["moe"],
    "num-layers": 4,
    "eval-interval": None,
    "global-batch-size": 8,
    "train-iters": STEPS,
    "expert-model-parallel-size": 2,
    "moe-expert-rank-capacity-factor": 1.0,
    **stash(None, page_size=8, buffer_bytes=FEW_PAGES * 8 * 32 * 4, overflow_policy="rerun"),
}
STAGES: Flags = {"expert-model-parallel-size": None, "pipeline-model-parallel-size": 2, "micro-batch-size": 1}


@dataclass(frozen=True)
class Sizes:
    """Buffer sizes of a rank at one point of a run.

    layout: None where the stage stashes nothing. balanced: pages that balanced routing needs.
    """

    factor: float
    layout: PoolLayout | None
    balanced: int
    learned: LearnedSizes


@dataclass(frozen=True)
class Trained:
    """Results of a training run. reruns: number of reruns of each step."""

    begun: Sizes
    reports: list[dict[str, Any]]
    reruns: list[int]
    ended: Sizes


def _sizes(run: TrainingRun) -> Sizes:
    memory = run.expert_memory
    assert memory is not None
    layers = [layer for chunk in run.model for layer in chunk.modules() if isinstance(layer, MoELayer)]
    (factor,) = {layer.token_dispatcher.budget.factor for layer in layers}
    layout = None if memory.stash is None else memory.stash.pool.layout
    return Sizes(factor, layout, memory.needs.balanced_pages, memory.learned_sync())


def _train(flags: Flags, steps: int, *, save_after: int | None = None) -> Trained:
    with started_run(command_line({**FLAGS, **flags})) as run:
        begun, reports, reruns = _sizes(run), [], []
        for step in range(1, steps + 1):
            report, _ = run_step(run)
            reports.append({name: comparable(report)[name] for name in ("losses", "grad_norm", "iteration")})
            assert run.expert_memory is not None and run.expert_memory.last_step is not None
            reruns.append(run.expert_memory.last_step.num_discards)
            if step == save_after:
                run.save_checkpoint()
        return Trained(begun, reports, reruns, _sizes(run))


def _grow_and_resume(folder: str) -> dict[str, Trained]:
    loaded: Flags = {"load": folder}
    return {
        "whole": _train({"save": folder}, STEPS, save_after=SAVED_AT),
        "resumed": _train(loaded, STEPS - SAVED_AT),
        "larger": _train({**loaded, "moe-expert-rank-capacity-factor": 1.95}, 0),
        "finetuned": _train({**loaded, "finetune": True}, 0),
        "stages": _train({**loaded, **STAGES}, STEPS - SAVED_AT),
    }


@pytest.mark.slow
def test_b19_a_resumed_run_has_the_sizes_of_the_one_that_never_stopped(tmp_path: Path) -> None:
    for found in run_on_ranks(_grow_and_resume, RANKS, str(tmp_path)):
        whole, resumed, fresh = found["whole"], found["resumed"], found["finetuned"].begun
        assert whole.begun.factor == 1.0 and whole.begun.layout == PoolLayout(1024, FEW_PAGES)
        assert whole.reruns[0] > 1 and sum(whole.reruns[SAVED_AT:]) == 0, "the first step must lack rows, then pages"
        assert whole.ended.factor > 1.0 and whole.ended.layout != whole.begun.layout
        assert resumed.reports == whole.reports[SAVED_AT:] and sum(resumed.reruns) == 0
        assert (resumed.begun.factor, resumed.begun.layout) == (whole.ended.factor, whole.ended.layout)
        assert resumed.ended == whole.ended and resumed.begun.learned.rows_share.keys() == {1, 2, 3, 4}
        assert found["larger"].begun.factor == 1.95
        assert (fresh.factor, fresh.layout, fresh.learned.rows_share) == (1.0, whole.begun.layout, {})
        # With other stages, the learned factor applies to different page needs.
        moved, learned = found["stages"], resumed.begun.learned
        assert learned.device_factor is not None and moved.begun.balanced != whole.ended.balanced
        assert moved.begun.factor == whole.ended.factor and moved.begun.learned.rows_share == learned.rows_share
        assert moved.begun.layout == PoolLayout(1024, ceil(learned.device_factor * moved.begun.balanced - 1e-6))
        for one, other in zip(moved.reports, whole.reports[SAVED_AT:]):
            assert one["losses"]["lm loss"] == pytest.approx(other["losses"]["lm loss"], rel=1e-3)


def _forget_row_bytes(folder: Path) -> None:
    """Rewrites learned sizes as saved by a run whose pages held other tensors per row and which did not record that."""
    saved = iteration_folder(folder, SAVED_AT)
    values = json.loads((saved / "common.json").read_text())
    assert values["train_state"]["learned_sizes"].pop("row_bytes") > 0
    (saved / "common.json").write_text(json.dumps(values))
    vouch(saved)


@pytest.mark.slow
def test_pools_learned_for_other_rows_start_small_again_and_results_stay(tmp_path: Path) -> None:
    wholes = run_on_ranks(partial(_train, {"save": str(tmp_path)}, SAVED_AT + 1, save_after=SAVED_AT), RANKS)
    _forget_row_bytes(tmp_path)
    for whole, resumed in zip(wholes, run_on_ranks(_train, RANKS, {"load": str(tmp_path)}, 1), strict=True):
        assert resumed.begun.layout == whole.begun.layout != whole.ended.layout
        assert resumed.begun.factor == whole.ended.factor and sum(resumed.reruns) > 0
        assert resumed.begun.learned.rows_share.keys() == {1, 2, 3, 4}
        assert resumed.reports == whole.reports[SAVED_AT:]
