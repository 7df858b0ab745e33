"""Runs of the training program under layouts and data-parallel modes that must train identically. Holds no tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import pretrain_gpt
from megatron.core.optimizer import DistributedOptimizer
from megatron.training.training import run_step
from tests.counts import long_count
from tests.distributed.parity import Box, boxes_of_state, boxes_of_weights, layout, put_together
from tests.distributed.tiny_runs import comparable, digest_of, gather_parameters, started_run, train_steps
from tests.functional_tests.case import Flags
from tests.harness import run_on_ranks

CLIP = 0.3  # below every gradient norm, so that a wrong norm changes the weights
FLAGS: Flags = {
    "init-method-std": 0.1,
    "seq-length": 16,
    "micro-batch-size": 1,
    "train-iters": long_count(8, soak=20),
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
BF16: Flags = {"bf16": True}
INTERLEAVED: Flags = {**layout(pp=2, vpp=2), "num-layers": 4, "global-batch-size": 8}
EP2: Flags = {"expert-model-parallel-size": 2, "global-batch-size": 8}
ZERO2: Flags = {**SHARDED, "optimizer": "distributed_fused_adam"}
# The first step overflows.
FP16: Flags = {"fp16": True, "initial-loss-scale": 2.0**18, "hysteresis": 1, "loss-scale-window": 2}
RECOMPUTED: Flags = {
    "recompute-granularity": "full",
    "recompute-method": "uniform",
    "recompute-num-layers": 1,
    "hidden-dropout": 0.1,
}


@dataclass(frozen=True)
class Case:
    """Runs whose variants must train identically.

    frozen: name prefix of the parameters to freeze; None freezes nothing.
    """

    ranks: int
    base: str
    flags: Flags
    variants: Sequence[Flags] = ()
    frozen: str | None = None


# The reports of a run's steps, and digests of its final weights.
TrainedVariant = tuple[list[dict[str, Any]], dict[str, str]]


def train_variants(argvs: Sequence[Sequence[str]], frozen: str | None, steps: int) -> list[TrainedVariant]:
    """Trains each command line in turn on this rank. frozen: see Case."""
    return [_train_variant(argv, frozen, steps) for argv in argvs]


def _train_variant(argv: Sequence[str], frozen: str | None, steps: int) -> TrainedVariant:
    with started_run(argv, model_provider=partial(model_with_frozen, frozen)) as run:
        assert isinstance(run.optimizer, DistributedOptimizer) == ("--use-distributed-optimizer" in argv)
        reports = [comparable(run.measured(run_step(run)[0])) for _ in range(steps)]
        gather_parameters(run)
        return reports, {f"{box.key} {box.offset}": digest_of(box.values) for box in boxes_of_weights(run)}


def model_with_frozen(
    frozen: str | None, pre_process: bool = True, post_process: bool = True, **options: Any
) -> nn.Module:
    """Builds the model of the flags and freezes parameters whose names begin with `frozen`; None freezes none."""
    model = pretrain_gpt.model_provider(pre_process, post_process, **options)
    for name, param in model.named_parameters():
        param.requires_grad = frozen is None or not name.startswith(frozen)
    return model


def save_after_steps(argv: Sequence[str], folder: str) -> list[Box]:
    """Trains two steps, saves a checkpoint, and returns this rank's part of the saved state."""
    with started_run([*argv, "--save", folder]) as run:
        train_steps(run, 2)
        run.save_checkpoint()
        return boxes_of_state(run)


def load_and_step(argvs: Sequence[Sequence[str]], folders: Sequence[str]) -> list[tuple[list[Box], dict[str, Any]]]:
    """Loads each folder and trains one step; returns this rank's part of the loaded state and the step's report."""
    results = []
    for argv, folder in zip(argvs, folders, strict=True):
        with started_run([*argv, "--load", folder]) as run:
            results.append((boxes_of_state(run), train_steps(run, 1)[0]))
    return results


def check_loads_of_the_other(argvs: Sequence[Sequence[str]], folders: Sequence[str], sizes: Sequence[int]) -> None:
    """Asserts that each of two command lines loads the other's checkpoint, on each number of ranks in `sizes`."""
    saved = [
        put_together(sum(run_on_ranks(save_after_steps, ranks, argv, folder), []))
        for ranks, argv, folder in zip((2, 3), argvs, folders)
    ]
    for ranks in sizes:
        for number, results in enumerate(zip(*run_on_ranks(load_and_step, ranks, argvs[::-1], folders))):
            state = put_together(sum((own for own, _ in results), []))
            assert state.keys() == saved[number].keys()
            assert all(torch.equal(value, saved[number][key]) for key, value in state.items()), (ranks, folders[number])
