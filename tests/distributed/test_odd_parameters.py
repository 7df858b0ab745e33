"""Unusual parameters, and modules that are rarely wrapped, in every mode of the wrappers."""

import copy
import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.dist_checkpointing import load_items, model_logical_pieces, model_sharded_tensors, save_items
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
)
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import DistributedFusedAdam, OptimizerConfig, get_megatron_optimizer
from tests.distributed.wrapper_modes import wrapper_modes
from tests.harness import run_on_ranks

MODES = wrapper_modes(bucket_size=8)


class Net(nn.Module):
    """A model with two layers.

    with_empty: adds parameters without elements, two that contribute to the loss and one that does not.
    """

    def __init__(self, *, with_empty: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        self.empty = nn.ParameterList([torch.empty(0, 4), torch.empty(2, 0), torch.empty(0)] if with_empty else [])

    def forward(self, x: Tensor) -> Tensor:
        loss = self.layers(x).square().sum()
        return loss + sum((param.sum() for param in list(self.empty)[:2]), loss.new_zeros(()))


def _trained(module: nn.Module, mode: str) -> list[Tensor]:
    """Trains two steps of two micro-batches; returns losses and parameters with elements."""
    settings, optimizing = MODES[mode]
    wrapped = DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(**settings), module)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.5, **optimizing), [wrapped])
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        with wrapped.accumulate():
            wrapped(torch.randn(4, 3, generator=generator)).backward()
        loss = wrapped(torch.randn(4, 3, generator=generator))
        loss.backward()
        wrapped.finish_grad_sync()
        optimizer.step()
        losses.append(loss.detach())
    wrapped.wait_params(list(module.parameters()))
    return [*losses, *(param.detach().clone() for param in module.parameters() if param.numel())]


