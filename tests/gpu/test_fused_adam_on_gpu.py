"""DistributedFusedAdam on a GPU: agrees with torch's optimizer, also for steps replayed by a CUDA graph."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from megatron.core.device import default_device, prepare_device
from megatron.core.optimizer import DistributedFusedAdam

pytestmark = pytest.mark.gpu

STEPS, REPLAYS = 20, 100


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Builds a model of channels_last convolutions, a norm and a head, with sizes that are not multiples of blocks."""
    torch.manual_seed(3)
    layers = nn.Conv2d(3, 13, 3), nn.GroupNorm(1, 13), nn.SiLU(), nn.Conv2d(13, 7, 3), nn.Flatten(), nn.Linear(112, 5)
    return nn.Sequential(*layers).to(default_device(), dtype).to(memory_format=torch.channels_last)


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the images of a step: [6, 3, 8, 8], channels_last."""
    images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(step))
    return images.to(default_device(), dtype).to(memory_format=torch.channels_last)


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Returns copies of the model's parameters."""
    return [param.detach().clone() for param in model.parameters()]


@contextmanager
def on_side_stream() -> Iterator[None]:
    """Runs its body on a side stream that waits for the default stream, which then waits for the side stream."""
    default, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(default)
    with torch.cuda.stream(side):
        yield
    default.wait_stream(side)


@pytest.mark.parametrize("bucket_cap_mb", [25.0, 512 / 2**20])
def test_it_steps_as_torch_does(bucket_cap_mb):
    prepare_device(default_device())
    torch.use_deterministic_algorithms(True)
    try:
        ours, plain = build(), build()
        optimizer = DistributedFusedAdam(ours.parameters(), lr=1e-2, weight_decay=0.1, bucket_cap_mb=bucket_cap_mb)
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
        for step in range(STEPS):
            for model, stepped in ((ours, optimizer), (plain, reference)):
                stepped.zero_grad()
                model(batch(step)).square().mean().backward()
                stepped.step()
            torch.testing.assert_close(tensors_of(ours), tensors_of(plain), rtol=1e-6, atol=1e-7)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_step_that_a_graph_repeats_has_the_bits_of_a_step(clip):
    prepare_device(device := default_device())
    eager, graphed = build(), build()
    runs = []
    for model in (eager, graphed):
        optimizer = DistributedFusedAdam(model.parameters(), lr=torch.tensor(1e-2, device=device), capturable=True)
        optimizer.init_params()
        runs.append((model, optimizer, batch(0).clone()))

    def step(model: nn.Module, optimizer: DistributedFusedAdam, images: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(images).square().mean().backward()
        if clip is not None:
            optimizer.clip_grad_norm(clip)
        optimizer.step()

    with on_side_stream():
        for run in runs:
            for _ in range(3):
                step(*run)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*runs[1])
    held = torch.cuda.memory_allocated()
    for number in range(REPLAYS):
        for _, optimizer, images in runs:
            images.copy_(batch(number))
            optimizer.param_groups[0]["lr"].fill_(1e-2 / (1 + number))
        step(*runs[0])
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(map(torch.equal, tensors_of(eager), tensors_of(graphed))), number
    assert torch.cuda.memory_allocated() <= held + 2**20


def test_a_scalers_step_in_a_graph_skips_where_it_finds_infinity():
    prepare_device(device := default_device())
    model = build()
    plain = copy.deepcopy(model)
    optimizer = DistributedFusedAdam(model.parameters(), lr=torch.tensor(1e-2, device=device), capturable=True)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    optimizer.init_params()
    scaler, graph = torch.amp.GradScaler(device.type, init_scale=2.0**10), torch.cuda.CUDAGraph()

    def update() -> None:
        # Checks the reduced gradients, decides about the step and updates the scale, all on the device.
        scaler.step(optimizer)
        scaler.update()

    def take_gradients(step: int) -> None:
        images = batch(step) * (math.inf if step % 3 == 0 else 1.0)
        optimizer.zero_grad()
        scaler.scale(model(images).square().mean()).backward()
        optimizer.grad_sync()
        reference.zero_grad()
        plain(images).square().mean().backward()

    with on_side_stream():
        take_gradients(1)
        update()
        reference.step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        update()
    num_overflows = 0
    for step in range(2, STEPS):
        take_gradients(step)
        before = tensors_of(model)
        graph.replay()
        if step % 3 == 0:
            num_overflows += 1
            assert all(map(torch.equal, before, tensors_of(model)))
        else:
            reference.step()
        torch.testing.assert_close(tensors_of(model), tensors_of(plain), rtol=1e-5, atol=1e-6)
    assert scaler.get_scale() == 2.0 ** (10 - num_overflows)
    steps = {float(state.step) for state in optimizer._shards.states.values()}
    assert steps == {STEPS - 1.0 - num_overflows}
