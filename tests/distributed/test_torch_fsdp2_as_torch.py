"""TorchFullyShardedDataParallel against torch's fully_shard: parameters, resharding and hooks on parameters."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megatron.core.distributed import TorchFullyShardedDataParallel, TorchFullyShardedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.distributed.fsdp2_runs import (
    DETERMINISTIC,
    FSDP2,
    STEPS,
    WORDS,
    Net,
    Run,
    loss_of_words,
    train_losses,
    wrap_net,
)
from tests.harness import run_on_ranks

# Relative tolerances for a different order of summation, in fp64 and after some steps of Adam in fp32.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}


class Extra(nn.Module):
    """A linear layer, and an extra parameter of any shape that the loss reads."""

    def __init__(self, extra: torch.Tensor, *, is_trained: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.extra = nn.Parameter(extra, requires_grad=is_trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum() + (self.extra * 2).sum()


def _wrap_torch(module: nn.Module) -> nn.Module:
    return fully_shard(module)


def _wrap_ours(module: nn.Module) -> nn.Module:
    return TorchFullyShardedDataParallel(DETERMINISTIC, FSDP2, module)


def _values_after_steps(wrapped: nn.Module) -> list[torch.Tensor]:
    """Runs two steps of SGD and returns all parameters unsharded."""
    optimizer = torch.optim.SGD([param for param in wrapped.parameters() if param.requires_grad], lr=0.125)
    for _ in range(2):
        wrapped(torch.ones(2, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor() for param in wrapped.parameters() if isinstance(param, DTensor)]


def _same_parameters() -> None:
    # Parameters with fewer rows than ranks, and frozen ones without elements, which need no reduction.
    cases: list[tuple[tuple[int, ...], bool]] = [((1,), True), ((1, 3), True), ((3, 2), True), ((2, 5), True)]
    cases += [((0,), False), ((0, 3), False), ((3, 0), False), ((1,), False)]
    for shape, is_trained in cases:
        theirs = _wrap_torch(Extra(torch.ones(shape), is_trained=is_trained))
        ours = _wrap_ours(Extra(torch.ones(shape), is_trained=is_trained))
        for one, other in zip(_values_after_steps(ours), _values_after_steps(theirs), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_parameters_that_torch_shards_train_to_its_values() -> None:
    run_on_ranks(_same_parameters, 4)


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "scalar": (lambda: torch.ones(()), r"parameter extra has shape \(\).*give it shape \[1\]"),
    "no rows": (lambda: torch.ones(0, 3), r"parameter extra has shape \(0, 3\), without elements.*requires_grad"),
    "no columns": (lambda: torch.ones(3, 0), r"parameter extra has shape \(3, 0\), without elements"),
    "transposed": (lambda: torch.ones(3, 4).t(), r"parameter extra .*strides \(1, 4\).*make it contiguous"),
    "channels_last": (
        lambda: torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last),
        r"parameter extra .*strides \(12, 1, 6, 3\)",
    ),
    "every other column": (lambda: torch.ones(4, 6)[:, ::2], r"parameter extra .*strides \(6, 2\)"),
}


def _refused() -> None:
    for build, words in REFUSED.values():
        # torch rejects parameters without elements only in backward.
        with pytest.raises((ValueError, RuntimeError)):
            _values_after_steps(_wrap_torch(Extra(build())))
        with pytest.raises(ValueError, match=words):
            _wrap_ours(Extra(build()))


def test_parameters_that_torch_refuses_are_refused_by_name_before_they_are_sharded() -> None:
    run_on_ranks(_refused, 2)


# An integer as reshard_after_forward.


def _layer_sizes(ranks: int | bool) -> tuple[list[int], bool]:
    """Returns a layer's rows on this rank between forward and backward, and whether shards are seen from outside."""
    net = Net()
    net.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(2))
    wrapped = wrap_net(net, replace(FSDP2, reshard_after_forward=ranks))
    shards = list(wrapped.parameters())
    loss = loss_of_words(wrapped, torch.Generator().manual_seed(dist.get_rank()))
    weight = wrapped.module.layers[0][0].weight
    rows = len(weight._local_tensor if isinstance(weight, DTensor) else weight)
    seen = list(wrapped.parameters())
    loss.backward()
    wrapped.finish_grad_sync()
    is_same = all(one is shard for one, shard in zip(seen, shards, strict=True))
    return [rows, len(wrapped.module.layers[0][0].weight._local_tensor)], is_same


def _sizes() -> list[tuple[list[int], bool]]:
    return [_layer_sizes(ranks) for ranks in (True, 4, 2, 1, False)]


