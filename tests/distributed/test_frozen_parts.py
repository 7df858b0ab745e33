"""Tests that models with frozen parts, or whole frozen stages, train and resume over stages like one process."""

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pretrain_gpt
from megatron.core.tensor_parallel.param_attributes import param_facts
from megatron.training.training import run_step
from tests.counts import long_count, slow, soak_only
from tests.distributed.parity import (
    FLAGS,
    Box,
    boxes_of_state,
    boxes_of_weights,
    fp64_forward_step,
    fp64_model,
    layout,
    put_together,
    relative_errors,
)
from tests.distributed.tiny_runs import OVERLAPPED_SMALL_BUCKETS, comparable, gather_parameters, started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

# Adam, whose first steps depend on the step count, and every statistic that counts gradients over ranks.
TRAINING: Flags = {
    **FLAGS,
    "num-layers": 4,
    "optimizer": "adam",
    "lr": 0.01,
    "lr-decay-style": "constant",
    "clip-grad": 0.5,
    "log-num-zeros-in-grad": True,
    "log-params-norm": True,
}
EMBEDDING = ("embedding.*",)
FIRST_HALF = (*EMBEDDING, "decoder.layers.[01].*")
LAST_HALF = ("decoder.layers.[23].*", "decoder.final_layernorm.*", "output_layer.*")
EVERY_SECOND = (*EMBEDDING, "decoder.layers.[02].*")
STEPS = long_count(1, soak=2)


@dataclass(frozen=True)
class Case:
    """A base of bases.yaml, the frozen names, and the layout of two stages. sharded: each stage has two ranks."""

    base: str
    frozen: Sequence[str]
    vpp: int = 1
    per_token: bool = False
    sharded: bool = False


CASES = [
    # One of two chunks is frozen.
    Case("dense", (*EMBEDDING, "decoder.layers.0.*"), vpp=2),
    # The whole first stage, then the whole last stage.
    slow(Case("moe", FIRST_HALF, per_token=True, sharded=True)),
    slow(Case("llama", LAST_HALF)),
    # The cases above cover frozen parts of a chunk, chunks, shards and losses per token, in other combinations.
    soak_only(Case("dense", EMBEDDING)),
    soak_only(Case("dense", EMBEDDING, vpp=2)),
    soak_only(Case("llama", LAST_HALF, sharded=True)),
    soak_only(Case("llama", EVERY_SECOND, vpp=2, per_token=True)),
]


@dataclass
class Trained:
    """A rank's record of a run, and of a second run resumed from its checkpoint.

    reports, state: of `2 * STEPS` steps with a checkpoint after `STEPS`. thawing: output of a load with nothing frozen.
    """

    initial: list[Box]
    reports: list[dict[str, Any]]
    resumed: list[dict[str, Any]]
    state: list[Box]
    resumed_state: list[Box]
    thawing: str


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_b24_frozen_parts_train_and_resume_as_in_one_process(case: Case, tmp_path: Path) -> None:
    flags: Flags = {**TRAINING, "calculate-per-token-loss": case.per_token}
    argv = command_line({**read_bases()[case.base], **flags})
    [one] = run_on_ranks(_train, 1, argv, case.frozen, str(tmp_path / "one"))
    mode = OVERLAPPED_SMALL_BUCKETS if case.sharded else {}
    stages = command_line({**read_bases()[case.base], **flags, **layout(pp=2, vpp=case.vpp), **mode})
    ranks: list[Trained] = run_on_ranks(_train, 4 if case.sharded else 2, stages, case.frozen, str(tmp_path / "two"))
    for rank in (one, *ranks):
        assert rank.resumed == rank.reports[STEPS:]
    for report, reference in zip(ranks[-1].reports, one.reports, strict=True):
        assert report["losses"] == pytest.approx(reference["losses"], rel=1e-10)
        assert report["num_zeros"] == reference["num_zeros"]
    assert [float(r["grad_norm"]) for r in ranks[0].reports] == pytest.approx(
        [float(r["grad_norm"]) for r in one.reports], rel=1.2e-7
    )
    for ours, theirs in ((one.state, "state"), (one.resumed_state, "resumed_state")):
        merged = put_together([box for rank in ranks for box in vars(rank)[theirs]])
        assert max(relative_errors(merged, put_together(ours)).values()) <= 1e-8
    _assert_frozen_and_trained(one, case.frozen)
    # The notice is printed once, although the first rank may own none of the unfrozen parameters.
    assert [rank.thawing.count("start with fresh optimizer state") for rank in ranks] == [1, *[0] * (len(ranks) - 1)]


