"""Gradient descent in DistributedDataParallel, compared step by step with training without overlap. Holds no tests."""

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.model_parallel_config import ModelParallelConfig
from tests.counts import long_count

WIDTH, LAYERS = 5, 5
STEPS = long_count(8, soak=20)
GRAD = {"overlap_grad_reduce": True}
ZERO = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
BOTH = {**ZERO, "overlap_param_gather": True}
# For each microbatch of a step, the layers that its forward uses.
Plans = list[list[int]]
# Returns one rank's plans for a step. The generator has the same seed on all ranks.
Case = Callable[[random.Random, int, int], Plans]


class Layers(nn.Module):
    """Runs the layers of a plan, in the plan's order; -i means layer i with full recompute."""

    def __init__(self, order: Iterable[int], linear: Callable[..., nn.Module] = nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = {str(i): linear(WIDTH, WIDTH) for i in range(LAYERS)}
        self.layers = nn.ModuleDict({str(i): made[str(i)] for i in order})
        self.layers["4"].weight = self.layers["3"].weight

    def forward(self, x: Tensor, plan: Sequence[int]) -> Tensor:
        for i in plan:
            layer = self.layers[str(abs(i))]
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if i < 0 else layer(x))
        return x


def every_layer(rng: random.Random, step: int, rank: int) -> Plans:
    """Uses every layer, in order."""
    return [list(range(LAYERS))]


def random_order(rng: random.Random, step: int, rank: int) -> Plans:
    """Uses some layers in random order, the same on all ranks."""
    return [rng.sample(range(LAYERS), rng.randint(1, LAYERS))]


def order_of_each_rank(rng: random.Random, step: int, rank: int) -> Plans:
    """Uses some layers, or none, in an order that differs between ranks."""
    rng = random.Random(100 * step + rank)
    return [rng.sample(range(LAYERS), rng.randint(0, LAYERS))]


def unused_somewhere(rng: random.Random, step: int, rank: int) -> Plans:
    """Never uses layer 1, skips layer 2 on rank 1, and uses layer 3 only in odd steps."""
    return [[0, 4, *([2] if rank != 1 else []), *([3] if step % 2 else [])]]


def uses_that_grow_and_shrink(rng: random.Random, step: int, rank: int) -> Plans:
    """Uses layer 1 several times; its re-entrant recompute accumulates a gradient for each use."""
    return [[0, *[-1] * [1, 2, 1, 3, 1, 1, 1, 1, 1, 2][(step + rank) % 10], -2, 3]]


def late_on_one_rank(rng: random.Random, step: int, rank: int) -> Plans:
    """Uses layer 1 more often on one rank in some steps."""
    return [[-1, *([-1, -1] if rank == step % 3 and step % 4 == 3 else []), -2, 0]]


