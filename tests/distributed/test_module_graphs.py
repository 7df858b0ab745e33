"""Checks that layer parts run from graphs, between eager parts, are bit-identical to an eager run in every layout.

Tapes stand in for CUDA graphs on the CPU.
"""

from typing import NamedTuple
from unittest.mock import patch

import pytest

from megatron.core.transformer.moe.dispatch_static import padded_rank_rows
from tests.counts import slow, soak_only
from tests.distributed.graph_runs import LOCAL, Trained, train_here
from tests.distributed.stash_runs import ROUTER, stash
from tests.distributed.tiny_runs import OVERLAPPED_SMALL_BUCKETS
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

# The first step runs eagerly, the second is captured, the third is replayed.
RUN: Flags = {"micro-batch-size": 1, "train-iters": 3, "lr-warmup-iters": 0, "eval-interval": 2, "clip-grad": 0.3}
STATIC: Flags = {"moe-expert-rank-capacity-factor": 4}
BORDERS: Flags = {**STATIC, **read_bases()["borders"], "no-create-attention-mask-in-dataloader": True}
EXPERTS: Flags = {**STATIC, "expert-model-parallel-size": 2, "moe-token-dispatcher-type": "allgather"}
SENT: Flags = {"moe-token-dispatcher-type": "alltoall"}
TURNS: Flags = {"overlap-moe-expert-parallel-comm": True, "delay-wgrad-compute": True, "global-batch-size": 6}
# Graphs of single layers support no prefetch from the stash.
PAGES: Flags = {**STATIC, "num-layers": 3, "seq-length": 16, "moe-paged-stash-prefetch-layers": 0}
AGAIN: Flags = {
    "moe-shared-expert-intermediate-size": 32,
    "recompute-granularity": "selective",
    "recompute-modules": ["core_attn", "shared_experts", "layernorm"],
}
RERUN: Flags = {"overflow-policy": "rerun"}
LITTLE: Flags = {"moe-expert-rank-capacity-factor": 1.05}
GROWING: Flags = {"rampup-batch-size": [2, 2, 6], "train-iters": 6}
# Includes a discarded evaluation, and captured and replayed steps after it.
LONG: Flags = {"train-iters": 5, "eval-interval": 3}
STAGES: Flags = {"num-layers": 4, "pipeline-model-parallel-size": 2}


class Case(NamedTuple):
    """One case: ranks, base and further flags, captured modules, and the number of graphs on each rank at the end."""

    ranks: int
    base: str
    flags: Flags
    modules: str
    graphs: list[int]


# Two layers. Each captured part has one pair of graphs per microbatch in flight.
CASES = {
    "dropout": Case(1, "dense", {"bf16": True, "deterministic-mode": None, **read_bases()["dropout"]}, "attn mlp", [8]),
    "fp16": Case(1, "llama", {"fp16": True, "recompute-activations": True}, "attn mlp", [8]),
    "tensors": Case(2, "llama", {"tensor-model-parallel-size": 2, "sequence-parallel": True}, "attn mlp", [8, 8]),
    "chunks": Case(2, "dense", {**STAGES, "num-layers-per-virtual-pipeline-stage": 1}, "attn mlp", [24, 16]),
    "experts over ranks": Case(2, "moe", {**EXPERTS, **OVERLAPPED_SMALL_BUCKETS}, "attn moe", [8, 8]),
    "preprocess": Case(2, "moe", EXPERTS, "moe_router moe_preprocess experts", [8, 8]),
    "preprocess what is sent": Case(2, "moe", {**EXPERTS, **SENT}, "attn moe_router moe_preprocess", [8, 8]),
    # The forward and the backward of two microbatches, each in a lane of its own, replay parts in turns.
    "passes in turns": Case(2, "moe", {**EXPERTS, **SENT, **TURNS}, "attn moe_router moe_preprocess experts", [24, 24]),
    "router of dropless experts": Case(1, "moe", {}, "attn moe_router", [8]),
    # Attention stays eager: document boundaries, and the data that ranks exchange because of them, vary with the batch.
    "documents": Case(1, "moe", BORDERS, "moe", [4]),
    # The stash is part of the graphs. Pages are plentiful, spill to the host, or are dropped; or a step is discarded
    # for lack of rows and of pages, reruns eagerly with more, and is captured again.
    "few pages": Case(1, "moe", {**PAGES, **ROUTER, **stash(0.3, 0.4)}, "attn moe", [12]),
    "pages of stages": Case(2, "moe", {**PAGES, **stash(0.7), **STAGES}, "moe", [8, 4]),
    "pages of a growing batch": Case(1, "moe", {**PAGES, **stash(1.0), **GROWING}, "moe", [6]),
    "parts that run again": Case(
        2, "moe", {**PAGES, **EXPERTS, **OVERLAPPED_SMALL_BUCKETS, **AGAIN, **stash(1.5)}, "attn moe", [12, 12]
    ),
    "rows that grow": Case(2, "moe", {**PAGES, **ROUTER, **EXPERTS, **stash(0.6), **LITTLE, **LONG}, "moe", [6, 6]),
    "pages that grow": Case(2, "moe", {**PAGES, **EXPERTS, **stash(1.05, **RERUN), **LONG}, "moe", [6, 6]),
}
QUICK = ["dropout", "fp16", "router of dropless experts"]
# Each case is part of the case above that its comment names.
REPEATED = {
    "fused gradients": Case(1, "dense", {"deterministic-mode": None}, "attn mlp", [8]),  # dropout
    "growing batch": Case(1, "dense", GROWING, "attn mlp", [8]),  # pages of a growing batch
    "shards": Case(
        3, "dense", {"global-batch-size": 6, **OVERLAPPED_SMALL_BUCKETS}, "attn mlp", [8, 8, 8]
    ),  # experts over ranks
    "stages": Case(2, "dense", STAGES, "attn mlp", [16, 8]),  # chunks
    "experts alone": Case(2, "moe", EXPERTS, "experts", [4, 4]),  # preprocess
    "router": Case(1, "moe", STATIC, "moe_router experts", [8]),  # preprocess
    "experts that are sent to": Case(2, "moe", {**EXPERTS, **SENT}, "moe", [4, 4]),  # experts over ranks
    "pages": Case(1, "moe", {**PAGES, **stash(3.0)}, "experts", [6]),  # few pages
    "documents over ranks": Case(2, "moe", {**BORDERS, "context-parallel-size": 2}, "moe", [4, 4]),  # documents
}


def _both(case: Case) -> tuple[Trained, Trained]:
    flags = {**read_bases()[case.base], **RUN, **case.flags}
    captured = {**LOCAL, "cuda-graph-warmup-steps": 1, **flags, "cuda-graph-modules": case.modules.split()}
    # As on a GPU, where the host cannot read the number of rows.
    with patch("megatron.core.transformer.moe.dispatch_static.rank_row_layout", lambda device: padded_rank_rows):
        return train_here(command_line(flags)), train_here(command_line(captured))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*QUICK, *(slow(name) for name in CASES if name not in QUICK), *map(soak_only, REPEATED)]
)
def test_replayed_parts_have_the_bits_of_eager_ones(name: str) -> None:
    case = (CASES | REPEATED)[name]
    both = run_on_ranks(_both, case.ranks, case)
    assert [captured.num_graphs for _, captured in both] == case.graphs
    for eager, captured in both:
        captured.assert_same(eager, name)
