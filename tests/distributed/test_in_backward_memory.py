"""What a rank holds at the most in a step with updates in backward, tensor by tensor, against the formula and against
the step after backward.
"""

from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.live_bytes import PeakBytes
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.counts import slow
from tests.harness import run_on_ranks

WIDTH, LAYERS, A_BUCKET = 128, 32, 2
NUM_PARAMS = WIDTH * WIDTH * LAYERS
# Bytes of one layer's gradient, and of a bucket.
GRADIENT = 4 * WIDTH * WIDTH
BUCKET = GRADIENT * A_BUCKET
# The layers' inputs, and what an update or a norm takes besides.
ACTIVATIONS = 2 * 4 * WIDTH * LAYERS
MODES: dict[str, dict[str, bool]] = {
    "ddp": {},
    "zero1": {"use_distributed_optimizer": True},
    "zero2": {"use_distributed_optimizer": True, "shard_gradients": True},
}


def build_model() -> nn.Module:
    """Layers without anything between them, whose activations are a thousandth of the weights."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def most_in_a_step(mode: str, policy: str | None) -> int:
    """Bytes of all tensors of this rank, at the most, in two steps. policy: `normal` for updates after backward."""
    in_backward = policy != "normal"
    settings = DistributedDataParallelConfig(
        **MODES[mode], overlap_grad_reduce=True, bucket_size=BUCKET // 4, release_gradients=in_backward
    )
    config = OptimizerConfig(
        lr=1e-3,
        clip_grad=0.0 if policy is None else 1.0,
        optimizer="distributed_fused_adam" if mode == "zero2" else "adam",
        optimizer_in_backward=in_backward,
        optimizer_in_backward_clip=policy if in_backward else None,
    )
    with PeakBytes() as held:
        model = DistributedDataParallel(ModelParallelConfig(), settings, build_model())
        optimizer = get_megatron_optimizer(config, [model])

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, WIDTH)).sum().backward()
            finalize_model_grads([model])
            optimizer.step()

        return max(held.peak_of(step) for _ in range(2))


def of_law(mode: str, ranks: int) -> float:
    """Bytes of parameters and moments."""
    return NUM_PARAMS * (4 + 8 / (1 if mode == "ddp" else ranks))


def _measure(mode: str) -> tuple[int, int, int]:
    """Most in a step after backward, in backward, and in backward with gradients that are held."""
    normal, in_backward, held = (most_in_a_step(mode, policy) for policy in ("normal", None, "exact"))
    return normal, in_backward, held


@pytest.mark.parametrize("mode", MODES)
def test_updates_in_backward_hold_two_buckets_of_gradients(mode: str) -> None:
    normal, in_backward, held = run_on_ranks(partial(_measure, mode), 1)[0]
    # That of a layer is made before it is in its bucket.
    assert in_backward <= of_law(mode, 1) + 2 * BUCKET + GRADIENT + ACTIVATIONS
    assert in_backward <= normal - (4 * NUM_PARAMS - 2 * BUCKET)
    assert held <= normal


@pytest.mark.parametrize(("mode", "ranks"), [("ddp", 2), ("zero1", 2), ("zero2", 2), slow("zero1", 4)])
def test_shards_are_all_that_is_held_for_the_norm(mode: str, ranks: int) -> None:
    # What other ranks send, and two messages with theirs that gloo's two threads have not let go yet.
    messages = ((ranks - 1) / ranks + 2 * (1 + (ranks - 1) / ranks)) * BUCKET
    for normal, in_backward, held in run_on_ranks(partial(_measure, mode), ranks):
        most = of_law(mode, ranks) + 2 * BUCKET + GRADIENT + ACTIVATIONS + messages
        assert in_backward <= most
        shard = 4 * NUM_PARAMS / (1 if mode == "ddp" else ranks)
        assert held <= max(most, of_law(mode, ranks) + shard + 2 * BUCKET + GRADIENT + ACTIVATIONS + messages)
        # Of ZeRO-2 shards alone stand in any case.
        if mode == "zero1":
            assert max(in_backward, held) < normal - 4 * NUM_PARAMS * (1 - 1 / ranks) + 2 * BUCKET + messages
