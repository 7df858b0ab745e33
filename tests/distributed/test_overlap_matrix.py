"""TRAPS B7, B19 and B25 through the training program: how gradients and parameters are bucketed, sharded, reduced and
gathered changes no bit of a deterministic run. What a single wrapped module does is in test_distributed_data_parallel.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import pretrain_gpt
from megatron.core.optimizer import DistributedOptimizer
from megatron.training.training import train_step
from tests.counts import long_count, slow
from tests.distributed.parity import Box, boxes_of_weights, layout
from tests.distributed.tiny_runs import comparable, gather_parameters, started_run
from tests.functional_tests.case import Flags, command_line, read_bases
from tests.harness import run_on_ranks

STEPS = long_count(8, soak=20)
PIPELINED_STEPS = long_count(4, soak=20)  # each takes four times as long as others do
CLIP = 0.3  # below every norm, so that a wrong one shows in the weights
FLAGS: Flags = {
    "init-method-std": 0.1,
    "seq-length": 16,
    "micro-batch-size": 1,
    "train-iters": STEPS,
    "lr-warmup-iters": 0,
    "eval-iters": 0,
    "clip-grad": CLIP,
    "weight-decay": 0.1,
    "log-params-norm": True,
    "log-num-zeros-in-grad": True,
}
SHARDED: Flags = {"use-distributed-optimizer": True}
OVERLAPPED: Flags = {**SHARDED, "overlap-grad-reduce": True, "overlap-param-gather": True}
MODES: list[Flags] = [
    {},
    OVERLAPPED,
    {"overlap-grad-reduce": True},
    {**OVERLAPPED, "overlap-param-gather-with-optimizer-step": True},
    SHARDED,
    {**SHARDED, "overlap-grad-reduce": True},
]
# The default is 40 million elements: more than there are. So is the last, which is the default without overlap.
BUCKET_SIZES: list[Flags] = [{"ddp-bucket-size": size} for size in (1, 1001)] + [{}, {"ddp-bucket-size": 10**9}]
MATRIX = [{**mode, **size} for mode, size in product(MODES, BUCKET_SIZES)]
# Each mode once, with bucket sizes in turn; the whole matrix in the long run.
SOME = [{**mode, **BUCKET_SIZES[(index + 2) % 4]} for index, mode in enumerate(MODES)]


@dataclass(frozen=True)
class Case:
    """Runs that differ in what must not matter. frozen: the start of names that are not trained."""

    ranks: int
    base: str
    flags: Flags
    variants: Sequence[Flags] = ()
    frozen: str = "nothing"
    steps: int = STEPS


BF16: Flags = {"bf16": True}
UNALIGNED: list[Flags] = [{**mode, "no-align-grad-reduce": True} for mode in MODES[1:4]]
UNALIGNED += [{**mode, "no-align-param-gather": True} for mode in MODES[1:4:2]]
INTERLEAVED: Flags = {**layout(pp=2, vpp=2), "num-layers": 4, "global-batch-size": 8}
EP2: Flags = {"expert-model-parallel-size": 2, "global-batch-size": 8}
CASES = {
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
    "pp 2, vpp 2, ep 2": Case(4, "moe", {**INTERLEAVED, **BF16, **EP2}, UNALIGNED, steps=PIPELINED_STEPS),
    "pp 2, tied, mtp": Case(4, "dense", {**layout(pp=2), "global-batch-size": 8, "mtp-num-layers": 2}),
    "pp 2, vpp 2, ep 2, mtp": Case(
        4, "moe", {**INTERLEAVED, **BF16, **EP2, "mtp-num-layers": 1}, steps=PIPELINED_STEPS
    ),
    "tp 2, sp": Case(4, "moe", {**layout(2), "num-query-groups": 2, "global-batch-size": 4}),
    # 1, 4 and 2 microbatches a step.
    "microbatches": Case(3, "moe", {"step-batch-size-schedule": "0:3 9:12 45:6", "global-batch-size": None}),
    "frozen": Case(3, "dense", {**BF16, "global-batch-size": 6}, frozen="embedding."),
}
# Each kind of model, layout and dtype once; all of them in the long run.
ALWAYS = ("dense, 3 ranks, bf16", "moe, ep 2, fp32", "pp 2, vpp 2, ep 2", "microbatches", "frozen")
CHOSEN = tuple(CASES) if long_count(0, soak=1) else ALWAYS


@pytest.mark.parametrize("name", [name if name in ALWAYS[:2] else slow(name) for name in CHOSEN])
def test_b25_buckets_shards_and_overlap_change_no_bit(name: str) -> None:
    case = CASES[name]
    variants = [*(MATRIX if long_count(0, soak=1) else SOME), *case.variants]
    argvs = [command_line({**read_bases()[case.base], **FLAGS, **case.flags, **variant}) for variant in variants]
    by_rank = run_on_ranks(_train_all, case.ranks, argvs, case.frozen, case.steps, timeout=60 + 60 * len(argvs))
    for rank, (expected, *others) in enumerate(by_rank):
        assert len({step["grad_norm"] for step in expected[0]}) == case.steps
        assert all(float(step["grad_norm"]) > CLIP for step in expected[0])
        for variant, run in zip(variants[1:], others, strict=True):
            for step, reference in zip(run[0], expected[0], strict=True):
                assert step == reference, f"rank {rank}, {variant}"
            different = [key for key, digest in expected[1].items() if run[1][key] != digest]
            assert not different, f"rank {rank}, {variant}: {different}"


def _train_all(
    argvs: Sequence[Sequence[str]], frozen: str, steps: int
) -> list[tuple[list[dict[str, Any]], dict[str, str]]]:
    """Reports of all steps, and digests of the weights at the end, of each run in turn."""
    return [_train(argv, frozen, steps) for argv in argvs]


def _train(argv: Sequence[str], frozen: str, steps: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    with started_run(argv, model_provider=partial(_model, frozen)) as run:
        assert isinstance(run.optimizer, DistributedOptimizer) == ("--use-distributed-optimizer" in argv)
        reports = [comparable(run.measured(train_step(run)[0])) for _ in range(steps)]
        gather_parameters(run)
        return reports, {f"{box.key} {box.offset}": _digest(box) for box in boxes_of_weights(run)}


def _model(frozen: str, pre_process: bool = True, post_process: bool = True, **options: Any) -> nn.Module:
    model = pretrain_gpt.model_provider(pre_process, post_process, **options)
    for name, param in model.named_parameters():
        param.requires_grad = not name.startswith(frozen)
    return model


def _digest(box: Box) -> str:
    return hashlib.sha256(box.values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
