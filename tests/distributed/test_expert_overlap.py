"""Passes that take turns, and weight gradients that are computed later, leave a training run bit-identical.

Also tests that ranks launch the same collectives.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

from megatron.core.device.torch_internals import TorchDispatchMode, tree_leaves
from megatron.core.pipeline_parallel.schedule import Pair, Pipeline, Schedule, stage_orders
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training.run import TrainingRun
from megatron.training.training import run_step
from tests.counts import long_count, slow
from tests.distributed.layout_runs import OVERLAPPED, ZERO2
from tests.distributed.pair_runs import DELAYED, EXPERTS_DELAYED, PAIRS, PairLog, watched_pairs
from tests.distributed.parity import layout
from tests.distributed.stash_runs import ROUTER, argv_of, stash, train_here
from tests.distributed.tiny_runs import TrainedRun, started_run
from tests.functional_tests.case import Flags
from tests.harness import run_on_ranks
from tests.pairwise import Case, covering

STEPS = 3
COMMON: Flags = {"moe-token-dispatcher-type": "alltoall", "train-iters": STEPS}
# Number of ranks, number of ranks with different batches, and flags.
LAYOUTS: dict[str, tuple[int, int, Flags]] = {
    "ep 2": (2, 2, layout(ep=2)),
    "tp 2, ep 2": (2, 1, {**layout(2, ep=2), "num-query-groups": 2}),
    "etp 2": (2, 1, {**layout(2, etp=2), "num-query-groups": 2}),
    "cp 2, ep 2": (2, 1, layout(1, 2, ep=2)),
    "ep 4": (4, 4, layout(ep=4)),
    "pp 2, ep 2": (4, 2, layout(pp=2, ep=2)),
    "pp 2, vpp 2, ep 2": (4, 2, {**layout(pp=2, vpp=2, ep=2), "num-layers": 8}),
}
MXFP8: Flags = {"fp8-format": "e4m3", "fp8-recipe": "mxfp8"}
EXPERTS: dict[str, Flags] = {
    "dropless": {"moe-expert-rank-capacity-factor": None},
    "static": {},
    "pages": stash(8),
    "copies": stash(0.45, compute="copies"),
    "pages on the host": stash(0.3, 0.3),
    "too few pages": stash(0.05),
    "too few rows": {"moe-expert-rank-capacity-factor": 1},
    "8 bits": MXFP8,
    "8 bits in pages": {**MXFP8, **stash(0.8)},
}
SMALL_BUCKETS: Flags = {"ddp-bucket-size": 1001}
DIMENSIONS: dict[str, dict[Any, Flags]] = {
    "layout": {name: flags for name, (_, _, flags) in LAYOUTS.items()},
    "experts": EXPERTS,
    "recompute": {
        "none": {},
        "parts": {"recompute-granularity": "selective", "recompute-modules": ["moe_act", "layernorm"]},
        "moe": {"recompute-granularity": "selective", "recompute-modules": ["moe"]},
        "full": {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
        "some layers": {"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 1},
    },
    "dropout": {0: {}, 0.1: {"hidden-dropout": 0.1}},
    "further tokens": {0: {}, 1: {"mtp-num-layers": 1}},
    "shared": {
        "none": {},
        "plain": {"moe-shared-expert-intermediate-size": 16},
        "overlapped": {"moe-shared-expert-intermediate-size": 16, "moe-shared-expert-overlap": True},
    },
    "gradients": {
        "ddp": {"overlap-grad-reduce": True, **SMALL_BUCKETS},
        "zero 1": {**OVERLAPPED, **SMALL_BUCKETS},
        "zero 2": {**ZERO2, **OVERLAPPED, **SMALL_BUCKETS},
        "in backward": {"optimizer-in-backward": True, "optimizer-in-backward-clip": "exact"},
        "not fused": {"no-gradient-accumulation-fusion": True},
        "deterministic": {"deterministic-mode": True},
    },
    # "changing": 5, 1 and 2 micro-batches.
    "microbatches": {number: {} for number in (1, 2, 3, 5, "changing")},
    "flags": {
        "pairs": PAIRS,
        "pairs, delayed": {**PAIRS, **DELAYED},
        "pairs, experts delayed": {**PAIRS, **EXPERTS_DELAYED},
        "delayed": DELAYED,
        "experts delayed": EXPERTS_DELAYED,
    },
    "around": {
        "nothing": {},
        "router": ROUTER,
        "evaluation": {"eval-iters": 1, "eval-interval": 1},
        "offloading": {
            "fine-grained-activation-offloading": True,
            "offload-modules": ["attn_norm", "mlp_norm"],
            "min-offloaded-tensor-size": 1,
        },
        "adapters": {"lora-rank": 8},
        "fp16": {"fp16": True, "initial-loss-scale": 1024, "loss-scale-window": 2},
        "biases": {"disable-bias-linear": None, "swiglu": None, "quick-geglu": True, "glu-linear-offset": 1.0},
        "per token": {"calculate-per-token-loss": True, "bf16": True},
    },
}


def _is_possible(case: Case) -> bool:
    """Returns whether the program accepts a case.

    Something must be left to stash and to offload. Experts with adapters are not split, and experts in 8 bits have
    neither adapters nor fp16.
    """
    experts, recompute, around = case.get("experts", "static"), case.get("recompute"), case.get("around")
    if "moe-paged-stash" in EXPERTS[experts] and recompute in ("full", "moe"):
        return False
    if ("8 bits" in experts and around in ("adapters", "fp16")) or (around, case.get("layout")) == (
        "adapters",
        "etp 2",
    ):
        return False
    return not (around == "offloading" and recompute in ("full", "some layers"))


def _flags(case: Case) -> Flags:
    """Returns the flags of the run without overlap."""
    _, replicas, _ = LAYOUTS[case["layout"]]
    flags = dict(COMMON)
    for name, values in DIMENSIONS.items():
        if name != "flags":
            flags |= values[case[name]]
    if case["microbatches"] == "changing":
        # Thresholds count tokens, 16 a sample.
        sizes = f"0:{5 * replicas} {16 * 5 * replicas}:{replicas} {16 * 6 * replicas}:{2 * replicas}"
        return {**flags, "global-batch-size": None, "step-batch-size-schedule": sizes}
    return {**flags, "global-batch-size": replicas * case["microbatches"]}


def train_argv(argv: Sequence[str], setup: Any) -> TrainedRun:
    if "--moe-expert-rank-capacity-factor" in argv:
        return train_here(argv, setup)
    trained = TrainedRun()
    with started_run(argv) as run:
        trained.train(run, setup=setup)
    return trained


@dataclass
class _Shape:
    """The pipeline of a run, this rank's stage, and the smallest number of layers with experts in a chunk.

    rows: rows of each expert forward of the last step, and its layer; None for dropless experts.
    """

    pipeline: Pipeline = Pipeline(1)
    stage: int = 0
    num_layers: int = 0
    rows: list[tuple[int, int]] | None = None

    @contextmanager
    def look(self, run: TrainingRun) -> Iterator[None]:
        groups = run.groups
        self.pipeline, self.stage = Pipeline(group_size(groups.pp), len(run.model)), group_rank(groups.pp)
        self.num_layers = min(sum(isinstance(part, MoELayer) for part in chunk.modules()) for chunk in run.model)
        yield
        if run.expert_memory is not None:
            figures = run.expert_memory.last_step
            assert figures is not None
            self.rows = list(zip(figures.passes, figures.rows, strict=True))

    def num_pairs(self, num_microbatches: int) -> int:
        orders = stage_orders(self.pipeline, num_microbatches, Schedule(paired=True))
        return sum(isinstance(step, Pair) for step in orders[self.stage])


def _compare(case: Case) -> int:
    """Checks that overlap changes no results; returns this rank's number of pairs."""
    of_plain, shape, flags = _Shape(), _Shape(), _flags(case)
    plain = train_argv(argv_of(flags), of_plain.look)
    with watched_pairs() as log:
        overlapped = train_argv(argv_of(flags, DIMENSIONS["flags"][case["flags"]]), shape.look)
    overlapped.assert_same(plain, str(case))
    assert shape.rows == of_plain.rows, f"{case}: recorded once each"
    assert len({step["grad_norm"] for step in plain.steps}) == STEPS
    assert len(plain.evaluations) == (STEPS if case["around"] == "evaluation" else 0)
    _assert_pairs_ran(log, case, shape)
    return len(log.num_changes)


