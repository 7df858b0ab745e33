"""TRAPS B7, B19 and B25 through the training program.

The choice of buckets, sharding, reduction and gathering leaves a deterministic run bit-identical.
test_distributed_data_parallel covers a single wrapped module.
"""

from collections.abc import Sequence
from itertools import product

import pytest

from tests.counts import long_count, slow
from tests.distributed.layout_runs import BF16, CLIP, EP2, FLAGS, INTERLEAVED, MODES, Case, train_variants
from tests.distributed.parity import layout
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

STEPS = long_count(3, soak=20)
# The default, 40 million elements, and the last size exceed the model. Without overlap, buckets are unlimited by
# default.
BUCKET_SIZES: list[Flags] = [{"ddp-bucket-size": size} for size in (1, 1001)] + [{}, {"ddp-bucket-size": 10**9}]
MATRIX = [{**mode, **size} for mode, size in product(MODES, BUCKET_SIZES)]
UNALIGNED: list[Flags] = [{**mode, "no-align-grad-reduce": True} for mode in MODES[1:4]]
UNALIGNED += [{**mode, "no-align-param-gather": True} for mode in MODES[1:4:2]]
# Together, the cases cover every mode and every bucket size, aligned and unaligned.
ALWAYS = {
    "frozen": Case(
        3,
        "dense",
        {**BF16, "global-batch-size": 6},
        [
            {**MODES[1], "ddp-bucket-size": 1001},
            {**MODES[2], "ddp-bucket-size": 10**9},
            {**MODES[4], "ddp-bucket-size": 1},
        ],
        frozen="embedding.",
    ),
    # 1, 4 and 2 microbatches per step.
    "microbatches": Case(
        3,
        "moe",
        {"step-batch-size-schedule": "0:3 48:12 240:6", "global-batch-size": None},
        [{**MODES[3], "ddp-bucket-size": 1}, MODES[1], {**MODES[5], "ddp-bucket-size": 1001}],
    ),
    "pp 2, vpp 2, ep 2": Case(
        4,
        "moe",
        {**INTERLEAVED, **BF16, **EP2},
        [
            {**MODES[3], "ddp-bucket-size": 1001},
            {**UNALIGNED[0], "ddp-bucket-size": 1},
            {**UNALIGNED[1], "ddp-bucket-size": 1001},
            UNALIGNED[4],
        ],
    ),
}
# Cases for `make soak`, which run the whole matrix.
SOAK = {
    "dense, 3 ranks, bf16": Case(3, "dense", {**BF16, "global-batch-size": 6}),
    "dense, 3 ranks, fp32": Case(3, "dense", {"global-batch-size": 6}),
    "dense, 4 ranks, bf16": Case(4, "dense", {**BF16, "global-batch-size": 8}),
    "dense, 4 ranks, fp32": Case(4, "dense", {"global-batch-size": 8}),
    "moe, 3 ranks, bf16": Case(3, "moe", {**BF16, "global-batch-size": 3}),
    "moe, 3 ranks, fp32": Case(3, "moe", {"global-batch-size": 3}),
    "moe, 4 ranks, bf16": Case(4, "moe", {**BF16, "global-batch-size": 4}),
    "moe, 4 ranks, fp32": Case(4, "moe", {"global-batch-size": 4}),
    "moe, ep 2, bf16": Case(4, "moe", {**EP2, **BF16}),
    "moe, ep 2, fp32": Case(4, "moe", EP2),
    "pp 2, tied": Case(4, "dense", {**layout(pp=2), "global-batch-size": 8}),
    "pp 2, vpp 2, tied": Case(4, "dense", INTERLEAVED, UNALIGNED),
    "pp 2, tied, mtp": Case(4, "dense", {**layout(pp=2), "global-batch-size": 8, "mtp-num-layers": 2}),
    "pp 2, vpp 2, ep 2, mtp": Case(4, "moe", {**INTERLEAVED, **BF16, **EP2, "mtp-num-layers": 1}),
    "tp 2, sp": Case(4, "moe", {**layout(2), "num-query-groups": 2, "global-batch-size": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["microbatches", slow("frozen"), slow("pp 2, vpp 2, ep 2")])
def test_b25_buckets_shards_and_overlap_change_no_bit(name: str) -> None:
    case = ALWAYS[name]
    _assert_variants_train_identically(case, [*(MATRIX[1:] if long_count(0, soak=1) else []), *case.variants])


# The test above covers frozen weights, microbatches, stages and split experts; test_zero2_training.py covers tied
# tables, split tensors, fp16 and bf16. Multi-token prediction adds modules, but no other kind of collective.
@pytest.mark.soak
@pytest.mark.parametrize("name", SOAK)
def test_b25_the_whole_matrix_changes_no_bit_in_more_layouts_and_dtypes(name: str) -> None:
    _assert_variants_train_identically(SOAK[name], [*MATRIX[1:], *SOAK[name].variants])


def _assert_variants_train_identically(case: Case, variants: Sequence[Flags]) -> None:
    """Compares with the plain run, which is neither sharded nor overlapped and uses one bucket."""
    flags = {**read_bases()[case.base], **FLAGS, **case.flags}
    argvs = [command_line({**flags, **variant}) for variant in [{}, *variants]]
    by_rank = run_on_ranks(train_variants, case.ranks, argvs, case.frozen, STEPS, timeout=60 + 60 * len(argvs))
    for rank, (expected, *others) in enumerate(by_rank):
        assert len({step["grad_norm"] for step in expected[0]}) == STEPS
        assert all(float(step["grad_norm"]) > CLIP for step in expected[0])
        for variant, run in zip(variants, others, strict=True):
            for step, reference in zip(run[0], expected[0], strict=True):
                assert step == reference, f"rank {rank}, {variant}"
            different = [key for key, digest in expected[1].items() if run[1][key] != digest]
            assert not different, f"rank {rank}, {variant}: {different}"