def _assert_frozen_and_trained(one: Trained, frozen: Sequence[str]) -> None:
    before, after = put_together(one.initial), put_together(one.resumed_state)
    for name, value in before.items():
        assert torch.equal(value, after[name]) == _matches(name, frozen), name
        assert (f"optimizer.exp_avg.{name}" in after) != _matches(name, frozen), name


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


# Functions that run in a rank's process.


def _train(argv: Sequence[str], frozen: Sequence[str], folder: str) -> Trained:
    parts: dict[str, Any] = {"forward_step": fp64_forward_step, "model_provider": partial(_frozen_model, frozen)}
    with started_run([*argv, "--save", folder], **parts) as run:
        initial = boxes_of_weights(run)
        reports = [comparable(run_step(run)[0]) for _ in range(STEPS)]
        run.save_checkpoint()
        reports += [comparable(run_step(run)[0]) for _ in range(STEPS)]
        gather_parameters(run)
        state = boxes_of_state(run)
    with started_run([*argv, "--load", folder], **parts) as run:
        resumed = [comparable(run_step(run)[0]) for _ in range(STEPS)]
        gather_parameters(run)
        resumed_state = boxes_of_state(run)
    written = io.StringIO()
    with redirect_stdout(written), started_run([*argv, "--load", folder], **{**parts, "model_provider": fp64_model}):
        pass
    return Trained(initial, reports, resumed, state, resumed_state, written.getvalue())


def _frozen_model(patterns: Sequence[str], pre_process: bool = True, post_process: bool = True, **options: Any) -> Any:
    model: nn.Module = fp64_model(pre_process, post_process, **options)
    for name, param in model.named_parameters():
        if _matches(name, patterns):
            param.requires_grad = False
    return model


@pytest.mark.slow
def test_frozen_experts_of_one_rank_are_saved_beside_the_trained_ones_of_another(tmp_path: Path) -> None:
    flags: Flags = {**TRAINING, **layout(ep=2), "num-layers": 2, "bf16": True}
    argv = command_line({**read_bases()["moe"], **flags})
    [first, second] = run_on_ranks(_train_experts_of_first_rank, 2, argv, str(tmp_path))
    for reports, resumed, _ in (first, second):
        assert resumed == reports[STEPS:]
    assert (first[2], second[2]) == (True, False)


def _train_experts_of_first_rank(argv: Sequence[str], folder: str) -> tuple[list[Any], list[Any], bool]:
    with started_run([*argv, "--save", folder], model_provider=_model_of_first_ranks_experts) as run:
        before = boxes_of_weights(run)
        reports = [comparable(run_step(run)[0]) for _ in range(STEPS)]
        run.save_checkpoint()
        reports += [comparable(run_step(run)[0]) for _ in range(STEPS)]
        pairs = [(a, b) for a, b in zip(before, boxes_of_weights(run)) if ".experts." in a.key]
        trained = any(not torch.equal(a.values, b.values) for a, b in pairs)
    with started_run([*argv, "--load", folder], model_provider=_model_of_first_ranks_experts) as run:
        return reports, [comparable(run_step(run)[0]) for _ in range(STEPS)], trained


def _model_of_first_ranks_experts(pre_process: bool = True, post_process: bool = True) -> nn.Module:
    model = pretrain_gpt.model_provider(pre_process, post_process)
    for param in model.parameters():
        param.requires_grad = not (param_facts(param).is_expert and dist.get_rank() == 1)
    return model