def changing_microbatches(rng: random.Random, step: int, rank: int) -> Plans:
    """Changes the number of microbatches every second step."""
    return [[0, 1, 2]] * [1, 4, 2, 3][step // 2 % 4]


class Run:
    """Trains by plain gradient descent. With sharded updates, each rank updates its shards and sets the rest to NaN."""

    def __init__(
        self,
        order: Iterable[int],
        *,
        deterministic: bool = True,
        linear: Callable[..., nn.Module] = nn.Linear,
        fuses: bool = True,
        **settings: Any,
    ) -> None:
        config = ModelParallelConfig(deterministic_mode=deterministic, gradient_accumulation_fusion=fuses)
        self.model = Layers(order, linear)
        self.ddp = DistributedDataParallel(config, DistributedDataParallelConfig(**settings), self.model)
        self.sharded = self.ddp.ddp_config.use_distributed_optimizer
        self.launched: list[tuple[str, str]] = []
        self.losses: list[Tensor] = []
        record = self.ddp.launch_order.trace.record

        def noted(**entry: Any) -> None:
            self.launched.append((entry["op"], entry["bucket"]))
            record(**entry)

        self.ddp.launch_order.trace.record = noted  # type: ignore[method-assign]

    def step(self, plans: Plans, rank: int, step: int, *, no_sync: bool = True) -> int:
        """Trains on one microbatch per plan; returns the number of reductions before the last backward ended."""
        self.launched.clear()
        self.ddp.zero_grad_buffer()
        assert not any(float(buffer.grad_data.abs().sum()) for buffer in self.ddp.buffers)
        for number, plan in enumerate(plans):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(97 * step + 7 * rank + number))
            accumulates = no_sync and number < len(plans) - 1
            with self.ddp.no_sync() if accumulates else nullcontext():
                loss = self.ddp(x.requires_grad_(), plan).square().sum()
                loss.backward()
            self.losses.append(loss.detach())
        before = len(self.reductions())
        self.ddp.finish_grad_sync()
        self.update()
        return before

    def update(self) -> None:
        """Applies a gradient-descent update with the reduced gradients."""
        for buffer in self.ddp.buffers:
            kept = torch.full_like(buffer.param_data, float("nan") if self.sharded else 0.0)
            for span in buffer.owned_spans():
                own = slice(span.start, span.end)
                kept[own] = buffer.param_data[own] - 0.1 * buffer.grad_data[own]
            buffer.param_data.copy_(kept)
        if self.sharded:
            self.ddp.mark_params_stale()
            if not self.ddp.ddp_config.overlap_param_gather:
                self.ddp.start_param_sync()

    def params(self) -> Tensor:
        """Gathers all parameters and returns them as one tensor: [N]."""
        self.ddp.wait_params(self.model.parameters())
        return torch.cat([param.detach().flatten() for param in self.model.parameters()])

    def reductions(self) -> list[str]:
        """Returns the names of the buckets reduced in this step, in order."""
        return [bucket for op, bucket in self.launched if op != "all-gather"]


def compare_with_plain(
    case: Case,
    orders: Sequence[Sequence[int]],
    settings: Sequence[dict[str, Any]],
    deterministic: bool = True,
    linear: Callable[..., nn.Module] = nn.Linear,
) -> tuple[list[int], list[int]]:
    """Asserts step by step that a run with each of `settings` matches a run without overlap and fusion.

    Returns for each setting the number of reductions before the end of backward, and the number of steps in which a
    bucket was reduced a second time because of late gradients.
    """
    rank, rng = dist.get_rank(), random.Random(0)
    plain = Run(sorted(orders[0]), deterministic=deterministic, linear=linear, fuses=False)
    runs = [
        Run(order, deterministic=deterministic, linear=linear, **{"bucket_size": 1, **chosen})
        for order, chosen in zip(cycle(orders), settings)
    ]
    equal = torch.equal if deterministic else partial(torch.allclose, rtol=1e-4, atol=1e-6)
    early, late = [0] * len(runs), [0] * len(runs)
    for step in range(STEPS):
        plans = case(rng, step, rank)
        plain.step(plans, rank, step)
        for index, run in enumerate(runs):
            early[index] += run.step(plans, rank, step, no_sync=index % 2 == 0)
            assert equal(run.losses[-1], plain.losses[-1]), f"step {step} {run.ddp.ddp_config}"
            if step % 4 == 3:
                # Not in every step, because params() waits for gathers that the modules themselves should wait for.
                # Parameters are compared by name, since registration orders differ.
                run.params()
                ours, theirs = dict(run.model.named_parameters()), dict(plain.model.named_parameters())
                assert all(equal(ours[name], theirs[name]) for name in ours), f"step {step} {run.ddp.ddp_config}"
            buckets = run.reductions()
            assert len(set(buckets)) == len(run.ddp.bucket_groups)
            # A bucket is reduced a second time only for late gradients, and never a third time.
            most = max(buckets.count(bucket) for bucket in buckets)
            assert most <= (1 if _is_never_late(case, index) else 2)
            late[index] += most == 2
    copies: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(copies, [run.params().tolist() for run in [plain, *runs]])
    assert all(copy == copies[0] for copy in copies)
    return early, late


def _is_never_late(case: Case, index: int) -> bool:
    if case is changing_microbatches:
        return index % 2 == 0
    return not is_sometimes_late(case)


def is_sometimes_late(case: Case) -> bool:
    """Returns whether gradients become ready after their bucket's reduction was launched in some steps of the case."""
    return case in (uses_that_grow_and_shrink, late_on_one_rank)
