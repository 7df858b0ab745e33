"""Two wrappers, or two optimizers, over one process group, with a different order of gradients on each rank."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.group_collectives import RemoteRankError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import DistributedFusedAdam, OptimizerConfig, get_megatron_optimizer
from tests.harness import run_on_ranks

STEPS = 5
RATES = {"lr": 1e-2, "weight_decay": 0.0}
ZERO1 = {"use_distributed_optimizer": True, "overlap_param_gather": True}
# Fields of the wrapper's configuration and of the optimizer's.
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ddp": ({}, {}),
    "zero1": (ZERO1, {"use_distributed_optimizer": True}),
    "zero2": ({**ZERO1, "shard_gradients": True}, {"optimizer": "distributed_fused_adam"}),
}


def _nets(widths: tuple[int, int] = (8, 40)) -> tuple[nn.Module, nn.Module]:
    """Returns two modules with collectives of different sizes, so that mismatched collectives are errors.

    The sizes differ even with padding.
    """
    torch.manual_seed(5)
    first, second = (nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 4)) for width in widths)
    return first, second


def _loss(first: nn.Module, second: nn.Module, step: int, *, rank: int) -> Tensor:
    """Returns the loss. Odd ranks call the second module first, so that its gradients come last."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * rank + step))
    if rank % 2 == 0:
        outputs = first(x) * 3, second(x)
    else:
        late = second(x)
        outputs = first(x) * 3, late
    return (outputs[0] + outputs[1]).square().mean()


def _expected() -> list[Tensor]:
    """Returns the parameters after training by AdamW in one process on the mean of the ranks' losses."""
    nets = _nets()
    params = [param for net in nets for param in net.parameters()]
    optimizer = torch.optim.AdamW(params, **RATES)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            (_loss(*nets, step, rank=rank) / dist.get_world_size()).backward()
        optimizer.step()
    return params


def _two_wrappers(mode: str) -> None:
    settings, optimizing = MODES[mode]
    nets = _nets()
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=16, **settings)
    wrapped = [DistributedDataParallel(ModelParallelConfig(), ddp_config, net) for net in nets]
    config = OptimizerConfig(clip_grad=0.0, **RATES, **optimizing)
    optimizers = [get_megatron_optimizer(config, [chunk]) for chunk in wrapped]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        _loss(*wrapped, step, rank=dist.get_rank()).backward()
        # In an order that differs from the order of construction, but is equal on all ranks.
        for chunk, optimizer in list(zip(wrapped, optimizers))[:: 1 if step % 2 else -1]:
            chunk.finish_grad_sync()
            optimizer.step()
    for chunk, net in zip(wrapped, nets):
        chunk.wait_params(net.parameters())
    torch.testing.assert_close([param for net in nets for param in net.parameters()], _expected())


@pytest.mark.parametrize("mode", MODES)
def test_two_wrappers_in_one_backward_reduce_the_gradients_of_each(mode: str) -> None:
    run_on_ranks(_two_wrappers, 2, mode)


def _two_optimizers(settings: dict[str, Any]) -> None:
    nets = _nets()
    optimizers = [DistributedFusedAdam(net.parameters(), **RATES, **settings) for net in nets]
    for step in range(STEPS):
        for optimizer in optimizers if step else ():
            optimizer.zero_grad()
        if step == 3:
            with optimizers[0].no_sync(), optimizers[1].no_sync():
                (_loss(*nets, step, rank=dist.get_rank()) / 2).backward()
            (_loss(*nets, step, rank=dist.get_rank()) / 2).backward()
        else:
            _loss(*nets, step, rank=dist.get_rank()).backward()
        for optimizer in optimizers[:: 1 if step % 2 else -1]:
            optimizer.step()
    for net, optimizer in zip(nets, optimizers):
        optimizer.wait_params(net.parameters())
    torch.testing.assert_close([param for net in nets for param in net.parameters()], _expected())


SMALL = {"bucket_cap_mb": 256 / 2**20}


@pytest.mark.parametrize("settings", [SMALL, {**SMALL, "overlap_param_sync": True}, {"overlap_grad_sync": False}])
def test_two_optimizers_in_one_backward_reduce_the_gradients_of_each(settings: dict[str, Any]) -> None:
    run_on_ranks(_two_optimizers, 2, settings)


def _begun_in_backward() -> None:
    # Of equal size, since the ranks launch collectives of different modules before the error.
    nets = _nets((8, 8))
    for net in nets:
        optimizer = DistributedFusedAdam(net.parameters(), **RATES, **SMALL)
        optimizer.init_params()
        net(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        net.optimizer = optimizer
    # zero_grad was not called on either optimizer: the second iteration begins after the first has begun to reduce.
    with pytest.raises(RuntimeError, match="parameter .* and of parameter .* in one backward.*zero_grad of the second"):
        _loss(*nets, 0, rank=dist.get_rank()).backward()


def test_iterations_that_begin_inside_one_backward_are_an_error_that_names_both() -> None:
    run_on_ranks(_begun_in_backward, 2)


def _begun_before_a_launch() -> None:
    nets, rank = _nets(), dist.get_rank()
    optimizers = [DistributedFusedAdam(net.parameters(), **RATES) for net in nets]
    x = torch.ones(1, 5)
    for net, optimizer in zip(nets, optimizers):
        optimizer.init_params()
        net(x).sum().backward()
        optimizer.step()
    # The first net's gradients come first. On rank 1 some gradients of its bucket are missing, so it is not launched.
    second, hidden = nets[1](x), nets[0][:2](x)
    with pytest.raises(RuntimeError, match="parameter .* in one backward"):
        (second + nets[0][2](hidden.detach() if rank == 1 else hidden)).sum().backward()
    for optimizer in optimizers:
        optimizer.reset_iteration()


def test_iterations_that_begin_inside_one_backward_are_an_error_also_on_a_rank_that_has_launched_nothing() -> None:
    run_on_ranks(_begun_before_a_launch, 2, timeout=60)


def _in_turn() -> list[int]:
    """Runs the modules in separate iterations and returns how many reductions are in flight after each backward."""
    nets = _nets()
    settings = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=16)
    wrapped = [DistributedDataParallel(ModelParallelConfig(), settings, net) for net in nets]
    found = []
    for _ in range(4):
        for chunk in wrapped:
            chunk.zero_grad_buffer()
            chunk(torch.ones(1, 5)).sum().backward()
            found.append(sum(group.is_moving for group in chunk.bucket_groups))
            chunk.finish_grad_sync()
    return found


