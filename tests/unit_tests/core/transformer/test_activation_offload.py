"""The offloader in isolation: memory that it moves, time of prefetches, and its state after an aborted step."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.transformer.activation_offload import ActivationOffloader, HostBuffers, Offloaded, buffer_size
from megatron.core.transformer.module import run

CPU = torch.device("cpu")


class Squares(torch.autograd.Function):
    """Sums the squares of its inputs and saves them for backward."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.stack([(tensor.double() ** 2).sum() for tensor in tensors]).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple((2 * tensor * grad).to(tensor.dtype) for tensor in ctx.saved_tensors)


def in_layers(offloader: ActivationOffloader, num_layers: int) -> list[Offloaded]:
    return [Offloaded(offloader, run, layer=layer, moves=layer < num_layers - 1) for layer in range(num_layers)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_views_and_shared_memory_move_once_and_come_back_equal(dtype: torch.dtype) -> None:
    base = torch.randn(6, 8, dtype=dtype, requires_grad=True)
    offloader = ActivationOffloader(nn.Identity(), CPU, min_elements=1)
    first, last = in_layers(offloader, 2)

    def forward(through: Any, end: Any) -> Tensor:
        memory = base * 1
        views = memory.t(), memory[1:5, ::2], memory.view(4, 12), memory[0].expand(3, 8), memory
        little = (base * 1)[:, 3]  # an eighth of its memory, so it is copied separately
        return through(Squares.apply, *views, little, little) + end(Squares.apply, memory)

    (expected,) = torch.autograd.grad(forward(run, run), base)
    offloader.begin_pass()
    loss = forward(first, last)
    moved = base.nbytes + base.nbytes // 8
    assert offloader.bytes_out == moved and offloader.bytes_in == 0
    (grad,) = torch.autograd.grad(loss, base)
    torch.testing.assert_close(grad, expected, rtol=0, atol=0)
    assert offloader.bytes_in == moved and offloader.buffers.lent_bytes == 0


def test_parameters_buffers_and_small_tensors_stay() -> None:
    layer = nn.Linear(4, 4)
    layer.register_buffer("table", torch.ones(4, 4))
    offloader = ActivationOffloader(layer, CPU, min_elements=12)
    first, _ = in_layers(offloader, 2)
    offloader.begin_pass()
    x = torch.randn(3, 4, requires_grad=True)
    first(lambda: (layer(x) @ layer.table, torch.randn(2, 4, requires_grad=True).exp()))
    assert offloader.bytes_out == x.nbytes


def test_the_layer_before_is_fetched_while_one_computes() -> None:
    offloader = ActivationOffloader(nn.Identity(), CPU, min_elements=1)
    x = torch.ones(16, requires_grad=True)
    fetched: list[int] = []
    offloader.begin_pass()
    y = x
    for layer in in_layers(offloader, 4):
        y = layer(torch.exp, y * 0.1)
        y.register_hook(lambda _: fetched.append(offloader.bytes_in // x.nbytes))
    y.sum().backward()
    # Nothing is fetched before the last layer's backward. From then on one layer is prefetched.
    assert offloader.bytes_out == 3 * x.nbytes and fetched == [0, 1, 2, 3]


@pytest.mark.parametrize("stop", ["forward", "backward", "never"])
def test_a_step_that_stops_half_way_leaves_nothing(stop: str) -> None:
    offloader = ActivationOffloader(nn.Identity(), CPU, min_elements=1)
    layers = in_layers(offloader, 3)

    def step(fail: str) -> Tensor:
        x = torch.full((64,), 0.5, requires_grad=True)
        offloader.begin_pass()
        y = x
        for layer in layers:
            y = layer(torch.exp, y)
            if fail == "forward" and layer is layers[1]:
                raise InterruptedError
        if fail == "backward":
            y.register_hook(interrupt)
        y.sum().backward()
        return x.grad

    def interrupt(_: Tensor) -> None:
        raise InterruptedError

    expected = step("never")
    persistent = offloader.buffers.free_bytes
    for _ in range(3):
        if stop != "never":
            with pytest.raises(InterruptedError):
                step(stop)
        torch.testing.assert_close(step("never"), expected, rtol=0, atol=0)
        offloader.buffers.check_integrity()
        assert offloader.buffers.free_bytes == persistent and offloader.buffers.lent_bytes == 0


def test_what_is_changed_in_place_afterwards_is_refused_without_gradients_nothing_moves() -> None:
    offloader = ActivationOffloader(nn.Identity(), CPU, min_elements=1)
    first, _ = in_layers(offloader, 2)

    def spoil(x: Tensor) -> Tensor:
        y = x.exp()
        return y.mul_(2)

    offloader.begin_pass()
    with torch.no_grad():
        first(spoil, torch.ones(8))
    assert offloader.bytes_out == 0
    with pytest.raises(RuntimeError, match="shape .8. .* changed in place"):
        first(spoil, torch.ones(8, requires_grad=True))


def test_buffers_are_conserved_and_reused() -> None:
    draw, buffers = random.Random(3), HostBuffers(CPU)
    lent: list[Tensor] = []
    for _ in range(2000):
        if lent and draw.random() < 0.5:
            buffers.give_back(lent.pop(draw.randrange(len(lent))))
        else:
            wanted = draw.randrange(1, 1 << draw.randrange(1, 20))
            lent.append(buffers.lend(wanted))
            assert wanted <= lent[-1].numel() == buffer_size(wanted) < wanted * 1.25 + 4096
        buffers.check_integrity()
        assert sum(buffer.numel() for buffer in lent) == buffers.lent_bytes
        assert len({buffer.data_ptr() for buffer in lent}) == len(lent)
        if len(lent) > 20:
            buffers.give_back(lent.pop())
    assert buffers.free_bytes + buffers.lent_bytes < 50 << 20
