"""Overlapped reductions and gathers: the same bits as without overlap, whatever each rank's modules do when."""

import random
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from tests.harness import run_on_ranks

WIDTH, LAYERS, STEPS = 5, 5, 14


class Layers(nn.Module):
    """Layers of which a forward uses those of its plan, in the plan's order; -i is layer i under full recompute."""

    def __init__(self, order):
        super().__init__()
        torch.manual_seed(0)
        made = {str(i): nn.Linear(WIDTH, WIDTH) for i in range(LAYERS)}
        self.layers = nn.ModuleDict({str(i): made[str(i)] for i in order})
        self.layers["4"].weight = self.layers["3"].weight

    def forward(self, x, plan):
        for i in plan:
            layer = self.layers[str(abs(i))]
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if i < 0 else layer(x))
        return x


def every_layer(rng, step, rank):
    return [list(range(LAYERS))]


def random_order(rng, step, rank):
    # The same on all ranks, with some modules skipped.
    return [rng.sample(range(LAYERS), rng.randint(1, LAYERS))]


def order_of_each_rank(rng, step, rank):
    rng = random.Random(100 * step + rank)
    return [rng.sample(range(LAYERS), rng.randint(0, LAYERS))]


def unused_somewhere(rng, step, rank):
    # Layer 1 on no rank, 2 not on rank 1, 3 in every other step.
    return [[0, 4, *([2] if rank != 1 else []), *([3] if step % 2 else [])]]


def uses_that_grow_and_shrink(rng, step, rank):
    # Recompute with re-entrant backward passes gives a gradient for each use.
    return [[0, *[-1] * [1, 2, 1, 3, 1, 1, 1, 1, 1, 2][(step + rank) % 10], -2, 3]]


def late_on_one_rank(rng, step, rank):
    return [[-1, *([-1, -1] if rank == step % 3 and step % 4 == 3 else []), -2, 0]]


def changing_microbatches(rng, step, rank):
    return [[0, 1, 2]] * [1, 4, 2, 3][step // 3 % 4]


class Run:
    """Training by plain gradient descent; sharded: each rank updates its shards and spoils the rest."""

    def __init__(self, order, *, deterministic=True, **settings):
        config = ModelParallelConfig(deterministic_mode=deterministic)
        self.model = Layers(order)
        self.ddp = DistributedDataParallel(config, DistributedDataParallelConfig(**settings), self.model)
        self.sharded = self.ddp.ddp_config.use_distributed_optimizer
        self.launched = []
        record = self.ddp.launch_order.ledger.record

        def noted(**entry):
            self.launched.append((entry["op"], entry["bucket"]))
            record(**entry)

        self.ddp.launch_order.ledger.record = noted

    def step(self, plans, rank, step, *, no_sync=True):
        self.launched.clear()
        self.ddp.zero_grad_buffer()
        assert not any(float(buffer.grad_data.abs().sum()) for buffer in self.ddp.buffers)
        for number, plan in enumerate(plans):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(97 * step + 7 * rank + number))
            waits = no_sync and number < len(plans) - 1
            with self.ddp.no_sync() if waits else nullcontext():
                self.ddp(x.requires_grad_(), plan).square().sum().backward()
        before = len(self.launched)
        self.ddp.finish_grad_sync()
        self.update()
        return before

    def update(self):
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

    def params(self):
        self.ddp.wait_params(self.model.parameters())
        return torch.cat([param.detach().flatten() for param in self.model.parameters()])

    def reductions(self):
        return [bucket for op, bucket in self.launched if op != "all-gather"]


def compare(case, orders, settings):
    """Each setting against no overlap, step by step. Returns how many launches of each came before the end."""
    rank, rng = dist.get_rank(), random.Random(0)
    plain = Run(sorted(orders[0]))
    runs = [Run(order, **{"bucket_size": 1, **chosen}) for order in orders for chosen in settings]
    early = [0] * len(runs)
    for step in range(STEPS):
        plans = case(rng, step, rank)
        plain.step(plans, rank, step)
        for index, run in enumerate(runs):
            early[index] += run.step(plans, rank, step, no_sync=index % 2 == 0)
            # By name: the orders of registration differ.
            ours, theirs = dict(run.model.named_parameters()), dict(plain.model.named_parameters())
            run.params()
            same = all(torch.equal(ours[name], theirs[name]) for name in ours)
            assert same, f"{case.__name__} step {step} settings {settings[index % len(settings)]}"
            buckets = run.reductions()
            assert len(set(buckets)) == len(run.ddp.bucket_groups)
            # A second round only for what was late; never a third.
            assert max(buckets.count(bucket) for bucket in buckets) <= (1 if is_never_late(case, index) else 2)
    copies = [None] * 3
    dist.all_gather_object(copies, plain.params().tolist())
    assert copies[0] == copies[1] == copies[2]
    return early


def is_never_late(case, index):
    if case is changing_microbatches:
        return index % 2 == 0
    return case not in (uses_that_grow_and_shrink, late_on_one_rank)


GRAD = {"overlap_grad_reduce": True}
ZERO = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
BOTH = {**ZERO, "overlap_param_gather": True}


@pytest.mark.parametrize(
    "case",
    [
        every_layer,
        random_order,  # B1
        order_of_each_rank,  # B1, B31
        unused_somewhere,  # B4
        uses_that_grow_and_shrink,  # B5, B6
        late_on_one_rank,  # B6
        changing_microbatches,  # B7, B8, B17
    ],
)
def test_overlap_changes_no_bit(case):
    shuffled = [list(range(LAYERS)), [3, 0, 4, 2, 1]]
    settings = [
        GRAD,
        {**GRAD, "bucket_size": 40},
        BOTH,
        {**ZERO, "bucket_size": None, "num_buckets": 2},
        {"bucket_size": None},
    ]
    for early in run_on_ranks(compare, 3, case, shuffled, settings):
        if case is every_layer:
            assert all(early[index] for index in range(len(early)) if index % 5 != 4)