def _with_and_without(mode: str) -> None:
    with_empty, without = (_trained(Net(with_empty=chosen), mode) for chosen in (True, False))
    torch.testing.assert_close(with_empty, without, rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_parameters_without_elements_change_nothing(mode: str) -> None:
    run_on_ranks(_with_and_without, 2, mode)


# Parameters that share memory.


class Pair(nn.Module):
    """A module that multiplies one input by two weights."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first).square().sum() + (x @ self.second).sum()


def _tied_by_data() -> nn.Module:
    values = torch.ones(3, 2)
    return Pair(values, values)


def _overlapping() -> nn.Module:
    values = torch.ones(9)
    return Pair(values[:6].view(3, 2), values[5:8].view(3, 1))


def _seen_by_a_buffer() -> nn.Module:
    module = Pair(torch.ones(3, 2), torch.ones(3, 1))
    module.register_buffer("seen", module.first.data[1:])
    return module


def _columns() -> nn.Module:
    values = torch.arange(12.0).view(3, 4)
    return Pair(values[:, :3], values[:, 3:])


def _with_buffers_that_have_no_storage() -> nn.Module:
    module = Pair(torch.ones(3, 2), torch.ones(3, 1))
    module.register_buffer("graph", torch.eye(3).to_sparse())
    module.register_buffer("rows", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
    return module


def _tied_by_name() -> nn.Module:
    module = Pair(torch.ones(3, 2), torch.ones(3, 1))
    module.second = module.first
    return module


def _wrap(module: nn.Module, mode: str) -> None:
    if mode == "fused adam":
        DistributedFusedAdam(module.parameters())
    elif mode == "fsdp2":
        TorchFullyShardedDataParallel(ModelParallelConfig(), TorchFullyShardedDataParallelConfig(), module)
    else:
        DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(**MODES[mode][0]), module)


WRAPPERS = ["ddp", "zero2, overlapped", "fused adam", "fsdp2"]


def _refused(mode: str) -> None:
    for build in (_tied_by_data, _overlapping, *([] if mode == "fused adam" else [_seen_by_a_buffer])):
        with pytest.raises(ValueError, match="share memory.*one nn.Parameter under both names"):
            _wrap(build(), mode)


@pytest.mark.parametrize("mode", WRAPPERS)
def test_parameters_that_share_memory_are_refused(mode: str) -> None:
    run_on_ranks(_refused, 2, mode)


def _allowed(mode: str) -> None:
    # DistributedFusedAdam requires dense memory.
    others = () if mode == "fused adam" else (_columns, _with_buffers_that_have_no_storage)
    for build in (_tied_by_name, *others):
        module = build()
        before = [param.detach().clone() for param in module.parameters()]
        _wrap(module, mode)
        torch.testing.assert_close([*module.parameters()], before, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["ddp", "fused adam"])
def test_columns_of_one_matrix_and_tied_parameters_are_not(mode: str) -> None:
    run_on_ranks(_allowed, 2, mode)


# Memory layouts of parameters.


class Convolutions(nn.Module):
    """A convolution and a weight; is_turned makes the first channels-last and stores the second transposed."""

    def __init__(self, *, is_turned: bool) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.conv = nn.Conv2d(3, 4, 2)
        values = torch.randn(4, 5)
        self.weight = nn.Parameter(values)
        if is_turned:
            self.conv.to(memory_format=torch.channels_last)
            self.weight.data = values.t().contiguous().t()

    def forward(self, x: Tensor) -> Tensor:
        """Returns the loss. x: [B, 3, 1, 1], fp32 integers, so that sums of gradients are exact in any order."""
        return (self.conv.weight.sum(dim=(2, 3)) @ x[0, :, 0, 0]).sum() + (self.weight * x.sum()).sum()


def _trained_and_saved(mode: str, *, is_turned: bool, save_to: Path, load_from: Path | None) -> list[Tensor]:
    """Trains two steps, saving after the first and then loading a checkpoint if `load_from` is given."""
    settings, optimizing = MODES[mode]
    module = Convolutions(is_turned=is_turned)
    strides = [param.stride() for param in module.parameters()]
    wrapped = DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(**settings), module)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0, **optimizing), [wrapped])
    for step in range(2):
        optimizer.zero_grad()
        drawn = torch.randint(-4, 5, (2, 3, 1, 1), generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        wrapped(drawn.float()).backward()
        wrapped.finish_grad_sync()
        optimizer.step()
        wrapped.wait_params(module.parameters())
        state = [*model_sharded_tensors(wrapped), *optimizer.sharded_state(model_logical_pieces(wrapped))]
        if step == 0:
            save_items(state, save_to, common={})
            if load_from is not None:
                for tensor in state:
                    tensor.data.fill_(7.0)
                load_items(state, load_from)
    assert [param.stride() for param in module.parameters()] == strides
    return [param.detach().clone() for param in module.parameters()]


def _both_layouts(mode: str, folder: Path) -> None:
    plain = _trained_and_saved(mode, is_turned=False, save_to=folder / "plain", load_from=None)
    turned = _trained_and_saved(mode, is_turned=True, save_to=folder / "turned", load_from=folder / "plain")
    again = _trained_and_saved(mode, is_turned=False, save_to=folder / "again", load_from=folder / "turned")
    torch.testing.assert_close(turned, plain, rtol=0, atol=0)
    torch.testing.assert_close(again, plain, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["ddp", "ddp, overlapped", "zero1", "zero1, overlapped"])
def test_weights_keep_their_memory_format_and_train_and_load_as_contiguous_ones(mode: str, tmp_path: Path) -> None:
    run_on_ranks(_both_layouts, 2, mode, tmp_path)


def _other_layout_on_a_rank() -> None:
    module = Convolutions(is_turned=dist.get_rank() == 1)
    with pytest.raises(ValueError, match=r"parameter weight is .*, strides \(1, 4\), .* on rank 1"):
        _wrap(module, "ddp")


def test_ranks_with_other_memory_formats_are_refused() -> None:
    run_on_ranks(_other_layout_on_a_rank, 2)


# Pickled, copied and compiled modules after wrapping.


def _stored(module: nn.Module) -> bytes:
    stored = io.BytesIO()
    torch.save(module, stored)
    return stored.getvalue()


def _stored_and_wrapped(mode: str) -> None:
    settings, optimizing = MODES[mode]
    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    plain_size = len(_stored(module))
    wrapped = DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(**settings), module)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, **optimizing), [wrapped])
    x = torch.ones(2, 64)
    for _ in range(2):
        optimizer.zero_grad()
        wrapped(x).sum().backward()
        wrapped.finish_grad_sync()
        optimizer.step()
    wrapped.wait_params(module.parameters())
    stored = _stored(module)
    # The pickle contains neither gradients nor the wrapper.
    assert len(stored) < 1.05 * plain_size
    copies = [torch.load(io.BytesIO(stored), weights_only=False), copy.deepcopy(module)]
    for other in copies:
        torch.testing.assert_close([*other.parameters()], [*module.parameters()], rtol=0, atol=0)
        again = DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(**settings), other)
        again(x).sum().backward()
        again.finish_grad_sync()


@pytest.mark.parametrize("mode", MODES)
def test_a_wrapped_module_is_stored_and_copied_without_its_wrapper(mode: str) -> None:
    run_on_ranks(_stored_and_wrapped, 2, mode)


def _compiled_and_not(mode: str) -> None:
    trained = []
    for compiled in (False, True):
        module = Net(with_empty=False)
        if compiled:
            module.layers = torch.compile(module.layers, backend="eager")
        trained.append(_trained(module, mode))
    torch.testing.assert_close(*trained, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["zero1, overlapped", "zero2, overlapped"])
def test_compiled_parts_wait_for_their_parameters(mode: str) -> None:
    run_on_ranks(_compiled_and_not, 2, mode)
