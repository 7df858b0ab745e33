"""Peak memory of a step with updates in backward, per tensor, against the formula and the step after backward."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.live_bytes import PeakBytes
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.counts import soak_only
from tests.harness import run_on_ranks

WIDTH, LAYERS, A_BUCKET = 128, 16, 2
NUM_PARAMS = WIDTH * WIDTH * LAYERS
# Bytes of one layer's gradient, and of a bucket.
GRADIENT = 4 * WIDTH * WIDTH
BUCKET = GRADIENT * A_BUCKET
# The layers' inputs, and the temporary memory of an update or a norm.
ACTIVATIONS = 2 * 4 * WIDTH * LAYERS
MODES: dict[str, dict[str, bool]] = {
    "ddp": {},
    "zero1": {"use_distributed_optimizer": True},
    "zero2": {"use_distributed_optimizer": True, "shard_gradients": True},
}


def build_model() -> nn.Module:
    """Builds linear layers without activations between them; their activation memory is small next to the weights."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def most_in_a_step(mode: str, policy: str | None) -> int:
    """Returns the peak bytes of this rank's tensors in two steps. policy: `normal` means updates after backward."""
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
    """Returns the bytes of parameters and moments by the formula."""
    return NUM_PARAMS * (4 + 8 / (1 if mode == "ddp" else ranks))


def _measure(mode: str) -> tuple[int, int, int]:
    """Returns peak bytes for updates after backward, in backward, and in backward with gradients kept for the norm."""
    normal, in_backward, held = (most_in_a_step(mode, policy) for policy in ("normal", None, "exact"))
    return normal, in_backward, held


def _measure_all() -> dict[str, tuple[int, int, int]]:
    return {mode: _measure(mode) for mode in MODES}


@pytest.mark.slow
def test_updates_in_backward_hold_two_buckets_of_gradients() -> None:
    for mode, (normal, in_backward, held) in run_on_ranks(_measure_all, 1)[0].items():
        # A layer's gradient is allocated before it is copied into its bucket.
        assert in_backward <= of_law(mode, 1) + 2 * BUCKET + GRADIENT + ACTIVATIONS, mode
        assert in_backward <= normal - (4 * NUM_PARAMS - 2 * BUCKET), mode
        assert held <= normal, mode


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "ranks"), [("ddp", 2), ("zero1", 2), ("zero2", 2), soak_only("zero1", 4)])
def test_shards_are_all_that_is_held_for_the_norm(mode: str, ranks: int) -> None:
    # Data received from other ranks, and two earlier collectives whose buffers gloo's two threads have not released
    # yet.
    messages = ((ranks - 1) / ranks + 2 * (1 + (ranks - 1) / ranks)) * BUCKET
    for normal, in_backward, held in run_on_ranks(partial(_measure, mode), ranks):
        most = of_law(mode, ranks) + 2 * BUCKET + GRADIENT + ACTIVATIONS + messages
        assert in_backward <= most
        shard = 4 * NUM_PARAMS / (1 if mode == "ddp" else ranks)
        assert held <= max(most, of_law(mode, ranks) + shard + 2 * BUCKET + GRADIENT + ACTIVATIONS + messages)
        # ZeRO-2 keeps only shards with either policy.
        if mode == "zero1":
            assert max(in_backward, held) < normal - 4 * NUM_PARAMS * (1 - 1 / ranks) + 2 * BUCKET + messages


UNITS = 9
# In units: tensors that belong to no parameter, and the temporary memory of an update.
NUMBERS, UPDATE = 0.01, 0.2


