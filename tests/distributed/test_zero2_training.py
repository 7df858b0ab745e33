"""--optimizer distributed_fused_adam through the training program (TRAPS B25 with ZeRO-2 as a mode; B12, B14, B22).

Every micro-batch is reduced. With one micro-batch, results are bit-identical to adam with --use-distributed-optimizer.
With more, they differ from other modes, but do not depend on overlap and bucket size. test_zero2 covers a single
wrapped module.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.counts import long_count, slow, soak_only
from tests.distributed.layout_runs import (
    BF16,
    EP2,
    FLAGS,
    FP16,
    INTERLEAVED,
    OVERLAPPED,
    RECOMPUTED,
    SHARDED,
    ZERO2,
    Case,
    TrainedVariant,
    check_loads_of_the_other,
    train_variants,
)
from tests.distributed.parity import layout
from tests.distributed.tiny_runs import check_relay
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

STEPS = long_count(3, soak=20)
ALL: Flags = {**ZERO2, **OVERLAPPED}
VARIANTS: list[Flags] = [
    ZERO2,
    {**ALL, "ddp-bucket-size": 1},
    {**ALL, "overlap-param-gather-with-optimizer-step": True, "ddp-bucket-size": 1001},
]
MORE: list[Flags] = [
    {**ZERO2, "ddp-bucket-size": 1001},
    {**ZERO2, "overlap-grad-reduce": True, "ddp-num-buckets": 3},
    {**ALL, "no-align-param-gather": True},
    {**ALL, "ddp-bucket-size": 10**9},
]
ONE_EACH = {
    "dense, 3 ranks, bf16": Case(3, "dense", {**BF16, "global-batch-size": 3}),
    "moe, ep 2": Case(4, "moe", {**EP2, "global-batch-size": 4}),
    "moe, 3 ranks, fp16": Case(3, "moe", {**FP16, "global-batch-size": 3}),
    "tp 2, sp": Case(4, "moe", {**layout(2), "num-query-groups": 2, "global-batch-size": 2}),
    "tp 2, sp, ep 2": Case(4, "moe", {**layout(2, ep=2), "num-query-groups": 2, "global-batch-size": 2}),
    "pp 2, tied": Case(4, "dense", {**layout(pp=2), **BF16, "global-batch-size": 2}),
    "cp 2, recomputed": Case(2, "llama", {**layout(cp=2), **RECOMPUTED, "global-batch-size": 1}),
    "frozen": Case(3, "dense", {**BF16, "global-batch-size": 3}, frozen="embedding."),
    "bf16 gradients, per token": Case(
        2, "llama", {**BF16, "grad-reduce-in-bf16": True, "calculate-per-token-loss": True, "global-batch-size": 2}
    ),
}
SEVERAL = {
    "moe, ep 2": Case(4, "moe", EP2),
    "pp 2, vpp 2, ep 2": Case(4, "moe", {**INTERLEAVED, **BF16, **EP2}),
    "growing batch": Case(3, "dense", {"step-batch-size-schedule": "0:3 96:12 1584:6", "global-batch-size": None}),
    "tp 2, pp 2": Case(4, "llama", {**layout(2, pp=2), "num-query-groups": 2, "global-batch-size": 4}),
}
# Each precision and each kind of layout, with one or two of the variants; `make soak` runs all variants. Omitted cases
# combine the precision of one case with the layout of another.
USUAL = {
    "moe, 3 ranks, fp16": VARIANTS[1:],
    "tp 2, sp, ep 2": VARIANTS[:2],
    "cp 2, recomputed": VARIANTS[::2],
    "pp 2, vpp 2, ep 2": VARIANTS[1:],
    "pp 2, tied": VARIANTS[2:],
    "frozen": VARIANTS[1:2],
    "bf16 gradients, per token": VARIANTS[1:2],
    "growing batch": VARIANTS[:2],
}


def _run_all(case: Case, variants: Sequence[Flags]) -> list[list[TrainedVariant]]:
    """Returns the reports and weight digests of each run on each rank."""
    flags = {**read_bases()[case.base], **FLAGS, **case.flags}
    argvs = [command_line({**flags, **SHARDED}), *(command_line({**flags, **variant}) for variant in variants)]
    return run_on_ranks(train_variants, case.ranks, argvs, case.frozen, STEPS, timeout=60 + 60 * len(argvs))


def _variants(name: str) -> list[Flags]:
    return [*VARIANTS, *MORE] if long_count(0, soak=1) else USUAL[name]


def _assert_same(run: TrainedVariant, reference: TrainedVariant, what: object) -> None:
    for step, expected in zip(run[0], reference[0], strict=True):
        assert step == expected, what
    assert run[1] == reference[1], what


def _chosen(cases: dict[str, Case]) -> list[Any]:
    marks = dict.fromkeys(cases, soak_only) | dict.fromkeys(USUAL, slow) | {"cp 2, recomputed": pytest.param}
    return [marks[name](name) for name in cases]


@pytest.mark.slow
@pytest.mark.parametrize("name", _chosen(ONE_EACH))
def test_b25_one_microbatch_has_the_bits_of_zero1(name: str) -> None:
    variants = _variants(name)
    for rank, (reference, *runs) in enumerate(_run_all(ONE_EACH[name], variants)):
        assert len({step["grad_norm"] for step in reference[0]}) > STEPS // 2
        assert [step["skipped"] for step in reference[0]][:2] == ["fp16" in ONE_EACH[name].flags, False]
        for variant, run in zip(variants, runs, strict=True):
            _assert_same(run, reference, (rank, variant))


@pytest.mark.slow
@pytest.mark.parametrize("name", _chosen(SEVERAL))
def test_b25_several_microbatches_have_the_bits_of_any_overlap_and_bucket_size(name: str) -> None:
    variants = _variants(name)
    tolerance = 0.02 if "bf16" in SEVERAL[name].flags else 1e-3
    for rank, (zero1, first, *runs) in enumerate(_run_all(SEVERAL[name], variants)):
        for variant, run in zip(variants[1:], runs, strict=True):
            _assert_same(run, first, (rank, variant))
        for step, expected in zip(first[0], zero1[0], strict=True):
            assert step["losses"] == pytest.approx(expected["losses"], rel=tolerance)
            assert float(step["grad_norm"]) == pytest.approx(float(expected["grad_norm"]), rel=tolerance)


RELAY: Flags = {**read_bases()["moe"], **FLAGS, **BF16, "train-iters": 6, "global-batch-size": 2}


@pytest.mark.slow
def test_runs_go_on_from_each_others_checkpoints_bit_for_bit(tmp_path: Path) -> None:
    argvs = [command_line({**RELAY, **flags}) for flags in (SHARDED, VARIANTS[0], VARIANTS[2])]
    run_on_ranks(check_relay, 2, argvs, [2, 0, 1], str(tmp_path), timeout=300)


@pytest.mark.slow
def test_b14_any_number_of_ranks_goes_on_from_any_other(tmp_path: Path) -> None:
    argvs = [
        command_line({**RELAY, "global-batch-size": long_count(6, soak=12), **flags})
        for flags in (SHARDED, VARIANTS[2])
    ]
    folders = [str(tmp_path / name) for name in ("zero1", "zero2")]
    check_loads_of_the_other(argvs, folders, (1, 2, 4) if long_count(0, soak=1) else (1,))
