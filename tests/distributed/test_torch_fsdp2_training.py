"""--use-torch-fsdp2 through the training program: results of plain data parallelism, with updates in backward too.

All modes share checkpoints (TRAPS B30). Every micro-batch is reduced: with one micro-batch, results are bit-identical
to DDP. test_torch_fsdp2 covers a single wrapped module.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

from megatron.core.distributed import TorchFullyShardedDataParallel
from megatron.training.training import evaluate
from tests.counts import long_count, slow, soak_only
from tests.distributed.layout_runs import BF16, EP2, FLAGS, FP16, RECOMPUTED, SHARDED, ZERO2, Case, model_with_frozen
from tests.distributed.parity import Box, boxes_of_state, layout, put_together
from tests.distributed.stash_runs import Trained, argv_of, stash, train_here
from tests.distributed.tiny_runs import check_relay, started_run, train_steps
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

STEPS = long_count(2, soak=20)
FSDP2: Flags = {"use-torch-fsdp2": True}
KEPT: Flags = {**FSDP2, "torch-fsdp2-no-reshard-after-forward": True}
# Gradients are kept for the exact norm, so that clipping is bit-identical to the step after backward.
EXACT: Flags = {"optimizer-in-backward": True, "optimizer-in-backward-clip": "exact"}
IN_BACKWARD: Flags = {**FSDP2, **EXACT}
SELECTIVE: Flags = {"recompute-granularity": "selective", "recompute-modules": ["layernorm", "core_attn"]}
CASES = {
    "dense, 3 ranks, bf16": Case(3, "dense", {**BF16, "global-batch-size": 3}),
    "moe, ep 2, edp 2": Case(4, "moe", {**EP2, "global-batch-size": 4}),
    "moe, ep 3, bf16": Case(
        3, "moe", {**BF16, "expert-model-parallel-size": 3, "num-experts": 6, "global-batch-size": 3}
    ),
    "moe, fp16": Case(3, "moe", {**FP16, "global-batch-size": 3}),
    "moe, tp 2, sp, ep 2, edp 2": Case(4, "moe", {**layout(2, ep=2), "num-query-groups": 2, "global-batch-size": 2}),
    "tp 2, sp": Case(4, "moe", {**layout(2), "num-query-groups": 2, "global-batch-size": 2}),
    "cp 2, recomputed": Case(2, "llama", {**layout(cp=2), **RECOMPUTED, "global-batch-size": 1}),
    "moe, parts recomputed": Case(2, "moe", {**SELECTIVE, "global-batch-size": 2}),
    "frozen": Case(2, "dense", {**BF16, "global-batch-size": 2}, frozen="embedding."),
    "bf16 gradients, per token": Case(
        2, "llama", {**BF16, "grad-reduce-in-bf16": True, "calculate-per-token-loss": True, "global-batch-size": 2}
    ),
    "one rank": Case(1, "dense", {**BF16, "global-batch-size": 1}),
}
MODES = (FSDP2, KEPT, IN_BACKWARD)
# Each case with some of the modes; `make soak` runs the other CASES, and all modes of these.
# test_several_microbatches_train_as_ddp_does covers experts over all ranks; test_torch_fsdp2_in_backward covers loss
# scales and one rank.
ALWAYS: dict[str, tuple[Flags, ...]] = {
    "dense, 3 ranks, bf16": MODES,
    "moe, tp 2, sp, ep 2, edp 2": (KEPT, IN_BACKWARD),
    "cp 2, recomputed": (IN_BACKWARD,),
    "moe, parts recomputed": (FSDP2,),
    "frozen": (IN_BACKWARD,),
    "bf16 gradients, per token": (KEPT,),
}
Run = tuple[list[dict[str, Any]], list[Box]]


def _marked(name: str) -> str | ParameterSet:
    if name in ("dense, 3 ranks, bf16", "frozen"):
        return name
    return slow(name) if name in ALWAYS else soak_only(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [_marked(name) for name in CASES])
def test_one_microbatch_has_the_bits_of_ddp(name: str) -> None:
    case = CASES[name]
    flags = {**read_bases()[case.base], **FLAGS, **case.flags}
    modes = MODES if long_count(0, soak=1) else ALWAYS[name]
    argvs = [command_line({**flags, **mode}) for mode in ({}, *modes)]
    by_rank = run_on_ranks(_train_each, case.ranks, argvs, case.frozen, timeout=240)
    reference, *others = ([of_rank[mode] for of_rank in by_rank] for mode in range(len(argvs)))
    assert len({step["grad_norm"] for step in reference[0][0]}) > STEPS // 2
    for runs in others:
        assert [reports for reports, _ in runs] == [reports for reports, _ in reference]
        _assert_equal(_whole(runs), _whole(reference))


# Discarded steps, some of which rerun, with fixed-size buffers and expert parallelism; test_paged_stash_voids covers
# overflow policies in more detail.
SMALL, AGAIN = {**stash(0.05), **EP2}, stash(0.6, overflow_policy="rerun")
STASHED = [
    (SMALL, [FSDP2, IN_BACKWARD]),
    # test_paged_stash_voids.py and test_step_runner.py cover reruns; test_several_microbatches_train_as_ddp_does covers
    # experts without pages.
    soak_only(AGAIN, [FSDP2, IN_BACKWARD]),
    soak_only({}, [FSDP2, IN_BACKWARD]),
]


@pytest.mark.slow
@pytest.mark.parametrize("flags, modes", STASHED)
def test_experts_of_a_fixed_size_and_their_stash_have_the_bits_of_ddp(flags: Flags, modes: list[Flags]) -> None:
    around = {"num-layers": 3, "global-batch-size": 2, "train-iters": 3}
    argvs = [argv_of(flags, around, mode) for mode in ({}, *modes)]
    for reference, *others in run_on_ranks(_train_stashed, 2, argvs, timeout=240):
        assert len({step["grad_norm"] for step in reference.steps}) == 3
        assert any(pages.voids for pages in reference.pages) == bool(flags)
        for other in others:
            assert (other.steps, other.pages) == (reference.steps, reference.pages)


def _train_stashed(argvs: Sequence[Sequence[str]]) -> list[Trained]:
    return [train_here(argv) for argv in argvs]


def _train_each(argvs: Sequence[Sequence[str]], frozen: str | None) -> list[Run]:
    return [_train(argv, frozen) for argv in argvs]


def _train(argv: Sequence[str], frozen: str | None) -> Run:
    with started_run(argv, model_provider=partial(model_with_frozen, frozen)) as run:
        assert isinstance(run.model[0], TorchFullyShardedDataParallel) == ("--use-torch-fsdp2" in argv)
        return train_steps(run, STEPS), boxes_of_state(run)


def _whole(runs: Sequence[Run]) -> dict[str, torch.Tensor]:
    return put_together([box for _, boxes in runs for box in boxes])


def _assert_equal(tensors: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == reference.keys()
    wrong = [name for name, value in tensors.items() if not torch.equal(value, reference[name])]
    assert not wrong
    assert {name: value.dtype for name, value in tensors.items()} == {n: v.dtype for n, v in reference.items()}


@pytest.mark.slow
@pytest.mark.parametrize("precision", [slow(BF16), slow({})], ids=["bf16", "fp32"])
def test_several_microbatches_train_as_ddp_does(precision: Flags) -> None:
    flags = {**read_bases()["moe"], **FLAGS, **precision, **EP2, "global-batch-size": 4}
    argvs = [command_line({**flags, **mode}) for mode in ({}, FSDP2, KEPT, IN_BACKWARD)]
    for (reference, _), (first, _), (kept, _), (updated, _) in run_on_ranks(_train_each, 2, argvs, "none", timeout=240):
        assert kept == updated == first
        for step, expected in zip(first, reference, strict=True):
            assert step["losses"] == pytest.approx(expected["losses"], rel=0.02 if precision else 1e-3)
            assert float(step["grad_norm"]) == pytest.approx(float(expected["grad_norm"]), rel=0.02)


RELAY: Flags = {**read_bases()["moe"], **FLAGS, **BF16, "train-iters": 8, "global-batch-size": 3}


# The tests below, on other numbers of ranks, cover saving with plain shards and loading from a different mode.
LEGS = [SHARDED, {**KEPT, **EXACT}, SHARDED]
SCALED: Flags = {**FP16, "bf16": None}
ALL_LEGS = [SHARDED, FSDP2, {**SHARDED, **EXACT}, IN_BACKWARD, {}, {**KEPT, **EXACT}, ZERO2, FSDP2, SHARDED]


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision, modes",
    [
        slow(BF16, LEGS),
        slow(SCALED, LEGS),
        # LEGS contains one mode of FSDP2. test_zero2_training.py resumes SHARDED and ZERO2 from each other, and
        # test_in_backward_training.py updates in backward and after it.
        *(soak_only(one, ALL_LEGS) for one in (BF16, {"bf16": None}, SCALED)),
    ],
    ids=["bf16", "fp16", "all modes, bf16", "all modes, fp32", "all modes, fp16"],
)
def test_b30_runs_go_on_from_each_others_checkpoints_bit_for_bit(
    precision: Flags, modes: list[Flags], tmp_path: Path
) -> None:
    argvs = [command_line({**RELAY, "train-iters": 2 * len(modes), **precision, **mode}) for mode in modes]
    run_on_ranks(check_relay, 3, argvs, range(len(argvs)), str(tmp_path), timeout=300)


def _save(argv: Sequence[str]) -> list[Box]:
    with started_run(argv) as run:
        train_steps(run, 2)
        run.save_checkpoint()
        return boxes_of_state(run)


def _load(argvs: Sequence[Sequence[str]]) -> list[list[Box]]:
    loaded = []
    for argv in argvs:
        with started_run(argv) as run:
            loaded.append(boxes_of_state(run))
    return loaded


@pytest.mark.slow
def test_any_number_of_ranks_loads_what_any_other_saved(tmp_path: Path) -> None:
    flags = {**RELAY, "global-batch-size": 6}
    saved = run_on_ranks(_save, 3, command_line({**flags, **FSDP2, "save": str(tmp_path)}))
    expected = put_together([box for boxes in saved for box in boxes])
    argvs = [
        command_line({**flags, **EP2, **mode, "global-batch-size": 6, "load": str(tmp_path)})
        for mode in (FSDP2, SHARDED)
    ]
    by_rank = run_on_ranks(_load, 2, argvs)
    for mode in range(len(argvs)):
        _assert_equal(put_together([box for loaded in by_rank for box in loaded[mode]]), expected)


@pytest.mark.slow
def test_weights_alone_are_taken_over_into_the_shards(tmp_path: Path) -> None:
    flags = {**RELAY, "global-batch-size": 6}
    run_on_ranks(_save, 2, command_line({**flags, "save": str(tmp_path)}))
    argvs = [command_line({**flags, **mode, "load": str(tmp_path), "finetune": True}) for mode in ({}, FSDP2)]
    for plain, sharded in run_on_ranks(_finetune, 2, argvs):
        assert plain == sharded


def _finetune(argvs: Sequence[Sequence[str]]) -> list[tuple[float, list[dict[str, Any]]]]:
    results = []
    for argv in argvs:
        with started_run([*argv, "--eval-iters", "1"]) as run:
            loss = evaluate(run, run.valid_sets[0])["lm loss"]
            # One micro-batch would suffice to detect wrong weights, but not wrong gradients.
            results.append((loss, [run_losses["losses"] for run_losses in train_steps(run, 1)]))
    return results