class Layers(nn.Module):
    """The model of `build_model`, plus one layer that belongs to the root module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS - 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def held_between(policy: str | None, ranks: int) -> float:
    """Returns the units that a rank holds between steps: shards of parameters, moments and kept gradients."""
    return UNITS * (4 if policy == "normal" else 3) / ranks


def of_sharded(*, reshards: bool, offloads: bool, policy: str | None) -> tuple[float, float, float]:
    """Returns the peak in a step, memory after backward, and memory between steps, in units of one layer's gradient.

    policy: as in `most_in_a_step`.
    """
    in_backward = policy != "normal"
    settings = TorchFullyShardedDataParallelConfig(
        reshard_after_forward=reshards, cpu_offload=offloads, release_gradients=in_backward
    )
    config = OptimizerConfig(
        lr=1e-3,
        clip_grad=0.0 if policy is None else 1.0,
        optimizer_in_backward=in_backward,
        optimizer_in_backward_clip=policy if in_backward else None,
    )
    with PeakBytes() as held:
        model = TorchFullyShardedDataParallel(ModelParallelConfig(deterministic_mode=True), settings, Layers())
        optimizer = get_megatron_optimizer(config, [model])
        after_backward = []

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, WIDTH)).sum().backward()
            after_backward.append(held.total())
            finalize_model_grads([model])
            optimizer.step()

        most = max(held.peak_of(step) for _ in range(2))
        between = held.settled((held_between(policy, dist.get_world_size()) + NUMBERS) * GRADIENT)
        return most / GRADIENT, max(after_backward) / GRADIENT, between / GRADIENT


Figures = dict[tuple[bool, bool, str | None], tuple[float, float, float]]


def _matrix(*, offloads: tuple[bool, ...]) -> Figures:
    policies: tuple[str | None, ...] = ("normal", None)
    cases = [(r, o, p) for r, o, p in product((True, False), offloads, policies)] + [(True, False, "exact")]
    return {case: of_sharded(reshards=case[0], offloads=case[1], policy=case[2]) for case in cases}


@pytest.mark.slow
def test_sharded_parameters_hold_the_gradients_of_two_units_whatever_else_is_chosen() -> None:
    """Compares resharding, offloading and updates in backward on one rank, where memory is known to the byte.

    The host is the device here, so offloading moves no tensor and does not change the bytes.
    """
    [figures] = run_on_ranks(partial(_matrix, offloads=(False, True)), 1)
    for (reshards, _, policy), (most, after_backward, between) in figures.items():
        shards = 3 * UNITS
        assert between == pytest.approx(held_between(policy, 1), abs=NUMBERS)
        # The root's unit, reduced last, still has gradients after backward; with an exact norm, all units do.
        held = shards + {"normal": UNITS, "exact": UNITS, None: 1}[policy]
        assert after_backward == pytest.approx(held, abs=NUMBERS)
        # The collective's buffer, its scaled copy, and the reduced sum.
        reduced = 3
        if policy is None:
            # Gradient shards of the first reduced unit are kept until the second, when one unit less is gathered.
            expected = shards + 2 + reduced + (1 if reshards else UNITS - 2)
        elif policy == "exact":
            # The last unit's gradient shards are not allocated yet.
            expected = shards + UNITS - 1 + reduced + 1
        else:
            expected = shards + UNITS + reduced + (1 if reshards else UNITS - 1)
        assert most == pytest.approx(expected, abs=UPDATE), (reshards, policy)


@pytest.mark.slow
def test_ranks_of_sharded_parameters_hold_their_share_of_two_units() -> None:
    for figures in run_on_ranks(partial(_matrix, offloads=(False,)), 2):
        for (reshards, _, policy), (most, _, between) in figures.items():
            assert between == pytest.approx(held_between(policy, 2), abs=NUMBERS)
            # The root's unit, the unit gathered ahead, and temporary memory of one unit's gradient, collective and
            # shards.
            gathered, passing = (2 if reshards else UNITS), 5
            gradients = 1 if policy is None else UNITS / 2
            assert most <= 3 * UNITS / 2 + gradients + gathered + passing, (reshards, policy, most)
        for reshards in (True, False):
            saved = figures[reshards, False, "normal"][0] - figures[reshards, False, None][0]
            assert saved >= (UNITS - 2) / 2 - 1.5
