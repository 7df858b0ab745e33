"""Checks that bf16 and fp16 runs follow the fp32 run and accumulate updates in fp32 master weights."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.dist_checkpointing import model_logical_pieces
from megatron.training.callbacks import StepReport
from megatron.training.run import TrainingRun
from megatron.training.training import run_step
from tests.counts import long_count
from tests.distributed.parity import layout
from tests.distributed.tiny_runs import OVERLAPPED_SMALL_BUCKETS, comparable, started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

STEPS = long_count(6, soak=20)
FLAGS: Flags = {"train-iters": 20, "init-method-std": 0.1, "lr-warmup-iters": 0, "lr": 3e-3, "eval-iters": 0}
PRECISIONS: dict[str, Flags] = {"bf16": {"bf16": True}, "fp16": {"fp16": True, "initial-loss-scale": 2.0**12}}
# Relative bounds on losses and gradient norms: three to five times the errors measured over 20 steps (bf16: 2e-3 and
# 2e-2, fp16: 1e-3 and 7e-3). The errors are a few half-precision roundoffs (2^-9 and 2^-12) and, in the model with
# experts, tokens near a tie that are routed differently. A layout differs from one process of the same precision by up
# to 1.5e-3 and 1.1e-2 in bf16, 1.4e-3 and 7e-3 in fp16.
LOSS_BOUND = {"bf16": 1e-2, "fp16": 3e-3}
NORM_BOUND = {"bf16": 6e-2, "fp16": 3e-2}


SMALL: Flags = {"micro-batch-size": 1}  # on 4 ranks
STEPS_OF_LAYOUTS = long_count(3, soak=8)
LAYOUTS = [layout(2), layout(pp=2), layout(cp=2), layout(ep=2), layout(2, pp=2, ep=2)]
# test_parity_matrix compares whole layouts in fp64; here each kind of parallelism runs in one of the precisions.
LAYOUTS_OF = {"bf16": LAYOUTS[4:], "fp16": [layout(cp=2, ep=2)]}


@dataclass
class Outcome:
    """Results of one run.

    initial, final: the model's weights before and after the run, in the model's dtype. masters: fp32 master weights by
    the same keys, empty in an fp32 run.
    """

    reports: list[StepReport]
    initial: dict[str, Tensor]
    final: dict[str, Tensor]
    masters: dict[str, Tensor]


@pytest.mark.slow
@pytest.mark.parametrize("base", ["moe", "dense"])
def test_half_precision_follows_fp32(base: str) -> None:
    argvs = [_argv(base, flags) for flags in ({}, *PRECISIONS.values())]
    full, *halves = run_on_ranks(_runs, 2, argvs)[0]
    for precision, half in zip(PRECISIONS, halves):
        _assert_close(half.reports, full.reports, precision)


def _assert_close(reports: list[StepReport], references: list[StepReport], precision: str) -> None:
    for step, (ours, reference) in enumerate(zip(reports, references, strict=True)):
        assert not ours.skipped
        loss, norm = reference.losses["lm loss"], reference.grad_norm
        assert ours.losses["lm loss"] == pytest.approx(loss, rel=LOSS_BOUND[precision]), f"{precision}, step {step}"
        assert ours.grad_norm == pytest.approx(norm, rel=NORM_BOUND[precision]), f"{precision}, step {step}"


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_layout_in_half_precision_follows_one_process(precision: str) -> None:
    [[alone]] = run_on_ranks(_runs, 1, [_argv("moe", {**SMALL, **PRECISIONS[precision]})], STEPS_OF_LAYOUTS)
    layouts = LAYOUTS_OF[precision] + (LAYOUTS if long_count(0, soak=1) else [])
    argvs = [_argv("moe", {**SMALL, **PRECISIONS[precision], **sizes}) for sizes in layouts]
    ranks = run_on_ranks(_runs, 4, argvs, STEPS_OF_LAYOUTS)
    for index, sizes in enumerate(layouts):
        reports = [[comparable(report) for report in rank[index].reports] for rank in ranks]
        assert all(of_rank == reports[0] for of_rank in reports), sizes
        _assert_close(ranks[0][index].reports, alone.reports, precision)


@pytest.mark.slow
def test_a_residual_stream_in_fp32_goes_through_all_layouts() -> None:
    flags: Flags = {**SMALL, **PRECISIONS["bf16"], "fp32-residual-connection": True}
    layouts = [layout(2), layout(pp=2)]
    argvs = [_argv("dense", {**flags, "num-layers": 4, **sizes}) for sizes in layouts]
    [[alone]] = run_on_ranks(_runs, 1, [_argv("dense", {**flags, "num-layers": 4})], STEPS_OF_LAYOUTS)
    for rank in run_on_ranks(_runs, 2, argvs, STEPS_OF_LAYOUTS):
        for sizes, run in zip(layouts, rank, strict=True):
            _assert_close(run.reports, alone.reports, "bf16")
            if sizes["pipeline-model-parallel-size"] == 2:
                # Pipeline stages send activations without loss of precision.
                assert run.reports[0].losses == alone.reports[0].losses


@pytest.mark.slow
def test_b22_an_overflow_of_one_stage_or_expert_rank_skips_the_step_on_all() -> None:
    flags: Flags = {**SMALL, **PRECISIONS["fp16"], "loss-scale-window": 2, "hysteresis": 1}
    expected = [(False, 4096.0), (True, 4096.0), (False, 2048.0), (False, 2048.0), (False, 4096.0)]
    in_step: Flags = {**OVERLAPPED_SMALL_BUCKETS, "overlap-param-gather-with-optimizer-step": True}
    layouts = [LAYOUTS[4], {**layout(pp=2), **in_step}, {**layout(cp=2, ep=2), **OVERLAPPED_SMALL_BUCKETS}]
    if long_count(0, soak=1):
        layouts += [
            *LAYOUTS[:4],
            *({**sizes, **mode} for sizes, mode in zip(LAYOUTS[:4], [OVERLAPPED_SMALL_BUCKETS, in_step] * 2)),
        ]
    for rank in run_on_ranks(_overflowing_runs, 4, [_argv("moe", {**flags, **sizes}) for sizes in layouts]):
        for sizes, reports in zip(layouts, rank, strict=True):
            assert [(report.skipped, report.loss_scale) for report in reports] == expected, sizes


@pytest.mark.slow
def test_b19_logged_norms_are_those_of_the_masters_and_change_nothing() -> None:
    logs: Flags = {"log-params-norm": True, "log-num-zeros-in-grad": True}
    argvs = [_argv("dense", {**PRECISIONS["bf16"], "global-batch-size": 6, **flags}) for flags in ({}, logs)]
    for plain, logged in run_on_ranks(_runs, 3, argvs, 3):
        for ours, theirs in zip(plain.reports, logged.reports, strict=True):
            assert comparable(theirs) == {
                **comparable(ours),
                "params_norm": theirs.params_norm,
                "num_zeros": theirs.num_zeros,
            }
        assert all(torch.equal(plain.masters[key], master) for key, master in logged.masters.items())
        norms = torch.stack([torch.linalg.vector_norm(master.double()) for master in logged.masters.values()])
        assert logged.reports[-1].params_norm == pytest.approx(torch.linalg.vector_norm(norms).item(), rel=1.2e-7)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_updates_too_small_for_half_precision_add_up_in_fp32_masters(precision: str) -> None:
    # Adam moves a weight by about 1e-5 a step, which half precision cannot represent next to a weight of 1.
    small: Flags = {"lr": 1e-5, "min-lr": 1e-5}
    argvs = [_argv("dense", {**small, **flags}) for flags in ({}, PRECISIONS[precision])]
    full, half = run_on_ranks(_runs, 2, argvs)[0]
    assert half.masters.keys() == full.final.keys() == half.final.keys()
    for key, master in half.masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(master.to(half.final[key].dtype), half.final[key]), key
    for key in (key for key in full.final if "layernorm.weight" in key):
        assert torch.equal(half.final[key], half.initial[key]), f"{key} moved: masters are not tested"
        learned, wanted = half.masters[key] - 1, full.final[key] - 1
        error = torch.linalg.vector_norm(learned - wanted) / torch.linalg.vector_norm(wanted)
        # Measured: 0.03 in bf16. Adam's updates follow the sign of the gradient, which is noise where gradients are
        # tiny.
        assert error < 0.1, key


def _argv(base: str, flags: Flags) -> list[str]:
    return command_line({**read_bases()[base], **FLAGS, **flags})


def _runs(argvs: list[list[str]], steps: int = STEPS) -> list[Outcome]:
    return [_run(argv, steps) for argv in argvs]


def _run(argv: list[str], steps: int) -> Outcome:
    with started_run(argv) as run:
        initial = _weights(run)
        reports = [run.measured(run_step(run)[0]) for _ in range(steps)]
        return Outcome(reports, initial, _weights(run), _masters(run))


def _overflowing_runs(argvs: list[list[str]]) -> list[list[StepReport]]:
    """Runs five steps. In the second, only the last rank has an infinite gradient, of an expert if the rank has any."""
    return [_overflowing_run(argv) for argv in argvs]


def _overflowing_run(argv: list[str]) -> list[StepReport]:
    reports: list[StepReport] = []
    with started_run(argv) as run:
        named = [item for item in run.model[0].named_parameters() if "embedding" not in item[0]]
        _, weight = max(named, key=lambda item: "experts" in item[0])

        def overflow(grad: Tensor) -> Tensor | None:
            is_bad = len(reports) == 1 and dist.get_rank() == dist.get_world_size() - 1
            return torch.full_like(grad, math.inf) if is_bad else None

        # Where autograd produces the gradient, as in a real overflow: before any reduction.
        weight.register_hook(overflow)
        for _ in range(5):
            reports.append(run_step(run)[0])
    return reports


def _weights(run: TrainingRun) -> dict[str, Tensor]:
    """Copies the model's weights, by checkpoint key."""
    pieces = model_logical_pieces(run.model[0])
    named = {name.replace("module.", ""): parameter.detach() for name, parameter in run.model[0].named_parameters()}
    return {piece.key: piece.view_of(named[name]).clone() for name in named for piece in pieces[name]}


def _masters(run: TrainingRun) -> dict[str, Tensor]:
    assert run.optimizer is not None
    prefix = "optimizer.fp32_param."
    tensors = run.optimizer.sharded_state(model_logical_pieces(run.model[0]))
    return {t.key.removeprefix(prefix): t.data.clone() for t in tensors if t.key.startswith(prefix)}