def _assert_pairs_ran(log: PairLog, case: Case, shape: _Shape) -> None:
    num = case["microbatches"]
    planned = [shape.num_pairs(one) for one in ((5, 1, 2) if num == "changing" else (num,) * STEPS)]
    if "pairs" not in case["flags"]:
        planned = [0]
    # Steps that overflow are repeated.
    may_repeat = case["experts"] in ("too few pages", "too few rows", "copies", "pages on the host", "8 bits in pages")
    assert sum(planned) == len(log.num_changes) or (may_repeat and sum(planned) < len(log.num_changes)), case
    # Each pass of a layer hands over twice.
    assert all(changes >= 4 * shape.num_layers for changes in log.num_changes), (case, log.num_changes)


def _compare_all(cases: Sequence[Case]) -> list[int]:
    return [_compare(case) for case in cases]


SIZES = {name: list(values) for name, values in DIMENSIONS.items()}
OF_TWO_RANKS = {**SIZES, "layout": [name for name, (ranks, _, _) in LAYOUTS.items() if ranks == 2]}
MORE_LAYOUTS = [name for name in LAYOUTS if name not in OF_TWO_RANKS["layout"]]
DRAWS = long_count(20, soak=40)
# Covers each value on two ranks, and each pair of values under `make soak`, and runs one case of each further layout.
CASES = list(islice(covering(OF_TWO_RANKS, draws=DRAWS, allowed=_is_possible), long_count(11, soak=1000)))
PAIRED = [name for name in SIZES["flags"] if "pairs" in name]
FURTHER = {
    name: list(
        islice(
            covering(
                {**SIZES, "layout": [name], "microbatches": [5, "changing"], "flags": PAIRED},
                draws=DRAWS,
                allowed=_is_possible,
            ),
            long_count(number, soak=0),
            long_count(number + 1, soak=12),
        )
    )
    for number, name in enumerate(MORE_LAYOUTS)
}


