"""Named random-number streams of a GPU, with mocks of its generators."""

import pytest
import torch
from torch import Tensor

from megatron.core.device import rng


class StandIn:
    """A mock of a GPU generator that refers to a state, which several generators may share."""

    is_captured = False

    def __init__(self, device: torch.device | None = None) -> None:
        self.device, self.state = device, torch.zeros(2, dtype=torch.uint8)  # seed and count of numbers drawn

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
    monkeypatch.setattr(rng, "default_device", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "default_generators", (StandIn(gpu).manual_seed(1),))
    monkeypatch.setattr(StandIn, "is_captured", False)
    (default,), tracker = torch.cuda.default_generators, rng.CudaRNGStatesTracker()
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
    # A graph refers to the state's memory, so loading a checkpoint must write into that memory.
    places = [generator.state.data_ptr() for generator in generators]
    tracker.set_states(begin)
    assert [generator.state.tolist() for generator in generators] == [[2, 0], [3, 0]]
    assert [generator.state.data_ptr() for generator in tracker.generators()] == places
