"""Weights written after the optimizer was built are what the next step updates, also if ranks own parts of them.

tests/unit_tests/core/optimizer/test_parameter_writes.py covers the kinds of writes and of optimizers on one rank.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.distributed.fsdp2_runs import FSDP2, Net, loss_of_words, wrap_net
from tests.harness import run_on_ranks
from tests.unit_tests.core.optimizer.reference import microbatches, our_step, tiny_model, wrap

HALF = torch.bfloat16
SHARDED = {"use_distributed_optimizer": True}
OVERLAPPED = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}
# Settings of the wrapper, and of the optimizer.
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "replicated": ({}, {}),
    "small buckets, gathers overlap": ({**OVERLAPPED, "bucket_size": 64}, {**SHARDED, "overlap_param_gather": True}),
    "fused": (
        {**OVERLAPPED, "shard_gradients": True},
        {**SHARDED, "optimizer": "distributed_fused_adam", "overlap_param_gather": True},
    ),
    "muon": (SHARDED, {**SHARDED, "optimizer": "muon"}),
    "in backward": (
        {**OVERLAPPED, "release_gradients": True},
        {**SHARDED, "optimizer_in_backward": True, "overlap_param_gather": True},
    ),
}


def values_for(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns values of whole parameters, which no element of a trained model has."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: (3 + 0.1 * torch.randn(param.shape, generator=generator)).to(param.dtype)
        for name, param in module.named_parameters()
    }


def _sharded_writes(mode: str, steps: int) -> None:
    """Weights are loaded while their gathers may still be pending."""
    overlap, settings = MODES[mode]
    found = []
    for is_told in (True, False):
        model = tiny_model(HALF)
        wrapped = wrap(model, dist.group.WORLD, overlap=overlap)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, bf16=True, clip_grad=0.0, **settings), [wrapped])
        for step in range(steps + 2):
            if step == steps:
                if is_told:
                    wrapped.wait_params(model.parameters())
                model.load_state_dict(values_for(model))
                if is_told:
                    optimizer.reload_model_params()
            our_step(wrapped, optimizer, microbatches(10 * dist.get_rank() + step, dtype=HALF))
        wrapped.wait_params(model.parameters())
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    told, own = found
    for name, value in own.items():
        assert (value.float() - 3).abs().max() < 1, f"{name}: the write was undone"
        assert torch.equal(value, told[name]), name


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_ranks_step_the_weights_that_were_loaded(mode: str, steps: int) -> None:
    run_on_ranks(_sharded_writes, 3, mode, steps)


def _rows(param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return distribute_tensor(whole, param.device_mesh, param.placements) if isinstance(param, DTensor) else whole


def by_load(module: nn.Module, *, assign: bool = False) -> None:
    params, values = dict(module.named_parameters()), values_for(module)
    module.load_state_dict({name: _rows(param, values[name]) for name, param in params.items()}, assign=assign)


def by_assignment(module: nn.Module) -> None:
    by_load(module, assign=True)


@torch.no_grad()
def by_copy(module: nn.Module) -> None:
    values = values_for(module)
    for name, param in module.named_parameters():
        param.copy_(_rows(param, values[name]))


@torch.no_grad()
def by_rows(module: nn.Module) -> None:
    values = values_for(module)
    for name, param in module.named_parameters():
        assert isinstance(param, DTensor)
        rows = _rows(param, values[name])
        assert isinstance(rows, DTensor)
        param.to_local().copy_(rows.to_local())


def by_data(module: nn.Module) -> None:
    values = values_for(module)
    for name, param in module.named_parameters():
        param.data.copy_(_rows(param, values[name]))


FULLY_SHARDED: list[tuple[Callable[[nn.Module], None], int, bool]] = [
    (by_load, 0, False),
    (by_load, 2, False),
    (by_load, 2, True),
    (by_assignment, 0, False),
    (by_assignment, 2, False),
    (by_copy, 2, True),
    (by_rows, 2, False),
    (by_data, 0, False),
]


def _fully_sharded_writes() -> None:
    for write, steps, in_backward in FULLY_SHARDED:
        found = []
        for is_told in (True, False):
            wrapped = wrap_net(Net().bfloat16(), replace(FSDP2, release_gradients=in_backward))
            config = OptimizerConfig(lr=0.01, bf16=True, clip_grad=0.0, optimizer_in_backward=in_backward)
            optimizer = get_megatron_optimizer(config, [wrapped])
            words = torch.Generator().manual_seed(dist.get_rank())
            for step in range(steps + 2):
                if step == steps:
                    write(wrapped.module)
                    if is_told:
                        optimizer.reload_model_params()
                optimizer.zero_grad()
                loss_of_words(wrapped, words).backward()
                finalize_model_grads([wrapped])
                optimizer.step()
            found.append({name: param.to_local().clone() for name, param in wrapped.module.named_parameters()})
        told, own = found
        for name, value in own.items():
            place = f"{write.__name__} after {steps} steps, {name}"
            assert not value.numel() or (value.float() - 3).abs().max() < 1, f"{place}: the write was undone"
            assert torch.equal(value, told[name]), place


def test_rows_that_fully_shard_has_split_follow_writes() -> None:
    run_on_ranks(_fully_sharded_writes, 2)