@pytest.mark.slow
def test_an_integer_shards_layers_over_that_many_ranks_from_forward_to_backward() -> None:
    for found in run_on_ranks(_sizes, 4):
        assert found == [([rows, 2], True) for rows in (2, 2, 4, 8, 8)]


def _losses_of_all_numbers() -> None:
    for bf16 in (False, True):
        runs = []
        for config in (FSDP2, replace(FSDP2, reshard_after_forward=2)):
            for is_offloaded in (False, True):
                net = Net(recompute=is_offloaded)
                wrapped = wrap_net(net.bfloat16() if bf16 else net, replace(config, cpu_offload=is_offloaded))
                runs.append(train_losses(wrapped, bf16=bf16, microbatches=2))
        assert len(set(runs[0])) == STEPS and runs[0] == runs[2] and runs[1] == runs[3]


@pytest.mark.slow
def test_training_has_the_same_bits_for_any_number_of_ranks_after_forward() -> None:
    run_on_ranks(_losses_of_all_numbers, 4)


def _kept_after_forward() -> None:
    config = replace(FSDP2, reshard_after_forward=2)
    plain, wrapped = wrap_net(Net()), wrap_net(Net(), config)
    generator = torch.Generator().manual_seed(dist.get_rank())
    # A forward without a backward leaves gathered copies, which the update makes stale.
    loss_of_words(wrapped, generator)
    for model in (plain, wrapped):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
    words = torch.randint(0, WORDS, (4, 5), generator=generator)
    assert torch.equal(wrapped(words), plain(words))
    loss_of_words(wrapped, generator)
    state = wrapped.state_dict()
    assert all(
        torch.equal(value.full_tensor(), plain.state_dict()[name].full_tensor()) for name, value in state.items()
    )
    loss_of_words(wrapped, generator)
    wrapped.to(torch.float64)
    plain.to(torch.float64)
    assert torch.equal(wrapped(words), plain(words))


@pytest.mark.slow
def test_copies_that_stay_after_a_forward_are_never_stale() -> None:
    run_on_ranks(_kept_after_forward, 4)


