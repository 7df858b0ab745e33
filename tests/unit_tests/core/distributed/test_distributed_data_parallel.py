"""Gradients of microbatches that are not the last only accumulate, with few calls for each and with equal results."""

import sys
from collections import Counter
from contextlib import nullcontext
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.bucket_group import ParamState
from megatron.core.distributed.scheduler import CollectiveScheduler
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.linear import linear_with_grad_accumulation_and_async_allreduce as linear

WIDTH, LAYERS, MICROBATCHES = 4, 3, 3


class Layer(nn.Module):
    """A weight whose gradient can be fused, and a scale whose gradient autograd computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(linear(x, self.weight, None, True, False, False, tp_group=None)) * self.scale


class Layers(nn.Module):
    """Layers, the first of which is used twice; with recompute, each is recomputed in a backward inside backward."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = checkpoint(layer, x, use_reentrant=True) if self.recompute else layer(x)
        return x


def wrapped(module: nn.Module, *, overlap: bool = True, fuse: bool = True) -> DistributedDataParallel:
    config = ModelParallelConfig(gradient_accumulation_fusion=fuse)
    settings = DistributedDataParallelConfig(overlap_grad_reduce=overlap, bucket_size=30)
    return DistributedDataParallel(config, settings, module)


def backward_of(ddp: DistributedDataParallel, seed: int) -> None:
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    ddp(x).square().sum().backward()


def step_of(ddp: DistributedDataParallel, *, first_seed: int = 0) -> list[Tensor]:
    ddp.zero_grad_buffer()
    for number in range(MICROBATCHES):
        with ddp.no_sync() if number < MICROBATCHES - 1 else nullcontext():
            backward_of(ddp, first_seed + number)
        assert all(param.grad is None for param in ddp.parameters())
    ddp.finish_grad_sync()
    return [grad.clone() for _, grad in ddp.named_main_grads()]


class _Calls:
    """Counts the calls of Python functions of this package, by name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Counter[str]:
        sys.setprofile(self._note)
        return self.counts

    def __exit__(self, *unused: Any) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and "megatron/core/" in frame.f_code.co_filename:
            self.counts[frame.f_code.co_name] += 1


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_gradients_equal_those_that_pass_through_the_scheduler(fuse, recompute):
    torch.manual_seed(0)
    ddp = wrapped(Layers(recompute=recompute), fuse=fuse)
    found = [step_of(ddp, first_seed=10 * number) for number in range(3)]
    with patch.object(CollectiveScheduler, "only_accumulates", lambda *_: False):
        expected = [step_of(ddp, first_seed=10 * number) for number in range(3)]
    assert all(torch.equal(a, b) for one, other in zip(found, expected, strict=True) for a, b in zip(one, other))


@pytest.mark.parametrize("overlap", [False, True])
def test_only_the_last_microbatch_counts_gradients_and_only_with_overlap(overlap):
    ddp = wrapped(Layers(), overlap=overlap)
    counted = []
    with patch.object(CollectiveScheduler, "mark_grad_ready", lambda _, group, param: counted.append(param)):
        ddp.zero_grad_buffer()
        with ddp.no_sync():
            backward_of(ddp, 0)
        assert not counted
        backward_of(ddp, 1)
    assert len(counted) == (2 * LAYERS if overlap else 0)


def test_a_gradient_that_only_accumulates_costs_few_calls():
    ddp = wrapped(Layers())
    step_of(ddp)
    ddp.zero_grad_buffer()
    with ddp.no_sync():
        ddp(torch.randn(2, WIDTH))  # does not change the counts below
        loss = ddp(torch.randn(2, WIDTH)).sum()
        with _Calls() as calls:
            loss.backward()
    assert calls["_on_grad"] == 2 * LAYERS and calls["_add"] == LAYERS + 1  # the first layer is used twice
    # At most the hook, the accumulation, the note of its stream, plain_grad and accumulate_into for each scale, and the
    # hook for each weight. The rest is once for each backward.
    of_intake = calls["_on_grad"] + calls["accumulate_at"] + calls["plain_grad"] + calls["accumulate_into"]
    assert of_intake <= LAYERS * (4 + 1)
    assert calls["note"] == calls["accumulate_at"] + calls["add_at"] == 2 * LAYERS + 1
    assert calls["only_accumulates"] == 1 and calls["accumulate"] == calls["mark_grad_ready"] == 0


def test_a_gradient_of_a_parameter_that_was_not_gathered_is_refused_in_every_microbatch():
    ddp = wrapped(Layers())
    step_of(ddp)
    ddp.zero_grad_buffer()
    ddp.bucket_groups[0].param_state = ParamState.STALE
    with ddp.no_sync(), pytest.raises(RuntimeError, match="values from before the last optimizer step"):
        backward_of(ddp, 0)


def test_a_microbatch_after_the_last_one_is_late_and_not_lost():
    ddp, reference = wrapped(Layers()), None
    step_of(ddp)  # launches during backward from the second iteration on
    for is_late in (False, True):
        ddp.zero_grad_buffer()
        if is_late:
            backward_of(ddp, 0)
            with ddp.no_sync():
                backward_of(ddp, 1)
        else:
            with ddp.no_sync():
                backward_of(ddp, 0)
            backward_of(ddp, 1)
        ddp.finish_grad_sync()
        grads = [grad.clone() for _, grad in ddp.named_main_grads()]
        reference = reference or grads
    assert all(torch.allclose(a, b) for a, b in zip(grads, reference, strict=True))


def test_a_gradient_after_the_end_of_an_iteration_is_refused_in_no_sync_too():
    ddp = wrapped(Layers())
    step_of(ddp)
    with ddp.no_sync(), pytest.raises(RuntimeError, match="produced after finish_grad_sync"):
        backward_of(ddp, 0)
