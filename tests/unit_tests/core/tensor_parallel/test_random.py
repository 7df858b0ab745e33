"""Streams of random numbers by name, and functions that run twice."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.tensor_parallel import (
    CheckpointWithoutOutput,
    checkpoint,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
    random,
)


def test_streams_go_on_where_they_were_and_leave_the_default_one_alone() -> None:
    tracker = get_cuda_rng_tracker(use_cudagraphable_rng=True)
    model_parallel_cuda_manual_seed(5)
    assert tracker.generators() == []
    with tracker.fork():
        whole = torch.rand(4)
    default = torch.rand(2)
    model_parallel_cuda_manual_seed(5)
    with tracker.fork():
        first = torch.rand(2)
    assert torch.equal(torch.rand(2), default)
    with tracker.fork(), pytest.raises(ValueError, match="no random-number stream 'other'"), tracker.fork("other"):
        pass
    with tracker.fork():
        assert torch.equal(torch.cat([first, torch.rand(2)]), whole)
    model_parallel_cuda_manual_seed(5, tp_rank=1)
    with tracker.fork():
        assert not torch.equal(torch.rand(4), whole)
    with pytest.raises(ValueError, match="te_rng_tracker is True: .*must be False"):
        model_parallel_cuda_manual_seed(5, True)
    with pytest.raises(ValueError, match="exists already"):
        tracker.add("model-parallel-rng", 1)


class StandIn:
    """Torch's generator as a GPU has it: a name for a state, which several names may share."""

    is_captured = False

    def __init__(self, device: torch.device | None = None) -> None:
        self.device, self.state = device, torch.zeros(2, dtype=torch.uint8)  # seed, numbers drawn

    def manual_seed(self, seed: int) -> "StandIn":
        self.set_state(torch.tensor([seed, 0], dtype=torch.uint8))
        return self

    def get_state(self) -> Tensor:
        assert not StandIn.is_captured
        return self.state.clone()

    def set_state(self, state: Tensor) -> None:
        assert not StandIn.is_captured
        self.state.copy_(state)

    def graphsafe_get_state(self) -> "StandIn":
        other = StandIn(self.device)
        other.state = self.state
        return other

    def graphsafe_set_state(self, other: "StandIn") -> None:
        self.state = other.state

    def draw(self) -> tuple[int, ...]:
        self.state[1] += 1
        return tuple(self.state.tolist())


def test_a_gpus_streams_are_objects_that_take_the_default_ones_place(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    host = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device=None: StandIn(device) if device == gpu else host())
    monkeypatch.setattr(random, "default_device", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "default_generators", (StandIn(gpu).manual_seed(1),))
    monkeypatch.setattr(StandIn, "is_captured", False)
    (default,), tracker = torch.cuda.default_generators, random.CudaRNGStatesTracker()
    for name, seed in (("a", 2), ("b", 3)):
        tracker.add(name, seed)
    generators, begin = tracker.generators(), tracker.get_states()
    StandIn.is_captured = True
    with pytest.raises(KeyError), tracker.fork("a"):
        assert default.draw() == (2, 1)
        with tracker.fork("b"):
            assert default.draw() == (3, 1)
        assert default.draw() == (2, 2)
        raise KeyError
    with tracker.fork("a"):
        assert default.draw() == (2, 3)
    assert default.draw() == (1, 1)
    StandIn.is_captured = False
    assert [states[1].tolist() for states in tracker.get_states().values()] == [[2, 3], [3, 1]]
    # A graph holds the state's memory: what a checkpoint brings must be written there.
    places = [generator.state.data_ptr() for generator in generators]
    tracker.set_states(begin)
    assert [generator.state.tolist() for generator in generators] == [[2, 0], [3, 0]]
    assert [generator.state.data_ptr() for generator in tracker.generators()] == places


def noisy(x: Tensor, weight: Tensor, shift: float) -> Tensor:
    """Draws from both streams and saves inner results."""
    with get_cuda_rng_tracker().fork():
        x = F.dropout(x, 0.5)
    return F.dropout(F.gelu(x * weight).exp(), 0.5) * shift


def through_checkpoint(x: Tensor, weight: Tensor, consumer: Tensor) -> Tensor:
    return checkpoint(noisy, False, x, weight, 2.0) @ consumer


def through_discarding(x: Tensor, weight: Tensor, consumer: Tensor) -> Tensor:
    part = CheckpointWithoutOutput()
    output = part.checkpoint(noisy, x, weight, 2.0)
    result = output @ consumer
    part.discard_output_and_register_recompute(result)
    assert not result.requires_grad or output.untyped_storage().nbytes() == 0
    return result


@pytest.mark.parametrize("through", [through_checkpoint, through_discarding])
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_the_second_run_draws_the_same_numbers(through: Any, frozen: tuple[int, ...]) -> None:
    def gradients(function: Any) -> list[Any]:
        model_parallel_cuda_manual_seed(9)
        tensors = [torch.randn(8, 8, requires_grad=index not in frozen) for index in range(3)]
        results = [function(*tensors) for _ in range(2)]  # both before the backward of either
        if len(frozen) < 3:
            sum(result.sum() for result in results).backward()
        with get_cuda_rng_tracker().fork():
            stream = torch.rand(2)
        return [*results, *(tensor.grad for tensor in tensors if tensor.grad is not None), stream, torch.rand(2)]

    plain = gradients(lambda x, weight, consumer: noisy(x, weight, 2.0) @ consumer)
    torch.testing.assert_close(gradients(through), plain, rtol=0, atol=0)


def test_an_output_that_nobody_discards_an_identity_and_a_second_backward() -> None:
    x = torch.randn(4, requires_grad=True)
    kept, same = CheckpointWithoutOutput(), CheckpointWithoutOutput()
    (kept.checkpoint(torch.exp, x) * 2).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().exp())
    output = same.checkpoint(lambda value: value, x) * 3
    same.discard_output_and_register_recompute(output)
    assert x.untyped_storage().nbytes() == x.nbytes
    twice = CheckpointWithoutOutput()
    result = twice.checkpoint(torch.exp, x).sum()
    result.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can run only once"):
        result.backward()
    with pytest.raises(ValueError, match="distribute_saved_activations is True"):
        checkpoint(torch.exp, True, x)