def _in_two_groups() -> list[Any]:
    """Trains two replicas of two ranks in each of two process groups, which create separate subgroups."""
    groups = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7])]
    group = groups[dist.get_rank() // 4]
    found = []
    for ranks in (True, 2):
        config = replace(FSDP2, reshard_after_forward=ranks)
        wrapped = TorchFullyShardedDataParallel(DETERMINISTIC, config, Net(), process_group=group)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(2):
            optimizer.zero_grad()
            loss = loss_of_words(wrapped, generator)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


@pytest.mark.slow
def test_groups_that_are_not_all_ranks_are_split_each_on_its_own() -> None:
    for found in run_on_ranks(_in_two_groups, 8):
        assert found[:2] == found[2:]


def _refused_numbers() -> None:
    for ranks in (3, 8):
        with pytest.raises(ValueError, match=f"reshard_after_forward is {ranks}: .* divisor of the 4 data-parallel"):
            wrap_net(Net(), replace(FSDP2, reshard_after_forward=ranks))
    experts = ProcessGroupCollection(dp=dist.group.WORLD, dp_cp=dist.group.WORLD, expt_dp=_own_of([[0, 1], [2, 3]]))
    with pytest.raises(ValueError, match="reshard_after_forward is 4: .* divisor of the 2 expert-data-parallel"):
        TorchFullyShardedDataParallel(
            DETERMINISTIC, replace(FSDP2, reshard_after_forward=4), Net(), pg_collection=experts
        )


def _own_of(lists: list[list[int]]) -> dist.ProcessGroup:
    groups = [dist.new_group(ranks) for ranks in lists]
    return next(group for group, ranks in zip(groups, lists, strict=True) if dist.get_rank() in ranks)


@pytest.mark.parametrize("ranks", [0, -1])
def test_numbers_below_one_are_refused_by_the_settings(ranks: int) -> None:
    with pytest.raises(ValueError, match=f"reshard_after_forward is {ranks}: must be at least 1"):
        TorchFullyShardedDataParallelConfig(reshard_after_forward=ranks)


def test_numbers_that_divide_no_group_are_refused_by_name() -> None:
    run_on_ranks(_refused_numbers, 4)


# Optimizers that step in parameter hooks, as written for torch.


class Tanh(nn.Module):
    """Three layers with a smooth loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def _step_in_hooks(model: nn.Module) -> None:
    """Steps in backward as in torch's tutorial."""
    optims = {param: torch.optim.AdamW([param], lr=0.05, foreach=False) for param in model.parameters()}

    def hook(param: nn.Parameter) -> None:
        optims[param].step()
        optims[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)


def _batch(step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def _plain_losses(dtype: torch.dtype, *, count: int) -> list[float]:
    model = Tanh().to(dtype)
    _step_in_hooks(model)
    losses = []
    for step in range(STEPS * count):
        loss = torch.stack([model(_batch(step, rank, dtype)) for rank in range(2)]).mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def _mean_loss(loss: torch.Tensor) -> float:
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def _torch_losses(dtype: torch.dtype, *, count: int) -> list[float]:
    model = Tanh().to(dtype)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    _step_in_hooks(model)
    losses = []
    for step in range(STEPS * count):
        loss = model(_batch(step, dist.get_rank(), dtype))
        loss.backward()
        losses.append(_mean_loss(loss))
    return losses


def _our_losses(dtype: torch.dtype, *, count: int, is_step: bool, **settings: Any) -> list[float]:
    """Returns the losses of steps in hooks.

    is_step: the loop calls zero_grad_buffer and finish_grad_sync, as the wrapper's hooks require.
    """
    config = replace(FSDP2, **settings)
    model = TorchFullyShardedDataParallel(DETERMINISTIC, config, Tanh().to(dtype))
    _step_in_hooks(model)
    losses = []
    for step in range(STEPS):
        if is_step:
            model.zero_grad_buffer()
        for index in range(count):
            with model.accumulate() if is_step and index + 1 < count else nullcontext():
                loss = model(_batch(step * count + index, dist.get_rank(), dtype))
                loss.backward()
            losses.append(_mean_loss(loss))
        if is_step:
            model.finish_grad_sync()
            if not config.release_gradients:
                # The hooks have cleared the gradients.
                assert not any(buffer.grad_data.any() for buffer in model.all_buffers)
    return losses


def _recipes() -> None:
    settings: list[dict[str, Any]] = [{}, {"reshard_after_forward": False}, {"cpu_offload": True}]
    for dtype, count in ((torch.float64, 1), (torch.float64, 2), (torch.float32, 1)):
        close: dict[str, Any] = {"rel": TOLERANCES[dtype]}
        plain = pytest.approx(_plain_losses(dtype, count=count), **close)
        assert _torch_losses(dtype, count=count) == plain
        for chosen in settings:
            for is_step in (False, True):
                assert _our_losses(dtype, count=count, is_step=is_step, **chosen) == plain, (chosen, is_step)
        assert _our_losses(dtype, count=count, is_step=True, release_gradients=True) == plain


@pytest.mark.slow
def test_optimizers_in_hooks_of_parameters_train_as_in_one_process_without_a_change_of_the_script() -> None:
    run_on_ranks(_recipes, 2)


def _hooks_before() -> None:
    calls: list[str] = []
    for wrap in (_wrap_torch, _wrap_ours):
        module = Extra(torch.ones(3))
        for name, param in module.named_parameters():
            param.register_post_accumulate_grad_hook(lambda owned, name=name: calls.append(name))
        wrapped = wrap(module)
        wrapped(torch.ones(2, 4)).backward()
        if isinstance(wrapped, TorchFullyShardedDataParallel):
            assert not calls
            wrapped.finish_grad_sync()
            assert sorted(calls) == ["extra", "layer.bias", "layer.weight"]
        else:
            # torch drops the hooks together with the parameters that it replaces.
            assert not calls


def test_hooks_of_before_wrapping_run_once_a_step_where_torch_drops_them() -> None:
    run_on_ranks(_hooks_before, 2)


# State dicts of torch.distributed.checkpoint.state_dict.


def _states() -> None:
    options = StateDictOptions(full_state_dict=True)
    for ranks in (True, 1, 2):
        run = Run(Net(), mode="freed")
        other = wrap_net(Net(), replace(FSDP2, reshard_after_forward=ranks))
        run.step()
        # Loading also works between a forward and its backward.
        loss_of_words(other, torch.Generator().manual_seed(0))
        set_model_state_dict(other.module, get_model_state_dict(run.model.module))
        whole = get_model_state_dict(run.model.module, options=options)
        assert all(not isinstance(value, DTensor) for value in whole.values())
        found = get_model_state_dict(other.module, options=options)
        assert found.keys() == whole.keys() and all(torch.equal(found[name], value) for name, value in whole.items())


@pytest.mark.slow
def test_torchs_functions_of_state_dicts_read_and_set_shards() -> None:
    run_on_ranks(_states, 4)
