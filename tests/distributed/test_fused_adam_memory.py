"""Tests the persistent and peak memory of DistributedFusedAdam, counted tensor by tensor, against the formula."""

from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.live_bytes import PeakBytes
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import DistributedFusedAdam, OptimizerConfig, get_megatron_optimizer
from tests.counts import long_count, soak_only
from tests.harness import run_on_ranks

WIDTH, LAYERS = 128, 36
NUM_PARAMS = WIDTH * WIDTH * LAYERS
# Bytes of a bucket (one layer's fp32 gradients), number of buckets in flight, and number of buffers kept for reuse.
CAP, PIPELINE, SPARE = 1 << 16, 2, 3
FP32, BF16 = torch.float32, torch.bfloat16
REMAINDERS = {"store_params": False, "store_param_remainders": True}
# Parameter dtype, settings, and bytes per parameter for: the parameter, its states, its gradient.
CASES: dict[str, tuple[torch.dtype, dict[str, Any], int, int, int]] = {
    "fp32": (FP32, {}, 4, 8, 4),
    "bf16": (BF16, {}, 2, 12, 4),
    "bf16 gradients": (BF16, {"grad_sync_dtype": BF16}, 2, 12, 2),
    "fp32 in place": (FP32, {"contiguous_param_buffer": False}, 4, 12, 4),
    "remainders": (BF16, REMAINDERS, 2, 10, 4),
}


def build_model(dtype: torch.dtype) -> nn.Module:
    """Builds a stack of linear layers whose activations are a thousandth of the size of the weights."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).to(dtype)


@dataclass(frozen=True)
class Held:
    """Bytes of all tensors of this rank.

    at_rest: after zero_grad. in_backward: peak of backward. in_step: peak of the step, which awaits the reductions.
    """

    at_rest: int
    in_backward: int
    in_step: int


def held_by_ours(case: str, *, is_lazy: bool = False, **settings: Any) -> Held:
    """Measures peaks over two steps, and persistent bytes after them.

    is_lazy: parameters are initialized during the first step instead of before it.
    """
    dtype, own, *_ = CASES[case]
    in_backward = in_step = 0
    with PeakBytes() as held:
        model = build_model(dtype)
        optimizer = DistributedFusedAdam(model.parameters(), **own, **settings)
        if not is_lazy:
            optimizer.init_params()
        for _ in range(2):
            optimizer.zero_grad()
            in_backward = max(in_backward, held.peak_of(partial(backward, model)))
            in_step = max(in_step, held.peak_of(optimizer.step))
        optimizer.zero_grad()
        # gloo's threads release sent tensors shortly after the collective has completed on the ranks.
        dist.destroy_process_group()
    return Held(held.total(), in_backward, in_step)


def backward(model: nn.Module) -> None:
    """Runs forward and backward on one sample."""
    model(torch.ones(1, WIDTH, dtype=next(model.parameters()).dtype)).sum().backward()


def held_by_zero1() -> int:
    """Returns the peak bytes of all tensors of this rank in a step of this framework's ZeRO-1."""
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=CAP // 4
    )
    with PeakBytes() as held:
        model = DistributedDataParallel(ModelParallelConfig(), settings, build_model(FP32))
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3), [model])
        for _ in range(2):
            optimizer.zero_grad()
            in_backward = held.peak_of(partial(backward, model))
            model.finish_grad_sync()
            in_step = held.peak_of(optimizer.step)
    return max(in_backward, in_step)


def of_law(case: str, ranks: int) -> float:
    """Returns a rank's bytes between steps according to the formula."""
    *_, of_param, of_states, of_grads = CASES[case]
    return NUM_PARAMS * (of_param + (of_states + of_grads) / ranks)


def is_at_rest(held: Held, law: float, *, bucket: int = CAP, spare: int = SPARE) -> bool:
    """Returns whether a rank's bytes match the formula to 2%, plus at most the memory of some buckets."""
    return 0.98 * law <= held.at_rest <= 1.02 * law + spare * bucket


@cache
def held_on_ranks(case: str, ranks: int, *, is_lazy: bool = False) -> list[Held]:
    """Measures every rank, with buckets of one layer."""
    return run_on_ranks(partial(held_by_ours, case, is_lazy=is_lazy, bucket_cap_mb=CAP / 2**20), ranks)


# Every form is initialized eagerly or lazily, one of them on more than two ranks; all combinations under `make soak`.
ALL = [*product(CASES, (2, 4)), ("fp32", 1)]
AT_ONCE = [("fp32", 2), ("bf16", 2), ("fp32 in place", 2), ("remainders", 4)]
LAZILY = [("fp32", 2), ("bf16 gradients", 2), ("remainders", 2)]


def _marked(usual: list[tuple[str, int]]) -> list[Any]:
    return [*usual, *(soak_only(*one) for one in ALL if one not in usual)]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "ranks"), _marked(AT_ONCE))
def test_a_rank_holds_parameters_and_its_share_of_states_and_gradients(case: str, ranks: int) -> None:
    for held in held_on_ranks(case, ranks):
        assert is_at_rest(held, of_law(case, ranks)), held
        # Buckets in flight with their receive buffers, as many that gloo's two threads have not released yet, two that
        # a gradient fills, and the gradient itself with its copy.
        buckets = (PIPELINE + 2) * (1 + (ranks - 1) / ranks) + 2
        most = 1.02 * (of_law(case, ranks) + buckets * CAP + 2 * 4 * WIDTH * WIDTH)
        assert max(held.in_backward, held.in_step) <= most, (held, most)


def test_a_bucket_that_is_larger_than_the_model_takes_no_more_than_the_model() -> None:
    for held in run_on_ranks(partial(held_by_ours, "fp32", bucket_cap_mb=100.0), 2):
        assert is_at_rest(held, of_law("fp32", 2), bucket=4 * NUM_PARAMS, spare=1), held


@pytest.mark.slow
@pytest.mark.parametrize(("case", "ranks"), _marked(LAZILY))
def test_parameters_that_are_taken_over_lazily_need_no_more_than_whole_gradients_first(case: str, ranks: int) -> None:
    dtype, _, of_param, of_states, of_grads = CASES[case]
    for held in held_on_ranks(case, ranks, is_lazy=True):
        assert is_at_rest(held, of_law(case, ranks)), held
        buckets = (PIPELINE + 2) * (1 + (ranks - 1) / ranks) + 2
        # First, parameters and gradients in their dtype, and shards that these are reduced to. Then states instead of
        # gradients, with parameters duplicated while they are moved.
        first = NUM_PARAMS * (of_param + dtype.itemsize + of_grads / ranks) + buckets * CAP
        moved = NUM_PARAMS * (2 * of_param + of_grads / ranks)
        most = 1.02 * max(first, moved, of_law(case, ranks) + buckets * CAP)
        assert max(held.in_backward, held.in_step) <= most, (held, most)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(2, long_count(3, soak=5)))
def test_a_rank_holds_less_than_with_zero1(ranks: int) -> None:
    zero1 = run_on_ranks(held_by_zero1, ranks)
    # Except for buckets, ZeRO-1 stores all gradients instead of a share. Lazy states follow when gradients are freed.
    for is_lazy, share in ((False, 0.9), (True, 0.95)):
        for one, other in zip(held_on_ranks("fp32", ranks, is_lazy=is_lazy), zero1):
            assert max(one.in_backward, one.in_step) < share * other, (is_lazy, one, other)