def test_iterations_that_follow_each_other_overlap_as_alone() -> None:
    for found in run_on_ranks(_in_turn, 2):
        # The first iteration records the order of gradients.
        assert found[:2] == [0, 0] and all(number > 1 for number in found[2:]), found


def _turns_and_together(mode: str) -> None:
    """Steps the modules in turn, with one rank skipping a layer, then calls both in a different order on each rank."""
    nets, rank = _nets(), dist.get_rank()
    settings, optimizing = MODES[mode]
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=16, **settings)
    wrapped = [DistributedDataParallel(ModelParallelConfig(), ddp_config, net) for net in nets]
    config = OptimizerConfig(clip_grad=0.0, **RATES, **optimizing)
    optimizers = [get_megatron_optimizer(config, [chunk]) for chunk in wrapped]
    plain = _nets()
    params = [param for net in plain for param in net.parameters()]
    expected = torch.optim.AdamW(params, **RATES)
    x = torch.ones(2, 5)
    for step in range(4):
        expected.zero_grad()
        for net in plain:
            for other in range(dist.get_world_size()):
                outputs = net[0](x) if step == 2 and other == 0 else net(x)
                (outputs.square().sum() * (other + 1) / dist.get_world_size()).backward()
        expected.step()
        for chunk, optimizer in zip(wrapped, optimizers):
            optimizer.zero_grad()
            # When the wrapper itself is not called, its module's hooks wait for the gathered parameters.
            outputs = chunk.module[0](x) if step == 2 and rank == 0 else chunk(x)
            (outputs.square().sum() * (rank + 1)).backward()
        for chunk, optimizer in zip(wrapped, optimizers):
            chunk.finish_grad_sync()
            optimizer.step()
        with torch.no_grad():
            found = {place: wrapped[place](x) for place in ((0, 1) if rank == 0 else (1, 0))}
        torch.testing.assert_close([found[0], found[1]], [net(x) for net in plain])


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_what_one_has_begun_or_owes_goes_out_before_the_other_begins(mode: str) -> None:
    run_on_ranks(_turns_and_together, 2, mode)


def _after_an_error(mode: str, *, is_early: bool) -> None:
    """Raises an error on rank 1, in the backward or before it; after a reset, both ranks train as if without it."""
    nets = _nets()
    if mode.startswith("fused adam"):
        # Collectives differ in size only with one bucket per optimizer, where mismatched collectives are errors.
        buckets = SMALL if mode == "fused adam, several buckets" else {}
        optimizers = [DistributedFusedAdam(net.parameters(), **RATES, **buckets) for net in nets]
        modules, finish, reset = list(nets), [o.grad_sync for o in optimizers], [o.reset_iteration for o in optimizers]
    else:
        settings, optimizing = MODES[mode]
        ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=16, **settings)
        modules = [DistributedDataParallel(ModelParallelConfig(), ddp_config, net) for net in nets]
        config = OptimizerConfig(clip_grad=0.0, **RATES, **optimizing)
        optimizers = [get_megatron_optimizer(config, [chunk]) for chunk in modules]
        finish, reset = [m.finish_grad_sync for m in modules], [m.reset_iteration for m in modules]
    for attempt in range(STEPS + 1):
        step = attempt - (attempt > 2)
        for optimizer in optimizers:
            optimizer.zero_grad()
        is_broken = attempt == 2 and dist.get_rank() == 1
        try:
            if is_broken and is_early:
                raise ArithmeticError
            loss = _loss(*modules, step, rank=dist.get_rank())
            if is_broken:
                loss.register_hook(_fail)
            loss.backward()
            for one in finish:
                one()
        except (ArithmeticError, RemoteRankError):
            assert attempt == 2
            for one in reset:
                one()
            continue
        assert attempt != 2
        for optimizer in optimizers:
            optimizer.step()
    for net, module in zip(nets, modules):
        if not mode.startswith("fused adam"):
            module.wait_params(net.parameters())
    torch.testing.assert_close([param for net in nets for param in net.parameters()], _expected())


def _fail(grad: Tensor) -> None:
    raise ArithmeticError


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("mode", ["zero1", "zero2", "fused adam", "fused adam, several buckets"])
def test_an_error_on_one_rank_is_reset_in_both(mode: str, is_early: bool) -> None:
    run_on_ranks(partial(_after_an_error, is_early=is_early), 2, mode, timeout=60)