def test_every_value_is_among_the_cases() -> None:
    found = {item for case in CASES for item in case.items()}
    assert found == {(name, value) for name, values in OF_TWO_RANKS.items() for value in values}


@pytest.mark.slow
def test_overlap_changes_no_bit() -> None:
    for pairs in zip(*run_on_ranks(_compare_all, 2, CASES, timeout=60 + 60 * len(CASES))):
        assert pairs[0] == pairs[1]


@pytest.mark.parametrize("name", [slow(name) for name in FURTHER])
def test_overlap_changes_no_bit_on_more_ranks(name: str) -> None:
    cases = FURTHER[name]
    by_rank = run_on_ranks(_compare_all, 4, cases, timeout=60 + 60 * len(cases))
    assert sum(map(sum, by_rank)) > 0


class Collectives(TorchDispatchMode):
    """Records this rank's collectives in order, also those of threads that act for the current one.

    found: names and tensors, without numbers of rows, which may differ between ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            is_of_rows = func._opname.startswith("alltoall")
            shapes = [f"{one.dtype} {list(one.shape[is_of_rows:])}" for one in tensors]
            self.found.append(f"{func._opname} {shapes}")
        return func(*args, **(kwargs or {}))


_gating = TopKRouter.gating


def _skewed(router: TopKRouter, tokens: Tensor) -> Tensor:
    """Computes logits with which each other layer sends all tokens to the first rank's experts."""
    logits = _gating(router, tokens)
    return logits + 100 * (logits.new_ones(4).cumsum(0) < 2.5) * (router.layer_number % 2)


def _trace(argv: Sequence[str]) -> list[str]:
    """Returns the collectives of two steps with skewed routing. The hook of a weight exists on one rank only."""
    with patch.object(TopKRouter, "gating", _skewed):
        collectives = Collectives()
        with started_run(argv) as run, collectives:
            if dist.get_rank() == 0:
                dict(run.model[0].named_parameters())["module.output_layer.weight"].register_hook(lambda grad: None)
            run_step(run)
            run_step(run)
    return collectives.found


NUM_LAYERS = 3
TRACED: dict[str, Flags] = {
    "dropless": {**PAIRS, "moe-expert-rank-capacity-factor": None},
    "dropless, delayed": {**PAIRS, **DELAYED, "moe-expert-rank-capacity-factor": None},
    "zero 2, recomputed": {
        **PAIRS,
        **DIMENSIONS["gradients"]["zero 2"],
        **DIMENSIONS["recompute"]["moe"],
        **DIMENSIONS["shared"]["plain"],
    },
}


@pytest.mark.parametrize("name", ["dropless", *map(slow, ["dropless, delayed", "zero 2, recomputed"])])
def test_ranks_launch_the_same_collectives_whatever_rows_they_receive(name: str) -> None:
    argv = argv_of(COMMON, layout(ep=2), TRACED[name], {"num-layers": NUM_LAYERS, "global-batch-size": 8})
    first, second = run_on_ranks(_trace, 2, argv)
    assert first == second and sum("alltoall" in line for line in first) > 8 * 2 * NUM_LAYERS * 2
